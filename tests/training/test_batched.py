"""Models trained as one end as they do alone, and can be stopped, killed and gone on with in either way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import builders
from tests.builders import CallbackProbe, StopAfter, refusal_message, without_times
from torch import Tensor

from toeplens.engine import ExecutionOptions, Job, run_jobs
from toeplens.engine import jobs as engine
from toeplens.model import decoder
from toeplens.training import Run, RunSpec, loop, train, train_batched
from toeplens.training import run as store
from toeplens.training.batched import BatchedSessions, check_batchable, is_launch_bound


def tiny(seed: int = 0, encoding: str = "rope", protocol: str = "paper", **changes: Any) -> RunSpec:
    model = {"num_layers": 2, "dropout": 0.0, "protocol": protocol} | changes.pop("model", {})
    return builders.tiny(encoding, model=model, seed=seed, data_seed=seed, **{"epochs": 3} | changes)


DROPOUT: dict[str, Any] = {"model": {"dropout": 0.3}, **builders.COUNTING, "train_examples": 50, "test_examples": 19}


def three_specs(encoding: str = "rope", **changes: Any) -> list[RunSpec]:
    """Three seeds; the second with another learning rate, other betas and another schedule."""
    other = {"lr": 3e-3, "betas": (0.8, 0.99), "warmup": 0.2, "schedule": "constant", "weight_decay": 0.1}
    return [tiny(0, encoding, **changes), tiny(1, encoding, **changes | other), tiny(2, encoding, **changes)]


@pytest.fixture
def float64_default() -> Any:
    """All in float64."""
    had = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(had)


def max_difference(ours: Sequence[Run], theirs: Sequence[Run]) -> float:
    """The largest difference of any weight or figure."""
    result = 0.0
    for one, other in zip(ours, theirs, strict=True):
        assert (one.spec, one.status, len(one.metrics)) == (other.spec, other.status, len(other.metrics))
        weights, others = store.unique_state(one.model()), store.unique_state(other.model())
        result = max(result, *(float((weights[name] - others[name]).abs().max()) for name in weights))
        for row, same in zip(without_times(one.metrics), without_times(other.metrics), strict=True):
            assert row.keys() == same.keys()
            result = max(result, *(abs(row[key] - same[key]) for key in row))
    return result


# with plateaus that these models reach soon, each in its own time
PLATEAU = {"average": 0.9, "evaluations": 2, "epochs": 8, "plateau": {"gain": 0.5, "patience": 1}}
BATCHES: dict[str, list[RunSpec]] = {
    "released": three_specs(protocol="released"),
    **{name: three_specs(name) for name in ("alibi", "shaw", "mla", "fire", "cope")},
    "tensors of an encoding": [tiny(0, model={"encoding_options": {"base": base}}) for base in (10.0, 10_000.0)],
    "plateaus": [tiny(n, lr=lr, schedule="constant", **PLATEAU) for n, lr in enumerate((1e-2, 1e-5, 3e-3))],
    "ignored labels, padding, a last batch that is smaller": [
        tiny(seed, **builders.COUNTING, train_examples=50, test_examples=19) for seed in range(2)
    ],
}


@pytest.mark.usefixtures("float64_default")
@pytest.mark.parametrize("case", BATCHES)
def test_in_float64_batched_runs_match_single_runs(tmp_path: Path, case: str):
    together = train_batched(BATCHES[case], tmp_path / "one")
    assert max_difference(together, [train(spec, tmp_path / "alone") for spec in BATCHES[case]]) < 1e-9
    assert not torch.equal(*(run.model().readout.weight for run in together[:2]))
    if case == "plateaus":
        assert len({run.step for run in together}) > 1, "they were to end at different steps"


@pytest.mark.usefixtures("float64_default")
def test_long_sequences_are_trained_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoder, "attend", partial(decoder.attend, pairs_per_chunk=64))
    specs = [tiny(seed, "shaw") for seed in range(2)]
    assert (
        max_difference(train_batched(specs, tmp_path / "one"), [train(spec, tmp_path / "alone") for spec in specs])
        < 1e-9
    )


@pytest.mark.usefixtures("float64_default")
def test_a_single_run_matches_a_batch_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = tiny(0, "shaw", average=0.9)
    alone = train(spec, tmp_path / "alone")
    monkeypatch.setattr(loop, "is_launch_bound", lambda *_: True)
    batched = train(spec, tmp_path / "one")
    assert max_difference([batched], [alone]) < 1e-9
    assert [segment.setup.stacked for run in (alone, batched) for segment in run.history] == [False, True]
    assert not train(spec, tmp_path / "asked", compile="off").history[0].setup.stacked


@pytest.mark.parametrize(
    ("changes", "device", "expected"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"model": {"dropout": 0.1}}, "cuda", True),
        ({"batch_size": 2**11, "train_examples": 2**11}, "cuda", False),  # eight fill a GPU
    ],
)
def test_a_small_single_run_is_a_batch_of_one_on_a_gpu(changes: dict, device: str, expected: bool):
    assert is_launch_bound(tiny(0, **changes), torch.device(device)) == expected


@pytest.mark.parametrize(("units", "changes"), [(4, {}), (9, {}), (4, DROPOUT)])
def test_an_interrupted_batch_resumes_bit_identically(tmp_path: Path, units: int, changes: dict):
    specs = three_specs(**{"average": 0.9} | changes)
    uninterrupted = train_batched(specs, tmp_path / "whole")
    stopped = train_batched(specs, tmp_path / "again", should_stop=StopAfter(units))
    assert {run.status for run in stopped} == {"stopped"}
    assert max_difference(train_batched(specs, tmp_path / "again"), uninterrupted) == 0.0


@pytest.mark.usefixtures("float64_default")
def test_batched_runs_resume_alone_and_single_runs_resume_batched(tmp_path: Path):
    specs = three_specs(average=0.9)
    alone = [train(spec, tmp_path / "alone") for spec in specs]
    train_batched(specs, tmp_path / "mixed", should_stop=StopAfter(4))
    assert max_difference([train(spec, tmp_path / "mixed") for spec in specs], alone) < 1e-9
    for units, spec in zip((2, 5, 7), specs, strict=True):  # which the stack takes up at different steps
        assert train(spec, tmp_path / "again", should_stop=StopAfter(units)).status == "stopped"
    actual = train_batched(specs, tmp_path / "again")
    assert max_difference(actual, alone) < 1e-9
    assert [segment.setup.stacked for segment in actual[0].history] == [False, True]


# with padding, and a last batch that is smaller
@pytest.mark.usefixtures("float64_default")
@pytest.mark.parametrize("encoding", ["rope", "alibi", "mla"])
def test_dropout_of_a_model_does_not_depend_on_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
):
    specs = [tiny(seed, encoding, **DROPOUT) for seed in range(4)]
    first = train_batched(specs[:3], tmp_path / "one")
    second = train_batched([specs[2], specs[3], specs[1]], tmp_path / "other")
    assert max_difference(first[1:], [second[2], second[0]]) < 1e-9
    monkeypatch.setattr(loop, "is_launch_bound", lambda *_: True)
    assert max_difference(first[:1], [train(specs[0], tmp_path / "alone")]) < 1e-9
    calm = train_batched([tiny(seed, encoding, **{**DROPOUT, "model": {}}) for seed in range(2)], tmp_path / "calm")
    assert not torch.equal(first[0].model().readout.weight, calm[0].model().readout.weight)


@pytest.mark.usefixtures("float64_default")
@pytest.mark.parametrize(
    "places", [("weights",), ("attention",), ("ffn-hidden", "ffn"), ("weights", "attention", "ffn")]
)
def test_with_the_same_masks_batched_runs_match_single_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: tuple[str, ...]
):
    specs = [tiny(seed, model={"dropout": 0.3, "dropout_on": places}) for seed in range(2)]
    drawn: list[list[Tensor]] = []  # the masks of each step
    draw = BatchedSessions._draw_masks

    def record(self: BatchedSessions, rows: Tensor) -> None:
        draw(self, rows)
        drawn.append([block.clone() for blocks in self.masks[rows.shape[1]] for block in blocks])

    monkeypatch.setattr(BatchedSessions, "_draw_masks", record)
    together = train_batched(specs, tmp_path / "one")
    assert {len(masks) for masks in drawn} == {2 * len(places)}, "one for each of two layers"
    means = [
        torch.cat([masks[index].flatten(1) for masks in drawn], 1).double().mean(1) for index in range(len(drawn[0]))
    ]
    assert all(((mean - 0.7).abs() < 0.05).all() for mean in means)
    assert not any(torch.equal(*masks[0]) for masks in drawn), "each model has its own"
    assert not torch.equal(drawn[0][0], drawn[1][0]), "each step has its own"

    alone = []
    for row, spec in enumerate(specs):
        masks = iter([mask[row] for step in drawn for mask in step])
        drop = lambda x, p=0.5, training=True, inplace=False, m=masks: x * next(m) / (1 - p) if training and p else x  # noqa: E731
        monkeypatch.setattr(torch.nn.functional, "dropout", drop)
        explicit = lambda *args, attend=decoder.attend, **options: attend(*args, **options | {"fused": False})  # noqa: E731
        monkeypatch.setattr(decoder, "attend", explicit)
        alone.append(train(spec, tmp_path / "alone"))
        assert next(masks, None) is None
        monkeypatch.undo()
        torch.set_default_dtype(torch.float64)
    assert max_difference(together, alone) < 1e-9


def test_in_float32_optimizer_steps_are_counted_per_parameter_after_batching(tmp_path: Path):
    """But for rounding, 1e-3: an optimiser counts in place, and a stack's models share one count."""
    specs = [tiny(seed) for seed in range(2)]
    alone = [train(spec, tmp_path / "alone") for spec in specs]
    train_batched(specs, tmp_path / "mixed", should_stop=StopAfter(4))
    assert max_difference([train(spec, tmp_path / "mixed") for spec in specs], alone) < 1e-3


def test_a_checkpoint_of_a_batched_run_holds_only_its_own_state(tmp_path: Path):
    sizes = []
    for many in (1, 8):
        out = tmp_path / str(many)
        runs = train_batched([tiny(seed) for seed in range(many)], out, should_stop=StopAfter(3))
        sizes.append((runs[0].directory / store.CHECKPOINT).stat().st_size)
    assert sizes[1] < 1.2 * sizes[0]


def test_a_diverging_run_does_not_affect_the_batch(tmp_path: Path):
    specs = [tiny(0), tiny(1, lr=1e30), tiny(2), tiny(3)]
    done = train(specs[3], tmp_path / "one")  # which is left alone
    actual = train_batched(specs, tmp_path / "one")
    assert [run.status for run in actual] == ["complete", "diverged", "complete", "complete"]
    assert actual[3] == done
    kept = [actual[0], actual[2]]
    assert max_difference(kept, [train(specs[0], tmp_path / "alone"), train(specs[2], tmp_path / "alone")]) < 1e-4


def test_a_failing_probe_loses_no_batched_run(tmp_path: Path):
    def fail() -> None:
        raise OSError("no probe")

    specs = three_specs()
    with pytest.raises(OSError, match="no probe"):
        train_batched(specs, tmp_path, probes=[None, CallbackProbe([2], fail), None])
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
        ([tiny(0, "shape"), tiny(1, "shape")], "encoding 'shape' cannot be stacked"),
    ],
)
def test_a_refused_batch_gives_the_reason(specs: list[RunSpec], why: str):
    assert why in refusal_message(lambda: check_batchable(specs))


@pytest.mark.heavy
def test_compatible_jobs_are_batched_with_single_job_results(tmp_path: Path):
    small = {"epochs": 1, "model": {"num_layers": 1}}
    specs = [tiny(0, **small), tiny(1, **small), tiny(2, "alibi", **small)]
    jobs = [Job(spec, spec.name, examples=16) for spec in specs]
    batch_sizes: list[int] = []
    heard = run_jobs(
        jobs, tmp_path, ExecutionOptions(stack=8), workers=1, on_event=lambda event: batch_sizes.append(event.job)
    )
    assert heard == ["complete"] * 3
    assert set(batch_sizes) == set(range(3))
    for spec in specs:
        assert (tmp_path / spec.name / "ablation.json").exists()
        (segment,) = Run.open(tmp_path / spec.name).history
        assert segment.setup.stacked == (spec in specs[:2])


def test_an_interrupt_in_a_batch_stops_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun: list[Any] = []
    monkeypatch.setattr(engine, "train_batch", lambda some, *_: bool(begun.append(some)))
    jobs = [Job(spec, spec.name) for spec in three_specs()]
    assert run_jobs(jobs, tmp_path, ExecutionOptions(stack=8), workers=1) == ["stopped"] * 3
    assert begun == [jobs]
