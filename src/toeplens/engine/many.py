"""Carry out many jobs at once, each stoppable, all reporting to one place: on this machine, or on a cluster's."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toeplens.engine.cluster import in_cluster
from toeplens.engine.jobs import Job, carry_out, is_done
from toeplens.engine.leases import HeldElsewhere
from toeplens.engine.limits import Limits
from toeplens.engine.nodes import Cluster
from toeplens.engine.pool import Piece, Put, Told, Work, in_processes
from toeplens.engine.sharing import fetch, is_behind, shared
from toeplens.engine.stacks import stacks_of, train_stack
from toeplens.engine.store import Store
from toeplens.ground import InputError, write_bytes
from toeplens.ground.files import make_directory
from toeplens.ground.machine import cores, within
from toeplens.training.ranks import is_one_of_many
from toeplens.training.run import Run, Status

Workers = int | Cluster | None  # processes on this machine (None: one a core), or a cluster


@dataclass(frozen=True)
class Event:
    """What happened to a job: a step (``status`` None), or its end."""

    job: int
    step: int
    total: int
    accuracy: float | None
    status: Status | None = None


_ALWAYS_ALLOWED = 64  # workers; a larger machine may have more
_REQUESTS = 16  # to a store at a time

OnEvent = Callable[[Event], None]


def must_have(workers: Workers, jobs: int, limits: Limits, out: Path) -> None:
    """Raise unless these workers can do so many jobs, and what they do can be kept: before anything is written."""
    if isinstance(workers, Cluster):
        with _seen(out, limits) as seen:
            workers.must_serve(limits.device, seen)
    else:
        plan_workers(jobs, limits.device, workers)
    if limits.store is not None:
        Store(limits.store).must_take()


@contextmanager
def _seen(out: Path, limits: Limits) -> Iterator[Path | None]:
    """A file beside ``out`` that all machines must see, where nothing else brings a run to this one."""
    if limits.store is not None:
        yield None
        return
    beside = out.absolute().parent
    make_directory(beside)
    token = beside / f".{secrets.token_hex(8)}.seen"
    write_bytes(token, b"")
    try:
        yield token
    finally:
        token.unlink(missing_ok=True)


def plan_workers(jobs: int, device: str, workers: int | None) -> tuple[int, int]:
    """Processes, and threads in each: small models use cores best one run a core; a GPU is for one run at a time."""
    if is_one_of_many():
        raise InputError(
            "torchrun: it shares one run among processes ('toeplens train'); many runs are spread by --workers or "
            "--engine ray."
        )
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    count = workers if workers is not None else (1 if on_gpu else cores())
    within("workers", count, 1, max(_ALWAYS_ALLOWED, 4 * cores()))
    count = max(1, min(count, jobs))
    return count, max(1, cores() // count)


def spread(
    work: Work[Piece],
    pieces: Sequence[Piece],
    limits: Limits,
    workers: Workers,
    *,
    on_done: Told,
    on_told: Told = lambda index, what: None,
) -> None:
    """Do ``work`` for each piece, in order, several at a time; see `toeplens.engine.pool.in_processes`."""
    if isinstance(workers, Cluster):
        in_cluster(work, pieces, limits, workers, on_done=on_done, on_told=on_told)
        return
    count, threads = plan_workers(len(pieces), limits.device, workers)
    in_processes(work, pieces, limits, count=count, threads=threads, on_done=on_done, on_told=on_told)


def run_jobs(
    jobs: Sequence[Job],
    out: Path,
    limits: Limits,
    *,
    workers: Workers = None,
    on_event: OnEvent | None = None,
) -> list[Status]:
    """Carry out ``jobs`` in ``out``, in order, several at a time; returns how each ended.

    Ctrl-C, a deadline, or the death of this process makes every worker write a checkpoint and stop. An error in one
    job stops the others likewise and is raised here. A cluster's workers see ``out`` too, or bring what they do to the
    limits' store, from where it is fetched.
    """
    tell = on_event or (lambda event: None)
    statuses: list[Status] = ["stopped"] * len(jobs)
    store = Store(limits.store) if limits.store is not None and isinstance(workers, Cluster) else None
    left = list(range(len(jobs)))

    def ended(index: int, status: Status) -> None:
        statuses[index] = status
        tell(Event(index, 0, 0, None, status))

    def done(place: int, status: Status | None) -> None:
        if store is not None:
            fetch(store, out / jobs[left[place]].spec.name)
        if status is not None:
            ended(left[place], status)

    if isinstance(workers, Cluster):  # what is there already takes no worker
        if store is not None:
            _level(store, jobs, out, limits)
        left = [index for index in left if not is_done(jobs[index], out / jobs[index].spec.name)]
        for index in sorted(set(range(len(jobs))) - set(left)):
            ended(index, Run.open(out / jobs[index].spec.name).status)
    stacks = stacks_of(jobs, left, out, limits)
    stopped: list[int] = []
    if stacks:
        spread(
            train_stack,
            [([jobs[index] for index in some], None if store is not None else out) for some in stacks],
            limits,
            workers,
            on_done=lambda place, whole: None if whole else stopped.append(place),
            on_told=lambda place, told: tell(Event(stacks[place][told[0]], *told[1:])),
        )
    if stopped:
        return statuses
    spread(
        _work,
        [(jobs[index], None if store is not None else out) for index in left],
        limits,
        workers,
        on_done=done,
        on_told=lambda place, step: tell(Event(left[place], *step)),
    )
    return statuses


def _level(store: Store, jobs: Sequence[Job], out: Path, limits: Limits) -> None:
    """Fetch what the store has of the jobs' runs, and publish what it has not and is here."""

    def level(job: Job) -> None:
        directory = out / job.spec.name
        if not limits.over() and is_behind(store, directory):
            with suppress(HeldElsewhere), shared(directory, limits):
                return
        if not limits.over():
            fetch(store, directory)

    with ThreadPoolExecutor(_REQUESTS) as pool:  # each waits for the network
        list(pool.map(level, jobs))


def _work(piece: tuple[Job, Path | None], limits: Limits, tell: Callable[[Any], None]) -> Status | Put | None:
    def report(step: int, total: int, row: dict[str, Any] | None) -> None:
        tell((step, total, row["test_accuracy"] if row else None))

    job, out = piece
    with tempfile.TemporaryDirectory(prefix="toeplens-") as scratch:
        try:
            status = carry_out(job, out or Path(scratch), limits, report).status
        except HeldElsewhere:
            return Put.OFF
    return None if status == "stopped" else status
