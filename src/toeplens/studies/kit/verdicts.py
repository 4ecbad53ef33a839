"""Verdicts: how comparisons over seeds become holds, holds in part, fails, or undecided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from toeplens.lens import over_seeds

Verdict = Literal["holds", "holds in part", "fails", "undecided"]
Values = Sequence[float] | Mapping[int, float] | np.ndarray  # one a seed, or by seed

MIN_SEEDS = 3
DECISIVE = 0.10
RULE = (
    f"A comparison over {MIN_SEEDS} or more seeds is decided by the 95% Student interval of its mean: it holds if the "
    f"interval lies above the bar, fails if below, and is undecided else. With fewer seeds the spread between seeds is "
    f"unknown, and a comparison is decided only if every seed lies more than {DECISIVE:g} above or below the bar. "
    f"A claim of several parts holds if all hold, fails if all fail, holds in part if some hold and some fail, "
    f"and is undecided else."
)
COUNTED = (
    f"That a figure lies between two bars holds if both comparisons do, and fails if one fails. A yes-or-no property "
    f"of a model, whose threshold is in the claim's rule, is counted over the seeds: in all of them it holds, in none "
    f"it fails, in some it holds in part. That something occurs at all holds if one model shows it, and fails if none "
    f"of {MIN_SEEDS} or more does."
)


@dataclass(frozen=True)
class Finding:
    """One part of a claim: its verdict, and the sentence that says why."""

    verdict: Verdict
    evidence: str


def _listed(values: Values) -> np.ndarray:
    return np.array([*values.values()] if isinstance(values, Mapping) else values, dtype=float)


def above(what: str, values: Values, bar: float, *, unit: str = "") -> Finding:
    """Is ``values`` (one a seed) above ``bar``? Decided by `RULE`."""
    values = _listed(values)
    if len(values) == 0:
        return Finding("undecided", f"{what}: no finished run that counts")
    if not np.isfinite(values).all():
        return Finding("undecided", f"{what}: a run diverged or has no value")
    estimate = over_seeds(values)
    if len(values) >= MIN_SEEDS:
        low, high = estimate.low, estimate.high
        text = f"{what}: {estimate.value:.3f}{unit} [{low:.3f}, {high:.3f}] over {len(values)} seeds, bar {bar:.3g}"
        if low == high == bar:
            return Finding("undecided", text)
        return Finding("holds" if low > bar else "fails" if high < bar else "undecided", text)
    seeds = f"{len(values)} seed{'s' if len(values) > 1 else ''}"
    text = f"{what}: {', '.join(f'{v:.3f}{unit}' for v in values)} ({seeds}), bar {bar:.3g}"
    if (values > bar + DECISIVE).all():
        return Finding("holds", text)
    return Finding("fails" if (values < bar - DECISIVE).all() else "undecided", text)


def below(what: str, values: Values, bar: float, *, unit: str = "") -> Finding:
    """Is ``values`` (one a seed) below ``bar``? Decided by `RULE`."""
    return opposite(above(what, values, bar, unit=unit))


def within(what: str, values: Values, low: float, high: float) -> Finding:
    """Are ``values`` (one a seed) between two bars? Both decided by `RULE`; outside either, the statement fails."""
    values = _listed(values)
    parts = above(what, values, low), below(what, values, high)
    verdicts = {part.verdict for part in parts}
    text = parts[0].evidence + (f" to {high:.3g}" if np.size(values) and np.isfinite(values).all() else "")
    return Finding("fails" if "fails" in verdicts else "holds" if verdicts == {"holds"} else "undecided", text)


def interval_above(what: str, value: float, low: float, high: float, bar: float) -> Finding:
    """Is a figure above ``bar``, by its own 95% interval? It holds if the interval lies above, fails if below."""
    text = f"{what}: {value:.3f} [{low:.3f}, {high:.3f}], bar {bar:.3g}"
    return Finding("holds" if low > bar else "fails" if high < bar else "undecided", text)


def opposite(finding: Finding) -> Finding:
    """The finding on the opposite statement, on the same evidence."""
    swapped: dict[Verdict, Verdict] = {"holds": "fails", "fails": "holds"}
    return Finding(swapped.get(finding.verdict, finding.verdict), finding.evidence)


def seen(what: str, yes: Sequence[bool]) -> Finding:
    """Does a yes-or-no property hold for the model? In all seeds: holds; in none: fails; in some: holds in part.

    A property with a threshold of its own can be decided by one trained model, so one seed is enough here; how many
    there were is part of the evidence.
    """
    if len(yes) == 0:
        return Finding("undecided", f"{what}: no finished run that counts")
    count = sum(bool(y) for y in yes)
    text = f"{what}: in {count} of {len(yes)} seed{'s' if len(yes) > 1 else ''}"
    return Finding("holds" if count == len(yes) else "fails" if count == 0 else "holds in part", text)


def found(what: str, yes: Sequence[bool]) -> Finding:
    """Does a yes-or-no property ever occur? In one model: holds; in none of `MIN_SEEDS` or more: fails."""
    if len(yes) == 0:
        return Finding("undecided", f"{what}: no finished run that counts")
    count = sum(bool(y) for y in yes)
    text = f"{what}: in {count} of {len(yes)} model{'s' if len(yes) > 1 else ''}"
    return Finding("holds" if count else "fails" if len(yes) >= MIN_SEEDS else "undecided", text)


def combine(findings: Sequence[Finding]) -> Verdict:
    """One verdict from the parts of a claim, by `RULE`."""
    kinds: set[Verdict] = {finding.verdict for finding in findings}
    if not kinds:
        return "undecided"
    if len(kinds) == 1:
        return next(iter(kinds))
    if "holds in part" in kinds or {"holds", "fails"} <= kinds:
        return "holds in part"
    return "undecided"
