"""MLflow: a run of its own for each run, found again by a tag, in an experiment a study."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from toeplens.training.followers.behind import Behind
from toeplens.training.followers.protocol import RunEnd, RunFacts, figures, imported

_EXPERIMENT, _TAG = "toeplens", "toeplens.run"
_LONGEST, _AT_ONCE = 500, 100  # characters of a parameter's value, and parameters of a request, that every server takes
_STATUS = {"complete": "FINISHED", "diverged": "FAILED", "stopped": "KILLED"}


class MLflow(Behind):
    """Logs to where ``MLFLOW_TRACKING_URI`` says, else to MLflow's own default.

    The experiment is that of ``MLFLOW_EXPERIMENT_NAME``, else ``toeplens/`` and the study's name. A run that goes on is
    found by its tag ``toeplens.run``; rows that it has from before a kill are not sent again.
    """

    def opened(self, run: RunFacts) -> None:
        mlflow = imported("mlflow", "mlflow")
        self.entities, self.client = mlflow.entities, mlflow.MlflowClient()
        experiment = experiment_of(self.client, self.group)
        found = self.client.search_runs([experiment], filter_string=f"tags.`{_TAG}` = '{run.name}'", max_results=1)
        self.had = 0
        if found:
            self.id = found[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            self.had = max((each.step for each in self.client.get_metric_history(self.id, "epoch")), default=0)
            return
        tags = {_TAG: run.name, **({} if self.group is None else {"toeplens.study": self.group})}
        self.id = self.client.create_run(experiment, run_name=self.label or run.title, tags=tags).info.run_id
        fields = [self.entities.Param(name, str(value)[:_LONGEST]) for name, value in _flat(run.spec.content)]
        for start in range(0, len(fields), _AT_ONCE):
            self.client.log_batch(self.id, params=fields[start : start + _AT_ONCE])

    def sent(self, row: Mapping[str, float]) -> None:
        step, now = int(row["step"]), int(time.time() * 1000)
        if step > self.had:
            metrics = [self.entities.Metric(name, value, now, step) for name, value in figures(row).items()]
            self.client.log_batch(self.id, metrics=metrics)

    def closed(self, end: RunEnd) -> None:
        self.client.set_tag(self.id, "toeplens.status", end.status)
        if end.reason is not None:
            self.client.set_tag(self.id, "toeplens.reason", end.reason)
        self.client.set_terminated(self.id, status=_STATUS[end.status])


def experiment_of(client: Any, group: str | None) -> str:
    """The id of the experiment, made if it is not there."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or (_EXPERIMENT if group is None else f"{_EXPERIMENT}/{group}")
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name)
        except Exception:  # another worker may just have made it
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return found.experiment_id


def make_ready(group: str | None) -> None:
    """Make the database and the experiment before several processes would do so at once, which MLflow does not bear."""
    experiment_of(imported("mlflow", "mlflow").MlflowClient(), group)


def _flat(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Fields by their paths, ``model.d_model``."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
