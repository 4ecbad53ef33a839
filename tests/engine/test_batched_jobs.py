"""Batches of jobs: how many there are for so many workers, and what becomes of them where a run or memory is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders import StopAfter, locked_elsewhere, tiny

from toeplens.engine import ClusterOptions, ExecutionOptions, Job, run_jobs
from toeplens.engine import jobs as engine
from toeplens.engine.jobs import plan_batches, train_batch
from toeplens.training import Run, RunSpec
from toeplens.training.batched import models_per_gpu
from toeplens.training.run import RESULT


def jobs(count: int, **changes: Any) -> list[Job]:
    specs = [tiny(model={"dropout": 0.0}, seed=seed, **changes) for seed in range(count)]
    return [Job(spec, spec.name) for spec in specs]


def ignore_progress(*told: Any) -> None:
    """Who hears of no progress."""


@pytest.mark.parametrize(
    ("room", "full", "sizes"),
    [
        ((1, 1.0), 1000, [100]),
        ((1, 1.0), 40, [34, 34, 32]),
        ((64, 1.0), 1000, [2] * 50),  # else 63 of 64 GPUs had none
        ((4, 0.25), 1000, [25] * 4),
        ((4, 0.25), 40, [10] * 10),  # four on a GPU fill it together
        ((200, 1.0), 1000, []),
        ((8, 0.0), 1000, []),  # a CPU
    ],
)
def test_batches_are_spread_over_workers_and_fill_a_gpu_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: tuple[int, float], full: int, sizes: list[int]
):
    monkeypatch.setattr(engine, "models_per_gpu", lambda spec: full)
    expected = jobs(100)
    actual = plan_batches(expected, range(100), tmp_path, ExecutionOptions(), *room)
    assert [len(some) for some in actual] == sizes
    assert sorted(place for some in actual for place in some) == list(range(100 if sizes else 0))


def test_the_batch_size_can_be_set(tmp_path: Path):
    actual = plan_batches(jobs(10), range(10), tmp_path, ExecutionOptions(stack=5), 8, 0.0)
    assert [len(some) for some in actual] == [5, 5]
    assert plan_batches(jobs(10), range(10), tmp_path, ExecutionOptions(stack=1), 1, 1.0) == []


def test_smaller_models_make_larger_batches():
    def of(length: int, batch_size: int) -> int:
        model = {"max_len": length, "num_classes": length, "num_heads": 8}
        task_options = {"length": length, "vocab_size": 12}
        return models_per_gpu(tiny(task_options=task_options, batch_size=batch_size, model=model))

    assert of(40, batch_size=32) == 2**17 // (32 * 40)
    assert of(2048, batch_size=1) == 2**31 // (8 * 2 * 2048**2)  # attention's weights


@pytest.mark.parametrize(("given", "sizes"), [({"gpus_per_cell": 0.25}, [2, 2]), ({}, [])])
def test_on_a_cluster_batches_depend_on_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, float], sizes: list[int]
):
    assert not torch.cuda.is_available()
    items: list[Any] = []
    monkeypatch.setattr(engine, "parallel_capacity", lambda cluster: 2)
    monkeypatch.setattr(engine, "run_parallel", lambda work, given, *rest, **more: items.extend(given))
    run_jobs(jobs(4), tmp_path, ExecutionOptions(), workers=ClusterOptions(engine="ray", **given))
    assert [len(item.args[0]) for item in items if item.func is train_batch] == sizes


def test_a_job_continues_as_soon_as_its_batch_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A short batch's models need not wait for a long one's before they are measured."""
    calls: dict[str, Any] = {}
    monkeypatch.setattr(engine, "run_parallel", lambda work, items, *rest, **more: calls.update(more, items=items))
    alike, other = jobs(4), Job(tiny(seed=9), "with dropout")
    run_jobs([other, *alike, alike[3]], tmp_path, ExecutionOptions(stack=2), workers=2)
    first, second, *alone = [item.args[0] for item in calls["items"]]
    assert [*first, *second] == alike
    assert alone == [other, *alike, alike[3]]
    assert calls["depends_on"] == {3: 0, 4: 0, 5: 1, 6: 1, 7: 1}


def test_a_locked_run_is_left_out_of_the_batch(tmp_path: Path):
    expected = jobs(3)
    directory = tmp_path / expected[1].spec.name
    directory.mkdir()
    with locked_elsewhere(directory):
        assert train_batch(expected, tmp_path, ExecutionOptions(), ignore_progress)
    assert [(tmp_path / job.spec.name / RESULT).exists() for job in expected] == [True, False, True]


def test_batched_runs_are_published_and_resumed_elsewhere(tmp_path: Path):
    expected, limits = jobs(2, epochs=3), ExecutionOptions(checkpoint_seconds=0.0, publish=f"memory://{tmp_path.name}")
    assert train_batch(expected, tmp_path / "a", replace(limits, should_stop=StopAfter(5)), ignore_progress) is False
    assert train_batch(expected, tmp_path / "b", replace(limits, should_stop=lambda: True), ignore_progress) is False
    steps = [[Run.open(tmp_path / place / job.spec.name).step for job in expected] for place in "ab"]
    assert steps[0] == steps[1]
    assert steps[0][0] > 0


def test_batched_runs_are_logged_under_their_labels(tmp_path: Path):
    expected = [replace(job, label=f"seed {job.spec.seed}") for job in jobs(2)]
    assert train_batch(expected, tmp_path, ExecutionOptions(follow=("tensorboard",)), ignore_progress)
    for job in expected:
        (events,) = (tmp_path / job.spec.name).glob("tensorboard/*/events*")
        assert events.parent.name == f"seed-{job.spec.seed}"


def test_out_of_memory_halves_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original, sizes = engine.train_batched, []

    def at_most_two(specs: Sequence[RunSpec], *given: Any, **options: Any) -> list[Run]:
        sizes.append(len(specs))
        if len(specs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(specs, *given, **options)

    monkeypatch.setattr(engine, "train_batched", at_most_two)
    expected, messages = jobs(5), []
    assert train_batch(expected, tmp_path, ExecutionOptions(), lambda index, *what: messages.append(index))
    assert sizes == [5, 2, 3, 1, 2]
    assert [Run.open(tmp_path / job.spec.name).status for job in expected] == ["complete"] * 5
    assert set(messages) == set(range(5))


def test_a_single_model_out_of_memory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def never(*given: Any, **options: Any) -> list[Run]:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(engine, "train_batched", never)
    with pytest.raises(torch.OutOfMemoryError):
        train_batch(jobs(3), tmp_path, ExecutionOptions(), ignore_progress)
