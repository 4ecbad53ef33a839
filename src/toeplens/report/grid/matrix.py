"""A grid study's tables: the matrix of accuracies, what each encoding costs, and every model."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from toeplens.ground.words import percent
from toeplens.report.grid.look import Spread, encoding_looks
from toeplens.report.kit.plane import Look
from toeplens.studies import Cell, CellResult
from toeplens.studies.grid import Grid, Row, cells
from toeplens.studies.grid import measured as heads

_DEEPEST = 55  # per cent of the tint under a full cell: letters stay readable on it in either scheme
_NONE = "–"


@dataclass(frozen=True)
class MatrixCell:
    """An entry of the matrix.

    mean   test accuracy in per cent, over the seeds that did not diverge; empty where there is none
    range  smallest and largest; empty with one seed
    note   what else is to be said: how many diverged, or why there is no number
    skill  mean over seeds, what the colour shows; None without a number
    """

    mean: str = ""
    range: str = ""
    note: str = ""
    skill: float | None = None

    @property
    def side(self) -> str:
        """Whether it is above what a guess from the length scores, for its colour."""
        return "" if self.skill is None else "less" if self.skill < 0 else "more"

    @property
    def depth(self) -> str:
        """How deep its colour is."""
        return "0%" if self.skill is None else f"{_DEEPEST * min(1.0, abs(self.skill)):.0f}%"


@dataclass(frozen=True)
class MatrixRow:
    """A task: every encoding, what guesses score, and the simple rule that scores most (its note names it)."""

    title: str
    chance: str
    length: str
    simple: MatrixCell
    cells: list[MatrixCell]


def matrix(state: Grid) -> list[MatrixRow]:
    """Test accuracy of each task and encoding, means over seeds; columns of a scan are left out."""
    tasks = {column.label: column.tasks for column in state.spec.columns()}
    found = {(row.task, row.label): row for row in state.matrix()}
    rows = []
    for task in state.spec.tasks:
        mine = [row for (of, _), row in found.items() if of == task]
        most = max(mine, key=lambda row: row.seeds - row.diverged, default=None)
        rows.append(
            MatrixRow(
                state.spec.title_of(task),
                percent(most.chance if most else None, sign=False),
                percent(most.length_chance if most else None, sign=False),
                _rule(most),
                [
                    _entry(found.get((task, label)), state.spec.seeds) if task in tasks[label] else MatrixCell()
                    for label in encoding_looks(state.spec)
                ],
            )
        )
    return rows


def _entry(row: Row | None, planned: int) -> MatrixCell:
    if row is None:
        return MatrixCell(note=_NONE)
    count = row.seeds - row.diverged
    if not count:
        return MatrixCell(note="diverged" if row.seeds == 1 else f"all {row.seeds} diverged")
    notes = [f"{row.diverged} diverged"] if row.diverged else []
    if row.learning:
        notes.append(f"{row.learning}/{count} still learning")
    if row.seeds < planned:
        notes.append(f"{row.seeds}/{planned} seeds")
    ends = (percent(end, sign=False).replace("100.0", "100") for end in (row.lowest, row.highest))  # columns are narrow
    span = "–".join(ends) if count > 1 else ""
    return MatrixCell(percent(row.accuracy, sign=False), span, ", ".join(notes), row.skill)


def _rule(row: Row | None) -> MatrixCell:
    """The best rule without a model, as the encoding with most finished models has it."""
    if row is None or row.rule is None or row.rule_accuracy is None:
        return MatrixCell(note=_NONE)
    skill = (row.rule_accuracy - row.length_chance) / (1 - row.length_chance)
    return MatrixCell(percent(row.rule_accuracy, sign=False), note=row.rule, skill=skill)


@dataclass(frozen=True)
class CostRow:
    """What an encoding costs, and how Toeplitz its logits are: means over tasks, as words.

    models    how many were counted
    relative  training time over that of the first encoding, on the tasks of both
    """

    look: Look
    models: int
    parameters: str
    seconds: str
    relative: str
    toeplitz: str


def costs(state: Grid) -> list[CostRow]:
    """A line an encoding that has a finished model; scans are left out."""
    looks, found = encoding_looks(state.spec), state.matrix()
    first = {row.task: row.train_seconds for row in found if row.label == next(iter(looks), None)}
    made = []
    for label, one in looks.items():
        rows = [row for row in found if row.label == label and row.seeds > row.diverged]
        if rows:
            sizes = [row.parameters for row in rows]
            logs = [
                np.log(row.train_seconds / other)
                for row in rows
                if row.train_seconds and (other := first.get(row.task))
            ]
            made.append(
                CostRow(
                    one,
                    sum(row.seeds - row.diverged for row in rows),
                    f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,}–{max(sizes):,}",
                    Spread.of(row.train_seconds for row in rows).told(1),
                    f"{np.exp(np.mean(logs)):.2f}" if logs else _NONE,
                    Spread.of(row.toeplitz for row in rows).told(1, percent=True),
                )
            )
    return made


def models(state: Grid) -> list[tuple[Cell, str, CellResult | None, dict[str, float]]]:
    """Every model of the grid, scans too: its place, its encoding's title, its result if it is finished, its figures.

    The figures, where there are any: accuracy, skill, and the shares of what the skill rests on.
    """
    done = {cell.key: cell for cell in state.results.cells}
    titles = {column.label: column.title for column in state.spec.columns()}
    return [
        (place, titles[place.key.label], found := done.get(place.key), _figures(found)) for place in cells(state.spec)
    ]


def _figures(cell: CellResult | None) -> dict[str, float]:
    if cell is None:
        return {}
    carried = {share: heads.carried(cell, share) for share in _CARRIED} if cell.skilled else {}
    return {"accuracy": cell.accuracy, "skill": cell.skill} | carried


_CARRIED = ("positional", "symbolic")


def skilled(state: Grid) -> int:
    """How many finished models have learned enough for their heads to say anything."""
    return sum(cell.skilled for cell in state.results.cells if isfinite(cell.accuracy))
