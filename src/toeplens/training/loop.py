"""Train one run, or several of equal shape as one: steps, evaluations, probes, checkpoints, exact resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from toeplens.training import run as store
from toeplens.training.environment import CompileMode, plan_execution
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
    *,
    device: str = "auto",
    compile: CompileMode = "auto",
    checkpoint_seconds: float = 30.0,
    deadline: float | None = None,
    should_stop: Callable[[], bool] | None = None,
    on_progress: Progress | None = None,
    watcher: Watcher | None = None,
    loggers: Sequence[OpenLogger] = (),
) -> Run:
    """Run ``spec`` in ``out``/``spec.name``: start it, resume it, or return it if it is finished.

    Arguments
        device              ``auto``, ``cpu``, ``cuda`` or ``cuda:N``
        compile             ``auto``, ``on`` or ``off``
        checkpoint_seconds  maximum time between checkpoints
        deadline            `time.time()` at which to save a checkpoint and stop (after at least one unit of work:
                            a step, an evaluation batch, or a probe)
        should_stop         called before every unit of work; stops likewise if it returns True
        on_progress         called with (step, total steps, last epoch's metrics): after the setup, then about five
                            times per second
        watcher             probes the model at some steps. `Run.watched` has the results, and the
                            seconds of each probe, which are not counted as the run's time
        loggers             called with the run's `RunInfo` when training begins; each returns a `Logger` for the
                            evaluations of this session. Their time is not counted. A logger that raises is dropped with
                            a warning

    On a CPU, a run that is interrupted anywhere and resumed is bit-identical to an uninterrupted one, on
    the same machine, thread count and versions. It can also be resumed elsewhere; `Run.history` records each
    environment. A watcher is not part of the spec and changes only the time, not the weights. A finished run is
    returned unchanged, so probes missing from it stay missing. If a probe raises, a checkpoint is saved first.
    """
    tell = None if on_progress is None else lambda index, *told: on_progress(*told)
    (run,) = train_as_one(
        [spec],
        out,
        device=device,
        compile=compile,
        checkpoint_seconds=checkpoint_seconds,
        deadline=deadline,
        should_stop=should_stop,
        on_progress=tell,
        watchers=[watcher],
        loggers=[loggers],
    )
    return run


def train_as_one(
    specs: Sequence[RunSpec],
    out: Path | str,
    *,
    device: str = "auto",
    compile: CompileMode = "auto",
    checkpoint_seconds: float = 30.0,
    deadline: float | None = None,
    should_stop: Callable[[], bool] | None = None,
    on_progress: ProgressOf | None = None,
    watchers: Sequence[Watcher | None] | None = None,
    loggers: Sequence[Sequence[OpenLogger]] | None = None,
) -> list[Run]:
    """Train several specs of equal shape as one stacked model; see `train`.

    Each run has its own directory, examples, data order, evaluations and checkpoints, and its numbers equal those of a
    separate run up to rounding. A run can be started separately and resumed in a stack, or the other way round. Runs
    that are ahead wait for the others; finished ones leave the stack. A run's seconds are its share.

    ``on_progress`` is called with the run's index first. Raises `InputError` unless the specs can be stacked
    (`toeplens.training.stack.must_stack`).
    """
    watching = list(watchers) if watchers is not None else [None] * len(specs)
    logging = list(loggers) if loggers is not None else [()] * len(specs)
    directories = [Path(out) / spec.name for spec in specs]
    with ExitStack() as held:
        for directory, spec in sorted(zip(directories, specs, strict=True), key=lambda each: each[0]):
            held.enter_context(store.entered(directory, spec))
        # until the result is written, the checkpoint contains everything in the other files
        places = [place for place, directory in enumerate(directories) if not (directory / store.RESULT).exists()]
        if places:
            first = specs[places[0]]
            if len(places) > 1:
                must_stack([specs[place] for place in places])
            execution = plan_execution(device, compile, first.precision, first.model.d_model)
            stacked = len(places) > 1
            if stacked:
                execution = replace(execution, compiled=False, why="several models are trained as one")
            elif compile == "auto" and pays_alone(first, execution.device):
                stacked, execution = True, replace(execution, compiled=False, why="stack of one model: a CUDA graph")
            devices = [execution.device] if execution.device.type == "cuda" else []
            tell = on_progress or (lambda *told: None)
            with torch.random.fork_rng(devices=devices):
                sessions = [
                    Session(specs[i], directories[i], execution, watching[i], loggers=logging[i], stacked=stacked)
                    for i in places
                ]
                for place, session in zip(places, sessions, strict=True):
                    tell(place, session.step, session.spec.total_steps, session.rows[-1] if session.rows else None)
                try:
                    _fit(sessions, places, checkpoint_seconds, deadline, should_stop or (lambda: False), tell)
                finally:  # those of finished runs are already closed
                    for session in sessions:
                        session.loggers.close("stopped")
        return [Run.open(directory) for directory in directories]


def _fit(
    sessions: list[Session],
    places: list[int],
    checkpoint_seconds: float,
    deadline: float | None,
    should_stop: Callable[[], bool],
    tell: ProgressOf,
) -> None:
    """Work in units (a training step, an evaluation batch, a probe) until finished or stopped."""
    place_of = dict(zip(sessions, places, strict=True))
    saved = shown = begun = time.monotonic()
    ends = None if deadline is None else begun + deadline - time.time()  # independent of later clock changes
    slowest, worked = 0.0, False
    stack: Stack | None = None
    left = list(sessions)
    while left:
        looking = next((session for session in left if session.owes_look()), None)
        if over := [session for session in left if session.done and not session.owes_look()]:
            for session in over:
                session.finish("diverged" if session.diverged else "complete")
                left.remove(session)
            begun = time.monotonic()
            continue
        if should_stop() or (ends is not None and worked and time.monotonic() + slowest >= ends):
            for session in left:
                session.save()
            return
        compiling, looked = False, 0.0
        at_work = [looking] if looking else [each for each in left if each.owes_evaluation][:1]
        if looking:
            try:
                looked = looking.look()
            except Exception:  # it has saved a checkpoint itself
                for session in left:
                    if session is not looking:
                        session.save()
                raise
        elif at_work:
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
            session.seconds += (took - looked) / len(at_work)
        if max([session.loggers.log(session.rows) for session in at_work]):
            begun = time.monotonic()
        if not compiling:  # the first step of a compiled run is mostly compilation
            slowest = max(slowest, took)
        worked = True
        if now - shown > 0.2:
            for session in at_work:
                total, rows = session.spec.total_steps, session.rows
                tell(place_of[session], session.step, total, rows[-1] if rows else None)
            shown = now
        if now - saved >= checkpoint_seconds and (open_ones := [each for each in left if not each.done]):
            for session in open_ones:
                session.save()
            saved = begun = time.monotonic()
