"""The tables of a grid study: what each encoding scores on each task, and what it does on longer texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.spec import Column, GridSpec
from toeplens.studies.kit.results import CellResult, Results


@dataclass(frozen=True)
class Row:
    """An encoding on a task. Figures are means over the seeds that have one; None where none has.

    accuracy, lowest, highest  test accuracy, and its range over seeds
    skill                      accuracy over the best guess from the length, as a share of what there is to learn
    kept                       share of the skill that is left at `heads.LONGER` times the training length
    positional, symbolic       shares of the heads, weighed by what is lost without each
    toeplitz                   mean Toeplitz share of the heads' logits
    peak                       largest loss by one head, as a share of the accuracy over chance
    rule, rule_accuracy        the best rule without a model, and what it scores
    seeds, diverged            finished models, and how many of them diverged
    parameters, train_seconds  of a model
    """

    task: str
    label: str
    title: str
    accuracy: float | None
    lowest: float | None
    highest: float | None
    skill: float | None
    kept: float | None
    positional: float | None
    symbolic: float | None
    toeplitz: float | None
    peak: float | None
    chance: float
    length_chance: float
    rule: str | None
    rule_accuracy: float | None
    seeds: int
    diverged: int
    parameters: int
    train_seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def matrix(spec: GridSpec, results: Results) -> list[Row]:
    """Every encoding on every task that has a finished model, in the spec's order."""
    found = ((task, column, results.of(task, column.label)) for task in spec.tasks for column in spec.columns())
    return [_row(task, column, cells) for task, column, cells in found if cells]


def _row(task: str, column: Column, cells: Sequence[CellResult]) -> Row:
    finished = [cell for cell in cells if cell.status == "complete"]

    def mean(figure: Callable[[CellResult], float]) -> float | None:
        values = np.array([figure(cell) for cell in finished], dtype=float)
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else None

    accuracies = [cell.accuracy for cell in finished]
    rule, rule_accuracy = _best_rule(finished)
    return Row(
        task=task,
        label=column.label,
        title=column.title,
        accuracy=mean(lambda cell: cell.accuracy),
        lowest=min(accuracies, default=None),
        highest=max(accuracies, default=None),
        skill=mean(lambda cell: cell.skill),
        kept=mean(heads.kept),
        positional=mean(lambda cell: heads.carried(cell, "positional")),
        symbolic=mean(lambda cell: heads.carried(cell, "symbolic")),
        toeplitz=mean(heads.toeplitz),
        peak=mean(lambda cell: cell.peak),
        chance=cells[0].chance,
        length_chance=cells[0].length_chance,
        rule=rule,
        rule_accuracy=rule_accuracy,
        seeds=len(cells),
        diverged=len(cells) - len(finished),
        parameters=cells[0].parameters,
        train_seconds=mean(lambda cell: cell.result["seconds"]),
    )


def _best_rule(cells: Sequence[CellResult]) -> tuple[str | None, float | None]:
    """The rule without a model that scores most, on average over the seeds."""
    tables = [row["baselines"] for cell in cells if (row := heads.at_length(cell, 1.0)) is not None]
    if not tables:
        return None, None
    scores = {name: float(np.mean([table[name] for table in tables])) for name in tables[0]}
    best = max(scores, key=lambda name: scores[name], default=None)
    return (None, None) if best is None else (best, scores[best])
