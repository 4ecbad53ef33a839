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

from toeplens.encodings.cpu_products import fast_products
from toeplens.encodings.registry import package_of
from toeplens.engine.head_probe import ABLATION_METRICS, HeadProbe
from toeplens.engine.measures import (
    DataSplit,
    ExampleRequest,
    MeasureInputs,
    measure_run,
    read_measures,
    read_record,
    remove_stale_records,
    write_record,
)
from toeplens.engine.pool import check_cluster, is_gpu, parallel_capacity, plan_workers, run_parallel
from toeplens.engine.remote import sync_run
from toeplens.lens import HeadAblation
from toeplens.lens.ablation import Method, ablate_heads_by_metric
from toeplens.lens.kit.interventions import Intervention, Metric
from toeplens.training import Run, RunSpec, plan_execution, train_batched
from toeplens.training.batched import check_batchable, models_per_gpu, shape_of
from toeplens.training.loggers import build_loggers, must_be_installed, prepare_loggers
from toeplens.training.loop import BatchProgress, Progress
from toeplens.training.run import RESULT, WEIGHTS, Status, open_run_directory
from toeplens.utils import EnvironmentFailure, InputError, ToeplensError, choose
from toeplens.utils.cache import ResultCache
from toeplens.utils.errors import first_line
from toeplens.utils.execution import MAX_BATCHED, CompileMode, ExecutionOptions, Workers, cluster_of
from toeplens.utils.machine import is_out_of_memory
from toeplens.utils.outputs import DirectoryBusy, lock_directory
from toeplens.utils.renamed import renamed

_ABLATION, _BATCH_CACHE = "ablation", "ablation-passes"  # records, and a directory of finished batches
_PARALLEL_REQUESTS = 16  # parallel requests to a URL's file system


class JobInterrupted(Exception):
    """Raised inside a job to stop it at a resumable point."""


@dataclass(frozen=True)
class Job:
    """A run and what to measure afterwards.

    label     title of the run
    examples  number of examples for ablation and measures; 0 for no ablation
    measures  further measures of the trained model, see `toeplens.engine.measures`
    probe     whether to probe heads during training, see `toeplens.engine.head_probe`
    split     ``test`` set (paper), or ``train+test`` in the proportion 70:30 (released code)
    """

    spec: RunSpec
    label: str
    examples: int = 0
    split: DataSplit = "test"
    measures: tuple[str, ...] = ()
    probe: bool = False

    def __post_init__(self) -> None:
        choose("split", self.split, get_args(DataSplit))

    @property
    def request(self) -> ExampleRequest:
        """The examples of ablation and measures."""
        return ExampleRequest(self.examples, self.split)


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


@fast_products()
def run_job(job: Job, out: Path | None, execution: ExecutionOptions, on_progress: Progress = lambda *args: None) -> Run:
    """Train the job's run in ``out``, ablate its heads and measure it; see the status of the returned run.

    The run's directory is locked; if another process holds the lock, this call waits. With a URL in the options, the
    published state of the run is fetched first, and progress is published; ``out`` may then be None, for a temporary
    directory.
    """
    with _output_directory(out) as out:
        directory = out / job.spec.name
        try:
            with ExitStack() as stack:
                execution = _enter_run(stack, job, out, execution, until=execution.is_over)
                args = _observers([job], execution, lambda index, *args: on_progress(*args))
                train_batched([job.spec], out, execution, **args)
                run = Run.open(directory)
                if run.status == "complete" and job.examples:
                    _ablate_and_measure(job, run, execution)
                return run
        except (DirectoryBusy, JobInterrupted):  # locked by another process until the deadline, or stopped
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


def train_batch(jobs: Sequence[Job], out: Path | None, execution: ExecutionOptions, report: BatchProgress) -> bool:
    """Train the models of some jobs together, or in halves if memory runs out; whether none was stopped.

    Runs that another process holds are skipped.
    """
    with _output_directory(out) as out, ExitStack() as stack:
        members, executions = list[tuple[int, Job]](), list[ExecutionOptions]()
        for index, job in enumerate(jobs):
            with suppress(DirectoryBusy):
                executions.append(_enter_run(stack, job, out, execution))
                members.append((index, job))
        shared = replace(execution, should_stop=lambda: max([options.should_stop() for options in executions]))
        finished = not members or _train(members, out, shared, report)
    gc.collect()
    torch.cuda.empty_cache()  # release the memory for other processes on the GPU
    return finished


def _train(members: Sequence[tuple[int, Job]], out: Path, execution: ExecutionOptions, report: BatchProgress) -> bool:
    jobs = [job for _, job in members]
    try:
        args = _observers(jobs, execution, lambda index, *args: report(members[index][0], *args))
        runs = train_batched([job.spec for job in jobs], out, execution, **args)
        return all(run.status != "stopped" for run in runs)
    except Exception as error:
        if len(members) == 1 or not is_out_of_memory(error):
            raise
    gc.collect()  # here the exception and its references are freed
    torch.cuda.empty_cache()
    half = len(members) // 2
    return _train(members[:half], out, execution, report) and _train(members[half:], out, execution, report)


@contextmanager
def _output_directory(out: Path | None) -> Iterator[Path]:
    with TemporaryDirectory(prefix="toeplens-") if out is None else nullcontext(out) as path:
        yield Path(path)


def _enter_run(
    stack: ExitStack, job: Job, out: Path, execution: ExecutionOptions, until: Callable[[], bool] | None = None
) -> ExecutionOptions:
    """Lock the job's run, for which it waits ``until``; with the returned options it publishes its progress."""
    directory = out / job.spec.name
    stack.enter_context(open_run_directory(directory, job.spec, until=until))
    run_execution = stack.enter_context(sync_run(directory, execution))
    remove_stale_records(directory)
    return run_execution


def _observers(jobs: Sequence[Job], execution: ExecutionOptions, report: BatchProgress) -> dict[str, Any]:
    return {
        "probes": [HeadProbe(job.spec, per_event=job.examples, split=job.split) if job.probe else None for job in jobs],
        "loggers": [build_loggers(execution.follow, job.label, execution.group) for job in jobs],
        "on_progress": report,
    }


def _ablate_and_measure(job: Job, run: Run, execution: ExecutionOptions) -> None:
    """Ablate the heads of a trained run and measure it."""
    if read_ablation(run.directory, job.request) is None:
        ablate_run(run, examples=job.examples, split=job.split, execution=execution)
    ResultCache(run.directory / _BATCH_CACHE, None).clear()  # left over if it was killed
    for measure in job.measures:
        if execution.is_over():
            raise JobInterrupted
        measure_run(run, measure, examples=job.examples, split=job.split, device=execution.device)


# ---- records --------------------------------------------------------------------------------------------------------


def is_done(job: Job, directory: Path) -> bool:
    """Whether a run's directory has all results of the job."""
    if not (directory / RESULT).exists():
        return False
    if Run.open(directory).status == "diverged" or not job.examples:
        return True
    measured = read_measures(directory, job.measures, job.request)
    return read_ablation(directory, job.request) is not None and len(measured) == len(set(job.measures))


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


def read_ablation(directory: Path, request: ExampleRequest, metric: Metric = "accuracy") -> HeadAblation | None:
    """A run's recorded zero ablation on these examples by this metric, or None."""
    record = read_record(directory, _record_name(metric), request)
    return None if record is None else HeadAblation.from_dict(record)


@renamed
@fast_products()
def ablate_run(
    run: Run,
    *,
    examples: int,
    split: DataSplit = "test",
    execution: ExecutionOptions | None = None,
    metric: Metric = "accuracy",
    intervention: Intervention = "zero",
    method: Method = "exact",
) -> HeadAblation:
    """Ablate each head of a finished run's model and record the result in its directory.

    The record is ``ablation.json`` for zero ablation by accuracy. Other choices have separate files, named after the
    differences: ``ablation-mean.json``, ``ablation-position-loss-attribution.json``. Zero ablation by accuracy and by
    loss are recorded together. For other examples than those of the first record see `toeplens.engine.measures`.
    """
    request, execution = ExampleRequest(examples, split), execution or ExecutionOptions()
    choose("metric", metric, get_args(Metric))
    choose("intervention", intervention, get_args(Intervention))
    choose("method", method, get_args(Method))
    with lock_directory(run.directory, "run"):
        inputs = MeasureInputs(run, examples, split, plan_execution(execution.device, "off", "float32").device)
        batches = inputs.batches()
        key = [examples, split, intervention, metric, len(batches[0][0])]
        cache = _JobAblationCache(run.directory / _BATCH_CACHE, key, execution)
        ablations = ablate_heads_by_metric(
            ABLATION_METRICS if (metric, intervention, method) == (ABLATION_METRICS[0], "zero", "exact") else (metric,),
            inputs.source,
            batches,
            chance=run.spec.guess,
            intervention=intervention,
            method=method,
            cache=cache if method == "exact" else None,
        )
        for other, ablation in reversed(ablations.items()):  # the requested one last, as it marks the set as complete
            name = _record_name(other, intervention, method)
            # a separate one also has the cumulative curve
            if other == metric or read_record(run.directory, name, request) is None:
                write_record(run.directory, name, request, ablation.to_dict())
        cache.clear()
    return ablations[metric]


def _record_name(metric: Metric, intervention: Intervention = "zero", method: Method = "exact") -> str:
    defaults = (("zero", intervention), ("accuracy", metric), ("exact", method))
    return "-".join((_ABLATION, *(value for default, value in defaults if value != default)))


class _JobAblationCache(ResultCache):
    """The finished batches of an ablation, which it stops between two batches at the deadline."""

    def __init__(self, directory: Path, key: Any, execution: ExecutionOptions) -> None:
        super().__init__(directory, key)
        self.execution, self.slowest, self.started = execution, 0.0, 0.0

    def get(self, key: str) -> np.ndarray | None:
        if (batch := self.get_array(key)) is None:
            if self.execution.is_over(self.slowest):
                raise JobInterrupted
            self.started = time.monotonic()
        return batch

    def put(self, key: str, values: np.ndarray) -> None:
        self.slowest = max(self.slowest, time.monotonic() - self.started)
        self.put_array(key, values)


# ---- many jobs ------------------------------------------------------------------------------------------------------


def check_workers(workers: Workers, jobs: int, execution: ExecutionOptions) -> None:
    """Raise if these workers cannot run the jobs, before anything is written."""
    cluster = cluster_of(workers)
    must_be_installed(execution.follow)
    if cluster.on_ray:
        choose("compile", execution.compile, get_args(CompileMode))
        check_cluster(cluster, execution.device)
    else:
        plan_workers(jobs, execution.device, cluster.workers)


def run_jobs(
    jobs: Sequence[Job],
    out: Path,
    execution: ExecutionOptions,
    *,
    workers: Workers = None,
    on_event: OnEvent | None = None,
) -> list[Status]:
    """Run ``jobs`` in ``out`` in parallel; returns the status of each.

    On Ctrl-C, at the deadline, or if this process dies, every worker writes a checkpoint and stops. An error in one job
    also stops the others, and is raised. A cluster's workers must see ``out``, or publish their runs to the URL in
    ``execution``, from which they are fetched.
    """
    notify, out, on_ray = on_event or (lambda event: None), out.absolute(), cluster_of(workers).on_ray
    statuses: list[Status] = ["stopped"] * len(jobs)
    prepare_loggers(execution.follow, execution.group)
    todo = list(range(len(jobs)))

    def report_end(index: int, status: Status) -> None:
        statuses[index] = status
        notify(Event(index, 0, 0, None, status))

    def on_done(item: int, result: Any) -> bool:
        if item < len(batches):  # its jobs continue singly
            return result
        (index,) = groups[item]
        if result.status == "stopped":
            return False
        if on_ray:
            _sync_job(jobs[index], out, execution)
            if not is_done(jobs[index], out / jobs[index].spec.name):
                raise EnvironmentFailure(
                    f"out: a worker finished the run {jobs[index].spec.name}, but {execution.publish or out} does not "
                    "contain it. Use a shared directory or a URL."
                )
        report_end(index, result.status)
        return True

    def on_message(item: int, *report: Any) -> None:
        position, step, total, row = report if item < len(batches) else (0, *report)
        notify(Event(groups[item][position], step, total, row["test_accuracy"] if row else None))

    if on_ray:  # finished jobs need no worker
        with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
            list(pool.map(lambda job: _sync_job(job, out, execution), jobs))
        todo = [index for index in todo if not is_done(jobs[index], out / jobs[index].spec.name)]
        for index in sorted(set(range(len(jobs))) - set(todo)):
            report_end(index, Run.open(out / jobs[index].spec.name).status)
    batches = plan_batches(jobs, todo, out, execution, *_capacity(workers, len(todo), execution)) if todo else []
    groups = [*batches, *([index] for index in todo)]  # job indices of each item
    batch_of = {jobs[index].spec.name: item for item, batch in enumerate(batches) for index in batch}
    run_names = {len(batches) + position: jobs[index].spec.name for position, index in enumerate(todo)}
    worker_out = None if on_ray and execution.publish else out  # output directory of the workers
    run_parallel(
        call,  # type: ignore[arg-type]
        [
            *(partial(train_batch, [jobs[index] for index in batch], worker_out) for batch in batches),
            *(partial(run_job, jobs[index], worker_out) for index in todo),
        ],
        execution,
        workers,
        on_done=on_done,
        on_message=on_message,
        depends_on={item: batch_of[name] for item, name in run_names.items() if name in batch_of},
    )
    return statuses


def _sync_job(job: Job, out: Path, execution: ExecutionOptions) -> None:
    """Synchronise a job's run with the published one."""
    with sync_run(out / job.spec.name, execution):
        pass


def _capacity(workers: Workers, jobs: int, execution: ExecutionOptions) -> tuple[int, float]:
    """The number of parallel items, and the share of a GPU per item (0 on a CPU)."""
    cluster = cluster_of(workers)
    if cluster.on_ray:
        on_gpu = cluster.device(execution.device).startswith("cuda")
        return max(1, parallel_capacity(cluster)), min(1.0, cluster.gpus) if on_gpu else 0.0
    count, _ = plan_workers(jobs, execution.device, cluster.workers)
    return count, 1 / count if is_gpu(execution.device) else 0.0


def plan_batches(
    jobs: Sequence[Job], indices: Sequence[int], out: Path, execution: ExecutionOptions, count: int, share: float
) -> list[list[int]]:
    """Indices of untrained jobs that can be trained together, grouped into stacks.

    The stack size is ``execution.stack``. By default it is as many models as fit into the ``share`` of a GPU of one of
    ``count`` workers, and fewer if a worker would be idle.
    """
    if execution.stack == 1 or (execution.stack is None and not share):
        return []
    same_shape: dict[Any, list[int]] = defaultdict(list)
    for index in {jobs[index].spec.name: index for index in indices}.values():
        spec = jobs[index].spec
        if not (out / spec.name / RESULT).exists():
            same_shape[shape_of(spec), repr(spec.model.encoding_options)].append(index)
    groups = []
    for group in same_shape.values():
        with suppress(InputError):  # jobs that cannot be stacked are trained singly
            if len(group) > 1:
                check_batchable([jobs[index].spec for index in group])
                groups.append(group)
    per_worker = -(-sum(map(len, groups)) // count)
    batches = []
    for group in groups:
        fitting = int(models_per_gpu(jobs[group[0]].spec) * share)
        max_size = execution.stack or max(1, min(MAX_BATCHED, fitting, per_worker))
        size = -(-len(group) // -(-len(group) // max_size))
        batches += [batch for batch in (group[i : i + size] for i in range(0, len(group), size)) if len(batch) > 1]
    return batches
