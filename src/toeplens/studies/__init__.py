"""Studies: grids of runs, measures on them, tables, and claims with verdicts.

Each study has its own folder, which computes and never renders. Shared code is in ``kit``.
"""

from typing import TYPE_CHECKING

from toeplens.utils.lazy import lazy_getattr

if TYPE_CHECKING:
    from toeplens.studies.auditing import Audit, audit
    from toeplens.studies.kit.claims import Claim, LedgerEntry, MeanTest, judge, judge_all
    from toeplens.studies.kit.results import CellKey, CellResult, Results
    from toeplens.studies.kit.study import Cell
    from toeplens.studies.kit.verdicts import (
        MIN_SEEDS,
        RULE,
        Finding,
        Verdict,
        above,
        below,
        combine,
        interval_above,
        opposite,
        supporting,
        within,
    )

__all__ = [
    "MIN_SEEDS",
    "RULE",
    "Audit",
    "Cell",
    "CellKey",
    "CellResult",
    "Claim",
    "Finding",
    "LedgerEntry",
    "MeanTest",
    "Results",
    "Verdict",
    "above",
    "audit",
    "below",
    "combine",
    "interval_above",
    "judge",
    "judge_all",
    "opposite",
    "supporting",
    "within",
]
__getattr__ = lazy_getattr(__name__, __file__)
