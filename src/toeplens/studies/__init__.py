"""Studies: a grid of runs, measures on them, tables, and claims with verdicts."""

from toeplens.studies.auditing import Audit, audit
from toeplens.studies.claims import Claim, Entry, judge, judge_all
from toeplens.studies.results import CellResult, Key, Results
from toeplens.studies.store import Cell, limits_for
from toeplens.studies.verdicts import (
    COUNTED,
    MIN_SEEDS,
    RULE,
    Finding,
    Verdict,
    above,
    below,
    combine,
    found,
    interval_above,
    opposite,
    seen,
    within,
)

__all__ = [
    "COUNTED",
    "MIN_SEEDS",
    "RULE",
    "Audit",
    "Cell",
    "CellResult",
    "Claim",
    "Entry",
    "Finding",
    "Key",
    "Results",
    "Verdict",
    "above",
    "audit",
    "below",
    "combine",
    "found",
    "interval_above",
    "judge",
    "judge_all",
    "limits_for",
    "opposite",
    "seen",
    "within",
]
