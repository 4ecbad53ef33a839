"""What a study found: one row a cell, and the questions that tables and claims ask of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from toeplens.engine.head_watch import Watched
from toeplens.engine.measures import WHY, as_record
from toeplens.ground import choose
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
from toeplens.studies.kit.contrasts import GRAIN, Contrast, difference
from toeplens.studies.kit.frames import CellRow, EpochRow, HeadRow, LengthRow, Place, by_head, table

SKILLED = 0.25  # minimum skill of a model whose heads are analysed
ONLY_SKILLED = f"Only models with skill of at least {SKILLED:g} count."
STILL = 0.02
UNRULED = f"without a plateau rule: the last two evaluations differ by less than {100 * STILL:g} percentage points"


Seeds = Annotated[int, Field(strict=True, ge=1, le=MOST_SEEDS)]


def skill(accuracy: float, guess: float) -> float:
    """Accuracy over a guess, as a share of what there is to learn."""
    return (accuracy - guess) / (1 - guess)


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

    @property
    def settled(self) -> bool:
        """Whether the model has stopped learning, so that its final accuracy says something of its encoding.

        By its run's own rule (`toeplens.training.Plateau`); a run without one by `UNRULED`.
        """
        if self.status == "diverged":
            return False
        if "plateau" in self.result:
            return self.result["plateau"] is not None
        last = [float(row["test_accuracy"]) for row in self.epochs[-2:]]
        return len(last) > 1 and abs(last[-1] - last[0]) < STILL

    @property
    def fit(self) -> float:
        """Accuracy on training examples after the last epoch, without dropout; NaN where it was not measured."""
        value = self.result.get("fit_accuracy")
        return float("nan") if value is None or self.status == "diverged" else float(value)

    @property
    def half_learned(self) -> float:
        """Doublings of an epoch until half of what there is to learn of the training examples is learned.

        Between two evaluations the accuracy is taken to rise in a straight line, from the guess at the beginning; in
        a model that never learns half (`learned_half`), all its epochs count, which makes it look faster than it is.
        NaN for a run that diverged.
        """
        if self.status == "diverged" or not self.epochs:
            return float("nan")
        before, learned = 0.0, 0.0
        for epoch, skill in self._learning():
            if skill >= 0.5:
                part = (0.5 - learned) / (skill - learned)
                return float(np.log2(before + part * (epoch - before)))
            before, learned = epoch, max(0.0, skill)
        return float(np.log2(before))

    @property
    def learned_half(self) -> bool:
        """Whether half of what there is to learn of the training examples was learned at any evaluation."""
        return self.status != "diverged" and any(skill >= 0.5 for _, skill in self._learning())

    @property
    def looked_back(self) -> bool:
        """Whether training examples were looked at after evaluations, without dropout; older records did not."""
        return any(row.get("fit_accuracy") is not None for row in self.epochs)

    def _learning(self) -> Iterator[tuple[float, float]]:
        """Epochs done, and skill on training examples: after the evaluation where that was measured, else running."""
        for row in self.epochs:
            fit = row.get("fit_accuracy")
            accuracy = float(row["train_accuracy"] if fit is None else fit)
            yield float(row["epoch"]), skill(accuracy, self.length_chance)

    @property
    def setbacks(self) -> float:
        """Test accuracy lost on the way, all falls between evaluations of more than `STILL`; NaN if it diverged."""
        if self.status == "diverged":
            return float("nan")
        steps = np.diff([float(row["test_accuracy"]) for row in self.epochs])
        return float(-steps[steps < -STILL].sum())

    @property
    def skill(self) -> float:
        """Test accuracy over the best guess from the length alone, as a share of what there is to learn."""
        return skill(self.accuracy, self.length_chance)

    @property
    def skilled(self) -> bool:
        """Whether the model has learned enough for its heads to say anything; a run that diverged has not."""
        return self.skill >= SKILLED

    @property
    def peak(self) -> float:
        """The largest loss by one head, as a share of the skill; NaN without an ablation."""
        return max((layer.peak for layer in self.deposits()), default=float("nan"))

    def deposits(self) -> list[LayerDeposit]:
        """The deposit of each layer; empty without an ablation."""
        return self._deposits

    @cached_property
    def _deposits(self) -> list[LayerDeposit]:
        return deposit(self.ablation, self.length_chance) if self.ablation else []

    @cached_property
    def events(self) -> dict[str, Watched]:
        """What was seen at each moment that training waited for (`toeplens.engine.head_watch.MOMENTS`)."""
        rows = [Watched.from_dict(row, "watched") for row in self.watched if row.get("events")]
        return {event: row for row in reversed(rows) for event in row.events}

    def reason(self, name: str) -> str:
        """Why the encoding has no such measure; empty where it has, or was not measured."""
        return str(self.measures.get(name, {}).get(WHY, ""))

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

    @property
    def place(self) -> Place:
        """The first columns of a table's rows."""
        key = self.key
        return {"protocol": key.protocol, "task": key.task, "encoding": key.label, "seed": key.seed}

    def row(self) -> dict[str, Any]:
        """The cell in a table of all (`CellRow`)."""
        peaks = [layer.peak for layer in self.deposits()]
        top = int(np.argmax(peaks)) if peaks else None
        last = self.epochs[-1] if self.epochs else {}
        same = {name: name for name in ("steps", "seconds", "tokens_per_second", "fit_accuracy", "fit_loss")}
        told = {"loss": "test_loss", **same} if self.status == "complete" else {}
        row = {name: self.result.get(field) for name, field in told.items()}
        figures = ("run", "status", "settled", "accuracy", "chance", "skill", "half_learned", "setbacks", "parameters")
        row |= {name: getattr(self, name) for name in figures}
        row |= {"guess": self.length_chance, "epochs": last.get("epoch")}
        row |= {"peak": self.peak, "peak_layer": top, "peak_head": None if top is None else self.deposits()[top].head}
        return {**self.place, **row}

    def head_rows(self) -> Iterator[Mapping[str, Any]]:
        """Its heads, as far as anything was measured of them."""
        figures: dict[str, Any] = {}
        for name, found in (("drop", self.ablation), ("gain", self.by_loss)):
            if found is not None:
                figures |= {name: found.drops, f"{name}_low": found.low, f"{name}_high": found.high}
        for measure, fields in _OF_HEADS.items():
            found = self.measure(measure)
            if found is not None:
                figures |= {name: getattr(found, field) for name, field in fields.items()}
        yield from ({**self.place, **row} for row in by_head(**figures))

    def epoch_rows(self) -> Iterator[Mapping[str, Any]]:
        """Its evaluations during training."""
        yield from ({**self.place, **row} for row in self.epochs)

    def length_rows(self) -> Iterator[Mapping[str, Any]]:
        """The lengths of texts on which it was tested, as far as it read any of such a length."""
        tested, spoken = self.measure("extrapolation"), self.measure("bits")
        for row in () if tested is None else tested.rows:
            if row.examples:
                yield {**self.place, **asdict(row), "guess": row.length_chance}
        for row in () if spoken is None else spoken.lengths:
            if row.texts:
                bits = {"bits": row.whole.value, "sliding": row.sliding.value}
                yield {**self.place, "length": row.length, "factor": row.factor, "examples": row.texts, **bits}

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
    without why a model has none, in a few words
    wanted  what to run where no model has one, in a few words; nothing if ``without`` says it all
    grain   how exactly a model's number is known, see `toeplens.studies.kit.contrasts.Contrast`
    """

    words: str
    of: Callable[[CellResult], float]
    counts: Callable[[CellResult], bool] = lambda cell: True
    without: str = "no skill, or not measured"
    grain: float = GRAIN
    wanted: str = ""

    def by_seed(self, cells: Iterable[CellResult]) -> BySeed:
        """Of the cells that count, of which a seed has one at most."""
        return BySeed({cell.key.seed: self.of(cell) for cell in cells if self.counts(cell)})


_OF_HEADS = {  # measure: columns of a table of heads, and what they are called there
    "behaviour": {name: name for name in ("positional", "symbolic", "interaction")},
    "toeplitz": {"toeplitz": "share"},
    "frequency": {"centre": "centre"},
    "patterns": {name: name for name in ("previous", "first", "induction")},
}

ACCURACY = Figure(
    "",
    lambda cell: cell.accuracy,
    lambda cell: cell.settled or cell.status == "diverged",
    "still learning",
    wanted="longer training: models that have stopped learning",
)


_FRAMES: dict[str, tuple[type, Callable[[CellResult], Iterable[Mapping[str, Any]]]]] = {
    "cells": (CellRow, lambda cell: [cell.row()]),
    "heads": (HeadRow, CellResult.head_rows),
    "epochs": (EpochRow, CellResult.epoch_rows),
    "lengths": (LengthRow, CellResult.length_rows),
}
FRAMES = tuple(_FRAMES)


class Results:
    """The finished cells of a study, or those of one protocol."""

    def __init__(self, cells: Iterable[CellResult], protocol: Protocol | None = None) -> None:
        self.cells = sorted(cells, key=lambda cell: cell.key)
        self.protocol = protocol

    def under(self, protocol: Protocol) -> Results:
        """The cells of one protocol."""
        return Results((cell for cell in self.cells if cell.key.protocol == protocol), protocol)

    def of(self, task: str, label: str) -> list[CellResult]:
        """The cells of a task and an encoding, by seed."""
        return [cell for cell in self.cells if (cell.key.task, cell.key.label) == (task, label)]

    def labels(self, task: str) -> list[str]:
        """The encodings of a task that have a finished cell."""
        return sorted({cell.key.label for cell in self.cells if cell.key.task == task})

    def accuracy(self, task: str, label: str) -> np.ndarray:
        """Final test accuracies, one a seed."""
        return np.array([cell.accuracy for cell in self.of(task, label)])

    def difference(self, task: str, first: str, second: str, figure: Figure = ACCURACY) -> Contrast:
        """A figure's mean over the models of ``first`` less that over the models of ``second``."""
        found = difference(*(figure.by_seed(self.of(task, one)) for one in (first, second)), grain=figure.grain)
        none = [one for one in (first, second) if not self.of(task, one)]
        absent = f"no finished model of {' or '.join(none)} on {task}" if none else ""
        return replace(found, missing=absent or self.left_out(figure, task, first, second))

    def left_out(self, figure: Figure, task: str, *labels: str) -> str:
        """How many models do not count, and why: of each of two labels, or of many together; nothing if all do."""
        compared = [self.of(task, label) for label in dict.fromkeys(labels)]
        away = [(sum(not figure.counts(cell) for cell in cells), len(cells)) for cells in compared]
        missing = sum(some for some, _ in away)
        if len(away) > 2:
            away = [(missing, sum(count for _, count in away))]
        told = " and ".join(f"{some} of {count}" for some, count in away)
        return f"{told} models excluded: {figure.without}" if missing else ""

    def frame(self, rows: str = "cells") -> pa.Table:
        """The cells as an Arrow table, which pandas and polars take as it is (docs/how-to/export.md says its columns).

        rows  what a row is: a cell, a head of one (``heads``), an evaluation (``epochs``), a length of test texts
              (``lengths``); see `toeplens.studies.kit.frames`
        """
        kind, of = _FRAMES[choose("rows", rows, FRAMES)]
        return table(kind, (row for cell in self.cells for row in of(cell)))


def estimated(values: Mapping[int, float]) -> Estimate | None:
    """Mean over seeds with Student's interval; None without a seed."""
    return over_seeds(np.array(list(values.values()))) if values else None


def mean_of(cells: Iterable[CellResult], figure: Callable[[CellResult], float]) -> float | None:
    """A figure's mean over the models that have one; None where none has."""
    values = [value for cell in cells if np.isfinite(value := figure(cell))]
    return float(np.mean(values)) if values else None
