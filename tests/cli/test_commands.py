"""What there is; runs trained, silenced, taken apart, tested on longer texts: JSON for machines, tables for people."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from tests.builders import files, tiny
from tests.cli.command import TINY, Toeplens, changes, in_a_process

from toeplens import cli, encodings, tasks
from toeplens.engine import Asked, examples_of, read_ablation
from toeplens.lens import ablate_heads
from toeplens.sources import DecoderSource
from toeplens.training import Run, train

# ---- what there is --------------------------------------------------------------------------------------------------


def test_encodings_as_json(toeplens: Toeplens):
    answer = toeplens("encodings", "--json")
    assert answer.err == ""
    rows = answer.json()
    assert [row["name"] for row in rows] == list(encodings.names())
    facts = {
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
    for row in rows:
        assert row.keys() == facts
        assert list(row["options"]) == list(encodings.options(row["name"]))
    scales = {"t5": "1", "tupe": "1/sqrt(2d)", "deberta": "1/sqrt(3d)"}
    assert {row["name"]: row["scale"] for row in rows} == dict.fromkeys(encodings.names(), "1/sqrt(d)") | scales


def test_tasks_as_json(toeplens: Toeplens):
    rows = toeplens("tasks", "--json").json()
    assert [row["name"] for row in rows] == list(tasks.names())
    for row in rows:
        assert row["chance"] == tasks.build(row["name"]).chance()
        assert list(row["options"]) == list(tasks.options(row["name"]))
        assert row["about"]


@pytest.mark.heavy
def test_a_card(tmp_path: Path):
    """In a process of its own: what checks shapes in the tests cannot be compiled."""
    page = tmp_path / "rope.html"
    command = ("card", "rope", "--set", "base=500", "--length", "128", "--out", str(page), "--json")
    content = in_a_process(*command).json()
    assert content["page"] == str(page)
    (card,) = content["cards"]
    assert card["options"]["base"] == 500
    assert card["conforms"], card["findings"]
    assert "rope" in page.read_text()


COMMANDS = ["reproduce", "study", "theory", "audit", "compare", "train", "ablate", "decompose", "extrapolate"]
COMMANDS += ["probe", "pretrained", "report", "claims", "figures", "tables", "cite", "encodings", "card", "tasks"]


def test_every_command_is_named_and_helps(toeplens: Toeplens, monkeypatch: pytest.MonkeyPatch):
    """Each on one screen of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    without = toeplens()
    assert (without.code, without.err) == (2, "")
    assert sorted(COMMANDS) == sorted(str(command.name) for command in cli.app.registered_commands)
    assert [name for name in COMMANDS if name not in without.out] == []
    for command in COMMANDS:
        answer = toeplens(command, "--help")
        assert (answer.code, answer.err) == (0, "")
        assert f"toeplens {command}" in answer.out
        assert "--json" in answer.out
        assert len(answer.out.splitlines()) <= (60 if command in ("audit", "study", "reproduce") else 40)


@pytest.mark.parametrize("command", cli.app.registered_commands, ids=lambda command: command.name)
def test_help_names_defaults_in_short_sentences(command: typer.models.CommandInfo):
    assert command.callback is not None
    texts = [command.help or ""]
    for parameter in inspect.signature(command.callback, eval_str=True).parameters.values():
        about = default = parameter.default
        if isinstance(default, typer.models.ParameterInfo):
            default = about.default
        else:
            about = parameter.annotation.__metadata__[0]
        texts.append(about.help)
        if default not in (inspect.Parameter.empty, ..., None, False, True):
            assert f"(default: {default})" in about.help, parameter.name
    for sentence in re.split(r"(?<=[.:;])\s", " ".join(texts)):
        assert len(sentence.split()) <= 20, sentence


# ---- train, then ablate ---------------------------------------------------------------------------------------------


def test_train_then_ablate(toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """For machines and for people; the same command again has nothing to do."""
    command = ["train", *TINY, "--watch", "--out", tmp_path]
    told = toeplens(*command)
    (begun,) = told.err.splitlines()
    assert begun.startswith("trigger-distance, rope, paper protocol on cpu")
    assert begun.endswith(": 768 training tokens, at least 1 MB of memory")
    before = files(tmp_path)
    monkeypatch.setattr("toeplens.training.loop.Session", None)
    trained = toeplens(*command, "--json").json()
    assert files(tmp_path) == before
    run = Run.open(trained["directory"])
    assert f"complete, test accuracy {run.result['test_accuracy']:.4f}" in told.out
    assert f"run: {run.directory}" in told.out
    assert [row["step"] for row in trained["watched"]] == [row["step"] for row in run.watched]
    assert len(run.watched) > 1
    assert trained["status"] == run.status == "complete"
    assert trained["test_accuracy"] == run.result["test_accuracy"]
    assert trained["metrics"] == run.metrics
    assert (run.spec.epochs, run.spec.model.d_model, run.spec.model.num_heads) == (2, 16, 2)
    found = toeplens("ablate", run.directory, "--examples", "10", "--sets", "--json").json()
    assert len(found["sets"]["greedy"]) == run.spec.model.num_layers * run.spec.model.num_heads + 1
    ablation = read_ablation(run.directory, Asked(10))
    assert np.array_equal(found["drops"], ablation.drops)
    assert (found["examples"], found["metric"]) == (10, "accuracy")
    assert [layer["kind"] for layer in found["deposit"]]
    assert len(found["deposit"]) == run.spec.model.num_layers
    both = toeplens("ablate", run.directory, "--examples", "20", "--split", "train+test")
    for word in ("on 20 examples", "head 2", "effective heads", "single-head:"):
        assert word in both.out


@pytest.mark.parametrize(
    ("options", "choices"),
    [
        (("--metric", "kl", "--intervention", "position"), {"metric": "kl", "intervention": "position"}),
        (("--metric", "loss", "--method", "attribution"), {"metric": "loss", "method": "attribution"}),
    ],
)
def test_what_is_asked_of_an_ablation_is_what_is_done(
    options: tuple[str, ...], choices: dict[str, Any], toeplens: Toeplens, tmp_path: Path
):
    run = train(tiny(epochs=2), tmp_path)
    found = toeplens("ablate", run.directory, "--examples", "10", *options, "--json").json()
    data = examples_of(run.spec, 10)
    batch = (torch.from_numpy(data.tokens), torch.from_numpy(data.labels), torch.from_numpy(data.lengths))
    expected = ablate_heads(DecoderSource(run.model()), [batch], **choices)
    np.testing.assert_allclose(found["drops"], expected.drops, atol=1e-5)
    assert np.abs(expected.drops).max() > 1e-4
    assert {name: found[name] for name in choices} == choices


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
    contradictions = {"encoding": "nope", "protocol": "released", "task": "zzz", "seed": 7, "scale": "smoke"}
    for option, wrong in contradictions.items():
        message = toeplens("train", spec, f"--{option}", str(wrong), "--out", tmp_path / "new").refusal()
        assert f"got {wrong!r}" in message
        assert ("its own sizes" if option == "scale" else "change it with --set") in message
        assert not (tmp_path / "new").exists()
    same = ["--encoding", run.spec.model.encoding, "--task", run.spec.task, "--seed", str(run.spec.seed)]
    assert toeplens("train", spec, *same, "--out", run.directory.parent, "--json").json()["status"] == "complete"
    other = ["--encoding", "alibi", "--set", "model.encoding=alibi", "--set", "epochs=1"]
    assert len(toeplens("train", spec, *other, "--out", tmp_path / "new", "--json").json()["metrics"]) == 1


def test_training_a_run_whose_weights_are_gone_says_how_to_go_on(toeplens: Toeplens, run: Run):
    weights = run.directory / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    again = ["train", run.directory / "spec.json", "--out", run.directory.parent]
    message = toeplens(*again).refusal()
    assert f"delete {run.directory / 'result.json'} and train with the same spec and directory" in message
    (run.directory / "result.json").unlink()
    assert "complete" in toeplens(*again).out
    assert weights.read_bytes() == whole


def test_a_run_that_diverged_has_no_tables(toeplens: Toeplens, tmp_path: Path):
    run = toeplens("train", *TINY, *changes(lr=1e300), "--out", tmp_path, "--json").json()
    assert (run["status"], run["test_accuracy"]) == ("diverged", None)
    for command in ("ablate", "extrapolate"):
        assert "diverged, so it has no finite weights" in toeplens(command, run["directory"]).refusal()


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
        assert toeplens(*command).json()["status"] == "stopped"
        (run,) = map(Run.open, tmp_path.iterdir())
        steps.append(run.step)
    assert 0 < steps[0] < steps[1]


def test_longer_texts(toeplens: Toeplens, run: Run):
    length = run.spec.build_task().length
    asked = ("extrapolate", run.directory, "--length", length, "--length", 2 * length, "--examples", "20")
    rows = toeplens(*asked, "--json").json()["rows"]
    assert [(row["length"], row["examples"]) for row in rows] == [(length, 20), (2 * length, 20)]
    shown = toeplens(*asked).out
    assert "Accuracy beyond the training length of" in shown
    assert f"{100 * rows[1]['accuracy']:.1f}" in shown


def test_a_run_is_taken_apart(toeplens: Toeplens, run: Run, tmp_path: Path):
    found = toeplens("decompose", run.directory, "--examples", "12", "--json").json()
    assert Path(found["page"]) == run.directory / "decomposition.html"
    assert Path(found["page"]).read_text().lstrip().lower().startswith(("<!doctype html>", "{%", "\n<!doctype"))
    assert len(found["layers"]) == run.spec.model.num_layers
    assert 0 <= found["origins"]["error"] < 1e-9
    assert {len(layer[name]) for layer in found["layers"] for name in ("decays", "ends")} == {run.spec.model.num_heads}
    told = toeplens("decompose", run.directory, "--layer", "1", "--split", "ablate", "--out", tmp_path / "page.html")
    assert told.code == 0
    assert "L1 H1" in told.out
    assert "L2 H1" not in told.out
    assert all(heading in told.out for heading in ("half distance", "eigenvalues"))
    assert "the parts sum to the logits within" in told.out
    assert (tmp_path / "page.html").exists()
    assert toeplens("decompose", run.directory, "--split", "input", "--json").json()["layers"][0]["layer"] == 0
