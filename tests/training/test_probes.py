"""A probed run has the weights of one without a probe, and its rows do not depend on where it was stopped."""

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
from tests.builders import CallbackProbe, Crash, StopAfter, files_in, refusal_message, results_of, without_times

from toeplens.model import Decoder
from toeplens.training import Run, RunSpec, loop, train
from toeplens.training import run as store
from toeplens.utils import InputError, execution

pytestmark = pytest.mark.usefixtures("no_disk")
LAST_STEP = 6  # 2 epochs of 3 steps, the third one partial
PROBE_STEPS = (0, 2, 3, 6)  # the initialisation, inside an epoch, between two, the end
UNITS = LAST_STEP + len(PROBE_STEPS) + 2 * 4  # with 4 batches of evaluation an epoch


def tiny(protocol: str = "paper", encoding: str = "rope", **changes: Any) -> RunSpec:
    small = {"d_model": 8, "d_ff": 8, "num_layers": 1, "protocol": protocol}
    return builders.tiny(encoding, model=small | changes.pop("model", {}), **changes)


def digest(state: dict[str, torch.Tensor]) -> dict[str, float]:
    """The sum of each tensor's values: another number after every step."""
    return {name: float(value.double().sum()) for name, value in state.items()}


class DigestProbe(CallbackProbe):
    """Notes each tensor's sum; ``disturb`` is what it does to the model afterwards."""

    name = "digests"

    def __init__(
        self, at: Sequence[int] = PROBE_STEPS, disturb: Callable[[Decoder], object] = lambda model: None
    ) -> None:
        super().__init__(at)
        self.disturb = disturb
        self.asked: list[int] = []

    def measure(self, model: Decoder, step: int) -> dict[str, Any]:
        self.asked.append(step)
        seen = {"training": model.training, **digest(store.unique_state(model))}
        self.disturb(model)
        return seen


@pytest.fixture(scope="module")
def unprobed_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run without a probe that nothing interrupted."""
    return train(tiny(), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def probed_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run with a probe."""
    return train(tiny(), tmp_path_factory.mktemp("probed"), probe=DigestProbe())


@pytest.mark.parametrize("wrong", [-1, LAST_STEP + 1])
def test_invalid_probe_steps_are_refused(tmp_path: Path, wrong: Any):
    said = f"probe_steps must be steps from 0 to {LAST_STEP}, got {wrong}."
    assert refusal_message(lambda: train(tiny(), tmp_path, probe=DigestProbe((0, wrong)))) == said


# ---- a probe changes nothing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("protocol", "encoding"), [("paper", "relative-table"), ("released", "rope")])
def test_probing_does_not_change_the_weights(tmp_path: Path, protocol: str, encoding: str):
    spec = tiny(protocol, encoding)
    alone = train(spec, tmp_path / "alone")
    probed = train(spec, tmp_path / "seen", probe=DigestProbe(range(LAST_STEP + 1)))
    assert results_of(probed) == results_of(alone)
    assert probed.directory.name == alone.directory.name
    assert [row["step"] for row in probed.probe_rows] == list(range(LAST_STEP + 1))


@torch.no_grad()
def corrupt_weights(model: Decoder) -> None:
    for parameter in model.parameters():
        parameter.fill_(7.0)


def leave_gradients(model: Decoder) -> None:
    with torch.enable_grad():
        model(torch.ones(3, 8, dtype=torch.long)).sum().backward()


SIDE_EFFECTS: dict[str, Callable[[Decoder], object]] = {
    "draws": lambda model: torch.rand(100),
    "seeds": lambda model: torch.manual_seed(0),
    "weights": corrupt_weights,
    "gradients": leave_gradients,
    "hooks": lambda model: model.readout.register_forward_hook(lambda *given: torch.zeros(1)),
}


@pytest.mark.parametrize("disturb", SIDE_EFFECTS)
def test_a_probe_with_side_effects_does_not_change_the_run(
    tmp_path: Path, unprobed_run: Run, probed_run: Run, disturb: str
):
    run = train(tiny(), tmp_path, probe=DigestProbe(disturb=SIDE_EFFECTS[disturb]))
    assert results_of(run) == results_of(unprobed_run)
    assert without_times(run.probe_rows) == without_times(probed_run.probe_rows)


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_rows_describe_the_model_at_their_step(tmp_path: Path, probed_run: Run):
    assert [row["step"] for row in probed_run.probe_rows] == list(PROBE_STEPS)
    for units, step in enumerate(PROBE_STEPS[:3]):
        out = tmp_path / str(step)
        train(
            tiny(), out, should_stop=StopAfter(step + (4 if step > 3 else 0))
        )  # evaluation comes after the third step
        state = store.load_checkpoint(out / tiny().name, tiny())
        assert state is not None
        assert state["step"] == step
        assert without_times(probed_run.probe_rows)[units] == {
            "step": step,
            "training": False,
            **digest(state["model"]),
        }
    assert without_times(probed_run.probe_rows)[3] == {
        "step": 6,
        "training": False,
        **digest(store.unique_state(probed_run.model())),
    }


def test_nonfinite_values_become_null(tmp_path: Path):
    class Odd(DigestProbe):
        def measure(self, model: Decoder, step: int) -> dict[str, Any]:
            return {"a": math.nan, "b": [1.5, [math.inf, -math.inf]], "c": (1, None), "d": np.float64("nan")}

    run = train(tiny(), tmp_path, probe=Odd([0]))
    assert without_times(run.probe_rows) == [
        {"step": 0, "a": None, "b": [1.5, [None, None]], "c": [1, None], "d": None}
    ]
    assert "NaN" not in (run.directory / store.PROBES).read_text()


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ({"step": 1}, "probe: 'digests' must not return the name 'step', which is reserved."),
        ({"a": torch.ones(2)}, "probe: 'digests' must return lists and numbers that JSON can hold."),
    ],
    ids=["step", "tensor"],
)
def test_an_invalid_row_is_refused(tmp_path: Path, seen: dict[str, Any], message: str):
    class Bad(DigestProbe):
        def measure(self, model: Decoder, step: int) -> dict[str, Any]:
            return seen

    assert refusal_message(lambda: train(tiny(), tmp_path, probe=Bad())) == message


# ---- stopped and started again --------------------------------------------------------------------------------------


def test_a_run_interrupted_at_every_unit_probes_each_step_once(tmp_path: Path, unprobed_run: Run, probed_run: Run):
    probe = DigestProbe()
    for _ in range(UNITS - 1):
        assert train(tiny(), tmp_path, probe=probe, deadline=0.0).status == "stopped"
    run = train(tiny(), tmp_path, probe=probe, deadline=0.0)
    assert probe.asked == list(PROBE_STEPS)
    assert without_times(run.probe_rows) == without_times(probed_run.probe_rows)
    assert results_of(run) == results_of(probed_run) == results_of(unprobed_run)


def test_steps_passed_without_a_probe_are_missing(tmp_path: Path, unprobed_run: Run, probed_run: Run):
    train(tiny(), tmp_path, should_stop=StopAfter(3))  # three steps, no evaluation yet
    run = train(tiny(), tmp_path, probe=DigestProbe())
    assert without_times(run.probe_rows) == without_times(probed_run.probe_rows)[2:]
    assert results_of(run) == results_of(unprobed_run)


def test_rows_after_the_checkpoint_are_dropped(tmp_path: Path):
    """An epoch's rows were written, no checkpoint after them: the run starts over, now without a probe."""
    stop = StopAfter()

    def crash() -> bool:
        if stop() or stop.asked > 10:
            raise Crash
        return False

    with pytest.raises(Crash):
        train(tiny(), tmp_path, probe=DigestProbe(), should_stop=crash)
    assert len(Run.open(tmp_path / tiny().name).probe_rows) == 2
    assert train(tiny(), tmp_path).probe_rows == []


def test_rows_of_two_probes_are_not_mixed(tmp_path: Path, probed_run: Run):
    class Others(DigestProbe):
        name = "others"

    train(tiny(), tmp_path, probe=DigestProbe(), should_stop=StopAfter(3))
    before = files_in(tmp_path / tiny().name)
    said = "probe must be 'digests', as before, or None, got 'others'."
    assert refusal_message(lambda: train(tiny(), tmp_path, probe=Others())) == said
    assert files_in(tmp_path / tiny().name) == before
    assert without_times(train(tiny(), tmp_path, probe=DigestProbe()).probe_rows) == without_times(
        probed_run.probe_rows
    )


@pytest.mark.parametrize(("at", "error"), [(2, InputError), (3, ZeroDivisionError)])
def test_a_probe_that_raises_loses_nothing(
    tmp_path: Path, unprobed_run: Run, probed_run: Run, at: int, error: type[Exception]
):
    class Fails(DigestProbe):
        def measure(self, model: Decoder, step: int) -> dict[str, Any]:
            if step == at:
                torch.manual_seed(0)
                corrupt_weights(model)
                raise error("no")
            return super().measure(model, step)

    before = torch.get_rng_state()
    with pytest.raises(error):
        train(tiny(), tmp_path, probe=Fails(), checkpoint_seconds=math.inf)
    assert torch.equal(torch.get_rng_state(), before)
    state = store.load_checkpoint(tmp_path / tiny().name, tiny())
    assert state is not None
    assert state["step"] == at
    run = train(tiny(), tmp_path, probe=DigestProbe() if at % 2 else None)
    assert results_of(run) == results_of(unprobed_run)
    seen = PROBE_STEPS if at % 2 else [step for step in PROBE_STEPS if step < at]
    assert without_times(run.probe_rows) == without_times(probed_run.probe_rows)[: len(seen)]


# ---- time -----------------------------------------------------------------------------------------------------------


class FakeClock:
    """A time that passes only when told to: a step takes 1 s (the first one more, where it is compiled), a probe 10."""

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

    def make_probe(self, at: Sequence[int]) -> DigestProbe:
        def pass_time(model: Decoder) -> None:
            self.now += 10

        return DigestProbe(at, pass_time)


def test_probe_time_is_recorded_in_its_row_and_not_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = train(tiny(), tmp_path, probe=FakeClock(monkeypatch).make_probe(PROBE_STEPS))
    assert [row["seconds"] for row in run.probe_rows] == [10.0] * 4
    assert run.result["seconds"] == LAST_STEP
    assert [row["seconds"] for row in run.metrics] == [3, 6]


def test_a_deadline_counts_a_probe_as_a_unit_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After the first probe no unit is begun that might last past the deadline, as a probe would."""
    clock = FakeClock(monkeypatch)
    run = train(tiny(), tmp_path, probe=clock.make_probe(PROBE_STEPS), deadline=21.5)
    assert (run.status, run.step, clock.now) == ("stopped", 2, 12.0)
    run = train(tiny(), tmp_path, probe=clock.make_probe(PROBE_STEPS), deadline=12.5)
    assert (run.step, clock.now) == (2, 22.0)  # the probe, once, because a unit is always done
