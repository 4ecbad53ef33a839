"""Ctrl-C and termination as a request: finish the step at hand, write a checkpoint, stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = {signal.SIGINT, signal.SIGTERM}


@contextmanager
def signals_held() -> Iterator[None]:
    """Processes started within it hold SIGINT and SIGTERM, which terminals and schedulers send to all of a group.

    A SIGINT is the parent's to handle, so workers never hear it; a SIGTERM they may take up by themselves.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Within it, SIGINT and SIGTERM only raise a flag, which the given function reads; a second SIGINT interrupts."""
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
