"""One job: train a run, then silence its heads; both can be stopped anywhere and gone on with."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from toeplens.ground import InputError, read_json, write_bytes, write_json
from toeplens.ground.files import make_directory
from toeplens.lens import HeadAblation, ablate_heads
from toeplens.sources import DecoderSource
from toeplens.tasks import TEST_SHARE, Examples
from toeplens.training import Batches, Run, RunSpec, plan_execution, train
from toeplens.training.environment import CompileMode

ABLATION, _PARTS = "ablation.json", "ablation-parts"
Split = Literal["test", "train+test"]
_REPLAYED_TOKENS = {"cpu": 2**16, "cuda": 2**20}


class Stopped(Exception):
    """Raised inside a job to leave it at a point from which it can go on."""


@dataclass(frozen=True)
class Job:
    """A run and what to do with it afterwards.

    label     what people call it
    examples  how many examples the ablation and the measures count; 0 for none
    measures  what else to measure of the trained model, see `toeplens.engine.measures`
    split     which examples: of the ``test`` set (the paper), or ``train+test`` in the proportion 70:30 (the released
              program)
    """

    spec: RunSpec
    label: str
    examples: int = 0
    split: Split = "test"
    measures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """When and how a job runs: its machine, its deadline, and who may stop it."""

    device: str = "auto"
    compile: CompileMode = "auto"
    checkpoint_seconds: float = 30.0
    deadline: float | None = None
    should_stop: Callable[[], bool] = lambda: False

    def over(self, ahead: float = 0.0) -> bool:
        """Whether it is time to stop, if the next piece of work takes ``ahead`` seconds."""
        return self.should_stop() or (self.deadline is not None and time.time() + ahead >= self.deadline)


def carry_out(
    job: Job, out: Path, limits: Limits, on_progress: Callable[[int, int, dict[str, Any] | None], None] | None = None
) -> Run:
    """Train the job's run in ``out`` and ablate its heads; returns the run, whose status says how far it got."""
    run = train(
        job.spec,
        out,
        device=limits.device,
        compile=limits.compile,
        checkpoint_seconds=limits.checkpoint_seconds,
        deadline=limits.deadline,
        should_stop=limits.should_stop,
        on_progress=on_progress,
    )
    if run.status == "complete" and job.examples and not (run.directory / ABLATION).exists():
        try:
            ablate_run(run, examples=job.examples, split=job.split, limits=limits)
        except Stopped:
            return Run(run.directory, run.spec, "stopped", run.metrics, run.result)
    return run


def read_ablation(directory: Path) -> HeadAblation | None:
    """A run's recorded ablation, or None."""
    path = directory / ABLATION
    return HeadAblation.from_dict(read_json(path)) if path.exists() else None


def ablate_run(run: Run, *, examples: int, split: Split = "test", limits: Limits | None = None) -> HeadAblation:
    """Silence each head of a finished run's model and record the result in its directory."""
    if examples < 1:
        raise InputError(f"examples: {examples} was given; it must be at least 1.")
    limits = limits or Limits()
    device = plan_execution(limits.device, "off", "float32").device
    source = DecoderSource(run.model().to(device))
    chosen = examples_of(run.spec, examples, split)
    size = max(1, _REPLAYED_TOKENS[device.type] // (run.spec.model.num_heads + 1) // chosen.tokens.shape[1])
    batches = list(Batches.of(chosen, device, run.spec.ignore_label).split(size))
    parts = run.directory / f"{_PARTS}-{split}-{len(chosen)}-by-{size}"
    ablation = ablate_heads(source, batches, chance=run.spec.chance, memory=_Parts(parts, limits))
    write_json(run.directory / ABLATION, {**ablation.to_dict(), "split": split})
    shutil.rmtree(parts, ignore_errors=True)
    return ablation


def examples_of(spec: RunSpec, examples: int, split: Split = "test") -> Examples:
    """That many of a run's examples: of the test set, or of both sets in the proportion 70:30."""
    task = spec.build_task()
    if split == "test":
        return task.dataset("test", min(examples, spec.test_examples), spec.data_seed)
    test = min(max(1, round(TEST_SHARE * examples)), spec.test_examples)
    train = min(max(1, examples - test), spec.train_examples)
    parts = [task.dataset("train", train, spec.data_seed), task.dataset("test", test, spec.data_seed)]
    return Examples.join(parts)


class _Parts:
    """A directory that remembers an ablation's batches, and stops it between two of them when time is up."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        self.directory = make_directory(directory)
        self.limits = limits
        self.slowest = 0.0
        self.begun: float | None = None

    def get(self, key: str) -> np.ndarray | None:
        path = self.directory / f"{key}.npy"
        if path.exists():
            with suppress(EOFError, ValueError):  # a damaged one is worked out again
                return np.load(path, allow_pickle=False)
        if self.limits.over(self.slowest):
            raise Stopped
        self.begun = time.monotonic()
        return None

    def put(self, key: str, right: np.ndarray) -> None:
        if self.begun is not None:
            self.slowest = max(self.slowest, time.monotonic() - self.begun)
        content = io.BytesIO()
        np.save(content, right, allow_pickle=False)
        write_bytes(self.directory / f"{key}.npy", content.getvalue())
