"""The spec of a run: task, model, optimiser, seed. Frozen and validated; its content hash is the run's name."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from toeplens import tasks
from toeplens.model import DecoderConfig
from toeplens.utils import InputError, invalid, to_json_types, validation_message
from toeplens.utils.files import refuse_booleans
from toeplens.utils.machine import check_memory

Precision = Literal["auto", "float32", "bf16"]
Schedule = Literal["cosine", "constant"]
_MAX_SEED = 2**64 - 1  # torch's limit
_MAX_SIZE = 10**9
_ADDED_FIELDS = ("schedule", "average", "evaluations", "plateau")


class Plateau(BaseModel):
    """The rule that detects when a model has stopped improving, and how long training continues afterwards.

    The plateau is the first evaluation at which the minimum test loss of the last ``patience`` evaluations is not
    lower, by at least ``gain``, than the minimum before them. Before the last evaluation this requires a skill of at
    least ``skill``, because a model that is still guessing may not have begun to learn.

    Arguments
        gain      in nats
        patience  number of evaluations
        skill     test accuracy above the length-only baseline, as a share of the possible improvement
        beyond    training continues to this multiple of the plateau's step, but not past the spec's epochs
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gain: Annotated[float, Field(gt=0)] = 0.01
    patience: Annotated[int, Field(ge=1, le=10**9)] = 4
    skill: Annotated[float, Field(ge=0, le=1)] = 0.1
    beyond: Annotated[float, Field(ge=1)] = 1.0

    def find_step(self, rows: Sequence[Mapping[str, Any]], guess: float, evaluations: int) -> int | None:
        """The step of the plateau; None if there is none yet.

        Arguments
            rows         the run's metrics so far, one row per evaluation
            guess        accuracy of the length-only baseline
            evaluations  maximum number of evaluations of the run
        """
        losses = [row["test_loss"] for row in rows]
        if None in losses:
            return None
        running_min = list(accumulate(losses, min))
        for count in range(self.patience + 1, len(rows) + 1):
            start, row = count - self.patience, rows[count - 1]
            is_able = row["test_accuracy"] - guess >= self.skill * (1 - guess)
            if running_min[start - 1] - min(losses[start:count]) < self.gain and (is_able or count == evaluations):
                return int(row["step"])
        return None

    def should_end(self, rows: Sequence[Mapping[str, Any]], guess: float, evaluations: int) -> bool:
        """Whether training ends after these rows: ``beyond`` times the plateau's steps are done."""
        step = self.find_step(rows, guess, evaluations)
        return step is not None and rows[-1]["step"] >= self.beyond * step


def cosine_with_warmup(warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Learning-rate factor by step: linear warm-up from 0, then a half cosine to 0."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, total_steps - warmup_steps)))

    return factor


def constant_with_warmup(warmup_steps: int) -> Callable[[int], float]:
    """Learning-rate factor by step: linear warm-up from 0, then 1."""
    return lambda step: step / warmup_steps if step < warmup_steps else 1.0


class RunSpec(BaseModel):
    """Everything that determines a run's result. The defaults are the papers' settings (arXiv 2505.13027, Table 3).

    Arguments
        task, task_options  see `toeplens.tasks`
        model               the decoder's configuration
        train_examples, test_examples  sizes of the two disjoint sets; the second is from the task's evaluation split
                            (for `language` the validation split)
        epochs, batch_size  these and the set sizes from 1 to 10^9
        lr, betas, weight_decay  of AdamW (the betas in the papers' unusual order)
        warmup              share of the steps with a linearly increasing learning rate
        schedule            after the warm-up: ``cosine``, to 0 at the last step, or ``constant``
        average             EMA decay of the weights. The EMA model is evaluated, probed and saved; it approximates
                            the result of a decaying learning rate. None: no EMA
        evaluations         evaluations per epoch (one row of the metrics each)
        plateau             stop when the model has stopped improving (`Plateau`), after at most ``epochs``; None: never
        ignore_label        a label ignored by loss and accuracy (the released code's Task 2: 0)
        seed                of the weights, the dropout and the order of the examples, from 0 to 2^64 - 1
        data_seed           of the examples, likewise
        precision           ``auto``: bfloat16 matrix products on a GPU from a width of 256 on, otherwise float32
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    task: str = "trigger-distance"
    task_options: dict[str, Any] = {}
    model: DecoderConfig
    train_examples: int = Field(70_000, ge=1, le=_MAX_SIZE)
    test_examples: int = Field(30_000, ge=1, le=_MAX_SIZE)
    epochs: int = Field(100, ge=1, le=_MAX_SIZE)
    batch_size: int = Field(512, ge=1, le=_MAX_SIZE)
    lr: float = Field(1e-4, gt=0)
    betas: tuple[float, float] = (0.98, 0.9)
    weight_decay: float = Field(1e-5, ge=0)
    warmup: float = Field(0.06, ge=0, lt=1)
    ignore_label: int | None = Field(None, ge=-_MAX_SIZE, le=_MAX_SIZE)
    seed: int = Field(42, ge=0, le=_MAX_SEED)
    data_seed: int = Field(42, ge=0, le=_MAX_SEED)
    precision: Precision = "auto"
    schedule: Schedule = "cosine"
    average: float | None = Field(None, gt=0, lt=1)
    evaluations: int = Field(1, ge=1, le=_MAX_SIZE)
    plateau: Plateau | None = None

    @field_validator("task_options", mode="after")
    @classmethod
    def _options_are_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        return to_json_types(value, "task_options")

    @model_validator(mode="before")
    @classmethod
    def _reject_booleans(cls, values: Any) -> Any:
        refuse_booleans(values, cls.model_fields)
        return values

    @model_validator(mode="after")
    def _task_fits_model(self) -> RunSpec:
        task, model = self.build_task(), self.model
        if task.per_token != (model.readout == "each"):
            must = f"{'be' if task.per_token else 'not be'} 'each' for this task"
            raise invalid("model.readout", must, model.readout)
        if task.per_token and not model.causal:
            raise ValueError("model.causal must be true for next-token labels, got false.")
        for name, minimum, reason in (
            ("max_len", task.length, "the tokens of the task's sequences"),
            ("vocab_size", task.vocab_size, "the token ids of the task"),
            ("num_classes", task.labels[-1] + 1, f"as labels go up to {task.labels[-1]}"),
        ):
            if getattr(model, name) < minimum:
                raise invalid(f"model.{name}", f"be at least {minimum}, {reason}", getattr(model, name))
        if list(task.labels[:2]) == [self.ignore_label]:
            raise InputError(f"ignore_label must not be {self.ignore_label}, the task's only label.")
        check_memory("model and examples: they need", self.min_memory)
        if self.evaluations > self.steps_per_epoch:
            raise invalid("evaluations", f"be at most {self.steps_per_epoch}, the steps of an epoch", self.evaluations)
        if self.plateau is not None and (patience := self.plateau.patience) >= (limit := self.total_evaluations):
            raise invalid("plateau.patience", f"be less than {limit}, the evaluations of the run", patience)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise invalid("betas", "be at least 0 and under 1", self.betas)
        if pinned := task.pinned_options():  # the text's identity is part of the run's
            object.__setattr__(self, "task_options", to_json_types({**self.task_options, **pinned}))
        return self

    def build_task(self) -> tasks.Task:
        """A new instance of the task."""
        return tasks.build(self.task, **self.task_options)

    @property
    def chance(self) -> float:
        """Accuracy of the best constant prediction."""
        return self.build_task().chance(self.ignore_label)

    @property
    def guess(self) -> float:
        """Accuracy of the length-only baseline."""
        return max(self.build_task().length_chance(self.ignore_label), self.chance)

    @property
    def min_memory(self) -> int:
        """Minimum memory of training in bytes: examples, weights, gradients and AdamW's two moments."""
        examples = self.train_examples + self.test_examples
        copies, task = 16 if self.average is None else 20, self.build_task()
        labels = task.length if task.per_token else 1
        return 8 * examples * (task.length + labels) + copies * self.model.min_parameters

    @property
    def tokens(self) -> int:
        """Tokens processed in training, including repeated epochs and padding."""
        return self.epochs * self.train_examples * self.build_task().length

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.train_examples // self.batch_size)

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def learning_rate(self) -> Callable[[int], float]:
        """The learning rate by the number of steps done."""
        warmup = int(self.warmup * self.total_steps)
        constant = self.schedule == "constant"
        factor = constant_with_warmup(warmup) if constant else cosine_with_warmup(warmup, self.total_steps)
        return lambda step: self.lr * factor(step)

    @property
    def fit_examples(self) -> int:
        """Number of training examples in an evaluation."""
        return min(self.train_examples, self.test_examples)

    @property
    def total_evaluations(self) -> int:
        return self.epochs * self.evaluations

    def is_finished(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether training ends after these evaluations: all epochs are done, or the plateau rule applies."""
        if len(rows) == self.total_evaluations:
            return True
        return self.plateau is not None and self.plateau.should_end(rows, self.guess, self.total_evaluations)

    def evaluations_due(self, step: int) -> int:
        """Number of evaluations due after so many steps."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.evaluations + steps * self.evaluations // self.steps_per_epoch

    @property
    def content(self) -> dict[str, Any]:
        """All fields, for JSON, without fields added in later versions that have their default."""
        content = self.model_dump(mode="json")
        unused = {name for name in _ADDED_FIELDS if content[name] == type(self).model_fields[name].default}
        return {name: value for name, value in content.items() if name not in unused}

    @property
    def name(self) -> str:
        """The run's name: the first 16 hexadecimal digits of the SHA-256 of its content."""
        content = json.dumps(self.content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def run_spec(**fields: Any) -> RunSpec:
    """Build a `RunSpec`; invalid fields raise an `InputError`."""
    try:
        return RunSpec(**fields)
    except ValidationError as error:
        raise InputError(validation_message(error, RunSpec)) from None
