"""What each encoding of a language study buys and what it costs: a table, best first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from toeplens.engine.language import Bits
from toeplens.ground.words import fixed, percent, signed
from toeplens.report.grid.language.bargains import FOUND, Bargain, Figures, bargains, by_chance
from toeplens.report.grid.language.cells import language_tasks, record
from toeplens.report.grid.look import Spread, encoding_looks, finished
from toeplens.report.kit.colours import OTHER
from toeplens.report.kit.plane import Look
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid
from toeplens.studies.grid import language as figures
from toeplens.studies.grid.language import LanguageRow

_FIGURES: dict[str, Callable[[CellResult], float]] = {
    "bits": figures.bits,
    "lost": figures.lost,
    "needle": lambda cell: figures.retrieved(cell, 1.0),
    "needle_long": lambda cell: figures.retrieved(cell, figures.LONG),
    "copied": lambda cell: figures.copied(cell, figures.NEAR),
    "deposit": figures.deposit,
    "seconds": lambda cell: float(cell.result["seconds"]),
}


@dataclass(frozen=True)
class Price:
    """A line of the table, in words."""

    look: Look
    seeds: int
    bits: str
    range: str
    lost: str
    lost_range: str
    needle: str
    needle_long: str
    copied: str
    deposit: str
    parameters: str
    relative: str
    bargain: Bargain


@dataclass(frozen=True)
class PriceTable:
    """The encodings of a task, best first.

    title   of the task, where there are several
    ngrams  order and bits a byte of models that count, on the same texts; none where they were not fitted
    notes   what else has to be said
    """

    title: str
    rows: list[Price]
    ngrams: list[tuple[str, str]]
    notes: list[str]


def rows_of(state: Grid, task: str) -> list[LanguageRow]:
    """The encodings of one task, best first."""
    return [row for row in figures.language_rows(state.spec, state.results) if row.task == task]


def prices(state: Grid) -> list[PriceTable]:
    """A table a task that has a measured language model."""
    tasks = language_tasks(state.spec)
    titles = {task: state.spec.title_of(task) if len(tasks) > 1 else "" for task in tasks}
    return [_table(state, task, title, rows) for task, title in titles.items() if (rows := rows_of(state, task))]


def _table(state: Grid, task: str, title: str, rows: list[LanguageRow]) -> PriceTable:
    looks = encoding_looks(state.spec)
    cells = {row.label: [c for c in finished(state, task, row.label) if figures.is_language(c)] for row in rows}
    every = [_figures(row, cells[row.label]) for row in rows]
    fastest = min((row.seconds for row in rows if row.seconds), default=None)
    made = [
        Price(
            look=looks.get(row.label) or Look(row.label, row.title, *OTHER),
            seeds=row.seeds,
            bits=fixed(row.bits, 3),
            range=_range(one.bits, 3),
            lost=signed(row.lost, 3),
            lost_range=_range(one.lost, 3),
            needle=percent(row.needle),
            needle_long=percent(row.needle_long),
            copied=fixed(row.copied, 2),
            deposit=percent(row.deposit),
            parameters=f"{row.parameters:,}",
            relative=fixed(row.seconds / fastest if row.seconds and fastest else None),
            bargain=bargain,
        )
        for row, one, bargain in zip(rows, every, bargains(every), strict=True)
    ]
    return PriceTable(title, made, _ngrams([cell for each in cells.values() for cell in each]), _notes(every))


def _figures(row: LanguageRow, cells: list[CellResult]) -> Figures:
    return Figures(
        title=row.title,
        parameters=row.parameters,
        **{name: Spread.of(figure(cell) for cell in cells) for name, figure in _FIGURES.items()},
    )


def _range(spread: Spread, digits: int) -> str:
    return f"{fixed(spread.low, digits)} to {fixed(spread.high, digits)}" if spread.count > 1 else ""


def _ngrams(cells: list[CellResult]) -> list[tuple[str, str]]:
    tables = [found.ngrams for cell in cells if (found := record(cell, "bits", Bits)) and found.ngrams]
    orders = sorted({order for table in tables for order in table}, key=int)
    means = [(order, float(np.mean([table[order] for table in tables if order in table]))) for order in orders]
    return [(order, fixed(mean, 3)) for order, mean in means]


def _notes(every: list[Figures]) -> list[str]:
    seeds = min(one.bits.count for one in every)
    notes = []
    if len(every) > 1 and seeds < 2:
        notes.append("With one seed, nothing tells a difference in bits or time from chance, and none is told below.")
    elif len(every) > 1:
        notes.append(
            f"Ranges of {seeds} seeds each lie apart by chance alone in {by_chance(seeds):.0%} of comparisons, of "
            "which there are many here: what the seeds tell apart is a hint, and the claims are what is decided."
        )
    found = [one.needle for one in every if one.needle.count]
    if found and all(spread.mean < FOUND for spread in found):
        notes.append(
            f"No encoding finds needles at the training length (all under {FOUND:.0%}), so of that nothing is told "
            "below."
        )
    return notes
