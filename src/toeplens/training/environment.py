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

from toeplens.ground import EnvironmentFailure, choose, invalid, shown
from toeplens.ground.records import Count, Record, Text, Truth
from toeplens.version import __version__


@dataclass(frozen=True)
class Execution:
    """How a run is executed on this machine: device, precision, compiled or not, and why."""

    device: torch.device
    bf16: bool
    compiled: bool
    why: str

    def describe(self) -> str:
        """A one-line description."""
        mode = "torch.compile" if self.compiled else "eager"
        return f"{self.device.type}, {'bfloat16 products' if self.bf16 else 'float32'}, {mode} ({self.why})"


_WIDE = 256  # minimum model width for which bfloat16 pays on a GPU


def plan_execution(device: str, compile_mode: str, precision: str, width: int = _WIDE) -> Execution:
    """Choose device, precision and compilation.

    On a GPU, small models are limited by kernel launches, so they are compiled if a compiler is present. On a CPU,
    compiled code was measured to be slower than eager at the laptop scale (docs/decisions/11, benchmarks/training.py),
    so it is compiled only on request. ``width`` is the model's: on a GPU, bfloat16 products are faster at the paper's
    width of 256 and slower at 128 (docs/decisions/11), so ``auto`` uses bfloat16 from 256 on.
    """
    choose("compile", compile_mode, ("auto", "on", "off"))
    choose("precision", precision, ("auto", "float32", "bf16"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise invalid("device", "be auto, cpu, cuda or cuda:N", device) from None
    choose("device", chosen.type, ("cpu", "cuda"))
    on_gpu = chosen.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise EnvironmentFailure(f"device: this machine has no usable GPU, got {shown(device)}.")
    if on_gpu and (chosen.index or 0) >= torch.cuda.device_count():
        raise EnvironmentFailure(f"device: this machine has {torch.cuda.device_count()} GPU, got {shown(device)}.")
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compile_mode == "on" and compiler is None:
        raise EnvironmentFailure("compile: this machine has no C++ compiler, got 'on'.")
    why = "requested"
    if compile_mode == "auto":
        on_a_gpu = "GPU with a compiler" if compiler else "no C++ compiler"
        why = on_a_gpu if on_gpu else "compiling is slower on a CPU at these sizes"
    compiled = compile_mode == "on" or (compile_mode == "auto" and on_gpu and compiler is not None)
    bf16 = precision == "bf16" or (precision == "auto" and on_gpu and width >= _WIDE)
    return Execution(chosen, bf16, compiled, why)


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
    stacked            whether several models were trained as one, see `toeplens.training.stack`
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
    """Steps of a run with one setup: those after ``start``, up to ``end`` (None: not known yet)."""

    start: Count
    end: Count | None
    setup: Setup


def setup_of(execution: Execution, *, stacked: bool = False) -> Setup:
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
        stacked=stacked,
    )


def gone_on(history: Sequence[Segment], step: int, setup: Setup) -> list[Segment]:
    """A history that is resumed from ``step`` with ``setup``; later segments are dropped, as their steps were lost."""
    kept = [replace(each, end=step if each.end is None else min(each.end, step)) for each in history]
    kept = [each for each in kept if each.end is not None and each.start < each.end]
    if kept and kept[-1].setup == setup:
        return [*kept[:-1], replace(kept[-1], end=None)]
    return [*kept, Segment(step, None, setup)]


def ended(history: Sequence[Segment], step: int) -> list[Segment]:
    """The history up to ``step``."""
    return [replace(each, end=step if each.end is None else each.end) for each in history]


def told(history: Sequence[Segment]) -> str:
    """A readable history: ``steps 0-120 on cpu (...); steps 120-400 on cuda (...)``."""
    return "; ".join(f"steps {each.start}-{'' if each.end is None else each.end} on {each.setup}" for each in history)
