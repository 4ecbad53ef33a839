"""How work is stopped: by Ctrl-C, by SIGTERM, or because its time is up.

Work that knows where it can be left is asked first; what does not answer in time is interrupted, wherever it is: all
files are written whole (`toeplens.ground.files`), so nothing is lost but what was being worked on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = "stopped; what was finished is kept, and the same command goes on."
EXIT_CODE = 130
WORKERS_GRACE, GRACE, AT_MOST = 2.0, 3.5, 4.5  # seconds until work in a worker, a command's own, and a process end
_LOOK, _AGAIN = 0.05, 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread to leave the work at hand, wherever it is."""


@contextmanager
def interruptible(over: Callable[[], bool], grace: float = GRACE) -> Iterator[None]:
    """Within it, `Interrupted` is raised in the main thread once ``over()`` has been true for ``grace`` seconds.

    ``over`` is asked about twenty times a second by a thread of its own. Outside the main thread, which alone can be
    interrupted, nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    main, inside, left = threading.get_ident(), True, threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if inside:
            raise Interrupted

    def watch() -> None:
        since: float | None = None
        while not left.wait(_LOOK):
            if not over():
                continue
            since = time.monotonic() if since is None else since
            if time.monotonic() - since >= grace:
                signal.pthread_kill(main, signal.SIGALRM)
                left.wait(_AGAIN)  # a library may have swallowed it

    before = signal.signal(signal.SIGALRM, interrupt)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            inside = False
    finally:
        inside = False  # the line above may be where it was interrupted
        left.set()
        watcher.join()
        signal.signal(signal.SIGALRM, before)


@contextmanager
def stop_on_signals(grace: float = GRACE) -> Iterator[Callable[[], bool]]:
    """Within it, SIGINT and SIGTERM raise a flag, which the given function reads: for work that asks whether to stop.

    Work that has not stopped after ``grace`` seconds is interrupted, and so it is by a second SIGINT.
    """
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise Interrupted
        asked.set()

    with _handled(ask), interruptible(asked.is_set, grace):
        yield asked.is_set


@contextmanager
def interrupted_by_signals(say: Callable[[], None], at_most: float = AT_MOST) -> Iterator[None]:
    """Within it, SIGINT and SIGTERM raise `Interrupted`; a process that then goes on for ``at_most`` seconds is ended.

    ``say`` is called before such an end, which is that of a process deep in a library's own loop. Within
    `stop_on_signals` work is asked first; the end is the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, hears = os.pipe()
    os.set_blocking(hears, False)
    left = threading.Event()

    def watch() -> None:
        while number := os.read(heard, 1):
            if number[0] in _SIGNALS:
                break
        else:
            return
        if not left.wait(at_most):
            say()
            os._exit(EXIT_CODE)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(hears, warn_on_full_buffer=False)
    try:
        with _handled(interrupt):
            yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        os.close(hears)
        watcher.join()
        os.close(heard)


@contextmanager
def signals_held() -> Iterator[None]:
    """Processes started within it hold SIGINT and SIGTERM, which terminals and schedulers send to all of a group.

    Both are the parent's to handle: it tells its workers.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, had in before.items():
            signal.signal(number, had)
