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

from toeplens.encodings.cpu_products import fast_products
from toeplens.model import Decoder
from toeplens.training import run as store
from toeplens.training.batched import BatchedSessions, check_batchable, is_launch_bound
from toeplens.training.batches import IGNORED, Batches, eval_batch, is_correct, loss_of, micro_batch_size, to_float32
from toeplens.training.environment import (
    Execution,
    Segment,
    end_history,
    environment,
    plan_execution,
    resume_history,
    setup_of,
)
from toeplens.training.loggers import Loggers, OpenLogger, RunInfo
from toeplens.training.run import Run, initial_model
from toeplens.training.spec import RunSpec
from toeplens.utils import InputError, invalid, to_json_types, write_json
from toeplens.utils.execution import ExecutionOptions
from toeplens.utils.files import nan_to_none
from toeplens.utils.renamed import adapt, renamed

Progress = Callable[[int, int, dict[str, Any] | None], None]
BatchProgress = Callable[[int, int, int, dict[str, Any] | None], None]
_EVAL_TOKENS = 2**18  # tokens per evaluation batch, on a GPU
_PROBE_SHARES = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32)  # in 32nds of training; denser early, when heads specialise
_CHECKPOINT_VALUES = ("step", "seconds", "rows", "tested")  # attributes that are stored in checkpoints
_CHECKPOINT_SUMS = ("sums", "test_sums", "fit_sums")  # tensors: loss, correct predictions, labels counted


@runtime_checkable
class TrainingProbe(Protocol):
    """A probe of the model at some steps of its training.

    name     identifies the probe and its data; a run must keep the same probe throughout
    """

    name: str

    def probe_steps(self, total_steps: int) -> Sequence[int]:
        """The steps to probe: 0 is the initialisation, ``total_steps`` the trained model."""
        ...

    def measure(self, model: Decoder, step: int) -> dict[str, Any]:
        """Results for ``model`` after ``step`` steps, as plain lists and numbers.

        The model is a copy in evaluation mode. A probe must depend only on the model and the step, and must not change
        random states. Then a resumed run has the same rows as an uninterrupted one.
        """
        ...


@runtime_checkable
class EventProbe(TrainingProbe, Protocol):
    """A probe that also measures at events in training, derived from the metrics so far."""

    def events(self, metrics: Sequence[dict[str, Any]]) -> Sequence[str]:
        """The names of the events at the last of these evaluations; `measure_events` is then called."""
        ...

    def measure_events(
        self, model: Decoder, events: Sequence[str], metrics: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Additional results at an event."""
        ...


def default_probe_steps(total_steps: int) -> list[int]:
    """Ten steps (fewer in a run of under 32 steps): the initialisation, the end, and more of them early than late."""
    return sorted({round(total_steps * share / _PROBE_SHARES[-1]) for share in _PROBE_SHARES})


class RunProbes:
    """The probing of one run: its probe, if any, and the rows so far."""

    def __init__(self, probe: TrainingProbe | None, total_steps: int) -> None:
        self.probe = probe
        self.probe_name = None if probe is None else probe.name
        self.rows: list[dict[str, Any]] = []
        self.total_steps = total_steps
        adapt(probe, "TrainingProbe")
        self.probe_steps = frozenset(() if probe is None else probe.probe_steps(total_steps))
        if wrong := sorted(step for step in self.probe_steps if step not in range(total_steps + 1)):
            raise invalid("probe_steps", f"be steps from 0 to {total_steps}", wrong[0])

    def is_due(self, step: int, metrics: Sequence[dict[str, Any]], *, ended: bool) -> bool:
        """Whether a probe is due after ``step`` steps, given the metrics so far.

        If training ends early, a probe of the last step is due at this one.
        """
        if self.rows and self.rows[-1]["step"] == step:
            return False
        is_last = ended and self.total_steps in self.probe_steps
        return step in self.probe_steps or is_last or bool(self._events(step, metrics))

    def _events(self, step: int, metrics: Sequence[dict[str, Any]]) -> Sequence[str]:
        if not metrics or metrics[-1]["step"] != step or not isinstance(self.probe, EventProbe):
            return ()
        return self.probe.events(copy.deepcopy(metrics))

    def run_probe(self, model: Decoder, step: int, metrics: Sequence[dict[str, Any]]) -> float:
        """Probe a copy of ``model`` and store the row; returns the seconds it took.

        The model and torch's random states are not changed.
        """
        assert self.probe is not None
        device = model.readout.weight.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # do not count pending steps
        started = time.monotonic()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            clone = copy.deepcopy(model).eval()
            row = self.probe.measure(clone, step)
            if events := self._events(step, metrics):
                assert isinstance(self.probe, EventProbe)
                if "events" in row:
                    raise InputError(
                        f"probe: {self.probe_name!r} must not return the name 'events', which is reserved."
                    )
                row = row | {"events": list(events)} | self.probe.measure_events(clone, events, copy.deepcopy(metrics))
            row = self._as_json(row)
        seconds = time.monotonic() - started
        self.rows.append({"step": step, "seconds": round(seconds, 4), **row})
        return seconds

    def _as_json(self, results: dict[str, Any]) -> dict[str, Any]:
        """The results as JSON returns them, with None for non-finite numbers."""
        if reserved := [name for name in ("step", "seconds") if name in results]:
            raise InputError(f"probe: {self.probe_name!r} must not return the name {reserved[0]!r}, which is reserved.")
        try:
            return to_json_types(nan_to_none(results))
        except InputError:
            raise InputError(f"probe: {self.probe_name!r} must return lists and numbers that JSON can hold.") from None

    def state(self) -> dict[str, Any]:
        """The state for the checkpoint."""
        return {"by": self.probe_name, "rows": self.rows}

    def resume(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint; rows of two probes must not be mixed."""
        if state["rows"] and self.probe_name not in (None, state["by"]):
            raise invalid("probe", f"be {state['by']!r}, as before, or None", self.probe_name)
        self.probe_name, self.rows = self.probe_name or state["by"], state["rows"]


# ---- training ------------------------------------------------------------------------------------------------------


class EMA:
    """A model whose weights are the exponential moving average of another's.

    ``model`` is the averaged one. The decay at step t is min(decay, (1 + t) / (10 + t)), so that the first weights are
    forgotten quickly.
    """

    def __init__(self, model: Decoder, decay: float) -> None:
        self.model, self.decay = copy.deepcopy(model), decay

    def update_rate(self, step: int) -> float:
        """The weight of step ``step`` (from 1) in the average."""
        return 1 - min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, model: Decoder, step: int) -> None:
        """Add the weights after step ``step`` (from 1) to the average."""
        rate = self.update_rate(step)
        for mean, weight in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, rate)


class Session:
    """The state of a run during training; all of it is in its checkpoint."""

    def __init__(
        self,
        spec: RunSpec,
        directory: Path,
        execution: Execution,
        probe: TrainingProbe | None,
        loggers: Sequence[OpenLogger],
        *,
        batched: bool,
    ) -> None:
        self.spec, self.directory, self.execution, self.batched = spec, directory, execution, batched
        self.probes = RunProbes(probe, spec.total_steps)
        task, device = spec.build_task(), execution.device
        self.train = Batches.of(task.dataset("train", spec.train_examples, spec.data_seed), device, spec.ignore_label)
        eval_examples = task.dataset(task.eval_split, spec.test_examples, spec.data_seed)
        self.test = Batches.of(eval_examples, device, spec.ignore_label)
        self.model = initial_model(spec).to(device)
        self.ema = None if spec.average is None else EMA(self.model, spec.average)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, fused=True
        )
        self.learning_rate = spec.learning_rate()
        self.loss = torch.compile(self._loss, dynamic=False) if execution.compiled else self._loss
        self.eval_batch_size = spec.batch_size
        if device.type == "cuda":  # where small batches leave it mostly idle
            self.eval_batch_size *= max(1, _EVAL_TOKENS // (spec.batch_size * task.length))
        self.step, self.seconds, self.tested = 0, 0.0, 0
        self.rows: list[dict[str, Any]] = []
        self.order: tuple[int, Tensor] | None = None
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.test_sums, self.fit_sums = torch.zeros_like(self.sums), torch.zeros_like(self.sums)
        self.done = self.diverged = self.has_stepped = False
        self.history = resume_history([], 0, setup_of(execution, batched=batched))
        self.cuda_rng: Tensor | None = None  # kept on a CPU until the run is back on a GPU
        self._resume()
        last_step = self.rows[-1]["step"] if self.rows else 0
        self.loggers = Loggers(loggers, RunInfo(spec.name, directory, spec, last_step), device, len(self.rows))
        self.rng = torch.get_rng_state()  # unchanged while models are trained as one
        self._write_environment(self.history)

    @property
    def eval_model(self) -> Decoder:
        """The model that is evaluated, probed and saved: the EMA if there is one."""
        return self.model if self.ema is None else self.ema.model

    def amp(self) -> Any:
        """bfloat16 autocast if the run uses it."""
        return torch.autocast(self.execution.device.type, torch.bfloat16) if self.execution.bf16 else nullcontext()

    def _loss(self, tokens: Tensor, labels: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        with self.amp():
            logits = self.model(tokens, lengths)
        logits = to_float32(logits)
        return loss_of(logits, labels), is_correct(logits.detach(), labels).sum()

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation is due and its row is not written yet."""
        return len(self.rows) < self.spec.evaluations_due(self.step)

    def probe_due(self) -> bool:
        """Whether a probe of the current model is due."""
        if self.evaluation_due or self.diverged:
            return False
        return self.probes.is_due(self.step, self.rows, ended=self.done)

    def rows_of_step(self) -> Tensor:
        """The rows of the next step, from a random order per epoch that depends on the seed."""
        epoch, batch_index = divmod(self.step, self.spec.steps_per_epoch)
        if self.order is None or self.order[0] != epoch:
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.spec.seed, epoch))))
            self.order = epoch, torch.from_numpy(rng.permutation(self.spec.train_examples)).to(self.execution.device)
        size = self.spec.batch_size
        return self.order[1][batch_index * size : (batch_index + 1) * size]

    @property
    def is_compiling(self) -> bool:
        """Whether the next step is mostly compilation."""
        return self.execution.compiled and not self.has_stepped

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
        totals = torch.zeros_like(self.sums[:2])
        size = micro_batch_size(self.spec, tokens.shape[1], self.execution.device)
        for micro_batch in Batches(tokens, labels, lengths).split(size):  # gradients add up to those of the whole batch
            loss, hits = self.loss(*micro_batch)
            (loss / counted.clamp(min=1)).backward()
            totals += torch.stack((loss.detach().double(), hits.double()))
        self.sums[:2] += totals
        self.sums[2] += counted
        self.optimizer.param_groups[0]["lr"] = self.learning_rate(self.step)
        self.optimizer.step()
        self.step += 1
        self.has_stepped = True
        if self.ema is not None:
            self.ema.update(self.model, self.step)

    def evaluate_batch(self) -> None:
        """Evaluate a batch of the test set, then of the training set."""
        fit_start = self.tested - len(self.test)
        data, sums, start, end = (
            (self.test, self.test_sums, self.tested, len(self.test))
            if fit_start < 0
            else (self.train, self.fit_sums, fit_start, self.spec.fit_examples)
        )
        stop = min(start + self.eval_batch_size, end)
        size = micro_batch_size(self.spec, data.tokens.shape[1], data.tokens.device)
        for batch in Batches(*data.take(slice(start, stop))).split(size if self.spec.model.readout == "each" else stop):
            sums += eval_batch(self.eval_model, batch, self.amp)
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
                **_mean_metrics("train", *train),
                **_mean_metrics("test", *test),
                **_mean_metrics("fit", *fit),
                "lr": self.learning_rate(self.step),
                "seconds": round(self.seconds, 3),
            }
        )
        self.done = self.diverged or self.spec.is_finished(self.rows)
        self._write_rows()

    def _write_rows(self) -> None:
        store.write_rows(self.directory / store.METRICS, self.rows)
        path = self.directory / store.PROBES
        if self.probes.rows or path.exists():  # it may have more rows than the checkpoint
            store.write_rows(path, self.probes.rows)

    def _write_environment(self, history: list[Segment]) -> None:
        segments = [segment.to_dict() for segment in history]
        write_json(self.directory / store.ENVIRONMENT, {**environment(self.execution), "history": segments})

    def save(self) -> None:
        """Write a checkpoint."""
        if self.execution.device.type == "cuda":
            self.cuda_rng = torch.cuda.get_rng_state(self.execution.device)
        state = {
            "run": self.spec.name,
            "history": [segment.to_dict() for segment in end_history(self.history, self.step)],
            "model": store.unique_state(self.model),
            "average": None if self.ema is None else store.unique_state(self.ema.model),
            "optimizer": self.optimizer.state_dict(),
            "watched": self.probes.state(),
            "rng": self.rng if self.batched else torch.get_rng_state(),
            **{name: getattr(self, name) for name in (*_CHECKPOINT_VALUES, *_CHECKPOINT_SUMS, "cuda_rng")},
        }
        store.save_checkpoint(self.directory, state)
        write_json(self.directory / store.PROGRESS, {"step": self.step, "of": self.spec.total_steps})

    def _resume(self) -> None:
        state = store.load_checkpoint(self.directory, self.spec)
        if state is None:
            return
        self.probes.resume(state["watched"])
        models = {"model": self.model} | ({} if self.ema is None else {"average": self.ema.model})
        if not all(store.load_weights(model, state[name]) for name, model in models.items()):
            path = self.directory / store.CHECKPOINT
            raise InputError(f"checkpoint: {path} was written by another version. Delete it to start this run over.")
        self.optimizer.load_state_dict(state["optimizer"])
        for param_state in self.optimizer.state.values():  # a stack's models share one step count over all parameters
            param_state["step"] = param_state["step"].clone()
        for name in _CHECKPOINT_VALUES:
            setattr(self, name, state[name])
        for name in _CHECKPOINT_SUMS:
            getattr(self, name).copy_(state[name])
        self.done = self.spec.is_finished(self.rows)
        torch.set_rng_state(state["rng"])
        self.cuda_rng = state["cuda_rng"]
        if self.cuda_rng is not None and self.execution.device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda_rng, self.execution.device)
        segments = Segment.from_list(state["history"], self.directory / store.CHECKPOINT)
        self.history = resume_history(segments, self.step, setup_of(self.execution, batched=self.batched))

    def finish(self, status: store.Status) -> None:
        """Write the weights, then the result, and remove the checkpoint."""
        store.save_weights(self.directory, self.eval_model)
        self._write_rows()
        last, spec = self.rows[-1], self.spec
        epochs, steps = divmod(self.step, spec.steps_per_epoch)
        tokens = (epochs * spec.train_examples + steps * spec.batch_size) * self.train.tokens.shape[1]
        metrics = {key: last[key] for key in last if key.endswith(("_loss", "_accuracy"))}
        if spec.plateau is not None:
            metrics["plateau"] = spec.plateau.find_step(self.rows, spec.guess, spec.total_evaluations)
        if spec.build_task().pinned_options():
            metrics |= {"chance": spec.chance, "guess": spec.guess}
        result = {
            "status": status,
            "steps": self.step,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(tokens / max(self.seconds, 1e-9)),
            **metrics,
        }
        self._write_environment(end_history(self.history, self.step))
        write_json(self.directory / store.RESULT, result)
        (self.directory / store.CHECKPOINT).unlink(missing_ok=True)
        (self.directory / store.PROGRESS).unlink(missing_ok=True)
        self.loggers.close(status)


def _pad_rows(x: Tensor, count: int) -> Tensor:
    return torch.cat((x, x[:1].expand(count, *x.shape[1:])))


def _mean_metrics(split: str, loss: float, hits: float, count: float) -> dict[str, float | None]:
    """Mean loss and accuracy; None if the loss is not finite or nothing counted."""
    valid = bool(count) and math.isfinite(loss)
    return {f"{split}_loss": loss / count if valid else None, f"{split}_accuracy": hits / count if valid else None}


@renamed
def train(
    spec: RunSpec,
    out: Path | str,
    execution: ExecutionOptions | None = None,
    *,
    probe: TrainingProbe | None = None,
    loggers: Sequence[OpenLogger] = (),
    on_progress: Progress | None = None,
    **options: Any,
) -> Run:
    """Run ``spec`` in ``out``/``spec.name``: start it, resume it, or return it if it is finished.

    Arguments
        execution    device, compilation, deadline, stop signal, seconds between checkpoints. At the deadline a
                     checkpoint is saved, after at least one unit of work: a step, an evaluation batch, or a probe
        probe        measures the model at some steps. `Run.probe_rows` has the results and the seconds they took,
                     which are not counted as the run's time
        loggers      called with the run's `RunInfo` when training begins; each returns a `Logger` for the
                     evaluations of this session. Their time is not counted. A logger that raises is dropped with
                     a warning
        on_progress  called with (step, total steps, last epoch's metrics): after the setup, then about five
                     times per second
        options      fields of ``execution`` by name: ``device="cpu"``, ``deadline=time.time() + 60``

    On a CPU, a run that is interrupted anywhere and resumed is bit-identical to an uninterrupted one, on
    the same machine, thread count and versions. It can also be resumed elsewhere; `Run.history` records each
    environment. A probe is not part of the spec and changes only the time, not the weights. A finished run is
    returned unchanged, so rows missing from it stay missing. If a probe raises, a checkpoint is saved first.
    """
    report = None if on_progress is None else lambda index, *args: on_progress(*args)
    per_run: dict[str, Any] = {"probes": [probe], "loggers": [loggers], "on_progress": report}
    return train_batched([spec], out, execution, **per_run, **options)[0]


@fast_products()
def train_batched(
    specs: Sequence[RunSpec],
    out: Path | str,
    execution: ExecutionOptions | None = None,
    *,
    probes: Sequence[TrainingProbe | None] | None = None,
    loggers: Sequence[Sequence[OpenLogger]] | None = None,
    on_progress: BatchProgress | None = None,
    **options: Any,
) -> list[Run]:
    """Train several specs of equal shape as one stacked model; see `train`.

    Each run has its own directory, examples, data order, evaluations and checkpoints, and its numbers equal those of a
    separate run up to rounding; with dropout, those of a run in any other stack. A run can be started separately and
    resumed in a stack, or the other way round. Runs that are ahead wait for the others; finished ones leave the stack.
    A run's seconds are its share.

    ``on_progress`` is called with the run's index first. Raises `InputError` unless the specs can be stacked
    (`toeplens.training.batched.check_batchable`).
    """
    execution, notify = replace(execution or ExecutionOptions(), **options), on_progress or (lambda *args: None)
    directories = [Path(out) / spec.name for spec in specs]
    observers = probes or [None] * len(specs), loggers or [()] * len(specs)
    with _open_sessions(specs, directories, execution, *observers) as sessions:

        def report(updated: Sequence[Session]) -> None:
            for index, session in sessions.items():
                if session in updated:
                    notify(index, session.step, session.spec.total_steps, session.rows[-1] if session.rows else None)

        remaining, batch = list(sessions.values()), None
        report(remaining)
        last_save = last_report = unit_start = time.monotonic()
        slowest, has_worked = 0.0, False
        while remaining:  # units of work: a step, an evaluation batch, or a probe
            with _save_on_error(remaining):
                due = [session for session in remaining if session.probe_due()]
            if finished := [session for session in remaining if session.done and session not in due]:
                for session in finished:
                    session.finish("diverged" if session.diverged else "complete")
                    remaining.remove(session)
                unit_start = time.monotonic()
                continue
            if execution.should_stop() or (has_worked and execution.is_late(slowest)):
                _save_all(remaining)
                break
            compiling, probe_seconds = False, 0.0
            if active := due[:1]:
                with _save_on_error(remaining):
                    probe_seconds = active[0].probes.run_probe(active[0].eval_model, active[0].step, active[0].rows)
            elif active := [session for session in remaining if session.evaluation_due][:1]:
                active[0].evaluate_batch()
            else:
                first = min(session.step for session in remaining)
                active = [session for session in remaining if session.step == first]
                compiling = active[0].is_compiling
                if not active[0].batched:
                    active[0].take_step()
                else:
                    if batch is None or batch.sessions != active:
                        batch = None  # free its memory
                        batch = BatchedSessions(active)
                    batch.take_step()
            now = time.monotonic()
            elapsed, unit_start = now - unit_start, now
            for session in active:
                session.seconds += (elapsed - probe_seconds) / len(active)
            if max([session.loggers.log(session.rows) for session in active]):
                unit_start = time.monotonic()
            if not compiling:  # the first step of a compiled run is mostly compilation
                slowest = max(slowest, elapsed)
            has_worked = True
            if now - last_report > 0.2:
                report(active)
                last_report = now
            if now - last_save >= execution.checkpoint_seconds and (unfinished := [s for s in remaining if not s.done]):
                _save_all(unfinished)
                last_save = unit_start = time.monotonic()
    return [Run.open(directory) for directory in directories]


@contextmanager
def _open_sessions(
    specs: Sequence[RunSpec],
    directories: Sequence[Path],
    execution: ExecutionOptions,
    probes: Sequence[TrainingProbe | None],
    loggers: Sequence[Sequence[OpenLogger]],
) -> Iterator[dict[int, Session]]:
    """The sessions of unfinished runs by index, in their locked directories."""
    with ExitStack() as stack:
        for directory, spec in sorted(zip(directories, specs, strict=True), key=lambda pair: pair[0]):
            stack.enter_context(store.open_run_directory(directory, spec))
        # until the result is written, the checkpoint contains everything in the other files
        indices = [i for i, directory in enumerate(directories) if not (directory / store.RESULT).exists()]
        if not indices:
            yield {}
            return
        first, batched = specs[indices[0]], len(indices) > 1
        plan = plan_execution(execution.device, execution.compile, first.precision, first.model.d_model)
        if batched:
            check_batchable([specs[i] for i in indices])
            plan = replace(plan, compiled=False, reason="several models are trained as one")
        elif execution.compile == "auto" and is_launch_bound(first, plan.device):
            batched, plan = True, replace(plan, compiled=False, reason="stack of one model: a CUDA graph")
        stack.enter_context(torch.random.fork_rng(devices=[plan.device] if plan.device.type == "cuda" else []))
        sessions = {i: Session(specs[i], directories[i], plan, probes[i], loggers[i], batched=batched) for i in indices}
        try:
            yield sessions
        finally:  # those of finished runs are already closed
            for session in sessions.values():
                session.loggers.close("stopped")


def _save_all(sessions: Sequence[Session]) -> None:
    for session in sessions:
        session.save()


@contextmanager
def _save_on_error(sessions: Sequence[Session]) -> Iterator[None]:
    """Context in which a probe that raises costs no steps."""
    try:
        yield
    except Exception:
        _save_all(sessions)
        raise
