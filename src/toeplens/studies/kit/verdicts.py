"""Comparisons over trained models, with their intervals, and the verdicts on them: holds, in part, fails, or open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
from scipy.special import stdtr, stdtrit

from toeplens.lens import Estimate
from toeplens.utils.renamed import renamed

# possible verdicts of a claim
Verdict = Literal["holds", "holds in part", "fails", "leans to hold", "leans to fail", "undecided"]
OPEN_VERDICTS: tuple[Verdict, ...] = ("leans to hold", "leans to fail", "undecided")
SIGNS: dict[Verdict, int] = {"holds": 1, "holds in part": 1, "leans to hold": 1, "leans to fail": -1, "fails": -1}

MIN_SEEDS = 5  # seeds needed to decide a verdict; with fewer it is only indicative
LEVEL = 0.05
# the rule for verdicts, as text
RULE = (
    f"A comparison over at least {MIN_SEEDS} seeds is decided by the 95% interval of its mean (Student's t; Welch's "
    f"for two encodings, whose models are not paired). It holds if the interval lies above the threshold, fails if it "
    f"lies below, and is undecided otherwise. With fewer seeds it stays open: it indicatively holds or indicatively "
    f"fails, by the side of the threshold on which the mean lies. A claim has essential and supporting parts. It fails "
    f"if an essential part fails, and holds if all essential parts hold (in part, if a supporting part fails, even if "
    f"only without correction). Otherwise it is open. Verdicts are corrected over all claims of the ledger (Holm): if "
    f"there are no effects and the noise is normal, the chance of any wrong verdict is at most 5% per look (the actual "
    f"rate is measured as well). The uncorrected verdict is also recorded."
)
NO_RUNS = "no finished run that counts"
Part = TypeVar("Part", bound=Any)


def verdict_text(verdict: str) -> str:
    """A verdict as it is printed; records and Python keep ``leans to hold`` and ``leans to fail``."""
    return {"leans to hold": "indicatively holds", "leans to fail": "indicatively fails"}.get(verdict, verdict)


# ---- contrasts: weighted sums of means over models ------------------------------------------------------------------

Values = Sequence[float] | Mapping[int, float] | np.ndarray  # one per seed, or by seed
GRAIN = 0.005
MAX_FACTOR = 4  # suggest at most this multiple of the current number of models


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of means over models, such as one encoding's mean minus another's.

    Models of different terms are treated as independent (Welch). In the studies so far, sharing the examples of a seed
    did not correlate them, and pairing would halve the degrees of freedom. Terms may have different seeds.
    """

    terms: tuple[tuple[float, tuple[float, ...]], ...]  # weights, and values of the models
    grain: float = GRAIN  # minimum standard deviation of a model's value, such as a test accuracy's sampling error
    missing: str = ""  # how many models have no value, and why; empty if all have one
    units: str = "seeds"  # what there is one value of

    @property
    def seeds(self) -> int:
        """The number of seeds of the smallest term."""
        return min(len(values) for _, values in self.terms)

    @property
    def has_values(self) -> bool:
        """Whether every model has a value."""
        return all(np.isfinite(values).all() for _, values in self.terms)

    @cached_property
    def value(self) -> float:
        """The weighted sum."""
        return float(sum(weight * np.mean(values) for weight, values in self.terms))

    @cached_property
    def _variances(self) -> np.ndarray:
        """Variance of the mean of each term; needs at least two models."""
        floor = self.grain**2
        return np.array([w**2 * (max(float(np.var(x, ddof=1)), floor) / len(x)) for w, x in self.terms])

    @cached_property
    def error(self) -> float:
        """Standard error; needs at least two models per term."""
        return float(np.sqrt(self._variances.sum()))

    @cached_property
    def dof(self) -> float:
        """Degrees of freedom by Welch and Satterthwaite; with one term those of Student's t."""
        variances, counts = self._variances, np.array([len(values) for _, values in self.terms])
        total = variances.sum()
        return float(total**2 / (variances**2 / (counts - 1)).sum()) if total > 0 else float(counts.min() - 1)

    def interval(self, level: float) -> tuple[float, float]:
        """Interval with coverage 1 - ``level``."""
        half = float(stdtrit(self.dof, 1 - level / 2)) * self.error
        return self.value - half, self.value + half

    def estimate(self, level: float = 0.05) -> Estimate:
        """The sum with its interval, which is unbounded if a term has only one model."""
        low, high = self.interval(level) if self.seeds > 1 else (-np.inf, np.inf)
        return Estimate(self.value, low, high, self.seeds)

    def p_above(self, threshold: float) -> float:
        """P-value against the sum being at ``threshold`` or below."""
        if not np.isfinite(threshold):
            return float(threshold > 0)
        margin = self.value - threshold
        return float(margin <= 0) if self.error == 0 else float(stdtr(self.dof, -margin / self.error))

    def p_below(self, threshold: float) -> float:
        """P-value against the sum being at ``threshold`` or above."""
        return contrast(*((-weight, values) for weight, values in self.terms), grain=self.grain).p_above(-threshold)

    def seeds_to_decide(self, threshold: float, level: float) -> int | None:
        """Seeds needed if mean and spread stay the same; None if more than `MAX_FACTOR` times the current number."""
        distance = abs(self.value - threshold)
        for count in range(self.seeds + 1, MAX_FACTOR * self.seeds + 1):
            dof = self.dof * (count - 1) / (self.seeds - 1)
            if float(stdtrit(dof, 1 - level / 2)) * self.error / (count / self.seeds) ** 0.5 < distance:
                return count
        return None


def contrast(*terms: tuple[float, Values], grain: float = GRAIN) -> Contrast:
    """A `Contrast` of weights and values, one per seed."""
    listed = ((w, values.values() if isinstance(values, Mapping) else values) for w, values in terms)
    return Contrast(tuple((weight, tuple(map(float, values))) for weight, values in listed), grain)


def mean_contrast(values: Values, grain: float = GRAIN) -> Contrast:
    """The mean over one set of models."""
    return contrast((1.0, values), grain=grain)


def difference(first: Values, second: Values, grain: float = GRAIN) -> Contrast:
    """One mean minus another."""
    return contrast((1.0, first), (-1.0, second), grain=grain)


# ---- parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A contrast and the thresholds between which it should lie; one of them may be infinite."""

    mean: Contrast
    low: float
    high: float

    def p_values(self) -> tuple[float, float]:
        """P-values against lying outside (small: holds), and against lying between the thresholds (small: fails).

        With two thresholds, both sides share the error.
        """
        outside = [self.mean.p_below(self.low)] if np.isfinite(self.low) else []
        outside += [self.mean.p_above(self.high)] if np.isfinite(self.high) else []
        return max(self.mean.p_above(self.low), self.mean.p_below(self.high)), min(1.0, len(outside) * min(outside))

    def missing(self, to_hold: float = LEVEL, to_fail: float = LEVEL) -> str:
        """What would decide the comparison, given the two-sided errors for holding and for failing."""
        threshold = min((self.low, self.high), key=lambda bound: abs(self.mean.value - bound))
        level = to_hold if self.low < self.mean.value < self.high else to_fail
        count = self.mean.seeds_to_decide(threshold, level)
        if count is not None:
            counts = [str(len(values)) for _, values in self.mean.terms]
            if len(set(counts)) > 1:
                return (
                    f"about {count / self.mean.seeds:.1f} times as many models if mean and spread stay the same (now "
                    f"{' and '.join(counts)})"
                )
            return f"about {count} {self.mean.units} if mean and spread stay the same (now {self.mean.seeds})"
        distance, error = abs(self.mean.value - threshold), self.mean.error
        margin = f"the mean is {distance:.3f} from the threshold, with a standard error of {error:.3f}"
        return f"far more {self.mean.units}: {margin}"


@dataclass(frozen=True)
class Finding:
    """The result for one part of a claim.

    verdict     verdict without correction
    evidence    the evidence, as a sentence
    holds       p-value against the part being wrong; None if nothing is left to chance, or nothing is known
    fails       p-value against the part being right; None likewise
    essential   whether the claim fails with this part; otherwise the part is supporting
    missing     what would decide an open part
    has_data    whether there is any data
    comparison  the comparison, for a mean over models
    sides       whether the data can show that it holds, and that it fails (`one_sided`)
    extremes    the worst and the best finding if the models that are still learning counted; None if all models count
    """

    verdict: Verdict
    evidence: str
    holds: float | None = None
    fails: float | None = None
    essential: bool = True
    missing: str = ""
    has_data: bool = True
    comparison: Comparison | None = None
    sides: tuple[bool, bool] = (True, True)
    extremes: tuple[Finding, Finding] | None = None

    def verdict_at(self, level: float) -> Verdict:
        """The verdict with a two-sided error of ``level``, if it depends on chance."""
        if self.holds is None or self.fails is None:
            return self.verdict
        if self.holds <= level / 2:
            return "holds"
        return "fails" if self.fails <= level / 2 else "undecided"


@renamed
def above(
    what: str,
    values: Values | Contrast,
    threshold: float,
    *,
    unit: str = "",
    grain: float = GRAIN,
    units: str = "seeds",
) -> Finding:
    """Is the mean of ``values`` (one per seed), or a `Contrast`, above ``threshold``? Options as in `within`."""
    return within(what, values, threshold, np.inf, unit=unit, grain=grain, units=units)


@renamed
def below(
    what: str,
    values: Values | Contrast,
    threshold: float,
    *,
    unit: str = "",
    grain: float = GRAIN,
    units: str = "seeds",
) -> Finding:
    """Is the mean of ``values`` (one per seed), or a `Contrast`, below ``threshold``? Options as in `within`."""
    return within(what, values, -np.inf, threshold, unit=unit, grain=grain, units=units)


def within(
    what: str,
    values: Values | Contrast,
    low: float,
    high: float,
    *,
    unit: str = "",
    grain: float = GRAIN,
    units: str = "seeds",
) -> Finding:
    """Is the mean of ``values``, or a `Contrast`, between two thresholds? Decided by `RULE`.

    With two thresholds it fails if the 97.5% interval lies outside, as both sides share the error.

    Arguments
        unit   of the values, for the evidence
        grain  minimum standard deviation of a value
        units  what there is one value of
    """
    mean = values if isinstance(values, Contrast) else replace(mean_contrast(values, grain), units=units)
    if mean.seeds == 0:
        return unknown_finding(what, NO_RUNS + (f" ({mean.missing})" if mean.missing else ""), NO_RUNS)
    if not mean.has_values:
        return unknown_finding(what, "a run diverged or has no value")
    comparison = Comparison(mean, low, high)
    finite = [bound for bound in (low, high) if np.isfinite(bound)]
    limits = f"threshold{'s' if len(finite) > 1 else ''} {' to '.join(f'{bound:.3g}' for bound in finite)}"
    if mean.seeds < MIN_SEEDS:
        seeds_text = f"{mean.seeds} {mean.units if mean.seeds > 1 else mean.units[:-1]}"
        text = f"{what}: {mean.value:.3f}{unit} ({seeds_text}), {limits}"
        margin = min(mean.value - low, high - mean.value)
        verdict: Verdict = "leans to hold" if margin > 0 else "leans to fail" if margin < 0 else "undecided"
        return Finding(verdict, text, missing=f"{MIN_SEEDS} {mean.units} (now {mean.seeds})", comparison=comparison)
    ends = mean.interval(LEVEL)
    counts = dict.fromkeys(str(len(samples)) for _, samples in mean.terms)
    over = f"{' and '.join(counts)} {mean.units}"
    text = f"{what}: {mean.value:.3f}{unit} [{ends[0]:.3f}, {ends[1]:.3f}] over {over}, {limits}"
    finding = Finding("undecided", text, *comparison.p_values(), missing=comparison.missing(), comparison=comparison)
    return replace(finding, verdict=finding.verdict_at(LEVEL))


def interval_above(what: str, value: float, low: float, high: float, threshold: float) -> Finding:
    """Is a value above ``threshold``, by its own 95% interval? It holds if the interval lies above, fails if below.

    For values that are not means over seeds. Without a p-value, they are not part of the ledger's correction.
    """
    text = f"{what}: {value:.3f} [{low:.3f}, {high:.3f}], threshold {threshold:.3g}"
    return Finding("holds" if low > threshold else "fails" if high < threshold else "undecided", text)


def opposite(finding: Finding) -> Finding:
    """The finding on the opposite statement, with the same evidence."""
    pairs: tuple[tuple[Verdict, Verdict], ...] = (("holds", "fails"), ("leans to hold", "leans to fail"))
    swapped = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
    verdict = swapped.get(finding.verdict, finding.verdict)
    return replace(finding, verdict=verdict, holds=finding.fails, fails=finding.holds)


def one_sided(finding: Finding, *, holds: bool, fails: bool, cause: str) -> Finding:
    """The finding if values are only lower or upper bounds, so that it may only hold, or only fail."""
    if (holds and fails) or not finding.has_data:
        return finding
    verdict: Verdict = finding.verdict
    if (not holds and verdict.endswith(("holds", "hold"))) or (not fails and verdict.endswith(("fails", "fail"))):
        verdict = "undecided"
    has_p_values = finding.holds is not None and finding.fails is not None
    return replace(
        finding,
        verdict=verdict,
        evidence=f"{finding.evidence} ({cause}, so it cannot {'fail' if holds else 'hold' if fails else 'be decided'})",
        holds=finding.holds if holds or not has_p_values else 1.0,
        fails=finding.fails if fails or not has_p_values else 1.0,
        missing=finding.missing if verdict == finding.verdict else f"longer training, for {cause}",
        sides=(holds, fails),
    )


def combine_agreeing(first: Finding, second: Finding, second_name: str) -> Finding:
    """A part that is decided only if two tests of it agree; ``second_name`` names the second one in the evidence."""
    evidence = f"{first.evidence}; {second_name}: {second.evidence.rsplit(': ', 1)[-1]}"
    if not (first.has_data and second.has_data):
        open_ = first if not first.has_data else second
        return replace(open_, evidence=evidence, essential=first.essential)
    if None in (first.holds, second.holds, first.fails, second.fails):  # too few seeds for at least one of them
        open_ = first if first.verdict in OPEN_VERDICTS else second
        verdict = open_.verdict if SIGNS.get(first.verdict) == SIGNS.get(second.verdict) else "undecided"
        return replace(open_, verdict=verdict, evidence=evidence, essential=first.essential)
    holds, fails = (max(pair) for pair in ((first.holds, second.holds), (first.fails, second.fails)))  # type: ignore[type-var]
    weaker = max((first, second), key=lambda finding: min(finding.holds or 0.0, finding.fails or 0.0))
    both = replace(first, holds=holds, fails=fails, evidence=evidence, missing=weaker.missing)
    return replace(both, verdict=both.verdict_at(LEVEL), comparison=weaker.comparison)


def worst_and_best(findings: Sequence[Finding]) -> tuple[Finding, Finding]:
    """The finding that supports its statement least, and the one that supports it most."""

    def support(finding: Finding) -> tuple[int, float]:
        doubt = 0.5 if finding.holds is None or finding.fails is None else finding.holds - finding.fails
        return SIGNS.get(finding.verdict, 0), -doubt

    return min(findings, key=support), max(findings, key=support)


def supporting(finding: Part) -> Part:
    """The finding, or the test (`toeplens.studies.kit.claims.MeanTest`), as a supporting part."""
    return replace(finding, essential=False)


def unknown_finding(what: str, reason: str, wanting: str = "") -> Finding:
    """A part without data."""
    return Finding("undecided", f"{what}: {reason}", missing=wanting or reason, has_data=False)


# ---- a claim ---------------------------------------------------------------------------------------------------------


def combine(findings: Sequence[Finding], level: float | None = None) -> Verdict:
    """One verdict from the parts of a claim, by `RULE`.

    Arguments
        level  two-sided error of the whole claim; None: the uncorrected verdict, with each part at 5%
    """
    pairs = list(zip(findings, part_verdicts(findings, level), strict=True))
    kinds: set[Verdict] = {verdict for finding, verdict in pairs if finding.essential} or {"undecided"}
    if kinds == {"holds"}:
        return "holds in part" if any("fails" in (verdict, finding.verdict) for finding, verdict in pairs) else "holds"
    if "fails" in kinds:
        return "fails"
    if "undecided" in kinds:
        return "undecided"
    return "leans to fail" if "leans to fail" in kinds else "leans to hold"


def part_verdicts(findings: Sequence[Finding], level: float | None = None) -> list[Verdict]:
    """The verdict on each part of a claim, with the error ``level`` of the whole claim; None: uncorrected verdicts.

    A claim holds only if all essential parts hold, so each part has the whole error. One failing part is enough to
    fail, so the essential parts share the error, and so do the supporting ones.
    """
    if level is None:
        return [finding.verdict for finding in findings]
    shares = {kind: level / num_tests([part for part in findings if part.essential is kind]) for kind in (True, False)}
    return [
        verdict if (verdict := finding.verdict_at(level)) != "fails" else finding.verdict_at(shares[finding.essential])
        for finding in findings
    ]


def claim_p_value(findings: Sequence[Finding]) -> float | None:
    """Two-sided p-value of a claim: that all essential parts seem to hold, or one seems to fail, by chance.

    For holding, the largest p-value counts; for failing, the smallest times their number (Bonferroni). None if nothing
    is left to chance, or if no essential part has enough seeds.
    """
    essential = [finding for finding in findings if finding.essential]
    p_values = [(finding.holds, finding.fails) for finding in essential if None not in (finding.holds, finding.fails)]
    if not p_values:
        return None
    can_hold = all(finding.verdict == "holds" for finding in essential if finding.holds is None)
    holds = max(holds or 0.0 for holds, _ in p_values) if can_hold else 1.0
    return min(1.0, 2 * min(holds, len(p_values) * min(fails or 0.0 for _, fails in p_values)))


def num_tests(findings: Sequence[Finding]) -> int:
    """The number of comparisons that share an error; at least 1."""
    return max(1, sum(finding.holds is not None for finding in findings))


def holm(p_values: Sequence[float | None], level: float = LEVEL) -> list[float]:
    """The error of each claim such that all together have ``level`` (Holm 1979), from the `claim_p_value` of each.

    A claim is decided at its error exactly if Holm's procedure rejects it.
    """
    ordered = sorted(value for value in p_values if value is not None)
    by_value: dict[float, float] = {}
    error = level
    for rank, value in enumerate(ordered):
        error = level / (len(ordered) - rank)
        if value > error:
            break
        by_value[value] = error
    return [by_value.get(value, error) if value is not None else level for value in p_values]
