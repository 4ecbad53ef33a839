"""Limits of work, and a pool of processes: pieces of work can be stopped, and report progress."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from toeplens.ground import EnvironmentFailure, ToeplensError, choose
from toeplens.ground.machine import within
from toeplens.ground.signals import ignored_by_children
from toeplens.training.environment import CompileMode
from toeplens.training.loggers import LOGGERS

MOST_STACKED = 256  # maximum number of models in a stack; each holds a file open


def clocks() -> tuple[float, float]:
    """The wall clock and the monotonic clock."""
    return time.time(), time.monotonic()


@dataclass(frozen=True)
class Limits:
    """When and how a job runs.

    device, compile     see `toeplens.training.plan_execution`
    checkpoint_seconds  maximum amount of work lost when killed
    deadline            `time.time()` by which to stop; later changes of the system clock have no effect
    should_stop         called before every unit of work
    publish             URL to fetch runs from and publish them to, see `toeplens.engine.remote`; None for no URL
    stack               number of models of equal shape trained together, see `toeplens.engine.many`; None: as many as
                        fill a GPU, and 1 on a CPU
    machines            description of the machines that run the work, if not this one
    follow              names of loggers for each run's evaluations: ``tensorboard``, ``wandb``, ``mlflow``
    group               group name of the runs in these loggers; a study uses the name of its directory

    Raises `InputError` for an invalid ``stack`` or an unknown logger.
    """

    device: str = "auto"
    compile: CompileMode = "auto"
    checkpoint_seconds: float = 30.0
    deadline: float | None = None
    should_stop: Callable[[], bool] = lambda: False
    publish: str | None = None
    stack: int | None = None
    machines: str | None = None
    follow: tuple[str, ...] = ()
    group: str | None = None
    made: tuple[float, float] = field(default_factory=clocks, repr=False, compare=False)

    def __post_init__(self) -> None:
        within("stack", self.stack, 1, MOST_STACKED)
        object.__setattr__(
            self, "follow", tuple(dict.fromkeys(choose("follow", each, LOGGERS) for each in self.follow))
        )

    def late(self, ahead: float = 0.0) -> bool:
        """Whether work of ``ahead`` seconds would exceed the deadline."""
        return self.deadline is not None and self._now() + ahead >= self.deadline

    def over(self, ahead: float = 0.0) -> bool:
        """Whether to stop instead of starting work of ``ahead`` seconds."""
        return self.should_stop() or self.late(ahead)

    def left(self) -> float | None:
        """Seconds until the deadline."""
        return None if self.deadline is None else self.deadline - self._now()

    def deadline_now(self) -> float | None:
        """The deadline in terms of the current `time.time()`."""
        left = self.left()
        return None if left is None else time.time() + left

    def _now(self) -> float:
        wall, steady = self.made
        return wall + time.monotonic() - steady


Piece = TypeVar("Piece")
Told = Callable[[int, Any], None]
Work = Callable[[Piece, Limits, Callable[[Any], None]], Any]
_LOOK = 0.1


def take(left: list[int], after: Mapping[int, int], done: Collection[int]) -> int | None:
    """Remove and return the first piece in ``left`` that does not wait for an unfinished piece (``after``)."""
    for place, index in enumerate(left):
        if index not in after or after[index] in done:
            return left.pop(place)
    return None


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

    A piece is started only after the piece that ``after`` maps its index to is done.

    ``on_done`` is called with the index and result of each piece. A result of None means that the piece was stopped
    early; then no further pieces are started. ``work`` must be importable, and its limits tell it when to stop:
    deadline, ``limits.should_stop``, SIGTERM, or the end of this process. Its reports are passed to ``on_told`` with
    the index.

    An error in one piece stops the others and is raised once they have stopped. `KeyboardInterrupt` kills the workers.
    """
    context = multiprocessing.get_context("spawn")
    stop, told = context.Event(), context.Queue()
    plain = replace(limits, should_stop=_never)
    left, done = list(range(len(pieces))), set[int]()
    failure: BaseException | None = None
    with ProcessPoolExecutor(count, mp_context=context, initializer=_start, initargs=(stop, told, threads)) as pool:
        waiting: dict[Future[Any], int] = {}
        try:
            while True:
                while len(waiting) < count and not stop.is_set() and not limits.over():
                    index = take(left, after or {}, done)
                    if index is None:
                        break
                    with ignored_by_children():
                        waiting[pool.submit(_do, work, index, pieces[index], plain)] = index
                if not waiting:
                    break
                finished, _ = wait(waiting, timeout=_LOOK, return_when=FIRST_COMPLETED)
                _drain(told, on_told)
                if limits.should_stop():  # workers check the deadline themselves
                    stop.set()
                for future in finished:
                    index = waiting.pop(future)
                    try:
                        result = future.result()
                    except ToeplensError as error:
                        stop.set()
                        failure = failure or error
                        continue
                    if result is None:
                        left.clear()
                    done.add(index)
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
        return  # workers got SIGTERM before they could handle it
    if failure is not None:
        raise EnvironmentFailure(
            f"A worker process ended unexpectedly ({type(failure).__name__}: {failure}). Finished work is saved; run "
            "the same command to resume, with fewer --workers if memory is short. A script must start its study under "
            "'if __name__ == \"__main__\":', as each worker imports the script."
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
    """End this worker when its parent has ended, after the current piece has reached a resumable point.

    SIGTERM only ends the current piece, as the parent ends its workers.
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
