"""Several jobs at a time: the same results as one after another, stoppable as a whole, nothing left behind."""

from __future__ import annotations

import json
import multiprocessing
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
from tests.builders import tiny, wait_until

from toeplens.engine import (
    ClusterOptions,
    Event,
    ExecutionOptions,
    Job,
    must_serve,
    plan_workers,
    pool,
    run_job,
    run_jobs,
    spread,
)
from toeplens.engine.pool import join, take
from toeplens.ground import EnvironmentFailure, InputError
from toeplens.training import Run, train
from toeplens.training import run as store


def jobs(*epochs: int, **sizes: int) -> list[Job]:
    specs = [tiny(seed=42 + index, epochs=count, **sizes) for index, count in enumerate(epochs)]
    return [Job(spec, f"job {index}", 20) for index, spec in enumerate(specs)]


def outcome(directory: Path) -> tuple[Any, ...]:
    """All that a job is for, bit by bit; not the time it took."""
    ablation = directory / "ablation.json"
    return *builders.outcome(Run.open(directory)), ablation.read_bytes() if ablation.exists() else None


@pytest.fixture(autouse=True)
def _one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many threads in a worker as in these tests: only then are sums added in the same order."""
    monkeypatch.setattr(pool, "plan_workers", lambda *given: (plan_workers(*given)[0], torch.get_num_threads()))


@pytest.mark.heavy
def test_workers_give_bit_for_bit_what_one_process_gives(tmp_path: Path):
    told: list[Event] = []
    wanted, limits = jobs(3, 2, 4), ExecutionOptions(follow=("tensorboard",))
    assert run_jobs(wanted, tmp_path / "many", limits, workers=2, on_event=told.append) == ["complete"] * 3
    for job in wanted:
        run_job(job, tmp_path / "one", ExecutionOptions())
        name = job.spec.name
        assert outcome(tmp_path / "many" / name) == outcome(tmp_path / "one" / name)
        assert outcome(tmp_path / "many" / name)[-1] is not None
        (events,) = (tmp_path / "many" / name).glob("tensorboard/*/events*")
        assert events.parent.name == job.label.replace(" ", "-")
    assert sorted(event.job for event in told if event.status == "complete") == [0, 1, 2]
    for event in told:
        assert event.status in (None, "complete")
        assert 0 <= event.step <= event.total


@pytest.mark.heavy
def test_a_deadline_stops_everything_and_a_second_call_completes_it(tmp_path: Path):
    wanted = jobs(1, 1, 1, train_examples=3200)  # 200 steps after the start of a process: more than a second anywhere
    statuses = run_jobs(wanted, tmp_path, ExecutionOptions(deadline=time.time() + 1), workers=2)
    assert statuses == ["stopped"] * 3
    assert (tmp_path / wanted[0].spec.name).exists()
    for job in wanted:
        directory = tmp_path / job.spec.name
        if directory.exists():  # begun before time was up
            run = Run.open(directory)
            assert run.status == "stopped"
            assert run.step < job.spec.total_steps
            assert store.load_checkpoint(directory, job.spec) is not None
    assert not (tmp_path / wanted[2].spec.name).exists()
    assert run_jobs(wanted, tmp_path, ExecutionOptions(), workers=1) == ["complete"] * 3
    run_job(wanted[0], tmp_path / "one", ExecutionOptions())
    assert outcome(tmp_path / wanted[0].spec.name) == outcome(tmp_path / "one" / wanted[0].spec.name)


@pytest.mark.heavy
def test_an_error_in_one_job_stops_the_others_and_is_raised(tmp_path: Path):
    wanted = jobs(10**6, 1, 1)
    foreign = tmp_path / wanted[1].spec.name
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="contains files that do not belong to a run"):
        run_jobs(wanted, tmp_path, ExecutionOptions(), workers=2)
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]
    assert Run.open(tmp_path / wanted[0].spec.name).status == "stopped"
    assert not (tmp_path / wanted[2].spec.name).exists()


def test_time_that_is_up_before_the_start_begins_nothing(tmp_path: Path):
    assert run_jobs(jobs(1, 1), tmp_path, ExecutionOptions(deadline=0.0), workers=2) == ["stopped"] * 2
    assert list(tmp_path.iterdir()) == []
    assert run_jobs(jobs(1), tmp_path, ExecutionOptions(should_stop=lambda: True)) == ["stopped"]
    assert run_jobs([], tmp_path, ExecutionOptions()) == []


def signal_workers(number: signal.Signals) -> None:
    for child in descendants(os.getpid(), depth=1):
        if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(child, number)


@pytest.mark.heavy
def test_a_worker_that_is_terminated_leaves_its_job_and_breaks_nothing(tmp_path: Path):
    """As schedulers do, which send SIGTERM to every process of a group."""

    def terminate(event: Event) -> None:
        signal_workers(signal.SIGTERM)

    assert run_jobs(jobs(10**6, 10**6), tmp_path, ExecutionOptions(), workers=2, on_event=terminate) == ["stopped"] * 2
    for run in map(Run.open, tmp_path.iterdir()):
        assert store.load_checkpoint(run.directory, run.spec) is not None or run.step == 0


@pytest.mark.heavy
def test_a_worker_that_is_killed_is_one_sentence(tmp_path: Path):
    """As when the machine's memory is used up."""

    def kill(event: Event) -> None:
        if len(list(tmp_path.glob(f"*/{store.CHECKPOINT}"))) == 2:  # a first step may be told before it is kept
            signal_workers(signal.SIGKILL)

    with pytest.raises(
        EnvironmentFailure, match=r"A worker process ended unexpectedly .* run the same command to resume"
    ):
        run_jobs(jobs(10**6, 10**6), tmp_path, ExecutionOptions(checkpoint_seconds=0.0), workers=2, on_event=kill)
    run = train(tiny(epochs=10**6), tmp_path, deadline=0.0)
    assert run.step > 1


# ---- pieces ---------------------------------------------------------------------------------------------------------


def test_one_worker_is_this_process() -> None:
    told: list[Any] = []

    def work(piece: str, limits: ExecutionOptions, tell: Any) -> int:
        tell(piece, len(told))
        return os.getpid()

    def done(index: int, result: int) -> bool:
        told.append(result)
        return index < 1  # the third is not begun

    spread(work, "abc", ExecutionOptions(), 1, on_done=done, on_told=lambda *what: told.append(what))
    assert told == [(0, "a", 0), os.getpid(), (1, "b", 2), os.getpid()]


def faulty(piece: str, limits: ExecutionOptions, tell: Any) -> None:
    raise RuntimeError(f"a fault in {piece}")


@pytest.mark.heavy
def test_a_fault_in_a_piece_is_raised_as_it_is_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="a fault in") as raised:
        spread(faulty, "ab", ExecutionOptions(), 2, on_done=lambda *_: None)
    assert "in faulty" in str(raised.value.__cause__)


def terminated(piece: tuple[bool, Path], limits: ExecutionOptions, tell: Any) -> str | None:
    """One piece has its own process terminated and leaves its work; the other goes on beside it, and then ends."""
    stays, begun = piece
    if stays:
        begun.touch()
        time.sleep(2)
        return "whole"
    while not begun.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    while not limits.over():
        time.sleep(0.01)
    return None


def endless(piece: str, limits: ExecutionOptions, tell: Any) -> None:
    """A piece that never looks at its limits."""
    tell("begun")
    time.sleep(600)


@pytest.mark.heavy
def test_a_worker_that_is_terminated_ends_its_piece_and_not_itself(tmp_path: Path):
    """Ended itself it would have broken the pool, and the piece beside it would be lost."""
    found: dict[int, Any] = {}
    pieces = [(stays, tmp_path / "begun") for stays in (False, True)]
    spread(terminated, pieces, ExecutionOptions(), 2, on_done=found.__setitem__)
    assert found == {0: None, 1: "whole"}


@pytest.mark.heavy
def test_an_interrupt_ends_work_that_looks_at_no_limits():
    def interrupt(index: int, what: str) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        spread(endless, "ab", ExecutionOptions(), 2, on_done=lambda *what: None, on_told=interrupt)
    assert time.monotonic() - began < 300
    assert not multiprocessing.active_children()


# ---- what a cluster cannot do ---------------------------------------------------------------------------------------


def test_a_device_that_a_worker_cannot_have_is_refused():
    with pytest.raises(InputError, match=r"^device must be auto, cpu or cuda with a cluster, got 'cuda:1'"):
        must_serve(ClusterOptions(engine="ray", gpus_per_cell=1.0), "cuda:1")
    with pytest.raises(InputError, match=r"^gpus_per_cell must be over 0 with device cuda, got 0"):
        must_serve(ClusterOptions(engine="ray"), "cuda")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("there", "^address must be HOST:PORT of the cluster's head, or auto, got 'there'"),
        ("ray://localhost:10001", "^address must be HOST:PORT"),
        ("localhost:1", "address: nothing answers at 'localhost:1'"),
    ],
)
def test_an_address_that_does_not_answer_is_named(address: str, says: str):
    pytest.importorskip("ray").shutdown()
    with pytest.raises(InputError, match=says):
        must_serve(ClusterOptions(engine="ray", address=address), "cpu")


def test_without_ray_it_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFailure, match="engine: ray is not installed"):
        join(ClusterOptions(engine="ray"))


def test_what_has_to_wait_for_another_is_passed_by_until_that_is_done():
    left, after, done = [0, 1, 2, 3], {1: 0, 2: 3}, set[int]()
    assert [take(left, after, done) for _ in range(3)] == [0, 3, None]
    done.add(3)
    assert take(left, after, done) == 2
    done.add(0)
    assert [take(left, after, done), take(left, after, done)] == [1, None]


# ---- how many -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "count", "device", "workers", "expected"),
    [
        (8, 3, "cpu", None, (3, 2)),
        (8, 20, "cpu", None, (8, 1)),
        (8, 20, "cpu", 2, (2, 4)),
        (2, 20, "cpu", 6, (6, 1)),
        (8, 1, "cpu", 4, (1, 8)),
        (8, 0, "cpu", None, (1, 8)),
        (8, 20, "cuda", None, (1, 8)),
        (8, 20, "auto", None, (8, 1)),
        (8, 20, "auto and a GPU", None, (1, 8)),
    ],
)
def test_one_run_a_core_on_a_cpu_and_one_at_a_time_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    count: int,
    device: str,
    workers: int | None,
    expected: tuple[int, int],
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    device, _, gpu = device.partition(" and ")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpu))
    assert plan_workers(count, device, workers) == expected


@pytest.mark.parametrize(("asked", "threads"), [("1", 1), ("3", 3), ("64", 8), ("0", 1), ("many", 8)])
def test_threads_are_no_more_than_was_asked_for(monkeypatch: pytest.MonkeyPatch, asked: str, threads: int):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert plan_workers(20, "cpu", 1) == (1, threads)


# ---- killed ---------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
from pathlib import Path
from toeplens.engine import Job, ExecutionOptions, run_jobs
from toeplens.training import run_spec
given = json.loads(sys.argv[1])
jobs = [Job(run_spec(**spec), "a job", 20) for spec in given["specs"]]
run_jobs(jobs, Path(given["out"]), ExecutionOptions(checkpoint_seconds=0.1), workers=2)
"""


def alive(process: int) -> bool:
    """Whether a process runs; one that is dead and not yet collected does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(parent: int, depth: int = 9) -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, edge = set(), {parent}
    while edge and depth:
        edge = {child for child, of in parents.items() if of in edge}
        found, depth = found | edge, depth - 1
    return found


@pytest.mark.heavy
def test_killing_the_parent_leaves_no_workers_behind_and_loses_no_checkpoint(tmp_path: Path):
    specs = [tiny(seed=seed, epochs=10**6) for seed in (1, 2)]
    given = {"specs": [spec.model_dump(mode="json") for spec in specs], "out": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", SCRIPT, json.dumps(given)]) as parent:
        checkpoints = [tmp_path / spec.name / store.CHECKPOINT for spec in specs]
        wait_until(lambda: parent.poll() is not None or all(path.exists() for path in checkpoints))
        children = descendants(parent.pid)
        parent.send_signal(signal.SIGKILL)
    assert parent.returncode == -signal.SIGKILL
    assert len(children) >= 2
    wait_until(lambda: not any(map(alive, children)), seconds=20)
    for spec in specs:
        before = Run.open(tmp_path / spec.name)
        assert before.status == "stopped"
        assert before.step > 0
        after = train(spec, tmp_path, deadline=0.0)
        assert after.step in (before.step, before.step + 1)  # the lock is free and the checkpoint whole
