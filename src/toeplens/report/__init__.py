"""Self-contained HTML pages with figures: grid studies, audits, decompositions of runs, cards of encodings.

Each page has a folder named after its study, which only renders and never computes. Shared code is in ``kit``.
"""

from typing import TYPE_CHECKING

from toeplens.ground.lazy import lazy

if TYPE_CHECKING:
    from toeplens.report.card import free_for_cards, render_card, write_card, write_cards
    from toeplens.report.comparison import comparison_page
    from toeplens.report.decomposition import render_structure, write_structure
    from toeplens.report.kit.page import PAGE
    from toeplens.report.page import Figure, Page, Section, write_report

__all__ = [
    "PAGE",
    "Figure",
    "Page",
    "Section",
    "comparison_page",
    "free_for_cards",
    "render_card",
    "render_structure",
    "write_card",
    "write_cards",
    "write_report",
    "write_structure",
]
__getattr__ = lazy(__name__, __file__)
