"""Entries of dictionaries that are changed for the length of a pass, and put back after the last such pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

_ABSENT = object()
_LOCK = threading.Lock()


@dataclass
class _Loan:
    mapping: dict[str, Any]  # held, so that its id stays its own
    before: Any
    passes: int = 0


_LOANS: dict[tuple[int, str], _Loan] = {}


_ALONE: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()


@contextmanager
def alone(model: Any) -> Iterator[None]:
    """One such pass of a model at a time: those of other threads wait. Passes of other models do not."""
    with _LOCK:
        lock = _ALONE.setdefault(model, threading.RLock())
    with lock:
        yield


@contextmanager
def changed(changes: Iterable[tuple[dict[str, Any], str, Callable[[Any], Any]]]) -> Iterator[None]:
    """Put ``value(before)`` at ``mapping[name]`` for each (mapping, name, value), and put back what was there.

    Passes of several threads may overlap: the first makes the change, the last takes it back. What is put there must
    therefore serve whoever comes by, inside a pass or not.
    """
    taken: list[tuple[int, str]] = []
    try:
        for mapping, name, value in changes:
            key = (id(mapping), name)
            with _LOCK:
                if key not in _LOANS:
                    before = mapping.get(name, _ABSENT)
                    mapping[name] = value(before)
                    _LOANS[key] = _Loan(mapping, before)
                _LOANS[key].passes += 1
            taken.append(key)
        yield
    finally:
        for key in reversed(taken):
            with _LOCK:
                loan = _LOANS[key]
                loan.passes -= 1
                if loan.passes == 0:
                    del _LOANS[key]
                    if loan.before is _ABSENT:
                        del loan.mapping[key[1]]
                    else:
                        loan.mapping[key[1]] = loan.before
