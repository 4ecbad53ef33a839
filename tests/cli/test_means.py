"""The options of how work is carried out: what they come to, and what they refuse."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders import timeless, tiny
from tests.cli.command import TINY

from toeplens.cli.means import Hands, Means
from toeplens.cli.progress import StudyProgress
from toeplens.engine import Cluster, Job
from toeplens.ground import InputError
from toeplens.studies.kit.study import of_study
from toeplens.training import loggers

MEANS = {"time_budget": None, "device": "auto", "compile": "auto", "stack": None}
NONE = {"workers": None, "engine": "local", "address": None}
CELL = {"cpus_per_cell": None, "gpus_per_cell": None, "memory_per_cell": None}


def test_what_options_come_to():
    assert Hands(**NONE | CELL).chosen() is None
    assert Hands(**NONE | CELL | {"workers": 3}).chosen() == 3
    assert Hands(**NONE | CELL | {"engine": "ray"}).chosen() == Cluster()
    given = {"engine": "ray", "workers": 5, "address": "head:6379", "cpus_per_cell": 2.0, "gpus_per_cell": 0.25}
    wanted = Cluster("head:6379", cpus=2.0, gpus=0.25, memory=1_500_000_000, at_once=5)
    assert Hands(**NONE | CELL | given | {"memory_per_cell": "1.5G"}).chosen() == wanted


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"engine": "slurm"}, "engine must be one of local, ray, got 'slurm'"),
        ({"address": "head:6379"}, "address must not be set without --engine ray, got 'head:6379'"),
        (
            {"engine": "ray", "memory_per_cell": "much"},
            "memory_per_cell must be a positive size such as 500M or 4G, got 'much'",
        ),
        ({"engine": "ray", "cpus_per_cell": -1.0}, "cpus_per_cell must be over 0"),
    ],
)
def test_options_that_cannot_be_are_named(given: dict, says: str):
    with pytest.raises(InputError, match=says):
        Hands(**NONE | CELL | given).chosen()


@pytest.mark.parametrize(
    ("given", "device", "said"),
    [
        ({}, "auto", "on a cluster's machines: 1 core per cell"),
        ({"gpus_per_cell": 0.25}, "auto", "on a cluster's machines: 0.25 GPU per cell"),
        ({"gpus_per_cell": 1.0, "cpus_per_cell": 4.0}, "cpu", "on a cluster's machines: 4 cores per cell"),
    ],
)
def test_what_a_cluster_has_is_not_looked_for_on_this_machine(given: dict, device: str, said: str):
    """Which has no GPU."""
    hands = Hands(**NONE | CELL | {"engine": "ray"} | given)
    limits = Means(**MEANS | {"device": device}, hands=hands).limits()
    assert said in StudyProgress([Job(tiny(), "one")], "1 model", limits)._about
    assert Means(**MEANS, hands=Hands(**NONE | CELL)).limits().machines is None


def test_loggers_that_are_not_installed_are_refused_before_anything_is_written(
    toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    limits = Means(**MEANS, follow=["tensorboard"]).limits()
    assert (limits.follow, limits.group) == (("tensorboard",), None)
    assert of_study(limits, tmp_path / "laptop").group == "laptop"
    assert of_study(replace(limits, group="mine"), tmp_path / "laptop").group == "mine"


def test_a_run_is_logged_and_what_fails_is_a_warning(toeplens, tmp_path: Path, caplog: pytest.LogCaptureFixture):
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


def test_the_commands_take_them(toeplens, tmp_path: Path):
    answer = toeplens("theory", "--scale", "smoke", "--out", "s4://there")
    assert "--out must be a URL of a file system that is installed, got 's4://there'" in answer.refusal()
    assert not (tmp_path / "a").exists()
