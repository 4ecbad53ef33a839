"""A run that was stopped, killed or refused anywhere, and started again, ends bit-identical to one that was not."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import pickle
import random
import shutil
import signal
import time
import zipfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests import builders
from tests.builders import (
    Crash,
    StopAfter,
    fault_at,
    files_in,
    locked_elsewhere,
    record_writes,
    refusal_message,
    results_of,
)
from tests.training.forkserver import start_training

from toeplens.training import Run, RunSpec, loop, train
from toeplens.training import run as store
from toeplens.utils import EnvironmentFailure, InputError, execution, read_json, write_json

LAST_STEP = 9  # 3 epochs of 3 steps, the third one partial
UNITS = 21  # and of 4 batches of evaluation, every second one partial: a run can be stopped between any two of them
ENCODINGS = ["rope", "relative-table", "mla"]


def tiny(encoding: str = "rope", **changes: Any) -> RunSpec:
    return builders.tiny(encoding, **{"epochs": 3} | changes)


def start_and_stop(out: Path, spec: RunSpec | None = None, units: int = 4) -> Run:
    run = train(spec or tiny(), out, should_stop=StopAfter(units))
    assert run.status == "stopped"
    return run


def saved_step(run: Run) -> int:
    state = store.load_checkpoint(run.directory, run.spec)
    assert state is not None
    return state["step"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Runs that nothing interrupted, one a spec."""
    out, done = tmp_path_factory.mktemp("whole"), {}

    def run(spec: RunSpec | None = None) -> Run:
        spec = spec or tiny()
        if spec.name not in done:
            done[spec.name] = train(spec, out, checkpoint_seconds=math.inf)
            assert done[spec.name].status == "complete"
        return done[spec.name]

    return run


# ---- stopped and started again ------------------------------------------------------------------------------------


STOPS = [("rope", units) for units in (0, 3, 9)]  # at every unit: below
STOPS += [(encoding, units) for encoding in ENCODINGS[1:] for units in (4, 11)]


@pytest.mark.parametrize(("encoding", "units"), STOPS)
def test_a_run_interrupted_once_resumes_bit_identically(tmp_path: Path, uninterrupted: Any, encoding: str, units: int):
    spec = tiny(encoding)
    first = start_and_stop(tmp_path, spec, units)
    epochs, place = divmod(units, 7)
    assert saved_step(first) == first.step == 3 * epochs + min(place, 3)
    assert len(first.metrics) == epochs
    assert results_of(train(spec, tmp_path)) == results_of(uninterrupted(spec))


def test_a_run_interrupted_at_every_unit_resumes_bit_identically(tmp_path: Path, uninterrupted: Any):
    spec = tiny()
    for _ in range(UNITS - 1):
        assert train(spec, tmp_path, deadline=0.0).status == "stopped"
    assert results_of(train(spec, tmp_path, deadline=0.0)) == results_of(uninterrupted(spec))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"encoding": "t5", "protocol": "released"}},
        {"model": {"encoding": "learned", "dropout_on": ("ffn-hidden",)}},
        {"model": {"encoding": "random-fixed"}},
        {"warmup": 0.5, "betas": (0.0, 0.0), "weight_decay": 0.1},
        {"precision": "bf16"},
        {"average": 0.8, "schedule": "constant"},
    ],
    ids=str,
)
def test_other_settings_resume_bit_identically(tmp_path: Path, uninterrupted: Any, changes: dict[str, Any]):
    spec = tiny(**changes)
    start_and_stop(tmp_path, spec, 2)
    assert results_of(train(spec, tmp_path)) == results_of(uninterrupted(spec))


@pytest.mark.parametrize(
    "options", [{"checkpoint_seconds": 0}, {"deadline": time.time() + 3600}], ids=["checkpoints", "deadline"]
)
def test_checkpoints_deadlines_and_random_state_do_not_change_a_run(
    tmp_path: Path, uninterrupted: Any, options: dict[str, Any]
):
    """Checkpoints on the way, a deadline to come, the caller's random state, an empty directory that is there."""
    (tmp_path / tiny().name).mkdir()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        assert results_of(train(tiny(), tmp_path, **options)) == results_of(uninterrupted())


def test_results_depend_on_dropout_and_example_order(uninterrupted: Any):
    """Else the tests above could not see a random state that was not restored."""
    calm = tiny(model={"dropout": 0.0})
    assert results_of(uninterrupted(calm))[2] != results_of(uninterrupted())[2]
    assert results_of(uninterrupted(tiny(seed=43)))[2] != results_of(uninterrupted())[2]


def test_the_callers_random_states_are_unchanged(tmp_path: Path):
    spec = tiny("mla")
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    start_and_stop(tmp_path, spec)
    train(spec, tmp_path).model()
    train(spec, tmp_path)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])


@pytest.mark.parametrize("set_back", [False, True])
def test_no_unit_begins_that_would_pass_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_back: bool):
    steady, wall = [0.0], [1000.0]
    for module in (loop, execution):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: steady[0], time=lambda: wall[0]))
    step = loop.Session.take_step

    def slow(session: Any) -> None:
        steady[0] += 10
        wall[0] = 0.0 if set_back else wall[0] + 10
        step(session)

    monkeypatch.setattr(loop.Session, "take_step", slow)
    assert train(tiny(), tmp_path, deadline=1025.0).step == 2
    assert steady[0] <= 25


def test_a_complete_run_has_all_files_and_no_checkpoint(tmp_path: Path):
    run = train(tiny(), tmp_path, checkpoint_seconds=0)
    names = {"spec.json", "metrics.jsonl", "model.safetensors", "result.json", "environment.json", ".lock"}
    assert {path.name for path in run.directory.iterdir()} == names
    assert run == Run.open(run.directory) == Run.open(str(run.directory))
    assert run.directory == tmp_path / tiny().name
    assert [row["step"] for row in run.metrics] == [3, 6, 9]
    assert run.result["status"] == run.status == "complete"
    assert run.result["steps"] == run.step == LAST_STEP


def test_progress_is_reported_five_times_per_second_and_only_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ticks = iter(range(10**6))
    clock = SimpleNamespace(monotonic=lambda: next(ticks) * 0.07, time=lambda: 0.0)
    monkeypatch.setattr(loop, "time", clock)
    reported: list[tuple[int, int, Any]] = []
    run = train(tiny(), tmp_path, checkpoint_seconds=math.inf, on_progress=lambda *given: reported.append(given))
    steps = [step for step, _, _ in reported]
    assert steps == sorted(steps)
    assert steps[0] == 0 < steps[1] <= steps[-1] <= LAST_STEP  # when all is set up, then with the work
    assert {total for _, total, _ in reported} == {LAST_STEP}
    assert 5 <= len(reported) <= 5 * next(ticks) * 0.07
    assert all(row is None or row == run.metrics[row["epoch"] - 1] for _, _, row in reported)


def test_checkpoints_keep_the_requested_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0))
    saves = [0.0]
    monkeypatch.setattr(store, "save_checkpoint", lambda *_: saves.append(now[0]))

    def one_second_a_unit() -> bool:
        now[0] += 1
        return False

    train(tiny(), tmp_path, checkpoint_seconds=2, should_stop=one_second_a_unit)
    assert {b - a for a, b in itertools.pairwise(saves)} == {2}
    assert UNITS - saves[-1] <= 2


# ---- killed -------------------------------------------------------------------------------------------------------


def wait_for_checkpoints(process: BaseProcess, path: Path, count: int) -> None:
    steps: set[int] = set()
    give_up = time.monotonic() + 60
    while len(steps) <= count:
        assert process.is_alive(), "the run ended before it could be killed"
        assert time.monotonic() < give_up
        if path.exists():
            steps.add(path.stat().st_mtime_ns)
        time.sleep(0.001 if steps else 0.02)


@pytest.mark.heavy
def test_a_killed_run_resumes_bit_identically(tmp_path: Path, uninterrupted: Any):
    spec = tiny(epochs=30)
    directory = tmp_path / spec.name
    before = 0
    for count, pause in ((1, 0.0), (9, 0.0013), (15, 0.0037)):
        process = start_training(spec, tmp_path, tmp_path / "errors")
        wait_for_checkpoints(process, directory / store.CHECKPOINT, count)
        with pytest.raises(InputError, match="is in use by another process"):
            train(spec, tmp_path)
        time.sleep(pause)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        run = Run.open(directory)
        assert run.status == "stopped"
        assert saved_step(run) > before
        before = saved_step(run)
    assert results_of(train(spec, tmp_path)) == results_of(uninterrupted(spec))
    assert not list(directory.glob(".*.tmp"))


@pytest.mark.parametrize(("name", "began"), [("spec.json", False), ("checkpoint.pt", True)])
def test_partial_files_of_a_killed_run_are_removed(tmp_path: Path, uninterrupted: Any, name: str, began: bool):
    if began:
        start_and_stop(tmp_path)
    leftover = tmp_path / tiny().name / f".{name}.abcd_123.tmp"
    leftover.parent.mkdir(exist_ok=True)
    leftover.write_bytes(b"half")
    run = train(tiny(), tmp_path)
    assert not leftover.exists()
    assert results_of(run) == results_of(uninterrupted())


def short_run() -> RunSpec:
    return tiny(train_examples=16, test_examples=16, epochs=2)


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names of the files that `few_writes` puts in place, in order."""
    with pytest.MonkeyPatch.context() as patch:
        names = record_writes(patch)
        train(short_run(), tmp_path_factory.mktemp("writes"), checkpoint_seconds=0)
    return names


def test_a_run_writes_its_spec_first_and_its_result_last(writes: list[str]):
    assert writes[:2] == ["spec.json", "environment.json"]
    assert writes[-4:] == ["model.safetensors", "metrics.jsonl", "environment.json", "result.json"]
    assert writes.count("checkpoint.pt") == 5  # after every unit but the last


@pytest.mark.parametrize("fault", ["before", "after", "full"])
def test_a_crash_or_full_disk_at_any_write_is_recoverable(
    tmp_path: Path, uninterrupted: Any, writes: list[str], fault: str, monkeypatch: pytest.MonkeyPatch
):
    for number, name in enumerate(writes):
        out = tmp_path / str(number)
        with monkeypatch.context() as patch:
            fault_at(patch, number, fault)
            with pytest.raises((Crash, EnvironmentFailure)) as caught:
                train(short_run(), out, checkpoint_seconds=0)
        if fault == "full":
            assert f"{name}: the disk is full" in str(caught.value)
            assert not list(out.rglob("*.tmp"))
        assert results_of(train(short_run(), out)) == results_of(uninterrupted(short_run()))


def test_a_run_that_diverges_is_recorded_and_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = train(tiny(lr=1e38, epochs=50), tmp_path)
    assert run.status == run.result["status"] == "diverged"
    assert run.result["steps"] < run.spec.total_steps
    assert len(run.metrics) < 50
    assert run.metrics[-1]["train_loss"] is None or run.metrics[-1]["test_loss"] is None
    text = (run.directory / store.METRICS).read_text() + (run.directory / store.RESULT).read_text()
    assert "null" in text
    assert "NaN" not in text
    assert "Infinity" not in text
    assert not (run.directory / store.CHECKPOINT).exists()
    assert refusal_message(run.model) == f"run: {run.directory} diverged, so it has no finite weights."
    monkeypatch.setattr(loop, "Session", None)
    assert train(run.spec, tmp_path) == run


# ---- damaged ------------------------------------------------------------------------------------------------------


class MaliciousPickle:
    """A pickle that would make a directory when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def archive(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def random_bytes(size: int) -> bytes:
    return np.random.default_rng(0).bytes(size)


CHECKPOINTS: dict[str, Callable[[bytes, Path], bytes]] = {
    "truncated": lambda old, _: old[: len(old) // 2],
    "random bytes in the middle": lambda old, _: old[:2000] + random_bytes(len(old) - 4000) + old[-2000:],
    "empty": lambda old, _: b"",
    "a hostile pickle": lambda old, path: pickle.dumps(MaliciousPickle(path)),
    "a hostile archive": lambda old, path: archive({"format": 1, "run": tiny().name, "model": MaliciousPickle(path)}),
    "another version": lambda old, _: archive({"format": 99}),
}


def refusal_without_changes(out: Path) -> str:
    """The sentence with which `train` refuses, having changed nothing on disk."""
    before = files_in(out)
    message = refusal_message(lambda: train(tiny(), out))
    assert files_in(out) == before
    return message


@pytest.mark.parametrize("damage", CHECKPOINTS)
def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path: Path, uninterrupted: Any, damage: str):
    run = start_and_stop(tmp_path / "out")
    path = run.directory / store.CHECKPOINT
    path.write_bytes(CHECKPOINTS[damage](path.read_bytes(), tmp_path / "hostile"))
    message = refusal_without_changes(tmp_path / "out")
    assert message.startswith(f"checkpoint: {path} ")
    assert message.endswith(". Delete it to start this run over.")
    assert not (tmp_path / "hostile").exists()
    path.unlink()
    assert results_of(train(tiny(), tmp_path / "out")) == results_of(uninterrupted())


def test_any_flipped_byte_in_a_checkpoint_is_detected(tmp_path: Path):
    run = start_and_stop(tmp_path)
    path = run.directory / store.CHECKPOINT
    original = path.read_bytes()
    with zipfile.ZipFile(path) as content:
        entries = [(entry.header_offset, len(content.read(entry)), content.read(entry)) for entry in content.infolist()]
    assert len(entries) > 20
    for offset, size, data in entries:
        place = original.index(data, offset) + size // 2
        path.write_bytes(original[:place] + bytes([original[place] ^ 1]) + original[place + 1 :])
        with pytest.raises(InputError, match=r"is damaged \(the checksum of .* is wrong\)"):
            store.load_checkpoint(run.directory, run.spec)


def test_another_runs_checkpoint_is_refused(tmp_path: Path):
    run, foreign = start_and_stop(tmp_path / "a"), start_and_stop(tmp_path / "b", tiny(seed=1))
    shutil.copy(foreign.directory / store.CHECKPOINT, run.directory)
    assert "belongs to another run" in refusal_without_changes(tmp_path / "a")


# ---- directories that are no run's --------------------------------------------------------------------------------


def test_a_directory_that_is_not_a_run_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for place, words in (
        ("absent", "does not exist"),
        ("notes.txt", "does not exist"),
        ("empty", "is empty"),
        (".", "is not a run directory (no spec.json)"),
    ):
        assert words in refusal_message(lambda place=place: Run.open(tmp_path / place))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("/.hidden.tmp", "mine", "contains files that do not belong to a run"),
        ("/deeper/notes.txt", "mine", "contains files that do not belong to a run"),
        ("/spec.json", json.dumps(tiny(seed=1).content), "contains another run. Choose another directory"),
        ("", "mine", "out must be a directory, but"),
    ],
)
def test_foreign_files_are_refused_and_left_unchanged(tmp_path: Path, name: str, content: str, words: str):
    foreign = Path(f"{tmp_path / tiny().name}{name}")
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_text(content)
    assert words in refusal_without_changes(tmp_path)
    assert foreign.read_text() == content


def test_a_locked_run_is_refused(tmp_path: Path, uninterrupted: Any):
    run = start_and_stop(tmp_path)
    with locked_elsewhere(run.directory):
        assert "is in use by another process" in refusal_without_changes(tmp_path)
    assert results_of(train(tiny(), tmp_path)) == results_of(uninterrupted())


def test_a_run_started_by_another_process_is_not_replaced(tmp_path: Path):
    other_spec = tiny(seed=1).model_dump(mode="json")
    with locked_elsewhere(tmp_path) as stream:

        def began() -> bool:
            write_json(tmp_path / store.SPEC, other_spec, record=False)
            stream.close()
            return False

        def enter() -> None:
            with store.open_run_directory(tmp_path, tiny(), until=began):
                pass

        assert "contains another run. Choose another directory" in refusal_message(enter)
    assert read_json(tmp_path / store.SPEC) == other_spec
