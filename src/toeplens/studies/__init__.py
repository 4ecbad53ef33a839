"""Studies: grids of runs, measures on them, tables, and claims with verdicts.

Each study has its own folder, which computes and never renders. Shared code is in ``kit``.
"""

from typing import TYPE_CHECKING

from toeplens.ground.lazy import lazy

if TYPE_CHECKING:
    from toeplens.studies.auditing import Audit, audit
    from toeplens.studies.kit.claims import Claim, Entry, Test, judge, judge_all
    from toeplens.studies.kit.results import CellResult, Key, Results
    from toeplens.studies.kit.study import Cell
    from toeplens.studies.kit.verdicts import (
        ENOUGH,
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
    "ENOUGH",
    "RULE",
    "Audit",
    "Cell",
    "CellResult",
    "Claim",
    "Entry",
    "Finding",
    "Key",
    "Results",
    "Test",
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
__getattr__ = lazy(__name__, __file__)
