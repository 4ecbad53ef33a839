"""What a run was carried out with: recorded beside every result."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch

from toeplens.ground import EnvironmentFailure, InputError, choose, shown
from toeplens.version import __version__

CompileMode = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Execution:
    """How a run is executed on this machine: device, precision, compiled or not, and why."""

    device: torch.device
    bf16: bool
    compiled: bool
    why: str

    def describe(self) -> str:
        """One line for people."""
        mode = "torch.compile" if self.compiled else "eager"
        return f"{self.device.type}, {'bfloat16 products' if self.bf16 else 'float32'}, {mode} ({self.why})"


_WIDE = 256  # from where bfloat16 products pay on a GPU


def plan_execution(device: str, compile_mode: CompileMode, precision: str, width: int = _WIDE) -> Execution:
    """Decide device, precision and compilation.

    On a GPU small models are bound by launches, so they are compiled where a compiler is present. On a CPU compiled
    code was measured slower than eager at the laptop scale (docs/decisions/005; benchmarks/training.py measures it
    again), so there it is taken only on request. ``width`` is the model's: products of bfloat16 are faster on a GPU
    at the papers' 256 and slower at 128 (docs/decisions/023), so ``auto`` means them from 256 on. On a CPU the process
    keeps freed memory from here on.
    """
    choose("compile", compile_mode, ("auto", "on", "off"))
    choose("precision", precision, ("auto", "float32", "bf16"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InputError(f"device: {shown(device)} was given; it must be auto, cpu, cuda or cuda:N.") from None
    choose("device", chosen.type, ("cpu", "cuda"))
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFailure(f"device: {shown(device)} was given, but this machine has no usable GPU.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise EnvironmentFailure(
            f"device: {shown(device)} was given, but this machine has {torch.cuda.device_count()} GPU."
        )
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compile_mode == "off":
        compiled, why = False, "asked for"
    elif compile_mode == "on":
        if compiler is None:
            raise EnvironmentFailure("compile: 'on' was given, but this machine has no C++ compiler.")
        compiled, why = True, "asked for"
    elif chosen.type == "cuda":
        compiled, why = compiler is not None, "a GPU and a compiler" if compiler else "no C++ compiler"
    else:
        compiled, why = False, "compiling does not pay on a CPU at these sizes"
    bf16 = precision == "bf16" or (precision == "auto" and chosen.type == "cuda" and width >= _WIDE)
    return Execution(chosen, bf16, compiled, why)


def environment(execution: Execution | None = None) -> dict[str, Any]:
    """Versions, machine and command: what someone needs to run the same again."""
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
    """The GPU that is worked on; where none is told, the first; None without."""
    if execution is not None and execution.device.type != "cuda":
        return None
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(None if execution is None else execution.device)


def processor() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
