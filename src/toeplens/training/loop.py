"""Train one run, or several of equal shape as one: steps, evaluations, probes, checkpoints, exact resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from toeplens.ground.execution import ExecutionOptions
from toeplens.training import run as store
from toeplens.training.environment import plan_execution
from toeplens.training.loggers import OpenLogger
from toeplens.training.run import Run
from toeplens.training.session import Session
from toeplens.training.spec import RunSpec
from toeplens.training.stack import Stack, must_stack, pays_alone
from toeplens.training.watcher import Watcher

Progress = Callable[[int, int, dict[str, Any] | None], None]
ProgressOf = Callable[[int, int, int, dict[str, Any] | None], None]


def train(
    spec: RunSpec,
    out: Path | str,
    execution: ExecutionOptions | None = None,
    *,
    watcher: Watcher | None = None,
    loggers: Sequence[OpenLogger] = (),
    on_progress: Progress | None = None,
    **options: Any,
) -> Run:
    """Run ``spec`` in ``out``/``spec.name``: start it, resume it, or return it if it is finished.

    Arguments
        execution    device, compilation, deadline, stop signal, seconds between checkpoints. At the deadline a
                     checkpoint is saved, after at least one unit of work: a step, an evaluation batch, or a probe
        watcher      probes the model at some steps. `Run.watched` has the results, and the
                     seconds of each probe, which are not counted as the run's time
        loggers      called with the run's `RunInfo` when training begins; each returns a `Logger` for the
                     evaluations of this session. Their time is not counted. A logger that raises is dropped with
                     a warning
        on_progress  called with (step, total steps, last epoch's metrics): after the setup, then about five
                     times per second
        options      fields of ``execution`` by name: ``device="cpu"``, ``deadline=time.time() + 60``

    On a CPU, a run that is interrupted anywhere and resumed is bit-identical to an uninterrupted one, on
    the same machine, thread count and versions. It can also be resumed elsewhere; `Run.history` records each
    environment. A watcher is not part of the spec and changes only the time, not the weights. A finished run is
    returned unchanged, so probes missing from it stay missing. If a probe raises, a checkpoint is saved first.
    """
    tell = None if on_progress is None else lambda index, *told: on_progress(*told)
    chosen: dict[str, Any] = {"watchers": [watcher], "loggers": [loggers], "on_progress": tell}
    return train_as_one([spec], out, execution, **chosen, **options)[0]


def train_as_one(
    specs: Sequence[RunSpec],
    out: Path | str,
    execution: ExecutionOptions | None = None,
    *,
    watchers: Sequence[Watcher | None] | None = None,
    loggers: Sequence[Sequence[OpenLogger]] | None = None,
    on_progress: ProgressOf | None = None,
    **options: Any,
) -> list[Run]:
    """Train several specs of equal shape as one stacked model; see `train`.

    Each run has its own directory, examples, data order, evaluations and checkpoints, and its numbers equal those of a
    separate run up to rounding. A run can be started separately and resumed in a stack, or the other way round. Runs
    that are ahead wait for the others; finished ones leave the stack. A run's seconds are its share.

    ``on_progress`` is called with the run's index first. Raises `InputError` unless the specs can be stacked
    (`toeplens.training.stack.must_stack`).
    """
    execution = replace(execution or ExecutionOptions(), **options)
    watchers, loggers = watchers or [None] * len(specs), loggers or [()] * len(specs)
    directories = [Path(out) / spec.name for spec in specs]
    with ExitStack() as held:
        for directory, spec in sorted(zip(directories, specs, strict=True), key=lambda each: each[0]):
            held.enter_context(store.entered(directory, spec))
        # until the result is written, the checkpoint contains everything in the other files
        if places := [place for place, directory in enumerate(directories) if not (directory / store.RESULT).exists()]:
            first, stacked = specs[places[0]], len(places) > 1
            plan = plan_execution(execution.device, execution.compile, first.precision, first.model.d_model)
            if stacked:
                must_stack([specs[place] for place in places])
                plan = replace(plan, compiled=False, why="several models are trained as one")
            elif execution.compile == "auto" and pays_alone(first, plan.device):
                stacked, plan = True, replace(plan, compiled=False, why="stack of one model: a CUDA graph")
            with torch.random.fork_rng(devices=[plan.device] if plan.device.type == "cuda" else []):
                sessions = {
                    place: Session(
                        specs[place],
                        directories[place],
                        plan,
                        watchers[place],
                        loggers=loggers[place],
                        stacked=stacked,
                    )
                    for place in places
                }
                try:
                    _fit(sessions, execution, on_progress or (lambda *told: None))
                finally:  # those of finished runs are already closed
                    for session in sessions.values():
                        session.loggers.close("stopped")
        return [Run.open(directory) for directory in directories]


def _fit(sessions: dict[int, Session], execution: ExecutionOptions, tell: ProgressOf) -> None:
    """Work in units (a training step, an evaluation batch, a probe) until finished or stopped."""

    def report(some: Sequence[Session]) -> None:
        for place, session in sessions.items():
            if session in some:
                tell(place, session.step, session.spec.total_steps, session.rows[-1] if session.rows else None)

    left, stack = list(sessions.values()), None
    report(left)
    saved = shown = begun = time.monotonic()
    slowest, worked = 0.0, False
    while left:
        with _saved_on_errors(left):
            probes = [session for session in left if session.owes_look()]
        if over := [session for session in left if session.done and session not in probes]:
            for session in over:
                session.finish("diverged" if session.diverged else "complete")
                left.remove(session)
            begun = time.monotonic()
            continue
        if execution.should_stop() or (worked and execution.late(slowest)):
            _save(left)
            return
        compiling, probed = False, 0.0
        if at_work := probes[:1]:
            with _saved_on_errors(left):
                probed = at_work[0].look()
        elif at_work := [session for session in left if session.owes_evaluation][:1]:
            at_work[0].evaluate_batch()
        else:
            first = min(session.step for session in left)
            at_work = [session for session in left if session.step == first]
            compiling = at_work[0].is_compiling
            if not at_work[0].stacked:
                at_work[0].take_step()
            else:
                if stack is None or stack.sessions != at_work:
                    stack = None  # free its memory
                    stack = Stack(at_work)
                stack.take_step()
        now = time.monotonic()
        took, begun = now - begun, now
        for session in at_work:
            session.seconds += (took - probed) / len(at_work)
        if max([session.loggers.log(session.rows) for session in at_work]):
            begun = time.monotonic()
        if not compiling:  # the first step of a compiled run is mostly compilation
            slowest = max(slowest, took)
        worked = True
        if now - shown > 0.2:
            report(at_work)
            shown = now
        if now - saved >= execution.checkpoint_seconds and (unfinished := [each for each in left if not each.done]):
            _save(unfinished)
            saved = begun = time.monotonic()


def _save(sessions: Sequence[Session]) -> None:
    for session in sessions:
        session.save()


@contextmanager
def _saved_on_errors(sessions: Sequence[Session]) -> Iterator[None]:
    """Context in which a probe that raises costs no steps."""
    try:
        yield
    except Exception:
        _save(sessions)
        raise
