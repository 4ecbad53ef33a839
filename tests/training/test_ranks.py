"""One run on several processes ends as on one, and can be stopped and gone on with on any number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import builders

from toeplens.training import Run, RunSpec, train
from toeplens.training.run import own_state

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def spec(**changes: Any) -> RunSpec:
    """A last batch of one row, so that one of two processes has none."""
    given: dict[str, Any] = {"train_examples": 49, "average": 0.9, "epochs": 4} | changes
    return builders.tiny(model={"dropout": 0.0}, **given)


def written(spec: RunSpec, tmp_path: Path) -> Path:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec.content), encoding="utf-8")
    return path


def start(spec: RunSpec, tmp_path: Path, *options: str, out: str = "two") -> subprocess.Popen[str]:
    command = (*TORCHRUN, "-m", "toeplens", "train", str(written(spec, tmp_path)), "--out")
    return subprocess.Popen(
        (*command, str(tmp_path / out), "--device", "cpu", *options),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return said


def equal(ours: Run, theirs: Run) -> None:
    assert (ours.status, len(ours.metrics)) == (theirs.status, len(theirs.metrics)) == ("complete", len(ours.metrics))
    weights, others = own_state(ours.model()), own_state(theirs.model())
    for name in weights:
        torch.testing.assert_close(weights[name], others[name], rtol=0, atol=1e-5)
    for row, same in zip(builders.timeless(ours.metrics), builders.timeless(theirs.metrics), strict=True):
        assert row == pytest.approx(same, abs=1e-5)


@pytest.mark.heavy
def test_two_processes_end_as_one_and_only_the_first_speaks(tmp_path: Path):
    said = ended(start(spec(), tmp_path))
    assert said.count("complete, test accuracy") == 1
    two = Run.open(tmp_path / "two" / spec().name)
    equal(two, train(spec(), tmp_path / "one"))
    assert [segment.setup.device for segment in two.history] == ["2 x cpu"]


@pytest.mark.heavy
def test_parts_of_a_batch_too_large_to_be_held_at_once_are_shared_too(tmp_path: Path):
    """2,049 texts of 8 tokens are three parts of 2**13 tokens; shared by two, two parts for one and one for one."""
    large = spec(train_examples=2049, batch_size=2049, epochs=2)
    ended(start(large, tmp_path))
    equal(Run.open(tmp_path / "two" / large.name), train(large, tmp_path / "one"))


@pytest.mark.heavy
def test_stopped_on_two_it_goes_on_on_one_and_the_other_way_round(tmp_path: Path):
    long = spec(epochs=200)
    whole = train(long, tmp_path / "one")
    said = ended(start(long, tmp_path, "--time-budget", "0.6s"))
    assert "stopped" in said
    assert 0 < Run.open(tmp_path / "two" / long.name).step < long.total_steps
    run = train(long, tmp_path / "two", should_stop=builders.After(20))
    assert run.status == "stopped"
    ended(start(long, tmp_path))
    run = Run.open(tmp_path / "two" / long.name)
    assert [segment.setup.device for segment in run.history] == ["2 x cpu", "cpu", "2 x cpu"]
    assert run.metrics[-1]["step"] == whole.metrics[-1]["step"]


@pytest.mark.heavy
def test_told_to_end_all_stop_with_a_checkpoint(tmp_path: Path):
    long = spec(epochs=10**6)
    process = start(long, tmp_path)
    directory = tmp_path / "two" / long.name
    until = time.monotonic() + 60
    while time.monotonic() < until and not (directory / "metrics.jsonl").exists():
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert Run.open(directory).status == "stopped"
    assert (directory / "checkpoint.pt").exists()


def apart(spec: RunSpec, tmp_path: Path, units: int = 0) -> list[dict[str, Any]]:
    """What each of two processes has in the end, whose directories no other sees."""
    given = (str(Path(__file__).with_name("apart.py")), str(written(spec, tmp_path)), str(tmp_path), str(units))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.run((*TORCHRUN, *given), env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]


@pytest.mark.heavy
def test_machines_that_share_no_directory_go_on_from_the_firsts_checkpoint(tmp_path: Path):
    stopped = apart(spec(), tmp_path, units=9)
    assert [told["status"] for told in stopped] == ["stopped"] * 2
    assert [told["connected"] for told in stopped] == [[]] * 2, "threads that are there at the exit may abort it"
    assert stopped[0]["ended"] > 0
    first, second = apart(spec(), tmp_path)
    assert first["begun"] == second["begun"] == stopped[0]["ended"]
    assert first["ended"] == second["ended"] == spec().total_steps
    assert first["metrics"] == second["metrics"]
    for name in first["weights"]:
        torch.testing.assert_close(first["weights"][name], second["weights"][name], rtol=0, atol=0)
    assert not (tmp_path / "1").exists()
    equal(Run.open(tmp_path / "0" / spec().name), train(spec(), tmp_path / "one"))


@pytest.mark.heavy
def test_a_damaged_checkpoint_ends_all_processes_and_the_first_says_which_it_is(tmp_path: Path):
    directory = tmp_path / "two" / spec().name
    train(spec(), tmp_path / "two", should_stop=builders.After(5))
    (directory / "checkpoint.pt").write_bytes(b"half")
    process = start(spec(), tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode
    assert f"checkpoint: {directory / 'checkpoint.pt'} is damaged" in errors
    assert "error: torchrun: the first process ended with an error, which it tells." in errors


def test_a_study_is_refused_in_one_sentence(tmp_path: Path):
    command = (*TORCHRUN, "-m", "toeplens", "reproduce", "--scale", "smoke", "--out", str(tmp_path / "study"))
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert process.returncode
    assert "error: torchrun: it shares one run among processes ('toeplens train')" in process.stderr
    assert not (tmp_path / "study").exists()
