"""What many tests build: tiny runs, stops at a place, faults of the disk, directories that somebody else holds."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from toeplens import encodings
from toeplens.training import Run, RunSpec, run_spec
from toeplens.utils import InputError
from toeplens.utils.outputs import LOCK

MODEL: dict[str, Any] = {
    "vocab_size": 12,
    "d_model": 16,
    "d_ff": 16,
    "num_layers": 2,
    "num_heads": 2,
    "max_len": 8,
    "dropout": 0.3,
}
FIELDS: dict[str, Any] = {
    "task_options": {"length": 8, "vocab_size": 12},
    "train_examples": 40,
    "test_examples": 20,
    "epochs": 2,
    "batch_size": 16,
    "lr": 1e-2,
}
COUNTING: dict[str, Any] = {  # with a label that counts nowhere
    "task": "trigger-count",
    "task_options": {"length": 8, "vocab_size": 12, "num_triggers": 3},
    "ignore_label": 0,
}


def _kind(name: str) -> tuple[str, bool]:
    kind = encodings.get(name)
    return kind.coupling, kind.data_dependent


TYPICAL = ("nope", "sinusoidal", "rope", "partial-rope", "mla", "alibi", "t5", "shaw", "fox", "cope", "stick-breaking")
wrong_types = pytest.mark.skipif(
    os.environ.get("TOEPLENS_CHECK_SHAPES") == "1", reason="the checker of types refuses them first"
)
REPRESENTATIVES = (  # one encoding per kind at least; a new kind is represented by its first encoding
    *TYPICAL,
    *{
        _kind(name): name for name in reversed(encodings.names()) if _kind(name) not in set(map(_kind, TYPICAL))
    }.values(),
)


def tiny(encoding: str = "rope", *, model: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    """A run of a moment: 3 steps an epoch and 2 batches of evaluation, the last ones partial.

    ``model`` are fields of its model that are others, ``changes`` those of the run.
    """
    return run_spec(**FIELDS | changes, model=MODEL | {"encoding": encoding} | (model or {}))


class StopAfter:
    """Says stop once, after so many units of work: steps, batches of evaluation or of an ablation, probes."""

    def __init__(self, units: int | None = None) -> None:
        self.units, self.asked = units, 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.units is not None and self.asked == self.units + 1


class CallbackProbe:
    """A probe of these steps, which calls ``does`` at each and measures nothing."""

    name = "callback"

    def __init__(self, at: Sequence[int], does: Callable[[], object] = lambda: None) -> None:
        self.at, self.does = at, does

    def probe_steps(self, total_steps: int) -> Sequence[int]:
        return self.at

    def measure(self, model: Any, step: int) -> dict[str, Any]:
        self.does()
        return {}


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the time that they took."""
    return [{key: value for key, value in row.items() if key not in ("seconds", "tokens_per_second")} for row in rows]


def results_of(run: Run) -> tuple[Any, ...]:
    """All that a run is for: its status, its weights bit by bit, its figures; not the time it took."""
    return (
        run.status,
        (run.directory / "model.safetensors").read_bytes(),
        without_times(run.metrics),
        without_times([run.result]),
    )


def files_in(directory: Path) -> dict[str, bytes]:
    """Every file below ``directory`` with its content."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def refusal_message(call: Callable[[], object], code: int = 2) -> str:
    """The one sentence with which ``call`` refuses its input."""
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == code
    return str(caught.value)


@contextmanager
def locked_elsewhere(directory: Path) -> Iterator[Any]:
    """A directory as another process holds it, by a file description of its own; gives what to close to let go."""
    with (directory / LOCK).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield stream


class Crash(BaseException):
    """The end of the process, as far as the code under test can tell."""


def failing_call(code: int) -> Callable[..., Any]:
    """A call of the system that is refused."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


disk_full = failing_call(errno.ENOSPC)
OS_REPLACE = os.replace  # which puts every file in place


def record_writes(patch: pytest.MonkeyPatch) -> list[str]:
    """From here on, the names of the files that are put in place, in order."""
    names: list[str] = []
    patch.setattr(os, "replace", lambda a, b: (names.append(Path(b).name), OS_REPLACE(a, b)))
    return names


def fault_at(patch: pytest.MonkeyPatch, write: int, fault: str) -> None:
    """At the write of this number the process ends ``before`` it or ``after`` it, or the disk is ``full`` for good."""
    count = iter(range(10**6))

    def replace(a: Any, b: Any) -> None:
        number = next(count)
        if fault == "full" and number >= write:
            disk_full()
        if fault == "before" and number == write:
            raise Crash
        OS_REPLACE(a, b)
        if fault == "after" and number == write:
            raise Crash

    patch.setattr(os, "replace", replace)


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str] | None = None, seconds: float = 90) -> None:
    """Wait for ``true()``; ``process`` must not end before."""
    give_up = time.monotonic() + seconds
    while not true():
        assert process is None or process.poll() is None, "the process ended too early"
        assert time.monotonic() < give_up
        time.sleep(0.05)


def load_script(path: Path) -> ModuleType:
    """A script that is in no package, as a module; it finds what lies beside it, as when it is run."""
    result = importlib.util.spec_from_file_location(path.stem, path)
    assert result is not None
    assert result.loader is not None
    module = importlib.util.module_from_spec(result)
    sys.modules[path.stem] = module  # dataclasses look their modules up
    sys.path.insert(0, str(path.parent))
    try:
        result.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
