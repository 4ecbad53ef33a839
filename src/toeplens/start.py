"""A command's first moments, in which modules are imported: a signal then ends the process at once, with one sentence.

An exception raised in the middle of an import comes out as anything; nothing has begun yet that would have to be left
in order. Imports make many objects and hardly any garbage: it is looked for when they are over.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STOPPED = b"error: stopped; no work was under way.\n"


def leave_on_signals() -> None:
    """From here on SIGINT and SIGTERM end this process with exit code 130; one that is ignored stays ignored."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def give_cores_back() -> None:
    """Threads that wait for each other leave their cores sooner than OpenMP has it; to be called before torch is there.

    A thread that waits in a loop keeps the core on which the one that it waits for could run. Where another process is
    at work on the cores, a training step of a small model then takes many times as long (docs/scale.md). GNU's OpenMP
    reads this when it is loaded; what the environment says of it stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


@contextmanager
def starting() -> Iterator[None]:
    """Around the imports of a command: within it, as after `leave_on_signals`; then as before."""
    hears = threading.current_thread() is threading.main_thread()  # which alone hears signals
    before = {number: signal.getsignal(number) for number in _SIGNALS if hears}
    if hears:
        leave_on_signals()
    try:
        with uncollected():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it no garbage is looked for, which takes a quarter of the time of importing torch and transformers.

    What it made is then old at once (`gc.freeze` and back), or the next three searches would go through all of it.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, _STOPPED)
    os._exit(130)
