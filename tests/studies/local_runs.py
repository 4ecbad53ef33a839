"""Runs of a study in the test's own process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from toeplens.engine import ExecutionOptions, Job, run_job

DEPOSIT, GRID = (import_module(f"toeplens.{each}.study") for each in ("papers.deposit", "studies.grid"))  # where it is


class LocalRuns:
    """Stands for `run_jobs`: one job after another, stopped after some; knows what it trained."""

    def __init__(self) -> None:
        self.stop_after = 10**6
        self.done: list[str] = []

    def __call__(self, jobs: Sequence[Job], out: Path, limits: ExecutionOptions, **_: Any) -> None:
        for job in jobs:
            run = out / job.spec.name
            trained = (run / "ablation.json").exists()
            if trained and all((run / f"{name}.json").exists() for name in job.measures):
                continue
            over = limits if trained else replace(limits, should_stop=lambda: len(self.done) >= self.stop_after)
            if run_job(job, out, over).status != "stopped" and not trained:
                self.done.append(job.spec.name)
