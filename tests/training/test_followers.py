"""Who follows a run hears of each evaluation once, and can neither stop the run nor change it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import builders
from tests.builders import After, outcome

from toeplens.training import Follower, Run, RunEnd, RunFacts, RunSpec, loop, train, train_as_one
from toeplens.training.followers import behind, figures, heard
from toeplens.training.followers.behind import Behind, in_time

pytestmark = pytest.mark.usefixtures("no_disk")
STEPS = [3, 6, 9]  # of the evaluations


def tiny(**changes: Any) -> RunSpec:
    return builders.tiny(
        model={"d_model": 8, "d_ff": 8, "num_layers": 1} | changes.pop("model", {}), epochs=3, **changes
    )


class Notes:
    """Notes all that it is told, and then does as told at one of the calls."""

    def __init__(self, at: str = "", does: Callable[..., object] = lambda told: None) -> None:
        self.at, self.does = at, does
        self.heard: list[tuple[str, Any]] = []

    def begin(self, run: RunFacts) -> None:
        self.hear("begin", run)

    def look(self, row: Mapping[str, float]) -> None:
        self.hear("look", dict(row))
        assert None not in row.values()

    def end(self, end: RunEnd) -> None:
        self.hear("end", end)

    def hear(self, call: str, told: Any) -> None:
        self.heard.append((call, told))
        if call == self.at:
            self.does(told)

    @property
    def calls(self) -> list[str]:
        return [call for call, _ in self.heard]

    @property
    def steps(self) -> list[int]:
        return [told["step"] for call, told in self.heard if call == "look"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nobody follows."""
    return train(tiny(), tmp_path_factory.mktemp("plain"))


def raises(told: object) -> None:
    raise OSError("No space left on device")


# ---- what is told ---------------------------------------------------------------------------------------------------


def test_a_follower_hears_the_run_then_each_evaluation_then_the_end(tmp_path: Path):
    notes = Notes()
    assert isinstance(notes, Follower)
    run = train(tiny(), tmp_path, followers=[notes])
    assert notes.calls == ["begin", "look", "look", "look", "end"]
    (_, begun), *looks, (_, end) = notes.heard
    assert begun == RunFacts(tiny().name, run.directory, tiny(), 0)
    assert begun.title == "trigger-distance · rope · seed 42"
    assert [row for _, row in looks] == run.metrics
    assert end == RunEnd("complete", 9, run.result)


def test_a_finished_run_is_told_to_nobody(tmp_path: Path):
    train(tiny(), tmp_path)
    notes = Notes()
    train(tiny(), tmp_path, followers=[notes])
    assert notes.heard == []


@pytest.mark.parametrize("units", range(1, 21, 2))
def test_wherever_it_is_stopped_no_row_is_told_twice(tmp_path: Path, plain: Run, units: int):
    """Of 9 steps and 3 times 4 batches of evaluation."""
    first, second = Notes(), Notes()
    stopped = train(tiny(), tmp_path, followers=[first], should_stop=After(units))
    assert first.heard[-1] == ("end", RunEnd("stopped", stopped.step))
    assert outcome(train(tiny(), tmp_path, followers=[second])) == outcome(plain)
    assert first.steps + second.steps == STEPS
    assert second.heard[0][1].step == max(first.steps, default=0)


def test_after_a_kill_the_rows_that_were_lost_come_again_and_the_facts_say_after_which(tmp_path: Path, plain: Run):
    class Killed(BaseException):
        pass

    def kill(row: Mapping[str, float]) -> None:
        if row["step"] == 6:
            raise Killed

    first, second = Notes("look", kill), Notes()
    with pytest.raises(Killed):
        train(tiny(), tmp_path, followers=[first])
    assert first.heard[-1] == ("end", RunEnd("stopped", 6, reason="Killed"))
    assert outcome(train(tiny(), tmp_path, followers=[second])) == outcome(plain)
    assert (second.heard[0][1].step, second.steps) == (0, STEPS)


def test_a_run_that_diverges_ends_so_with_its_reason_and_without_figures_that_are_none(tmp_path: Path):
    notes = Notes()
    run = train(tiny(lr=1e30), tmp_path, followers=[notes])
    assert notes.heard[-1] == ("end", RunEnd("diverged", 3, run.result, "the loss is not finite after step 3"))
    assert notes.steps == [3]
    assert "train_loss" not in notes.heard[1][1]


def test_what_stops_a_run_by_an_error_is_its_reason(tmp_path: Path):
    notes = Notes()

    def fails() -> bool:
        if notes.steps:
            raise ValueError("the lights went out")
        return False

    with pytest.raises(ValueError, match="lights"):
        train(tiny(), tmp_path, followers=[notes], should_stop=fails)
    assert notes.heard[-1] == ("end", RunEnd("stopped", 3, reason="the lights went out"))


def test_each_of_models_trained_as_one_has_followers_of_its_own(tmp_path: Path):
    specs = [tiny(model={"dropout": 0.0}, seed=seed) for seed in range(2)]
    notes = [Notes(), Notes("look", raises)]
    with heard(lambda text: None):
        train_as_one(specs, tmp_path, followers=[[each] for each in notes])
    assert [each.heard[0][1].spec for each in notes] == specs
    assert notes[0].calls == ["begin", "look", "look", "look", "end"]
    assert notes[1].calls == ["begin", "look"]


def test_a_row_has_the_names_that_trackers_group():
    row = {"epoch": 1.0, "step": 3, "train_loss": 2.0, "fit_accuracy": 0.5, "tokens_per_second": 9.0, "lr": 0.1}
    named = {"epoch": 1.0, "train/loss": 2.0, "fit/accuracy": 0.5, "tokens_per_second": 9.0, "lr": 0.1}
    assert figures(row) == named


# ---- what a follower cannot do --------------------------------------------------------------------------------------

MISCHIEF: dict[str, Callable[[Any], object]] = {
    "draws": lambda told: torch.rand(100),
    "seeds": lambda told: torch.manual_seed(0),
    "raises": raises,
    "leaves": lambda told: exit(3),
}


@pytest.mark.parametrize("at", ["begin", "look", "end"])
@pytest.mark.parametrize("what", MISCHIEF)
def test_the_run_is_bit_identical_whatever_a_follower_does(tmp_path: Path, plain: Run, at: str, what: str):
    notes, other, said = Notes(at, MISCHIEF[what]), Notes(), []
    with heard(said.append):
        run = train(tiny(), tmp_path, followers=[notes, other])
    assert outcome(run) == outcome(plain)
    assert sorted(path.name for path in run.directory.iterdir()) == sorted(p.name for p in plain.directory.iterdir())
    assert other.calls == ["begin", "look", "look", "look", "end"]
    if what in ("raises", "leaves"):  # it is told no more
        assert notes.calls == other.calls[: other.calls.index(at) + 1]
        reason = {"raises": "No space left on device", "leaves": "3"}[what]
        assert said == [f"Notes follows no more: {reason}; training goes on."]
    else:
        assert notes.calls == other.calls
        assert said == []


def test_these_runs_depend_on_dropout(tmp_path: Path, plain: Run):
    """Else the test above could not see a random state that was moved."""
    assert outcome(train(tiny(model={"dropout": 0.0}), tmp_path))[1] != outcome(plain)[1]


def test_a_row_that_is_changed_is_the_followers_own(tmp_path: Path, plain: Run):
    def spoil(run: RunEnd | RunFacts | Mapping[str, float]) -> None:
        assert isinstance(run, dict)
        run.clear()

    class Spoils(Notes):
        def look(self, row: Mapping[str, float]) -> None:
            spoil(row)  # type: ignore[arg-type]

    assert outcome(train(tiny(), tmp_path, followers=[Spoils()])) == outcome(plain)


def test_the_time_of_followers_is_not_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ahead = [0.0]
    clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr(loop, "time", clock)

    def slow(told: object) -> None:
        ahead[0] += 1000

    run = train(tiny(), tmp_path, followers=[Notes("begin", slow), Notes("look", slow), Notes("end", slow)])
    assert ahead == [5000.0]
    assert run.result["seconds"] < 1000


def test_a_failure_is_one_line_on_the_log_which_need_not_be_set_up(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def fails(run: RunFacts) -> None:
        raise RuntimeError(f"{run.name} is taken.\nAsk again.")

    with caplog.at_level(logging.WARNING):
        train(tiny(), tmp_path, followers=[Notes("begin", fails)])
    assert [record.getMessage() for record in caplog.records] == [
        "Notes follows no more: the run is taken; training goes on."
    ]


def test_the_same_failure_of_many_runs_is_heard_once(tmp_path: Path):
    said: list[str] = []
    with heard(said.append):
        for seed in range(2):
            train(tiny(seed=seed), tmp_path, followers=[Notes("look", raises)])
    assert len(said) == 1


# ---- behind training's back -----------------------------------------------------------------------------------------


class Sends(Behind):
    """Notes what it would send; the first look waits for ``may``."""

    def __init__(self, does: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.does, self.did = does, []

    def opened(self, run: RunFacts) -> None:
        self.did.append("opened")

    def sent(self, row: Mapping[str, float]) -> None:
        self.does()
        self.did.append(row["step"])

    def closed(self, end: RunEnd) -> None:
        self.did.append(end.status)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "PATIENCE", {"complete": 0.2, "stopped": 0.0})
    monkeypatch.setattr(behind, "_silent", set())


def test_what_is_behind_is_told_all_in_turn_before_training_returns(tmp_path: Path, plain: Run):
    sends = Sends(lambda: time.sleep(0.01))
    assert outcome(train(tiny(), tmp_path, followers=[sends])) == outcome(plain)
    assert sends.did == ["opened", *STEPS, "complete"]


def test_what_fails_behind_is_said_and_the_rest_is_not_sent(tmp_path: Path):
    sends, said = Sends(lambda: raises(None)), []
    with heard(said.append):
        train(tiny(), tmp_path, followers=[sends])
    assert said == ["Sends follows no more: No space left on device; training goes on."]
    assert sends.did == ["opened"]


@pytest.mark.usefixtures("patience")
def test_what_does_not_answer_is_waited_for_once_and_not_long(tmp_path: Path, plain: Run):
    late, said = Sends(lambda: time.sleep(2)), []
    with heard(said.append):
        stopped = train(tiny(), tmp_path / "a", followers=[Sends(lambda: time.sleep(2))], should_stop=After(9))
        assert stopped.status == "stopped"
        assert said == []  # it may be gone on with, and the tracker has it then
        assert outcome(train(tiny(), tmp_path / "b", followers=[late])) == outcome(plain)
        after = Sends()
        train(tiny(seed=1), tmp_path / "b", followers=[after])
    assert said == ["Sends follows no more: it did not answer in time; training goes on."]
    assert (late.did, after.did) == (["opened"], [])


def test_what_is_to_be_done_in_time_raises_what_it_raises():
    in_time(lambda: None, 1)
    with pytest.raises(OSError, match="No space"):
        in_time(lambda: raises(None), 1)
    with pytest.raises(TimeoutError, match="did not answer in time"):
        in_time(lambda: time.sleep(1), 0.01)
