"""Pages, self-contained, with their figures: studies, the mathematics, runs taken apart, the cards of encodings."""

from toeplens.report import figures
from toeplens.report.audit import render_audit, write_audit
from toeplens.report.audit_comparison import render_comparison, write_comparison
from toeplens.report.card import free_for_cards, render_card, write_card, write_cards
from toeplens.report.decomposition import render_structure, write_structure
from toeplens.report.grid import render_grid, write_grid
from toeplens.report.page import PAGE, render, write_page
from toeplens.report.theory import render_theory, write_theory

__all__ = [
    "PAGE",
    "figures",
    "free_for_cards",
    "render",
    "render_audit",
    "render_card",
    "render_comparison",
    "render_grid",
    "render_structure",
    "render_theory",
    "write_audit",
    "write_card",
    "write_cards",
    "write_comparison",
    "write_grid",
    "write_page",
    "write_structure",
    "write_theory",
]
