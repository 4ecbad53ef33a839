"""What a study found: one row a cell, and the questions that tables and claims ask of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from toeplens.engine.kinds import as_record
from toeplens.ground.machine import MOST_SEEDS
from toeplens.ground.reading import Count, Positive, Share
from toeplens.ground.records import Like, Record
from toeplens.lens import (
    Estimate,
    HeadAblation,
    LayerDeposit,
    deposit,
    over_seeds,
)
from toeplens.model import Protocol

SKILLED = 0.25  # of what there is to learn: below it a model's heads say nothing about the task
ONLY_SKILLED = f"Only models with skill of at least {SKILLED:g} count."


Seeds = Annotated[int, Field(strict=True, ge=1, le=MOST_SEEDS)]


@dataclass(frozen=True)
class _Epoch(Record):
    train_accuracy: Share | None
    test_accuracy: Share | None


@dataclass(frozen=True)
class _Result(Record):
    test_accuracy: Share | None
    seconds: Positive


@dataclass(frozen=True, order=True)
class Key(Record):
    """Where a cell stands in a study's grid.

    protocol  ``paper`` or ``released``
    task      name of the task
    label     what the study calls the encoding
    seed
    """

    protocol: Protocol
    task: str
    label: str
    seed: Count


@dataclass(frozen=True)
class CellResult(Record):
    """A finished cell: its place, its run's figures, its ablation.

    measures  what else was measured of the trained model, by the name of the measure (`toeplens.engine.measures`)
    ablation  by accuracy; ``by_loss`` the same by loss
    watched   what was seen during training, a row a moment (`toeplens.training.watcher`); empty if it was not watched
    """

    WORDS = "results"
    LATER = ("measures", "watched", "by_loss")

    key: Key
    run: str
    status: Literal["complete", "diverged"]
    chance: Share
    length_chance: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, lt=1)]
    parameters: Count
    epochs: Annotated[list[dict[str, Any]], Like(list[_Epoch])]
    result: Annotated[dict[str, Any], Like(_Result)]
    ablation: HeadAblation | None
    measures: dict[str, dict[str, Any]] = field(default_factory=dict)
    watched: list[dict[str, Any]] = field(default_factory=list)
    by_loss: HeadAblation | None = None

    @property
    def accuracy(self) -> float:
        """Final test accuracy; NaN for a run that diverged."""
        return float("nan") if self.status == "diverged" else float(self.result["test_accuracy"])

    def mean_accuracy(self) -> float:
        """Mean test accuracy over the epochs, the area under the learning curve; NaN for a run that diverged."""
        return (
            float("nan") if self.status == "diverged" else float(np.mean([row["test_accuracy"] for row in self.epochs]))
        )

    @property
    def skill(self) -> float:
        """Test accuracy over the best guess from the length alone, as a share of what there is to learn."""
        return (self.accuracy - self.length_chance) / (1 - self.length_chance)

    @property
    def skilled(self) -> bool:
        """Whether the model has learned enough for its heads to say anything; a run that diverged has not."""
        return self.skill >= SKILLED

    @property
    def peak(self) -> float:
        """The largest loss by one head, as a share of the accuracy over chance; NaN without an ablation."""
        return max((layer.peak for layer in self.deposits()), default=float("nan"))

    def deposits(self) -> list[LayerDeposit]:
        """The deposit of each layer; empty without an ablation."""
        return self._deposits

    @cached_property
    def _deposits(self) -> list[LayerDeposit]:
        return deposit(self.ablation) if self.ablation else []

    def measure(self, name: str) -> Any:
        """A measure's record, read back once; None where it was not made, or the encoding has no such thing."""
        if name not in self._measured:
            content = self.measures.get(name)
            record = None if content is None else as_record(name, content, self.WORDS)
            self._measured[name] = None if isinstance(record, str) else record
        return self._measured[name]

    @cached_property
    def _measured(self) -> dict[str, Any]:
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON; the deposits are written out for readers, not read back."""
        return super().to_dict() | {"deposits": [asdict(layer) for layer in self.deposits()]}


class BySeed(dict[int, float]):
    """A figure of a study's models, by seed."""

    def __sub__(self, other: Mapping[int, float]) -> BySeed:
        """What is left in the seeds that both have."""
        return BySeed({seed: self[seed] - other[seed] for seed in sorted(self.keys() & other.keys())})


@dataclass(frozen=True)
class Figure:
    """A number of a model that is compared between models.

    words   what it is, before the models' names; nothing for the test accuracy
    of      the number
    counts  whether a model has one
    """

    words: str
    of: Callable[[CellResult], float]
    counts: Callable[[CellResult], bool] = lambda cell: True

    def by_seed(self, cells: Iterable[CellResult]) -> BySeed:
        """Of the cells that count, of which a seed has one at most."""
        return BySeed({cell.key.seed: self.of(cell) for cell in cells if self.counts(cell)})


ACCURACY = Figure("", lambda cell: cell.accuracy)


class Results:
    """The finished cells of a study."""

    def __init__(self, cells: Iterable[CellResult]) -> None:
        self.cells = sorted(cells, key=lambda cell: cell.key)

    def under(self, protocol: Protocol) -> Results:
        """The cells of one protocol."""
        return Results(cell for cell in self.cells if cell.key.protocol == protocol)

    def of(self, task: str, label: str) -> list[CellResult]:
        """The cells of a task and an encoding, by seed."""
        return [cell for cell in self.cells if (cell.key.task, cell.key.label) == (task, label)]

    def labels(self, task: str) -> list[str]:
        """The encodings of a task that have a finished cell."""
        return sorted({cell.key.label for cell in self.cells if cell.key.task == task})

    def accuracy(self, task: str, label: str) -> np.ndarray:
        """Final test accuracies, one a seed."""
        return np.array([cell.accuracy for cell in self.of(task, label)])

    def difference(self, task: str, first: str, second: str, figure: Figure | None = None) -> BySeed:
        """A figure, the test accuracy unless given, of ``first`` less that of ``second`` (same data, same order)."""
        first_by_seed, second_by_seed = ((figure or ACCURACY).by_seed(self.of(task, one)) for one in (first, second))
        return first_by_seed - second_by_seed


def estimated(values: Mapping[int, float]) -> Estimate | None:
    """Mean over seeds with Student's interval; None without a seed."""
    return over_seeds(np.array(list(values.values()))) if values else None
