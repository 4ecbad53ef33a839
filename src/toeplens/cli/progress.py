"""Progress bars over training, on standard error, with an opening line and the handling of interrupts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from toeplens.cli.console import err, say
from toeplens.ground.execution import ClusterOptions, ExecutionOptions, stop_on_signals
from toeplens.ground.machine import size
from toeplens.training import RunSpec, plan_execution

if TYPE_CHECKING:
    from toeplens.engine import Event, Job


@contextmanager
def interruptible(execution: ExecutionOptions) -> Iterator[ExecutionOptions]:
    """Context whose options are over at the first Ctrl-C or SIGTERM; it then ends in `KeyboardInterrupt`."""
    with stop_on_signals() as stopped:
        yield replace(execution, should_stop=stopped)
    if stopped():
        raise KeyboardInterrupt


class _Opening:
    """A progress bar and an opening line, printed when the work starts (not if it is refused)."""

    def __init__(
        self,
        about: str,
        specs: Sequence[RunSpec],
        execution: ExecutionOptions,
        cluster: ClusterOptions,
        *columns: ProgressColumn,
    ) -> None:
        """``specs`` are the runs to train; the line gives device, total tokens and the largest run's memory."""
        if cluster.on_ray:  # its machines choose their own devices
            where = cluster.machines(execution.device)
        else:
            precision, width = specs[0].precision, specs[0].model.d_model
            where = plan_execution(execution.device, execution.compile, precision, width).describe()
        tokens, least = sum(spec.tokens for spec in specs), max(spec.memory_at_least for spec in specs)
        work = f"{tokens:,} training tokens, at least {size(least)} of memory{' each' if len(specs) > 1 else ''}"
        self._about = f"{about} on {where}: {work}"
        self.live = err.is_terminal
        self.bar = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), *columns, console=err, disable=not self.live
        )

    def begin(self) -> None:
        """Print the opening line, once."""
        if self._about:
            say(self._about, aside=True)
        self._about = ""

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


class StudyProgress(_Opening):
    """Progress over a study's training steps with a time estimate; plain lines without a terminal."""

    def __init__(self, jobs: Sequence[Job], about: str, execution: ExecutionOptions, cluster: ClusterOptions) -> None:
        left = TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False)
        columns = TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(), *left
        super().__init__(about, [job.spec for job in jobs], execution, cluster, *columns)
        self.jobs = jobs
        self.steps = [0] * len(jobs)
        self.started = time.monotonic()
        self.finished = 0
        self.whole = self.bar.add_task(f"0/{len(jobs)} cells", total=sum(job.spec.total_steps for job in jobs))
        self.running: dict[int, Any] = {}

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        super().__exit__()
        if kind is None:
            self.begin()

    def __call__(self, event: Event) -> None:
        """Update after a step or a finished cell."""
        self.begin()
        job = self.jobs[event.job]
        if event.status is None:
            self.steps[event.job] = event.step
            if event.job not in self.running:
                self.running[event.job] = self.bar.add_task(f"  {job.label}", total=event.total)
            accuracy = f"  accuracy {event.accuracy:.3f}" if event.accuracy is not None else ""
            self.bar.update(self.running[event.job], completed=event.step, description=f"  {job.label}{accuracy}")
        else:
            self.finished += 1
            self.steps[event.job] = job.spec.total_steps
            if event.job in self.running:
                self.bar.remove_task(self.running.pop(event.job))
            if not self.live:
                minutes, rest = divmod(int(time.monotonic() - self.started), 60)
                say(f"[{self.finished}/{len(self.jobs)}] {minutes}:{rest:02d} {job.label}: {event.status}", aside=True)
        self.bar.update(self.whole, completed=sum(self.steps), description=f"{self.finished}/{len(self.jobs)} cells")


class RunProgress(_Opening):
    """Progress over one run's steps."""

    def __init__(self, spec: RunSpec, execution: ExecutionOptions) -> None:
        about = f"{spec.task}, {spec.model.encoding}, {spec.model.protocol} protocol"
        columns = MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        super().__init__(about, [spec], execution, ClusterOptions(), *columns)
        self.label = spec.name
        self.task = self.bar.add_task(self.label, total=None)

    def __call__(self, step: int, total: int, row: dict[str, Any] | None) -> None:
        """Update after a step."""
        self.begin()
        accuracy = None if row is None else row["test_accuracy"]  # None where no example counted
        text = self.label + ("" if accuracy is None else f"  test accuracy {accuracy:.3f}")
        self.bar.update(self.task, completed=step, total=total, description=text)
