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

from toeplens.cli.console import err, say
from toeplens.ground.execution import ClusterOptions, ExecutionOptions, stop_on_signals
from toeplens.ground.machine import size
from toeplens.ground.words import duration

if TYPE_CHECKING:
    from toeplens.engine import Event, Job
    from toeplens.training import RunSpec

_EVERY = 20.0  # seconds between two lines without a terminal
_SURE = 0.5  # seconds before the remaining time is estimated
_TOO_LONG = 180.0  # seconds of effects after which a faster option is suggested


@contextmanager
def interruptible(execution: ExecutionOptions) -> Iterator[ExecutionOptions]:
    """Context whose options are over at the first Ctrl-C or SIGTERM; it then ends in `KeyboardInterrupt`."""
    with stop_on_signals() as stopped:
        yield replace(execution, should_stop=stopped)
    if stopped():
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
        self._said: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bars.stop()
        if kind is None:
            self._begin()

    def _begin(self) -> None:
        if self._opening:
            say(self._opening, aside=True)
        self._opening = ""

    def __call__(self, what: str, done: int, total: int, about: str = "") -> None:
        """Update how much is done of a kind of work; ``about`` follows its name on the bar."""
        self._begin()
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total, description=f"{what}{about}")
        task = next(task for task in self._bars.tasks if task.id == self._tasks[what])
        seconds = task.time_remaining
        if not seconds or done >= total or (task.elapsed or 0.0) < _SURE:
            return
        left = f"about {duration(seconds)} left"
        if what == "heads" and seconds > _TOO_LONG and self._advice:
            say(f"{what}: {left}; {self._advice}", aside=True)
            self._advice = ""
        now = time.monotonic()
        if self._lines and now - self._said.get(what, -_EVERY) >= _EVERY:
            self._said[what] = now
            say(f"{what}: {done} of {total}, {left}", aside=True)

    def finish(self, line: str, prefix: str = "") -> None:
        """Remove the bars whose names begin with ``prefix``, and print a line."""
        for what in [what for what in self._tasks if what.startswith(prefix)]:
            self._bars.remove_task(self._tasks.pop(what))
        say(line, aside=True)


class StudyProgress(ProgressBars):
    """Progress over a study's training steps; without a terminal, a line for each finished cell."""

    def __init__(self, jobs: Sequence[Job], about: str, execution: ExecutionOptions, cluster: ClusterOptions) -> None:
        super().__init__(opening(about, [job.spec for job in jobs], execution, cluster), lines=False)
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
            minutes, rest = divmod(int(time.monotonic() - self._started), 60)
            say(f"[{self._finished}/{len(self._jobs)}] {minutes}:{rest:02d} {job.label}: {event.status}", aside=True)


def opening(about: str, specs: Sequence[RunSpec], execution: ExecutionOptions, cluster: ClusterOptions) -> str:
    """The opening line of training: device, total tokens of these runs and the largest one's memory."""
    from toeplens.training import plan_execution

    where = "a Ray cluster"
    if not cluster.on_ray:
        precision, width = specs[0].precision, specs[0].model.d_model
        where = plan_execution(execution.device, execution.compile, precision, width).describe()
    tokens, least = sum(spec.tokens for spec in specs), max(spec.memory_at_least for spec in specs)
    each = " each" if len(specs) > 1 else ""
    return f"{about} on {where}: {tokens:,} training tokens, at least {size(least)} of memory{each}"
