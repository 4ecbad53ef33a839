"""Bad input, numbers out of range, work that cannot end or fit, damaged files: one line, exit code 2, nothing left."""

from __future__ import annotations

import inspect
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from tests.builders import files_in, without_times
from tests.cli.command import TINY, Toeplens

from toeplens.cli.options import Command, with_options
from toeplens.training import Run, loggers
from toeplens.utils.execution import ClusterOptions, ExecutionOptions

MANY = "9" * 300
REFUSED = {  # TINY stands for the options of a tiny run; fields of a spec are wrong in more ways in test_spec.py
    "train --encoding rop": "got 'rop'; did you mean 'rope'",
    "reproduce --scale smok": "got 'smok'; did you mean 'smoke'",
    "card rope --set d_model=3": "got 'd_model'",
    "train TINY --set model.d_model=20 --set model.num_heads=4": "head_dim must be even and at least 2",
    "train TINY --set epoch=3": "epoch is not a field; did you mean 'epochs'?",
    "train TINY --set task_options.ordered=x": "ordered must be true or false, got 'x'.",
    "train TINY --set epochs": "must be of the form field=value, got 'epochs'",
    "train TINY --set epochs.x=3": "epochs has no fields",
    "train TINY --set lr=Infinity": "lr must be",
    "card rope --set base=x": "base must be a number, got 'x'.",
    "card --set base=3": "--set must not be used without an encoding",
    "card rope --length 10": "length must be from 128 to 4096, got 10.",
    "train TINY --device tpu": "--device must be",
    "reproduce --scale smoke --seeds 0": "seeds must be from 1 to",
    "reproduce --scale smoke --stack 0": "stack must be from 1 to 256, got 0",
    "reproduce --scale smoke --workers 0": "--workers must be at least 1, got 0",
    "train TINY --time-budget '5 minutes'": "--time-budget must be a positive time",
    "train TINY --set train_examples=1000000000": "model and examples: they need at least",
    "card rope --length 9999999999999": "length must be",
    f"train TINY --set epochs={MANY * 20}": "--set: the value of epochs is too large",
    f"train TINY --set epochs={'[' * 5000}": "--set: the value of epochs is too large",
    "train --epochs 3": "No such option: --epochs",
    "trian": "Did you mean 'train'?",
}


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: command[:60])
def test_bad_input_is_one_line_and_leaves_nothing_behind(toeplens: Toeplens, tmp_path: Path, command: str):
    arguments = shlex.split(command.replace("TINY", shlex.join(TINY)))
    assert REFUSED[command] in toeplens(*arguments, "--json", "--out", tmp_path / "out").refusal()
    assert not [path for path in files_in(tmp_path) if not path.endswith((".lock", "spec.json"))]


def test_missing_arguments_are_named(toeplens: Toeplens):
    assert "Missing option '--out'" in toeplens("train").refusal()
    assert "Missing argument" in toeplens("ablate").refusal()


def test_unrelated_files_are_left_unchanged(toeplens: Toeplens, tmp_path: Path):
    mine = tmp_path / "thesis.txt"
    mine.write_text("mine")
    for command in (["train", *TINY], ["reproduce", "--scale", "smoke"]):
        for place in (mine, mine / "below"):
            refusal = toeplens(*command, "--out", place).refusal()
            assert "is a file or lies under one" in refusal
    assert (
        "belongs to neither a study nor runs" in toeplens("reproduce", "--scale", "smoke", "--out", tmp_path).refusal()
    )
    for command in ("ablate", "report", "claims"):
        toeplens(command, tmp_path).refusal()
    assert files_in(tmp_path) == {"thesis.txt": b"mine"}


@pytest.mark.parametrize("content", [None, b"epochs: 3", b"[]"])
def test_an_invalid_spec_is_refused(toeplens: Toeplens, tmp_path: Path, content: bytes | None):
    spec = tmp_path / "spec.json"
    if content is not None:
        spec.write_bytes(content)
    assert str(spec) in toeplens("train", spec, "--out", tmp_path / "out").refusal()
    assert "is a directory" in toeplens("train", tmp_path, "--out", tmp_path / "out").refusal()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["ablate", "decompose", "report", "claims", "cite"])
def test_a_directory_that_is_no_run_or_study_is_refused(toeplens: Toeplens, tmp_path: Path, command: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for name in ("missing", "empty", "file"):
        assert str(tmp_path / name) in toeplens(command, tmp_path / name, "--json").refusal()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "named"), [(["train", "--out"], "'--out'"), (["audit", "model", "--text"], "'--text'")]
)
def test_impossible_paths_name_their_option(toeplens: Toeplens, command: list[str], named: str):
    assert f"Invalid value for {named}: The path is empty" in toeplens(*command, "").refusal()
    assert f"Invalid value for {named}: The path is not valid UTF-8" in toeplens(*command, "odd\udcff").refusal()
    for url in ("s3://bucket/x", "file:///tmp/x"):
        assert f"Invalid value for {named}: {url} is a URL. Give a local path" in toeplens(*command, url).refusal()
    for path in ("x" * 5000, "x" * 256, "x/" * 2500):
        refusal = toeplens(*command, path).refusal()
        assert f"Invalid value for {named}: The path of {len(path)} bytes, or a name in it, is longer" in refusal


def test_impossible_options_for_a_run_are_refused(toeplens: Toeplens, run: Run):
    before = files_in(run.directory)
    for command, option, value, words in (
        ("ablate", "--examples", 0, "examples must be"),
        ("ablate", "--split", "tset", "got 'tset'; did you mean 'test'"),
        ("decompose", "--layer", 0, "layer must be from 1 to"),
        ("decompose", "--split", "means", "got 'means'; did you mean 'mean'"),
        ("extrapolate", "--length", 0, "--length must be from 1 to"),
        ("extrapolate", "--length", 10**6, f", got {10**6}"),
    ):
        assert words in toeplens(command, run.directory, option, value).refusal()
    refusal = toeplens("decompose", run.directory, "--split", "input", "--layer", 2).refusal()
    assert "--split must be 'mean' or 'ablate' for layer 2, got 'input'" in refusal
    assert files_in(run.directory) == before


def test_a_card_replaces_only_a_card_and_its_path_is_checked_first(
    toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("toeplens.studies.card.make_card", lambda *_, **__: pytest.fail("the work was begun"))
    for name in ("index.html", "rope.html", "vega.js"):
        (tmp_path / name).write_text("mine")
        assert f"{tmp_path}" in toeplens("card", "--out", tmp_path).refusal()
        (tmp_path / name).unlink()
    (tmp_path / "thesis.txt").write_text("mine")
    assert "thesis.txt" in toeplens("card", "rope", "--out", tmp_path / "thesis.txt").refusal()
    assert "Cannot write" in toeplens("card", "rope", "--out", "/proc/page.html").refusal(3)
    assert files_in(tmp_path) == {"thesis.txt": b"mine"}


def test_a_dataclass_is_expanded_to_options_of_its_fields_with_a_help_text():
    @with_options()
    def command(out: str | None = None, *, execution: ExecutionOptions, cluster: ClusterOptions) -> None:
        received.update(execution=execution, cluster=cluster, out=out)

    received: dict[str, object] = {}
    fields = ["time_budget", "device", "compile", "stack", "follow"]
    cluster = ["workers", "engine", "address", "cpus_per_cell", "gpus_per_cell", "memory_per_cell"]
    assert list(inspect.signature(command).parameters) == ["out", *fields, *cluster]
    app = typer.Typer()
    app.command(cls=Command)(command)
    given = "--follow wandb --stack 2 --engine ray --memory-per-cell 4G"
    app(given.split(), standalone_mode=False)
    assert received["execution"] == ExecutionOptions(stack=2, follow=("wandb",))
    assert received["cluster"] == ClusterOptions(engine="ray", memory_per_cell="4G")


def test_missing_loggers_are_refused_before_any_output(
    toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    says = "got 'tensorbord'; did you mean 'tensorboard'?"
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    for command in (["train"], ["reproduce", "--scale", "smoke"], ["study", "canonical-smoke"], ["theory"]):
        arguments = (*command, "--out", tmp_path / "a", "--follow")
        assert says in toeplens(*arguments, "tensorbord").refusal()
        assert "follow: wandb is not installed. Run: pip install 'toeplens[wandb]'." in toeplens(
            *arguments, "wandb"
        ).refusal(3)
    assert not (tmp_path / "a").exists()


def test_a_run_is_logged_and_logger_failures_are_warnings(
    toeplens: Toeplens, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    arguments = ("train", *TINY, "--out", tmp_path, "--follow", "tensorboard")
    first = toeplens(*arguments, "--json")
    run = Path(first.json()["directory"])
    (run / "result.json").unlink()
    shutil.rmtree(run / "tensorboard")
    (run / "tensorboard").write_text("in the way")
    again = toeplens(*arguments, "--json")
    assert without_times(again.json()["metrics"]) == without_times(first.json()["metrics"])
    assert caplog.messages[0].startswith("Logger TensorBoard is disabled: ")
