"""What there is; runs trained, silenced, taken apart, tested on longer texts: JSON for machines, tables for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from tests.builders import files_in
from tests.cli.command import TINY, Toeplens, command_in_process, set_options
from tests.report.grid.language_state import language_grid

from toeplens import cli, encodings, tasks
from toeplens.backends import DecoderSource
from toeplens.cli import console, tables
from toeplens.engine import ExampleRequest, examples_of, read_ablation
from toeplens.lens import ablate_heads
from toeplens.training import Run


def test_encodings_as_json(toeplens: Toeplens):
    answer = toeplens("encodings", "--json")
    assert answer.err == ""
    rows = answer.json()
    assert [row["name"] for row in rows] == list(encodings.names())
    facts = {"name", "coupling", "also_couples", "toeplitz", "data_dependent", "scale", "formula", "options"}
    for row in rows:
        assert row.keys() == facts | {"citation"}
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
def test_a_card_is_written(tmp_path: Path):
    """In a process of its own: what checks shapes in the tests cannot be compiled."""
    page = tmp_path / "rope.html"
    command = ("card", "rope", "--set", "base=500", "--length", "128", "--out", str(page), "--json")
    content = command_in_process(*command).json()
    assert content["page"] == str(page)
    (card,) = content["cards"]
    assert card["options"]["base"] == 500
    assert card["conforms"], card["findings"]
    assert "rope" in page.read_text()


def test_every_command_is_named_and_helps(toeplens: Toeplens):
    without = toeplens()
    assert (without.code, without.err) == (2, "")
    for command in (str(each.name) for each in cli.app.registered_commands):
        assert command in without.out
        answer = toeplens(command, "--help")
        assert (answer.code, answer.err) == (0, "")
        assert f"toeplens {command}" in answer.out
        assert "--json" in answer.out


def test_train_then_ablate(toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """For machines and for people; the same command again has nothing to do."""
    command = ["train", *TINY, "--watch", "--out", tmp_path]
    output = toeplens(*command)
    (begun,) = output.err.splitlines()
    assert begun.startswith("trigger-distance, rope, paper protocol on cpu")
    assert begun.endswith(": 768 training tokens, at least 1 MB of memory")
    before = files_in(tmp_path)
    monkeypatch.setattr("toeplens.training.loop.Session", None)
    trained = toeplens(*command, "--json").json()
    assert files_in(tmp_path) == before
    run = Run.open(trained["directory"])
    assert f"complete, test accuracy {run.result['test_accuracy']:.4f}" in output.out
    assert f"run: {run.directory}" in output.out
    assert [row["step"] for row in trained["probe_rows"]] == [row["step"] for row in run.probe_rows]
    assert len(run.probe_rows) > 1
    assert trained["status"] == run.status == "complete"
    assert trained["test_accuracy"] == run.result["test_accuracy"]
    assert trained["metrics"] == run.metrics
    assert (run.spec.epochs, run.spec.model.d_model, run.spec.model.num_heads) == (2, 16, 2)
    actual = toeplens("ablate", run.directory, "--examples", "10", "--sets", "--json").json()
    assert len(actual["sets"]["greedy"]) == run.spec.model.num_layers * run.spec.model.num_heads + 1
    ablation = read_ablation(run.directory, ExampleRequest(10))
    assert np.array_equal(actual["drops"], ablation.drops)
    assert (actual["examples"], actual["metric"]) == (10, "accuracy")
    assert len(actual["deposit"]) == run.spec.model.num_layers
    both = toeplens("ablate", run.directory, "--examples", "20", "--split", "train+test")
    assert "on 20 examples" in both.out


def test_ablation_options_are_applied(toeplens: Toeplens, run: Run):
    data = examples_of(run.spec, 10)
    batch = (torch.from_numpy(data.tokens), torch.from_numpy(data.labels), torch.from_numpy(data.lengths))
    for name, value, metric in (("intervention", "position", "kl"), ("method", "attribution", "loss")):
        choices: dict[str, Any] = {name: value, "metric": metric}
        options = [part for each, choice in choices.items() for part in (f"--{each}", choice)]
        actual = toeplens("ablate", run.directory, "--examples", "10", *options, "--json").json()
        expected = ablate_heads(DecoderSource(run.model()), [batch], **choices)
        np.testing.assert_allclose(actual["drops"], expected.drops, atol=1e-5)
        assert {each: actual[each] for each in choices} == choices


def test_a_recorded_scale_is_not_applied_to_another_encoding(toeplens: Toeplens, tmp_path: Path):
    def scale(*command: Any) -> float | None:
        trained = toeplens("train", *command, "--out", tmp_path / "runs", "--json").json()
        return Run.open(trained["directory"]).spec.model.attention_scale

    small = [*TINY, *set_options(epochs=1)]
    assert scale(*small, "--encoding", "t5") == 1.0
    recorded = tmp_path / "spec.json"
    recorded.write_text(next((tmp_path / "runs").rglob("spec.json")).read_text())
    assert scale(recorded, *set_options(model__encoding="alibi")) is None
    assert scale(recorded, *set_options(model__encoding="alibi", model__attention_scale=0.5)) == 0.5


def test_options_of_presets_are_refused_with_a_spec(toeplens: Toeplens, run: Run, tmp_path: Path):
    spec = run.directory / "spec.json"
    for option, value in {"encoding": "nope", "protocol": "paper", "task": "zzz", "seed": 7, "scale": "smoke"}.items():
        message = toeplens("train", spec, f"--{option}", value, "--out", tmp_path / "new").refusal()
        assert message == f"error: --{option} must not be set with {spec}. Use --set."
        assert not (tmp_path / "new").exists()
    assert toeplens("train", spec, "--out", run.directory.parent, "--json").json()["status"] == "complete"
    other = ["--set", "model.encoding=alibi", "--set", "epochs=1"]
    assert len(toeplens("train", spec, *other, "--out", tmp_path / "new", "--json").json()["metrics"]) == 1


def test_a_run_that_diverged_has_no_tables(toeplens: Toeplens, tmp_path: Path):
    run = toeplens("train", *TINY, *set_options(lr=1e300), "--out", tmp_path, "--json").json()
    assert (run["status"], run["test_accuracy"]) == ("diverged", None)
    for command in ("ablate", "decompose", "extrapolate"):
        assert "diverged, so it has no finite weights" in toeplens(command, run["directory"]).refusal()


def test_set_changes_fields_and_dependent_switches(toeplens: Toeplens, tmp_path: Path):
    asked = [
        *("--protocol", "released", "--encoding", "rope", "--task", "trigger-count", "--seed", "7"),
        *set_options(lr=0.01, model__encoding_options__base=500, precision="float32", task_options__num_triggers=5),
    ]
    trained = toeplens("train", *TINY, *asked, "--out", tmp_path, "--json").json()
    spec = Run.open(trained["directory"]).spec
    assert (spec.lr, spec.precision, spec.seed, spec.data_seed) == (0.01, "float32", 7, 7)
    assert spec.task_options["num_triggers"] == 5
    assert spec.model.encoding_options == {"base": 500}
    assert (spec.model.causal, spec.model.input_encoding) == (False, "sinusoidal")


def test_a_time_budget_stops_training_and_the_same_command_resumes(toeplens: Toeplens, tmp_path: Path):
    command = ["train", *TINY, *set_options(epochs=100_000), "--out", tmp_path, "--time-budget", "1s", "--json"]
    steps = []
    for _ in range(2):
        assert toeplens(*command).json()["status"] == "stopped"
        (run,) = map(Run.open, tmp_path.iterdir())
        steps.append(run.step)
    assert 0 < steps[0] < steps[1]


def test_accuracy_on_longer_sequences(toeplens: Toeplens, run: Run):
    length = run.spec.build_task().length
    command = ("extrapolate", run.directory, "--length", length, "--length", 2 * length, "--examples", "20")
    rows = toeplens(*command, "--json").json()["rows"]
    assert [(row["length"], row["examples"]) for row in rows] == [(length, 20), (2 * length, 20)]
    assert f"{100 * rows[1]['accuracy']:.1f}" in toeplens(*command).out


def test_a_run_is_decomposed(toeplens: Toeplens, run: Run, tmp_path: Path):
    actual = toeplens("decompose", run.directory, "--examples", "12", "--json").json()
    assert Path(actual["page"]) == run.directory / "decomposition.html"
    assert Path(actual["page"]).read_text().lstrip().lower().startswith("<!doctype html>")
    assert len(actual["layers"]) == run.spec.model.num_layers
    assert 0 <= actual["origins"]["error"] < 1e-9
    assert {len(layer[name]) for layer in actual["layers"] for name in ("decays", "ends")} == {run.spec.model.num_heads}
    result = toeplens("decompose", run.directory, "--layer", "1", "--split", "ablate", "--out", tmp_path / "page.html")
    assert result.code == 0
    assert "L1 H1" in result.out
    assert "L2 H1" not in result.out
    assert (tmp_path / "page.html").exists()
    assert toeplens("decompose", run.directory, "--split", "input", "--json").json()["layers"][0]["layer"] == 0


@pytest.fixture
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out, "_width", 80)


@pytest.mark.usefixtures("narrow_terminal")
@pytest.mark.parametrize("command", ["encodings", "tasks"])
def test_lists_have_one_line_per_entry_without_truncation(toeplens: Toeplens, command: str):
    names = (encodings if command == "encodings" else tasks).names()
    answers = [toeplens(command), toeplens(command, "--full")]
    assert [(answer.code, answer.err) for answer in answers] == [(0, "")] * 2
    short, full = (answer.out for answer in answers)
    lines = short.splitlines()
    assert [sum(f"│ {name} " in line for line in lines) for name in names] == [1] * len(names)
    assert max(map(cell_len, (*lines, *full.splitlines()))) <= 80
    assert "…" in short
    assert "…" not in full


@pytest.mark.usefixtures("narrow_terminal")
def test_columns_that_do_not_fit_go_to_another_table(capsys: pytest.CaptureFixture[str]):
    columns = ["task", *(f"encoding {n}" for n in range(12))]
    rows = [["a [bold]長い[/] name\x1b[2J", *(f"{n}.5" for n in range(12))]]
    console.print_table("Accuracy", columns, rows)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    lines = [line for line in printed.splitlines() if "│" in line]
    assert [line.split("│")[1].strip().partition(" name")[0] for line in lines] == ["a [bold]長い[/]"] * len(lines)
    assert [cell.strip() for line in lines for cell in line.split("│")[2:-1]] == rows[0][1:]
    assert max(map(cell_len, printed.splitlines())) <= 80
    console.print_table("Accuracy", columns[:3], [row[:3] for row in rows])
    assert capsys.readouterr().out.count("a [bold]") == 1


def test_language_models_report_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = language_grid(tmp_path)
    tables.print_study(state, tmp_path / "report.html", as_json=False)
    output = capsys.readouterr().out
    assert "1.655–1.661" in output
    assert "n-gram baselines by context length: 4.644 (context 0)" in output
    assert "accuracy" not in output
    tables.print_study(state, tmp_path / "report.html", as_json=True)
    (row, *_) = json.loads(capsys.readouterr().out)["language"]
    assert (row["label"], row["task"], row["bits"]) == ("fire", "language", pytest.approx(1.651, abs=1e-3))
