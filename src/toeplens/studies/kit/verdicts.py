"""Verdicts: how comparisons over trained models become holds, holds in part, fails, or stay open, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from toeplens.studies.kit.contrasts import GRAIN, Contrast, Values, of_one

# what can come of a claim
Verdict = Literal["holds", "holds in part", "fails", "leans to hold", "leans to fail", "undecided"]
OPEN: tuple[Verdict, ...] = ("leans to hold", "leans to fail", "undecided")
SIDES: dict[Verdict, int] = {"holds": 1, "holds in part": 1, "leans to hold": 1, "leans to fail": -1, "fails": -1}

ENOUGH = 5  # seeds that decide a verdict; with fewer it is only indicative
LEVEL = 0.05
# how a verdict is decided, for readers
RULE = (
    f"A comparison needs at least {ENOUGH} seeds. It holds if the 95% interval of its mean lies above the threshold, "
    f"fails if the interval lies below it, and is undecided otherwise. The interval is Student's, or Welch's for a "
    f"difference of two encodings. With fewer seeds a comparison holds or fails only indicatively, by the side of the "
    f"threshold on which the mean lies. A claim has essential and supporting parts. It fails if an essential part "
    f"fails. It holds if all essential parts hold, and holds in part if a supporting part fails, with or without the "
    f"correction. Otherwise it is open. Verdicts are corrected for all comparisons of the ledger (Holm): if there are "
    f"no effects and the noise is normal, the chance of any wrong verdict in the ledger is at most 5% per look. We "
    f"also measured the actual rate. Verdicts that differ without the correction are marked."
)


NONE_COUNTS = "no finished run qualifies"


@dataclass(frozen=True)
class Comparison:
    """A contrast and the bars between which it is to lie; one of them may be infinite."""

    seen: Contrast
    low: float
    high: float

    def chances(self) -> tuple[float, float]:
        """P-values against its lying outside (it holds), and against its lying between (it fails).

        It lies outside on one side only, so outside of two bars both sides share the error.
        """
        outside = [self.seen.below(self.low)] if np.isfinite(self.low) else []
        outside += [self.seen.above(self.high)] if np.isfinite(self.high) else []
        return max(self.seen.above(self.low), self.seen.below(self.high)), min(1.0, len(outside) * min(outside))

    def leaning(self) -> Verdict:
        """On which side of the bar the mean is, where there are too few seeds to decide."""
        lead = min(self.seen.value - self.low, self.high - self.seen.value)
        return "leans to hold" if lead > 0 else "leans to fail" if lead < 0 else "undecided"

    def wanting(self, to_hold: float = LEVEL, to_fail: float = LEVEL) -> str:
        """What would decide it, with the two-sided errors that are left to it where it holds and where it fails."""
        bar = min((self.low, self.high), key=lambda each: abs(self.seen.value - each))
        level = to_hold if self.low < self.seen.value < self.high else to_fail
        count = self.seen.seeds_to_decide(bar, level)
        if count is not None:
            counts = [str(len(values)) for _, values in self.seen.terms]
            if len(set(counts)) > 1:
                more = count / self.seen.seeds
                return f"about {more:.1f} times as many models at the same mean and spread (now {' and '.join(counts)})"
            return f"about {count} seeds at the same mean and spread (now {self.seen.seeds})"
        distance, error = abs(self.seen.value - bar), self.seen.error
        return f"many more seeds: the mean is {distance:.3f} from the threshold, with a standard error of {error:.3f}"


@dataclass(frozen=True)
class Finding:
    """One part of a claim: what was seen, and how it is decided.

    verdict    without correction
    evidence   the sentence that says why
    holds      p-value against the part being wrong; None where nothing is left to chance, or nothing is known
    fails      likewise against its being right
    essential  whether the claim falls with it; else it only supports it
    wanting    what would decide it, where it is open
    known      whether there was anything to see
    comparison  what was compared, where it was a mean over models
    sides      whether it may hold, and fail, by what its figures can show (`one_sided`)
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
        """The verdict with a two-sided error of ``level``, where it was left to chance at all."""
        if self.holds is None or self.fails is None:
            return self.verdict
        if self.holds <= level / 2:
            return "holds"
        return "fails" if self.fails <= level / 2 else "undecided"


# ---- parts -----------------------------------------------------------------------------------------------------------


def above(what: str, values: Values | Contrast, bar: float, *, unit: str = "", grain: float = GRAIN) -> Finding:
    """Is the mean of ``values`` (one a seed), or a `Contrast`, above ``bar``? Decided by `RULE`."""
    return within(what, values, bar, np.inf, unit=unit, grain=grain)


def below(what: str, values: Values | Contrast, bar: float, *, unit: str = "", grain: float = GRAIN) -> Finding:
    """Is the mean of ``values`` (one a seed), or a `Contrast`, below ``bar``? Decided by `RULE`."""
    return within(what, values, -np.inf, bar, unit=unit, grain=grain)


def within(
    what: str, values: Values | Contrast, low: float, high: float, *, unit: str = "", grain: float = GRAIN
) -> Finding:
    """Is the mean of ``values``, or a `Contrast`, between two bars? Decided by `RULE`; outside of one, it fails."""
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
        wanting = f"{ENOUGH} seeds (now {seen.seeds})"
        return Finding(comparison.leaning(), text, wanting=wanting, comparison=comparison)
    ends = seen.interval(LEVEL)
    counts = dict.fromkeys(str(len(each)) for _, each in seen.terms)
    text = f"{what}: {seen.value:.3f}{unit} [{ends[0]:.3f}, {ends[1]:.3f}] over {' and '.join(counts)} seeds, {bars}"
    finding = Finding("undecided", text, *comparison.chances(), wanting=comparison.wanting(), comparison=comparison)
    return replace(finding, verdict=finding.at(LEVEL))


def interval_above(what: str, value: float, low: float, high: float, bar: float) -> Finding:
    """Is a figure above ``bar``, by its own 95% interval? It holds if the interval lies above, fails if below.

    It has no p-value, so that a ledger's correction passes over it: for what is no mean over seeds.
    """
    text = f"{what}: {value:.3f} [{low:.3f}, {high:.3f}], threshold {bar:.3g}"
    return Finding("holds" if low > bar else "fails" if high < bar else "undecided", text)


def opposite(finding: Finding) -> Finding:
    """The finding on the opposite statement, on the same evidence."""
    turned: dict[Verdict, Verdict] = {
        "holds": "fails",
        "fails": "holds",
        "leans to hold": "leans to fail",
        "leans to fail": "leans to hold",
    }
    verdict = turned.get(finding.verdict, finding.verdict)
    return replace(finding, verdict=verdict, holds=finding.fails, fails=finding.holds)


def one_sided(finding: Finding, *, holds: bool, fails: bool, why: str) -> Finding:
    """The finding where figures are only known to be no less, or no more: on which sides it may still be decided."""
    if (holds and fails) or not finding.known:
        return finding
    verdict: Verdict = finding.verdict
    if (not holds and verdict.endswith(("holds", "hold"))) or (not fails and verdict.endswith(("fails", "fail"))):
        verdict = "undecided"
    chances = finding.holds, finding.fails
    if finding.holds is not None and finding.fails is not None:
        chances = finding.holds if holds else 1.0, finding.fails if fails else 1.0
    wanting = finding.wanting if verdict == finding.verdict else f"longer training of {why}"
    side = "fail" if holds else "hold" if fails else "be decided"
    evidence = f"{finding.evidence} (cannot {side} because of {why})"
    told: dict[str, Any] = {"verdict": verdict, "evidence": evidence, "wanting": wanting, "sides": (holds, fails)}
    return replace(finding, holds=chances[0], fails=chances[1], **told)


def agreed(first: Finding, second: Finding, beside: str) -> Finding:
    """One part that is decided where two ways to ask it are, alike.

    Arguments
        beside  what the second way is, in a few words, as it is told behind the first
    """
    evidence = f"{first.evidence}; {beside}: {second.evidence.rsplit(': ', 1)[-1]}"
    if not (first.known and second.known):
        open_ = first if not first.known else second
        return replace(open_, evidence=evidence, essential=first.essential)
    if None in (first.holds, second.holds, first.fails, second.fails):  # too few seeds, of one of them at least
        open_ = first if first.verdict in OPEN else second
        alike = SIDES.get(first.verdict) == SIDES.get(second.verdict)
        verdict = open_.verdict if alike else "undecided"
        return replace(open_, verdict=verdict, evidence=evidence, essential=first.essential)
    holds, fails = (max(pair) for pair in ((first.holds, second.holds), (first.fails, second.fails)))  # type: ignore[type-var]
    slower = max((first, second), key=lambda each: min(each.holds or 0.0, each.fails or 0.0))
    both = replace(first, holds=holds, fails=fails, evidence=evidence, wanting=slower.wanting)
    return replace(both, verdict=both.at(LEVEL), comparison=slower.comparison)


def supporting(finding: Finding) -> Finding:
    """The same as a part with which the claim does not fall."""
    return replace(finding, essential=False)


def unknown(what: str, why: str, wanting: str = "") -> Finding:
    """A part of which nothing can be said yet."""
    return Finding("undecided", f"{what}: {why}", wanting=wanting or why, known=False)


# ---- a claim ---------------------------------------------------------------------------------------------------------


def combine(findings: Sequence[Finding], level: float | None = None) -> Verdict:
    """One verdict from the parts of a claim, by `RULE`.

    Arguments
        level  the two-sided error that the claim as a whole may have; None: the plain verdict, each part at 5%
    """
    told = list(zip(findings, told_of(findings, level), strict=True))
    kinds = [verdict for finding, verdict in told if finding.essential]
    if "fails" in kinds:
        return "fails"
    if kinds and set(kinds) == {"holds"}:
        return "holds in part" if any("fails" in (verdict, finding.verdict) for finding, verdict in told) else "holds"
    if not kinds or "undecided" in kinds:
        return "undecided"
    return "leans to fail" if "leans to fail" in kinds else "leans to hold"


def told_of(findings: Sequence[Finding], level: float | None = None) -> list[Verdict]:
    """The verdict on each part of a claim, with the error ``level`` of the claim as a whole; None: the plain ones.

    To hold, all essential parts have to, so each may have the whole error; to fail, one part is enough, so that the
    essential ones share it, and so do the supporting ones.
    """
    if level is None:
        return [finding.verdict for finding in findings]
    shares = {kind: level / sharing([each for each in findings if each.essential is kind]) for kind in (True, False)}
    told: list[Verdict] = []
    for finding in findings:
        verdict = finding.at(level)
        told.append(verdict if verdict != "fails" else finding.at(shares[finding.essential]))
    return told


def chance(findings: Sequence[Finding]) -> float | None:
    """P-value of a claim, two-sided: that all its essential parts seem to hold, or one to fail, by chance alone.

    To hold, all have to, so the largest counts; to fail, one is enough, so the least counts times their number
    (Bonferroni). None where nothing is left to chance, or no essential part has enough seeds.
    """
    essential = [finding for finding in findings if finding.essential]
    left = [(finding.holds, finding.fails) for finding in essential if None not in (finding.holds, finding.fails)]
    if not left:
        return None
    sure = all(finding.verdict == "holds" for finding in essential if finding.holds is None)
    holds = max(holds or 0.0 for holds, _ in left) if sure else 1.0
    return min(1.0, 2 * min(holds, len(left) * min(fails or 0.0 for _, fails in left)))


def sharing(findings: Sequence[Finding]) -> int:
    """How many comparisons share an error; one at least."""
    return max(1, sum(finding.holds is not None for finding in findings))


def holm(chances: Sequence[float | None], level: float = LEVEL) -> list[float]:
    """The error that each claim may have so that all together have ``level`` (Holm 1979); `chance` of each is given.

    A claim that is decided at its error here is one that Holm's procedure rejects.
    """
    counted = sorted(value for value in chances if value is not None)
    errors, stop = [], len(counted)
    for place, value in enumerate(counted):
        errors.append(level / (len(counted) - place))
        if value > errors[-1]:
            stop = place
            break
    last = errors[-1] if errors else level
    by_value = dict(zip(counted[:stop], errors[:stop], strict=False))
    return [by_value.get(value, last) if value is not None else level for value in chances]
