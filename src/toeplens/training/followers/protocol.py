"""What follows a run, and what it is told: the run, each evaluation, the end."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from toeplens.ground import EnvironmentFailure
from toeplens.training.run import Status
from toeplens.training.spec import RunSpec

_SPLITS = ("train", "test", "fit")


@dataclass(frozen=True)
class RunFacts:
    """A run whose training begins, or goes on.

    name       that of its directory, the same each time that it goes on
    step       of the last evaluation that is safe: the rows that come are of later ones. 0 at the beginning
    """

    name: str
    directory: Path
    spec: RunSpec
    step: int

    @property
    def title(self) -> str:
        """What people call it, where nobody says."""
        return f"{self.spec.task} · {self.spec.model.encoding} · seed {self.spec.seed}"


@dataclass(frozen=True)
class RunEnd:
    """How a session of training ended.

    status  ``complete``, ``diverged``, or ``stopped``: it may be gone on with
    step    training steps done
    result  the final figures, as in result.json; empty where it was stopped
    reason  why it diverged, or the error that stopped it
    """

    status: Status
    step: int
    result: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None


@runtime_checkable
class Follower(Protocol):
    """What is told of one run while it is trained: once `begin`, `look` for each evaluation, once `end`.

    It changes nothing: what it raises is said in one line, it is told no more, and training goes on. It is called
    between two units of training, which wait for it.
    """

    def begin(self, run: RunFacts) -> None:
        """Training begins, or goes on."""
        ...

    def look(self, row: Mapping[str, float]) -> None:
        """An evaluation of this session, as metrics.jsonl has it; figures that are not finite are left out."""
        ...

    def end(self, end: RunEnd) -> None:
        """Training is over, for now or for good."""
        ...


def figures(row: Mapping[str, float]) -> dict[str, float]:
    """A row but its step, by the names that trackers group: ``train/loss`` for ``train_loss``."""
    named = {}
    for name, value in row.items():
        split, _, what = name.partition("_")
        named[f"{split}/{what}" if split in _SPLITS and what else name] = value
    named.pop("step", None)
    return named


def imported(module: str, name: str) -> Any:
    """A module of the extra ``name``, or the sentence that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        why = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
        raise EnvironmentFailure(f"follow: {name} {why}; pip install 'toeplens[{name}]'.") from None
