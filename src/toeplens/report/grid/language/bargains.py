"""What an encoding buys and pays, in a sentence made from its figures by stated thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from toeplens.ground.words import fixed, listed
from toeplens.report.grid.look import Spread
from toeplens.studies.grid.language import LONG

LITTLE, MUCH = 0.01, 0.05  # bits a byte: less is nothing, more is much
FOUND = 0.2  # of needles: less is none
LARGER, SLOWER = 1.01, 1.1  # parameters over the fewest, and seconds over the fastest, from which they are a price
_FAR = f"{LONG:g} times the length"
_ALIKE = "no difference that the seeds tell apart"


@dataclass(frozen=True)
class Figures:
    """An encoding's numbers over its seeds; the fields are those of `toeplens.studies.grid.language.LanguageRow`."""

    title: str
    bits: Spread
    lost: Spread
    needle: Spread
    needle_long: Spread
    copied: Spread
    deposit: Spread
    seconds: Spread
    parameters: int


@dataclass(frozen=True)
class Bargain:
    """The two halves of a sentence."""

    buys: str
    pays: str


def bargains(every: Sequence[Figures]) -> list[Bargain]:
    """Of each encoding; they are compared with each other."""
    return [_bargain(one, every) for one in every]


def apart(one: Spread, other: Spread) -> bool:
    """Whether seeds tell two encodings apart: both have several, and their ranges do not overlap."""
    return one.count > 1 < other.count and (one.low > other.high or other.low > one.high)


def by_chance(seeds: int) -> float:
    """How often ranges of so many seeds each lie apart although nothing differs."""
    return 2 / comb(2 * seeds, seeds)


def _bargain(one: Figures, every: Sequence[Figures]) -> Bargain:
    bought, paid = _of_bits(one, every)
    for part in (_of_length, _of_needles, _of_copies, _of_cost):
        buys, pays = part(one, every)
        bought, paid = bought + buys, paid + pays
    return Bargain(_said(bought), _said(paid))


def _said(parts: Sequence[str]) -> str:
    return "; ".join(parts) if parts else "nothing that shows here"


_Halves = tuple[list[str], list[str]]


def _of_bits(one: Figures, every: Sequence[Figures]) -> _Halves:
    """Against the best, which is compared with all others."""
    best = min(every, key=lambda each: each.bits.mean)
    if len(every) == 1 or min(each.bits.count for each in every) < 2:
        return [], []
    if one is best:
        alike = [each.title for each in every if each is not best and not apart(best.bits, each.bits)]
        if alike:
            return [f"as few bits a byte as any ({_ALIKE} from {listed(alike)})"], []
        second = min((each for each in every if each is not best), key=lambda each: each.bits.mean)
        less = fixed(second.bits.mean - best.bits.mean, 3)
        return [f"the fewest bits a byte ({less} under {second.title})"], []
    if not apart(one.bits, best.bits):
        return [f"as few bits a byte as any ({_ALIKE} from {best.title})"], []
    more = one.bits.mean - best.bits.mean
    size = ", little" if more < LITTLE else ""
    return [], [f"{fixed(more, 3)} bits a byte over {best.title}{size}"]


def _of_length(one: Figures, every: Sequence[Figures]) -> _Halves:
    lost = one.lost
    if not lost.count:
        return [], [f"no reading of {_FAR}"]
    if lost.high < -LITTLE:
        return [f"longer contexts that help ({fixed(-lost.mean, 3)} bits a byte fewer at the end of {_FAR})"], []
    if lost.high < LITTLE:
        return [f"{_FAR} without loss"], []
    if lost.low > LITTLE:
        size = "" if lost.low > MUCH else ", little"
        return [], [f"{fixed(lost.mean, 3)} bits a byte at the end of {_FAR}{size}"]
    return [], [f"{fixed(lost.low, 3)} to {fixed(lost.high, 3)} bits a byte at the end of {_FAR}, as the seed has it"]


def _of_needles(one: Figures, every: Sequence[Figures]) -> _Halves:
    if not any(each.needle.count and each.needle.mean >= FOUND for each in every) or not one.needle.count:
        return [], []
    near = _per_cent(one.needle.mean)
    if one.needle.low < FOUND:
        return [], [f"needles not found at the training length ({near})"]
    if not one.needle_long.count:
        return [f"needles at the training length ({near})"], []
    far = _per_cent(one.needle_long.mean)
    if one.needle_long.low >= FOUND:
        return [f"needles at the training length ({near}) and at {_FAR} ({far})"], []
    return [f"needles at the training length ({near})"], [f"needles lost at {_FAR} ({far})"]


def _of_copies(one: Figures, every: Sequence[Figures]) -> _Halves:
    best = max((each for each in every if each.copied.count), key=lambda each: each.copied.mean, default=None)
    if best is None or not one.copied.count or len(every) == 1 or not apart(one.copied, best.copied):
        return [], []
    less = fixed(best.copied.mean - one.copied.mean)
    return [], [f"{less} bits a token less from an earlier copy than {best.title}"]


def _of_cost(one: Figures, every: Sequence[Figures]) -> _Halves:
    paid = []
    fewest = min(each.parameters for each in every)
    if one.parameters > LARGER * fewest:
        paid.append(f"{_per_cent(one.parameters / fewest - 1)} more parameters")
    timed = [each for each in every if each.seconds.count]
    fastest = min(timed, key=lambda each: each.seconds.mean, default=None)
    if fastest and one.seconds.count and apart(one.seconds, fastest.seconds):
        ratio = one.seconds.mean / fastest.seconds.mean
        if ratio > SLOWER:
            paid.append(f"{fixed(ratio, 1)} times the training time of {fastest.title}")
    return [], paid


def _per_cent(share: float) -> str:
    return f"{share:.0%}"
