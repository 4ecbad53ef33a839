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
from tests.builders import StopAfter, results_of

from toeplens.training import Run, RunInfo, RunSpec, loggers, loop, train, train_batched
from toeplens.training.loggers import build_loggers, prepare_loggers

pytestmark = pytest.mark.usefixtures("no_disk", "reset_warnings")
STEPS = [3, 6, 9]  # of the evaluations
STOP = 9  # units of work, after which there is one evaluation
LABEL = "paper · RoPE/1 · seed 0"
METRICS = {f"{split}/{what}" for split in ("train", "test", "fit") for what in ("loss", "accuracy")}


def tiny(**changes: Any) -> RunSpec:
    return builders.tiny(
        model={"d_model": 8, "d_ff": 8, "num_layers": 1} | changes.pop("model", {}), epochs=3, **changes
    )


@pytest.fixture
def reset_warnings() -> Iterator[None]:
    yield
    loggers._warn.cache_clear()


@pytest.fixture(scope="module")
def unlogged_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run without loggers."""
    return train(tiny(), tmp_path_factory.mktemp("plain"))


class FakeLogger:
    """Keeps what it is given, and does something at one of the calls."""

    def __init__(self, at: str = "", does: Callable[[], object] = lambda: None) -> None:
        self.at, self.does = at, does
        self.calls: list[str] = []
        self.rows: list[dict[str, float]] = []

    def __call__(self, run: RunInfo) -> FakeLogger:
        self.run = run
        return self.called("open")

    def log(self, row: Mapping[str, float]) -> None:
        self.rows.append(dict(row))
        self.called("log")

    def close(self, status: str) -> None:
        self.called(status)

    def called(self, call: str) -> FakeLogger:
        self.calls.append(call)
        if call == self.at:
            self.does()
        return self

    @property
    def steps(self) -> list[float]:
        return [row["step"] for row in self.rows]


def raise_error() -> None:
    raise OSError("No space left on device")


def test_a_logger_is_opened_once_and_gets_every_evaluation(tmp_path: Path):
    fake = FakeLogger()
    run = train(tiny(), tmp_path, loggers=[fake])
    assert fake.calls == ["open", "log", "log", "log", "complete"]
    assert fake.run == RunInfo(tiny().name, run.directory, tiny(), 0)
    assert fake.run.title == "trigger-distance · rope · seed 42"
    assert fake.rows == run.metrics
    second_logger = FakeLogger()
    train(tiny(), tmp_path, loggers=[second_logger])
    assert second_logger.calls == [], "a finished run is not logged again"


@pytest.mark.parametrize("units", [1, 3, 5, 7, 14, 20])
def test_an_interrupted_run_logs_no_row_twice(tmp_path: Path, unlogged_run: Run, units: int):
    """Of 9 steps and 3 times 4 batches of evaluation."""
    first, second = FakeLogger(), FakeLogger()
    train(tiny(), tmp_path, loggers=[first], should_stop=StopAfter(units))
    assert first.calls[-1] == "stopped"
    assert results_of(train(tiny(), tmp_path, loggers=[second])) == results_of(unlogged_run)
    assert first.steps + second.steps == STEPS
    assert second.run.step == max(first.steps, default=0)


def test_a_diverged_run_closes_its_logger_and_logs_no_nulls(tmp_path: Path):
    fake = FakeLogger()
    train(tiny(lr=1e30), tmp_path, loggers=[fake])
    assert fake.calls == ["open", "log", "diverged"]
    assert fake.steps == [3]
    assert "train_loss" not in fake.rows[0]


def test_batched_runs_have_separate_loggers_and_an_error_closes_all(tmp_path: Path):
    specs, fakes = (
        [tiny(model={"dropout": 0.0}, seed=seed) for seed in range(2)],
        [FakeLogger(), FakeLogger("log", raise_error)],
    )
    train_batched(specs, tmp_path / "a", loggers=[[each] for each in fakes])
    assert [fake.run.spec for fake in fakes] == specs
    assert [fake.calls for fake in fakes] == [["open", "log", "log", "log", "complete"], ["open", "log"]]
    fake = FakeLogger()
    with pytest.raises(OSError, match="No space"):
        train(tiny(), tmp_path / "b", loggers=[fake], should_stop=lambda: bool(raise_error()))
    assert fake.calls == ["open", "stopped"]


SIDE_EFFECTS: dict[str, Callable[[], object]] = {
    "draws": lambda: torch.rand(100),
    "seeds": lambda: torch.manual_seed(0),
    "raises": raise_error,
    "exits": lambda: sys.exit(3),
}


@pytest.mark.parametrize("at", ["open", "log", "complete"])
@pytest.mark.parametrize("what", SIDE_EFFECTS)
def test_a_logger_cannot_change_a_run(
    tmp_path: Path, unlogged_run: Run, at: str, what: str, caplog: pytest.LogCaptureFixture
):
    fake, second_logger = FakeLogger(at, SIDE_EFFECTS[what]), FakeLogger()
    with caplog.at_level(logging.WARNING):
        run = train(tiny(), tmp_path, loggers=[fake, second_logger])
    assert results_of(run) == results_of(unlogged_run)  # which depends on dropout: see test_probes.py
    assert second_logger.calls == ["open", "log", "log", "log", "complete"]
    messages = {"raises": ["No space left on device"], "exits": ["3"]}.get(what, [])
    assert caplog.messages == [f"Logger FakeLogger is disabled: {each}. Training continues." for each in messages]
    assert fake.calls == (second_logger.calls[: second_logger.calls.index(at) + 1] if messages else second_logger.calls)


def test_logging_time_is_excluded_from_the_runs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ahead = [0.0]
    clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr(loop, "time", clock)

    def slow() -> None:
        ahead[0] += 1000

    run = train(tiny(), tmp_path, loggers=[FakeLogger(at, slow) for at in ("open", "log", "complete")])
    assert ahead == [5000.0]
    assert run.result["seconds"] < 1000


# ---- trackers -------------------------------------------------------------------------------------------------------


def resumed(name: str, out: Path) -> Run:
    """A run that is logged, stopped after an evaluation, and resumed."""
    named = build_loggers([name], LABEL, "laptop")
    assert len(train(tiny(), out, loggers=named, should_stop=StopAfter(STOP)).metrics) == 1
    return train(tiny(), out, loggers=named)


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of the run in ``directory``."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (log_dir,) = directory.glob("tensorboard/*/")
    assert log_dir.name == "paper-RoPE-1-seed-0"
    events = EventAccumulator(str(log_dir)).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_each_evaluation_once(tmp_path: Path, unlogged_run: Run):
    run = resumed("tensorboard", tmp_path)
    assert results_of(run) == results_of(unlogged_run)
    logged = scalars(run.directory)
    assert set(logged) == {*METRICS, "epoch", "lr", "seconds"}
    for name, points in logged.items():
        expected = [(row["step"], row[name.replace("/", "_")]) for row in run.metrics]
        assert points == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]


def test_tensorboard_drops_rows_lost_in_a_kill(tmp_path: Path):
    """Rows of step 3 and 6 were logged, and no checkpoint was written."""
    fake, named = FakeLogger(), build_loggers(["tensorboard"], LABEL)

    def killed() -> bool:
        if len(fake.rows) == 2:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path, loggers=[*named, fake], should_stop=killed)
    assert [step for step, _ in scalars(tmp_path / tiny().name)["lr"]] == [3, 6]
    train(tiny(), tmp_path, loggers=named, should_stop=StopAfter(STOP))
    assert [step for step, _ in scalars(tmp_path / tiny().name)["lr"]] == [3]


def test_wandb_continues_the_same_run(tmp_path: Path, unlogged_run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    wandb = MagicMock(spec_set=["Settings", "setup", "init"], Settings=dict)
    opened = wandb.init.return_value = MagicMock(spec_set=["log", "summary", "mark_preempting", "finish"])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = resumed("wandb", tmp_path)
    assert results_of(run) == results_of(unlogged_run)
    arguments = {"project": "toeplens", "id": run.directory.name, "name": LABEL, "group": "laptop"}
    arguments |= {"config": run.spec.content, "resume": "allow", "reinit": "create_new"}
    settings = {"silent": True, "console": "off"}
    assert wandb.init.call_args_list == [call(**arguments, settings=settings)] * 2
    names = [name for name, *_ in opened.method_calls if name != "summary.__setitem__"]
    assert names == ["log", "mark_preempting", "finish", "log", "log", "finish"]
    assert [each.kwargs["step"] for each in opened.log.call_args_list] == STEPS
    assert opened.log.call_args.args[0].keys() == {*METRICS, "epoch", "lr", "seconds"}
    assert opened.finish.call_args_list == [call(exit_code=1), call(exit_code=0)]


def test_mlflow_continues_the_same_run(tmp_path: Path, unlogged_run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    calls = "get_experiment_by_name create_experiment search_runs create_run update_run set_terminated log_batch"
    client = MagicMock(spec_set=[*calls.split(), "log_param"])
    client.get_experiment_by_name.side_effect = [None, *[SimpleNamespace(experiment_id="7")] * 2]
    actual = SimpleNamespace(info=SimpleNamespace(run_id="a run"))
    client.create_run.return_value, client.search_runs.side_effect = actual, [[], [actual]]
    entities = SimpleNamespace(Metric=lambda *given: given)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: client, entities=entities))
    prepare_loggers(("mlflow", "tensorboard"), "laptop")
    client.create_experiment.assert_called_once_with("toeplens/laptop")
    run = resumed("mlflow", tmp_path)
    assert results_of(run) == results_of(unlogged_run)
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


def test_an_unreachable_mlflow_server_is_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=raise_error))
    prepare_loggers(("mlflow",), None)
    assert caplog.messages == ["Logger MLflow is disabled: No space left on device. Training continues."]
