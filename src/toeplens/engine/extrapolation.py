"""Accuracy of a trained model on sequences longer than in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

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
    why        why there are no examples; otherwise empty
    """

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
    device = model.readout.weight.device
    try:
        longer = task if length == task.length else task.at_length(length)
        test = longer.unseen_dataset(task, examples, spec.data_seed)
        data = Batches.of(test, device, spec.ignore_label)
        size = max(1, _TOKENS[device.type] // length)
        loss, hits, count = torch.stack([eval_batch(model, batch) for batch in data.split(size)]).sum(0).tolist()
    except InputError as error:
        return LengthResult(length, factor, reason=str(error))
    if not count:
        return LengthResult(length, factor, reason="all examples of this length have ignored labels.")
    low, high = wilson_interval(round(hits), round(count))
    chances = longer.chance(spec.ignore_label), longer.length_chance(spec.ignore_label)
    values = hits / count, low, high, loss / count, *chances
    return LengthResult(length, factor, round(count), *values, trivial_baselines(train_set, _drop_ignored(run, test)))
