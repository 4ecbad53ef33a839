"""Measures of a grid study's cells (heads, frequencies, longer sequences), and the table of all cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from toeplens.engine import LengthResult
from toeplens.ground.records import Record
from toeplens.lens.ablation import counted_drops
from toeplens.studies.grid.spec import Column, GridSpec
from toeplens.studies.kit.results import CellResult, Results, mean_of

LONGER = 1.5  # length for comparing extrapolation, in training lengths
_NEAR = 0.1  # tolerance of a factor, as lengths are whole numbers of tokens

Heads = Float[np.ndarray, "L H"]  # one value per head


def array(values: Any) -> np.ndarray:
    """Nested lists as an array, NaN for None."""
    return np.array(values, dtype=float)


def drops(cell: CellResult) -> Heads | None:
    """Accuracy drop of each head, 0 if not significant; None without an ablation."""
    return None if cell.ablation is None else counted_drops(cell.ablation)


def costs(cell: CellResult) -> Heads | None:
    """Ablation effect of each head on the loss in nats, 0 if not significant; None without an ablation.

    In a model with an accuracy near 100%, hardly any accuracy drop is significant.
    """
    return None if cell.by_loss is None else counted_drops(cell.by_loss)


def carried(cell: CellResult, share: str) -> float:
    """Mean of a share over the heads, weighted by ablation effect (`weighed`): how positional (symbolic) the heads are
    that the model's skill depends on."""
    found = cell.measure("behaviour")
    return float("nan") if found is None else weighed(cell, getattr(found, share))


def weighed(cell: CellResult, values: Heads) -> float:
    """Mean of values of the heads, weighted by ablation effect on the loss (`costs`).

    Heads with NaN are skipped; NaN if no head has an effect.
    """
    lost = costs(cell)
    if lost is None:
        return float("nan")
    weights = np.where(np.isnan(values), 0, lost)
    return float((weights * np.nan_to_num(values)).sum() / weights.sum()) if weights.sum() > 0 else float("nan")


def toeplitz(cell: CellResult) -> float:
    """The mean Toeplitz share of a cell's heads; NaN if not measured."""
    found = cell.measure("toeplitz")
    return float("nan") if found is None or np.isnan(found.share).all() else float(np.nanmean(found.share))


def at_length(cell: CellResult, factor: float) -> LengthResult | None:
    """The result at that multiple of the training length; None if there is none."""
    found = cell.measure("extrapolation")
    rows = [] if found is None else found.rows
    near = [row for row in rows if row.accuracy is not None and abs(row.factor - factor) < _NEAR]
    return min(near, key=lambda row: abs(row.factor - factor), default=None)


def skill_at(cell: CellResult, factor: float) -> float:
    """Skill at that length: accuracy above the length-only baseline, relative to the maximum possible gain."""
    row = at_length(cell, factor)
    if row is None or row.accuracy is None:
        return float("nan")
    guess = max(row.chance or 0.0, row.length_chance or 0.0)
    return (row.accuracy - guess) / (1 - guess)


def kept(cell: CellResult, factor: float = LONGER) -> float:
    """Skill on longer sequences relative to the training length; NaN for a model without skill."""
    return skill_at(cell, factor) / skill_at(cell, 1.0) if cell.skilled else float("nan")


@dataclass(frozen=True)
class Row(Record):
    """An encoding on a task. Values are means over the seeds that have one; None if none has."""

    task: str
    label: str
    title: str
    accuracy: float | None  # on the test set
    lowest: float | None  # of the seeds
    highest: float | None
    skill: float | None  # accuracy above the length-only baseline, relative to the maximum possible gain
    kept: float | None  # share of the skill that remains at `LONGER` times the training length
    positional: float | None  # share of the heads, weighted by ablation effect
    symbolic: float | None
    toeplitz: float | None  # mean Toeplitz share of the heads' logits
    peak: float | None  # largest accuracy drop by one head, relative to skill
    chance: float
    length_chance: float
    rule: str | None  # the best simple rule without a model
    rule_accuracy: float | None
    seeds: int  # finished models
    diverged: int  # how many of them diverged
    learning: int  # how many were still learning when training ended
    parameters: int  # of one model
    train_seconds: float | None


def matrix(spec: GridSpec, results: Results) -> list[Row]:
    """Every encoding on every task with finished models, in the order of the spec."""
    found = ((task, column, results.of(task, column.label)) for task in spec.tasks for column in spec.columns())
    return [_row(task, column, cells) for task, column, cells in found if cells]


def _row(task: str, column: Column, cells: Sequence[CellResult]) -> Row:
    finished = [cell for cell in cells if cell.status == "complete"]
    mean = partial(mean_of, finished)
    accuracies = [cell.accuracy for cell in finished]
    tables = [row.baselines for cell in finished if (row := at_length(cell, 1.0)) is not None]
    scores = {name: float(np.mean([table[name] for table in tables])) for name in tables[0]} if tables else {}
    rule = max(scores, key=lambda name: scores[name], default=None)  # on average over the seeds
    return Row(
        *(task, column.label, column.title),
        accuracy=mean(lambda cell: cell.accuracy),
        lowest=min(accuracies, default=None),
        highest=max(accuracies, default=None),
        skill=mean(lambda cell: cell.skill),
        kept=mean(kept),
        positional=mean(lambda cell: carried(cell, "positional")),
        symbolic=mean(lambda cell: carried(cell, "symbolic")),
        toeplitz=mean(toeplitz),
        peak=mean(lambda cell: cell.peak),
        chance=cells[0].chance,
        length_chance=cells[0].length_chance,
        rule=rule,
        rule_accuracy=scores.get(rule or ""),
        seeds=len(cells),
        diverged=len(cells) - len(finished),
        learning=sum(not cell.settled for cell in finished),
        parameters=cells[0].parameters,
        train_seconds=mean(lambda cell: cell.result["seconds"]),
    )
