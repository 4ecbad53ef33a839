"""What a run was carried out on, from step to step: it may be begun on one machine and ended on another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from toeplens.ground.reading import Count, Text, Truth
from toeplens.ground.records import Record
from toeplens.training.environment import Execution, processor
from toeplens.version import __version__


@dataclass(frozen=True)
class Setup(Record):
    """What decides the arithmetic of a run beside its spec: with the same, and on a CPU, it is bit-identical.

    device, gpu        ``cpu``, ``cuda`` or ``cuda:1``; and what GPU, None on a CPU
    precision          ``float32`` or ``bfloat16`` (matrix products)
    compiled           whether the training step was compiled
    threads            of the process
    toeplens, torch, processor  versions, and the processor's name
    stacked            whether it was one of several models trained as one, see `toeplens.training.stack`
    """

    LATER = ("stacked",)

    device: Text
    gpu: Text | None
    precision: Text
    compiled: Truth
    threads: Count
    toeplens: Text
    torch: Text
    processor: Text
    stacked: Truth = False

    def __str__(self) -> str:
        where = self.gpu if self.gpu is not None else f"{self.processor}, {self.threads} thread(s)"
        mode = ("compiled" if self.compiled else "eager") + (", one of a stack" if self.stacked else "")
        return f"{self.device} ({where}), {self.precision}, {mode}, torch {self.torch}, toeplens {self.toeplens}"


@dataclass(frozen=True)
class Segment(Record):
    """Steps of a run on one set-up: those after ``start``, up to ``end`` (None: not known yet)."""

    start: Count
    end: Count | None
    setup: Setup


def setup_of(execution: Execution, *, stacked: bool = False) -> Setup:
    """This process's set-up."""
    return Setup(
        device=str(execution.device),
        gpu=torch.cuda.get_device_name(execution.device) if execution.device.type == "cuda" else None,
        precision="bfloat16" if execution.bf16 else "float32",
        compiled=execution.compiled,
        threads=torch.get_num_threads(),
        toeplens=__version__,
        torch=str(torch.__version__),  # a class of its own, which a checkpoint does not hold
        processor=processor(),
        stacked=stacked,
    )


def gone_on(history: Sequence[Segment], step: int, setup: Setup) -> list[Segment]:
    """A history that goes on from ``step`` on ``setup``; what came after that step is lost and told no more."""
    kept = [replace(each, end=step if each.end is None else min(each.end, step)) for each in history]
    kept = [each for each in kept if each.end is not None and each.start < each.end]
    if kept and kept[-1].setup == setup:
        return [*kept[:-1], replace(kept[-1], end=None)]
    return [*kept, Segment(step, None, setup)]


def ended(history: Sequence[Segment], step: int) -> list[Segment]:
    """The history up to ``step``."""
    return [replace(each, end=step if each.end is None else each.end) for each in history]


def told(history: Sequence[Segment]) -> str:
    """A history in words: ``steps 0-120 on cpu (...); steps 120-400 on cuda (...)``."""
    return "; ".join(f"steps {each.start}-{'' if each.end is None else each.end} on {each.setup}" for each in history)


def read_history(content: Any, path: Path) -> list[Segment]:
    """The history that the content of environment.json tells; none if an earlier version wrote it.

    Raises `InputError` that names ``path`` where it is damaged.
    """
    return _Environment.from_dict(content, path).history


@dataclass(frozen=True)
class _Environment(Record):
    LATER = ("history",)

    history: list[Segment] = field(default_factory=list)
