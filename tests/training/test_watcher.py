"""A run that is watched has the weights of one that is not, and the rows do not depend on where it was stopped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests import builders
from tests.builders import After, Crash, Watching, files, outcome, refusal, timeless

from toeplens.ground import InputError, execution
from toeplens.model import Decoder
from toeplens.training import Run, RunSpec, loop, train
from toeplens.training import run as store

pytestmark = pytest.mark.usefixtures("no_disk")
LAST_STEP = 6  # 2 epochs of 3 steps, the third one partial
MOMENTS = (0, 2, 3, 6)  # the initialisation, inside an epoch, between two, the end
UNITS = LAST_STEP + len(MOMENTS) + 2 * 4  # with 4 batches of evaluation an epoch


def tiny(protocol: str = "paper", encoding: str = "rope", **changes: Any) -> RunSpec:
    small = {"d_model": 8, "d_ff": 8, "num_layers": 1, "protocol": protocol}
    return builders.tiny(encoding, model=small | changes.pop("model", {}), **changes)


def digest(state: dict[str, torch.Tensor]) -> dict[str, float]:
    """The sum of each tensor's values: another number after every step."""
    return {name: float(value.double().sum()) for name, value in state.items()}


class Digests(Watching):
    """Notes each tensor's sum; ``disturb`` is what it does to the model afterwards."""

    name = "digests"

    def __init__(self, at: Sequence[int] = MOMENTS, disturb: Callable[[Decoder], object] = lambda model: None) -> None:
        super().__init__(at)
        self.disturb = disturb
        self.asked: list[int] = []

    def look(self, model: Decoder, step: int) -> dict[str, Any]:
        self.asked.append(step)
        seen = {"training": model.training, **digest(store.own_state(model))}
        self.disturb(model)
        return seen


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nobody watched and nothing interrupted."""
    return train(tiny(), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run, watched."""
    return train(tiny(), tmp_path_factory.mktemp("watched"), watcher=Digests())


@pytest.mark.parametrize("wrong", [-1, LAST_STEP + 1])
def test_moments_that_are_no_steps_of_the_run_are_refused(tmp_path: Path, wrong: Any):
    said = f"moments must be steps from 0 to {LAST_STEP}, got {wrong}."
    assert refusal(lambda: train(tiny(), tmp_path, watcher=Digests((0, wrong)))) == said


# ---- a look changes nothing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("protocol", "encoding"), [("paper", "relative-table"), ("released", "rope")])
def test_the_weights_are_those_of_the_run_without_a_watcher(tmp_path: Path, protocol: str, encoding: str):
    spec = tiny(protocol, encoding)
    alone = train(spec, tmp_path / "alone")
    seen = train(spec, tmp_path / "seen", watcher=Digests(range(LAST_STEP + 1)))
    assert outcome(seen) == outcome(alone)
    assert seen.directory.name == alone.directory.name
    assert [row["step"] for row in seen.watched] == list(range(LAST_STEP + 1))


@torch.no_grad()
def spoil(model: Decoder) -> None:
    for parameter in model.parameters():
        parameter.fill_(7.0)


def leave_gradients(model: Decoder) -> None:
    with torch.enable_grad():
        model(torch.ones(3, 8, dtype=torch.long)).sum().backward()


DISTURBANCES: dict[str, Callable[[Decoder], object]] = {
    "draws": lambda model: torch.rand(100),
    "seeds": lambda model: torch.manual_seed(0),
    "weights": spoil,
    "gradients": leave_gradients,
    "hooks": lambda model: model.readout.register_forward_hook(lambda *given: torch.zeros(1)),
}


@pytest.mark.parametrize("disturb", DISTURBANCES)
def test_a_look_that_disturbs_is_harmless(tmp_path: Path, plain: Run, watched: Run, disturb: str):
    run = train(tiny(), tmp_path, watcher=Digests(disturb=DISTURBANCES[disturb]))
    assert outcome(run) == outcome(plain)
    assert timeless(run.watched) == timeless(watched.watched)


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_rows_are_of_the_model_after_so_many_steps(tmp_path: Path, watched: Run):
    assert [row["step"] for row in watched.watched] == list(MOMENTS)
    for units, step in enumerate(MOMENTS[:3]):
        out = tmp_path / str(step)
        train(tiny(), out, should_stop=After(step + (4 if step > 3 else 0)))  # evaluation comes after the third step
        state = store.load_checkpoint(out / tiny().name, tiny())
        assert state is not None
        assert state["step"] == step
        assert timeless(watched.watched)[units] == {"step": step, "training": False, **digest(state["model"])}
    assert timeless(watched.watched)[3] == {"step": 6, "training": False, **digest(store.own_state(watched.model()))}


def test_what_is_no_finite_number_is_null(tmp_path: Path):
    class Odd(Digests):
        def look(self, model: Decoder, step: int) -> dict[str, Any]:
            return {"a": math.nan, "b": [1.5, [math.inf, -math.inf]], "c": (1, None), "d": np.float64("nan")}

    run = train(tiny(), tmp_path, watcher=Odd([0]))
    assert timeless(run.watched) == [{"step": 0, "a": None, "b": [1.5, [None, None]], "c": [1, None], "d": None}]
    assert "NaN" not in (run.directory / store.WATCHED).read_text()


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ({"step": 1}, "watcher: 'digests' must not return the name 'step', which is reserved."),
        ({"a": torch.ones(2)}, "watcher: 'digests' must return lists and numbers that JSON can hold."),
    ],
    ids=["step", "tensor"],
)
def test_what_cannot_be_a_row_is_refused(tmp_path: Path, seen: dict[str, Any], message: str):
    class Bad(Digests):
        def look(self, model: Decoder, step: int) -> dict[str, Any]:
            return seen

    assert refusal(lambda: train(tiny(), tmp_path, watcher=Bad())) == message


# ---- stopped and started again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [0, 1, 4, 8, 17])  # before and after each look, and in an evaluation
def test_stopped_anywhere_the_rows_are_the_same(tmp_path: Path, plain: Run, watched: Run, units: int):
    assert train(tiny(), tmp_path, watcher=Digests(), should_stop=After(units)).status == "stopped"
    run = train(tiny(), tmp_path, watcher=Digests())
    assert timeless(run.watched) == timeless(watched.watched)
    assert outcome(run) == outcome(watched) == outcome(plain)


def test_stopped_everywhere_the_rows_are_the_same_and_no_look_is_made_twice(tmp_path: Path, plain: Run, watched: Run):
    watcher = Digests()
    for _ in range(UNITS - 1):
        assert train(tiny(), tmp_path, watcher=watcher, deadline=0.0).status == "stopped"
    run = train(tiny(), tmp_path, watcher=watcher, deadline=0.0)
    assert watcher.asked == list(MOMENTS)
    assert timeless(run.watched) == timeless(watched.watched)
    assert outcome(run) == outcome(plain)


def test_moments_passed_without_a_watcher_are_missing(tmp_path: Path, plain: Run, watched: Run):
    train(tiny(), tmp_path, should_stop=After(3))  # three steps, no evaluation yet
    run = train(tiny(), tmp_path, watcher=Digests())
    assert timeless(run.watched) == timeless(watched.watched)[2:]
    assert outcome(run) == outcome(plain)


def test_rows_ahead_of_the_checkpoint_are_not_kept(tmp_path: Path):
    """An epoch's rows were written, no checkpoint after them: the run starts over, now without a watcher."""
    asked = After()

    def crash() -> bool:
        if asked() or asked.asked > 10:
            raise Crash
        return False

    with pytest.raises(Crash):
        train(tiny(), tmp_path, watcher=Digests(), should_stop=crash)
    assert len(Run.open(tmp_path / tiny().name).watched) == 2
    assert train(tiny(), tmp_path).watched == []


def test_two_watchers_rows_are_not_mixed(tmp_path: Path, watched: Run):
    class Others(Digests):
        name = "others"

    train(tiny(), tmp_path, watcher=Digests(), should_stop=After(3))
    before = files(tmp_path / tiny().name)
    said = "watcher must be 'digests', as before, or None, got 'others'."
    assert refusal(lambda: train(tiny(), tmp_path, watcher=Others())) == said
    assert files(tmp_path / tiny().name) == before
    assert timeless(train(tiny(), tmp_path, watcher=Digests()).watched) == timeless(watched.watched)


@pytest.mark.parametrize(("at", "error"), [(2, InputError), (3, ZeroDivisionError)])
def test_a_look_that_raises_loses_nothing(tmp_path: Path, plain: Run, watched: Run, at: int, error: type[Exception]):
    class Fails(Digests):
        def look(self, model: Decoder, step: int) -> dict[str, Any]:
            if step == at:
                torch.manual_seed(0)
                spoil(model)
                raise error("no")
            return super().look(model, step)

    before = torch.get_rng_state()
    with pytest.raises(error):
        train(tiny(), tmp_path, watcher=Fails(), checkpoint_seconds=math.inf)
    assert torch.equal(torch.get_rng_state(), before)
    state = store.load_checkpoint(tmp_path / tiny().name, tiny())
    assert state is not None
    assert state["step"] == at
    run = train(tiny(), tmp_path, watcher=Digests() if at % 2 else None)
    assert outcome(run) == outcome(plain)
    seen = MOMENTS if at % 2 else [step for step in MOMENTS if step < at]
    assert timeless(run.watched) == timeless(watched.watched)[: len(seen)]


# ---- time -----------------------------------------------------------------------------------------------------------


class Clock:
    """A time that passes only when told to: a step takes 1 s (the first one more, where it is compiled), a look 10."""

    def __init__(self, patch: pytest.MonkeyPatch, first: float = 1.0) -> None:
        self.now, self.took = 0.0, first
        for module in (loop, execution):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now))
        original = loop.Session.take_step

        def step(session: Any) -> None:
            original(session)
            self.now += self.took
            self.took = 1.0

        patch.setattr(loop.Session, "take_step", step)

    def watcher(self, at: Sequence[int]) -> Digests:
        def pass_time(model: Decoder) -> None:
            self.now += 10

        return Digests(at, pass_time)


def test_a_looks_time_is_in_its_row_and_not_in_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = train(tiny(), tmp_path, watcher=Clock(monkeypatch).watcher(MOMENTS))
    assert [row["seconds"] for row in run.watched] == [10.0] * 4
    assert run.result["seconds"] == LAST_STEP
    assert [row["seconds"] for row in run.metrics] == [3, 6]


def test_a_look_is_a_unit_of_work_to_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After the first look no unit is begun that might last past the deadline, as a look would."""
    clock = Clock(monkeypatch)
    run = train(tiny(), tmp_path, watcher=clock.watcher(MOMENTS), deadline=21.5)
    assert (run.status, run.step, clock.now) == ("stopped", 2, 12.0)
    run = train(tiny(), tmp_path, watcher=clock.watcher(MOMENTS), deadline=12.5)
    assert (run.step, clock.now) == (2, 22.0)  # the look, once, because a unit is always done
