"""Tasks: `names()`, `build(name, **options)`; deterministic, streamed, train and test disjoint.

A new task is a class in its family's file and a line in `_KINDS`.
"""

from __future__ import annotations

import inspect
from typing import Any

from toeplens.ground import InputError, choose, shown
from toeplens.ground.options import must_be, parameters
from toeplens.tasks.addition import Addition
from toeplens.tasks.base import PAD, TEST_SHARE, Examples, Split, Task, fingerprint, in_test
from toeplens.tasks.baselines import trivial_baselines
from toeplens.tasks.brackets import Dyck
from toeplens.tasks.counting import ContextualCount, Parity
from toeplens.tasks.language import Language, MarkovLanguage, NestedLanguage
from toeplens.tasks.lookup import Index, Mix, Recall, Retrieval
from toeplens.tasks.sequences import Copy, Reverse, Sort
from toeplens.tasks.triggers import TriggerCount, TriggerDistance

_KINDS = (
    TriggerDistance,
    TriggerCount,
    Index,
    Retrieval,
    Mix,
    Recall,
    ContextualCount,
    Parity,
    Dyck,
    Copy,
    Reverse,
    Sort,
    Addition,
    Language,
    MarkovLanguage,
    NestedLanguage,
)
_TASKS: dict[str, type[Task]] = {kind.name: kind for kind in _KINDS}


def names() -> tuple[str, ...]:
    """The names of all tasks."""
    return tuple(_TASKS)


def get(name: str) -> type[Task]:
    """The class behind ``name``; an unknown name raises an `InputError` that lists the nearest ones."""
    return _TASKS[choose("task", name, _TASKS)]


def options(name: str) -> dict[str, inspect.Parameter]:
    """The options of ``build(name, ...)`` with their defaults."""
    return {n: p for n, p in parameters(get(name).__init__).items() if n != "self"}


def build(name: str, **options_given: Any) -> Task:
    """Build the task ``name``; raises `InputError` for an unknown name or option, or options that don't fit."""
    known = options(name)
    for option, value in options_given.items():
        must_be(choose(f"option of task {name!r}", option, known), value, known[option].annotation)
    try:
        return get(name)(**options_given)
    except InputError:
        raise
    except (TypeError, ValueError, ArithmeticError, MemoryError) as error:  # numbers that none can take
        given = ", ".join(f"{option}={shown(value)}" for option, value in options_given.items())
        raise InputError(f"task: {name!r} cannot be built from {given}: {error}.") from error


__all__ = [
    "PAD",
    "TEST_SHARE",
    "Addition",
    "ContextualCount",
    "Copy",
    "Dyck",
    "Examples",
    "Index",
    "Language",
    "MarkovLanguage",
    "Mix",
    "NestedLanguage",
    "Parity",
    "Recall",
    "Retrieval",
    "Reverse",
    "Sort",
    "Split",
    "Task",
    "TriggerCount",
    "TriggerDistance",
    "build",
    "fingerprint",
    "get",
    "in_test",
    "names",
    "options",
    "trivial_baselines",
]
