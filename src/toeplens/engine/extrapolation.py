"""Accuracy of a trained model on sequences longer than in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from toeplens.ground import InputError
from toeplens.ground.machine import must_fit
from toeplens.ground.options import within
from toeplens.ground.records import AtLeast1, Count, Positive, Record, Share
from toeplens.lens.kit.intervals import wilson
from toeplens.model import Decoder
from toeplens.tasks import Examples, Task, trivial_baselines
from toeplens.training import Batches, Run, plan_execution
from toeplens.training.batches import answer

FACTORS = (1.0, 1.25, 1.5, 2.0, 4.0)  # test lengths in units of the training length
_TOKENS = {"cpu": 2**15, "cuda": 2**20}
_MOST_EXAMPLES, _MOST_TOKENS = 10**6, 10**5
_FITTED = 4096  # training examples for fitting the simple rules


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

    length: AtLeast1
    factor: Positive
    examples: Count = 0
    accuracy: Share | None = None
    low: Share | None = None
    high: Share | None = None
    loss: float | None = None
    chance: Share | None = None
    length_chance: Share | None = None
    baselines: dict[str, Share] = field(default_factory=dict)
    why: str = ""

    def verify(self) -> None:
        figures = (self.accuracy, self.low, self.high, self.chance, self.length_chance)
        if any((figure is None) != (self.examples == 0) for figure in figures):
            raise ValueError(f"examples must match the results, got {self.examples}.")


@dataclass(frozen=True)
class Extrapolation(Record):
    """Accuracy by sequence length; words and labels of the task are those of training (`Task.at_length`)."""

    run: str
    trained_length: AtLeast1
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
    within("examples", examples, 1, _MOST_EXAMPLES)
    task = run.spec.build_task()
    if task.each:
        raise InputError(f"task: {task.name} has a label at every token. Use the measure 'bits' of 'toeplens study'.")
    if lengths is None:
        lengths = [round(task.length * factor) for factor in FACTORS]
    if not lengths:
        raise InputError("lengths must have at least one entry, got none.")
    within("lengths", lengths, 1, _MOST_TOKENS)
    must_fit("examples: they need", 8 * examples * max(lengths))
    model = run.model().to(plan_execution(device, "off", "float32").device)
    fitted = _counted(run, task.dataset("train", min(_FITTED, run.spec.train_examples), run.spec.data_seed))
    rows = tuple(_row(run, model, task, length, examples, fitted) for length in dict.fromkeys(lengths))
    return Extrapolation(run.spec.name, task.length, rows)


def _counted(run: Run, examples: Examples) -> Examples:
    """The examples without ignored labels."""
    return examples[examples.labels != run.spec.ignore_label]


def _row(run: Run, model: Decoder, task: Task, length: int, examples: int, fitted: Examples) -> LengthResult:
    spec, factor = run.spec, length / task.length
    device = model.readout.weight.device
    try:
        longer = task if length == task.length else task.at_length(length)
        test = longer.unseen(task, examples, spec.data_seed)
        data = Batches.of(test, device, spec.ignore_label)
        size = max(1, _TOKENS[device.type] // length)
        loss, right, count = torch.stack([answer(model, batch) for batch in data.split(size)]).sum(0).tolist()
    except InputError as error:
        return LengthResult(length, factor, why=str(error))
    if not count:
        return LengthResult(length, factor, why="all examples of this length have ignored labels.")
    low, high = wilson(round(right), round(count))
    chances = longer.chance(spec.ignore_label), longer.length_chance(spec.ignore_label)
    figures = right / count, low, high, loss / count, *chances
    return LengthResult(length, factor, round(count), *figures, trivial_baselines(fitted, _counted(run, test)))
