"""Bars over training, on standard error, and what is said when the work begins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from toeplens.cli import console
from toeplens.cli.console import err
from toeplens.engine import Event, Job
from toeplens.ground.machine import size
from toeplens.training import RunSpec


def work(specs: Sequence[RunSpec]) -> str:
    """What training these will be: the tokens that are read in all, and the memory that the largest needs."""
    tokens, least = sum(spec.tokens for spec in specs), max(spec.memory_at_least for spec in specs)
    return f"{tokens:,} tokens to train on, at least {size(least)} of memory{' each' if len(specs) > 1 else ''}"


class _Opening:
    """Something to say when the work begins; where it is refused, its error is all that is said."""

    def __init__(self, about: str) -> None:
        self._about = about

    def begin(self) -> None:
        """Say it, once."""
        if self._about:
            console.say(self._about, aside=True)
        self._about = ""

    def say(self, text: str) -> None:
        """Say a line of its own on standard error."""
        self.begin()
        console.say(text, aside=True)


class StudyProgress(_Opening):
    """A live bar over a study's training steps with a time estimate; plain lines where there is no terminal."""

    def __init__(self, jobs: Sequence[Job], about: str) -> None:
        super().__init__(about)
        self.jobs = jobs
        self.steps = [0] * len(jobs)
        self.totals = [job.spec.total_steps for job in jobs]
        self.started = time.monotonic()
        self.finished = 0
        self.live = err.is_terminal
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=err,
            disable=not self.live,
        )
        self.whole = self.bar.add_task(f"0/{len(jobs)} cells", total=sum(self.totals))
        self.running: dict[int, Any] = {}

    def __enter__(self) -> StudyProgress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.bar.stop()
        if kind is None:
            self.begin()

    def __call__(self, event: Event) -> None:
        """Take note of a step or of a finished cell."""
        self.begin()
        label = self.jobs[event.job].label
        if event.status is None:
            self.steps[event.job] = event.step
            if event.job not in self.running:
                self.running[event.job] = self.bar.add_task(f"  {label}", total=event.total)
            text = f"  {label}" + (f"  accuracy {event.accuracy:.3f}" if event.accuracy is not None else "")
            self.bar.update(self.running[event.job], completed=event.step, description=text)
        else:
            self.finished += 1
            self.steps[event.job] = self.totals[event.job]
            if event.job in self.running:
                self.bar.remove_task(self.running.pop(event.job))
            if not self.live:
                minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
                err.print(
                    f"[{self.finished}/{len(self.jobs)}] {minutes}:{seconds:02d} {label}: {event.status}",
                    highlight=False,
                    markup=False,
                )
        self.bar.update(self.whole, completed=sum(self.steps), description=f"{self.finished}/{len(self.jobs)} cells")


class RunProgress(_Opening):
    """A live bar over one run's steps."""

    def __init__(self, label: str, about: str) -> None:
        super().__init__(about)
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=err,
            disable=not err.is_terminal,
        )
        self.label = label
        self.task = self.bar.add_task(label, total=None)

    def __enter__(self) -> RunProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, step: int, total: int, row: dict[str, Any] | None) -> None:
        """Take note of a step."""
        self.begin()
        accuracy = None if row is None else row["test_accuracy"]  # None where no example counted
        text = self.label + ("" if accuracy is None else f"  test accuracy {accuracy:.3f}")
        self.bar.update(self.task, completed=step, total=total, description=text)
