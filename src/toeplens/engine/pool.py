"""Pieces of work in processes of their own, several at a time: each can be stopped, all report to one place."""

from __future__ import annotations

import enum
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from toeplens.engine.limits import Limits
from toeplens.ground import EnvironmentFailure, ToeplensError
from toeplens.ground.signals import ignored_by_children

Piece = TypeVar("Piece")
Told = Callable[[int, Any], None]
Work = Callable[[Piece, Limits, Callable[[Any], None]], Any]
_LOOK = 0.1


class Put(enum.Enum):
    """What comes of a piece that cannot be done now: it is put off, until others have been tried."""

    OFF = "off"


class Upcoming(Generic[Piece]):
    """Pieces that wait for their turn, by index; those put off come last, and not again at once.

    ``after`` says of some which other each has to wait for.
    """

    def __init__(self, pieces: Sequence[Piece], wait: float, after: Mapping[int, int] | None = None) -> None:
        self.pieces, self.wait = pieces, wait
        self._ready = deque((0.0, index) for index in range(len(pieces)))
        self._after, self._done = after or {}, set[int]()

    def next(self) -> int | None:
        """The next piece whose time has come."""
        now = time.monotonic()
        for place, (earliest, index) in enumerate(self._ready):
            if earliest <= now and (index not in self._after or self._after[index] in self._done):
                del self._ready[place]
                return index
        return None

    def done(self, index: int) -> None:
        """A piece is done: what waited for it waits no more."""
        self._done.add(index)

    def put_off(self, index: int) -> None:
        """A piece is to be tried again."""
        self._ready.append((time.monotonic() + self.wait, index))

    def put_first(self, index: int) -> None:
        """A piece is to be tried again, at once."""
        self._ready.appendleft((0.0, index))

    def clear(self) -> None:
        """Nothing more is to be begun."""
        self._ready.clear()

    def __bool__(self) -> bool:
        return bool(self._ready)


def in_processes(
    work: Work[Piece],
    pieces: Sequence[Piece],
    limits: Limits,
    *,
    count: int,
    threads: int,
    on_done: Told,
    on_told: Told = lambda index, what: None,
    after: Mapping[int, int] | None = None,
) -> None:
    """Do ``work(piece, limits, tell)`` for each piece, in order, ``count`` at a time.

    A piece whose index ``after`` maps to that of another is begun once the other is done.

    ``on_done`` hears each piece's index and result as it ends. None says that a piece was stopped before its end; then
    no further piece is begun. `Put.OFF` says that it is to be tried again after others. ``work`` is a function of a
    module, and its limits say when to stop: a deadline, ``limits.should_stop``, SIGTERM, the end of this process. What
    it tells, ``on_told`` hears with its index.

    An error in one piece stops the others likewise and is raised once they have stopped. `KeyboardInterrupt` kills
    the workers, and is raised.
    """
    context = multiprocessing.get_context("spawn")
    stop, told = context.Event(), context.Queue()
    plain = replace(limits, should_stop=_never)
    upcoming = Upcoming(pieces, wait=1.0, after=after)
    failure: BaseException | None = None
    with ProcessPoolExecutor(count, mp_context=context, initializer=_start, initargs=(stop, told, threads)) as pool:
        waiting: dict[Future[Any], int] = {}
        try:
            while True:
                while len(waiting) < count and not stop.is_set() and not limits.over():
                    index = upcoming.next()
                    if index is None:
                        break
                    with ignored_by_children():
                        waiting[pool.submit(_do, work, index, pieces[index], plain)] = index
                if not waiting and (not upcoming or stop.is_set() or limits.over()):
                    break
                if waiting:
                    finished, _ = wait(waiting, timeout=_LOOK, return_when=FIRST_COMPLETED)
                else:
                    time.sleep(_LOOK)
                    finished = set()
                _drain(told, on_told)
                if limits.should_stop():  # the deadline they know
                    stop.set()
                for future in finished:
                    index = waiting.pop(future)
                    try:
                        result = future.result()
                    except ToeplensError as error:
                        stop.set()
                        failure = failure or error
                        continue
                    if result is Put.OFF:
                        upcoming.put_off(index)
                        continue
                    if result is None:
                        upcoming.clear()
                    upcoming.done(index)
                    on_done(index, result)
        except KeyboardInterrupt:
            for process in list(pool._processes.values()):
                process.kill()
            raise
        except BaseException as error:
            stop.set()
            failure = failure or error
    _drain(told, on_told)
    if isinstance(failure, ToeplensError):
        raise failure
    if isinstance(failure, BrokenProcessPool) and limits.should_stop():
        return  # SIGTERM came to workers that were not ready for it yet
    if failure is not None:
        raise EnvironmentFailure(
            f"a worker process ended unexpectedly ({type(failure).__name__}: {failure}); what was finished is kept, "
            f"and the same command goes on; if memory is short, lower --workers."
        ) from failure


def _never() -> bool:
    return False


def _drain(told: Any, on_told: Told) -> None:
    while True:
        try:
            index, what = told.get_nowait()
        except queue.Empty:
            return
        on_told(index, what)


# ---- in a worker ----------------------------------------------------------------------------------------------------

_stop: Any = None
_told: Any = None
_busy = threading.Lock()
_leaving = threading.Event()


def _start(stop: Any, told: Any, threads: int) -> None:
    global _stop, _told
    torch.set_num_threads(threads)
    _stop, _told = stop, told
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _leaving.set())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent is gone, after the piece at hand has been left at a point to go on from.

    A SIGTERM alone ends the piece and not the worker: who sends it to a whole group has the parent end its workers.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _leaving.set()
    with _busy:
        os._exit(1)


def _told_to_stop() -> bool:
    return _leaving.is_set() or _stop.is_set()


def _do(work: Work[Any], index: int, piece: Any, limits: Limits) -> Any:
    if _leaving.is_set():
        return None
    with _busy:
        return work(piece, replace(limits, should_stop=_told_to_stop), lambda what: _told.put((index, what)))
