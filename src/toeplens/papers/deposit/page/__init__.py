"""The reproduction page: numbered figures and tables."""

from toeplens.papers.deposit.page.page import render, reproduction_page, write_page

__all__ = ["render", "reproduction_page", "write_page"]
