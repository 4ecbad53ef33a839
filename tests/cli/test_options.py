"""Options made from the fields of dataclasses, and what commands do with those of execution and clusters."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path

import pytest
import typer
from tests.builders import timeless, tiny
from tests.cli.command import TINY, Toeplens

from toeplens.cli.options import Command, with_options
from toeplens.cli.progress import StudyProgress
from toeplens.engine import Job
from toeplens.ground.execution import ClusterOptions, ExecutionOptions
from toeplens.studies.kit.study import of_study
from toeplens.training import loggers


def test_a_dataclass_is_expanded_to_options_of_its_fields_with_a_help_text():
    @with_options()
    def command(out: str | None = None, *, execution: ExecutionOptions, cluster: ClusterOptions) -> None:
        seen.update(execution=execution, cluster=cluster, out=out)

    seen: dict[str, object] = {}
    fields = ["time_budget", "device", "compile", "stack", "follow"]
    cluster = ["workers", "engine", "address", "cpus_per_cell", "gpus_per_cell", "memory_per_cell"]
    assert list(inspect.signature(command).parameters) == ["out", *fields, *cluster]
    app = typer.Typer()
    app.command(cls=Command)(command)
    given = "--follow wandb --stack 2 --engine ray --memory-per-cell 4G"
    app(given.split(), standalone_mode=False)
    assert seen["execution"] == ExecutionOptions(stack=2, follow=("wandb",))
    assert seen["cluster"] == ClusterOptions(engine="ray", memory_per_cell="4G")

    @with_options("device")
    def some(execution: ExecutionOptions) -> None:
        """Takes one of them."""

    assert list(inspect.signature(some).parameters) == ["device"]


def test_what_a_cluster_has_is_not_looked_for_on_this_machine():
    """Which has no GPU."""
    cluster = ClusterOptions(engine="ray", gpus_per_cell=0.25)
    progress = StudyProgress([Job(tiny(), "one")], "1 model", ExecutionOptions(), cluster)
    assert "on a cluster's machines: 0.25 GPU per cell" in progress._about


def test_loggers_that_are_not_installed_are_refused_before_anything_is_written(
    toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    says = "got 'tensorbord'; did you mean 'tensorboard'?"
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    for command in (["train"], ["reproduce", "--scale", "smoke"], ["study", "canonical-smoke"], ["theory"]):
        given = (*command, "--out", tmp_path / "a", "--follow")
        assert says in toeplens(*given, "tensorbord").refusal()
        assert "follow: wandb is not installed. Run: pip install 'toeplens[wandb]'." in toeplens(
            *given, "wandb"
        ).refusal(3)
    assert not (tmp_path / "a").exists()


def test_loggers_group_runs_by_the_studys_name(tmp_path: Path):
    assert of_study(ExecutionOptions(), tmp_path / "laptop").group == "laptop"
    assert of_study(ExecutionOptions(group="mine"), tmp_path / "laptop").group == "mine"


def test_a_run_is_logged_and_what_fails_is_a_warning(
    toeplens: Toeplens, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    given = ("train", *TINY, "--out", tmp_path, "--follow", "tensorboard")
    first = toeplens(*given, "--json")
    run = Path(first.json()["directory"])
    assert len(list(run.glob("tensorboard/*/events*"))) == 1
    (run / "result.json").unlink()
    shutil.rmtree(run / "tensorboard")
    (run / "tensorboard").write_text("in the way")
    again = toeplens(*given, "--json")
    assert timeless(again.json()["metrics"]) == timeless(first.json()["metrics"])
    assert caplog.messages[0].startswith("Logger TensorBoard is disabled: ")


def test_an_output_url_that_cannot_be_is_refused(toeplens: Toeplens):
    answer = toeplens("theory", "--scale", "smoke", "--out", "s4://there")
    assert "--out must be a URL of a file system that is installed, got 's4://there'" in answer.refusal()
