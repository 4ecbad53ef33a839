"""The bench: programs that do the same work, timed in turn; what follows from the seconds, by hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from toeplens.ground import EnvironmentFailure, InputError, read_json
from toeplens.model import Decoder
from toeplens.studies.benching import BenchRecord, Contest, Timed, bench, save_bench, training
from toeplens.studies.benching.race import matrix_peak, race
from toeplens.training import run_spec
from toeplens.training.presets import DISTANCE, starting_spec

pytestmark = pytest.mark.usefixtures("unchecked")
CPU = torch.device("cpu")


def by_hand() -> BenchRecord:
    timed = (
        Timed(name="toeplens", ours=True, seconds=[1.0, 2.0, 4.0]),
        Timed(name="one", ours=False, seconds=[3.0, 2.0, 6.0]),
        Timed(name="other", ours=False, seconds=[2.5, 5.0, 3.0]),
    )
    contest = Contest(kind="training", work="paper: a model", unit="tokens", count=1000, flops=8e9, timed=timed)
    return BenchRecord(environment={"torch": "2"}, device="cpu", peak=16e9, contests=(contest,))


def test_what_follows_from_the_seconds():
    record = by_hand()
    (contest,) = record.contests
    ours, one, other = contest.timed
    assert contest.speed(ours) == 500  # of the median, 2 seconds
    assert contest.ratio(ours) == 1
    assert contest.ratio(one) == 1.5  # of 3, 1, 1.5
    assert contest.ratio(other) == 2.5  # of 2.5, 2.5, 0.75
    assert contest.best_peer == one  # medians are alike: the first
    assert record.share(contest, ours) == 0.25
    hours = 80 * 100 * 70_000 * 120 / 500 / 3600
    assert record.table_1_hours() == (pytest.approx(hours), None)
    assert record.table_1_hours(2.0) == (pytest.approx(hours), pytest.approx(2 * hours))
    assert BenchRecord.from_dict(record.to_dict()) == record


def test_programs_take_their_turn_and_the_first_rounds_do_not_count():
    order: list[str] = []
    found = race({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, rounds=4, seconds=60)
    assert order == ["a", "b"] * 6
    assert [len(each) for each in found.values()] == [4, 4]
    assert [len(each) for each in race({"a": lambda: None}, CPU, rounds=9, seconds=0.0).values()] == [3]


def test_models_of_a_contest_are_of_equal_size():
    spec = run_spec(**starting_spec("laptop", "paper", DISTANCE, "rope", 0))
    models, missing = training._models(spec, CPU)
    assert missing == []
    assert list(models) == ["toeplens", "torch.nn.TransformerEncoder", "transformers Llama", "x-transformers"]
    sizes = {name: in_layers(model) for name, (model, _) in models.items()}
    for name, size in sizes.items():
        assert size == pytest.approx(training._products(spec), rel=0.02), name
    tokens = torch.randint(1, 64, (2, 24))
    for name, (model, run) in models.items():
        model.eval()
        assert run(tokens).shape == (2, spec.model.num_classes), name


def in_layers(model: nn.Module) -> int:
    """Weights of the layers' matrices."""
    layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    return sum(weight.numel() for weight in layers.parameters() if weight.ndim == 2)


def test_a_bench_finds_that_all_programs_agree_and_is_written_down(tmp_path: Path):
    told: list[Contest] = []
    record = bench(device="cpu", scales=["laptop"], rounds=3, seconds=0.0, on_contest=told.append)
    assert [contest.kind for contest in record.contests] == ["training", "ablation", "profile"]
    assert tuple(told) == record.contests
    for contest in record.contests:
        assert contest.timed[0].name == "toeplens"
        assert all(len(each.seconds) == 3 for each in contest.timed)
    ablated, profiled = record.contests[1:]
    assert ablated.apart == 0
    assert profiled.apart is not None
    assert profiled.apart < 1e-9
    assert 0 < (record.share(record.contests[0], record.contests[0].timed[0]) or 0) < 1
    path = save_bench(record, tmp_path)
    assert BenchRecord.from_dict(read_json(path), path) == record


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "x_transformers" else found(name))
    record = bench(device="cpu", contests=["training"], scales=["laptop"], rounds=3, seconds=0.0)
    assert record.missing == ("x-transformers",)
    assert "x-transformers" not in [each.name for each in record.contests[0].timed]


def test_the_peak_is_that_of_a_matrix_product():
    assert 1e8 < matrix_peak(CPU, torch.float32) < 1e14


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"contests": ["race"]}, "contest: there is no 'race'"),
        ({"scales": ["huge"]}, "scale: there is no 'huge'"),
        ({"rounds": 2}, "rounds: 2 was given; it must be from 3 to 1000"),
        ({"device": "cuda"}, "device"),
    ],
)
def test_what_cannot_be_timed_is_named(given: dict, says: str):
    if given == {"device": "cuda"} and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((InputError, EnvironmentFailure), match=says):
        bench(**given)


def test_the_command_prints_the_record_and_writes_the_page(toeplens, tmp_path: Path):
    given = ("--contest", "training", "--scale", "laptop", "--rounds", "3", "--seconds", "0", "--device", "cpu")
    answer = toeplens("bench", "--out", tmp_path, "--json", *given)
    assert answer.code == 0
    content = json.loads(answer.out)
    assert content["table_1"] is None  # the paper's shape was not timed
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "x-transformers" in page
    assert "Time over ours" in page
    assert read_json(tmp_path / "bench.json")["contests"] == content["contests"]
    answer = toeplens("bench", *given, "--threads", "0")
    assert answer.code == 2
    assert "threads: 0 was given" in answer.err


def test_decoders_of_the_contest_are_those_that_are_trained():
    spec = run_spec(**starting_spec("laptop", "paper", DISTANCE, "rope", 0))
    (model, run) = training._models(spec, CPU)[0]["toeplens"]
    assert run is model
    assert isinstance(model, Decoder)
