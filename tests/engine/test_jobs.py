"""A job trains a run and silences its heads; stopped anywhere in either and carried out again, it ends the same."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests import builders
from tests.builders import COUNTING, After, held

from toeplens.engine import Asked, ExecutionOptions, Job, ablate_run, jobs, measure_run, read_ablation, run_job
from toeplens.engine import measures as looked_at
from toeplens.ground import InputError, execution, read_json, write_json
from toeplens.lens import HeadAblation, ablate_heads
from toeplens.sources import DecoderSource
from toeplens.tasks import Examples
from toeplens.training import Batches, Run, RunSpec, train

HEADS, TEST, TRAIN = 2, 30, 48
UNITS = 3 * (3 + 2)  # epochs of training steps and batches of evaluation


def tiny(**changes: Any) -> RunSpec:
    return builders.tiny(**{"train_examples": TRAIN, "test_examples": TEST, "epochs": 3} | changes)


def job(examples: int = TEST, **changes: Any) -> Job:
    return Job(tiny(**changes), "a job", examples)


@pytest.fixture(autouse=True)
def _several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 8 examples of 8 tokens, with 2 heads and the intact model side by side."""
    monkeypatch.setitem(looked_at._REPLAYED_TOKENS, "cpu", 8 * 8 * (HEADS + 1))


BATCHES = 4  # 30 examples by 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny(), tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> Run:
    """A trained run of one's own, not ablated yet."""
    shutil.copytree(trained.directory, tmp_path / trained.spec.name)
    return Run.open(tmp_path / trained.spec.name)


def parts(run: Run) -> list[Path]:
    return [path for path in run.directory.iterdir() if path.name.startswith("ablation-passes")]


def by_hand(run: Run, examples: Examples) -> dict[str, Any]:
    """The ablation as a plain call of the measure, in one batch."""
    batch = Batches.of(examples, torch.device("cpu"), run.spec.ignore_label)
    return ablate_heads(DecoderSource(run.model()), [batch.take(slice(None))], chance=run.spec.guess).to_dict()


def recorded(run: Run, examples: int = TEST, split: Any = "test") -> HeadAblation:
    found = read_ablation(run.directory, Asked(examples, split))
    assert found is not None
    return found


def held_out(run: Run) -> Examples:
    return run.spec.build_task().dataset("test", TEST, run.spec.data_seed)


# ---- trained, then ablated ------------------------------------------------------------------------------------------


def test_a_job_trains_then_silences_each_head(tmp_path: Path, trained: Run):
    run = run_job(job(), tmp_path, ExecutionOptions())
    assert run.status == "complete"
    assert run.directory == tmp_path / tiny().name
    assert (run.directory / "model.safetensors").read_bytes() == (trained.directory / "model.safetensors").read_bytes()
    content = read_json(run.directory / "ablation.json")
    assert content.pop("asked") == {"examples": TEST, "split": "test"}
    assert content == by_hand(run, held_out(run)) == recorded(run).to_dict()
    assert content["baseline"] == pytest.approx(run.result["test_accuracy"])
    assert content["examples"] == TEST
    assert content["chance"] == run.spec.guess
    assert parts(run) == []
    assert recorded(run).drops.shape == (2, HEADS)


def test_what_was_measured_of_weights_that_are_gone_is_measured_anew(tmp_path: Path):
    """Made again on another machine they may be others."""
    wanted = Job(tiny(), "a job", 20, measures=("toeplitz",))
    run = run_job(wanted, tmp_path, ExecutionOptions())
    before = {name: read_json(run.directory / f"{name}.json") for name in ("ablation", "ablation-loss", "toeplitz")}
    for name, content in before.items():
        write_json(run.directory / f"{name}.json", content | {"chance": 0.123} if "chance" in content else content)
    assert jobs.without_weights([wanted], tmp_path) == []
    (run.directory / "model.safetensors").unlink()
    assert jobs.without_weights([wanted], tmp_path) == [], "all is measured"
    more = replace(wanted, measures=("toeplitz", "position"))
    assert jobs.without_weights([more], tmp_path) == [more]
    with pytest.raises(InputError, match=r"model.safetensors is missing; delete .*result.json and train with the same"):
        run_job(more, tmp_path, ExecutionOptions())
    (run.directory / "result.json").unlink()
    run_job(more, tmp_path, ExecutionOptions())
    assert {name: read_json(run.directory / f"{name}.json") for name in before} == before
    assert read_json(run.directory / "spec.json") == run.spec.content


@pytest.mark.parametrize(("examples", "test", "train"), [(20, 6, 14), (10_000, 20, TRAIN)])
def test_train_and_test_together_are_taken_as_seventy_to_thirty(run: Run, examples: int, test: int, train: int):
    found = ablate_run(run, examples=examples, split="train+test").to_dict()
    task, seed = run.spec.build_task(), run.spec.data_seed
    both = [task.dataset("train", train, seed), task.dataset("test", test, seed)]
    assert found == by_hand(run, Examples.join(both))
    assert found["examples"] == test + train
    assert read_json(run.directory / "ablation.json")["asked"] == {"examples": examples, "split": "train+test"}


PADDED = {"form": "released", "length": 8, "vocab_size": 12, "max_between": 3, "max_side": 2}


@pytest.mark.parametrize("fields", [COUNTING, {"task_options": PADDED}], ids=["ignored", "padded"])
def test_a_label_that_training_ignores_counts_nowhere_and_texts_keep_their_lengths(
    tmp_path: Path, fields: dict[str, Any]
):
    run = run_job(job(**fields), tmp_path, ExecutionOptions())
    test, found = held_out(run), recorded(run)
    assert found.to_dict() == by_hand(run, test)
    assert (test.lengths.min() < 8) == (fields is not COUNTING)
    assert found.examples == (test.labels != run.spec.ignore_label).sum()
    assert (found.examples < TEST) == (fields is COUNTING)
    assert found.baseline == pytest.approx(run.result["test_accuracy"])
    assert found.chance == run.spec.guess


def test_a_run_that_diverged_is_not_ablated(tmp_path: Path):
    run = run_job(job(lr=1e30), tmp_path, ExecutionOptions())
    assert run.status == "diverged"
    assert read_ablation(run.directory, Asked(TEST)) is None
    assert run_job(job(lr=1e30), tmp_path, ExecutionOptions()) == run


def test_what_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_job(job(), tmp_path, ExecutionOptions())
    before = {path: path.stat().st_mtime_ns for path in run.directory.iterdir() if path.name != ".lock"}
    monkeypatch.setattr(jobs, "ablate_run", None)
    assert run_job(job(), tmp_path, ExecutionOptions()) == run
    assert {path: path.stat().st_mtime_ns for path in run.directory.iterdir() if path.name != ".lock"} == before


def test_progress_is_passed_on_and_without_examples_nothing_is_ablated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ticks = iter(range(10**6))
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), time=lambda: 0.0)
    monkeypatch.setattr("toeplens.training.loop.time", clock)
    told: list[tuple[int, int]] = []
    run = run_job(job(0), tmp_path, ExecutionOptions(), lambda step, total, row: told.append((step, total)))
    assert told[-1] == (9, 9)
    assert run.status == "complete"
    assert read_ablation(run.directory, Asked(TEST)) is None  # it was given no examples


# ---- stopped and gone on with ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [0, 3, UNITS - 1])
def test_stopped_in_training_it_ends_as_if_it_had_not(tmp_path: Path, run: Run, units: int):
    ablate_run(run, examples=TEST)
    out = tmp_path / "again"
    stopped = run_job(job(), out, ExecutionOptions(should_stop=After(units)))
    assert stopped.status == "stopped"
    assert read_ablation(stopped.directory, Asked(TEST)) is None
    done = run_job(job(), out, ExecutionOptions())
    for name in ("model.safetensors", "ablation.json"):
        assert (done.directory / name).read_bytes() == (run.directory / name).read_bytes()


@pytest.mark.parametrize("units", [0, 1, BATCHES, 2 * BATCHES - 1])
def test_stopped_between_any_two_batches_of_the_ablation_it_ends_as_if_it_had_not(
    tmp_path: Path, run: Run, trained: Run, units: int
):
    ablate_run(run, examples=TEST)
    shutil.copytree(trained.directory, tmp_path / "again" / trained.spec.name)
    stopped = run_job(job(), tmp_path / "again", ExecutionOptions(should_stop=After(units)))
    assert stopped.status == "stopped"
    assert not (stopped.directory / "ablation.json").exists()
    assert sum(len(list(directory.iterdir())) for directory in parts(stopped)) == units
    assert Run.open(stopped.directory).status == "complete"  # the training is
    asked = After()
    done = run_job(job(), tmp_path / "again", ExecutionOptions(should_stop=asked))
    assert done.status == "complete"
    assert asked.asked == 2 * BATCHES - units  # only what was missing
    assert (done.directory / "ablation.json").read_bytes() == (run.directory / "ablation.json").read_bytes()
    assert parts(done) == []


@pytest.mark.parametrize(
    ("took", "deadline", "left_at"),
    [([10] * 4 * BATCHES, 35.0, 30), ([10, 2] + [2] * 4 * BATCHES, 21.0, 12)],
    ids=["none is begun that would pass it", "the slowest yet is what the next may take"],
)
def test_an_ablation_keeps_its_deadline(
    run: Run, monkeypatch: pytest.MonkeyPatch, took: list[int], deadline: float, left_at: int
):
    now, seconds = [0.0], iter(took)
    for module in (jobs, execution):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    states = DecoderSource.states

    def slow(*given: Any) -> Any:
        now[0] += next(seconds)
        return states(*given)

    monkeypatch.setattr(DecoderSource, "states", slow)
    with pytest.raises(jobs.Stopped):
        ablate_run(run, examples=TEST, limits=ExecutionOptions(deadline=deadline))
    assert now[0] == left_at
    ablate_run(run, examples=TEST, limits=ExecutionOptions(deadline=1000.0))
    assert now[0] == sum(took[: 2 * BATCHES])  # no batch twice


def test_no_measure_is_begun_once_it_is_time_to_stop(run: Run, monkeypatch: pytest.MonkeyPatch):
    wanted, begun = Job(tiny(), "a job", TEST, "test", ("toeplitz", "representation")), []

    def measured(run: Run, name: str, **options: Any) -> Any:
        begun.append(name)
        return measure_run(run, name, **options)

    monkeypatch.setattr(jobs, "measure_run", measured)
    stopped = run_job(wanted, run.directory.parent, ExecutionOptions(should_stop=lambda: bool(begun)))
    assert (stopped.status, begun) == ("stopped", ["toeplitz"])
    assert run_job(wanted, run.directory.parent, ExecutionOptions()).status == "complete"
    assert {f"{name}.json" for name in wanted.measures} <= {path.name for path in run.directory.iterdir()}


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY garbage"])
def test_a_damaged_part_is_worked_out_again(run: Run, damage: bytes):
    with pytest.raises(jobs.Stopped):
        ablate_run(run, examples=TEST, limits=ExecutionOptions(should_stop=After(3)))
    part = sorted(parts(run)[0].iterdir())[0]
    part.write_bytes(damage)
    ablate_run(run, examples=TEST)
    assert recorded(run).to_dict() == by_hand(run, held_out(run))


def test_parts_of_another_choice_of_examples_are_not_taken(run: Run):
    for asked in ({"examples": 20}, {"examples": TEST, "split": "train+test"}):
        with pytest.raises(jobs.Stopped):
            ablate_run(run, **asked, limits=ExecutionOptions(should_stop=After(2)))
    assert ablate_run(run, examples=TEST).to_dict() == by_hand(run, held_out(run))


def test_a_record_of_other_examples_is_neither_taken_nor_replaced(tmp_path: Path, run: Run):
    few = ablate_run(run, examples=7)
    assert read_ablation(run.directory, Asked(TEST)) is None
    done = run_job(job(), run.directory.parent, ExecutionOptions())
    every = recorded(done)
    assert (few.examples, every.examples) == (7, TEST)
    both = ablate_run(run, examples=TEST, split="train+test")
    for asked, wanted in (((7,), few), ((TEST,), every), ((TEST, "train+test"), both)):
        assert recorded(run, *asked).to_dict() == wanted.to_dict()
    names = {path.name for path in run.directory.glob("ablation*.json")}
    whose = ("", f"-test-{TEST}", f"-train+test-{TEST}")
    assert names == {f"ablation{by}{examples}.json" for by in ("", "-loss") for examples in whose}


def test_a_loss_record_of_its_own_keeps_its_curve(run: Run):
    """Accuracy and loss come from the same passes, and the loss then has no curve: it replaces none that has."""
    alone = ablate_run(run, examples=TEST, metric="loss")
    ablate_run(run, examples=TEST)
    again = read_ablation(run.directory, Asked(TEST), "loss")
    assert again is not None
    assert np.isfinite(alone.cumulative).all()
    np.testing.assert_allclose(again.cumulative, alone.cumulative, rtol=1e-5)


# ---- two at a time --------------------------------------------------------------------------------------------------


def test_a_run_that_another_process_works_on_is_neither_silenced_nor_measured(run: Run):
    before = sorted(path.name for path in run.directory.iterdir())
    with held(run.directory):
        for work in (ablate_run, lambda run, examples: measure_run(run, "representation", examples=examples)):
            with pytest.raises(InputError, match="is in use by another process"):
                work(run, examples=TEST)
    assert sorted(path.name for path in run.directory.iterdir()) == before
    recorded = measure_run(run, "representation", examples=TEST)
    with held(run.directory):
        assert measure_run(run, "representation", examples=TEST) == recorded


def test_a_job_waits_for_a_run_that_another_process_works_on(tmp_path: Path, run: Run):
    with held(run.directory) as stream:
        threading.Timer(0.3, stream.close).start()
        assert run_job(job(), run.directory.parent, ExecutionOptions()).status == "complete"
        assert stream.closed
    with held(run.directory):
        waited = run_job(job(), run.directory.parent, ExecutionOptions(should_stop=After(2)))
    assert waited.status == "stopped"


def test_parts_of_an_ablation_that_was_killed_after_its_record_are_removed(run: Run):
    with pytest.raises(jobs.Stopped):
        ablate_run(run, examples=TEST, limits=ExecutionOptions(should_stop=After(1)))
    (left,) = parts(run)
    kept = left.rename(run.directory / "kept")
    ablate_run(run, examples=TEST)
    kept.rename(left)
    (left / ".0.npy.12345678.tmp").write_text("")
    (run.directory / ".ablation.json.12345678.tmp").write_text("")
    run_job(job(), run.directory.parent, ExecutionOptions())
    assert parts(run) == []
    assert not list(run.directory.glob("*.tmp"))
    assert recorded(run)
