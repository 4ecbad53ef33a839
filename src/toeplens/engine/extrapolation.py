"""Accuracy of a trained model on sequences longer than in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from toeplens.lens.kit.intervals import wilson_interval
from toeplens.model import Decoder
from toeplens.tasks import Examples, Task, trivial_baselines
from toeplens.training import Batches, Run, plan_execution
from toeplens.training.batches import eval_batch
from toeplens.utils import InputError
from toeplens.utils.machine import check_memory
from toeplens.utils.options import check_range
from toeplens.utils.records import NonNegative, NonNegativeInt, PositiveInt, Record, Share

FACTORS = (1.0, 1.25, 1.5, 2.0, 4.0)  # test lengths in units of the training length
_TOKENS = {"cpu": 2**15, "cuda": 2**20}
_MAX_EXAMPLES, _MAX_TOKENS = 10**6, 10**5
_TRAIN_SET = 4096  # training examples for fitting the simple rules


@dataclass(frozen=True)
class LengthResult(Record):
    """A model on sequences of one length.

    length     tokens per sequence, including padding
    factor     length relative to the training length
    examples   number of examples that count; 0 if the task or the model does not support the length
    accuracy, low, high  accuracy with Wilson's 95% interval over examples; None without examples
    loss       mean cross-entropy in nats
    chance, length_chance  accuracy of the best constant guess, and of the length-only baseline, at this length
    baselines  accuracy of simple rules fitted on training sequences (`toeplens.tasks.trivial_baselines`)
    groups     accuracy by group of examples (`Task.groups`), such as the number of hops
    reason     why there are no examples; otherwise empty
    """

    ADDED_LATER = ("groups",)

    length: PositiveInt
    factor: NonNegative
    examples: NonNegativeInt = 0
    accuracy: Share | None = None
    low: Share | None = None
    high: Share | None = None
    loss: float | None = None
    chance: Share | None = None
    length_chance: Share | None = None
    baselines: dict[str, Share] = field(default_factory=dict)
    groups: dict[str, Share] = field(default_factory=dict)
    reason: str = ""

    def verify(self) -> None:
        values = (self.accuracy, self.low, self.high, self.chance, self.length_chance)
        if any((value is None) != (self.examples == 0) for value in values):
            raise ValueError(f"examples must match the results, got {self.examples}.")


@dataclass(frozen=True)
class Extrapolation(Record):
    """Accuracy by sequence length; words and labels of the task are those of training (`Task.at_length`)."""

    run: str
    trained_length: PositiveInt
    rows: tuple[LengthResult, ...]


def extrapolate(
    run: Run, lengths: Sequence[int] | None = None, *, examples: int = 2048, device: str = "auto"
) -> Extrapolation:
    """Test a finished run's model on longer sequences.

    Arguments
        lengths   sequence lengths, up to 100,000 (default: 1, 1.25, 1.5, 2 and 4 times the training length)
        examples  test sequences per length; a length with fewer different sequences gives a row with the reason
        device    ``auto``, ``cpu``, ``cuda`` or ``cuda:N``

    A length that the task or the model (such as a table of positions) does not support gives a row with the reason.
    """
    check_range("examples", examples, 1, _MAX_EXAMPLES)
    task = run.spec.build_task()
    if task.per_token:
        raise InputError(f"task: {task.name} has a label at every token. Use the measure 'bits' of 'toeplens study'.")
    if lengths is None:
        lengths = [round(task.length * factor) for factor in FACTORS]
    if not lengths:
        raise InputError("lengths must have at least one entry, got none.")
    check_range("lengths", lengths, 1, _MAX_TOKENS)
    check_memory("examples: they need", 8 * examples * max(lengths))
    model = run.model().to(plan_execution(device, "off", "float32").device)
    train_set = _drop_ignored(run, task.dataset("train", min(_TRAIN_SET, run.spec.train_examples), run.spec.data_seed))
    rows = tuple(_result(run, model, task, length, examples, train_set) for length in dict.fromkeys(lengths))
    return Extrapolation(run.spec.name, task.length, rows)


def _drop_ignored(run: Run, examples: Examples) -> Examples:
    """The examples without ignored labels."""
    return examples[examples.labels != run.spec.ignore_label]


def _result(run: Run, model: Decoder, task: Task, length: int, examples: int, train_set: Examples) -> LengthResult:
    spec, factor = run.spec, length / task.length
    try:
        longer = task if length == task.length else task.at_length(length)
        test = longer.unseen_dataset(task, examples, spec.data_seed)
        sums = evaluate_groups(model, longer, test, spec.ignore_label)
    except InputError as error:
        return LengthResult(length, factor, reason=str(error))
    loss, hits, count = np.sum(list(sums.values()), axis=0).tolist()
    if not count:
        return LengthResult(length, factor, reason="all examples of this length have ignored labels.")
    low, high = wilson_interval(round(hits), round(count))
    chances = longer.chance(spec.ignore_label), longer.length_chance(spec.ignore_label)
    values = hits / count, low, high, loss / count, *chances
    baselines = trivial_baselines(train_set, _drop_ignored(run, test))
    return LengthResult(length, factor, round(count), *values, baselines, group_accuracies(sums))


def evaluate_groups(
    model: Decoder, task: Task, examples: Examples, ignore_label: int | None
) -> dict[str, tuple[float, float, float]]:
    """Summed loss, number of right answers and of examples that count, by group (``""`` for all, without groups)."""
    device = model.readout.weight.device
    size = max(1, _TOKENS[device.type] // examples.tokens.shape[1])
    sums = {}
    for name, mask in (task.groups(examples) or {"": np.ones(len(examples), dtype=bool)}).items():
        batches = Batches.of(examples[mask], device, ignore_label).split(size) if mask.any() else []
        totals = np.sum([[0.0] * 3, *(eval_batch(model, batch).tolist() for batch in batches)], axis=0)
        sums[name] = tuple(totals.tolist())
    return sums


def group_accuracies(sums: Mapping[str, tuple[float, float, float]]) -> dict[str, float]:
    """The accuracy of each named group with examples that count."""
    return {name: hits / count for name, (_, hits, count) in sums.items() if name and count}
