"""Progress bars on standard error, with an opening line and the handling of interrupts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from toeplens.cli.console import echo, err
from toeplens.utils.execution import ClusterOptions, ExecutionOptions, stop_on_signals
from toeplens.utils.formatting import fmt_duration
from toeplens.utils.machine import fmt_bytes

if TYPE_CHECKING:
    from toeplens.engine import Event, Job
    from toeplens.training import RunSpec

_LINE_SECONDS = 20.0  # seconds between two lines without a terminal
_MIN_ELAPSED = 0.5  # seconds before the remaining time is estimated
_TOO_LONG = 180.0  # seconds of effects after which a faster option is suggested


@contextmanager
def interruptible(execution: ExecutionOptions) -> Iterator[ExecutionOptions]:
    """Context whose options are over at the first Ctrl-C or SIGTERM; it then ends in `KeyboardInterrupt`."""
    with stop_on_signals() as stop_requested:
        yield replace(execution, should_stop=stop_requested)
    if stop_requested():
        raise KeyboardInterrupt


class ProgressBars:
    """A bar with the remaining time for each kind of work; without a terminal, a line every 20 seconds."""

    def __init__(self, opening: str = "", *, advice: str = "", lines: bool = True) -> None:
        """Prepare the bars; they are shown inside the context.

        opening  line printed when the work starts (not if it is refused)
        advice   printed once if ``heads`` take minutes
        lines    False: no lines without a terminal
        """
        self._opening, self._advice, self._lines = opening, advice, lines and not err.is_terminal
        self._bars = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=err,
            disable=not err.is_terminal,
            get_time=lambda: time.monotonic(),
            speed_estimate_period=3600.0,
        )
        self._tasks: dict[str, TaskID] = {}
        self._printed_at: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bars.stop()
        if kind is None:
            self._print_opening()

    def _print_opening(self) -> None:
        if self._opening:
            echo(self._opening, stderr=True)
        self._opening = ""

    def __call__(self, name: str, done: int, total: int, about: str = "") -> None:
        """Update how much is done of a kind of work; ``about`` follows its name on the bar."""
        self._print_opening()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)
        self._bars.update(self._tasks[name], completed=done, total=total, description=f"{name}{about}")
        task = next(task for task in self._bars.tasks if task.id == self._tasks[name])
        seconds = task.time_remaining
        if not seconds or done >= total or (task.elapsed or 0.0) < _MIN_ELAPSED:
            return
        remaining = f"about {fmt_duration(seconds)} left"
        if name == "heads" and seconds > _TOO_LONG and self._advice:
            echo(f"{name}: {remaining}; {self._advice}", stderr=True)
            self._advice = ""
        now = time.monotonic()
        if self._lines and now - self._printed_at.get(name, -_LINE_SECONDS) >= _LINE_SECONDS:
            self._printed_at[name] = now
            echo(f"{name}: {done} of {total}, {remaining}", stderr=True)

    def finish(self, line: str, prefix: str = "") -> None:
        """Remove the bars whose names begin with ``prefix``, and print a line."""
        for name in [name for name in self._tasks if name.startswith(prefix)]:
            self._bars.remove_task(self._tasks.pop(name))
        echo(line, stderr=True)


class StudyProgress(ProgressBars):
    """Progress over a study's training steps; without a terminal, a line for each finished cell."""

    def __init__(self, jobs: Sequence[Job], about: str, execution: ExecutionOptions, cluster: ClusterOptions) -> None:
        super().__init__(opening_line(about, [job.spec for job in jobs], execution, cluster), lines=False)
        self._jobs, self._steps, self._finished = jobs, [0] * len(jobs), 0
        self._total, self._started = sum(job.spec.total_steps for job in jobs), time.monotonic()

    def on_event(self, event: Event) -> None:
        """Update after a step or a finished cell."""
        job = self._jobs[event.job]
        self._steps[event.job] = event.step if event.status is None else job.spec.total_steps
        if event.status is not None:
            self._finished += 1
            if (task := self._tasks.pop(f"  {job.label}", None)) is not None:
                self._bars.remove_task(task)
        self("cells", sum(self._steps), self._total, f" {self._finished}/{len(self._jobs)}")
        if event.status is None:
            accuracy = f"  accuracy {event.accuracy:.3f}" if event.accuracy is not None else ""
            self(f"  {job.label}", event.step, event.total, accuracy)
        elif not err.is_terminal:
            minutes, secs = divmod(int(time.monotonic() - self._started), 60)
            echo(f"[{self._finished}/{len(self._jobs)}] {minutes}:{secs:02d} {job.label}: {event.status}", stderr=True)


def opening_line(about: str, specs: Sequence[RunSpec], execution: ExecutionOptions, cluster: ClusterOptions) -> str:
    """The opening line of training: device, total tokens of these runs and the largest one's memory."""
    from toeplens.training import plan_execution

    device = "a Ray cluster"
    if not cluster.on_ray:
        precision, width = specs[0].precision, specs[0].model.d_model
        device = plan_execution(execution.device, execution.compile, precision, width).describe()
    tokens, min_bytes = sum(spec.tokens for spec in specs), max(spec.min_memory for spec in specs)
    suffix = " each" if len(specs) > 1 else ""
    return f"{about} on {device}: {tokens:,} training tokens, at least {fmt_bytes(min_bytes)} of memory{suffix}"
