"""Jobs: train a run, ablate its heads, measure it; many in parallel, models of equal shape as one batch.

A job can be interrupted and resumed at any point.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import call
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import torch

from toeplens.encodings.registry import package_of
from toeplens.engine.head_watch import TOGETHER, HeadWatch
from toeplens.engine.measures import (
    Asked,
    DataSplit,
    Subject,
    forget_measured,
    measure_run,
    read_measures,
    read_record,
    write_record,
)
from toeplens.engine.pool import at_a_time, is_gpu, must_serve, plan_workers, spread
from toeplens.engine.remote import published
from toeplens.ground import EnvironmentFailure, InputError, ToeplensError, choose
from toeplens.ground.cache import Cache
from toeplens.ground.errors import first_line
from toeplens.ground.execution import MOST_STACKED, CompileMode, ExecutionOptions, Workers, cluster_of
from toeplens.ground.machine import out_of_memory
from toeplens.ground.outputs import Busy, locked
from toeplens.lens import HeadAblation
from toeplens.lens.ablation import Method, ablate_by
from toeplens.lens.kit.interventions import Intervention, Metric
from toeplens.training import Run, RunSpec, plan_execution, train_as_one
from toeplens.training.loggers import loggers_named, must_be_installed, prepare
from toeplens.training.loop import Progress, ProgressOf
from toeplens.training.run import RESULT, WEIGHTS, Status, entered
from toeplens.training.stack import must_stack, shape_of, that_fill_a_gpu

_ABLATION, _PARTS = "ablation", "ablation-passes"  # records, and a directory of finished batches
_REQUESTS = 16  # parallel requests to a URL's file system


class Stopped(Exception):
    """Raised inside a job to stop it at a resumable point."""


@dataclass(frozen=True)
class Job:
    """A run and what to measure afterwards.

    label     title of the run
    examples  number of examples for ablation and measures; 0 for no ablation
    measures  further measures of the trained model, see `toeplens.engine.measures`
    watch     whether to probe heads during training, see `toeplens.engine.head_watch`
    split     ``test`` set (paper), or ``train+test`` in the proportion 70:30 (released code)
    """

    spec: RunSpec
    label: str
    examples: int = 0
    split: DataSplit = "test"
    measures: tuple[str, ...] = ()
    watch: bool = False

    def __post_init__(self) -> None:
        choose("split", self.split, get_args(DataSplit))

    @property
    def asked(self) -> Asked:
        """The examples of ablation and measures."""
        return Asked(self.examples, self.split)


@dataclass(frozen=True)
class Event:
    """An event of a job: a step (``status`` None), or its end."""

    job: int
    step: int
    total: int
    accuracy: float | None
    status: Status | None = None


OnEvent = Callable[[Event], None]

# ---- one job, or models trained as one ------------------------------------------------------------------------------


def run_job(job: Job, out: Path | None, execution: ExecutionOptions, on_progress: Progress = lambda *told: None) -> Run:
    """Train the job's run in ``out``, ablate its heads and measure it; see the status of the returned run.

    The run's directory is locked; if another process holds the lock, this call waits. With a URL in the options, the
    published state of the run is fetched first, and progress is published; ``out`` may then be None, for a temporary
    directory.
    """
    with _directory(out) as out:
        directory = out / job.spec.name
        try:
            with ExitStack() as held:
                execution = _entered(held, job, out, execution, until=execution.over)
                told = _observers([job], execution, lambda index, *told: on_progress(*told))
                train_as_one([job.spec], out, execution, **told)
                run = Run.open(directory)
                if run.status == "complete" and job.examples:
                    _measure(job, run, execution)
                return run
        except (Busy, Stopped):  # held by another process until the deadline, or stopped between two pieces of work
            return replace(Run.open(directory), status="stopped")
        except (ToeplensError, OSError, MemoryError):
            raise
        except Exception as error:
            if (package := package_of(job.spec.model.encoding)) is None:
                raise
            raise InputError(
                f"encoding: {job.spec.model.encoding!r} of the package {package} failed ({type(error).__name__}: "
                f"{first_line(error)}). Finished work is saved."
            ) from error


def train_batch(jobs: Sequence[Job], out: Path | None, execution: ExecutionOptions, tell: ProgressOf) -> bool:
    """Train the models of some jobs together, or in halves if memory runs out; whether none was stopped.

    Runs that another process holds are skipped.
    """
    with _directory(out) as out, ExitStack() as held:
        members, publishing = list[tuple[int, Job]](), list[ExecutionOptions]()
        for place, job in enumerate(jobs):
            with suppress(Busy):
                publishing.append(_entered(held, job, out, execution))
                members.append((place, job))
        everyone = replace(execution, should_stop=lambda: max([each.should_stop() for each in publishing]))
        trained = not members or _train(members, out, everyone, tell)
    gc.collect()
    torch.cuda.empty_cache()  # release the memory for other processes on the GPU
    return trained


def _train(members: Sequence[tuple[int, Job]], out: Path, execution: ExecutionOptions, tell: ProgressOf) -> bool:
    jobs = [job for _, job in members]
    try:
        told = _observers(jobs, execution, lambda index, *told: tell(members[index][0], *told))
        runs = train_as_one([job.spec for job in jobs], out, execution, **told)
        return all(run.status != "stopped" for run in runs)
    except Exception as error:
        if len(members) == 1 or not out_of_memory(error):
            raise
    gc.collect()  # here the exception and its references are freed
    torch.cuda.empty_cache()
    half = len(members) // 2
    return _train(members[:half], out, execution, tell) and _train(members[half:], out, execution, tell)


@contextmanager
def _directory(out: Path | None) -> Iterator[Path]:
    with TemporaryDirectory(prefix="toeplens-") if out is None else nullcontext(out) as place:
        yield Path(place)


def _entered(
    held: ExitStack, job: Job, out: Path, execution: ExecutionOptions, until: Callable[[], bool] | None = None
) -> ExecutionOptions:
    """Lock the job's run, for which it waits ``until``; with the returned options it publishes its progress."""
    directory = out / job.spec.name
    held.enter_context(entered(directory, job.spec, until=until))
    publishing = held.enter_context(published(directory, execution))
    forget_measured(directory)
    return publishing


def _observers(jobs: Sequence[Job], execution: ExecutionOptions, tell: ProgressOf) -> dict[str, Any]:
    return {
        "watchers": [HeadWatch(job.spec, whole=job.examples, split=job.split) if job.watch else None for job in jobs],
        "loggers": [loggers_named(execution.follow, job.label, execution.group) for job in jobs],
        "on_progress": tell,
    }


def _measure(job: Job, run: Run, execution: ExecutionOptions) -> None:
    """Ablate the heads of a trained run and measure it."""
    if read_ablation(run.directory, job.asked) is None:
        ablate_run(run, examples=job.examples, split=job.split, limits=execution)
    Cache(run.directory / _PARTS, None).clear()  # left over if it was killed
    for measure in job.measures:
        if execution.over():
            raise Stopped
        measure_run(run, measure, examples=job.examples, split=job.split, device=execution.device)


# ---- records --------------------------------------------------------------------------------------------------------


def is_done(job: Job, directory: Path) -> bool:
    """Whether a run's directory has all results of the job."""
    if not (directory / RESULT).exists():
        return False
    if Run.open(directory).status == "diverged" or not job.examples:
        return True
    measured = read_measures(directory, job.measures, job.asked)
    return read_ablation(directory, job.asked) is not None and len(measured) == len(set(job.measures))


def without_weights(jobs: Sequence[Job], out: Path) -> list[Job]:
    """Jobs with missing measures whose runs in ``out`` have no weights."""
    return [
        job
        for job in jobs
        if (directory := out / job.spec.name)
        and (directory / RESULT).exists()
        and not (directory / WEIGHTS).exists()
        and not is_done(job, directory)
    ]


def read_ablation(directory: Path, asked: Asked, metric: Metric = "accuracy") -> HeadAblation | None:
    """A run's recorded zero ablation on these examples by this metric, or None."""
    record = read_record(directory, _name(metric), asked)
    return None if record is None else HeadAblation.from_dict(record)


def ablate_run(
    run: Run,
    *,
    examples: int,
    split: DataSplit = "test",
    limits: ExecutionOptions | None = None,
    metric: Metric = "accuracy",
    intervention: Intervention = "zero",
    method: Method = "exact",
) -> HeadAblation:
    """Ablate each head of a finished run's model and record the result in its directory.

    The record is ``ablation.json`` for zero ablation by accuracy. Other choices have separate files, named after the
    differences: ``ablation-mean.json``, ``ablation-position-loss-attribution.json``. Zero ablation by accuracy and by
    loss are recorded together. For other examples than those of the first record see `toeplens.engine.measures`.
    """
    asked, limits = Asked(examples, split), limits or ExecutionOptions()
    choose("metric", metric, get_args(Metric))
    choose("intervention", intervention, get_args(Intervention))
    choose("method", method, get_args(Method))
    with locked(run.directory, "run"):
        subject = Subject(run, examples, split, plan_execution(limits.device, "off", "float32").device)
        batches = subject.batches()
        key = [examples, split, intervention, metric, len(batches[0][0])]
        parts = _Parts(run.directory / _PARTS, key, limits)
        found = ablate_by(
            TOGETHER if (metric, intervention, method) == (TOGETHER[0], "zero", "exact") else (metric,),
            subject.source,
            batches,
            chance=run.spec.guess,
            intervention=intervention,
            method=method,
            memory=parts if method == "exact" else None,
        )
        for each, ablation in reversed(found.items()):  # the requested one last, as it marks the set as complete
            name = _name(each, intervention, method)
            # a separate one also has the cumulative curve
            if each == metric or read_record(run.directory, name, asked) is None:
                write_record(run.directory, name, asked, ablation.to_dict())
        parts.clear()
    return found[metric]


def _name(metric: Metric, intervention: Intervention = "zero", method: Method = "exact") -> str:
    usual = (("zero", intervention), ("accuracy", metric), ("exact", method))
    return "-".join((_ABLATION, *(given for default, given in usual if given != default)))


class _Parts(Cache):
    """The finished batches of an ablation, which it stops between two batches at the deadline."""

    def __init__(self, directory: Path, key: Any, limits: ExecutionOptions) -> None:
        super().__init__(directory, key)
        self.limits, self.slowest, self.begun = limits, 0.0, 0.0

    def get(self, key: str) -> np.ndarray | None:
        if (found := self.array(key)) is None:
            if self.limits.over(self.slowest):
                raise Stopped
            self.begun = time.monotonic()
        return found

    def put(self, key: str, answers: np.ndarray) -> None:
        self.slowest = max(self.slowest, time.monotonic() - self.begun)
        self.put_array(key, answers)


# ---- many jobs ------------------------------------------------------------------------------------------------------


def must_have(workers: Workers, jobs: int, limits: ExecutionOptions) -> None:
    """Raise if these workers cannot run the jobs, before anything is written."""
    cluster = cluster_of(workers)
    must_be_installed(limits.follow)
    if cluster.on_ray:
        choose("compile", limits.compile, get_args(CompileMode))
        must_serve(cluster, limits.device)
    else:
        plan_workers(jobs, limits.device, cluster.workers)


def run_jobs(
    jobs: Sequence[Job],
    out: Path,
    limits: ExecutionOptions,
    *,
    workers: Workers = None,
    on_event: OnEvent | None = None,
) -> list[Status]:
    """Run ``jobs`` in ``out`` in parallel; returns the status of each.

    On Ctrl-C, at the deadline, or if this process dies, every worker writes a checkpoint and stops. An error in one job
    also stops the others, and is raised. A cluster's workers must see ``out``, or publish their runs to the limits'
    URL, from which they are fetched.
    """
    tell, out, on_ray = on_event or (lambda event: None), out.absolute(), cluster_of(workers).on_ray
    statuses: list[Status] = ["stopped"] * len(jobs)
    prepare(limits.follow, limits.group)
    left = list(range(len(jobs)))

    def ended(index: int, status: Status) -> None:
        statuses[index] = status
        tell(Event(index, 0, 0, None, status))

    def done(piece: int, result: Any) -> bool:
        if piece < len(stacks):  # its jobs continue singly
            return result
        (index,) = given[piece]
        if result.status == "stopped":
            return False
        if on_ray:
            _level(jobs[index], out, limits)
            if not is_done(jobs[index], out / jobs[index].spec.name):
                raise EnvironmentFailure(
                    f"out: a worker finished the run {jobs[index].spec.name}, but {limits.publish or out} does not "
                    "contain it. Use a shared directory or a URL."
                )
        ended(index, result.status)
        return True

    def told(piece: int, *what: Any) -> None:
        place, step, total, row = what if piece < len(stacks) else (0, *what)
        tell(Event(given[piece][place], step, total, row["test_accuracy"] if row else None))

    if on_ray:  # finished jobs need no worker
        with ThreadPoolExecutor(_REQUESTS) as pool:
            list(pool.map(lambda job: _level(job, out, limits), jobs))
        left = [index for index in left if not is_done(jobs[index], out / jobs[index].spec.name)]
        for index in sorted(set(range(len(jobs))) - set(left)):
            ended(index, Run.open(out / jobs[index].spec.name).status)
    stacks = stacks_of(jobs, left, out, limits, *_room(workers, len(left), limits)) if left else []
    given = [*stacks, *([index] for index in left)]  # job indices of each piece
    stacked = {jobs[index].spec.name: piece for piece, some in enumerate(stacks) for index in some}
    names = {len(stacks) + place: jobs[index].spec.name for place, index in enumerate(left)}
    there = None if on_ray and limits.publish else out  # output directory of the workers
    spread(
        call,  # type: ignore[arg-type]
        [
            *(partial(train_batch, [jobs[index] for index in some], there) for some in stacks),
            *(partial(run_job, jobs[index], there) for index in left),
        ],
        limits,
        workers,
        on_done=done,
        on_told=told,
        after={piece: stacked[name] for piece, name in names.items() if name in stacked},
    )
    return statuses


def _level(job: Job, out: Path, limits: ExecutionOptions) -> None:
    """Synchronise a job's run with the published one."""
    with published(out / job.spec.name, limits):
        pass


def _room(workers: Workers, jobs: int, limits: ExecutionOptions) -> tuple[int, float]:
    """The number of parallel pieces, and the share of a GPU per piece (0 on a CPU)."""
    cluster = cluster_of(workers)
    if cluster.on_ray:
        on_gpu = cluster.device(limits.device).startswith("cuda")
        return max(1, at_a_time(cluster)), min(1.0, cluster.gpus) if on_gpu else 0.0
    count, _ = plan_workers(jobs, limits.device, cluster.workers)
    return count, 1 / count if is_gpu(limits.device) else 0.0


def stacks_of(
    jobs: Sequence[Job], places: Sequence[int], out: Path, limits: ExecutionOptions, count: int, share: float
) -> list[list[int]]:
    """Indices of untrained jobs that can be trained together, grouped into stacks.

    The stack size is that of ``limits``. By default it is as many models as fit into the ``share`` of a GPU of one of
    ``count`` workers, and fewer if a worker would be idle.
    """
    if limits.stack == 1 or (limits.stack is None and not share):
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
    fair = -(-sum(map(len, groups)) // count)
    found = []
    for some in groups:
        full = int(that_fill_a_gpu(jobs[some[0]].spec) * share)
        most = limits.stack or max(1, min(MOST_STACKED, full, fair))
        size = -(-len(some) // -(-len(some) // most))
        found += [part for part in (some[at : at + size] for at in range(0, len(some), size)) if len(part) > 1]
    return found
