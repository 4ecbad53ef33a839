"""The record of a bench: seconds of each program in each round, and what follows from them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from toeplens.ground.reading import Number, Positive, Text, Truth
from toeplens.ground.records import AtLeast1, Record

TABLE_1 = 80 * 100 * 70_000 * 120  # tokens that the 80 models of arXiv 2505.13027's Table 1 are trained on


@dataclass(frozen=True, kw_only=True)
class Timed(Record):
    """One program: its name, whether it is ours, and seconds of each round."""

    name: Text
    ours: Truth
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
    """Programs that do the same work.

    kind    ``training``, ``ablation`` or ``profile``
    work    what is done, in words
    unit    what is counted: tokens, heads, logits
    count   how many a round
    flops   of the matrix products of a round, at least; None where they differ
    apart   the largest difference between the programs' results, where these are comparable
    timed   ours first: that which is taken unless something else is asked for
    """

    kind: Text
    work: Text
    unit: Text
    count: AtLeast1
    flops: Positive | None = None
    apart: Positive | None = None
    timed: tuple[Timed, ...]

    def verify(self) -> None:
        if not self.timed or not self.timed[0].ours:
            raise ValueError("timed: the first must be ours.")

    def speed(self, timed: Timed) -> float:
        """Units a second, of the median round."""
        return self.count / timed.median

    def ratio(self, timed: Timed) -> float:
        """How many times as fast our first is: the median over rounds of the ratio within each."""
        own = self.timed[0].seconds
        return statistics.median(theirs / ours for ours, theirs in zip(own, timed.seconds, strict=True))

    @property
    def best_peer(self) -> Timed | None:
        """The fastest of those that are not ours."""
        return min((each for each in self.timed if not each.ours), key=lambda each: each.median, default=None)


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
        """The part of the peak that its matrix products reach, all of its time counted."""
        return None if contest.flops is None else contest.flops / timed.median / self.peak

    def table_1_hours(self, price_per_hour: float | None = None) -> tuple[float, float | None] | None:
        """Hours, and price, of the papers' Table 1 at the speed of the paper's shape; None if it was not timed."""
        for contest in self.contests:
            if contest.kind == "training" and contest.work.startswith("paper"):
                hours = TABLE_1 / contest.speed(contest.timed[0]) / 3600
                return hours, None if price_per_hour is None else hours * price_per_hour
        return None
