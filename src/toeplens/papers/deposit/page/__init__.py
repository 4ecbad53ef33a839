"""The page of the reproduction: numbered figures, tables, sentences."""

from toeplens.papers.deposit.page.page import render, reproduction_page, write_page

__all__ = ["render", "reproduction_page", "write_page"]
