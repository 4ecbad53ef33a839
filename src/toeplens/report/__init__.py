"""Self-contained HTML pages with figures: grid studies, audits, decompositions of runs, cards of encodings.

Each page has a folder named after its study, which only renders and never computes. Shared code is in ``kit``.
"""

from typing import TYPE_CHECKING

from toeplens.ground.lazy import lazy

if TYPE_CHECKING:
    from toeplens.report.auditing.comparison import render_comparison, write_comparison
    from toeplens.report.auditing.page import render_audit, write_audit
    from toeplens.report.card import free_for_cards, render_card, write_card, write_cards
    from toeplens.report.decomposition import render_structure, write_structure
    from toeplens.report.grid.page import render_grid, write_grid
    from toeplens.report.kit.page import PAGE
    from toeplens.report.probing.page import render_probe, write_probe

__all__ = [
    "PAGE",
    "free_for_cards",
    "render_audit",
    "render_card",
    "render_comparison",
    "render_grid",
    "render_probe",
    "render_structure",
    "write_audit",
    "write_card",
    "write_cards",
    "write_comparison",
    "write_grid",
    "write_probe",
    "write_structure",
]
__getattr__ = lazy(__name__, __file__)
