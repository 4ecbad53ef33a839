"""Train one run, or several of equal shape as one: steps, evaluations, probes, checkpoints, exact resume."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from toeplens.ground import InputError, invalid, plain, write_json
from toeplens.ground.execution import ExecutionOptions
from toeplens.ground.files import finite
from toeplens.model import Decoder
from toeplens.training import run as store
from toeplens.training.batches import IGNORED, Batches, answer, correct, loss_of, precise, texts_at_once
from toeplens.training.environment import Execution, Segment, ended, environment, gone_on, plan_execution, setup_of
from toeplens.training.loggers import Loggers, OpenLogger, RunInfo
from toeplens.training.run import Run, initial_model
from toeplens.training.spec import RunSpec
from toeplens.training.stack import Stack, must_stack, pays_alone

Progress = Callable[[int, int, dict[str, Any] | None], None]
ProgressOf = Callable[[int, int, int, dict[str, Any] | None], None]
_TESTED_AT_ONCE = 2**18  # tokens per evaluation batch, on a GPU
_SHARES = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32)  # in 32nds of training; denser early, when heads specialise
_FIGURES, _SUMS = ("step", "seconds", "rows", "tested"), ("sums", "test_sums", "fit_sums")  # in checkpoints by name


@runtime_checkable
class Watcher(Protocol):
    """A probe of the model at some steps of its training.

    name     identifies the probe and its data; a run must keep the same watcher throughout
    """

    name: str

    def moments(self, total_steps: int) -> Sequence[int]:
        """The steps to probe: 0 is the initialisation, ``total_steps`` the trained model."""
        ...

    def look(self, model: Decoder, step: int) -> dict[str, Any]:
        """Results for ``model`` after ``step`` steps, as plain lists and numbers.

        The model is a copy in evaluation mode. A probe must depend only on the model and the step, and must not change
        random states. Then a resumed run has the same rows as an uninterrupted one.
        """
        ...


@runtime_checkable
class EventWatcher(Watcher, Protocol):
    """A watcher that also probes at events in training, derived from the metrics so far."""

    def events(self, metrics: Sequence[dict[str, Any]]) -> Sequence[str]:
        """The names of the events at the last of these evaluations; the model is then probed."""
        ...

    def look_at(self, model: Decoder, events: Sequence[str], metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Additional results at an event."""
        ...


def moments(total_steps: int) -> list[int]:
    """Ten steps (fewer in a run of under 32 steps): the initialisation, the end, and more of them early than late."""
    return sorted({round(total_steps * share / _SHARES[-1]) for share in _SHARES})


class Watch:
    """The probes of one run: its watcher, if any, and the rows so far."""

    def __init__(self, watcher: Watcher | None, total_steps: int) -> None:
        self.watcher = watcher
        self.by = None if watcher is None else watcher.name
        self.rows: list[dict[str, Any]] = []
        self.total_steps = total_steps
        self.moments = frozenset(() if watcher is None else watcher.moments(total_steps))
        if wrong := sorted(step for step in self.moments if step not in range(total_steps + 1)):
            raise invalid("moments", f"be steps from 0 to {total_steps}", wrong[0])

    def owed(self, step: int, metrics: Sequence[dict[str, Any]], *, ended: bool) -> bool:
        """Whether a probe is due after ``step`` steps, given the metrics so far.

        If training ends early, a watcher that probes the last step probes this one.
        """
        if self.rows and self.rows[-1]["step"] == step:
            return False
        last = ended and self.total_steps in self.moments
        return step in self.moments or last or bool(self._events(step, metrics))

    def _events(self, step: int, metrics: Sequence[dict[str, Any]]) -> Sequence[str]:
        if not metrics or metrics[-1]["step"] != step or not isinstance(self.watcher, EventWatcher):
            return ()
        return self.watcher.events(copy.deepcopy(metrics))

    def look(self, model: Decoder, step: int, metrics: Sequence[dict[str, Any]]) -> float:
        """Probe a copy of ``model`` and store the row; returns the seconds it took.

        The model and torch's random states are not changed.
        """
        assert self.watcher is not None
        device = model.readout.weight.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # do not count pending steps
        begun = time.monotonic()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            mine = copy.deepcopy(model).eval()
            seen = self.watcher.look(mine, step)
            if events := self._events(step, metrics):
                assert isinstance(self.watcher, EventWatcher)
                if "events" in seen:
                    raise InputError(f"watcher: {self.by!r} must not return the name 'events', which is reserved.")
                seen = seen | {"events": list(events)} | self.watcher.look_at(mine, events, copy.deepcopy(metrics))
            seen = self._plain(seen)
        seconds = time.monotonic() - begun
        self.rows.append({"step": step, "seconds": round(seconds, 4), **seen})
        return seconds

    def _plain(self, seen: dict[str, Any]) -> dict[str, Any]:
        """The results as JSON returns them, with None for non-finite numbers."""
        if taken := [name for name in ("step", "seconds") if name in seen]:
            raise InputError(f"watcher: {self.by!r} must not return the name {taken[0]!r}, which is reserved.")
        try:
            return plain(finite(seen))
        except InputError:
            raise InputError(f"watcher: {self.by!r} must return lists and numbers that JSON can hold.") from None

    def state(self) -> dict[str, Any]:
        """The state for the checkpoint."""
        return {"by": self.by, "rows": self.rows}

    def resume(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint; rows of two watchers must not be mixed."""
        if state["rows"] and self.by not in (None, state["by"]):
            raise invalid("watcher", f"be {state['by']!r}, as before, or None", self.by)
        self.by, self.rows = self.by or state["by"], state["rows"]


# ---- training ------------------------------------------------------------------------------------------------------


class EMA:
    """A model whose weights are the exponential moving average of another's.

    ``model`` is the averaged one. The decay at step t is min(decay, (1 + t) / (10 + t)), so that the first weights are
    forgotten quickly.
    """

    def __init__(self, of: Decoder, decay: float) -> None:
        self.model, self.decay = copy.deepcopy(of), decay

    def share(self, step: int) -> float:
        """The weight of step ``step`` (from 1) in the average."""
        return 1 - min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, of: Decoder, step: int) -> None:
        """Add the weights after step ``step`` (from 1) to the average."""
        share = self.share(step)
        for mean, weight in zip(self.model.parameters(), of.parameters(), strict=True):
            mean.lerp_(weight, share)


class Session:
    """The state of a run during training; all of it is in its checkpoint."""

    def __init__(
        self,
        spec: RunSpec,
        directory: Path,
        execution: Execution,
        watcher: Watcher | None,
        loggers: Sequence[OpenLogger],
        *,
        stacked: bool,
    ) -> None:
        self.spec, self.directory, self.execution, self.stacked = spec, directory, execution, stacked
        self.watch = Watch(watcher, spec.total_steps)
        task, device = spec.build_task(), execution.device
        self.train = Batches.of(task.dataset("train", spec.train_examples, spec.data_seed), device, spec.ignore_label)
        watched = task.dataset(task.watched, spec.test_examples, spec.data_seed)
        self.test = Batches.of(watched, device, spec.ignore_label)
        self.model = initial_model(spec).to(device)
        self.average = None if spec.average is None else EMA(self.model, spec.average)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, fused=True
        )
        self.learning_rate = spec.learning_rate()
        self.loss = torch.compile(self._loss, dynamic=False) if execution.compiled else self._loss
        self.tested_at_once = spec.batch_size
        if device.type == "cuda":  # where small batches leave it mostly idle
            self.tested_at_once *= max(1, _TESTED_AT_ONCE // (spec.batch_size * task.length))
        self.step, self.seconds, self.tested = 0, 0.0, 0
        self.rows: list[dict[str, Any]] = []
        self.order: tuple[int, Tensor] | None = None
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.test_sums, self.fit_sums = torch.zeros_like(self.sums), torch.zeros_like(self.sums)
        self.done = self.diverged = self.stepped = False
        self.history = gone_on([], 0, setup_of(execution, stacked=stacked))
        self.cuda_rng: Tensor | None = None  # kept on a CPU until the run is back on a GPU
        self._resume()
        safe = self.rows[-1]["step"] if self.rows else 0
        self.loggers = Loggers(loggers, RunInfo(spec.name, directory, spec, safe), device, len(self.rows))
        self.rng = torch.get_rng_state()  # unchanged while models are trained as one
        self._write_environment(self.history)

    @property
    def eval_model(self) -> Decoder:
        """The model that is evaluated, probed and saved: the EMA if there is one."""
        return self.model if self.average is None else self.average.model

    def amp(self) -> Any:
        """bfloat16 autocast if the run uses it."""
        return torch.autocast(self.execution.device.type, torch.bfloat16) if self.execution.bf16 else nullcontext()

    def _loss(self, tokens: Tensor, labels: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        with self.amp():
            logits = self.model(tokens, lengths)
        logits = precise(logits)
        return loss_of(logits, labels), correct(logits.detach(), labels).sum()

    @property
    def owes_evaluation(self) -> bool:
        """Whether an evaluation is due and its row is not written yet."""
        return len(self.rows) < self.spec.evaluations_by(self.step)

    def owes_probe(self) -> bool:
        """Whether a probe of the current model is due."""
        if self.owes_evaluation or self.diverged:
            return False
        return self.watch.owed(self.step, self.rows, ended=self.done)

    def rows_of_step(self) -> Tensor:
        """The rows of the next step, from a random order per epoch that depends on the seed."""
        epoch, place = divmod(self.step, self.spec.steps_per_epoch)
        if self.order is None or self.order[0] != epoch:
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.spec.seed, epoch))))
            self.order = epoch, torch.from_numpy(rng.permutation(self.spec.train_examples)).to(self.execution.device)
        size = self.spec.batch_size
        return self.order[1][place * size : (place + 1) * size]

    @property
    def is_compiling(self) -> bool:
        """Whether the next step is mostly compilation."""
        return self.execution.compiled and not self.stepped

    def take_step(self) -> None:
        """One training step."""
        rows = self.rows_of_step()
        tokens, labels, lengths = self.train.take(rows)
        missing = self.spec.batch_size - len(rows)
        if missing and self.execution.compiled:  # constant shape for the compiler; the added rows are ignored
            tokens, lengths = _pad_rows(tokens, missing), None if lengths is None else _pad_rows(lengths, missing)
            labels = torch.cat((labels, labels.new_full((missing, *labels.shape[1:]), IGNORED)))
        self.model.train()
        self.optimizer.zero_grad()
        counted = (labels != IGNORED).sum()
        told = torch.zeros_like(self.sums[:2])
        size = texts_at_once(self.spec, tokens.shape[1], self.execution.device)
        for part in Batches(tokens, labels, lengths).split(size):  # gradients add up to those of the whole batch
            loss, right = self.loss(*part)
            (loss / counted.clamp(min=1)).backward()
            told += torch.stack((loss.detach().double(), right.double()))
        self.sums[:2] += told
        self.sums[2] += counted
        self.optimizer.param_groups[0]["lr"] = self.learning_rate(self.step)
        self.optimizer.step()
        self.step += 1
        self.stepped = True
        if self.average is not None:
            self.average.update(self.model, self.step)

    def evaluate_batch(self) -> None:
        """Evaluate a batch of the test set, then of the training set."""
        place = self.tested - len(self.test)
        data, sums, start, end = (
            (self.test, self.test_sums, self.tested, len(self.test))
            if place < 0
            else (self.train, self.fit_sums, place, self.spec.fit_examples)
        )
        stop = min(start + self.tested_at_once, end)
        size = texts_at_once(self.spec, data.tokens.shape[1], data.tokens.device)
        for part in Batches(*data.take(slice(start, stop))).split(size if self.spec.model.readout == "each" else stop):
            sums += answer(self.eval_model, part, self.amp)
        self.tested += stop - start
        if self.tested == len(self.test) + self.spec.fit_examples:
            self._end_evaluation()

    def _end_evaluation(self) -> None:
        train, test, fit = (sums.tolist() for sums in (self.sums, self.test_sums, self.fit_sums))
        for sums in (self.sums, self.test_sums, self.fit_sums):
            sums.zero_()
        self.tested = 0
        evaluations = self.spec.evaluations
        self.diverged = not (math.isfinite(train[0]) and math.isfinite(test[0]))
        self.rows.append(
            {
                "epoch": len(self.rows) + 1 if evaluations == 1 else self.step / self.spec.steps_per_epoch,
                "step": self.step,
                **_figures("train", *train),
                **_figures("test", *test),
                **_figures("fit", *fit),
                "lr": self.learning_rate(self.step),
                "seconds": round(self.seconds, 3),
            }
        )
        self.done = self.diverged or self.spec.is_over(self.rows)
        self._write_rows()

    def _write_rows(self) -> None:
        store.write_rows(self.directory / store.METRICS, self.rows)
        path = self.directory / store.WATCHED
        if self.watch.rows or path.exists():  # it may have more rows than the checkpoint
            store.write_rows(path, self.watch.rows)

    def _write_environment(self, history: list[Segment]) -> None:
        told = [segment.to_dict() for segment in history]
        write_json(self.directory / store.ENVIRONMENT, {**environment(self.execution), "history": told})

    def save(self) -> None:
        """Write a checkpoint."""
        if self.execution.device.type == "cuda":
            self.cuda_rng = torch.cuda.get_rng_state(self.execution.device)
        state = {
            "run": self.spec.name,
            "history": [segment.to_dict() for segment in ended(self.history, self.step)],
            "model": store.own_state(self.model),
            "average": None if self.average is None else store.own_state(self.average.model),
            "optimizer": self.optimizer.state_dict(),
            "watched": self.watch.state(),
            "rng": self.rng if self.stacked else torch.get_rng_state(),
            **{name: getattr(self, name) for name in (*_FIGURES, *_SUMS, "cuda_rng")},
        }
        store.save_checkpoint(self.directory, state)
        write_json(self.directory / store.PROGRESS, {"step": self.step, "of": self.spec.total_steps})

    def _resume(self) -> None:
        state = store.load_checkpoint(self.directory, self.spec)
        if state is None:
            return
        self.watch.resume(state["watched"])
        models = {"model": self.model} | ({} if self.average is None else {"average": self.average.model})
        if not all(store.load_weights(model, state[name]) for name, model in models.items()):
            path = self.directory / store.CHECKPOINT
            raise InputError(f"checkpoint: {path} was written by another version. Delete it to start this run over.")
        self.optimizer.load_state_dict(state["optimizer"])
        for own in self.optimizer.state.values():  # a stack's models share one step count over all parameters
            own["step"] = own["step"].clone()
        for name in _FIGURES:
            setattr(self, name, state[name])
        for name in _SUMS:
            getattr(self, name).copy_(state[name])
        self.done = self.spec.is_over(self.rows)
        torch.set_rng_state(state["rng"])
        self.cuda_rng = state["cuda_rng"]
        if self.cuda_rng is not None and self.execution.device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda_rng, self.execution.device)
        had = Segment.from_list(state["history"], self.directory / store.CHECKPOINT)
        self.history = gone_on(had, self.step, setup_of(self.execution, stacked=self.stacked))

    def finish(self, status: store.Status) -> None:
        """Write the weights, then the result, and remove the checkpoint."""
        store.save_weights(self.directory, self.eval_model)
        self._write_rows()
        last, spec = self.rows[-1], self.spec
        epochs, steps = divmod(self.step, spec.steps_per_epoch)
        tokens = (epochs * spec.train_examples + steps * spec.batch_size) * self.train.tokens.shape[1]
        told = {key: last[key] for key in last if key.endswith(("_loss", "_accuracy"))}
        if spec.plateau is not None:
            told["plateau"] = spec.plateau.reached(self.rows, spec.guess, spec.total_evaluations)
        if spec.build_task().pinned():
            told |= {"chance": spec.chance, "guess": spec.guess}
        result = {
            "status": status,
            "steps": self.step,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(tokens / max(self.seconds, 1e-9)),
            **told,
        }
        self._write_environment(ended(self.history, self.step))
        write_json(self.directory / store.RESULT, result)
        (self.directory / store.CHECKPOINT).unlink(missing_ok=True)
        (self.directory / store.PROGRESS).unlink(missing_ok=True)
        self.loggers.close(status)


def _pad_rows(x: Tensor, count: int) -> Tensor:
    return torch.cat((x, x[:1].expand(count, *x.shape[1:])))


def _figures(split: str, loss: float, right: float, count: float) -> dict[str, float | None]:
    """Mean loss and accuracy; None if the loss is not finite or nothing counted."""
    meant = bool(count) and math.isfinite(loss)
    return {f"{split}_loss": loss / count if meant else None, f"{split}_accuracy": right / count if meant else None}


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
    execution, tell = replace(execution or ExecutionOptions(), **options), on_progress or (lambda *told: None)
    directories = [Path(out) / spec.name for spec in specs]
    seen_by = watchers or [None] * len(specs), loggers or [()] * len(specs)
    with _sessions(specs, directories, execution, *seen_by) as sessions:

        def report(some: Sequence[Session]) -> None:
            for place, session in sessions.items():
                if session in some:
                    tell(place, session.step, session.spec.total_steps, session.rows[-1] if session.rows else None)

        left, stack = list(sessions.values()), None
        report(left)
        saved = shown = begun = time.monotonic()
        slowest, worked = 0.0, False
        while left:  # units of work: a step, an evaluation batch, or a probe
            with _saved_on_errors(left):
                probes = [session for session in left if session.owes_probe()]
            if over := [session for session in left if session.done and session not in probes]:
                for session in over:
                    session.finish("diverged" if session.diverged else "complete")
                    left.remove(session)
                begun = time.monotonic()
                continue
            if execution.should_stop() or (worked and execution.late(slowest)):
                _save(left)
                break
            compiling, probed = False, 0.0
            if at_work := probes[:1]:
                with _saved_on_errors(left):
                    probed = at_work[0].watch.look(at_work[0].eval_model, at_work[0].step, at_work[0].rows)
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
    return [Run.open(directory) for directory in directories]


@contextmanager
def _sessions(
    specs: Sequence[RunSpec],
    directories: Sequence[Path],
    execution: ExecutionOptions,
    watchers: Sequence[Watcher | None],
    loggers: Sequence[Sequence[OpenLogger]],
) -> Iterator[dict[int, Session]]:
    """The sessions of unfinished runs by index, in their locked directories."""
    with ExitStack() as held:
        for directory, spec in sorted(zip(directories, specs, strict=True), key=lambda each: each[0]):
            held.enter_context(store.entered(directory, spec))
        # until the result is written, the checkpoint contains everything in the other files
        places = [place for place, directory in enumerate(directories) if not (directory / store.RESULT).exists()]
        if not places:
            yield {}
            return
        first, stacked = specs[places[0]], len(places) > 1
        plan = plan_execution(execution.device, execution.compile, first.precision, first.model.d_model)
        if stacked:
            must_stack([specs[place] for place in places])
            plan = replace(plan, compiled=False, why="several models are trained as one")
        elif execution.compile == "auto" and pays_alone(first, plan.device):
            stacked, plan = True, replace(plan, compiled=False, why="stack of one model: a CUDA graph")
        held.enter_context(torch.random.fork_rng(devices=[plan.device] if plan.device.type == "cuda" else []))
        sessions = {
            place: Session(specs[place], directories[place], plan, watchers[place], loggers[place], stacked=stacked)
            for place in places
        }
        try:
            yield sessions
        finally:  # those of finished runs are already closed
            for session in sessions.values():
                session.loggers.close("stopped")


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
