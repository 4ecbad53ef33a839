"""One job: train a run, then ablate its heads; both can be interrupted and resumed at any point."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from toeplens.encodings.registry import package_of
from toeplens.engine.examples import DataSplit
from toeplens.engine.head_watch import TOGETHER, HeadWatch
from toeplens.engine.measures import (
    Asked,
    Subject,
    forget_measured,
    measure_run,
    read_measures,
    read_record,
    write_record,
)
from toeplens.engine.pool import Limits
from toeplens.engine.remote import published
from toeplens.ground import InputError, ToeplensError, choose, write_bytes
from toeplens.ground.errors import first_line
from toeplens.ground.files import make_directory, read_bytes
from toeplens.ground.locks import Busy, locked
from toeplens.lens import HeadAblation
from toeplens.lens.ablation import Method, ablate_by
from toeplens.lens.kit.interventions import Intervention, Metric
from toeplens.training import Run, RunSpec, plan_execution, train
from toeplens.training.loggers import OpenLogger, loggers_named
from toeplens.training.loop import Progress
from toeplens.training.run import RESULT, WEIGHTS, entered

_ABLATION = "ablation"


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


def carry_out(job: Job, out: Path, limits: Limits, on_progress: Progress | None = None) -> Run:
    """Train the job's run in ``out``, ablate its heads and measure it; see the status of the returned run.

    The run's directory is locked; if another process holds the lock, this call waits. With a URL in the limits, the
    published state of the run is fetched first, and progress is published.
    """
    directory = out / job.spec.name
    package = package_of(job.spec.model.encoding)
    try:
        with entered(directory, job.spec, until=limits.over), published(directory, limits) as within:
            try:
                return _carried_out(job, out, within, on_progress)
            except Stopped:  # stopped between two pieces of work
                return replace(Run.open(directory), status="stopped")
    except Busy:  # another process held the run until the deadline
        return replace(Run.open(directory), status="stopped")
    except (ToeplensError, OSError, MemoryError):
        raise
    except Exception as error:
        if package is None:
            raise
        raise InputError(
            f"encoding: {job.spec.model.encoding!r} of the package {package} failed ({type(error).__name__}: "
            f"{first_line(error)}). Finished work is saved."
        ) from error


def _carried_out(job: Job, out: Path, limits: Limits, on_progress: Progress | None) -> Run:
    forget_measured(out / job.spec.name)
    run = train(
        job.spec,
        out,
        device=limits.device,
        compile=limits.compile,
        checkpoint_seconds=limits.checkpoint_seconds,
        deadline=limits.deadline_now(),
        should_stop=limits.should_stop,
        on_progress=on_progress,
        watcher=watcher_of(job),
        loggers=loggers_of(job, limits),
    )
    if run.status != "complete" or not job.examples:
        return run
    asked = Asked(job.examples, job.split)
    if read_ablation(run.directory, asked) is None:
        ablate_run(run, examples=job.examples, split=job.split, limits=limits)
    _forget_parts(run.directory, asked)
    for measure in job.measures:
        if limits.over():
            raise Stopped
        measure_run(run, measure, examples=job.examples, split=job.split, device=limits.device)
    return run


def watcher_of(job: Job) -> HeadWatch | None:
    """The probes of the job's heads during training, if requested."""
    return HeadWatch(job.spec, whole=job.examples, split=job.split) if job.watch else None


def loggers_of(job: Job, limits: Limits) -> list[OpenLogger]:
    """The loggers of the job's training."""
    return loggers_named(limits.follow, job.label, limits.group)


def is_done(job: Job, directory: Path) -> bool:
    """Whether a run's directory has all results of the job."""
    if not (directory / RESULT).exists():
        return False
    if Run.open(directory).status == "diverged" or not job.examples:
        return True
    asked = Asked(job.examples, job.split)
    measured = read_measures(directory, job.measures, asked)
    return read_ablation(directory, asked) is not None and len(measured) == len(set(job.measures))


def without_weights(jobs: Sequence[Job], out: Path) -> list[Job]:
    """Jobs with missing measures whose runs in ``out`` have no weights."""
    return [
        job
        for job in jobs
        if (out / job.spec.name / RESULT).exists()
        and not (out / job.spec.name / WEIGHTS).exists()
        and not is_done(job, out / job.spec.name)
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
    limits: Limits | None = None,
    metric: Metric = "accuracy",
    intervention: Intervention = "zero",
    method: Method = "exact",
) -> HeadAblation:
    """Ablate each head of a finished run's model and record the result in its directory.

    The record is ``ablation.json`` for zero ablation by accuracy. Other choices have separate files, named after the
    differences: ``ablation-mean.json``, ``ablation-position-loss-attribution.json``. Zero ablation by accuracy and by
    loss are recorded together. For other examples than those of the first record see `toeplens.engine.measures`.
    """
    asked = Asked(examples, split)
    choose("metric", metric, get_args(Metric))
    choose("intervention", intervention, get_args(Intervention))
    choose("method", method, get_args(Method))
    limits = limits or Limits()
    with locked(run.directory, "run"):
        device = plan_execution(limits.device, "off", "float32").device
        subject = Subject(run, examples, split, device)
        batches = subject.batches()
        parts = run.directory / f"{_parts(asked, intervention, metric)}{len(batches[0][0])}"
        found = ablate_by(
            TOGETHER if (metric, intervention, method) == (TOGETHER[0], "zero", "exact") else (metric,),
            subject.source(),
            batches,
            chance=run.spec.guess,
            intervention=intervention,
            method=method,
            memory=_Parts(parts, limits) if method == "exact" else None,
        )
        for each, ablation in reversed(
            found.items()
        ):  # the requested one is written last, as it marks the set as complete
            name = _name(each, intervention, method)
            if (
                each == metric or read_record(run.directory, name, asked) is None
            ):  # a separate one also has the cumulative curve
                write_record(run.directory, name, asked, ablation.to_dict())
        _forget_parts(run.directory, asked, intervention, metric)
    return found[metric]


def _name(metric: Metric, intervention: Intervention = "zero", method: Method = "exact") -> str:
    usual = (("zero", intervention), ("accuracy", metric), ("exact", method))
    return "-".join((_ABLATION, *(given for default, given in usual if given != default)))


def _parts(asked: Asked, intervention: Intervention = "zero", metric: Metric = "accuracy") -> str:
    """Prefix of directories with parts of an ablation, followed by the batch size."""
    return f"{_ABLATION}-passes-{intervention}-{metric}-{asked.split}-{asked.examples}-by-"


def _forget_parts(directory: Path, asked: Asked, *kind: Any) -> None:
    """Remove the parts of a recorded ablation, left over if it was killed."""
    for parts in directory.glob(f"{_parts(asked, *kind)}*"):
        shutil.rmtree(parts, ignore_errors=True)


class _Parts:
    """Saves the finished batches of an ablation, and stops it between two batches at the deadline."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        self.directory = make_directory(directory)
        self.limits = limits
        self.slowest = 0.0
        self.begun: float | None = None

    def get(self, key: str) -> np.ndarray | None:
        path = self.directory / f"{key}.npy"
        if path.exists():
            with suppress(Exception):  # a damaged one is computed again
                return np.load(io.BytesIO(read_bytes(path)), allow_pickle=False)
        if self.limits.over(self.slowest):
            raise Stopped
        self.begun = time.monotonic()
        return None

    def put(self, key: str, answers: np.ndarray) -> None:
        if self.begun is not None:
            self.slowest = max(self.slowest, time.monotonic() - self.begun)
        content = io.BytesIO()
        np.save(content, answers, allow_pickle=False)
        write_bytes(self.directory / f"{key}.npy", content.getvalue())
