"""The record of a bench: seconds of each program in each round, and what follows from them."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import ClassVar, Literal

from toeplens.ground import InputError
from toeplens.ground.reading import Number, Positive, Text, Truth
from toeplens.ground.records import AtLeast1, Record

TABLE_1 = 80 * 100 * 70_000 * 120  # tokens that 80 models, as many as arXiv 2505.13027's Table 1 has, see on Task 1


Work = Literal["asked", "equal", "trained"]


def not_negative(field: str, given: float | None) -> None:
    """Raise an `InputError` unless the number is finite and not below 0; None is nothing given."""
    if given is not None and not (math.isfinite(given) and given >= 0):
        raise InputError(f"{field}: {given:g} was given; it must be a finite number, 0 or more.")


@dataclass(frozen=True, kw_only=True)
class Timed(Record):
    """One program.

    name     how it is called
    ours     whether it is ours
    work     ``asked``: what is done unless something else is asked for; of ours also ``equal``, without what makes its
             work less, or more, than the others', and ``trained``, a step as the papers' models are trained
    flops    operations of a round's products with weights, as torch counts them; None where they were not counted
    seconds  of each round
    """

    LATER: ClassVar[tuple[str, ...]] = ("work", "flops")

    name: Text
    ours: Truth
    work: Work = "asked"
    flops: Positive | None = None
    seconds: list[Positive]

    def verify(self) -> None:
        if not self.seconds:
            raise ValueError("seconds: there must be one at least.")

    @property
    def median(self) -> float:
        """Seconds of a round."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Contest(Record):
    """Programs that answer the same question.

    kind    ``training``, ``ablation``, ``profile`` or ``audit``
    work    what is done, in words
    unit    what is counted: tokens, heads, logits
    count   how many a round
    apart   the largest difference between the programs' results, where these are comparable
    timed   ours first: that which is taken unless something else is asked for
    """

    kind: Text
    work: Text
    unit: Text
    count: AtLeast1
    apart: Positive | None = None
    timed: tuple[Timed, ...]

    def verify(self) -> None:
        if not self.timed or not self.timed[0].ours:
            raise ValueError("timed: the first must be ours.")

    def speed(self, timed: Timed) -> float:
        """Units a second, of the median round."""
        return self.count / timed.median

    def ratio(self, timed: Timed, beside: Timed | None = None) -> float:
        """How many times as long it takes as another, our first unless given: the median of the ratios in a round."""
        own = (beside or self.timed[0]).seconds
        return statistics.median(theirs / ours for ours, theirs in zip(own, timed.seconds, strict=True))

    @property
    def equal(self) -> Timed | None:
        """Ours, with work that is equal to the others'; None where ours as it is has that."""
        return next((each for each in self.timed if each.work == "equal"), None)

    @property
    def best_peer(self) -> Timed | None:
        """The fastest of those that are not ours."""
        return min((each for each in self.timed if not each.ours), key=lambda each: each.median, default=None)

    def beside_best(self) -> str | None:
        """How long the fastest other takes beside ours, and beside ours with equal work, in words."""
        peer, equal = self.best_peer, self.equal
        if peer is None:
            return None
        more = "" if equal is None else f", and {self.ratio(peer, equal):.2f} times that of {equal.name}"
        ratio = f"{self.ratio(peer):.2f} times the time of {self.timed[0].name}{more}"
        return f"{self.work.split(':')[0]}: {peer.name} takes {ratio}"


@dataclass(frozen=True, kw_only=True)
class BenchRecord(Record):
    """What was timed, on what.

    environment  versions and machine
    device       ``cpu`` or ``cuda``
    peak         operations a second of one large matrix product, in the dtype of the training contests
    missing      programs that are not installed
    """

    environment: dict[str, Text | Number | Truth | None]
    device: Text
    peak: Positive
    missing: tuple[Text, ...] = ()
    contests: tuple[Contest, ...]

    def share(self, contest: Contest, timed: Timed) -> float | None:
        """The part of the peak that its products with weights reach, all of its time counted."""
        return None if timed.flops is None else timed.flops / timed.median / self.peak

    def table_1_hours(self, price_per_hour: float | None = None) -> tuple[float, float | None] | None:
        """Hours, and price, of the papers' Table 1 at the speed of its models' step, dropout and all.

        None where that step was not timed.
        """
        not_negative("price_per_hour", price_per_hour)
        for contest in self.contests:
            trained = next((each for each in contest.timed if each.work == "trained"), None)
            if contest.kind == "training" and contest.work.startswith("paper") and trained is not None:
                hours = TABLE_1 / contest.speed(trained) / 3600
                return hours, None if price_per_hour is None else hours * price_per_hour
        return None
