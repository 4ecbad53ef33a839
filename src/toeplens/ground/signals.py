"""Ctrl-C and SIGTERM: the first sets a flag that work reads between its steps, a second Ctrl-C raises at once.

Files are written whole or not at all (`toeplens.ground.files`), so an interruption at any line costs the work in
progress and no more.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "Interrupted. Finished work is saved; run the same command to resume."
EXIT_CODE = 130


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Within it, SIGINT and SIGTERM set a flag, which the given function reads; a second SIGINT raises.

    Only the main thread may enter it.
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
    """Processes started within it ignore SIGINT, which a terminal sends to the whole group: their parent stops them."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
