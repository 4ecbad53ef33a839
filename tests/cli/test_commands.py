"""The command line: JSON for machines, one line for errors, exit codes that mean something, nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cli.command import TINY, TOEPLENS, Answer, Toeplens, changes, files, in_a_process

from toeplens import __version__, cli, encodings, tasks
from toeplens.cli.options import seconds as read_seconds
from toeplens.cli.progress import RunProgress
from toeplens.encodings.conformance import CHECKS
from toeplens.engine import Asked, Job, Limits, carry_out, read_ablation
from toeplens.ground import read_json
from toeplens.papers.deposit import SCALES, claims_of, study
from toeplens.training import Run, environment, run_spec, train
from toeplens.training import run as store
from toeplens.training.presets import COUNT, DISTANCE

# ---- what there is --------------------------------------------------------------------------------------------------


def test_encodings_as_json(toeplens: Toeplens):
    answer = toeplens("encodings", "--json")
    assert answer.err == ""
    rows = answer.json()
    assert [row["name"] for row in rows] == list(encodings.names())
    for row in rows:
        assert row.keys() == {
            "name",
            "coupling",
            "also_couples",
            "toeplitz",
            "data_dependent",
            "scale",
            "formula",
            "options",
            "citation",
        }
        assert list(row["options"]) == list(encodings.options(row["name"]))
    scales = {"t5": "1", "tupe": "1/sqrt(2d)", "deberta": "1/sqrt(3d)"}
    assert {row["name"]: row["scale"] for row in rows} == dict.fromkeys(encodings.names(), "1/sqrt(d)") | scales


def test_tasks_as_json(toeplens: Toeplens):
    answer = toeplens("tasks", "--json")
    assert answer.err == ""
    rows = answer.json()
    assert [row["name"] for row in rows] == list(tasks.names())
    for row in rows:
        assert row["chance"] == tasks.build(row["name"]).chance()
        assert list(row["options"]) == list(tasks.options(row["name"]))
        assert row["about"]


@pytest.mark.parametrize("command", ["encodings", "tasks"])
def test_people_get_tables(toeplens: Toeplens, command: str):
    answer = toeplens(command)
    assert (answer.code, answer.err) == (0, "")
    for name in (encodings if command == "encodings" else tasks).names():
        assert name in answer.out


@pytest.mark.parametrize("its_own", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_a_card_in_a_process_of_its_own_or_here(
    toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, its_own: bool
):
    if not its_own:  # what checks shapes in the tests cannot be compiled
        monkeypatch.delitem(CHECKS, "compile")
    page = tmp_path / "rope.html"
    command = ("card", "rope", "--set", "base=500", "--length", "128", "--out", str(page), "--json")
    content = (in_a_process if its_own else toeplens)(*command).json()
    assert content["page"] == str(page)
    (card,) = content["cards"]
    assert card["options"]["base"] == 500
    assert card["conforms"], card["findings"]
    assert "rope" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["card", "roep"], r"encoding: there is no 'roep'; did you mean 'rope'"),
        (["card", "--set", "base=3"], r"set: an option was given, but no encoding"),
        (["card", "rope", "--set", "base=-3"], r"base: -3 was given"),
        (["card", "rope", "--length", "3"], r"length: 3 was given"),
    ],
)
def test_a_card_that_cannot_be_made(toeplens: Toeplens, tmp_path: Path, arguments: list[str], says: str):
    assert re.search(says, toeplens(*arguments, "--out", str(tmp_path / "page.html")).refusal())
    assert not list(tmp_path.iterdir())


COMMANDS = [
    "reproduce",
    "study",
    "theory",
    "audit",
    "compare",
    "survey",
    "train",
    "ablate",
    "decompose",
    "extrapolate",
    "report",
    "claims",
    "encodings",
    "card",
    "tasks",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps(toeplens: Toeplens, command: str):
    answer = toeplens(command, "--help")
    assert (answer.code, answer.err) == (0, "")
    assert f"toeplens {command}" in answer.out


def test_the_help_names_every_command(toeplens: Toeplens):
    answer = toeplens("--help")
    assert answer.code == 0
    assert [name for name in COMMANDS if name not in answer.out] == []
    assert sorted(COMMANDS) == sorted(str(command.name) for command in cli.app.registered_commands)


def test_without_a_command_there_is_help(toeplens: Toeplens):
    answer = toeplens()
    assert (answer.code, answer.err) == (2, "")
    assert "Commands" in answer.out


def test_the_version(toeplens: Toeplens):
    assert toeplens("--version") == Answer(0, f"toeplens {__version__}\n", "")


# ---- train, then ablate ---------------------------------------------------------------------------------------------


def test_train_then_ablate(toeplens: Toeplens, tmp_path: Path):
    trained = toeplens("train", *TINY, "--out", tmp_path, "--json").json()
    run = Run.open(trained["directory"])
    assert trained["status"] == run.status == "complete"
    assert trained["test_accuracy"] == run.result["test_accuracy"]
    assert trained["metrics"] == run.metrics
    assert (run.spec.epochs, run.spec.model.d_model, run.spec.model.num_heads) == (2, 16, 2)
    found = toeplens("ablate", run.directory, "--examples", "10", "--json").json()
    ablation = read_ablation(run.directory, Asked(10))
    assert ablation is not None
    assert np.array_equal(found["drops"], ablation.drops)
    assert (found["examples"], found["metric"]) == (10, "accuracy")
    assert [layer["kind"] for layer in found["deposit"]]
    assert len(found["deposit"]) == run.spec.model.num_layers
    both = toeplens("ablate", run.directory, "--examples", "20", "--split", "train+test", "--json").json()
    assert both["examples"] == 20


def test_people_are_told_the_same(toeplens: Toeplens, tmp_path: Path):
    trained = toeplens("train", *TINY, "--out", tmp_path)
    (run,) = map(Run.open, tmp_path.iterdir())
    assert f"complete, test accuracy {run.result['test_accuracy']:.4f}" in trained.out
    assert f"run: {run.directory}" in trained.out
    assert "trigger-distance, rope, paper protocol on cpu" in trained.err
    found = toeplens("ablate", run.directory, "--examples", "10")
    assert found.code == 0
    for word in ("on 10 examples", "head 2", "effective heads", "single-head:"):
        assert word in found.out


def test_the_same_command_again_has_nothing_to_do(toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    command = ["train", *TINY, "--out", tmp_path, "--json"]
    first = toeplens(*command).json()
    before = files(tmp_path)
    monkeypatch.setattr("toeplens.training.loop._Session", None)
    assert toeplens(*command).json() == first
    assert files(tmp_path) == before


def test_a_recorded_spec_is_the_same_run(toeplens: Toeplens, tmp_path: Path):
    first = toeplens("train", *TINY, "--encoding", "alibi", "--out", tmp_path / "one", "--json").json()
    spec = Path(first["directory"]) / "spec.json"
    again = toeplens("train", spec, "--out", tmp_path / "two", "--json").json()
    assert Path(again["directory"]).name == Path(first["directory"]).name
    assert again["test_accuracy"] == first["test_accuracy"]
    longer = toeplens("train", spec, "--set", "epochs=1", "--out", tmp_path / "two", "--json").json()
    assert len(longer["metrics"]) == 1


def test_a_recorded_scale_does_not_go_over_to_another_encoding(toeplens: Toeplens, tmp_path: Path):
    def scale(*command: Any) -> float | None:
        trained = toeplens("train", *command, "--out", tmp_path / "runs", "--json").json()
        return Run.open(trained["directory"]).spec.model.attention_scale

    small = [*TINY, *changes(epochs=1)]
    assert scale(*small, "--encoding", "t5") == 1.0
    recorded = tmp_path / "spec.json"
    recorded.write_text(next((tmp_path / "runs").rglob("spec.json")).read_text())
    assert scale(recorded, *changes(model__encoding="alibi")) is None
    assert scale(recorded, *changes(model__encoding="alibi", model__attention_scale=0.5)) == 0.5


def test_an_option_that_a_spec_contradicts_is_refused(toeplens: Toeplens, run: Run, tmp_path: Path):
    spec = run.directory / "spec.json"
    for option, wrong in (
        ("encoding", "nope"),
        ("protocol", "released"),
        ("task", "zzz"),
        ("seed", 7),
        ("scale", "smoke"),
    ):
        message = toeplens("train", spec, f"--{option}", str(wrong), "--out", tmp_path / "new").refusal()
        assert f"{option}: {wrong!r} was given" in message
        assert "leave it out" in message
        assert not (tmp_path / "new").exists()
    same = ["--encoding", run.spec.model.encoding, "--task", run.spec.task, "--seed", str(run.spec.seed)]
    assert toeplens("train", spec, *same, "--out", run.directory.parent, "--json").json()["status"] == "complete"
    other = ["--encoding", "alibi", "--set", "model.encoding=alibi", "--set", "epochs=1"]
    assert toeplens("train", spec, *other, "--out", tmp_path / "new", "--json").json()["status"] == "complete"


def test_training_a_run_whose_weights_are_gone_says_how_to_go_on(toeplens: Toeplens, run: Run):
    weights = run.directory / "model.safetensors"
    whole = weights.read_bytes()
    for damage in (None, whole[:100]):
        weights.unlink() if damage is None else weights.write_bytes(damage)
        again = ["train", run.directory / "spec.json", "--out", run.directory.parent]
        message = toeplens(*again).refusal()
        assert f"delete {run.directory / 'result.json'} and train with the same spec and directory" in message
        (run.directory / "result.json").unlink()
        assert "complete" in toeplens(*again).out
        assert weights.read_bytes() == whole


def test_progress_shows_no_accuracy_where_no_example_counted():
    spec = run_spec(model={})
    with RunProgress(spec, Limits()) as progress:
        for row in (None, {"test_accuracy": None}, {"test_accuracy": 0.5}):
            progress(1, 2, row)
    assert progress.bar.tasks[0].description == f"{spec.name}  test accuracy 0.500"


def test_a_run_that_diverged_has_no_tables(toeplens: Toeplens, tmp_path: Path):
    run = toeplens("train", *TINY, *changes(lr=1e300), "--out", tmp_path, "--json").json()
    assert (run["status"], run["test_accuracy"]) == ("diverged", None)
    for command in ("ablate", "extrapolate"):
        assert "diverged; there are no finite weights to look at" in toeplens(command, run["directory"]).refusal()


def test_fields_are_changed_as_asked_and_switches_follow(toeplens: Toeplens, tmp_path: Path):
    asked = [
        *("--protocol", "released", "--encoding", "rope", "--task", "trigger-count", "--seed", "7"),
        *changes(lr=0.01, model__encoding_options__base=500, precision="float32", task_options__num_triggers=5),
    ]
    trained = toeplens("train", *TINY, *asked, "--out", tmp_path, "--json").json()
    spec = Run.open(trained["directory"]).spec
    assert (spec.lr, spec.precision, spec.seed, spec.data_seed) == (0.01, "float32", 7, 7)
    assert spec.task_options["num_triggers"] == 5
    assert spec.model.encoding_options == {"base": 500}
    assert (spec.model.causal, spec.model.input_encoding) == (False, "sinusoidal")


def test_a_time_budget_stops_training_and_the_same_command_goes_on(toeplens: Toeplens, tmp_path: Path):
    command = ["train", *TINY, *changes(epochs=100_000), "--out", tmp_path, "--time-budget", "1s", "--json"]
    steps = []
    for _ in range(2):
        began = time.monotonic()
        assert toeplens(*command).json()["status"] == "stopped"
        assert time.monotonic() - began < 20
        (run,) = map(Run.open, tmp_path.iterdir())
        steps.append(run.step)
    assert 0 < steps[0] < steps[1]


def test_where_no_example_counts_there_is_no_accuracy(toeplens: Toeplens, tmp_path: Path):
    one = [*TINY, "--task", COUNT, *changes(test_examples=1, epochs=1)]
    spec = Run.open(toeplens("train", *one, "--out", tmp_path / "a", "--json").json()["directory"]).spec
    label = int(spec.build_task().dataset("test", 1, spec.data_seed).labels[0])
    ignored = [*one, *changes(ignore_label=label), "--out", tmp_path / "b"]
    assert toeplens("train", *ignored, "--json").json()["test_accuracy"] is None
    said = toeplens("train", *ignored)
    assert said.code == 0
    assert said.out.startswith("complete\n")
    (run,) = (tmp_path / "b").iterdir()
    assert "no examples that count" in toeplens("ablate", run).refusal()


# ---- bad input ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[list[str], str]] = {
    # names: the nearest is named
    "encoding": (["train", "--encoding", "rop"], "there is no 'rop'; did you mean 'rope'"),
    "task": (["train", "--task", "triger-distance"], "there is no 'triger-distance'; did you mean 'trigger-distance'"),
    "scale": (["train", "--scale", "labtop"], "scale: there is no 'labtop'; did you mean 'laptop'"),
    "protocol": (["train", "--protocol", "papr"], "protocol: there is no 'papr'; did you mean 'paper'"),
    "reproduce-scale": (["reproduce", "--scale", "smok"], "scale: there is no 'smok'; did you mean 'smoke'"),
    "reproduce-protocol": (
        ["reproduce", "--protocol", "realeased"],
        "protocol: there is no 'realeased'; did you mean 'released'",
    ),
    "no-relative": (["train", "--encoding", "nothing-like-it"], "known: "),
    # sizes that don't fit
    "odd-head-dim": (["train", *TINY, *changes(model__d_model=20, model__num_heads=4)], "head_dim: 5 was given"),
    "odd-mla": (
        ["train", *TINY, "--encoding", "mla", *changes(model__encoding_options__rotary_dim=3)],
        "rotary_dim: 3 was given",
    ),
    "indivisible": (["train", *TINY, *changes(model__d_model=18, model__num_heads=4)], "d_model: 18 was given"),
    "triggers": (
        ["train", *TINY, "--protocol", "released", *changes(task_options__length=8)],
        "the triggers don't fit",
    ),
    "distance": (["train", *TINY, *changes(task_options__max_distance=12)], "max_distance: 12 was given"),
    "count": (["train", *TINY, "--task", COUNT, *changes(task_options__max_count=13)], "max_count: 13 was given"),
    "max-len": (["train", *TINY, *changes(model__max_len=4)], "max_len: 4 was given"),
    "vocabulary": (["train", *TINY, *changes(model__vocab_size=10)], "vocab_size: 10 was given"),
    "classes": (["train", *TINY, *changes(model__num_classes=4)], "num_classes: 4 was given"),
    "too-many-examples": (
        ["train", *TINY, *changes(task_options__vocab_size=4, task_options__length=3)],
        "train_examples: 32 was given, but trigger-distance at this size has only about",
    ),
    # fields
    "unknown-field": (["train", *TINY, *changes(epoch=3)], "epoch: no such field"),
    "unknown-model-field": (["train", *TINY, *changes(model__width=3)], "model.width: no such field"),
    "unknown-task-option": (["train", *TINY, *changes(task_options__lenght=3)], "did you mean 'length'"),
    "unknown-encoding-option": (["train", *TINY, *changes(model__encoding_options__bse=3)], "did you mean 'base'"),
    "no-equals": (["train", *TINY, "--set", "epochs"], "'epochs' was given; it must be of the form field=value"),
    "no-name": (["train", *TINY, "--set", "=3"], "'=3' was given"),
    "no-fields": (["train", *TINY, "--set", "epochs.x=3"], "epochs has no fields"),
    "word-for-number": (["train", *TINY, *changes(epochs="many")], "epochs: "),
    "zero": (["train", *TINY, *changes(epochs=0)], "epochs: "),
    "negative": (["train", *TINY, *changes(lr=-1)], "lr: "),
    "not-finite": (["train", *TINY, *changes(lr="Infinity")], "lr: "),
    "not-a-number": (["train", *TINY, *changes(weight_decay="NaN")], "weight_decay: "),
    "null": (["train", *TINY, *changes(batch_size="null")], "batch_size: "),
    "list-for-name": (["train", *TINY, *changes(model__encoding="[1]")], "model.encoding: "),
    "list-for-name-released": (
        ["train", *TINY, "--protocol", "released", *changes(model__encoding="[1]")],
        "model.encoding: ",
    ),
    "number-for-fields": (["train", *TINY, "--set", "task_options=3"], "task_options: "),
    "word-for-option": (["train", *TINY, *changes(model__encoding_options__base="big")], "base"),
    "seed": (["train", *TINY, "--seed", "-1"], "seed: "),
    "betas": (["train", *TINY, *changes(betas="[0.9]")], "betas"),
    # machines
    "device": (["train", *TINY, "--device", "tpu"], "device: "),
    "device-number": (["train", *TINY, "--device", "cuda:x"], "device: 'cuda:x' was given"),
    "compile": (["train", *TINY, "--compile", "yes"], "compile: there is no 'yes'"),
    "reproduce-device": (["reproduce", "--device", "tpu"], "device: "),
    # counts and times
    "seeds": (["reproduce", "--scale", "smoke", "--seeds", "0"], "seeds: 0 was given"),
    "part": (
        ["reproduce", "--scale", "smoke", "--part", "factor"],
        "part: there is no 'factor'; did you mean 'factors'",
    ),
    "workers": (["reproduce", "--scale", "smoke", "--workers", "0"], "workers: 0 was given"),
    **{
        f"budget-{budget}": ([*command, "--time-budget", budget], f"time_budget: {budget!r} was given")
        for command in (["train", *TINY], ["reproduce", "--scale", "smoke"])
        for budget in ("soon", "0s", "-5m", "5 minutes", "", "1e3")
    },
    # the shell's own
    "unknown-option": (["train", "--epochs", "3"], "No such option: --epochs"),
    "unknown-command": (["trian"], "Did you mean 'train'?"),
    "not-a-whole-number": (["reproduce", "--seeds", "three"], "Invalid value for '--seeds'"),
    "missing-value": (["train", "--out"], "--out"),
    "extra-argument": (["tasks", "all"], "all"),
}
OUTLESS = {"unknown-command", "missing-value", "extra-argument"}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_leaves_nothing_behind(toeplens: Toeplens, tmp_path: Path, case: str):
    arguments, message = REFUSED[case]
    if case not in OUTLESS:
        arguments = [*arguments, "--json", "--out", str(tmp_path / "out")]
    assert message in toeplens(*arguments).refusal()
    assert not [path for path in files(tmp_path) if not path.endswith((".lock", "spec.json"))]


@pytest.mark.parametrize("command", ["train", "ablate", "report", "claims", "reproduce"])
def test_a_missing_argument_is_named(toeplens: Toeplens, command: str):
    assert re.search("Missing (argument|option) '(--out|run|directory)'", toeplens(command).refusal())


@pytest.mark.heavy
def test_a_bad_input_in_a_process_of_its_own(tmp_path: Path):
    answer = in_a_process("train", "--encoding", "rop", "--out", tmp_path / "out")
    assert len(answer.err.splitlines()) == 1
    assert "did you mean 'rope'" in answer.refusal()
    assert list(tmp_path.iterdir()) == []


def test_out_that_is_a_file_is_refused(toeplens: Toeplens, tmp_path: Path):
    out = tmp_path / "thesis.txt"
    out.write_text("mine")
    for place in (out, out / "below"):
        for command in (["train", *TINY], ["reproduce", "--scale", "smoke"]):
            refusal = toeplens(*command, "--out", place).refusal()
            assert "(or lies under) a file; a directory is needed" in refusal
    assert files(tmp_path) == {"thesis.txt": b"mine"}


def test_a_directory_with_other_files_is_refused_and_left_alone(toeplens: Toeplens, tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("mine")
    before = files(tmp_path)
    assert "not a study's" in toeplens("reproduce", "--scale", "smoke", "--out", tmp_path).refusal()
    for command in (["ablate"], ["report"], ["claims"]):
        toeplens(*command, tmp_path).refusal()
    assert files(tmp_path) == before


SPECS = {"missing": None, "text": "epochs: 3", "list": "[]", "empty": "", "number": "3", "not-utf8": "\udcff"}


@pytest.mark.parametrize("kind", SPECS)
def test_a_spec_that_is_none_is_refused(toeplens: Toeplens, tmp_path: Path, kind: str):
    spec, content = tmp_path / "spec.json", SPECS[kind]
    if content is not None:
        spec.write_bytes(content.encode(errors="surrogateescape"))
    assert str(spec) in toeplens("train", spec, "--out", tmp_path / "out").refusal()
    assert not (tmp_path / "out").exists()


def test_a_directory_is_no_spec(toeplens: Toeplens, tmp_path: Path):
    assert "cannot be read" in toeplens("train", tmp_path, "--out", tmp_path / "out").refusal()


# ---- damaged and unfinished runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ablate", "decompose", "report", "claims"])
@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_what_is_no_run_and_no_study_is_refused(toeplens: Toeplens, tmp_path: Path, command: str, kind: str):
    place = tmp_path / "place"
    if kind == "empty":
        place.mkdir()
    if kind == "file":
        place.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert str(place) in toeplens(command, place, "--json").refusal()
    assert sorted(tmp_path.rglob("*")) == before


def test_longer_texts(toeplens: Toeplens, run: Run):
    length = run.spec.build_task().length
    asked = ("extrapolate", run.directory, "--length", length, "--length", 2 * length, "--examples", "20")
    rows = toeplens(*asked, "--json").json()["rows"]
    assert [(row["length"], row["examples"]) for row in rows] == [(length, 20), (2 * length, 20)]
    shown = toeplens(*asked).out
    assert "Longer texts than" in shown
    assert f"{100 * rows[1]['accuracy']:.1f}" in shown
    assert "lengths: 0 was given" in toeplens("extrapolate", run.directory, "--length", "0").refusal()


DAMAGE = [
    ("spec.json", b"{"),
    ("spec.json", b"[]"),
    ("spec.json", b"{}"),
    ("result.json", b"{"),
    ("result.json", b'{"status": "fine"}'),
    ("metrics.jsonl", b"{"),
    ("metrics.jsonl", b"3\n"),
    ("model.safetensors", b""),
    ("model.safetensors", b"not weights"),
    ("model.safetensors", None),
]


@pytest.mark.parametrize(("name", "content"), DAMAGE)
def test_a_damaged_run_is_one_line(toeplens: Toeplens, run: Run, name: str, content: bytes | None):
    (run.directory / name).unlink() if content is None else (run.directory / name).write_bytes(content)
    assert name in toeplens("ablate", run.directory).refusal()
    assert not (run.directory / "ablation.json").exists()


def test_weights_of_another_run_are_refused(toeplens: Toeplens, run: Run, tmp_path: Path):
    other = toeplens("train", *TINY, *changes(model__d_ff=8), "--out", tmp_path / "other", "--json").json()
    weights = (Path(other["directory"]) / "model.safetensors").read_bytes()
    (run.directory / "model.safetensors").write_bytes(weights)
    assert "does not hold the weights of this spec" in toeplens("ablate", run.directory).refusal()


def test_what_cannot_be_ablated_is_refused(toeplens: Toeplens, run: Run):
    assert "examples: 0 was given" in toeplens("ablate", run.directory, "--examples", "0").refusal()
    assert (
        "split: there is no 'tset'; did you mean 'test'"
        in toeplens("ablate", run.directory, "--split", "tset").refusal()
    )
    assert "device: " in toeplens("ablate", run.directory, "--device", "tpu").refusal()
    assert not (run.directory / "ablation.json").exists()


def stopped(toeplens: Toeplens, out: Path) -> tuple[list[str | Path], Run]:
    """A command whose run is not finished, and its run."""
    command = ["train", *TINY, *changes(epochs=5), "--out", out]
    spec = Run.open(toeplens(*command, "--json").json()["directory"]).spec
    subprocess.run(["rm", "-r", out], check=True)
    return command, train(spec, out, deadline=0.0)


def test_an_unfinished_run_is_not_ablated(toeplens: Toeplens, tmp_path: Path):
    command, run = stopped(toeplens, tmp_path / "out")
    assert "is not finished; run the same command again" in toeplens("ablate", run.directory).refusal()
    assert toeplens(*command, "--json").json()["status"] == "complete"


@pytest.mark.parametrize("content", [b"", b"PK not a checkpoint"])
def test_a_damaged_checkpoint_is_one_line_that_says_what_to_do(toeplens: Toeplens, tmp_path: Path, content: bytes):
    command, run = stopped(toeplens, tmp_path / "out")
    checkpoint = run.directory / store.CHECKPOINT
    checkpoint.write_bytes(content)
    before = files(run.directory)
    refusal = toeplens(*command).refusal()
    assert str(checkpoint) in refusal
    assert "delete it to start this run over" in refusal
    assert files(run.directory) == before
    checkpoint.unlink()
    assert toeplens(*command, "--json").json()["status"] == "complete"


# ---- the machine's failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["train", *TINY], ["reproduce", "--scale", "smoke"]], ids=["train", "reproduce"])
def test_a_gpu_that_is_not_there(
    toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refusal = toeplens(*command, "--device", "cuda", "--out", tmp_path / "out").refusal(3)
    assert "no usable GPU" in refusal
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_is_not_there(toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    refusal = toeplens("train", *TINY, "--compile", "on", "--out", tmp_path / "out").refusal(3)
    assert "no C++ compiler" in refusal
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limited", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_files_that_may_not_grow_are_the_machines_failure_and_nothing_is_half_written(
    toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limited: bool
):
    """As on a full disk: the spec fits, the weights do not. Refused by the kernel, or (quicker) in its place."""
    command = ["train", *TINY, "--out", tmp_path]
    if limited:
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
        refusal = in_a_process(*command, prefix=limit).refusal(3, begun=True)
    else:
        replace_file = os.replace

        def full(temporary: Any, path: Any) -> None:
            if Path(temporary).stat().st_size > 4096:
                raise OSError(errno.ENOSPC, "No space left on device")
            replace_file(temporary, path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            refusal = toeplens(*command).refusal(3, begun=True)
    assert "model.safetensors" in refusal
    assert "nothing was left half-written" in refusal
    (directory,) = tmp_path.iterdir()
    assert not {"model.safetensors", "result.json"} & files(directory).keys()
    assert not [path for path in directory.iterdir() if path.suffix == ".tmp"]
    assert toeplens(*command, "--json").json()["status"] == "complete"


def test_standard_output_that_cannot_be_written(tmp_path: Path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*TOEPLENS, "tasks", "--json"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert Answer(done.returncode, "", done.stderr).refusal(3).startswith("error: standard output: no space left")


@pytest.mark.heavy
def test_a_reader_that_goes_away_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*TOEPLENS, "encodings", "--json"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.stderr == ""


# ---- the study ------------------------------------------------------------------------------------------------------


def test_a_run_is_taken_apart(toeplens: Toeplens, run: Run, tmp_path: Path):
    found = toeplens("decompose", run.directory, "--examples", "12", "--json").json()
    assert Path(found["page"]) == run.directory / "decomposition.html"
    assert Path(found["page"]).read_text().lstrip().lower().startswith(("<!doctype html>", "{%", "\n<!doctype"))
    assert len(found["layers"]) == run.spec.model.num_layers
    told = toeplens("decompose", run.directory, "--layer", "1", "--split", "ablate", "--out", tmp_path / "page.html")
    assert told.code == 0
    assert "L1 H1" in told.out
    assert "L2 H1" not in told.out
    assert (tmp_path / "page.html").exists()
    assert toeplens("decompose", run.directory, "--split", "input", "--json").json()["layers"][0]["layer"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layer", "0"], "layer: 0 was given; this model has layers 1 to"),
        (["--layer", "99"], "layer: 99 was given"),
        (["--split", "means"], "split: there is no 'means'; did you mean 'mean'"),
        (["--examples", "0"], "examples: 0 was given"),
        (["--split", "input", "--layer", "2"], "split: 'input' was given; layer 2 reads no bare input"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused(toeplens: Toeplens, run: Run, options: list[str], words: str):
    assert words in toeplens("decompose", run.directory, *options).refusal()


@pytest.fixture
def micro(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smoke scale made as small as can be, carried out in this process."""
    smoke = SCALES["smoke"]
    sizes = {n: replace(size, train_examples=32, test_examples=16, epochs=1) for n, size in smoke.tasks.items()}
    small = replace(
        smoke,
        model=smoke.model | {"d_model": 16, "d_ff": 16, "num_heads": 2},
        tasks=sizes,
        labels={DISTANCE: ("rope",), COUNT: ("nope",)},
        partial_heads={DISTANCE: (), COUNT: ()},
        ablation_examples=12,
    )
    monkeypatch.setitem(SCALES, "smoke", small)

    def here(jobs: list[Job], out: Path, limits: Limits, **_: Any) -> None:
        for job in jobs:
            carry_out(job, out, limits)

    monkeypatch.setattr(study, "run_local", here)


@pytest.mark.usefixtures("micro")
def test_a_study_its_claims_and_its_page(toeplens: Toeplens, tmp_path: Path):
    command = ["reproduce", "--scale", "smoke", "--protocol", "paper", "--out", tmp_path / "study"]
    state = toeplens(*command, "--json").json()
    assert (state["finished"], state["total"], state["share"]) == (2, 2, 1.0)
    assert Path(state["page"]).read_text().lstrip().lower().startswith("<!doctype html>")
    assert [claim["id"] for claim in state["claims"]] == [claim.id for claim in claims_of(["core"])]
    assert {row["label"] for row in state["table"]} == {"rope", "nope"}
    assert read_json(tmp_path / "study" / "claims.json")["claims"] == state["claims"]

    assert toeplens("claims", tmp_path / "study", "--json").json() == state["claims"]
    told = toeplens("claims", tmp_path / "study", "--evidence")
    assert told.code == 0
    assert "deposit-first-layer, paper: undecided" in told.out
    Path(state["page"]).unlink()
    assert toeplens("report", tmp_path / "study", "--json").json() == {"page": state["page"]}
    assert Path(state["page"]).exists()

    people = toeplens(*command)
    assert people.code == 0
    assert "page: " in people.out
    assert "2 models at scale smoke" in people.err
    larger = [*command, "--scale", "laptop"]
    assert "holds a study at scale 'smoke'" in toeplens(*larger).refusal()


SMALL_STUDY = """
title: Mine
claims: positional-symbolic
seeds: 1
examples: 8
measures: [toeplitz, extrapolation]
model: {d_model: 8, d_ff: 8, num_layers: 1, num_heads: 2}
training: {train_examples: 16, test_examples: 8, batch_size: 16, epochs: 1}
tasks:
  index: {options: {length: 6, words: 6}}
encodings:
  rope: {title: RoPE}
  nope:
"""


def test_a_study_of_ones_own(toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In this process; its table, its claims and its page."""

    def here(jobs: list[Job], out: Path, limits: Limits, **_: Any) -> None:
        for job in jobs:
            carry_out(job, out, limits)

    monkeypatch.setattr(import_module("toeplens.studies.grid.study"), "run_local", here)
    (tmp_path / "mine.yaml").write_text(SMALL_STUDY)
    out = tmp_path / "study"
    command = ["study", tmp_path / "mine.yaml", "--out", out, "--compile", "off"]
    state = toeplens(*command, "--json").json()
    assert (state["finished"], state["total"]) == (2, 2)
    assert [(row["task"], row["label"]) for row in state["table"]] == [("index", "rope"), ("index", "nope")]
    assert Path(state["page"]).read_text().lstrip().lower().startswith("<!doctype html>")
    people = toeplens(*command)
    assert "2 models (Mine)" in people.err
    assert "best guess" in people.out
    assert "exclusion" in people.out
    assert toeplens("claims", out, "--json").json() == state["claims"]
    assert toeplens("report", out, "--json").json()["page"] == state["page"]
    more = toeplens(*command, "--seeds", "2", "--time-budget", "0.0001").out
    assert "2 of 4 cells are finished" in more
    assert "spec: there is no 'mine'" in toeplens("study", "mine", "--out", out).refusal()
    assert "another study" in toeplens("reproduce", "--scale", "smoke", "--out", out).refusal()
    assert "another study" in toeplens("study", "canonical", "--out", _reproduction(tmp_path)).refusal()


def test_the_mathematics_is_a_study_too(toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stopped before it began, so that it is quick; tests/papers/mathematics/test_study.py carries it out."""
    monkeypatch.setattr("toeplens.cli.progress.limits_for", lambda budget, limits: replace(limits, deadline=0.0))
    command = ["theory", "--scale", "smoke", "--seeds", "1", "--time-budget", "1m", "--out", tmp_path / "theory"]
    state = toeplens(*command, "--json").json()
    assert (state["finished"], state["total"]) == (0, 5)
    assert {claim["verdict"] for claim in state["claims"]} == {"undecided"}
    assert toeplens("claims", tmp_path / "theory", "--json").json() == state["claims"]
    assert "verdict" in toeplens("claims", tmp_path / "theory").out
    page = Path(toeplens("report", tmp_path / "theory", "--json").json()["page"])
    assert "0 of 5 records" in page.read_text()
    assert "another study" in toeplens("theory", "--out", _reproduction(tmp_path)).refusal()
    assert "study at scale 'smoke'" in toeplens("theory", "--scale", "laptop", "--out", tmp_path / "theory").refusal()
    assert "seeds: 0 was given" in toeplens("theory", "--seeds", "0", "--out", tmp_path / "new").refusal()


def _reproduction(directory: Path) -> Path:
    (directory / "other").mkdir()
    about = {"scale": "smoke", "protocols": ["paper"], "seeds": 1, "seconds": 0.0, "environment": environment()}
    (directory / "other" / "study.json").write_text(json.dumps(about))
    return directory / "other"


@pytest.mark.usefixtures("micro")
@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"scale": "smoke"}'])
def test_a_damaged_study_is_one_line(toeplens: Toeplens, tmp_path: Path, content: str):
    (tmp_path / "study.json").write_text(content)
    for command in (["report", tmp_path], ["claims", tmp_path], ["reproduce", "--scale", "smoke", "--out", tmp_path]):
        assert "study" in toeplens(*command).refusal()
    assert files(tmp_path) == {"study.json": content.encode()}


def test_a_study_whose_time_is_up_says_how_far_it_is(
    toeplens: Toeplens, tmp_path: Path, micro: None, monkeypatch: pytest.MonkeyPatch
):
    command = ["reproduce", "--scale", "smoke", "--protocol", "released", "--time-budget", "9m", "--out", tmp_path]
    monkeypatch.setattr("toeplens.cli.progress.limits_for", lambda budget, limits: replace(limits, deadline=0.0))
    told = toeplens(*command)
    assert told.code == 0
    assert "0 of 2 cells are finished" in told.out
    assert "the same command goes on" in told.out
    assert toeplens(*command, "--json").json()["finished"] == 0


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("9m", 540), ("2h", 7200), ("5", 5), ("0.5m", 30), (" 7 s ", 7), (None, None)]
)
def test_times_are_read_as_people_write_them(text: str | None, seconds: float | None):
    assert read_seconds(text) == seconds


# ---- signals --------------------------------------------------------------------------------------------------------


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 90) -> None:
    give_up = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, "the command ended too early"
        assert time.monotonic() < give_up
        time.sleep(0.05)


both_signals = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.heavy)])
def test_a_signal_stops_training_at_a_checkpoint(toeplens: Toeplens, tmp_path: Path, number: signal.Signals):
    command = ["train", *TINY, *changes(epochs=100_000), "--out", str(tmp_path), "--json"]
    with subprocess.Popen([*TOEPLENS, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: bool(list(tmp_path.glob("*/metrics.jsonl"))), process)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(out)["status"] == "stopped"
    assert "Traceback" not in err
    (run,) = map(Run.open, tmp_path.iterdir())
    assert run.status == "stopped"
    assert run.step > 0


def group_signalled(
    number: signal.Signals, command: list[str], ready: Callable[[], bool]
) -> tuple[int, str, str, float]:
    """Ctrl-C as a terminal sends it, termination as `timeout` and schedulers do: to the command and all its workers."""
    process = subprocess.Popen(
        [*TOEPLENS, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        wait_until(ready, process)
        os.killpg(process.pid, number)
        began = time.monotonic()
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err, time.monotonic() - began


@pytest.mark.heavy
@both_signals
def test_a_signal_stops_a_study_cleanly_and_the_same_command_completes_it(tmp_path: Path, number: signal.Signals):
    command = ["reproduce", "--scale", "smoke", "--out", str(tmp_path / "study"), "--json"]
    runs = tmp_path / "study" / "runs"
    code, out, err, seconds = group_signalled(number, command, lambda: len(list(runs.glob("*/metrics.jsonl"))) >= 3)
    assert code == 130
    assert seconds < 30
    assert "Traceback" not in err
    state = json.loads(out)
    assert 0 < state["finished"] < state["total"]
    unfinished = 0
    for directory in runs.iterdir():
        run = Run.open(directory)
        if run.status == "stopped":
            assert store.load_checkpoint(directory, run.spec) is not None
            unfinished += 1
    assert unfinished <= 2  # no more than there are workers
    done = in_a_process(*command, timeout=600).json()
    assert done["finished"] == done["total"] == state["total"]
    assert done["share"] == 1.0


@pytest.mark.heavy
@both_signals
def test_a_signal_while_the_workers_start_is_as_clean(tmp_path: Path, number: signal.Signals):
    command = ["reproduce", "--scale", "smoke", "--out", str(tmp_path / "study"), "--json"]
    code, out, err, seconds = group_signalled(number, command, (tmp_path / "study" / "runs").exists)
    assert code == 130
    assert seconds < 30
    assert "Traceback" not in err
    if out:  # else the workers took so long to start that the command was left before they had heard
        assert json.loads(out)["finished"] == 0
    else:
        assert err.splitlines()[-1] == "error: stopped; what was finished is kept, and the same command goes on."


def pieces(command: list[str], budget: float, study_directory: Path) -> list[int]:
    """All training steps done after each of two calls with a time budget, which they keep."""
    done = [0]
    for _ in range(2):
        began = time.monotonic()
        answer = in_a_process(*command, "--time-budget", f"{budget:g}s", timeout=budget + 240)
        took = time.monotonic() - began
        assert answer.code == 0
        assert "the same command goes on" in answer.out
        steps = 0
        for directory in (study_directory / "runs").iterdir():
            run = Run.open(directory)
            steps += run.step
            assert run.status != "stopped" or read_json(directory / "progress.json")["step"] == run.step
            assert run.status != "stopped" or store.load_checkpoint(directory, run.spec) is not None
        done.append(steps)
        # a slow machine is late by the one step that has to be done, or nothing would ever be
        assert took < budget + 5 or done[-1] - done[-2] == 1
    return done


@pytest.mark.heavy
def test_the_paper_scale_goes_on_in_pieces_within_their_time(tmp_path: Path):
    command = ["reproduce", "--scale", "paper", "--protocol", "paper", "--workers", "1", "--out", str(tmp_path)]
    done = pieces(command, 40, tmp_path)
    assert 0 < done[1] < done[2]
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.heavy
def test_the_laptop_scale_goes_on_in_pieces_within_their_time(tmp_path: Path):
    done = pieces(["reproduce", "--scale", "laptop", "--seeds", "3", "--out", str(tmp_path)], 25, tmp_path)
    assert 0 < done[1] < done[2]
