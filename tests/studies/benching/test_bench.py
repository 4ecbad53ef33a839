"""The bench: programs that do the same work, timed in turn; what follows from the seconds, by hand."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from toeplens.ground import EnvironmentFailure, InputError, read_json
from toeplens.studies import audit
from toeplens.studies.benching import BenchRecord, Contest, Timed, bench, save_bench
from toeplens.studies.benching.race import matrix_peak, race

CPU = torch.device("cpu")
RECORDED = Path(__file__).parents[3] / "results" / "bench" / "bench.json"


def by_hand() -> BenchRecord:
    timed = (
        Timed(name="toeplens", ours=True, flops=8e9, seconds=[1.0, 2.0, 4.0]),
        Timed(name="toeplens, every position", ours=True, work="equal", flops=12e9, seconds=[2.0, 2.0, 4.0]),
        Timed(name="toeplens, dropout 0.1", ours=True, work="trained", flops=8e9, seconds=[4.0, 4.0, 4.0]),
        Timed(name="one", ours=False, seconds=[3.0, 2.0, 6.0]),
        Timed(name="other", ours=False, seconds=[2.5, 5.0, 3.0]),
    )
    contest = Contest(kind="training", work="paper: a model", unit="tokens", count=1000, timed=timed)
    return BenchRecord(environment={"torch": "2"}, device="cpu", peak=16e9, contests=(contest,))


def test_what_follows_from_the_seconds():
    record = by_hand()
    (contest,) = record.contests
    ours, equal, _, one, other = contest.timed
    assert contest.speed(ours) == 500  # of the median, 2 seconds
    assert contest.ratio(ours) == 1
    assert contest.ratio(one) == 1.5  # of 3, 1, 1.5
    assert contest.ratio(other) == 2.5  # of 2.5, 2.5, 0.75
    assert contest.best_peer == one  # medians are alike: the first
    assert contest.equal == equal
    assert contest.ratio(one, equal) == 1.5  # of 1.5, 1, 1.5
    assert record.share(contest, ours) == 0.25
    assert record.share(contest, equal) == 0.375
    assert record.share(contest, one) is None  # its products were not counted
    assert BenchRecord.from_dict(record.to_dict()) == record


def test_the_best_peer_is_told_beside_ours_and_beside_equal_work():
    (contest,) = by_hand().contests
    assert contest.beside_best() == (
        "paper: one takes 1.50 times the time of toeplens, and 1.50 times that of toeplens, every position"
    )


def test_table_1_is_estimated_from_the_step_with_its_dropout():
    record = by_hand()
    hours = 80 * 100 * 70_000 * 120 / 250 / 3600  # 1000 tokens in 4 seconds
    assert record.table_1_hours() == (pytest.approx(hours), None)
    assert record.table_1_hours(2.0) == (pytest.approx(hours), pytest.approx(2 * hours))
    content = record.to_dict()
    content["contests"][0]["timed"] = [each for each in content["contests"][0]["timed"] if each["work"] != "trained"]
    assert BenchRecord.from_dict(content).table_1_hours() is None


def test_the_recorded_bench_is_read():
    record = BenchRecord.from_dict(read_json(RECORDED), RECORDED)
    assert {contest.kind for contest in record.contests} >= {"training", "ablation", "profile"}


def test_programs_take_their_turn_and_the_first_rounds_do_not_count():
    order: list[str] = []
    found = race({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, rounds=4, seconds=60)
    assert order == ["a", "b"] * 6
    assert [len(each) for each in found.values()] == [4, 4]
    assert [len(each) for each in race({"a": lambda: None}, CPU, rounds=9, seconds=0.0).values()] == [3]


@pytest.mark.heavy
def test_a_bench_finds_that_all_programs_agree_and_is_written_down(tmp_path: Path):
    told: list[Contest] = []
    record = bench(audit, device="cpu", scales=["laptop"], rounds=3, seconds=0.0, on_contest=told.append)
    assert [contest.kind for contest in record.contests] == ["training", "ablation", "profile", "audit"]
    assert tuple(told) == record.contests
    for contest in record.contests:
        assert contest.timed[0].name == "toeplens"
        assert all(len(each.seconds) == 3 for each in contest.timed)
    ablated, profiled, audited = record.contests[1:]
    assert ablated.apart == 0
    assert profiled.apart is not None
    assert profiled.apart < 1e-9
    assert audited.apart is not None
    assert audited.apart < 1e-4
    assert 0 < (record.share(record.contests[0], record.contests[0].timed[0]) or 0) < 1
    path = save_bench(record, tmp_path)
    assert BenchRecord.from_dict(read_json(path), path) == record


@pytest.mark.heavy
def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "x_transformers" else found(name))
    record = bench(audit, device="cpu", contests=["training"], scales=["laptop"], rounds=3, seconds=0.0)
    assert record.missing == ("x-transformers",)
    assert "x-transformers" not in [each.name for each in record.contests[0].timed]


def test_the_peak_is_that_of_a_matrix_product():
    assert 1e8 < matrix_peak(CPU, torch.float32) < 1e14


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"contests": ["race"]}, "contest: there is no 'race'"),
        ({"scales": ["huge"]}, "scale: there is no 'huge'"),
        ({"precision": "half"}, "precision: there is no 'half'"),
        ({"rounds": 2}, "rounds: 2 was given; it must be from 3 to 1000"),
        ({"seconds": math.nan}, "seconds: nan was given; it must be a finite number, 0 or more."),
        ({"seconds": -1.0}, "seconds: -1 was given"),
        ({"device": "cuda"}, "device"),
    ],
)
def test_what_cannot_be_timed_is_named(given: dict, says: str):
    if given == {"device": "cuda"} and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((InputError, EnvironmentFailure), match=says):
        bench(audit, **given)


@pytest.mark.heavy
def test_the_command_prints_the_record_and_writes_the_page(toeplens, tmp_path: Path):
    given = ("--contest", "training", "--scale", "laptop", "--rounds", "3", "--seconds", "0", "--device", "cpu")
    answer = toeplens("bench", "--out", tmp_path, "--json", *given)
    assert answer.code == 0
    content = json.loads(answer.out)
    assert content["table_1"] is None  # the paper's shape was not timed
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "x-transformers" in page
    assert "Time over ours" in page
    assert "Time over toeplens, every position" in page
    assert "Orange: with work equal to the other" in page
    assert read_json(tmp_path / "bench.json")["contests"] == content["contests"]
    told = toeplens("bench", *given)
    assert "times the time of toeplens, and" in told.out
    assert "times that of toeplens, every position." in " ".join(told.out.split())
    answer = toeplens("bench", *given, "--threads", "0")
    assert answer.code == 2
    assert "threads: 0 was given" in answer.err


@pytest.mark.parametrize(
    ("option", "value"),
    [("seconds", "nan"), ("seconds", "-1"), ("price-per-hour", "nan"), ("price-per-hour", "-3")],
)
def test_times_and_prices_are_finite_and_not_below_0(toeplens, option: str, value: str):
    answer = toeplens("bench", f"--{option}", value)
    assert answer.code == 2
    said = f"error: {option.replace('-', '_')}: {value} was given; it must be a finite number, 0 or more."
    assert " ".join(answer.err.split()) == said


def test_an_audit_is_left_out_and_named_where_transformers_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name))
    record = bench(audit, device="cpu", contests=["audit"], rounds=3, seconds=0.0)
    assert record.missing == ("transformers (of the audit)",)
    assert record.contests == ()
