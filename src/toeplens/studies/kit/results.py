"""Results of a study, one per cell, the values that claims compare, and their Arrow tables."""

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
from toeplens.ground.records import Count, Positive, Record, Share, like
from toeplens.lens import Estimate, HeadAblation, LayerDeposit, deposit, over_seeds
from toeplens.model import Protocol
from toeplens.studies.kit.frames import schema, table
from toeplens.studies.kit.verdicts import GRAIN, Contrast, difference

SKILLED = 0.25  # minimum skill of models whose heads are evaluated
ONLY_SKILLED = f"Only models with a skill of at least {SKILLED:g} count."
STILL = 0.02
UNRULED = f"without a stopping rule: the last two evaluations differ by less than {100 * STILL:g} points"
Seeds = Annotated[int, Field(strict=True, ge=1, le=MOST_SEEDS)]


_PLACE = "protocol:text task:text encoding:text seed:count"
# a row is a model, a head of a model, an evaluation during training, a test length, a rotary pair of a head, a head
# at a checkpoint, a claim under a protocol
CELLS = schema(
    "run:text status:text settled:flag accuracy loss fit_accuracy fit_loss chance guess skill half_learned setbacks "
    "peak peak_layer:count peak_head:count parameters:count epochs steps:count seconds tokens_per_second",
    _PLACE,
)
HEADS = schema(
    "layer:count head:count drop drop_low drop_high gain gain_low gain_high positional symbolic interaction toeplitz "
    "centre previous first induction",
    _PLACE,
)
EPOCHS = schema(
    "epoch step:count lr train_accuracy train_loss fit_accuracy fit_loss test_accuracy test_loss seconds", _PLACE
)
LENGTHS = schema("length:count factor examples:count accuracy low high loss chance guess bits sliding", _PLACE)
FREQUENCIES = schema("layer:count head:count pair:count frequency norm variance", _PLACE)
CHECKPOINTS = schema("step:count layer:count head:count drop signal positional symbolic interaction", _PLACE)
CLAIMS = schema(
    "claim:text protocol:text verdict:text uncorrected:text source:text statement:text rule:text evidence:text"
)


def skill(accuracy: float, guess: float) -> float:
    """Accuracy above a baseline, relative to the maximum possible gain."""
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
    """The place of a cell in a study's grid.

    protocol  ``paper`` or ``released``
    task      name of the task
    label     label of the encoding in the study
    seed
    """

    protocol: Protocol
    task: str
    label: str
    seed: Count


@dataclass(frozen=True)
class CellResult(Record):
    """A finished cell: its place, the results of its run, and its ablation.

    measures  measures of the trained model, by name (`toeplens.engine.measures`)
    ablation  head ablation by accuracy; ``by_loss`` by loss
    watched   probes during training, a row per checkpoint (`toeplens.training.loop`); empty without probes
    """

    WORDS = "results"
    LATER = ("measures", "watched", "by_loss")

    key: Key
    run: str
    status: Literal["complete", "diverged"]
    chance: Share
    length_chance: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, lt=1)]
    parameters: Count
    epochs: Annotated[list[dict[str, Any]], like(list[_Epoch])]
    result: Annotated[dict[str, Any], like(_Result)]
    ablation: HeadAblation | None
    measures: dict[str, dict[str, Any]] = field(default_factory=dict)
    watched: list[dict[str, Any]] = field(default_factory=list)
    by_loss: HeadAblation | None = None

    @property
    def accuracy(self) -> float:
        """Final test accuracy; NaN for a diverged run."""
        return float("nan") if self.status == "diverged" else float(self.result["test_accuracy"])

    @property
    def settled(self) -> bool:
        """Whether the model has stopped learning.

        Based on the run's own rule (`toeplens.training.Plateau`), or on `UNRULED` without one.
        """
        if self.status == "diverged":
            return False
        if "plateau" in self.result:
            return self.result["plateau"] is not None
        last = [float(row["test_accuracy"]) for row in self.epochs[-2:]]
        return len(last) > 1 and abs(last[-1] - last[0]) < STILL

    @property
    def fit(self) -> float:
        """Accuracy on training examples after the last epoch, without dropout; NaN if not measured."""
        value = None if self.status == "diverged" else self.result.get("fit_accuracy")
        return float("nan") if value is None else float(value)

    @property
    def half_learned(self) -> float:
        """log2 of the number of epochs until the skill on training examples reaches 0.5.

        The accuracy is interpolated linearly between evaluations, starting from the baseline. For a model that never
        reaches 0.5 (`learned_half`), all its epochs count, which underestimates the time. NaN for a diverged run.
        """
        if self.status == "diverged" or not self.epochs:
            return float("nan")
        before, learned = 0.0, 0.0
        for epoch, skill in self._learning():
            if skill >= 0.5:
                before += (0.5 - learned) / (skill - learned) * (epoch - before)
                break
            before, learned = epoch, max(0.0, skill)
        return float(np.log2(before))

    @property
    def learned_half(self) -> bool:
        """Whether the skill on training examples reached 0.5 at any evaluation."""
        return self.status != "diverged" and any(skill >= 0.5 for _, skill in self._learning())

    @property
    def looked_back(self) -> bool:
        """Whether evaluations include training examples without dropout (not in older records)."""
        return any(row.get("fit_accuracy") is not None for row in self.epochs)

    def _learning(self) -> Iterator[tuple[float, float]]:
        """Epochs, and skill on training examples: evaluated if available, otherwise the running mean."""
        for row in self.epochs:
            fit = row.get("fit_accuracy")
            accuracy = float(row["train_accuracy"] if fit is None else fit)
            yield float(row["epoch"]), skill(accuracy, self.length_chance)

    @property
    def setbacks(self) -> float:
        """Sum of all drops of the test accuracy between evaluations larger than `STILL`; NaN for a diverged run."""
        if self.status == "diverged":
            return float("nan")
        steps = np.diff([float(row["test_accuracy"]) for row in self.epochs])
        return float(-steps[steps < -STILL].sum())

    @property
    def skill(self) -> float:
        """Test accuracy above the length-only baseline, relative to the maximum possible gain."""
        return skill(self.accuracy, self.length_chance)

    @property
    def skilled(self) -> bool:
        """Whether the model has learned enough to evaluate its heads; False for a diverged run."""
        return self.skill >= SKILLED

    @property
    def peak(self) -> float:
        """The largest accuracy drop by one head, relative to skill; NaN without an ablation."""
        return max((layer.peak for layer in self.deposits()), default=float("nan"))

    @cached_property
    def _deposits(self) -> list[LayerDeposit]:
        return deposit(self.ablation, self.length_chance) if self.ablation else []

    def deposits(self) -> list[LayerDeposit]:
        """The deposit of each layer; empty without an ablation."""
        return self._deposits

    @cached_property
    def events(self) -> dict[str, Watched]:
        """The probes at the events of training (`toeplens.engine.head_watch.MOMENTS`)."""
        rows = [Watched.from_dict(row, "watched") for row in self.watched if row.get("events")]
        return {event: row for row in reversed(rows) for event in row.events}

    def reason(self, name: str) -> str:
        """Why the measure does not apply to the encoding; empty if it applies, or was not measured."""
        return str(self.measures.get(name, {}).get(WHY, ""))

    def measure(self, name: str) -> Any:
        """A measure's record; None if it was not measured or does not apply to the encoding."""
        if name not in self._measured:
            record = as_record(name, self.measures[name], self.WORDS) if self.measures.get(name) is not None else None
            self._measured[name] = None if isinstance(record, str) else record
        return self._measured[name]

    @cached_property
    def _measured(self) -> dict[str, Any]:
        return {}

    @property
    def place(self) -> dict[str, Any]:
        """The first columns of the tables."""
        key = self.key
        return {"protocol": key.protocol, "task": key.task, "encoding": key.label, "seed": key.seed}

    def row(self) -> dict[str, Any]:
        """The cell as a row of the table of cells."""
        same = ("run", "status", "settled", "accuracy", "chance", "skill", "half_learned", "setbacks", "parameters")
        row = {name: getattr(self, name) for name in same} | {"guess": self.length_chance, "peak": self.peak}
        row["epochs"] = self.epochs[-1].get("epoch") if self.epochs else None
        if self.status == "complete":
            told = ("steps", "seconds", "tokens_per_second", "fit_accuracy", "fit_loss")
            row |= {name: self.result.get(name) for name in told} | {"loss": self.result.get("test_loss")}
        if peaks := [layer.peak for layer in self.deposits()]:
            top = int(np.argmax(peaks))
            row |= {"peak_layer": top, "peak_head": self.deposits()[top].head}
        return {**self.place, **row}

    def head_rows(self) -> Iterator[Mapping[str, Any]]:
        """Its heads as rows, if anything was measured."""
        figures: dict[str, np.ndarray] = {}
        for name, found in (("drop", self.ablation), ("gain", self.by_loss)):
            if found is not None:
                figures |= {name: found.drops, f"{name}_low": found.low, f"{name}_high": found.high}
        for measure, fields in _OF_HEADS.items():
            if (found := self.measure(measure)) is not None:
                figures |= {name: getattr(found, field) for name, field in fields.items()}
        for layer, head in np.ndindex(next(iter(figures.values())).shape if figures else (0, 0)):
            values = {name: float(each[layer, head]) for name, each in figures.items()}
            yield {**self.place, "layer": layer, "head": head, **values}

    def length_rows(self) -> Iterator[Mapping[str, Any]]:
        """The evaluated lengths as rows."""
        tested, spoken = self.measure("extrapolation"), self.measure("bits")
        for row in () if tested is None else tested.rows:
            if row.examples:
                yield {**self.place, **asdict(row), "guess": row.length_chance}
        for row in () if spoken is None else spoken.lengths:
            if row.texts:
                bits = {"bits": row.whole.value, "sliding": row.sliding.value}
                yield {**self.place, "length": row.length, "factor": row.factor, "examples": row.texts, **bits}

    def frequency_rows(self) -> Iterator[Mapping[str, Any]]:
        """The rotary pairs of its heads as rows."""
        if (use := self.measure("frequency")) is not None:
            for at, head, pair in np.ndindex(use.frequencies.shape):
                shares = {"norm": use.norms[at, head, pair + 1], "variance": use.logits[at, head, pair + 1]}
                place = {"layer": use.layers[at], "head": head, "pair": pair}
                yield {**self.place, **place, "frequency": use.frequencies[at, head, pair], **shares}

    def checkpoint_rows(self) -> Iterator[Mapping[str, Any]]:
        """Its heads at each checkpoint as rows."""
        names = {"drop": "drops", **{name: name for name in CHECKPOINTS.names[8:]}}
        for row in self.watched:
            values = {name: np.array(row[of], float) for name, of in names.items() if row.get(of) is not None}
            for layer, head in np.ndindex(next(iter(values.values())).shape if values else (0, 0)):
                numbers = {name: float(each[layer, head]) for name, each in values.items()}
                yield {**self.place, "step": row["step"], "layer": layer, "head": head, **numbers}

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers for JSON; deposits are only written, not read back."""
        return super().to_dict() | {"deposits": [asdict(layer) for layer in self.deposits()]}


class BySeed(dict[int, float]):
    """Values of a study's models, by seed."""

    def __sub__(self, other: Mapping[int, float]) -> BySeed:
        """The difference in the seeds that both have."""
        return BySeed({seed: self[seed] - other[seed] for seed in sorted(self.keys() & other.keys())})


@dataclass(frozen=True)
class Figure:
    """A value of a model that is compared between models."""

    words: str  # name of the value, before the models' names; empty for the test accuracy
    of: Callable[[CellResult], float]
    counts: Callable[[CellResult], bool] = lambda cell: True  # whether a model has the value
    without: str = "no skill, or not measured"  # why a model does not have it
    grain: float = GRAIN  # precision of the value, see `toeplens.studies.kit.verdicts.Contrast`
    wanted: str = ""  # what to run if no model has it; empty if ``without`` is enough

    def by_seed(self, cells: Iterable[CellResult]) -> BySeed:
        """The values of the cells that count, at most one per seed."""
        return BySeed({cell.key.seed: self.of(cell) for cell in cells if self.counts(cell)})


_OF_HEADS = {  # measure: columns of the table of heads, and fields of the record
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
_FRAMES: dict[str, tuple[pa.Schema, Callable[[CellResult], Iterable[Mapping[str, Any]]]]] = {
    "cells": (CELLS, lambda cell: [cell.row()]),
    "heads": (HEADS, CellResult.head_rows),
    "epochs": (EPOCHS, lambda cell: ({**cell.place, **row} for row in cell.epochs)),
    "lengths": (LENGTHS, CellResult.length_rows),
    "frequencies": (FREQUENCIES, CellResult.frequency_rows),
    "checkpoints": (CHECKPOINTS, CellResult.checkpoint_rows),
}
FRAMES = tuple(_FRAMES)


class Results:
    """The finished cells of a study or of one protocol."""

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
        """The encodings with a finished cell of a task."""
        return sorted({cell.key.label for cell in self.cells if cell.key.task == task})

    def accuracy(self, task: str, label: str) -> np.ndarray:
        """Final test accuracies, one per seed."""
        return np.array([cell.accuracy for cell in self.of(task, label)])

    def difference(self, task: str, first: str, second: str, figure: Figure = ACCURACY) -> Contrast:
        """A value's mean over the models of ``first`` minus that over the models of ``second``."""
        found = difference(*(figure.by_seed(self.of(task, one)) for one in (first, second)), grain=figure.grain)
        none = [one for one in (first, second) if not self.of(task, one)]
        absent = f"no finished model of {' or '.join(none)} on {task}" if none else ""
        return replace(found, missing=absent or self.left_out(figure, task, first, second))

    def left_out(self, figure: Figure, task: str, *labels: str) -> str:
        """How many models do not count, and why, for each of two labels or for many together; empty if all count."""
        compared = [self.of(task, label) for label in dict.fromkeys(labels)]
        away = [(sum(not figure.counts(cell) for cell in cells), len(cells)) for cells in compared]
        missing = sum(some for some, _ in away)
        if len(away) > 2:
            away = [(missing, sum(count for _, count in away))]
        told = " and ".join(f"{some} of {count}" for some, count in away)
        return f"{told} models excluded: {figure.without}" if missing else ""

    def frame(self, rows: str = "cells") -> pa.Table:
        """The cells as an Arrow table.

        rows  what a row is: a cell (``cells``), a head (``heads``), an evaluation (``epochs``), a test length
              (``lengths``), a rotary pair (``frequencies``) or a head during training (``checkpoints``)
        """
        columns, of = _FRAMES[choose("rows", rows, FRAMES)]
        return table(columns, (row for cell in self.cells for row in of(cell)))


def estimated(values: Mapping[int, float]) -> Estimate | None:
    """Mean over seeds with Student's t interval; None without seeds."""
    return over_seeds(np.array(list(values.values()))) if values else None


def mean_of(cells: Iterable[CellResult], figure: Callable[[CellResult], float]) -> float | None:
    """A value's mean over the models that have one; None if none has."""
    values = [value for cell in cells if np.isfinite(value := figure(cell))]
    return float(np.mean(values)) if values else None
