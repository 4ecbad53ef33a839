"""Carry out many jobs on this machine: one process a core, each stoppable, all reporting to one place."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from toeplens.engine.jobs import Job, Limits, carry_out
from toeplens.ground import EnvironmentFailure, InputError, ToeplensError
from toeplens.ground.stops import signals_held
from toeplens.training.run import Status


@dataclass(frozen=True)
class Event:
    """What happened to a job: a step (``status`` None), or its end."""

    job: int
    step: int
    total: int
    accuracy: float | None
    status: Status | None = None


OnEvent = Callable[[Event], None]


def plan_workers(jobs: int, device: str, workers: int | None) -> tuple[int, int]:
    """Processes, and threads in each: small models use cores best one run a core; a GPU is for one run at a time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    count = workers if workers is not None else (1 if on_gpu else cores)
    if count < 1:
        raise InputError(f"workers: {count} was given; it must be at least 1.")
    count = max(1, min(count, jobs))
    return count, max(1, cores // count)


def run_local(
    jobs: Sequence[Job],
    out: Path,
    limits: Limits,
    *,
    workers: int | None = None,
    on_event: OnEvent | None = None,
) -> list[Status]:
    """Carry out ``jobs`` in ``out``, in order, several at a time; returns how each ended.

    Ctrl-C, a deadline, or the death of this process makes every worker write a checkpoint and stop. An error in one
    job stops the others likewise and is raised here.
    """
    context = multiprocessing.get_context("spawn")
    stop, events = context.Event(), context.Queue()
    count, threads = plan_workers(len(jobs), limits.device, workers)
    plain = replace(limits, should_stop=_never)
    statuses: list[Status] = ["stopped"] * len(jobs)
    with ProcessPoolExecutor(
        count, mp_context=context, initializer=_start_worker, initargs=(stop, events, threads, os.getpid())
    ) as pool:
        waiting: dict[Future[Status], int] = {}
        upcoming: Iterator[tuple[int, Job]] = iter(enumerate(jobs))
        failure: BaseException | None = None
        try:
            while True:
                while len(waiting) < count and not stop.is_set() and not limits.over():
                    index, job = next(upcoming, (None, None))
                    if job is None or index is None:
                        break
                    with signals_held():
                        waiting[pool.submit(_work, index, job, out, plain)] = index
                if not waiting:
                    break
                try:
                    finished, _ = wait(waiting, timeout=0.1, return_when=FIRST_COMPLETED)
                    _drain(events, on_event)
                except KeyboardInterrupt:
                    if stop.is_set():
                        raise
                    stop.set()
                    failure = KeyboardInterrupt()
                    continue
                if limits.over():
                    stop.set()
                for future in finished:
                    index = waiting.pop(future)
                    try:
                        statuses[index] = future.result()
                    except ToeplensError as error:
                        stop.set()
                        failure = failure or error
                        continue
                    if statuses[index] == "stopped":  # too little time is left to begin another job
                        upcoming = iter(())
                    elif on_event:
                        on_event(Event(index, 0, 0, None, statuses[index]))
        except BaseException as error:
            stop.set()
            failure = failure or error
    _drain(events, on_event)
    if isinstance(failure, (ToeplensError, KeyboardInterrupt)):
        raise failure
    if failure is not None:
        raise EnvironmentFailure(
            f"a worker process ended unexpectedly ({type(failure).__name__}: {failure}); what was finished is kept, "
            f"and the same command goes on; if memory is short, lower --workers."
        ) from failure
    return statuses


def _never() -> bool:
    return False


def _drain(events: Any, on_event: OnEvent | None) -> None:
    while True:
        try:
            event = events.get_nowait()
        except queue.Empty:
            return
        if on_event:
            on_event(event)


_stop: Any = None
_events: Any = None
_busy = threading.Lock()
_leaving = threading.Event()


def _start_worker(stop: Any, events: Any, threads: int, parent: int) -> None:
    global _stop, _events
    torch.set_num_threads(threads)
    _stop, _events = stop, events
    signal.signal(signal.SIGTERM, lambda *_: _leaving.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    """End this worker when its parent is gone or it is told to, after the job at hand has written its checkpoint."""
    while os.getppid() == parent and not _leaving.wait(0.5):
        pass
    _leaving.set()
    with _busy:
        if os.getppid() == parent:
            time.sleep(2)  # it hears how the job ended, and may end this process itself
        os._exit(1)


def _work(index: int, job: Job, out: Path, limits: Limits) -> Status:
    def report(step: int, total: int, row: dict[str, Any] | None) -> None:
        _events.put(Event(index, step, total, row["test_accuracy"] if row else None))

    if _leaving.is_set():
        return "stopped"
    with _busy:
        own = replace(limits, should_stop=lambda: _leaving.is_set() or _stop.is_set())
        return carry_out(job, out, own, report).status
