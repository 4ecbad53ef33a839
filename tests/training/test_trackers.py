"""TensorBoard read back; what Weights & Biases and MLflow are asked for, by stand-ins that know these calls alone.

The real ones were tried by hand with the same runs: wandb 0.31.0 offline (its files read back), without a key, and with
servers that refuse and that never answer; mlflow-skinny 3.17.2 with a folder, mlflow 3.17.2 with its own database.
The oldest that the extras allow, wandb 0.22.0 offline and mlflow-skinny 3.0.0 with a folder, end and go on alike.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.builders import After, outcome
from tests.training.test_followers import STEPS, tiny

from toeplens.ground import EnvironmentFailure
from toeplens.training import Follower, Run, train, train_as_one
from toeplens.training.followers import FOLLOWERS, followers_named, heard, made_ready, must_be_installed, names

pytestmark = pytest.mark.usefixtures("no_disk")
FIGURES = {f"{split}/{what}" for split in ("train", "test", "fit") for what in ("loss", "accuracy")}
STOP = 9  # units of work, after which there is one evaluation


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny(), tmp_path_factory.mktemp("plain"))


def followed(name: str, out: Path, **changes: Any) -> Run:
    """A run that is followed, stopped after an evaluation, and gone on with."""
    spec, told = tiny(**changes), ("paper · RoPE/1 · seed 0", "laptop")
    stopped = train(spec, out, followers=followers_named([name], *told), should_stop=After(STOP))
    assert [row["step"] for row in stopped.metrics] == STEPS[:1]
    return train(spec, out, followers=followers_named([name], *told))


@pytest.mark.parametrize("name", FOLLOWERS)
def test_each_is_a_follower(name: str):
    (found,) = followers_named([name])
    assert isinstance(found, Follower)


@pytest.mark.parametrize("name", FOLLOWERS)
def test_a_package_that_is_not_there_is_one_sentence_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, plain: Run
):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(names, "find_spec", lambda name: None)
    says = f"follow: {name} is not installed; pip install 'toeplens[{name}]'."
    with pytest.raises(EnvironmentFailure) as caught:
        must_be_installed([name])
    assert str(caught.value) == says
    said: list[str] = []  # on another machine, too late to refuse
    with heard(said.append):
        assert outcome(train(tiny(), tmp_path, followers=followers_named([name]))) == outcome(plain)
    assert len(said) == 1
    assert said[0].endswith(f" follows no more: {says[:-1]}; training goes on.")


# ---- TensorBoard ----------------------------------------------------------------------------------------------------


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of the one run below ``directory``."""
    events = accumulated(directory)
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def texts(directory: Path) -> dict[str, str]:
    events = accumulated(directory)
    found = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    return {tag.split("/")[0]: each[-1].tensor_proto.string_val[0].decode() for tag, each in found.items()}


def accumulated(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (place,) = directory.glob("tensorboard/*/")
    return EventAccumulator(str(place)).Reload()


def test_tensorboard_shows_each_evaluation_once(tmp_path: Path, plain: Run):
    run = followed("tensorboard", tmp_path)
    assert outcome(run) == outcome(plain)
    assert [path.name for path in run.directory.glob("tensorboard/*")] == ["paper-RoPE-1-seed-0"]
    shown = scalars(run.directory)
    assert set(shown) == {*FIGURES, "epoch", "lr", "seconds"}
    for name, told in shown.items():
        wanted = [(row["step"], row[name.replace("/", "_")]) for row in run.metrics]
        assert told == [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted]
    assert texts(run.directory)["run"] == "paper · RoPE/1 · seed 0"
    assert '"lr": 0.01' in texts(run.directory)["spec"]


def test_tensorboard_forgets_what_a_kill_has_lost(tmp_path: Path):
    """Rows of step 3 and 6 were told, and no checkpoint was written."""
    events, spec = followers_named(["tensorboard"]), tiny()
    kills = SimpleNamespace(begin=lambda run: None, end=lambda end: None, look=lambda row: kill(row["step"]))

    def kill(step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(spec, tmp_path, followers=[*events, kills])
    assert [step for step, _ in scalars(tmp_path / spec.name)["lr"]] == [3, 6]
    train(spec, tmp_path, followers=followers_named(["tensorboard"]), should_stop=After(STOP))
    assert [step for step, _ in scalars(tmp_path / spec.name)["lr"]] == [3]


def test_tensorboard_says_why_a_run_ended(tmp_path: Path):
    run = train(tiny(lr=1e30), tmp_path, followers=followers_named(["tensorboard"]))
    assert texts(run.directory)["end"] == "diverged: the loss is not finite after step 3"


def test_where_tensorboard_cannot_write_it_is_left_out(tmp_path: Path, plain: Run):
    spec, said = tiny(), []
    train(spec, tmp_path, should_stop=After(1))
    (tmp_path / spec.name / "tensorboard").write_text("in the way")
    with heard(said.append):
        assert outcome(train(spec, tmp_path, followers=followers_named(["tensorboard"]))) == outcome(plain)
    assert len(said) == 1
    assert said[0].startswith("TensorBoard follows no more: ")


# ---- Weights & Biases -----------------------------------------------------------------------------------------------


class WandbRun:
    """A run of wandb, as far as it is used."""

    def __init__(self, step: int) -> None:
        self.step, self.rows, self.summary = step, {}, {}
        self.preempting, self.code = False, None

    def log(self, row: dict[str, float], step: int) -> None:
        assert step >= self.step
        self.rows[step], self.step = row, step

    def mark_preempting(self) -> None:
        self.preempting = True

    def finish(self, exit_code: int) -> None:
        self.code = exit_code


class Wandb:
    """wandb, as far as it is used: it gives a run that goes on its next step."""

    def __init__(self) -> None:
        self.opened: list[dict[str, Any]] = []
        self.runs: list[WandbRun] = []

    Settings = staticmethod(dict)

    def setup(self, settings: dict[str, Any]) -> None:
        assert settings == {"silent": True}

    def init(self, **given: Any) -> WandbRun:
        before = [run.step + 1 for run, had in zip(self.runs, self.opened, strict=True) if had["id"] == given["id"]]
        self.opened.append(given)
        self.runs.append(WandbRun(max(before, default=0)))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.delenv("WANDB_INIT_TIMEOUT", raising=False)
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_goes_on_with_the_same_run(tmp_path: Path, plain: Run, wandb: Wandb):
    run = followed("wandb", tmp_path)
    assert outcome(run) == outcome(plain)
    for given in wandb.opened:
        assert given == {
            "project": "toeplens",
            "id": run.directory.name,
            "name": "paper · RoPE/1 · seed 0",
            "group": "laptop",
            "config": run.spec.content,
            "resume": "allow",
            "reinit": "create_new",
            "settings": {"silent": True, "console": "off", "init_timeout": 15.0},
        }
    first, second = wandb.runs
    assert [list(each.rows) for each in (first, second)] == [STEPS[:1], STEPS[1:]]
    assert set(first.rows[3]) == {*FIGURES, "epoch", "lr", "seconds"}
    assert (first.code, first.preempting, first.summary) == (1, True, {"status": "stopped", "reason": ""})
    assert (second.code, second.preempting, second.summary["status"]) == (0, False, "complete")
    assert second.summary["test/accuracy"] == run.result["test_accuracy"]


def test_wandb_is_not_sent_again_what_it_has_from_before_a_kill(tmp_path: Path, wandb: Wandb):
    train(tiny(), tmp_path / "killed", followers=followers_named(["wandb"]), should_stop=After(STOP))
    train(tiny(), tmp_path / "again", followers=followers_named(["wandb"]))
    assert [list(each.rows) for each in wandb.runs] == [STEPS[:1], STEPS[1:]]


def test_a_run_that_diverged_has_failed_in_wandb(tmp_path: Path, wandb: Wandb):
    train(tiny(lr=1e30), tmp_path, followers=followers_named(["wandb"]))
    (run,) = wandb.runs
    assert (run.code, run.preempting) == (1, False)
    assert run.summary["status"] == "diverged"
    assert run.summary["reason"] == "the loss is not finite after step 3"


def test_models_trained_as_one_are_runs_of_their_own(tmp_path: Path, wandb: Wandb, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    specs = [tiny(model={"dropout": 0.0}, seed=seed) for seed in range(2)]
    train_as_one(specs, tmp_path, followers=[followers_named(["wandb"]) for _ in specs])
    assert {(each["project"], each["id"]) for each in wandb.opened} == {("mine", spec.name) for spec in specs}
    assert [list(each.rows) for each in wandb.runs] == [STEPS, STEPS]


# ---- MLflow ---------------------------------------------------------------------------------------------------------


class Client:
    """An MLflow server and its client, as far as they are used."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, SimpleNamespace] = {}

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        assert name not in self.experiments
        self.experiments[name] = f"experiment {len(self.experiments)}"
        return self.experiments[name]

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> list[SimpleNamespace]:
        return [
            run
            for run in self.runs.values()
            if [run.experiment] == experiments
            and filter_string == f"tags.`toeplens.run` = '{run.tags['toeplens.run']}'"
        ][:max_results]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
        key = f"run {len(self.runs)}"
        info = SimpleNamespace(run_id=key)
        self.runs[key] = SimpleNamespace(
            info=info, experiment=experiment, name=run_name, tags=dict(tags), params={}, metrics=[], status="RUNNING"
        )
        return self.runs[key]

    def update_run(self, key: str, status: str) -> None:
        self.runs[key].status = status

    def get_metric_history(self, key: str, name: str) -> list[SimpleNamespace]:
        return [each for each in self.runs[key].metrics if each.key == name]

    def log_batch(self, key: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100
        assert not {each.key for each in params} & set(self.runs[key].params)
        self.runs[key].params |= {each.key: each.value for each in params}
        self.runs[key].metrics += metrics

    def set_tag(self, key: str, name: str, value: str) -> None:
        self.runs[key].tags[name] = value

    def set_terminated(self, key: str, status: str) -> None:
        self.runs[key].status = status


def entity(*fields: str) -> Any:
    return lambda *given: SimpleNamespace(**dict(zip(fields, given, strict=True)))


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    server = Client()
    entities = SimpleNamespace(Metric=entity("key", "value", "timestamp", "step"), Param=entity("key", "value"))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: server, entities=entities))
    return server


def told(run: SimpleNamespace, name: str) -> list[int]:
    return [each.step for each in run.metrics if each.key == name]


def test_mlflow_finds_its_run_again(tmp_path: Path, plain: Run, mlflow: Client):
    run = followed("mlflow", tmp_path)
    assert outcome(run) == outcome(plain)
    assert mlflow.experiments == {"toeplens/laptop": "experiment 0"}
    (found,) = mlflow.runs.values()
    assert (found.name, found.status) == ("paper · RoPE/1 · seed 0", "FINISHED")
    wanted = {"toeplens.run": run.directory.name, "toeplens.study": "laptop", "toeplens.status": "complete"}
    assert found.tags == wanted
    assert (found.params["model.d_model"], found.params["lr"]) == ("8", "0.01")
    assert {name: told(found, name) for name in FIGURES} == dict.fromkeys(FIGURES, STEPS)
    assert [each.value for each in found.metrics if each.key == "test/loss"] == [r["test_loss"] for r in run.metrics]


def test_mlflow_is_not_sent_again_what_it_has_from_before_a_kill(tmp_path: Path, mlflow: Client):
    stopped = followers_named(["mlflow"])
    train(tiny(), tmp_path / "killed", followers=stopped, should_stop=After(STOP))
    (found,) = mlflow.runs.values()
    assert (found.status, told(found, "lr")) == ("KILLED", STEPS[:1])
    train(tiny(), tmp_path / "again", followers=followers_named(["mlflow"]))
    assert (found.status, told(found, "lr")) == ("FINISHED", STEPS)


def test_a_run_that_diverged_has_failed_in_mlflow(tmp_path: Path, mlflow: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    train(tiny(lr=1e30), tmp_path, followers=followers_named(["mlflow"]))
    (found,) = mlflow.runs.values()
    assert list(mlflow.experiments) == ["mine"]
    assert found.status == "FAILED"
    assert found.tags["toeplens.reason"] == "the loss is not finite after step 3"


def test_mlflow_is_made_ready_once_before_many_follow(mlflow: Client):
    for _ in range(2):
        assert made_ready(("mlflow", "tensorboard"), "laptop") == ("mlflow", "tensorboard")
    assert list(mlflow.experiments) == ["toeplens/laptop"]


def test_what_cannot_be_made_ready_is_said_and_left_out(monkeypatch: pytest.MonkeyPatch):
    def refuses() -> None:
        raise OSError("nothing answers at http://there.\n(Tried 3 times.)")

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=refuses))
    said: list[str] = []
    with heard(said.append):
        assert made_ready(("mlflow", "wandb"), None) == ("wandb",)
    assert said == ["mlflow follows no run: nothing answers at http://there."]


def test_an_experiment_that_another_worker_has_just_made_is_taken(tmp_path: Path, mlflow: Client):
    make = mlflow.create_experiment

    def late(name: str) -> str:
        make(name)
        raise RuntimeError("RESOURCE_ALREADY_EXISTS")

    mlflow.create_experiment = late  # type: ignore[method-assign]
    train(tiny(), tmp_path, followers=followers_named(["mlflow"]))
    assert [told(found, "lr") for found in mlflow.runs.values()] == [STEPS]
