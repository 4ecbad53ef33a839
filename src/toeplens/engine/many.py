"""Run many jobs, singly or in stacks of models trained together, locally or on a cluster."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch

from toeplens.engine.cluster import Cluster, in_cluster
from toeplens.engine.jobs import Job, carry_out, is_done, loggers_of, watcher_of
from toeplens.engine.measures import forget_measured
from toeplens.engine.pool import MOST_STACKED, Limits, Piece, Told, Work, in_processes
from toeplens.engine.remote import published
from toeplens.ground import EnvironmentFailure, InputError, choose
from toeplens.ground.locks import Busy
from toeplens.ground.machine import cores, out_of_memory, within
from toeplens.training import train_as_one
from toeplens.training.environment import CompileMode
from toeplens.training.loggers import must_be_installed, prepare
from toeplens.training.run import RESULT, Run, Status, entered
from toeplens.training.stack import must_stack, shape_of, that_fill_a_gpu


@dataclass(frozen=True)
class Room:
    """Resources for stacks: number of parallel workers, and share of a GPU per worker (0 on a CPU)."""

    places: int
    share: float


def stacks_of(jobs: Sequence[Job], places: Sequence[int], out: Path, limits: Limits, room: Room) -> list[list[int]]:
    """Indices of untrained jobs that can be trained together, grouped into stacks.

    The stack size is that of ``limits``. By default it is as many models as fit into a worker's share of a GPU, and
    fewer if a worker would be idle.
    """
    if limits.stack == 1 or (limits.stack is None and not room.share):
        return []
    alike: dict[Any, list[int]] = defaultdict(list)
    for place in {jobs[place].spec.name: place for place in places}.values():
        spec = jobs[place].spec
        if not (out / spec.name / RESULT).exists():
            alike[shape_of(spec), repr(spec.model.encoding_options)].append(place)
    groups = []
    for some in alike.values():
        with suppress(InputError):  # jobs that cannot be stacked are trained singly
            if len(some) > 1:
                must_stack([jobs[place].spec for place in some])
                groups.append(some)
    fair = -(-sum(map(len, groups)) // room.places)
    found = []
    for some in groups:
        full = int(that_fill_a_gpu(jobs[some[0]].spec) * room.share)
        most = limits.stack or max(1, min(MOST_STACKED, full, fair))
        stacks = -(-len(some) // most)
        size = -(-len(some) // stacks)
        found += [part for part in (some[at : at + size] for at in range(0, len(some), size)) if len(part) > 1]
    return found


def train_stack(jobs: Sequence[Job], out: Path, limits: Limits, tell: Callable[[Any], None]) -> bool | None:
    """Train the models of some jobs together; True if none was stopped, otherwise None.

    Runs that another process holds are skipped. If memory runs out, the stack is split into halves, which are trained
    one after the other.
    """
    with ExitStack() as held:
        members = [_Member(place, job) for place, job in enumerate(jobs)]
        stacks = [[member for member in members if member.enter(held, out, limits)]]
        while stacks:
            some = stacks.pop()
            whole = None
            try:
                whole = not some or _trained(some, out, limits, tell)
            except Exception as error:
                if len(some) == 1 or not out_of_memory(error):
                    raise
            gc.collect()
            torch.cuda.empty_cache()  # release the memory for other processes on the GPU
            if whole is None:  # here the exception and its references are freed
                half = len(some) // 2
                stacks += [some[half:], some[:half]]
            elif not whole:
                return None
    return True


@dataclass
class _Member:
    """A job in a stack; after `enter`, its run is locked and its progress published."""

    place: int
    job: Job
    should_stop: Callable[[], bool] = lambda: False

    def enter(self, held: ExitStack, out: Path, limits: Limits) -> bool:
        """Lock the run; False if another process holds it."""
        directory = out / self.job.spec.name
        try:
            held.enter_context(entered(directory, self.job.spec))
        except Busy:
            return False
        self.should_stop = held.enter_context(published(directory, limits)).should_stop
        forget_measured(directory)
        return True


def _trained(members: Sequence[_Member], out: Path, limits: Limits, tell: Callable[[Any], None]) -> bool:
    """Train the members together until all are done or one stops; returns whether all are done."""

    def report(place: int, step: int, total: int, row: dict[str, Any] | None) -> None:
        tell((members[place].place, step, total, row["test_accuracy"] if row else None))

    runs = train_as_one(
        [member.job.spec for member in members],
        out,
        device=limits.device,
        compile=limits.compile,
        checkpoint_seconds=limits.checkpoint_seconds,
        deadline=limits.deadline_now(),
        should_stop=lambda: max([member.should_stop() for member in members]),  # every member publishes its progress
        on_progress=report,
        watchers=[watcher_of(member.job) for member in members],
        loggers=[loggers_of(member.job, limits) for member in members],
    )
    return all(run.status != "stopped" for run in runs)


Workers = int | Cluster | None  # processes on this machine (None: one per core), or a cluster


@dataclass(frozen=True)
class Event:
    """An event of a job: a step (``status`` None), or its end."""

    job: int
    step: int
    total: int
    accuracy: float | None
    status: Status | None = None


_ALWAYS_ALLOWED = 64  # maximum number of workers; more on larger machines
_REQUESTS = 16  # parallel requests to a URL's file system

OnEvent = Callable[[Event], None]


def must_have(workers: Workers, jobs: int, limits: Limits) -> None:
    """Raise if these workers cannot run the jobs, before anything is written."""
    must_be_installed(limits.follow)
    if isinstance(workers, Cluster):
        choose("compile", limits.compile, get_args(CompileMode))
        workers.must_serve(limits.device)
    else:
        plan_workers(jobs, limits.device, workers)


def plan_workers(jobs: int, device: str, workers: int | None) -> tuple[int, int]:
    """Number of processes, and threads per process. Default: one process per core on a CPU, one on a GPU.

    Cores are divided among processes, limited by ``OMP_NUM_THREADS`` if set.
    """
    count = workers if workers is not None else (1 if _on_gpu(device) else cores())
    within("workers", count, 1, max(_ALWAYS_ALLOWED, 4 * cores()))
    count = max(1, min(count, jobs))
    threads = max(1, cores() // count)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return count, min(threads, max(1, int(asked))) if asked.isdecimal() else threads


def _on_gpu(device: str) -> bool:
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _room(workers: Workers, jobs: int, limits: Limits) -> Room:
    """The number of parallel pieces, and the share of a GPU per piece."""
    if isinstance(workers, Cluster):
        on_gpu = workers.device(limits.device).startswith("cuda")
        return Room(max(1, workers.at_a_time()), min(1.0, workers.gpus) if on_gpu else 0.0)
    count, _ = plan_workers(jobs, limits.device, workers)
    return Room(count, 1 / count if _on_gpu(limits.device) else 0.0)


def spread(
    work: Work[Piece],
    pieces: Sequence[Piece],
    limits: Limits,
    workers: Workers,
    *,
    on_done: Told,
    on_told: Told = lambda index, what: None,
    after: Mapping[int, int] | None = None,
) -> None:
    """Run ``work`` for each piece in parallel; see `toeplens.engine.pool.in_processes`."""
    if isinstance(workers, Cluster):
        in_cluster(work, pieces, limits, workers, on_done=on_done, on_told=on_told, after=after)
        return
    count, threads = plan_workers(len(pieces), limits.device, workers)
    in_processes(work, pieces, limits, count=count, threads=threads, on_done=on_done, on_told=on_told, after=after)


def run_jobs(
    jobs: Sequence[Job],
    out: Path,
    limits: Limits,
    *,
    workers: Workers = None,
    on_event: OnEvent | None = None,
) -> list[Status]:
    """Run ``jobs`` in ``out`` in parallel; returns the status of each.

    On Ctrl-C, at the deadline, or if this process dies, every worker writes a checkpoint and stops. An error in one job
    also stops the others, and is raised. A cluster's workers must see ``out``, or publish their runs to the limits'
    URL, from which they are fetched.
    """
    tell, out = on_event or (lambda event: None), out.absolute()
    statuses: list[Status] = ["stopped"] * len(jobs)
    prepare(limits.follow, limits.group)
    left, cluster = list(range(len(jobs))), isinstance(workers, Cluster)
    there = None if cluster and limits.publish else out  # output directory of the workers

    def ended(index: int, status: Status) -> None:
        statuses[index] = status
        tell(Event(index, 0, 0, None, status))

    def done(piece: int, status: Any) -> None:
        if piece < len(stacks) or status is None:  # a stack, whose jobs continue singly, or a stopped job
            return
        (index,) = given[piece]
        if cluster:
            _level(jobs[index], out, limits)
            if not is_done(jobs[index], out / jobs[index].spec.name):
                raise EnvironmentFailure(
                    f"out: a worker finished the run {jobs[index].spec.name}, but {limits.publish or out} does not "
                    "contain it. Use a shared directory or a URL."
                )
        ended(index, status)

    def told(piece: int, what: Any) -> None:
        place, *step = what
        tell(Event(given[piece][place], *step))

    if cluster:  # finished jobs need no worker
        with ThreadPoolExecutor(_REQUESTS) as pool:
            list(pool.map(lambda job: _level(job, out, limits), jobs))
        left = [index for index in left if not is_done(jobs[index], out / jobs[index].spec.name)]
        for index in sorted(set(range(len(jobs))) - set(left)):
            ended(index, Run.open(out / jobs[index].spec.name).status)
    stacks = stacks_of(jobs, left, out, limits, _room(workers, len(left), limits)) if left else []
    given = [*stacks, *([index] for index in left)]  # job indices of each piece
    stacked = {jobs[index].spec.name: piece for piece, some in enumerate(stacks) for index in some}
    names = {len(stacks) + place: jobs[index].spec.name for place, index in enumerate(left)}
    spread(
        _work,
        [([jobs[index] for index in some], there) for some in given],
        limits,
        workers,
        on_done=done,
        on_told=told,
        after={piece: stacked[name] for piece, name in names.items() if name in stacked},
    )
    return statuses


def _level(job: Job, out: Path, limits: Limits) -> None:
    """Synchronise a job's run with the published one."""
    with published(out / job.spec.name, limits):
        pass


def _work(
    piece: tuple[Sequence[Job], Path | None], limits: Limits, tell: Callable[[Any], None]
) -> Status | bool | None:
    """Train several jobs as a stack (`train_stack`), or run one job; None if stopped."""

    def report(step: int, total: int, row: dict[str, Any] | None) -> None:
        tell((0, step, total, row["test_accuracy"] if row else None))

    jobs, out = piece
    with TemporaryDirectory(prefix="toeplens-") as own:  # temporary output directory
        if len(jobs) > 1:
            return train_stack(jobs, out or Path(own), limits, tell)
        status = carry_out(jobs[0], out or Path(own), limits, report).status
        return None if status == "stopped" else status
