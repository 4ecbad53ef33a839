"""Stacks of jobs: how many there are for so many places, and what becomes of them where a run or memory is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders import After, held, tiny

from toeplens.engine import ClusterOptions, ExecutionOptions, Job, run_jobs
from toeplens.engine import jobs as engine
from toeplens.engine.jobs import stacks_of, train_batch
from toeplens.training import Run, RunSpec
from toeplens.training.run import RESULT
from toeplens.training.stack import that_fill_a_gpu


def jobs(count: int, **changes: Any) -> list[Job]:
    specs = [tiny(model={"dropout": 0.0}, seed=seed, **changes) for seed in range(count)]
    return [Job(spec, spec.name) for spec in specs]


def nothing(*told: Any) -> None:
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
def test_stacks_are_shared_out_over_places_and_fill_a_share_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: tuple[int, float], full: int, sizes: list[int]
):
    monkeypatch.setattr(engine, "that_fill_a_gpu", lambda spec: full)
    wanted = jobs(100)
    found = stacks_of(wanted, range(100), tmp_path, ExecutionOptions(), *room)
    assert [len(some) for some in found] == sizes
    assert sorted(place for some in found for place in some) == list(range(100 if sizes else 0))


def test_how_many_are_one_may_be_said(tmp_path: Path):
    found = stacks_of(jobs(10), range(10), tmp_path, ExecutionOptions(stack=5), 8, 0.0)
    assert [len(some) for some in found] == [5, 5]
    assert stacks_of(jobs(10), range(10), tmp_path, ExecutionOptions(stack=1), 1, 1.0) == []


def test_more_models_fill_a_gpu_the_smaller_they_are():
    def of(length: int, batch_size: int) -> int:
        model = {"max_len": length, "num_classes": length, "num_heads": 8}
        task_options = {"length": length, "vocab_size": 12}
        return that_fill_a_gpu(tiny(task_options=task_options, batch_size=batch_size, model=model))

    assert of(40, batch_size=32) == 2**17 // (32 * 40)
    assert of(2048, batch_size=1) == 2**31 // (8 * 2 * 2048**2)  # attention's weights


@pytest.mark.parametrize(("given", "sizes"), [({"gpus_per_cell": 0.25}, [2, 2]), ({}, [])])
def test_on_a_cluster_it_is_its_gpus_that_count_and_not_the_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, float], sizes: list[int]
):
    assert not torch.cuda.is_available()
    spread: list[Any] = []
    monkeypatch.setattr(engine, "at_a_time", lambda cluster: 2)
    monkeypatch.setattr(engine, "spread", lambda work, pieces, *rest, **more: spread.extend(pieces))
    run_jobs(jobs(4), tmp_path, ExecutionOptions(), workers=ClusterOptions(engine="ray", **given))
    assert [len(piece.args[0]) for piece in spread if piece.func is train_batch] == sizes


def test_a_job_is_gone_on_with_as_soon_as_its_own_stack_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A short stack's models need not wait for a long one's before they are measured."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(engine, "spread", lambda work, pieces, *rest, **more: given.update(more, pieces=pieces))
    alike, other = jobs(4), Job(tiny(seed=9), "with dropout")
    run_jobs([other, *alike, alike[3]], tmp_path, ExecutionOptions(stack=2), workers=2)
    first, second, *alone = [piece.args[0] for piece in given["pieces"]]
    assert [*first, *second] == alike
    assert alone == [other, *alike, alike[3]]
    assert given["after"] == {3: 0, 4: 0, 5: 1, 6: 1, 7: 1}


def test_a_run_that_somebody_holds_is_left_to_them(tmp_path: Path):
    wanted = jobs(3)
    directory = tmp_path / wanted[1].spec.name
    directory.mkdir()
    with held(directory):
        assert train_batch(wanted, tmp_path, ExecutionOptions(), nothing)
    assert [(tmp_path / job.spec.name / RESULT).exists() for job in wanted] == [True, False, True]


def test_each_of_a_stack_is_published_and_gone_on_with_elsewhere(tmp_path: Path):
    wanted, limits = jobs(2, epochs=3), ExecutionOptions(checkpoint_seconds=0.0, publish=f"memory://{tmp_path.name}")
    assert train_batch(wanted, tmp_path / "a", replace(limits, should_stop=After(5)), nothing) is False
    assert train_batch(wanted, tmp_path / "b", replace(limits, should_stop=lambda: True), nothing) is False
    steps = [[Run.open(tmp_path / place / job.spec.name).step for job in wanted] for place in "ab"]
    assert steps[0] == steps[1]
    assert steps[0][0] > 0


def test_each_of_a_stack_is_followed_by_its_label(tmp_path: Path):
    wanted = [replace(job, label=f"seed {job.spec.seed}") for job in jobs(2)]
    assert train_batch(wanted, tmp_path, ExecutionOptions(follow=("tensorboard",)), nothing)
    for job in wanted:
        (events,) = (tmp_path / job.spec.name).glob("tensorboard/*/events*")
        assert events.parent.name == f"seed-{job.spec.seed}"


def test_where_memory_ends_a_stack_is_trained_in_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train_as_one, sizes = engine.train_as_one, []

    def at_most_two(specs: Sequence[RunSpec], *given: Any, **options: Any) -> list[Run]:
        sizes.append(len(specs))
        if len(specs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return train_as_one(specs, *given, **options)

    monkeypatch.setattr(engine, "train_as_one", at_most_two)
    wanted, told = jobs(5), []
    assert train_batch(wanted, tmp_path, ExecutionOptions(), lambda index, *what: told.append(index))
    assert sizes == [5, 2, 3, 1, 2]
    assert [Run.open(tmp_path / job.spec.name).status for job in wanted] == ["complete"] * 5
    assert set(told) == set(range(5))


def test_a_model_for_which_there_is_no_memory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def never(*given: Any, **options: Any) -> list[Run]:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(engine, "train_as_one", never)
    with pytest.raises(torch.OutOfMemoryError):
        train_batch(jobs(3), tmp_path, ExecutionOptions(), nothing)
