"""The page of the reproduction: numbered figures, tables, sentences."""

from toeplens.papers.deposit.page.page import render, write_page

__all__ = ["render", "write_page"]
