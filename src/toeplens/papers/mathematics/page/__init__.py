"""The page of the mathematics: statements with verdicts, and the figures behind them."""

from toeplens.papers.mathematics.page.page import render_theory, write_theory

__all__ = ["render_theory", "write_theory"]
