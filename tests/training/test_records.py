"""A run's damaged files are refused in one sentence; what divergence leaves is no figure."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests import builders
from tests.builders import CallbackProbe, StopAfter, refusal_message, results_of
from torch import nn

from toeplens.training import Run, RunSpec, loop, train
from toeplens.training import run as store


def tiny(**changes: Any) -> RunSpec:
    return builders.tiny(model={"num_layers": 1, "dropout": 0.0}, **changes)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny(), tmp_path_factory.mktemp("trained"), probe=CallbackProbe([0, 1, 6]))


@pytest.fixture
def run(trained_run: Run, tmp_path: Path) -> Run:
    """A trained run of one's own."""
    shutil.copytree(trained_run.directory, tmp_path / trained_run.spec.name)
    return Run.open(tmp_path / trained_run.spec.name)


@pytest.mark.parametrize(
    ("name", "field", "wrong"),
    [
        ("result.json", "status", "fine"),
        ("result.json", "test_accuracy", 99),
        ("metrics.jsonl", "step", None),
        ("metrics.jsonl", "test_loss", "x"),
        ("watched.jsonl", "step", -1),
    ],
)
def test_a_damaged_field_is_named(run: Run, name: str, field: str, wrong: Any):
    path = run.directory / name
    first, *rest = path.read_text().splitlines() if name.endswith("l") else [path.read_text()]
    intact = json.loads(first)
    for row in ({**intact, field: wrong}, {key: value for key, value in intact.items() if key != field}):
        path.write_text("\n".join([json.dumps(row), *rest]))
        message = refusal_message(lambda: Run.open(run.directory).probe_rows)
        assert message.startswith(f"{path} is damaged: ")
        assert field in message


def test_progress_must_be_a_step_of_this_run(tmp_path: Path):
    run = train(tiny(), tmp_path, should_stop=StopAfter(2))
    assert run.step == 2
    for text in ("", "[]", '{"step": "many"}', '{"step": true}', '{"step": -1}', '{"step": 7}', '{"of": 6}'):
        (run.directory / "progress.json").write_text(text)
        assert "progress.json is damaged" in refusal_message(lambda: run.step)


@pytest.mark.parametrize("part", ["model", "average"])
def test_a_checkpoint_of_other_shapes_is_refused(tmp_path: Path, part: str):
    """One weight is of another size, to which torch would broadcast it."""
    spec = tiny(average=0.9)
    run = train(spec, tmp_path, should_stop=StopAfter(4))
    state = store.load_checkpoint(run.directory, spec)
    assert state is not None
    state[part]["readout.weight"] = state[part]["readout.weight"][:1]
    store.save_checkpoint(run.directory, state)
    assert "was written by another version. Delete it" in refusal_message(lambda: train(spec, tmp_path))


def test_a_run_without_later_fields_is_read(run: Run):
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    later = [{**row, "later": [row]} for row in rows]
    store.write_rows(run.directory / "metrics.jsonl", later)
    assert Run.open(run.directory).metrics == later


# ---- missing or cut short --------------------------------------------------------------------------------------------

SAME, REFUSED = "same", "refused"
# what becomes of a run that is resumed with such a file: (missing, cut short)
FINISHED = {
    "environment.json": (SAME, SAME),
    "metrics.jsonl": (REFUSED, REFUSED),
    "model.safetensors": (REFUSED, REFUSED),
    "result.json": (SAME, REFUSED),
    "spec.json": (REFUSED, REFUSED),
}
STOPPED = {
    "checkpoint.pt": (SAME, REFUSED),
    "environment.json": (SAME, SAME),
    "metrics.jsonl": (SAME, SAME),
    "progress.json": (SAME, SAME),
    "spec.json": (REFUSED, REFUSED),
}
CASES = [
    (state, name, how, becomes)
    for state, table in (("finished", FINISHED), ("stopped", STOPPED))
    for name, row in table.items()
    for how, becomes in zip(("missing", "short"), row, strict=True)
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    out = tmp_path_factory.mktemp("runs")
    stopped = train(builders.tiny(), out / "stopped", should_stop=StopAfter(8))
    return {"finished": train(builders.tiny(), out / "finished"), "stopped": stopped}


@pytest.mark.parametrize(("state", "name", "how", "becomes"), CASES)
def test_a_file_lost_in_a_power_cut_is_recovered_or_refused(
    runs: dict[str, Run], tmp_path: Path, state: str, name: str, how: str, becomes: str
):
    directory = tmp_path / runs[state].directory.name
    shutil.copytree(runs[state].directory, directory)
    content = (directory / name).read_bytes()
    if how == "missing":
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(content[: len(content) // 2])
    if becomes == SAME:
        run = train(builders.tiny(), tmp_path)
    else:
        message = refusal_message(lambda: train(builders.tiny(), tmp_path).model())
        assert "elete " in message or "Choose " in message
        shutil.rmtree(directory) if name == "spec.json" else None
        for file_name in ("result.json", "checkpoint.pt"):  # as the sentence says
            if file_name in message:
                (directory / file_name).unlink()
        run = train(builders.tiny(), tmp_path)
    run.model()
    assert results_of(run) == results_of(runs["finished"])


@pytest.mark.parametrize("side", ["train", "test"])
def test_a_nonfinite_loss_is_divergence_with_null_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str):
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


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_nonfinite_weights_are_refused(run: Run, value: float):
    path = run.directory / store.WEIGHTS
    weights = safetensors.torch.load_file(path)
    weights["readout.weight"][3, 2] = value
    safetensors.torch.save_file(weights, path)
    assert refusal_message(run.model).startswith(f"run: {path} is damaged: readout.weight is not finite; delete ")
    safetensors.torch.save_file({"readout.weight": torch.zeros(2)}, path)
    assert refusal_message(run.model).startswith(f"run: {path} does not contain the weights of this spec; delete ")


@pytest.mark.parametrize("batch", [16, 10**9])
def test_token_counts_do_not_depend_on_the_batches(tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch):
    ticks = iter(range(10**6))
    clock = type("Clock", (), {"monotonic": lambda: float(next(ticks)), "time": lambda: 0.0})
    monkeypatch.setattr(loop, "time", clock)
    result = train(tiny(batch_size=batch), tmp_path).result
    assert result["tokens_per_second"] == round(2 * 40 * 8 / result["seconds"])


def test_each_tensor_of_a_state_is_saved_once_also_empty_ones():
    model = nn.ParameterDict({"a": torch.zeros(0), "b": torch.zeros(0, 3), "c": torch.ones(2)})
    model["d"] = model["c"]
    shapes = {name: tuple(tensor.shape) for name, tensor in store.unique_state(model).items()}
    assert shapes == {"a": (0,), "b": (0, 3), "c": (2,)}
