"""The environment of a run, recorded with every result, by ranges of steps."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from toeplens.utils import EnvironmentFailure, choose, invalid, repr_of
from toeplens.utils.records import NonNegativeInt, Record, StrictBool, StrictStr
from toeplens.utils.renamed import renamed
from toeplens.version import __version__


@renamed
@dataclass(frozen=True)
class Execution:
    """How a run is executed on this machine: device, precision, compiled or not, and why."""

    device: torch.device
    bf16: bool
    compiled: bool
    reason: str

    def describe(self) -> str:
        """A one-line description."""
        mode = "torch.compile" if self.compiled else "eager"
        return f"{self.device.type}, {'bfloat16 products' if self.bf16 else 'float32'}, {mode} ({self.reason})"


_BF16_WIDTH = 256  # minimum model width for which bfloat16 pays on a GPU


def plan_execution(device: str, compile_mode: str, precision: str, width: int = _BF16_WIDTH) -> Execution:
    """Choose device, precision and compilation.

    On a GPU, small models are limited by kernel launches, so they are compiled if a compiler is present. On a CPU,
    compiled code was measured to be slower than eager at the laptop scale (docs/decisions/11), so it is compiled only
    on request. ``width`` is the model's: on a GPU, bfloat16 products are faster at the paper's width of 256 and slower
    at 128 (docs/decisions/11), so ``auto`` uses bfloat16 from 256 on.
    """
    choose("compile", compile_mode, ("auto", "on", "off"))
    choose("precision", precision, ("auto", "float32", "bf16"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch_device = torch.device(device)
    except RuntimeError:
        torch_device = None
    if torch_device is None or torch_device.type not in ("cpu", "cuda") or str(torch_device).startswith("cpu:"):
        raise invalid("device", "be auto, cpu, cuda or cuda:N", device)
    on_gpu = torch_device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise EnvironmentFailure(f"device: this machine has no usable GPU, got {repr_of(device)}.")
    if on_gpu and (torch_device.index or 0) >= torch.cuda.device_count():
        raise EnvironmentFailure(f"device: this machine has {torch.cuda.device_count()} GPU, got {repr_of(device)}.")
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compile_mode == "on" and compiler is None:
        raise EnvironmentFailure("compile: this machine has no C++ compiler, got 'on'.")
    reason = "requested"
    if compile_mode == "auto":
        gpu_reason = "GPU with a compiler" if compiler else "no C++ compiler"
        reason = gpu_reason if on_gpu else "compiling is slower on a CPU at these sizes"
    compiled = compile_mode == "on" or (compile_mode == "auto" and on_gpu and compiler is not None)
    bf16 = precision == "bf16" or (precision == "auto" and on_gpu and width >= _BF16_WIDTH)
    return Execution(torch_device, bf16, compiled, reason)


def environment(execution: Execution | None = None) -> dict[str, Any]:
    """Versions, machine and command, to reproduce the run."""
    return {
        "toeplens": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": _gpu(execution),
        "execution": execution.describe() if execution else None,
        "command": " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
    }


def _gpu(execution: Execution | None) -> str | None:
    device = torch.device("cuda") if execution is None else execution.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else None


def processor() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Setup(Record):
    """Everything besides the spec that affects a run's arithmetic; equal setups on a CPU give bit-identical results.

    device, gpu        ``cpu``, ``cuda`` or ``cuda:1``; and the GPU's name, None on a CPU
    precision          ``float32`` or ``bfloat16`` (matrix products)
    compiled           whether the training step was compiled
    threads            of the process
    toeplens, torch, processor  versions, and the processor's name
    stacked            whether several models were trained as one, see `toeplens.training.batched`
    """

    ADDED_LATER = ("stacked",)

    device: StrictStr
    gpu: StrictStr | None
    precision: StrictStr
    compiled: StrictBool
    threads: NonNegativeInt
    toeplens: StrictStr
    torch: StrictStr
    processor: StrictStr
    stacked: StrictBool = False

    def __str__(self) -> str:
        where = self.gpu if self.gpu is not None else f"{self.processor}, {self.threads} thread(s)"
        mode = ("compiled" if self.compiled else "eager") + (", one of a stack" if self.stacked else "")
        return f"{self.device} ({where}), {self.precision}, {mode}, torch {self.torch}, toeplens {self.toeplens}"


@dataclass(frozen=True)
class Segment(Record):
    """Steps of a run with one setup: those after ``start``, up to ``end`` (None: not known yet)."""

    start: NonNegativeInt
    end: NonNegativeInt | None
    setup: Setup


def setup_of(execution: Execution, *, batched: bool = False) -> Setup:
    """This process's setup."""
    return Setup(
        device=str(execution.device),
        gpu=_gpu(execution),
        precision="bfloat16" if execution.bf16 else "float32",
        compiled=execution.compiled,
        threads=torch.get_num_threads(),
        toeplens=__version__,
        torch=str(torch.__version__),  # a str subclass, which a checkpoint cannot store
        processor=processor(),
        stacked=batched,
    )


def resume_history(history: Sequence[Segment], step: int, setup: Setup) -> list[Segment]:
    """A history that is resumed from ``step`` with ``setup``; later segments are dropped, as their steps were lost."""
    spans = [replace(span, end=step if span.end is None else min(span.end, step)) for span in history]
    spans = [span for span in spans if span.end is not None and span.start < span.end]
    if spans and spans[-1].setup == setup:
        return [*spans[:-1], replace(spans[-1], end=None)]
    return [*spans, Segment(step, None, setup)]


def end_history(history: Sequence[Segment], step: int) -> list[Segment]:
    """The history up to ``step``."""
    return [replace(span, end=step if span.end is None else span.end) for span in history]


def describe_history(history: Sequence[Segment]) -> str:
    """A readable history: ``steps 0-120 on cpu (...); steps 120-400 on cuda (...)``."""
    return "; ".join(f"steps {span.start}-{'' if span.end is None else span.end} on {span.setup}" for span in history)
