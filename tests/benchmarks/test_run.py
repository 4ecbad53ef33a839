"""The benchmark beside other programs: equal work is done, the same numbers are found, and what follows by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.builders import load_script
from torch import nn

from toeplens.model import Decoder
from toeplens.training.environment import Execution

CPU = torch.device("cpu")
ON_CPU = Execution(CPU, bf16=False, compiled=False, reason="a test")
PEERS = ["torch.nn.TransformerEncoder", "transformers Llama", "x-transformers"]


@pytest.fixture(scope="module")
def run() -> ModuleType:
    return load_script(Path(__file__).parents[2] / "benchmarks" / "run.py")


def row(name: str, seconds: list[float], work: str = "asked", ours: bool = False) -> dict[str, Any]:
    return {"name": name, "ours": ours, "work": work, "flops": 8e9, "seconds": seconds}


def test_speedups_follow_from_the_seconds(run: ModuleType):
    ours, every = row("ours", [1.0, 2.0, 4.0], ours=True), row("every", [2.0, 2.0, 4.0], "equal", True)
    trained = row("trained", [4.0, 4.0, 4.0], "trained", True)
    one, other = row("one", [3.0, 2.0, 6.0]), row("other", [2.5, 5.0, 3.0])
    contest = {"work": "paper: a model", "count": 1000, "timed": [ours, every, trained, one, other]}
    assert run.speed(contest, ours) == 500  # of the median, 2 seconds
    assert run.ratio(one, ours) == 1.5  # of 3, 1, 1.5
    assert run.ratio(other, ours) == 2.5  # of 2.5, 2.5, 0.75
    assert run.best_peer(contest) == one  # medians are alike: the first
    assert run.equal_work_row(contest) == every
    assert run.table_1_hours([contest]) == pytest.approx(80 * 100 * 70_000 * 120 / 250 / 3600)
    assert run.table_1_hours([contest | {"timed": [ours, one]}]) is None


def test_programs_alternate_and_warmup_rounds_are_excluded(run: ModuleType):
    order: list[str] = []
    actual = run.time_rounds({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, 4, 60)
    assert order == ["a", "b"] * 6
    assert [len(each) for each in actual.values()] == [4, 4]
    assert len(run.time_rounds({"a": lambda: None}, CPU, 9, 0.0)["a"]) == 3


@pytest.mark.heavy
@pytest.mark.parametrize("scale", ["laptop", "language"])
def test_models_have_equal_size_and_flops_are_counted(run: ModuleType, scale: str):
    pytest.importorskip("x_transformers")
    spec = run.spec_of(scale)
    shape, length = spec.model, spec.task_options["length"]
    rest = shape.num_layers * (4 * shape.d_model**2 + 2 * shape.d_model * shape.d_ff)
    per_token = shape.readout == "each"
    programs = run.programs_of(spec, ON_CPU)
    assert list(programs) == ["toeplens", *([] if per_token else ["toeplens, every position"]), *PEERS]
    every = rest * length + shape.d_model * shape.num_classes * (length if per_token else 1)
    for name, (model, _, _) in programs.items():
        layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
        assert sum(w.numel() for w in layers.parameters() if w.ndim == 2) == pytest.approx(rest, rel=0.02), name
        # two operations per weight forward, and as many for the gradients of inputs and of weights
        counted = run.count_flops(spec, model, ON_CPU)
        if name == "toeplens" and not per_token:  # of the last layer, queries, output and network of one position
            skipped = (2 * shape.d_model**2 + 2 * shape.d_model * shape.d_ff) * (length - 1)
            assert counted == 6 * (every - skipped)
        else:
            assert counted == pytest.approx(6 * every, rel=0.02), name


def test_computing_every_position_gives_the_same_model(run: ModuleType):
    shape = run.spec_of("laptop").model
    torch.manual_seed(0)
    ours, every = Decoder(shape).double(), run.EveryPosition(shape).double()
    every.load_state_dict(ours.state_dict())
    tokens = torch.randint(1, 64, (3, 24))
    torch.testing.assert_close(every(tokens), ours(tokens), rtol=1e-12, atol=1e-12)
    x, context = every.start_pass(tokens)
    assert every.layer_heads(shape.num_layers - 1, x, context)[1].shape[1] == 24


@pytest.mark.heavy
def test_all_contests_are_timed_and_recorded(run: ModuleType, tmp_path: Path):
    """The audit contest refuses numbers that its programs do not agree on."""
    path, options = tmp_path / "bench.json", ("--scale", "laptop", "--rounds", "3", "--seconds", "0")
    run.main([*options, "--device", "cpu", "--record", str(path)])
    actual = json.loads(path.read_text())
    recorded = json.loads((Path(__file__).parents[2] / "results" / "bench" / "bench-xeon.json").read_text())
    assert set(actual) == set(recorded)
    had = {contest["kind"]: contest for contest in recorded["contests"]}
    for contest in actual["contests"]:
        assert set(contest) == set(had[contest["kind"]])
        assert all(set(row) == set(had[contest["kind"]]["timed"][0]) for row in contest["timed"])
        assert all(len(row["seconds"]) == 3 for row in contest["timed"])
    assert actual["contests"][1]["apart"] < 1e-4
