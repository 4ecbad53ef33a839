"""Pages as data: a question, its answer, a picture, sections of charts and tables; one HTML file each.

A page only renders and never computes. ``results.page()`` gives the page of a study, audit, probe, decomposition or
card, and ``results.charts()`` its charts.
"""

from typing import TYPE_CHECKING

from toeplens.utils.lazy import lazy_getattr

if TYPE_CHECKING:
    from toeplens.report.card import check_cards_directory, write_cards
    from toeplens.report.comparison import comparison_page
    from toeplens.report.page import PAGE, Figure, Page, Section, write_report

__all__ = [
    "PAGE",
    "Figure",
    "Page",
    "Section",
    "check_cards_directory",
    "comparison_page",
    "write_cards",
    "write_report",
]
__getattr__ = lazy_getattr(__name__, __file__)
