"""Options made from the fields of dataclasses, and what commands do with those of execution and clusters."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path

import pytest
import typer
from tests.builders import timeless
from tests.cli.command import TINY, Toeplens

from toeplens.cli.options import Command, with_options
from toeplens.ground.execution import ClusterOptions, ExecutionOptions
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


def test_a_run_is_logged_and_what_fails_is_a_warning(
    toeplens: Toeplens, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    given = ("train", *TINY, "--out", tmp_path, "--follow", "tensorboard")
    first = toeplens(*given, "--json")
    run = Path(first.json()["directory"])
    (run / "result.json").unlink()
    shutil.rmtree(run / "tensorboard")
    (run / "tensorboard").write_text("in the way")
    again = toeplens(*given, "--json")
    assert timeless(again.json()["metrics"]) == timeless(first.json()["metrics"])
    assert caplog.messages[0].startswith("Logger TensorBoard is disabled: ")
