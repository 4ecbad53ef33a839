"""A run's files with a field missing or wrong are refused in one sentence; what divergence leaves is no figure."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests import builders
from tests.builders import After, refusal
from torch import nn

from toeplens.training import Run, RunSpec, loop, train
from toeplens.training import run as store
from toeplens.training.records import Epoch, checkpoint_fault


def tiny(**changes: Any) -> RunSpec:
    return builders.tiny(model={"num_layers": 1, "dropout": 0.0}, **changes)


class Spectator:
    """Sees nothing but the step."""

    name = "steps"

    def moments(self, total_steps: int) -> list[int]:
        return [0, 1, total_steps]

    def look(self, model: Any, step: int) -> dict[str, Any]:
        return {"twice": 2 * step}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny(), tmp_path_factory.mktemp("trained"), watcher=Spectator())


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> Run:
    """A trained run of one's own."""
    shutil.copytree(trained.directory, tmp_path / trained.spec.name)
    return Run.open(tmp_path / trained.spec.name)


# ---- damaged fields -----------------------------------------------------------------------------------------------

WRONG = ("x", None, True, -1, [], {}, "[" * 100_000, "1" * 5000, "1e999", "NaN")  # the long ones as they stand


def damaged(row: dict[str, Any], allowed: dict[str, tuple[Any, ...]]) -> list[tuple[str, str]]:
    """JSON of ``row`` without each field, and with each wrong value in it but those ``allowed`` there; the field."""
    texts = []
    for field in row:
        if field not in Epoch.LATER:
            texts.append((field, json.dumps({name: value for name, value in row.items() if name != field})))
        for wrong in WRONG:
            if wrong not in allowed.get(field, ()) or wrong is True:
                raw = isinstance(wrong, str) and wrong != "x"
                text = json.dumps({**row, field: "PLACE"}).replace('"PLACE"', wrong if raw else json.dumps(wrong))
                texts.append((field, text))
    return texts


SPLITS = ("train", "test", "fit")
NULLS = {f"{split}_{figure}": (None,) for split in SPLITS for figure in ("loss", "accuracy")}
NULLS |= {f"{split}_loss": (None, -1) for split in SPLITS}


def test_a_damaged_field_of_a_result_is_named(run: Run):
    cases = damaged(run.result, NULLS)
    assert len(cases) > 70
    for field, text in [*cases, ("test_accuracy", json.dumps({**run.result, "test_accuracy": 1e300}))]:
        (run.directory / "result.json").write_text(text)
        message = refusal(lambda: Run.open(run.directory))
        assert message.startswith(f"{run.directory / 'result.json'} is damaged: ")
        assert field in message or "JSON" in message or " holds " in message or "stand in one another" in message
    (run.directory / "result.json").write_text("{}")
    assert "train_loss: it is missing" in refusal(lambda: Run.open(run.directory))


@pytest.mark.parametrize("name", ["metrics.jsonl", "watched.jsonl"])
def test_a_damaged_field_of_a_row_is_named(run: Run, name: str):
    first, second = (run.directory / name).read_text().splitlines()[:2]
    watched = name == "watched.jsonl"
    for field, text in damaged(json.loads(second), {"twice": WRONG} if watched else NULLS):
        if field == "twice" and len(text) < 1000 and "1e999" not in text and "NaN" not in text:
            continue  # what a watcher says is its own affair
        (run.directory / name).write_text(f"{first}\n{text}\n")
        message = refusal(lambda: Run.open(run.directory).watched)
        assert message.startswith(str(run.directory / name))
        assert f"1.{field}" in message or "line 2" in message


def test_progress_is_a_number_of_steps_of_this_run(tmp_path: Path):
    run = train(tiny(), tmp_path, should_stop=After(2))
    assert run.step == 2
    texts = ["", "[]", "{}", '{"step": 1', '{"step": "many"}', '{"step": true}', '{"step": -1}', '{"step": 7}']
    for text in (*texts, '{"of": 6}', '{"step": 1.0}', "[" * 100_000):
        (run.directory / "progress.json").write_text(text)
        assert "progress.json is damaged" in refusal(lambda: run.step)


def test_a_run_without_the_fields_of_later_versions_is_read(run: Run):
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    later = [{**row, "later": [row]} for row in rows]
    store.write_rows(run.directory / "metrics.jsonl", later)
    assert Run.open(run.directory).metrics == later


@pytest.mark.parametrize("units", [4, 6, None])
@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json"])
def test_what_is_said_of_damaged_figures_helps(tmp_path: Path, trained: Run, name: str, units: int | None):
    run = train(tiny(), tmp_path, should_stop=None if units is None else After(units))
    (run.directory / name).write_text("{")
    message = refusal(lambda: Run.open(run.directory))
    assert message.endswith(" and train with the same spec and directory to make them again.")
    for word in message.split("; delete ")[1].split(" and ")[:-2]:
        Path(word).unlink()
    again = train(tiny(), tmp_path)
    assert [again.result[key] for key in NULLS] == [trained.result[key] for key in NULLS]
    assert [row["epoch"] for row in again.metrics] == [1, 2]


# ---- checkpoints --------------------------------------------------------------------------------------------------


GONE = object()
FINE = {
    "by": {str},
    "train_loss": {int},
    "test_loss": {int},
    "fit_loss": {int},
    "rows": {tuple},
}  # rows of another length: see below


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in ``content``, the first of a list alone."""
    inner = content.items() if isinstance(content, dict) else list(enumerate(content))[:1]
    found = [(*path, key) for key, _ in inner]
    for key, value in inner:
        if isinstance(value, (dict, list)):
            found += places(value, (*path, key))
    return found


def test_a_checkpoint_with_a_field_missing_or_of_another_type_is_refused(tmp_path: Path):
    run = train(tiny(), tmp_path, should_stop=After(13), watcher=Spectator())  # one batch of the test set is behind it
    whole = store.load_checkpoint(run.directory, run.spec)
    assert whole is not None
    assert whole["tested"] == 16
    free = {
        ("format",),
        ("run",),
        ("watched",),
        ("cuda_rng",),
        ("fit_sums",),
        ("average",),
        ("optimizer", "param_groups", 0, "decoupled_weight_decay"),
    }
    free |= {("watched", "rows", 0), ("watched", "rows", 0, "twice")}
    with torch.random.fork_rng(devices=[]):
        model = loop.initial_model(run.spec)
    own = {name: (tensor.shape, tensor.dtype) for name, tensor in store.own_state(model).items()}
    parameters = [parameter.shape for parameter in model.parameters()]
    assert checkpoint_fault(whole, run.spec, own, parameters) is None
    alike = [place for place in places(whole) if place[:2] == ("optimizer", "state") and place[2:3] > (0,)]
    cases = [place for place in places(whole) if place not in free and place not in alike]
    cases = [place for place in cases if place[0] != "history"]  # see test_history.py
    assert len(cases) > 60
    for place in cases:
        *parents, last = place
        for wrong in (GONE, "x", -1, math.nan, torch.zeros(7), ()):
            if type(wrong) in FINE.get(last, ()) or (wrong is GONE and last in Epoch.LATER):
                continue
            state = copy.deepcopy(whole)
            inner = state
            for key in parents:
                inner = inner[key]
            if wrong is GONE:
                inner.pop(last)
            else:
                inner[last] = wrong
            fault = checkpoint_fault(state, run.spec, own, parameters)
            assert fault, (place, wrong)
            assert "\n" not in fault


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("step", 10**9),
        ("step", 2),
        ("step", 6),
        ("seconds", math.inf),
        ("tested", 40),
        ("tested", 3),
        ("rows", [{}]),
        ("rng", torch.zeros(5056, dtype=torch.uint8)),
        ("cuda_rng", torch.zeros(16)),
        ("sums", torch.zeros(3)),
        ("model", {}),
        ("optimizer", "x"),
        ("scheduler", {"last_epoch": 1}),
    ],
)
def test_a_checkpoint_whose_fields_do_not_go_together_is_refused(tmp_path: Path, field: str, wrong: Any):
    run = train(tiny(), tmp_path, should_stop=After(4))
    state = store.load_checkpoint(run.directory, run.spec)
    store.save_checkpoint(run.directory, {**(state or {}), field: wrong})
    message = refusal(lambda: train(run.spec, tmp_path))
    assert message.startswith(f"checkpoint: {run.directory / 'checkpoint.pt'} is damaged (")
    assert message.endswith("; delete it to start this run over.")


# ---- what diverged ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["train", "test"])
def test_one_loss_that_is_not_finite_is_divergence_and_its_figures_are_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
):
    whole = loop.Session._end_evaluation

    def end(session: Any) -> None:
        (session.sums if side == "train" else session.test_sums)[0] = math.nan
        whole(session)

    monkeypatch.setattr(loop.Session, "_end_evaluation", end)
    run = train(tiny(), tmp_path)
    assert run.status == run.result["status"] == "diverged"
    for split in ("train", "test"):
        for record in (run.result, run.metrics[-1]):
            assert (record[f"{split}_loss"] is None) == (record[f"{split}_accuracy"] is None) == (split == side)


def test_a_run_whose_weights_are_nan_says_nothing_of_its_accuracy(tmp_path: Path):
    run = train(tiny(lr=1e30), tmp_path)
    assert run.status == "diverged"
    assert (run.result["test_accuracy"], run.metrics[-1]["test_accuracy"]) == (None, None)
    assert refusal(run.model) == f"run: {run.directory} diverged; there are no finite weights to look at."


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_no_model(run: Run, value: float):
    path = run.directory / store.WEIGHTS
    weights = safetensors.torch.load_file(path)
    weights["readout.weight"][3, 2] = value
    safetensors.torch.save_file(weights, path)
    assert refusal(run.model).startswith(f"run: {path} is damaged: readout.weight is not finite; delete ")


# ---- figures and weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [16, 40, 10**9])
def test_tokens_are_those_of_the_examples_whatever_the_batches(
    tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
):
    ticks = iter(range(10**6))
    clock = type("Clock", (), {"monotonic": lambda: float(next(ticks)), "time": lambda: 0.0})
    monkeypatch.setattr(loop, "time", clock)
    result = train(tiny(batch_size=batch), tmp_path).result
    assert result["tokens_per_second"] == round(2 * 40 * 8 / result["seconds"])


def test_every_tensor_of_a_state_is_kept_once_and_empty_ones_too():
    model = nn.ParameterDict({"a": torch.zeros(0), "b": torch.zeros(0, 3), "c": torch.ones(2)})
    model["d"] = model["c"]
    assert {name: tuple(tensor.shape) for name, tensor in store.own_state(model).items()} == {
        "a": (0,),
        "b": (0, 3),
        "c": (2,),
    }
