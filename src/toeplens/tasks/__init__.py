"""Tasks: `names()`, `build(name, **options)`. Data are deterministic and streamed, with disjoint train and test sets.

To add a task, write a class with a ``name`` in the file of its family; a new family is a file and its name in
`_FAMILIES`.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from toeplens.tasks.base import PAD, TEST_SHARE, Examples, Split, Task, fingerprint, in_test
from toeplens.tasks.baselines import trivial_baselines
from toeplens.tasks.counting import ContextualCount, Dyck, Parity
from toeplens.tasks.hops import LetterHops, NumberHops
from toeplens.tasks.language import Language
from toeplens.tasks.lookup import Index, Mix, Recall, Retrieval
from toeplens.tasks.sequences import Addition, Copy, Reverse, Sort
from toeplens.tasks.synthetic import MarkovLanguage, NestedLanguage
from toeplens.tasks.triggers import TriggerCount, TriggerDistance
from toeplens.utils import InputError, choose, repr_of
from toeplens.utils.options import check_value, parameters

# the modules of this package, in the order of the list of names
_FAMILIES = ("triggers", "lookup", "hops", "counting", "sequences", "language", "synthetic")
_TASKS: dict[str, type[Task]] = {
    kind.name: kind
    for family in _FAMILIES
    for kind in vars(import_module(f"toeplens.tasks.{family}")).values()
    if isinstance(kind, type) and issubclass(kind, Task) and "name" in vars(kind)
}


def names() -> tuple[str, ...]:
    """The names of all tasks."""
    return tuple(_TASKS)


def get(name: str) -> type[Task]:
    """The class for ``name``; raises an `InputError` that lists similar names if there is none."""
    return _TASKS[choose("task", name, _TASKS)]


def options(name: str) -> dict[str, inspect.Parameter]:
    """The options of ``build(name, ...)`` with their defaults."""
    return {n: p for n, p in parameters(get(name).__init__).items() if n != "self"}


def build(name: str, **options_given: Any) -> Task:
    """Build a task; raises `InputError` for an unknown name or option, or incompatible options."""
    known = options(name)
    for option, value in options_given.items():
        check_value(choose(f"option of task {name!r}", option, known), value, known[option].annotation)
    try:
        return get(name)(**options_given)
    except InputError:
        raise
    except (TypeError, ValueError, ArithmeticError, MemoryError) as error:  # values that no task can use
        given = ", ".join(f"{option}={repr_of(value)}" for option, value in options_given.items())
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
    "LetterHops",
    "MarkovLanguage",
    "Mix",
    "NestedLanguage",
    "NumberHops",
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
