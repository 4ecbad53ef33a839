"""Requests that are made again while a store does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from toeplens.ground import EnvironmentFailure

PATIENCE = 300.0  # seconds in all
_FIRST, _LONGEST, _LOOK = 1.0, 30.0, 0.2  # seconds of a wait, and between two looks whether it is over

Answer = TypeVar("Answer")


def patiently(ask: Callable[[], Answer], over: Callable[[], bool] = lambda: False) -> Answer:
    """What ``ask`` gives; where it raises an `EnvironmentFailure` it is asked again, for five minutes in all.

    The waits between are 1, 2, 4 ... 30 seconds. Once ``over()`` is true it is not asked again: the error is raised.
    """
    ends, wait = time.monotonic() + PATIENCE, _FIRST
    while True:
        try:
            return ask()
        except EnvironmentFailure:
            again = time.monotonic() + wait
            if again > ends:
                raise
            while not (late := over()) and time.monotonic() < again:
                time.sleep(min(_LOOK, wait))
            if late:
                raise
            wait = min(2 * wait, _LONGEST)
