"""Loggers get each evaluation once and cannot stop or change a run; what trackers are sent.

TensorBoard's files are read back. Stand-ins know the calls of W&B and MLflow that are made, and no others.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from tests import builders
from tests.builders import After, outcome

from toeplens.training import Run, RunInfo, RunSpec, loggers, loop, train, train_as_one
from toeplens.training.loggers import loggers_named, prepare

pytestmark = pytest.mark.usefixtures("no_disk", "warnings_anew")
STEPS = [3, 6, 9]  # of the evaluations
STOP = 9  # units of work, after which there is one evaluation
LABEL = "paper · RoPE/1 · seed 0"
FIGURES = {f"{split}/{what}" for split in ("train", "test", "fit") for what in ("loss", "accuracy")}


def tiny(**changes: Any) -> RunSpec:
    return builders.tiny(
        model={"d_model": 8, "d_ff": 8, "num_layers": 1} | changes.pop("model", {}), epochs=3, **changes
    )


@pytest.fixture
def warnings_anew() -> Iterator[None]:
    yield
    loggers._warn.cache_clear()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run without loggers."""
    return train(tiny(), tmp_path_factory.mktemp("plain"))


class Fake:
    """Keeps what it is given, and does something at one of the calls."""

    def __init__(self, at: str = "", does: Callable[[], object] = lambda: None) -> None:
        self.at, self.does = at, does
        self.calls: list[str] = []
        self.rows: list[dict[str, float]] = []

    def __call__(self, run: RunInfo) -> Fake:
        self.run = run
        return self.called("open")

    def log(self, row: Mapping[str, float]) -> None:
        self.rows.append(dict(row))
        self.called("log")

    def close(self, status: str) -> None:
        self.called(status)

    def called(self, call: str) -> Fake:
        self.calls.append(call)
        if call == self.at:
            self.does()
        return self

    @property
    def steps(self) -> list[float]:
        return [row["step"] for row in self.rows]


def raises() -> None:
    raise OSError("No space left on device")


def test_a_logger_is_opened_for_the_run_and_gets_each_evaluation(tmp_path: Path):
    fake = Fake()
    run = train(tiny(), tmp_path, loggers=[fake])
    assert fake.calls == ["open", "log", "log", "log", "complete"]
    assert fake.run == RunInfo(tiny().name, run.directory, tiny(), 0)
    assert fake.run.title == "trigger-distance · rope · seed 42"
    assert fake.rows == run.metrics
    again = Fake()
    train(tiny(), tmp_path, loggers=[again])
    assert again.calls == [], "a finished run is not logged again"


@pytest.mark.parametrize("units", [1, 3, 5, 7, 14, 20])
def test_wherever_a_run_is_stopped_no_row_is_logged_twice(tmp_path: Path, plain: Run, units: int):
    """Of 9 steps and 3 times 4 batches of evaluation."""
    first, second = Fake(), Fake()
    train(tiny(), tmp_path, loggers=[first], should_stop=After(units))
    assert first.calls[-1] == "stopped"
    assert outcome(train(tiny(), tmp_path, loggers=[second])) == outcome(plain)
    assert first.steps + second.steps == STEPS
    assert second.run.step == max(first.steps, default=0)


def test_a_run_that_diverges_is_closed_so_and_has_no_figures_that_are_null(tmp_path: Path):
    fake = Fake()
    train(tiny(lr=1e30), tmp_path, loggers=[fake])
    assert fake.calls == ["open", "log", "diverged"]
    assert fake.steps == [3]
    assert "train_loss" not in fake.rows[0]


def test_each_of_models_trained_as_one_has_its_own_and_an_error_closes_all(tmp_path: Path):
    specs, fakes = [tiny(model={"dropout": 0.0}, seed=seed) for seed in range(2)], [Fake(), Fake("log", raises)]
    train_as_one(specs, tmp_path / "a", loggers=[[each] for each in fakes])
    assert [fake.run.spec for fake in fakes] == specs
    assert [fake.calls for fake in fakes] == [["open", "log", "log", "log", "complete"], ["open", "log"]]
    fake = Fake()
    with pytest.raises(OSError, match="No space"):
        train(tiny(), tmp_path / "b", loggers=[fake], should_stop=lambda: bool(raises()))
    assert fake.calls == ["open", "stopped"]


MISCHIEF: dict[str, Callable[[], object]] = {
    "draws": lambda: torch.rand(100),
    "seeds": lambda: torch.manual_seed(0),
    "raises": raises,
    "exits": lambda: sys.exit(3),
}


@pytest.mark.parametrize("at", ["open", "log", "complete"])
@pytest.mark.parametrize("what", MISCHIEF)
def test_the_run_is_bit_identical_whatever_a_logger_does(
    tmp_path: Path, plain: Run, at: str, what: str, caplog: pytest.LogCaptureFixture
):
    fake, other = Fake(at, MISCHIEF[what]), Fake()
    with caplog.at_level(logging.WARNING):
        run = train(tiny(), tmp_path, loggers=[fake, other])
    assert outcome(run) == outcome(plain)  # which depends on dropout: see test_watcher.py
    assert other.calls == ["open", "log", "log", "log", "complete"]
    said = {"raises": ["No space left on device"], "exits": ["3"]}.get(what, [])
    assert caplog.messages == [f"Logger Fake is disabled: {each}. Training continues." for each in said]
    assert fake.calls == (other.calls[: other.calls.index(at) + 1] if said else other.calls)


def test_the_time_of_loggers_is_not_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ahead = [0.0]
    clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr(loop, "time", clock)

    def slow() -> None:
        ahead[0] += 1000

    run = train(tiny(), tmp_path, loggers=[Fake(at, slow) for at in ("open", "log", "complete")])
    assert ahead == [5000.0]
    assert run.result["seconds"] < 1000


# ---- trackers -------------------------------------------------------------------------------------------------------


def resumed(name: str, out: Path) -> Run:
    """A run that is logged, stopped after an evaluation, and resumed."""
    named = loggers_named([name], LABEL, "laptop")
    assert len(train(tiny(), out, loggers=named, should_stop=After(STOP)).metrics) == 1
    return train(tiny(), out, loggers=named)


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of the run in ``directory``."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (place,) = directory.glob("tensorboard/*/")
    assert place.name == "paper-RoPE-1-seed-0"
    events = EventAccumulator(str(place)).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_each_evaluation_once(tmp_path: Path, plain: Run):
    run = resumed("tensorboard", tmp_path)
    assert outcome(run) == outcome(plain)
    shown = scalars(run.directory)
    assert set(shown) == {*FIGURES, "epoch", "lr", "seconds"}
    for name, points in shown.items():
        wanted = [(row["step"], row[name.replace("/", "_")]) for row in run.metrics]
        assert points == [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted]


def test_tensorboard_forgets_what_a_kill_has_lost(tmp_path: Path):
    """Rows of step 3 and 6 were logged, and no checkpoint was written."""
    fake, named = Fake(), loggers_named(["tensorboard"], LABEL)

    def killed() -> bool:
        if len(fake.rows) == 2:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path, loggers=[*named, fake], should_stop=killed)
    assert [step for step, _ in scalars(tmp_path / tiny().name)["lr"]] == [3, 6]
    train(tiny(), tmp_path, loggers=named, should_stop=After(STOP))
    assert [step for step, _ in scalars(tmp_path / tiny().name)["lr"]] == [3]


def test_wandb_continues_the_same_run(tmp_path: Path, plain: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    wandb = MagicMock(spec_set=["Settings", "setup", "init"], Settings=dict)
    opened = wandb.init.return_value = MagicMock(spec_set=["log", "summary", "mark_preempting", "finish"])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = resumed("wandb", tmp_path)
    assert outcome(run) == outcome(plain)
    given = {"project": "toeplens", "id": run.directory.name, "name": LABEL, "group": "laptop"}
    given |= {"config": run.spec.content, "resume": "allow", "reinit": "create_new"}
    settings = {"silent": True, "console": "off"}
    assert wandb.init.call_args_list == [call(**given, settings=settings)] * 2
    names = [name for name, *_ in opened.method_calls if name != "summary.__setitem__"]
    assert names == ["log", "mark_preempting", "finish", "log", "log", "finish"]
    assert [each.kwargs["step"] for each in opened.log.call_args_list] == STEPS
    assert opened.log.call_args.args[0].keys() == {*FIGURES, "epoch", "lr", "seconds"}
    assert opened.finish.call_args_list == [call(exit_code=1), call(exit_code=0)]


def test_mlflow_continues_the_same_run(tmp_path: Path, plain: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    calls = "get_experiment_by_name create_experiment search_runs create_run update_run set_terminated log_batch"
    client = MagicMock(spec_set=[*calls.split(), "log_param"])
    client.get_experiment_by_name.side_effect = [None, *[SimpleNamespace(experiment_id="7")] * 2]
    found = SimpleNamespace(info=SimpleNamespace(run_id="a run"))
    client.create_run.return_value, client.search_runs.side_effect = found, [[], [found]]
    entities = SimpleNamespace(Metric=lambda *given: given)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: client, entities=entities))
    prepare(("mlflow", "tensorboard"), "laptop")
    client.create_experiment.assert_called_once_with("toeplens/laptop")
    run = resumed("mlflow", tmp_path)
    assert outcome(run) == outcome(plain)
    tag = f"tags.`toeplens.run` = '{run.directory.name}'"
    assert client.search_runs.call_args_list == [call(["7"], filter_string=tag)] * 2
    client.create_run.assert_called_once_with("7", run_name=LABEL, tags={"toeplens.run": run.directory.name})
    client.update_run.assert_called_once_with("a run", status="RUNNING")
    ends = [call("a run", status=status) for status in ("KILLED", "FINISHED")]
    assert client.set_terminated.call_args_list == ends
    params = {each.args[1]: each.args[2] for each in client.log_param.call_args_list}
    assert (params["model.d_model"], params["lr"]) == ("8", "0.01")
    sent = [metric for each in client.log_batch.call_args_list for metric in each.kwargs["metrics"]]
    losses = [(step, value) for name, value, _, step in sent if name == "test/loss"]
    assert losses == [(row["step"], row["test_loss"]) for row in run.metrics]


def test_mlflow_that_does_not_answer_is_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=raises))
    prepare(("mlflow",), None)
    assert caplog.messages == ["Logger MLflow is disabled: No space left on device. Training continues."]
