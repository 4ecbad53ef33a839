"""The report of a study: one self-contained HTML page, and its figures."""

from toeplens.report import figures
from toeplens.report.page import PAGE, render, write_page

__all__ = ["PAGE", "figures", "render", "write_page"]
