"""Results of a study, one per cell, the values that claims compare, and their Arrow tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from toeplens.engine.head_probe import HeadProbeRow
from toeplens.engine.measures import as_record
from toeplens.lens import Estimate, HeadAblation, LayerDeposit, deposit, mean_over_seeds
from toeplens.model import Protocol
from toeplens.studies.kit.frames import schema, table
from toeplens.studies.kit.verdicts import GRAIN, Contrast, difference
from toeplens.utils import choose
from toeplens.utils.machine import MAX_SEEDS
from toeplens.utils.records import NonNegative, NonNegativeInt, Record, Share, keep_raw

MIN_SKILL = 0.25  # minimum skill of models whose heads are evaluated
ONLY_SKILLED_RULE = f"Only models with a skill of at least {MIN_SKILL:g} count."
MIN_CHANGE = 0.02
NO_STOPPING_RULE = f"without a stopping rule: the last two evaluations differ by less than {100 * MIN_CHANGE:g} points"
Seeds = Annotated[int, Field(strict=True, ge=1, le=MAX_SEEDS)]


_KEY_COLUMNS = "protocol:text task:text encoding:text seed:count"
# a row is a model, a head of a model, an evaluation during training, a test length, a rotary pair of a head, a head
# at a checkpoint, a claim under a protocol
CELLS = schema(
    "run:text status:text settled:flag accuracy loss fit_accuracy fit_loss chance guess skill half_learned setbacks "
    "peak peak_layer:count peak_head:count parameters:count epochs steps:count seconds tokens_per_second",
    _KEY_COLUMNS,
)
HEADS = schema(
    "layer:count head:count drop drop_low drop_high gain gain_low gain_high positional symbolic interaction toeplitz "
    "centre previous first induction",
    _KEY_COLUMNS,
)
EPOCHS = schema(
    "epoch step:count lr train_accuracy train_loss fit_accuracy fit_loss test_accuracy test_loss seconds", _KEY_COLUMNS
)
LENGTHS = schema("length:count factor examples:count accuracy low high loss chance guess bits sliding", _KEY_COLUMNS)
FREQUENCIES = schema("layer:count head:count pair:count frequency norm variance", _KEY_COLUMNS)
CHECKPOINTS = schema("step:count layer:count head:count drop signal positional symbolic interaction", _KEY_COLUMNS)
CLAIMS = schema(
    "claim:text protocol:text verdict:text uncorrected:text source:text statement:text rule:text evidence:text"
)


def skill(accuracy: float, guess: float) -> float:
    """Accuracy above a baseline, relative to the maximum possible gain."""
    return (accuracy - guess) / (1 - guess)


@dataclass(frozen=True)
class _RecordedEpoch(Record):
    train_accuracy: Share | None
    test_accuracy: Share | None


@dataclass(frozen=True)
class _RecordedResult(Record):
    test_accuracy: Share | None
    seconds: NonNegative


@dataclass(frozen=True, order=True)
class CellKey(Record):
    """The place of a cell in a study's grid.

    protocol  ``paper`` or ``released``
    task      name of the task
    label     label of the encoding in the study
    seed
    """

    protocol: Protocol
    task: str
    label: str
    seed: NonNegativeInt


@dataclass(frozen=True)
class CellResult(Record):
    """A finished cell: its place, the results of its run, and its ablation.

    measures  measures of the trained model, by name (`toeplens.engine.measures`)
    ablation  head ablation by accuracy; ``by_loss`` by loss
    probe_rows  probes during training, a row per checkpoint (`toeplens.training.loop`); empty without probes
    """

    LABEL = "results"
    ADDED_LATER = ("measures", "probe_rows", "by_loss")

    key: CellKey
    run: str
    status: Literal["complete", "diverged"]
    chance: Share
    length_chance: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, lt=1)]
    parameters: NonNegativeInt
    epochs: Annotated[list[dict[str, Any]], keep_raw(list[_RecordedEpoch])]
    result: Annotated[dict[str, Any], keep_raw(_RecordedResult)]
    ablation: HeadAblation | None
    measures: dict[str, dict[str, Any]] = field(default_factory=dict)
    probe_rows: list[dict[str, Any]] = field(default_factory=list)
    by_loss: HeadAblation | None = None

    @property
    def accuracy(self) -> float:
        """Final test accuracy; NaN for a diverged run."""
        return float("nan") if self.status == "diverged" else float(self.result["test_accuracy"])

    @property
    def settled(self) -> bool:
        """Whether the model has stopped learning.

        Based on the run's own rule (`toeplens.training.Plateau`), or on `NO_STOPPING_RULE` without one.
        """
        if self.status == "diverged":
            return False
        if "plateau" in self.result:
            return self.result["plateau"] is not None
        last = [float(row["test_accuracy"]) for row in self.epochs[-2:]]
        return len(last) > 1 and abs(last[-1] - last[0]) < MIN_CHANGE

    def if_settled(self, *perfect: str) -> CellResult:
        """The cell as if the model had stopped learning, with these accuracies (``test``, ``fit``) at 1."""
        steps = int(self.result.get("plateau") or 1)
        return replace(self, result={**self.result, "plateau": steps} | {f"{name}_accuracy": 1.0 for name in perfect})

    @property
    def fit_accuracy(self) -> float:
        """Accuracy on training examples after the last epoch, without dropout; NaN if not measured."""
        value = None if self.status == "diverged" else self.result.get("fit_accuracy")
        return float("nan") if value is None else float(value)

    @property
    def half_learned(self) -> float:
        """log2 of the number of epochs until the skill on training examples reaches 0.5.

        The accuracy is interpolated linearly between evaluations, starting from the baseline. For a model that never
        reaches 0.5 (`has_learned_half`), all its epochs count, which underestimates the time. NaN for a diverged run.
        """
        if self.status == "diverged" or not self.epochs:
            return float("nan")
        before, learned = 0.0, 0.0
        for epoch, skill in self._learning_curve():
            if skill >= 0.5:
                before += (0.5 - learned) / (skill - learned) * (epoch - before)
                break
            before, learned = epoch, max(0.0, skill)
        return float(np.log2(before))

    @property
    def has_learned_half(self) -> bool:
        """Whether the skill on training examples reached 0.5 at any evaluation."""
        return self.status != "diverged" and any(skill >= 0.5 for _, skill in self._learning_curve())

    @property
    def has_fit_accuracy(self) -> bool:
        """Whether evaluations include training examples without dropout (not in older records)."""
        return any(row.get("fit_accuracy") is not None for row in self.epochs)

    def _learning_curve(self) -> Iterator[tuple[float, float]]:
        """Epochs, and skill on training examples: evaluated if available, otherwise the running mean."""
        for row in self.epochs:
            fit = row.get("fit_accuracy")
            accuracy = float(row["train_accuracy"] if fit is None else fit)
            yield float(row["epoch"]), skill(accuracy, self.length_chance)

    @property
    def setbacks(self) -> float:
        """Sum of all drops of the test accuracy between evaluations above `MIN_CHANGE`; NaN for a diverged run."""
        if self.status == "diverged":
            return float("nan")
        steps = np.diff([float(row["test_accuracy"]) for row in self.epochs])
        return float(-steps[steps < -MIN_CHANGE].sum())

    @property
    def skill(self) -> float:
        """Test accuracy above the length-only baseline, relative to the maximum possible gain."""
        return skill(self.accuracy, self.length_chance)

    @property
    def is_skilled(self) -> bool:
        """Whether the model has learned enough to evaluate its heads; False for a diverged run."""
        return self.skill >= MIN_SKILL

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
    def events(self) -> dict[str, HeadProbeRow]:
        """The probes at the events of training (`toeplens.engine.head_probe.EVENTS`)."""
        rows = [HeadProbeRow.from_dict(row, "probe_rows") for row in self.probe_rows if row.get("events")]
        return {event: row for row in reversed(rows) for event in row.events}

    def reason(self, name: str) -> str:
        """Why the measure does not apply to the encoding; empty if it applies, or was not measured."""
        record = self._record(name)
        return record if isinstance(record, str) else ""

    def measure(self, name: str) -> Any:
        """A measure's record; None if it was not measured or does not apply to the encoding."""
        record = self._record(name)
        return None if isinstance(record, str) else record

    def _record(self, name: str) -> Any:
        """A measure's record, or the reason why it does not apply; None if it was not measured."""
        if name not in self._measure_cache:
            content = self.measures.get(name)
            self._measure_cache[name] = None if content is None else as_record(name, content, self.LABEL)
        return self._measure_cache[name]

    @cached_property
    def _measure_cache(self) -> dict[str, Any]:
        return {}

    @property
    def key_columns(self) -> dict[str, Any]:
        """The first columns of the tables."""
        key = self.key
        return {"protocol": key.protocol, "task": key.task, "encoding": key.label, "seed": key.seed}

    def row(self) -> dict[str, Any]:
        """The cell as a row of the table of cells."""
        names = ("run", "status", "settled", "accuracy", "chance", "skill", "half_learned", "setbacks", "parameters")
        row = {name: getattr(self, name) for name in names} | {"guess": self.length_chance, "peak": self.peak}
        row["epochs"] = self.epochs[-1].get("epoch") if self.epochs else None
        if self.status == "complete":
            extra = ("steps", "seconds", "tokens_per_second", "fit_accuracy", "fit_loss")
            row |= {name: self.result.get(name) for name in extra} | {"loss": self.result.get("test_loss")}
        if peaks := [layer.peak for layer in self.deposits()]:
            top = int(np.argmax(peaks))
            row |= {"peak_layer": top, "peak_head": self.deposits()[top].head}
        return {**self.key_columns, **row}

    def head_rows(self) -> Iterator[Mapping[str, Any]]:
        """Its heads as rows, if anything was measured."""
        arrays: dict[str, np.ndarray] = {}
        for name, record in (("drop", self.ablation), ("gain", self.by_loss)):
            if record is not None:
                arrays |= {name: record.drops, f"{name}_low": record.low, f"{name}_high": record.high}
        for measure, fields in _HEAD_MEASURES.items():
            if (record := self.measure(measure)) is not None:
                arrays |= {name: getattr(record, field) for name, field in fields.items()}
        for layer, head in np.ndindex(next(iter(arrays.values())).shape if arrays else (0, 0)):
            values = {name: float(array[layer, head]) for name, array in arrays.items()}
            yield {**self.key_columns, "layer": layer, "head": head, **values}

    def length_rows(self) -> Iterator[Mapping[str, Any]]:
        """The evaluated lengths as rows."""
        extrapolation, language = self.measure("extrapolation"), self.measure("bits")
        for row in () if extrapolation is None else extrapolation.rows:
            if row.examples:
                yield {**self.key_columns, **asdict(row), "guess": row.length_chance}
        for row in () if language is None else language.lengths:
            if row.texts:
                bits = {"bits": row.whole.value, "sliding": row.sliding.value}
                yield {**self.key_columns, "length": row.length, "factor": row.factor, "examples": row.texts, **bits}

    def frequency_rows(self) -> Iterator[Mapping[str, Any]]:
        """The rotary pairs of its heads as rows."""
        if (use := self.measure("frequency")) is not None:
            for index, head, pair in np.ndindex(use.frequencies.shape):
                shares = {"norm": use.norms[index, head, pair + 1], "variance": use.logits[index, head, pair + 1]}
                indices = {"layer": use.layers[index], "head": head, "pair": pair}
                yield {**self.key_columns, **indices, "frequency": use.frequencies[index, head, pair], **shares}

    def checkpoint_rows(self) -> Iterator[Mapping[str, Any]]:
        """Its heads at each checkpoint as rows."""
        names = {"drop": "drops", **{name: name for name in CHECKPOINTS.names[8:]}}
        for row in self.probe_rows:
            values = {name: np.array(row[key], float) for name, key in names.items() if row.get(key) is not None}
            for layer, head in np.ndindex(next(iter(values.values())).shape if values else (0, 0)):
                numbers = {name: float(array[layer, head]) for name, array in values.items()}
                yield {**self.key_columns, "step": row["step"], "layer": layer, "head": head, **numbers}

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers for JSON; deposits are only written, not read back."""
        return super().to_dict() | {"deposits": [asdict(layer) for layer in self.deposits()]}


class SeedValues(dict[int, float]):
    """Values of a study's models, by seed."""

    def __sub__(self, other: Mapping[int, float]) -> SeedValues:
        """The difference in the seeds that both have."""
        return SeedValues({seed: self[seed] - other[seed] for seed in sorted(self.keys() & other.keys())})


@dataclass(frozen=True)
class ModelValue:
    """A value of a model that is compared between models."""

    title: str  # name of the value, before the models' names; empty for the test accuracy
    compute: Callable[[CellResult], float]
    is_defined: Callable[[CellResult], bool] = lambda cell: True  # whether a model has the value
    missing_reason: str = "no skill, or not measured"  # why a model does not have it
    grain: float = GRAIN  # precision of the value, see `toeplens.studies.kit.verdicts.Contrast`
    needed_runs: str = ""  # what to run if no model has it; empty if ``missing_reason`` is enough

    def by_seed(self, cells: Iterable[CellResult]) -> SeedValues:
        """The values of the cells that count, at most one per seed."""
        return SeedValues({cell.key.seed: self.compute(cell) for cell in cells if self.is_defined(cell)})

    def ranges_by_seed(self, cells: Iterable[CellResult]) -> dict[int, tuple[float, float]]:
        """The smallest and the largest value that a model may reach; one value for models that count.

        For models that do not count only because they are still learning, whose accuracies may end anywhere between
        their present values and 1.
        """
        ranges = {}
        for cell in cells:
            if self.is_defined(cell):
                ranges[cell.key.seed] = (self.compute(cell),) * 2
            elif cell.status == "complete" and self.is_defined(ended := cell.if_settled()):
                ends = [cell.if_settled(*names) for names in (("test",), ("fit",), ("test", "fit"))]
                values = [self.compute(each) for each in (ended, *ends)]
                ranges[cell.key.seed] = (min(values), max(values))
        return ranges


_HEAD_MEASURES = {  # measure: columns of the table of heads, and fields of the record
    "behaviour": {name: name for name in ("positional", "symbolic", "interaction")},
    "toeplitz": {"toeplitz": "share"},
    "frequency": {"centre": "centre"},
    "patterns": {name: name for name in ("previous", "first", "induction")},
}

ACCURACY = ModelValue(
    "",
    lambda cell: cell.accuracy,
    lambda cell: cell.settled or cell.status == "diverged",
    "still learning",
    needed_runs="longer training: models that have stopped learning",
)
_FRAMES: dict[str, tuple[pa.Schema, Callable[[CellResult], Iterable[Mapping[str, Any]]]]] = {
    "cells": (CELLS, lambda cell: [cell.row()]),
    "heads": (HEADS, CellResult.head_rows),
    "epochs": (EPOCHS, lambda cell: ({**cell.key_columns, **row} for row in cell.epochs)),
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

    def for_protocol(self, protocol: Protocol) -> Results:
        """The cells of one protocol."""
        return Results((cell for cell in self.cells if cell.key.protocol == protocol), protocol)

    def cells_of(self, task: str, label: str) -> list[CellResult]:
        """The cells of a task and an encoding, by seed."""
        return [cell for cell in self.cells if (cell.key.task, cell.key.label) == (task, label)]

    def labels(self, task: str) -> list[str]:
        """The encodings with a finished cell of a task."""
        return sorted({cell.key.label for cell in self.cells if cell.key.task == task})

    def accuracy(self, task: str, label: str) -> np.ndarray:
        """Final test accuracies, one per seed."""
        return np.array([cell.accuracy for cell in self.cells_of(task, label)])

    def difference(self, task: str, first: str, second: str, figure: ModelValue = ACCURACY) -> Contrast:
        """A value's mean over the models of ``first`` minus that over the models of ``second``."""
        diff = difference(*(figure.by_seed(self.cells_of(task, name)) for name in (first, second)), grain=figure.grain)
        untrained = [name for name in (first, second) if not self.cells_of(task, name)]
        no_models = f"no finished model of {' or '.join(untrained)} on {task}" if untrained else ""
        return replace(diff, missing=no_models or self.excluded_text(figure, task, first, second))

    def excluded_text(self, figure: ModelValue, task: str, *labels: str) -> str:
        """How many models do not count, and why, for each of two labels or for many together; empty if all count."""
        compared = [self.cells_of(task, label) for label in dict.fromkeys(labels)]
        excluded = [(sum(not figure.is_defined(cell) for cell in cells), len(cells)) for cells in compared]
        missing = sum(number for number, _ in excluded)
        if len(excluded) > 2:
            excluded = [(missing, sum(count for _, count in excluded))]
        text = " and ".join(f"{number} of {count}" for number, count in excluded)
        return f"{text} models excluded: {figure.missing_reason}" if missing else ""

    def frame(self, rows: str = "cells") -> pa.Table:
        """The cells as an Arrow table.

        rows  what a row is: a cell (``cells``), a head (``heads``), an evaluation (``epochs``), a test length
              (``lengths``), a rotary pair (``frequencies``) or a head during training (``checkpoints``)
        """
        columns, rows_of = _FRAMES[choose("rows", rows, FRAMES)]
        return table(columns, (row for cell in self.cells for row in rows_of(cell)))


def estimate_mean(values: Mapping[int, float]) -> Estimate | None:
    """Mean over seeds with Student's t interval; None without seeds."""
    return mean_over_seeds(np.array(list(values.values()))) if values else None


def mean_of(cells: Iterable[CellResult], compute: Callable[[CellResult], float]) -> float | None:
    """A value's mean over the models that have one; None if none has."""
    values = [value for cell in cells if np.isfinite(value := compute(cell))]
    return float(np.mean(values)) if values else None
