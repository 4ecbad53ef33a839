"""A run's directory: spec, metrics, weights, checkpoint. It is complete or resumable, never half-written."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from toeplens.model import Decoder
from toeplens.training.environment import Segment
from toeplens.training.spec import RunSpec, run_spec
from toeplens.utils import InputError, read_json, read_rows, repr_of, write_bytes, write_json, write_text
from toeplens.utils.errors import first_line
from toeplens.utils.files import make_directory
from toeplens.utils.outputs import lock_directory, names_in
from toeplens.utils.records import FiniteFloat, NonNegative, NonNegativeInt, PositiveInt, Record, Share
from toeplens.utils.renamed import renamed

SPEC, METRICS, WEIGHTS, CHECKPOINT = "spec.json", "metrics.jsonl", "model.safetensors", "checkpoint.pt"
RESULT, ENVIRONMENT, PROGRESS = "result.json", "environment.json", "progress.json"
PROBES = "watched.jsonl"
_FORMAT, _REQUIRED_KEYS = 1, {"history", "watched", "fit_sums"}  # of checkpoints, and what those of early versions lack

Status = Literal["complete", "diverged", "stopped"]


@dataclass(frozen=True, kw_only=True)
class RunMetrics(Record):
    """A run's final metrics: losses in nats, accuracies in 0..1; None if it diverged or no example counts.

    train  mean over the steps since the last evaluation, each before its update and with dropout
    fit    on training examples after the evaluation's step, without dropout, on at most as many as the test set has;
           missing in files of earlier versions
    """

    ADDED_LATER: ClassVar = ("fit_loss", "fit_accuracy")

    train_loss: FiniteFloat | None
    train_accuracy: Share | None
    test_loss: FiniteFloat | None
    test_accuracy: Share | None
    fit_loss: FiniteFloat | None = None
    fit_accuracy: Share | None = None


@dataclass(frozen=True, kw_only=True)
class MetricsRow(RunMetrics):
    """A row of metrics.jsonl: epochs and steps done, current learning rate, seconds since the beginning."""

    epoch: NonNegative
    step: PositiveInt
    lr: NonNegative
    seconds: NonNegative


@dataclass(frozen=True, kw_only=True)
class RunResult(RunMetrics):
    """The content of result.json.

    plateau  the step at which the model stopped improving, by the spec's rule; None if it was still improving at the
             end, or without a rule
    chance, guess  of the spec, if they depend on external text; missing otherwise
    """

    ADDED_LATER: ClassVar = (*RunMetrics.ADDED_LATER, "plateau", "chance", "guess")

    status: Literal["complete", "diverged"]
    steps: NonNegativeInt
    seconds: NonNegative
    tokens_per_second: NonNegative
    plateau: PositiveInt | None = None
    chance: Share | None = None
    guess: Share | None = None


@dataclass(frozen=True)
class ProbeRow(Record):
    """A row of watched.jsonl; the other fields are the probe's."""

    step: NonNegativeInt
    seconds: NonNegative


@renamed
@dataclass(frozen=True)
class Run:
    """A run on disk.

    status   ``complete``; ``diverged`` (the loss became NaN or infinite; not resumed); or
             ``stopped`` (with a checkpoint from which `train` resumes)
    metrics  one row per evaluation: losses, accuracies, learning rate, seconds
    result   the final metrics; empty if stopped
    """

    directory: Path
    spec: RunSpec
    status: Status
    metrics: list[dict[str, Any]]
    result: dict[str, Any]

    @classmethod
    def open(cls, directory: Path | str) -> Run:
        """Load a run directory; raises `InputError` if it is not one, or is damaged."""
        directory = Path(directory)
        if not directory.is_dir():
            raise InputError(f"run: directory {directory} does not exist.")
        if not (directory / SPEC).is_file():
            kind = "empty" if not any(directory.iterdir()) else "not a run directory"
            raise InputError(f"run: {directory} is {kind} (no {SPEC}). Choose a directory written by 'toeplens train'.")
        content = read_json(directory / SPEC)
        if not isinstance(content, dict):
            raise InputError(f"run: {directory / SPEC} is damaged: it is not a spec.")
        try:
            with torch.random.fork_rng(devices=[]):  # building the spec's encoding may draw a random table
                spec = run_spec(**content)
        except InputError as error:
            raise InputError(f"run: {directory / SPEC} is not a valid spec ({str(error).rstrip('.')}).") from None
        result = {}
        try:
            if (directory / RESULT).exists():
                result = read_json(directory / RESULT)
                RunResult.from_dict(result, directory / RESULT)
            metrics = read_rows(directory / METRICS)
            MetricsRow.from_list(metrics, directory / METRICS)
            if result and (not metrics or metrics[-1]["step"] != result["steps"]):
                raise InputError(f"{directory / METRICS} is damaged: evaluations are missing.")
        except InputError as error:
            existing = " and ".join(str(directory / name) for name in (RESULT, METRICS) if (directory / name).exists())
            hint = f"delete {existing} and train with the same spec and directory to make them again"
            raise InputError(f"{str(error).rstrip('.')}; {hint}.") from None
        return cls(directory, spec, result.get("status", "stopped"), metrics, result)

    @property
    def probe_rows(self) -> list[dict[str, Any]]:
        """Rows of the `toeplens.training.TrainingProbe`, one for each step that it probed; empty without a probe."""
        rows = read_rows(self.directory / PROBES)
        ProbeRow.from_list(rows, self.directory / PROBES)
        return rows

    @property
    def history(self) -> list[Segment]:
        """The environments of the run by ranges of steps; empty for runs of earlier versions."""
        path = self.directory / ENVIRONMENT
        content = read_json(path) if path.exists() else {}
        return Segment.from_list(content.get("history", []) if isinstance(content, dict) else content, path)

    @property
    def step(self) -> int:
        """Completed and saved training steps."""
        if self.result:
            return int(self.result["steps"])
        path = self.directory / PROGRESS
        content = read_json(path) if path.exists() else {"step": 0}
        step = content.get("step") if isinstance(content, dict) else None
        if type(step) is not int or not 0 <= step <= self.spec.total_steps:
            raise InputError(f"{path} is damaged: step must be from 0 to {self.spec.total_steps}, got {repr_of(step)}.")
        return step

    def must_be_complete(self) -> None:
        """Raise `InputError` unless training is complete."""
        if self.status == "stopped":
            raise InputError(f"run: {self.directory} is not finished. Run the same command to resume.")
        if self.status == "diverged":
            raise InputError(f"run: {self.directory} diverged, so it has no finite weights.")

    def model(self) -> Decoder:
        """The trained model, on the CPU, in evaluation mode; all weights are finite."""
        self.must_be_complete()
        with torch.random.fork_rng(devices=[]):
            model = Decoder(self.spec.model)
        path = self.directory / WEIGHTS
        hint = f"delete {self.directory / RESULT} and train with the same spec and directory to make them again"
        try:
            saved = safetensors.torch.load_file(path)
        except FileNotFoundError:  # which safetensors also raises for a file that may not be read
            problem = "cannot be read: permission denied" if path.exists() else "is missing"
            raise InputError(f"run: {path} {problem}; {hint}.") from None
        except (OSError, safetensors.SafetensorError) as error:
            raise InputError(f"run: {path} is damaged ({first_line(error)}); {hint}.") from None
        if not load_weights(model, saved):
            raise InputError(f"run: {path} does not contain the weights of this spec; {hint}.")
        for name, tensor in saved.items():
            if not torch.isfinite(tensor).all():
                raise InputError(f"run: {path} is damaged: {name} is not finite; {hint}.")
        return model.eval()


def initial_model(spec: RunSpec) -> Decoder:
    """The model at the start of a run, on the CPU; seeds torch's global random state as the run does."""
    torch.manual_seed(spec.seed)
    return Decoder(spec.model)


def unique_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, without duplicates of shared tensors."""
    pointers: set[int] = set()
    unique = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in pointers or tensor.numel() == 0:
            pointers.add(tensor.data_ptr())
            unique[name] = tensor
    return unique


@torch.no_grad()
def load_weights(model: nn.Module, saved: dict[str, Tensor]) -> bool:
    """Load the result of `unique_state` into a model; False, without a change, if names or shapes do not match."""
    state = unique_state(model)
    if saved.keys() != state.keys() or any(saved[name].shape != state[name].shape for name in state):
        return False
    for name, tensor in state.items():
        tensor.copy_(saved[name])
    return True


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows, atomically."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def open_run_directory(directory: Path, spec: RunSpec, until: Callable[[], bool] | None = None) -> Iterator[None]:
    """Create or open ``directory`` as the run's and lock it; raises if it holds something else or is locked.

    ``until``: see `toeplens.utils.outputs.lock_directory`.
    """
    make_directory(directory)
    _holds_run(directory, spec)  # no lock file in other directories
    with lock_directory(directory, "run", until=until):
        if not _holds_run(directory, spec):
            write_json(directory / SPEC, spec.content, record=False)
        yield


def _holds_run(directory: Path, spec: RunSpec) -> bool:
    """Whether the directory holds this run; False if it is empty, an error if it holds anything else."""
    if (directory / SPEC).exists():
        try:
            content = read_json(directory / SPEC)
        except InputError as error:
            raise InputError(f"{str(error).rstrip('.')}; delete {directory} to start this run over.") from None
        if content != spec.content:
            raise InputError(f"run: {directory} contains another run. Choose another directory.")
        return True
    if names_in(directory):
        raise InputError(
            f"run: {directory} contains files that do not belong to a run. Choose an empty or new directory."
        )
    return False


def save_weights(directory: Path, model: nn.Module) -> None:
    """Write the weights as safetensors, atomically."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in unique_state(model).items()}
    write_bytes(directory / WEIGHTS, safetensors.torch.save(state))


def save_checkpoint(directory: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, atomically."""
    content = io.BytesIO()
    torch.save(_clone_views({"format": _FORMAT, **state}), content)
    write_bytes(directory / CHECKPOINT, content.getvalue())


def _clone_views(x: Any) -> Any:
    """Clone views, because torch would save their whole storage."""
    if isinstance(x, Tensor):
        return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x
    if isinstance(x, dict):
        return {key: _clone_views(value) for key, value in x.items()}
    return [_clone_views(item) for item in x] if isinstance(x, list) else x


def load_checkpoint(directory: Path, spec: RunSpec) -> dict[str, Any] | None:
    """The checkpoint, or None; raises `InputError` if it is damaged or another run's."""
    path = directory / CHECKPOINT
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:  # torch writes checksums, but does not verify them
            broken = archive.testzip()
        if broken is not None:
            raise ValueError(f"the checksum of {broken} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a damaged archive
        reason = first_line(error)
        raise InputError(f"checkpoint: {path} is damaged ({reason[:120]}). Delete it to start this run over.") from None
    if not isinstance(state, dict) or state.get("format") != _FORMAT or not state.keys() >= _REQUIRED_KEYS:
        raise InputError(f"checkpoint: {path} was written by another version. Delete it to start this run over.")
    if state.get("run") != spec.name:
        raise InputError(f"checkpoint: {path} belongs to another run. Delete it to start this run over.")
    return state
