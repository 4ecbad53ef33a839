"""Loggers: write a run's evaluations to TensorBoard, Weights & Biases or MLflow, or to your own logger."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from toeplens.training.run import Status
from toeplens.training.spec import RunSpec
from toeplens.utils import EnvironmentFailure
from toeplens.utils.errors import first_line


@dataclass(frozen=True)
class RunInfo:
    """Information about the run that a logger is opened for.

    name  the name of its directory, the same after resuming
    step  of the last evaluation in the checkpoint (0 at the beginning). Later rows are logged, some of them
          a second time if the process was killed
    """

    name: str
    directory: Path
    spec: RunSpec
    step: int

    @property
    def title(self) -> str:
        return f"{self.spec.task} · {self.spec.model.encoding} · seed {self.spec.seed}"


class Logger(Protocol):
    """The logger interface. `train` waits for each call."""

    def log(self, row: Mapping[str, float]) -> None:
        """Log an evaluation: a row of metrics.jsonl without non-finite values."""

    def close(self, status: Status) -> None:
        """Called at the end of the session; a run with status ``stopped`` may be resumed."""


OpenLogger = Callable[[RunInfo], Logger]  # usually a class


class Loggers:
    """A run's loggers. A logger that raises is dropped with a warning; the run is not affected."""

    def __init__(self, loggers: Sequence[OpenLogger], run: RunInfo, device: torch.device, num_logged: int) -> None:
        """``num_logged`` is the number of rows that earlier sessions have logged."""
        self.run, self.num_logged = run, num_logged
        self.devices = [device] if device.type == "cuda" else []
        self.open_loggers: list[Logger] = [logger for opener in loggers for logger in self._call(opener, opener, run)]

    def log(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Log the new ones of the run's rows; returns whether there were any."""
        new, self.num_logged = rows[self.num_logged :], len(rows)
        for row in new:
            finite = {name: value for name, value in row.items() if value is not None}
            self.open_loggers = [logger for logger in self.open_loggers if self._call(logger, logger.log, dict(finite))]
        return bool(new)

    def close(self, status: Status) -> None:
        """Close the loggers that are open."""
        for logger in self.open_loggers:
            self._call(logger, logger.close, status)
        self.open_loggers = []

    def _call(self, logger: Any, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The result of ``call`` in a list, or an empty list if it raises. Torch's random states are restored."""
        try:
            with torch.random.fork_rng(devices=self.devices):
                return [call(*arguments)]
        except (Exception, SystemExit) as error:
            kind = getattr(logger, "func", logger)
            _warn(getattr(kind, "__name__", type(kind).__name__), first_line(error).replace(self.run.name, "the run"))
            return []


@cache
def _warn(name: str, reason: str) -> None:
    """Once per process: all runs of a study may fail alike."""
    logging.getLogger(__name__).warning("Logger %s is disabled: %s. Training continues.", name, reason)


def _prefix_groups(row: Mapping[str, float]) -> dict[str, float]:
    """Metrics with the group prefixes of trackers: ``train/loss`` for ``train_loss``."""
    return {re.sub("^(train|test|fit)_", r"\1/", name): value for name, value in row.items() if name != "step"}


class TensorBoard:
    """Writes scalars to ``tensorboard/LABEL`` in the run's directory.

    A resumed run adds an event file that makes TensorBoard discard everything after the checkpoint.
    """

    def __init__(self, run: RunInfo, label: str | None = None, group: str | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        name = re.sub(r"[^\w.+=-]+", "-", label or run.title).strip("-.")[:100] or "run"
        earlier = sorted(run.directory.glob("tensorboard/*/"))
        directory = earlier[0] if earlier else run.directory / "tensorboard" / name
        self.writer = SummaryWriter(str(directory), purge_step=run.step + 1)
        if not earlier:
            self.writer.add_text("spec", f"```json\n{json.dumps(run.spec.content, indent=2)}\n```")

    def log(self, row: Mapping[str, float]) -> None:
        for name, value in _prefix_groups(row).items():
            self.writer.add_scalar(name, value, int(row["step"]))
        self.writer.flush()

    def close(self, status: Status) -> None:
        self.writer.close()


class WandB:
    """Logs to the project ``WANDB_PROJECT`` (default: toeplens); W&B's other variables apply.

    The run's id is the name of its directory, so a resumed run continues the same W&B run, which ignores rows that
    it already has.
    """

    def __init__(self, run: RunInfo, label: str | None = None, group: str | None = None) -> None:
        import wandb  # type: ignore[import-not-found]

        wandb.setup(settings=wandb.Settings(silent=True))  # otherwise it prompts for a missing key
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "toeplens"),
            id=run.name,
            name=label or run.title,
            group=group,
            config=run.spec.content,
            resume="allow",
            reinit="create_new",  # models trained as one have one run each
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, row: Mapping[str, float]) -> None:
        self.run.log(_prefix_groups(row), step=int(row["step"]))

    def close(self, status: Status) -> None:
        self.run.summary["status"] = status
        if status == "stopped":
            self.run.mark_preempting()
        self.run.finish(exit_code=0 if status == "complete" else 1)


class MLflow:
    """Logs to ``MLFLOW_TRACKING_URI`` (default: MLflow's own).

    The experiment is ``MLFLOW_EXPERIMENT_NAME`` (default: toeplens/STUDY). A resumed run continues the MLflow run that
    has its name as the tag ``toeplens.run``.
    """

    def __init__(self, run: RunInfo, label: str | None = None, group: str | None = None) -> None:
        import mlflow  # type: ignore[import-not-found]

        self.metric, self.client, experiment = mlflow.entities.Metric, mlflow.MlflowClient(), mlflow_experiment(group)
        runs = self.client.search_runs([experiment], filter_string=f"tags.`toeplens.run` = '{run.name}'")
        if runs:
            self.id = runs[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            return
        tags = {"toeplens.run": run.name}
        self.id = self.client.create_run(experiment, run_name=label or run.title, tags=tags).info.run_id
        for name, value in _flatten(run.spec.content):
            self.client.log_param(self.id, name, str(value)[:500])  # the limit of all servers

    def log(self, row: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self.metric(name, value, now, int(row["step"])) for name, value in _prefix_groups(row).items()]
        self.client.log_batch(self.id, metrics=metrics)

    def close(self, status: Status) -> None:
        statuses = {"complete": "FINISHED", "diverged": "FAILED", "stopped": "KILLED"}
        self.client.set_terminated(self.id, status=statuses[status])


def mlflow_experiment(group: str | None) -> str:
    """The id of MLflow's experiment, created if it does not exist."""
    import mlflow  # type: ignore[import-not-found]

    client = mlflow.MlflowClient()
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or ("toeplens" if group is None else f"toeplens/{group}")
    experiment = client.get_experiment_by_name(name)
    return client.create_experiment(name) if experiment is None else experiment.experiment_id


def _flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested fields by dotted names, ``model.d_model``."""
    for name, value in content.items():
        yield from _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]


# openers of `toeplens.utils.execution.LOGGERS`; a logger's name is that of its package and extra
OPENERS: dict[str, Callable[..., Logger]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def build_loggers(names: Sequence[str], label: str | None = None, group: str | None = None) -> list[OpenLogger]:
    """Loggers for a run called ``label`` in the study ``group``."""
    return [partial(OPENERS[name], label=label, group=group) for name in names]


def must_be_installed(names: Sequence[str]) -> None:
    """Raise an `EnvironmentFailure` that says how to install a logger's package."""
    for name in names:
        if find_spec(name) is None:
            raise EnvironmentFailure(f"follow: {name} is not installed. Run: pip install 'toeplens[{name}]'.")


def prepare_loggers(names: Sequence[str], group: str | None) -> None:
    """Create MLflow's database and experiment in advance, because it does not support concurrent creation."""
    if "mlflow" in names:
        try:
            mlflow_experiment(group)
        except Exception as error:
            _warn("MLflow", first_line(error))
