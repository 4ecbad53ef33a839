"""Carry out many jobs on this machine: one process a core, each stoppable, all reporting to one place."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toeplens.engine.jobs import Job, carry_out
from toeplens.engine.limits import Limits
from toeplens.engine.pool import in_processes
from toeplens.ground.machine import within
from toeplens.training.run import Status


@dataclass(frozen=True)
class Event:
    """What happened to a job: a step (``status`` None), or its end."""

    job: int
    step: int
    total: int
    accuracy: float | None
    status: Status | None = None


_ALWAYS_ALLOWED = 64  # workers; a larger machine may have more

OnEvent = Callable[[Event], None]


def plan_workers(jobs: int, device: str, workers: int | None) -> tuple[int, int]:
    """Processes, and threads in each: small models use cores best one run a core; a GPU is for one run at a time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    count = workers if workers is not None else (1 if on_gpu else cores)
    within("workers", count, 1, max(_ALWAYS_ALLOWED, 4 * cores))
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
    count, threads = plan_workers(len(jobs), limits.device, workers)
    tell = on_event or (lambda event: None)
    statuses: list[Status] = ["stopped"] * len(jobs)

    def done(index: int, status: Status | None) -> None:
        if status is not None:
            statuses[index] = status
            tell(Event(index, 0, 0, None, status))

    in_processes(
        _work,
        [(job, out) for job in jobs],
        limits,
        count=count,
        threads=threads,
        on_done=done,
        on_told=lambda index, step: tell(Event(index, *step)),
    )
    return statuses


def _work(piece: tuple[Job, Path], limits: Limits, tell: Callable[[Any], None]) -> Status | None:
    def report(step: int, total: int, row: dict[str, Any] | None) -> None:
        tell((step, total, row["test_accuracy"] if row else None))

    status = carry_out(*piece, limits, report).status
    return None if status == "stopped" else status
