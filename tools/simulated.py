"""How often a ledger is wrong: its comparisons, simulated with known effects."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from toeplens.studies.kit.claims import LedgerEntry, adjust
from toeplens.studies.kit.verdicts import (
    MIN_SEEDS,
    OPEN_VERDICTS,
    Comparison,
    Contrast,
    Finding,
    Verdict,
    one_sided,
    within,
)

Shape = Literal["normal", "two-valued", "skewed", "as seen"]
Counts = Sequence[int]  # models of each term of a comparison; empty where it was not made
EFFECTS: dict[str, float] = {"nothing there": 0.0, "at the bar": 1.0, "twice the bar": 2.0}
_SPREAD = 0.05  # of a term with too few models to tell
_UNSCALED = 0.1  # what stands for a bar that is 0, where an effect has to have a size


def simulate(
    entries: Sequence[LedgerEntry],
    *,
    worlds: int = 200,
    effect: str = "nothing there",
    shape: Shape = "normal",
    earlier: Sequence[Sequence[LedgerEntry]] = (),
    seed: int = 0,
) -> dict[str, float]:
    """Judge a ledger in worlds in which every comparison's mean is a stated multiple of its bar.

    The mean is 0, the bar, or twice the bar; of two bars the one farther from 0 counts, and a bar at 0 is where
    "nothing there" and "at the bar" are the same. Spreads and numbers of models are those of the ledger's own data, at
    least `MIN_SEEDS` models a term. A comparison at its bar is neither true nor false, so that whatever is said of it
    is wrong. Models that several comparisons share are drawn once for all of them.

    Arguments
        entries  judged claims; those without any comparison of means are left out
        worlds   how many
        effect   a key of `EFFECTS`
        shape    of the noise: normal; two values, as of models that learn or do not; skewed as an exponential; as seen,
                 drawn from what the models themselves are off their mean
        earlier  the ledger at each look before the last, when it had fewer models: said wrongly is then what is wrong
                 at any look, and rightly what is right at the last

    Returns the shares of worlds in which the ledger has a wrong verdict: corrected, at ``any`` look or at the ``last``,
    and ``plain``, without correction, at any; and the share of claims and worlds decided as they are (``right``).
    """
    open_entries = [entry for entry in entries if any(part.comparison is not None for part in entry.findings)]
    size = EFFECTS[effect]
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, get_args(Shape).index(shape)))))
    before = [_at_earlier_look(open_entries, look) for look in earlier]
    truths = [
        _true_verdict([_true_part_verdict(part, size) for part in entry.findings if part.essential])
        for entry in open_entries
    ]
    right, wrong = 0, np.zeros((worlds, 3), dtype=bool)
    for world in range(worlds):
        noise = _Noise(shape, rng)
        samples = [tuple(_simulated_part(part, size, noise) for part in entry.findings) for entry in open_entries]
        few = [[_first_seeds(*each) for each in zip(samples, counts, strict=True)] for counts in before]
        looks = [adjust(result) for result in (*few, samples)]
        for index, truth in enumerate(truths):
            verdicts = [_label(look[index][0]) for look in looks]
            plain = [_label(look[index][1]) for look in looks]
            right += verdicts[-1] == truth
            wrong[world] |= [bool(set(each) - {"open", truth}) for each in (verdicts, verdicts[-1:], plain)]
    shares = dict(zip(("any_wrong", "last_wrong", "plain_any_wrong"), wrong.mean(0).tolist(), strict=True))
    return shares | {"right": round(right / worlds / len(truths), 4)}


def _label(verdict: Verdict) -> str:
    return "open" if verdict in OPEN_VERDICTS else "holds" if verdict.startswith("holds") else verdict


def _true_verdict(parts: Sequence[str]) -> str:
    """Of a claim: "fails" if an essential part is false, "holds" if all are true, else "at the bar"."""
    return "fails" if "fails" in parts else "holds" if set(parts) == {"holds"} else "at the bar"


def _true_part_verdict(part: Finding, size: float) -> str:
    if part.comparison is None:
        return part.verdict
    low, high, mean = part.comparison.low, part.comparison.high, _mean(part.comparison, size)
    if np.isclose(mean, low) or np.isclose(mean, high):
        return "at the bar"
    return "holds" if low < mean < high else "fails"


def _mean(comparison: Comparison, size: float) -> float:
    bar = max((end for end in (comparison.low, comparison.high) if np.isfinite(end)), key=abs)
    return size * bar if bar or size < 2 else _UNSCALED * (1 if np.isfinite(comparison.low) else -1)


class _Noise:
    """What models are off their mean in one world; the same models are as far off in every comparison.

    Models of a term are known by how their figures lie to each other, which skill and accuracy have the same. Where all
    of these are one number, as of encodings whose models all get all right, they are not: then each comparison has its
    own.
    """

    def __init__(self, shape: Shape, rng: np.random.Generator) -> None:
        self.shape: Shape = shape
        self.rng = rng
        self.drawn: dict[tuple[tuple[float, ...], bool], np.ndarray] = {}

    def of(self, values: tuple[float, ...], grain: float) -> np.ndarray:
        """At least `MIN_SEEDS` models, with a spread of no less than the grain."""
        count, spread = max(len(values), MIN_SEEDS), float(np.std(values, ddof=1)) if len(values) > 1 else _SPREAD
        if len(set(values)) < 2:
            return _NOISE[self.shape](self.rng, count) * max(spread, grain)
        lie = np.subtract(values, np.mean(values)) / spread
        as_observed = self.shape == "as seen" and spread > grain
        known = tuple(lie.round(6).tolist()), as_observed
        if known not in self.drawn:
            off = lie * (len(values) / (len(values) - 1)) ** 0.5
            self.drawn[known] = self.rng.choice(off, count) if as_observed else _NOISE[self.shape](self.rng, count)
        return self.drawn[known] * max(spread, grain)


def _simulated_part(part: Finding, size: float, noise: _Noise) -> Finding:
    if part.comparison is None:
        return part
    contrast, mean = part.comparison.mean, _mean(part.comparison, size)
    terms = []
    for place, (weight, values) in enumerate(contrast.terms):
        off = noise.of(values, contrast.grain)
        terms.append((weight, tuple((off + (mean / weight if place == 0 else 0.0)).tolist())))
    return _subset(part, Contrast(tuple(terms), contrast.grain))


def _at_earlier_look(asked: Sequence[LedgerEntry], look: Sequence[LedgerEntry]) -> list[list[Counts]]:
    """Of each claim's parts, the models that each term had at an earlier look."""
    had = {(entry.claim.id, entry.protocol): entry.findings for entry in look}
    result = []
    for entry in asked:
        parts = list(had.get((entry.claim.id, entry.protocol), ()))
        counts = []
        for finding in entry.findings:
            part = next((each for each in parts if _evidence_template(each) == _evidence_template(finding)), None)
            if part is not None:
                parts.remove(part)
            counts.append(_counts(part, finding))
        result.append(counts)
    return result


def _evidence_template(part: Finding) -> str:
    """The evidence of a part without the numbers and the excluded models."""
    return re.sub(
        r" \([^()]*(?:left out|excluded):[^()]*\)", "", re.split(r": (?=-?\d|no finished run)", part.evidence)[0]
    )


def _counts(part: Finding | None, now: Finding) -> Counts:
    had = part.comparison if part is not None else None
    if had is None or now.comparison is None or len(had.mean.terms) != len(now.comparison.mean.terms):
        return ()
    return [len(values) for _, values in had.mean.terms]


def _first_seeds(parts: Sequence[Finding], counts: Sequence[Counts]) -> tuple[Finding, ...]:
    """The parts by the first models of each term; undecided where there were none."""
    result = []
    for part, few in zip(parts, counts, strict=True):
        if part.comparison is not None:
            contrast = part.comparison.mean
            own = few or [0] * len(contrast.terms)
            terms = tuple((weight, values[:count]) for (weight, values), count in zip(contrast.terms, own, strict=True))
            part = _subset(part, Contrast(terms, contrast.grain))
        result.append(part)
    return tuple(result)


def _subset(part: Finding, seen: Contrast) -> Finding:
    assert part.comparison is not None
    result = replace(within("", seen, part.comparison.low, part.comparison.high), essential=part.essential)
    return one_sided(result, holds=part.sides[0], fails=part.sides[1], cause="")


_NOISE: dict[Shape, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, count: rng.standard_normal(count),
    "two-valued": lambda rng, count: rng.choice([-1.0, 1.0], count),
    "skewed": lambda rng, count: rng.standard_exponential(count) - 1,
    "as seen": lambda rng, count: rng.standard_normal(count),  # of models that are all alike
}
