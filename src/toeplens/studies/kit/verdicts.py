"""Comparisons over trained models, with their intervals, and the verdicts on them: holds, in part, fails, or open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
from scipy.special import stdtr, stdtrit

from toeplens.lens import Estimate

# possible verdicts of a claim
Verdict = Literal["holds", "holds in part", "fails", "leans to hold", "leans to fail", "undecided"]
OPEN: tuple[Verdict, ...] = ("leans to hold", "leans to fail", "undecided")
SIDES: dict[Verdict, int] = {"holds": 1, "holds in part": 1, "leans to hold": 1, "leans to fail": -1, "fails": -1}

ENOUGH = 5  # seeds needed to decide a verdict; with fewer it is only indicative
LEVEL = 0.05
# the rule for verdicts, as text
RULE = (
    f"A comparison over at least {ENOUGH} seeds is decided by the 95% interval of its mean (Student's t; Welch's for "
    f"two encodings, whose models are not paired). It holds if the interval lies above the threshold, fails if it lies "
    f"below, and is undecided otherwise. With fewer seeds it stays open: it indicatively holds or indicatively fails, "
    f"by the side of the threshold on which the mean lies. A claim has essential and supporting parts. It fails if an "
    f"essential part fails, and holds if all essential parts hold (in part, if a supporting part fails, even if only "
    f"without correction). Otherwise it is open. Verdicts are corrected over all claims of the ledger (Holm): if "
    f"there are no effects and the noise is normal, the chance of any wrong verdict is at most 5% per look (the actual "
    f"rate is measured as well). The uncorrected verdict is also recorded."
)
NONE_COUNTS = "no finished run that counts"
Part = TypeVar("Part", bound=Any)


def verdict_text(verdict: str) -> str:
    """A verdict as it is printed; records and Python keep ``leans to hold`` and ``leans to fail``."""
    return {"leans to hold": "indicatively holds", "leans to fail": "indicatively fails"}.get(verdict, verdict)


# ---- contrasts: weighted sums of means over models ------------------------------------------------------------------

Values = Sequence[float] | Mapping[int, float] | np.ndarray  # one per seed, or by seed
GRAIN = 0.005
MOST_TIMES = 4  # suggest at most this multiple of the current number of models


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of means over models, such as one encoding's mean minus another's.

    Models of different terms are treated as independent (Welch). In the studies so far, sharing the examples of a seed
    did not correlate them, and pairing would halve the degrees of freedom. Terms may have different seeds.
    """

    terms: tuple[tuple[float, tuple[float, ...]], ...]  # weights, and values of the models
    grain: float = GRAIN  # minimum standard deviation of a model's value, such as a test accuracy's sampling error
    missing: str = ""  # how many models have no value, and why; empty if all have one

    @property
    def seeds(self) -> int:
        """The number of seeds of the smallest term."""
        return min(len(values) for _, values in self.terms)

    @property
    def known(self) -> bool:
        """Whether every model has a value."""
        return all(np.isfinite(values).all() for _, values in self.terms)

    @cached_property
    def value(self) -> float:
        """The weighted sum."""
        return float(sum(weight * np.mean(values) for weight, values in self.terms))

    @cached_property
    def _errors(self) -> np.ndarray:
        """Variance of the mean of each term; needs at least two models."""
        floor = self.grain**2
        return np.array([w**2 * (max(float(np.var(x, ddof=1)), floor) / len(x)) for w, x in self.terms])

    @cached_property
    def error(self) -> float:
        """Standard error; needs at least two models per term."""
        return float(np.sqrt(self._errors.sum()))

    @cached_property
    def freedom(self) -> float:
        """Degrees of freedom by Welch and Satterthwaite; with one term those of Student's t."""
        errors, counts = self._errors, np.array([len(values) for _, values in self.terms])
        total = errors.sum()
        return float(total**2 / (errors**2 / (counts - 1)).sum()) if total > 0 else float(counts.min() - 1)

    def interval(self, level: float) -> tuple[float, float]:
        """Interval with coverage 1 - ``level``."""
        half = float(stdtrit(self.freedom, 1 - level / 2)) * self.error
        return self.value - half, self.value + half

    def estimate(self, level: float = 0.05) -> Estimate:
        """The sum with its interval, which is unbounded if a term has only one model."""
        low, high = self.interval(level) if self.seeds > 1 else (-np.inf, np.inf)
        return Estimate(self.value, low, high, self.seeds)

    def above(self, bar: float) -> float:
        """P-value against the sum being at ``bar`` or below."""
        if not np.isfinite(bar):
            return float(bar > 0)
        lead = self.value - bar
        return float(lead <= 0) if self.error == 0 else float(stdtr(self.freedom, -lead / self.error))

    def below(self, bar: float) -> float:
        """P-value against the sum being at ``bar`` or above."""
        return contrast(*((-weight, values) for weight, values in self.terms), grain=self.grain).above(-bar)

    def seeds_to_decide(self, bar: float, level: float) -> int | None:
        """Seeds needed if mean and spread stay the same; None if more than `MOST_TIMES` times the current number."""
        distance = abs(self.value - bar)
        for count in range(self.seeds + 1, MOST_TIMES * self.seeds + 1):
            freedom = self.freedom * (count - 1) / (self.seeds - 1)
            if float(stdtrit(freedom, 1 - level / 2)) * self.error / (count / self.seeds) ** 0.5 < distance:
                return count
        return None


def contrast(*terms: tuple[float, Values], grain: float = GRAIN) -> Contrast:
    """A `Contrast` of weights and values, one per seed."""
    listed = ((w, values.values() if isinstance(values, Mapping) else values) for w, values in terms)
    return Contrast(tuple((weight, tuple(map(float, values))) for weight, values in listed), grain)


def of_one(values: Values, grain: float = GRAIN) -> Contrast:
    """The mean over one set of models."""
    return contrast((1.0, values), grain=grain)


def difference(first: Values, second: Values, grain: float = GRAIN) -> Contrast:
    """One mean minus another."""
    return contrast((1.0, first), (-1.0, second), grain=grain)


# ---- parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A contrast and the thresholds between which it should lie; one of them may be infinite."""

    seen: Contrast
    low: float
    high: float

    def chances(self) -> tuple[float, float]:
        """P-values against lying outside (small: holds), and against lying between the thresholds (small: fails).

        With two thresholds, both sides share the error.
        """
        outside = [self.seen.below(self.low)] if np.isfinite(self.low) else []
        outside += [self.seen.above(self.high)] if np.isfinite(self.high) else []
        return max(self.seen.above(self.low), self.seen.below(self.high)), min(1.0, len(outside) * min(outside))

    def wanting(self, to_hold: float = LEVEL, to_fail: float = LEVEL) -> str:
        """What would decide the comparison, given the two-sided errors for holding and for failing."""
        bar = min((self.low, self.high), key=lambda each: abs(self.seen.value - each))
        level = to_hold if self.low < self.seen.value < self.high else to_fail
        count = self.seen.seeds_to_decide(bar, level)
        if count is not None:
            counts = [str(len(values)) for _, values in self.seen.terms]
            if len(set(counts)) > 1:
                return (
                    f"about {count / self.seen.seeds:.1f} times as many models if mean and spread stay the same (now "
                    f"{' and '.join(counts)})"
                )
            return f"about {count} seeds if mean and spread stay the same (now {self.seen.seeds})"
        distance, error = abs(self.seen.value - bar), self.seen.error
        return f"far more seeds: the mean is {distance:.3f} from the threshold, with a standard error of {error:.3f}"


@dataclass(frozen=True)
class Finding:
    """The result for one part of a claim.

    verdict    verdict without correction
    evidence   the evidence, as a sentence
    holds      p-value against the part being wrong; None if nothing is left to chance, or nothing is known
    fails      p-value against the part being right; None likewise
    essential  whether the claim fails with this part; otherwise the part is supporting
    wanting    what would decide an open part
    known      whether there is any data
    comparison  the comparison, for a mean over models
    sides      whether the data can show that it holds, and that it fails (`one_sided`)
    """

    verdict: Verdict
    evidence: str
    holds: float | None = None
    fails: float | None = None
    essential: bool = True
    wanting: str = ""
    known: bool = True
    comparison: Comparison | None = None
    sides: tuple[bool, bool] = (True, True)

    def at(self, level: float) -> Verdict:
        """The verdict with a two-sided error of ``level``, if it depends on chance."""
        if self.holds is None or self.fails is None:
            return self.verdict
        if self.holds <= level / 2:
            return "holds"
        return "fails" if self.fails <= level / 2 else "undecided"


def above(what: str, values: Values | Contrast, bar: float, *, unit: str = "", grain: float = GRAIN) -> Finding:
    """Is the mean of ``values`` (one per seed), or a `Contrast`, above ``bar``? Decided by `RULE`."""
    return within(what, values, bar, np.inf, unit=unit, grain=grain)


def below(what: str, values: Values | Contrast, bar: float, *, unit: str = "", grain: float = GRAIN) -> Finding:
    """Is the mean of ``values`` (one per seed), or a `Contrast`, below ``bar``? Decided by `RULE`."""
    return within(what, values, -np.inf, bar, unit=unit, grain=grain)


def within(
    what: str, values: Values | Contrast, low: float, high: float, *, unit: str = "", grain: float = GRAIN
) -> Finding:
    """Is the mean of ``values``, or a `Contrast`, between two thresholds? Decided by `RULE`."""
    seen = values if isinstance(values, Contrast) else of_one(values, grain)
    if seen.seeds == 0:
        return unknown(what, NONE_COUNTS + (f" ({seen.missing})" if seen.missing else ""), NONE_COUNTS)
    if not seen.known:
        return unknown(what, "a run diverged or has no value")
    comparison = Comparison(seen, low, high)
    finite = [bar for bar in (low, high) if np.isfinite(bar)]
    bars = f"threshold{'s' if len(finite) > 1 else ''} {' to '.join(f'{bar:.3g}' for bar in finite)}"
    if seen.seeds < ENOUGH:
        many = f"{seen.seeds} seed{'s' if seen.seeds > 1 else ''}"
        text = f"{what}: {seen.value:.3f}{unit} ({many}), {bars}"
        lead = min(seen.value - low, high - seen.value)
        verdict: Verdict = "leans to hold" if lead > 0 else "leans to fail" if lead < 0 else "undecided"
        return Finding(verdict, text, wanting=f"{ENOUGH} seeds (now {seen.seeds})", comparison=comparison)
    ends = seen.interval(LEVEL)
    counts = dict.fromkeys(str(len(each)) for _, each in seen.terms)
    text = f"{what}: {seen.value:.3f}{unit} [{ends[0]:.3f}, {ends[1]:.3f}] over {' and '.join(counts)} seeds, {bars}"
    finding = Finding("undecided", text, *comparison.chances(), wanting=comparison.wanting(), comparison=comparison)
    return replace(finding, verdict=finding.at(LEVEL))


def interval_above(what: str, value: float, low: float, high: float, bar: float) -> Finding:
    """Is a value above ``bar``, by its own 95% interval? It holds if the interval lies above, fails if below.

    For values that are not means over seeds. Without a p-value, they are not part of the ledger's correction.
    """
    text = f"{what}: {value:.3f} [{low:.3f}, {high:.3f}], threshold {bar:.3g}"
    return Finding("holds" if low > bar else "fails" if high < bar else "undecided", text)


def opposite(finding: Finding) -> Finding:
    """The finding on the opposite statement, with the same evidence."""
    pairs: tuple[tuple[Verdict, Verdict], ...] = (("holds", "fails"), ("leans to hold", "leans to fail"))
    turned = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
    verdict = turned.get(finding.verdict, finding.verdict)
    return replace(finding, verdict=verdict, holds=finding.fails, fails=finding.holds)


def one_sided(finding: Finding, *, holds: bool, fails: bool, why: str) -> Finding:
    """The finding if values are only lower or upper bounds, so that it may only hold, or only fail."""
    if (holds and fails) or not finding.known:
        return finding
    verdict: Verdict = finding.verdict
    if (not holds and verdict.endswith(("holds", "hold"))) or (not fails and verdict.endswith(("fails", "fail"))):
        verdict = "undecided"
    known = finding.holds is not None and finding.fails is not None
    return replace(
        finding,
        verdict=verdict,
        evidence=f"{finding.evidence} ({why}, so it cannot {'fail' if holds else 'hold' if fails else 'be decided'})",
        holds=finding.holds if holds or not known else 1.0,
        fails=finding.fails if fails or not known else 1.0,
        wanting=finding.wanting if verdict == finding.verdict else f"longer training, for {why}",
        sides=(holds, fails),
    )


def agreed(first: Finding, second: Finding, beside: str) -> Finding:
    """A part that is decided only if two tests of it agree; ``beside`` names the second one in the evidence."""
    evidence = f"{first.evidence}; {beside}: {second.evidence.rsplit(': ', 1)[-1]}"
    if not (first.known and second.known):
        open_ = first if not first.known else second
        return replace(open_, evidence=evidence, essential=first.essential)
    if None in (first.holds, second.holds, first.fails, second.fails):  # too few seeds for at least one of them
        open_ = first if first.verdict in OPEN else second
        verdict = open_.verdict if SIDES.get(first.verdict) == SIDES.get(second.verdict) else "undecided"
        return replace(open_, verdict=verdict, evidence=evidence, essential=first.essential)
    holds, fails = (max(pair) for pair in ((first.holds, second.holds), (first.fails, second.fails)))  # type: ignore[type-var]
    slower = max((first, second), key=lambda each: min(each.holds or 0.0, each.fails or 0.0))
    both = replace(first, holds=holds, fails=fails, evidence=evidence, wanting=slower.wanting)
    return replace(both, verdict=both.at(LEVEL), comparison=slower.comparison)


def supporting(finding: Part) -> Part:
    """The finding, or the test (`toeplens.studies.kit.claims.Test`), as a supporting part."""
    return replace(finding, essential=False)


def unknown(what: str, why: str, wanting: str = "") -> Finding:
    """A part without data."""
    return Finding("undecided", f"{what}: {why}", wanting=wanting or why, known=False)


# ---- a claim ---------------------------------------------------------------------------------------------------------


def combine(findings: Sequence[Finding], level: float | None = None) -> Verdict:
    """One verdict from the parts of a claim, by `RULE`.

    Arguments
        level  two-sided error of the whole claim; None: the uncorrected verdict, with each part at 5%
    """
    told = list(zip(findings, told_of(findings, level), strict=True))
    kinds: set[Verdict] = {verdict for finding, verdict in told if finding.essential} or {"undecided"}
    if kinds == {"holds"}:
        return "holds in part" if any("fails" in (verdict, finding.verdict) for finding, verdict in told) else "holds"
    if "fails" in kinds:
        return "fails"
    if "undecided" in kinds:
        return "undecided"
    return "leans to fail" if "leans to fail" in kinds else "leans to hold"


def told_of(findings: Sequence[Finding], level: float | None = None) -> list[Verdict]:
    """The verdict on each part of a claim, with the error ``level`` of the whole claim; None: uncorrected verdicts.

    A claim holds only if all essential parts hold, so each part has the whole error. One failing part is enough to
    fail, so the essential parts share the error, and so do the supporting ones.
    """
    if level is None:
        return [finding.verdict for finding in findings]
    shares = {kind: level / sharing([each for each in findings if each.essential is kind]) for kind in (True, False)}
    return [
        verdict if (verdict := finding.at(level)) != "fails" else finding.at(shares[finding.essential])
        for finding in findings
    ]


def chance(findings: Sequence[Finding]) -> float | None:
    """Two-sided p-value of a claim: that all essential parts seem to hold, or one seems to fail, by chance.

    For holding, the largest p-value counts; for failing, the smallest times their number (Bonferroni). None if nothing
    is left to chance, or if no essential part has enough seeds.
    """
    essential = [finding for finding in findings if finding.essential]
    left = [(finding.holds, finding.fails) for finding in essential if None not in (finding.holds, finding.fails)]
    if not left:
        return None
    sure = all(finding.verdict == "holds" for finding in essential if finding.holds is None)
    holds = max(holds or 0.0 for holds, _ in left) if sure else 1.0
    return min(1.0, 2 * min(holds, len(left) * min(fails or 0.0 for _, fails in left)))


def sharing(findings: Sequence[Finding]) -> int:
    """The number of comparisons that share an error; at least 1."""
    return max(1, sum(finding.holds is not None for finding in findings))


def holm(chances: Sequence[float | None], level: float = LEVEL) -> list[float]:
    """The error of each claim such that all together have ``level`` (Holm 1979), from the `chance` of each.

    A claim is decided at its error exactly if Holm's procedure rejects it.
    """
    counted = sorted(value for value in chances if value is not None)
    by_value: dict[float, float] = {}
    last = level
    for place, value in enumerate(counted):
        last = level / (len(counted) - place)
        if value > last:
            break
        by_value[value] = last
    return [by_value.get(value, last) if value is not None else level for value in chances]
