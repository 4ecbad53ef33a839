"""What the files of a run's directory may hold, stated field by field; see `toeplens.ground.reading`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from toeplens.ground import sentence
from toeplens.ground.reading import Count, Number, Positive, Share, Text, Truth
from toeplens.ground.records import AtLeast1, Record
from toeplens.training.history import Segment
from toeplens.training.spec import RunSpec

Shapes = dict[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True, kw_only=True)
class Figures(Record):
    """What a run reached: losses in nats, accuracies as shares; None where it diverged or no example counts.

    train  mean over the steps since the last evaluation, each before its update and with dropout
    fit    of training examples after the evaluation's step, without dropout, as many as the test set has or fewer where
           there are fewer; missing in what earlier versions wrote
    """

    LATER = ("fit_loss", "fit_accuracy")

    train_loss: Number | None
    train_accuracy: Share | None
    test_loss: Number | None
    test_accuracy: Share | None
    fit_loss: Number | None = None
    fit_accuracy: Share | None = None


@dataclass(frozen=True, kw_only=True)
class Epoch(Figures):
    """A line of metrics.jsonl: the epochs and steps done, the learning rate after them, seconds from the beginning."""

    epoch: Positive
    step: AtLeast1
    lr: Positive
    seconds: Positive


@dataclass(frozen=True, kw_only=True)
class Result(Figures):
    """result.json.

    plateau  the step at which the model stopped learning, by the spec's rule; None where it was still learning when
             training ended, or the spec has no rule
    chance, guess  of the spec, where it takes text to know them, which may be gone later; missing else
    """

    LATER = (*Figures.LATER, "plateau", "chance", "guess")

    status: Literal["complete", "diverged"]
    steps: Count
    seconds: Positive
    tokens_per_second: Positive
    plateau: AtLeast1 | None = None
    chance: Share | None = None
    guess: Share | None = None


@dataclass(frozen=True)
class Moment(Record):
    """A line of watched.jsonl; what else is in it is the watcher's to say."""

    step: Count
    seconds: Positive


@dataclass(frozen=True)
class Progress(Record):
    """progress.json: the training steps that are safe."""

    step: Count


class _Watched(BaseModel):
    by: Text | None
    rows: list[Moment]


class _Group(BaseModel):
    """A group of AdamW's, by what torch would fail on later."""

    params: list[Count]
    lr: Positive
    initial_lr: Positive
    betas: tuple[Share, Share]
    eps: Positive
    weight_decay: Positive
    amsgrad: Literal[False]
    maximize: Literal[False]
    foreach: Truth | None
    capturable: Literal[False]
    differentiable: Literal[False]
    fused: Truth | None


class _Optimizer(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    state: dict[int, dict[str, Tensor]]
    param_groups: Annotated[list[_Group], Field(min_length=1, max_length=1)]


class _Scheduler(BaseModel):
    last_epoch: Count


class _Checkpoint(BaseModel):
    """checkpoint.pt; older ones know of no watching, history, look back at the training set or mean of weights."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: dict[str, Tensor]
    average: dict[str, Tensor] | None = None
    optimizer: _Optimizer
    scheduler: _Scheduler
    step: Count
    seconds: Positive
    rows: list[Epoch]
    sums: Tensor
    tested: Count
    test_sums: Tensor
    fit_sums: Tensor | None = None
    watched: _Watched | None = None
    rng: Tensor
    cuda_rng: Tensor | None
    history: list[Segment] = []


def checkpoint_fault(state: dict[str, Any], spec: RunSpec, own: Shapes, parameters: list[torch.Size]) -> str | None:
    """Why training cannot go on from ``state``; None where it can.

    Arguments
        own         shapes and types of the tensors that the run's model keeps, by name
        parameters  shapes of its parameters, in the optimiser's order
    """
    try:
        found = _Checkpoint.model_validate(state)
    except ValidationError as error:
        return sentence(error)
    due = spec.evaluations_by(found.step)
    owed = due - len(found.rows)  # an evaluation that is due and not yet done
    if found.step > spec.total_steps or owed not in ((0, 1) if found.step == spec.evaluated_at(due) else (0,)):
        return f"step: {found.step} and {len(found.rows)} rows do not go together"
    if [row.step for row in found.rows] != [spec.evaluated_at(count) for count in range(1, len(found.rows) + 1)]:
        return "rows: their steps are not those of the evaluations"
    tests, batch = spec.test_examples, spec.batch_size
    whole = found.tested == tests or (found.tested - tests * (found.tested > tests)) % batch == 0
    if found.tested and (not owed or not whole or found.tested >= tests + spec.fit_examples):
        return f"tested: {found.tested} examples cannot be tested by then"
    if found.scheduler.last_epoch != found.step:
        return f"scheduler: {found.scheduler.last_epoch} is not the step"
    if _shapes(found.model) != own:
        return "model: these are not the weights of this spec"
    if (found.average is None) != (spec.average is None) or (
        found.average is not None and _shapes(found.average) != own
    ):
        return "average: this is not the mean of the weights of this spec"
    counted = [sums for sums in (found.sums, found.test_sums, found.fit_sums) if sums is not None]
    if any(sums.shape != (3,) or sums.dtype != torch.float64 for sums in counted):
        return "sums: three numbers are needed"
    return _optimizer_fault(found.optimizer, found.step, parameters) or _random_fault(found.rng, found.cuda_rng)


def _shapes(state: dict[str, Tensor]) -> Shapes:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}


def _optimizer_fault(found: _Optimizer, step: int, parameters: list[torch.Size]) -> str | None:
    if found.param_groups[0].params != list(range(len(parameters))):
        return "optimizer: its parameters are not those of this spec"
    wanted = [{"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape} for shape in parameters] if step else []
    if [{name: tensor.shape for name, tensor in found.state.get(place, {}).items()} for place in found.state] != wanted:
        return "optimizer: its moments are not those of this spec"
    return None


def _random_fault(rng: Tensor, cuda_rng: Tensor | None) -> str | None:
    try:
        torch.Generator().set_state(rng)
    except (RuntimeError, TypeError) as error:
        return f"rng: {error}"
    if cuda_rng is not None and cuda_rng.dtype != torch.uint8:
        return "cuda_rng: it is no random state"
    return None
