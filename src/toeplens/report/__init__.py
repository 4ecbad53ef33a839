"""Pages: the report of a study, self-contained, with its figures; the cards of encodings."""

from toeplens.report import figures
from toeplens.report.card import render_card, write_card, write_cards
from toeplens.report.page import PAGE, render, write_page

__all__ = ["PAGE", "figures", "render", "render_card", "write_card", "write_cards", "write_page"]
