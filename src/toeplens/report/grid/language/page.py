"""What the page of a grid study shows of its language models: figures, tables, and what of the rest is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toeplens.ground.words import fixed
from toeplens.report.grid.language import deposits, extensions, heads, lengths, planted, prices, reasons
from toeplens.report.grid.language.bargains import FOUND, LARGER, LITTLE, MUCH, SLOWER
from toeplens.report.grid.language.cells import language_tasks, only_language
from toeplens.report.kit.blocks import Block
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid
from toeplens.studies.grid import language as figures

MAKERS: tuple[Callable[[Grid], Block], ...] = (
    lengths.by_length,
    lengths.by_position,
    planted.needles,
    planted.copies,
    heads.kinds,
    deposits.position,
    deposits.without,
)
_THRESHOLDS = (
    f"Sentences are made from the numbers: a difference in bits is told where the ranges of the seeds lie apart, and "
    f"called little under {LITTLE:g} bits a byte; longer texts are read without loss where every seed loses under "
    f"{LITTLE:g}, with little loss up to {MUCH:g}; needles are found where every seed gives over "
    f"{FOUND:.0%} of the tokens; parameters are a price from {LARGER - 1:.0%} over the fewest, and time from "
    f"{SLOWER:g} times the fastest where the seeds’ ranges lie apart."
)


@dataclass(frozen=True)
class LanguageParts:
    """What the template shows; ``only`` says that the study asks of nothing else."""

    only: bool
    prices: list[prices.PriceTable]
    extensions: list[extensions.ExtensionTable]
    reasons: list[reasons.Reason]
    thresholds: str
    long: str


def parts(state: Grid) -> LanguageParts | None:
    """The tables; None for a study that asks of no language model."""
    if not language_tasks(state.spec):
        return None
    return LanguageParts(
        only_language(state.spec),
        prices.prices(state),
        extensions.extensions(state),
        reasons.reasons(state),
        _THRESHOLDS,
        f"{figures.LONG:g}",
    )


def of_model(cell: CellResult | None) -> dict[str, str]:
    """Of a language model, for the list of all models: bits a byte, and lost at the end of longer texts."""
    if cell is None or not figures.is_language(cell):
        return {}
    return {"bits": fixed(figures.bits(cell), 3), "lost": fixed(figures.lost(cell), 3)}
