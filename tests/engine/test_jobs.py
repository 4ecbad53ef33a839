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
from tests.builders import COUNTING, StopAfter, locked_elsewhere

from toeplens.backends import DecoderSource
from toeplens.engine import ExampleRequest, ExecutionOptions, Job, ablate_run, jobs, measure_run, read_ablation, run_job
from toeplens.engine import measures as looked_at
from toeplens.lens import HeadAblation, ablate_heads
from toeplens.tasks import Examples
from toeplens.training import Batches, Run, RunSpec, train
from toeplens.utils import InputError, execution, read_json, write_json

HEADS, TEST, TRAIN = 2, 30, 48
UNITS = 3 * (3 + 2)  # epochs of training steps and batches of evaluation


def tiny(**changes: Any) -> RunSpec:
    return builders.tiny(**{"train_examples": TRAIN, "test_examples": TEST, "epochs": 3} | changes)


def job(examples: int = TEST, **changes: Any) -> Job:
    return Job(tiny(**changes), "a job", examples)


@pytest.fixture(autouse=True)
def _several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 8 examples of 8 tokens, with 2 heads and the intact model side by side."""
    monkeypatch.setitem(looked_at._ABLATION_TOKENS, "cpu", 8 * 8 * (HEADS + 1))


BATCHES = 4  # 30 examples by 8


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny(), tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(trained_run: Run, tmp_path: Path) -> Run:
    """A trained run of one's own, not ablated yet."""
    shutil.copytree(trained_run.directory, tmp_path / trained_run.spec.name)
    return Run.open(tmp_path / trained_run.spec.name)


def partial_files(run: Run) -> list[Path]:
    return [path for path in run.directory.iterdir() if path.name.startswith("ablation-passes")]


def reference_ablation(run: Run, examples: Examples) -> dict[str, Any]:
    """The ablation as a plain call of the measure, in one batch."""
    batch = Batches.of(examples, torch.device("cpu"), run.spec.ignore_label)
    return ablate_heads(DecoderSource(run.model()), [batch.take(slice(None))], chance=run.spec.guess).to_dict()


def recorded(run: Run, examples: int = TEST, split: Any = "test") -> HeadAblation:
    result = read_ablation(run.directory, ExampleRequest(examples, split))
    assert result is not None
    return result


def held_out(run: Run) -> Examples:
    return run.spec.build_task().dataset("test", TEST, run.spec.data_seed)


# ---- trained, then ablated ------------------------------------------------------------------------------------------


def test_a_job_trains_then_ablates_each_head(tmp_path: Path, trained_run: Run):
    run = run_job(job(), tmp_path, ExecutionOptions())
    assert run.status == "complete"
    assert run.directory == tmp_path / tiny().name
    assert (run.directory / "model.safetensors").read_bytes() == (
        trained_run.directory / "model.safetensors"
    ).read_bytes()
    content = read_json(run.directory / "ablation.json")
    assert content.pop("asked") == {"examples": TEST, "split": "test"}
    assert content == reference_ablation(run, held_out(run)) == recorded(run).to_dict()
    assert content["baseline"] == pytest.approx(run.result["test_accuracy"])
    assert content["examples"] == TEST
    assert content["chance"] == run.spec.guess
    assert partial_files(run) == []
    assert recorded(run).drops.shape == (2, HEADS)


def test_measures_of_lost_weights_are_repeated(tmp_path: Path):
    """Made again on another machine they may be others."""
    expected = Job(tiny(), "a job", 20, measures=("toeplitz",))
    run = run_job(expected, tmp_path, ExecutionOptions())
    before = {name: read_json(run.directory / f"{name}.json") for name in ("ablation", "ablation-loss", "toeplitz")}
    for name, content in before.items():
        write_json(run.directory / f"{name}.json", content | {"chance": 0.123} if "chance" in content else content)
    assert jobs.without_weights([expected], tmp_path) == []
    (run.directory / "model.safetensors").unlink()
    assert jobs.without_weights([expected], tmp_path) == [], "all is measured"
    more = replace(expected, measures=("toeplitz", "position"))
    assert jobs.without_weights([more], tmp_path) == [more]
    with pytest.raises(InputError, match=r"model.safetensors is missing; delete .*result.json and train with the same"):
        run_job(more, tmp_path, ExecutionOptions())
    (run.directory / "result.json").unlink()
    run_job(more, tmp_path, ExecutionOptions())
    assert {name: read_json(run.directory / f"{name}.json") for name in before} == before
    assert read_json(run.directory / "spec.json") == run.spec.content


@pytest.mark.parametrize(("examples", "test", "train"), [(20, 6, 14), (10_000, 20, TRAIN)])
def test_train_and_test_together_are_sampled_70_to_30(run: Run, examples: int, test: int, train: int):
    actual = ablate_run(run, examples=examples, split="train+test").to_dict()
    task, seed = run.spec.build_task(), run.spec.data_seed
    both = [task.dataset("train", train, seed), task.dataset("test", test, seed)]
    assert actual == reference_ablation(run, Examples.join(both))
    assert actual["examples"] == test + train
    assert read_json(run.directory / "ablation.json")["asked"] == {"examples": examples, "split": "train+test"}


PADDED = {"form": "released", "length": 8, "vocab_size": 12, "max_between": 3, "max_side": 2}


@pytest.mark.parametrize("fields", [COUNTING, {"task_options": PADDED}], ids=["ignored", "padded"])
def test_ignored_labels_do_not_count_and_lengths_are_kept(tmp_path: Path, fields: dict[str, Any]):
    run = run_job(job(**fields), tmp_path, ExecutionOptions())
    test, actual = held_out(run), recorded(run)
    assert actual.to_dict() == reference_ablation(run, test)
    assert (test.lengths.min() < 8) == (fields is not COUNTING)
    assert actual.examples == (test.labels != run.spec.ignore_label).sum()
    assert (actual.examples < TEST) == (fields is COUNTING)
    assert actual.baseline == pytest.approx(run.result["test_accuracy"])
    assert actual.chance == run.spec.guess


def test_a_diverged_run_is_not_ablated(tmp_path: Path):
    run = run_job(job(lr=1e30), tmp_path, ExecutionOptions())
    assert run.status == "diverged"
    assert read_ablation(run.directory, ExampleRequest(TEST)) is None
    assert run_job(job(lr=1e30), tmp_path, ExecutionOptions()) == run


def test_finished_work_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_job(job(), tmp_path, ExecutionOptions())
    before = {path: path.stat().st_mtime_ns for path in run.directory.iterdir() if path.name != ".lock"}
    monkeypatch.setattr(jobs, "ablate_run", None)
    assert run_job(job(), tmp_path, ExecutionOptions()) == run
    assert {path: path.stat().st_mtime_ns for path in run.directory.iterdir() if path.name != ".lock"} == before


def test_progress_is_reported_and_zero_examples_skip_the_ablation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ticks = iter(range(10**6))
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), time=lambda: 0.0)
    monkeypatch.setattr("toeplens.training.loop.time", clock)
    messages: list[tuple[int, int]] = []
    run = run_job(job(0), tmp_path, ExecutionOptions(), lambda step, total, row: messages.append((step, total)))
    assert messages[-1] == (9, 9)
    assert run.status == "complete"
    assert read_ablation(run.directory, ExampleRequest(TEST)) is None  # it was given no examples


# ---- stopped and gone on with ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [0, 3, UNITS - 1])
def test_a_job_interrupted_in_training_is_resumed(tmp_path: Path, run: Run, units: int):
    ablate_run(run, examples=TEST)
    out = tmp_path / "again"
    stopped = run_job(job(), out, ExecutionOptions(should_stop=StopAfter(units)))
    assert stopped.status == "stopped"
    assert read_ablation(stopped.directory, ExampleRequest(TEST)) is None
    done = run_job(job(), out, ExecutionOptions())
    for name in ("model.safetensors", "ablation.json"):
        assert (done.directory / name).read_bytes() == (run.directory / name).read_bytes()


@pytest.mark.parametrize("units", [0, 1, BATCHES, 2 * BATCHES - 1])
def test_a_job_interrupted_in_the_ablation_is_resumed(tmp_path: Path, run: Run, trained_run: Run, units: int):
    ablate_run(run, examples=TEST)
    shutil.copytree(trained_run.directory, tmp_path / "again" / trained_run.spec.name)
    stopped = run_job(job(), tmp_path / "again", ExecutionOptions(should_stop=StopAfter(units)))
    assert stopped.status == "stopped"
    assert not (stopped.directory / "ablation.json").exists()
    assert sum(len(list(directory.iterdir())) for directory in partial_files(stopped)) == units
    assert Run.open(stopped.directory).status == "complete"  # the training is
    stop = StopAfter()
    done = run_job(job(), tmp_path / "again", ExecutionOptions(should_stop=stop))
    assert done.status == "complete"
    assert stop.asked == 2 * BATCHES - units  # only what was missing
    assert (done.directory / "ablation.json").read_bytes() == (run.directory / "ablation.json").read_bytes()
    assert partial_files(done) == []


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
    with pytest.raises(jobs.JobInterrupted):
        ablate_run(run, examples=TEST, execution=ExecutionOptions(deadline=deadline))
    assert now[0] == left_at
    ablate_run(run, examples=TEST, execution=ExecutionOptions(deadline=1000.0))
    assert now[0] == sum(took[: 2 * BATCHES])  # no batch twice


def test_no_measure_starts_after_the_deadline(run: Run, monkeypatch: pytest.MonkeyPatch):
    expected, begun = Job(tiny(), "a job", TEST, "test", ("toeplitz", "representation")), []

    def measured(run: Run, name: str, **options: Any) -> Any:
        begun.append(name)
        return measure_run(run, name, **options)

    monkeypatch.setattr(jobs, "measure_run", measured)
    stopped = run_job(expected, run.directory.parent, ExecutionOptions(should_stop=lambda: bool(begun)))
    assert (stopped.status, begun) == ("stopped", ["toeplitz"])
    assert run_job(expected, run.directory.parent, ExecutionOptions()).status == "complete"
    assert {f"{name}.json" for name in expected.measures} <= {path.name for path in run.directory.iterdir()}


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY garbage"])
def test_a_damaged_partial_result_is_recomputed(run: Run, damage: bytes):
    with pytest.raises(jobs.JobInterrupted):
        ablate_run(run, examples=TEST, execution=ExecutionOptions(should_stop=StopAfter(3)))
    part = sorted(partial_files(run)[0].iterdir())[0]
    part.write_bytes(damage)
    ablate_run(run, examples=TEST)
    assert recorded(run).to_dict() == reference_ablation(run, held_out(run))


def test_partial_results_of_other_examples_are_not_used(run: Run):
    for asked in ({"examples": 20}, {"examples": TEST, "split": "train+test"}):
        with pytest.raises(jobs.JobInterrupted):
            ablate_run(run, **asked, execution=ExecutionOptions(should_stop=StopAfter(2)))
    assert ablate_run(run, examples=TEST).to_dict() == reference_ablation(run, held_out(run))


def test_a_record_of_other_examples_is_neither_used_nor_replaced(tmp_path: Path, run: Run):
    few = ablate_run(run, examples=7)
    assert read_ablation(run.directory, ExampleRequest(TEST)) is None
    done = run_job(job(), run.directory.parent, ExecutionOptions())
    every = recorded(done)
    assert (few.examples, every.examples) == (7, TEST)
    both = ablate_run(run, examples=TEST, split="train+test")
    for asked, expected in (((7,), few), ((TEST,), every), ((TEST, "train+test"), both)):
        assert recorded(run, *asked).to_dict() == expected.to_dict()
    names = {path.name for path in run.directory.glob("ablation*.json")}
    whose = ("", f"-test-{TEST}", f"-train+test-{TEST}")
    assert names == {f"ablation{by}{examples}.json" for by in ("", "-loss") for examples in whose}


def test_a_separate_loss_record_keeps_its_curve(run: Run):
    """Accuracy and loss come from the same passes, and the loss then has no curve: it replaces none that has."""
    alone = ablate_run(run, examples=TEST, metric="loss")
    ablate_run(run, examples=TEST)
    reread = read_ablation(run.directory, ExampleRequest(TEST), "loss")
    assert reread is not None
    assert np.isfinite(alone.cumulative).all()
    np.testing.assert_allclose(reread.cumulative, alone.cumulative, rtol=1e-5)


# ---- two at a time --------------------------------------------------------------------------------------------------


def test_a_locked_run_is_neither_ablated_nor_measured(run: Run):
    before = sorted(path.name for path in run.directory.iterdir())
    with locked_elsewhere(run.directory):
        for work in (ablate_run, lambda run, examples: measure_run(run, "representation", examples=examples)):
            with pytest.raises(InputError, match="is in use by another process"):
                work(run, examples=TEST)
    assert sorted(path.name for path in run.directory.iterdir()) == before
    recorded = measure_run(run, "representation", examples=TEST)
    with locked_elsewhere(run.directory):
        assert measure_run(run, "representation", examples=TEST) == recorded


def test_a_job_waits_for_a_locked_run(tmp_path: Path, run: Run):
    with locked_elsewhere(run.directory) as stream:
        threading.Timer(0.3, stream.close).start()
        assert run_job(job(), run.directory.parent, ExecutionOptions()).status == "complete"
        assert stream.closed
    with locked_elsewhere(run.directory):
        waited = run_job(job(), run.directory.parent, ExecutionOptions(should_stop=StopAfter(2)))
    assert waited.status == "stopped"


def test_leftover_partial_results_of_a_finished_ablation_are_removed(run: Run):
    with pytest.raises(jobs.JobInterrupted):
        ablate_run(run, examples=TEST, execution=ExecutionOptions(should_stop=StopAfter(1)))
    (partial_file,) = partial_files(run)
    kept = partial_file.rename(run.directory / "kept")
    ablate_run(run, examples=TEST)
    kept.rename(partial_file)
    (partial_file / ".0.npy.12345678.tmp").write_text("")
    (run.directory / ".ablation.json.12345678.tmp").write_text("")
    run_job(job(), run.directory.parent, ExecutionOptions())
    assert partial_files(run) == []
    assert not list(run.directory.glob("*.tmp"))
    assert recorded(run)
