"""Ctrl-C and SIGTERM: the first sets a flag that is checked between steps; a second Ctrl-C raises at once.

Files are written atomically (`toeplens.ground.files`), so an interruption loses only the work in progress.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "Interrupted. Finished work is saved; run the same command to resume."
EXIT_CODE = 130


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Context in which SIGINT and SIGTERM set a flag, read by the yielded function; a second SIGINT raises.

    Only for the main thread.
    """
    requested = False

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        requested = True

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ignored_by_children() -> Iterator[None]:
    """Context in which child processes ignore SIGINT, which terminals send to all; their parent stops them.

    In the parent, a SIGINT waits until the end of the context.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # which children inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
