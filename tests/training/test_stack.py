"""Models trained as one end as they do alone, and can be stopped, killed and gone on with in either way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import builders
from tests.builders import After, Watching, refusal, timeless

from toeplens.engine import ExecutionOptions, Job, run_jobs
from toeplens.engine import jobs as engine
from toeplens.model import decoder
from toeplens.training import Run, RunSpec, loop, train, train_as_one
from toeplens.training import run as store
from toeplens.training.stack import must_stack, pays_alone


def tiny(seed: int = 0, encoding: str = "rope", protocol: str = "paper", **changes: Any) -> RunSpec:
    model = {"num_layers": 2, "dropout": 0.0, "protocol": protocol} | changes.pop("model", {})
    return builders.tiny(encoding, model=model, seed=seed, data_seed=seed, **{"epochs": 3} | changes)


def three(encoding: str = "rope", **changes: Any) -> list[RunSpec]:
    """Three seeds; the second with another learning rate, other betas and another schedule."""
    other = {"lr": 3e-3, "betas": (0.8, 0.99), "warmup": 0.2, "schedule": "constant", "weight_decay": 0.1}
    return [tiny(0, encoding, **changes), tiny(1, encoding, **changes | other), tiny(2, encoding, **changes)]


@pytest.fixture
def double() -> Any:
    """All in float64."""
    had = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(had)


def apart(ours: Sequence[Run], theirs: Sequence[Run]) -> float:
    """The largest difference of any weight or figure."""
    found = 0.0
    for one, other in zip(ours, theirs, strict=True):
        assert (one.spec, one.status, len(one.metrics)) == (other.spec, other.status, len(other.metrics))
        weights, others = store.own_state(one.model()), store.own_state(other.model())
        found = max(found, *(float((weights[name] - others[name]).abs().max()) for name in weights))
        for row, same in zip(timeless(one.metrics), timeless(other.metrics), strict=True):
            assert row.keys() == same.keys()
            found = max(found, *(abs(row[key] - same[key]) for key in row))
    return found


# with plateaus that these models reach soon, each in its own time
PLATEAU = {"average": 0.9, "evaluations": 2, "epochs": 8, "plateau": {"gain": 0.5, "patience": 1}}
STACKS: dict[str, list[RunSpec]] = {
    "released": three(protocol="released"),
    **{name: three(name) for name in ("alibi", "shaw", "mla", "fire", "cope")},
    "tensors of an encoding": [tiny(0, model={"encoding_options": {"base": base}}) for base in (10.0, 10_000.0)],
    "plateaus": [tiny(n, lr=lr, schedule="constant", **PLATEAU) for n, lr in enumerate((1e-2, 1e-5, 3e-3))],
    "ignored labels, padding, a last batch that is smaller": [
        tiny(seed, **builders.COUNTING, train_examples=50, test_examples=19) for seed in range(2)
    ],
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("case", STACKS)
def test_in_float64_each_ends_as_it_does_alone(tmp_path: Path, case: str):
    together = train_as_one(STACKS[case], tmp_path / "one")
    assert apart(together, [train(spec, tmp_path / "alone") for spec in STACKS[case]]) < 1e-9
    assert not torch.equal(*(run.model().readout.weight for run in together[:2]))
    if case == "plateaus":
        assert len({run.step for run in together}) > 1, "they were to end at different steps"


@pytest.mark.usefixtures("double")
def test_texts_too_long_for_all_their_weights_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoder, "attend", partial(decoder.attend, at_once=64))
    specs = [tiny(seed, "shaw") for seed in range(2)]
    assert apart(train_as_one(specs, tmp_path / "one"), [train(spec, tmp_path / "alone") for spec in specs]) < 1e-9


@pytest.mark.usefixtures("double")
def test_one_alone_ends_as_a_stack_of_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = tiny(0, "shaw", average=0.9)
    alone = train(spec, tmp_path / "alone")
    monkeypatch.setattr(loop, "pays_alone", lambda *_: True)
    stack = train(spec, tmp_path / "one")
    assert apart([stack], [alone]) < 1e-9
    assert [segment.setup.stacked for run in (alone, stack) for segment in run.history] == [False, True]
    assert not train(spec, tmp_path / "asked", compile="off").history[0].setup.stacked


@pytest.mark.parametrize(
    ("changes", "device", "expected"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"model": {"dropout": 0.1}}, "cuda", False),
        ({"batch_size": 2**11, "train_examples": 2**11}, "cuda", False),  # eight fill a GPU
    ],
)
def test_one_alone_is_a_stack_of_one_on_a_gpu_that_it_leaves_empty(changes: dict, device: str, expected: bool):
    assert pays_alone(tiny(0, **changes), torch.device(device)) == expected


@pytest.mark.parametrize("units", [4, 9])
def test_stopped_and_gone_on_with_in_the_stack_it_ends_bit_identical(tmp_path: Path, units: int):
    specs = three(average=0.9)
    whole = train_as_one(specs, tmp_path / "whole")
    stopped = train_as_one(specs, tmp_path / "again", should_stop=After(units))
    assert {run.status for run in stopped} == {"stopped"}
    assert apart(train_as_one(specs, tmp_path / "again"), whole) == 0.0


@pytest.mark.usefixtures("double")
def test_begun_in_a_stack_each_goes_on_alone_and_the_other_way_round(tmp_path: Path):
    specs = three(average=0.9)
    alone = [train(spec, tmp_path / "alone") for spec in specs]
    train_as_one(specs, tmp_path / "mixed", should_stop=After(4))
    assert apart([train(spec, tmp_path / "mixed") for spec in specs], alone) < 1e-9
    for units, spec in zip((2, 5, 7), specs, strict=True):  # which the stack takes up at different steps
        assert train(spec, tmp_path / "again", should_stop=After(units)).status == "stopped"
    found = train_as_one(specs, tmp_path / "again")
    assert apart(found, alone) < 1e-9
    assert [segment.setup.stacked for segment in found[0].history] == [False, True]


def test_in_float32_each_parameter_counts_its_own_steps_when_it_goes_on_alone(tmp_path: Path):
    """But for rounding, 1e-3: an optimiser counts in place, and a stack's models share one count."""
    specs = [tiny(seed) for seed in range(2)]
    alone = [train(spec, tmp_path / "alone") for spec in specs]
    train_as_one(specs, tmp_path / "mixed", should_stop=After(4))
    assert apart([train(spec, tmp_path / "mixed") for spec in specs], alone) < 1e-3


def test_a_checkpoint_of_one_of_many_holds_its_own_alone(tmp_path: Path):
    sizes = []
    for many in (1, 8):
        out = tmp_path / str(many)
        runs = train_as_one([tiny(seed) for seed in range(many)], out, should_stop=After(3))
        sizes.append((runs[0].directory / store.CHECKPOINT).stat().st_size)
    assert sizes[1] < 1.2 * sizes[0]


def test_one_that_diverges_leaves_the_others_as_they_are(tmp_path: Path):
    specs = [tiny(0), tiny(1, lr=1e30), tiny(2), tiny(3)]
    done = train(specs[3], tmp_path / "one")  # which is left alone
    found = train_as_one(specs, tmp_path / "one")
    assert [run.status for run in found] == ["complete", "diverged", "complete", "complete"]
    assert found[3] == done
    kept = [found[0], found[2]]
    assert apart(kept, [train(specs[0], tmp_path / "alone"), train(specs[2], tmp_path / "alone")]) < 1e-4


def test_a_look_that_fails_costs_none_of_them_anything(tmp_path: Path):
    def fail() -> None:
        raise OSError("no look")

    specs = three()
    with pytest.raises(OSError, match="no look"):
        train_as_one(specs, tmp_path, watchers=[None, Watching([2], fail), None])
    assert [Run.open(tmp_path / spec.name).step for spec in specs] == [2, 2, 2]


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ([tiny(0), tiny(1, batch_size=8)], "must differ only in seeds and rates"),
        ([tiny(0), tiny(1, model={"num_layers": 1})], "must differ only in seeds and rates"),
        (
            [tiny(0), tiny(1, model={"encoding_options": {"pairing": "half"}})],
            "encoding 'rope' must be the same in all models",
        ),
        ([tiny(0, model={"dropout": 0.1}), tiny(1, model={"dropout": 0.1})], "dropout (0.1)"),
        ([tiny(0, "shape"), tiny(1, "shape")], "encoding 'shape' cannot be stacked"),
    ],
)
def test_a_refusal_says_why(specs: list[RunSpec], why: str):
    assert why in refusal(lambda: must_stack(specs))


@pytest.mark.heavy
def test_jobs_are_trained_as_one_where_they_can_be_and_each_is_then_done_as_alone(tmp_path: Path):
    small = {"epochs": 1, "model": {"num_layers": 1}}
    specs = [tiny(0, **small), tiny(1, **small), tiny(2, "alibi", **small)]
    jobs = [Job(spec, spec.name, examples=16) for spec in specs]
    told: list[int] = []
    heard = run_jobs(
        jobs, tmp_path, ExecutionOptions(stack=8), workers=1, on_event=lambda event: told.append(event.job)
    )
    assert heard == ["complete"] * 3
    assert set(told) == set(range(3))
    for spec in specs:
        assert (tmp_path / spec.name / "ablation.json").exists()
        (segment,) = Run.open(tmp_path / spec.name).history
        assert segment.setup.stacked == (spec in specs[:2])


def test_a_stop_in_the_stack_is_a_stop_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun: list[Any] = []
    monkeypatch.setattr(engine, "train_batch", lambda some, *_: bool(begun.append(some)))
    jobs = [Job(spec, spec.name) for spec in three()]
    assert run_jobs(jobs, tmp_path, ExecutionOptions(stack=8), workers=1) == ["stopped"] * 3
    assert begun == [jobs]
