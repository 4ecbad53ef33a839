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
    check_cluster,
    plan_workers,
    pool,
    run_job,
    run_jobs,
    run_parallel,
)
from toeplens.engine.pool import connect, pop_ready
from toeplens.training import Run, train
from toeplens.training import run as store
from toeplens.utils import EnvironmentFailure, InputError


def jobs(*epochs: int, **sizes: int) -> list[Job]:
    specs = [tiny(seed=42 + index, epochs=count, **sizes) for index, count in enumerate(epochs)]
    return [Job(spec, f"job {index}", 20) for index, spec in enumerate(specs)]


def results_of(directory: Path) -> tuple[Any, ...]:
    """All that a job is for, bit by bit; not the time it took."""
    ablation = directory / "ablation.json"
    return *builders.results_of(Run.open(directory)), ablation.read_bytes() if ablation.exists() else None


@pytest.fixture(autouse=True)
def _one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many threads in a worker as in these tests: only then are sums added in the same order."""
    monkeypatch.setattr(pool, "plan_workers", lambda *given: (plan_workers(*given)[0], torch.get_num_threads()))


@pytest.mark.heavy
def test_workers_match_one_process_bit_for_bit(tmp_path: Path):
    received: list[Event] = []
    expected, limits = jobs(3, 2, 4), ExecutionOptions(follow=("tensorboard",))
    assert run_jobs(expected, tmp_path / "many", limits, workers=2, on_event=received.append) == ["complete"] * 3
    for job in expected:
        run_job(job, tmp_path / "one", ExecutionOptions())
        name = job.spec.name
        assert results_of(tmp_path / "many" / name) == results_of(tmp_path / "one" / name)
        assert results_of(tmp_path / "many" / name)[-1] is not None
        (events,) = (tmp_path / "many" / name).glob("tensorboard/*/events*")
        assert events.parent.name == job.label.replace(" ", "-")
    assert sorted(event.job for event in received if event.status == "complete") == [0, 1, 2]
    for event in received:
        assert event.status in (None, "complete")
        assert 0 <= event.step <= event.total


@pytest.mark.heavy
def test_a_deadline_stops_all_jobs_and_a_second_call_completes_them(tmp_path: Path):
    expected = jobs(1, 1, 1, train_examples=3200)  # 200 steps after the start of a process: more than a second anywhere
    statuses = run_jobs(expected, tmp_path, ExecutionOptions(deadline=time.time() + 1), workers=2)
    assert statuses == ["stopped"] * 3
    assert (tmp_path / expected[0].spec.name).exists()
    for job in expected:
        directory = tmp_path / job.spec.name
        if directory.exists():  # begun before time was up
            run = Run.open(directory)
            assert run.status == "stopped"
            assert run.step < job.spec.total_steps
            assert store.load_checkpoint(directory, job.spec) is not None
    assert not (tmp_path / expected[2].spec.name).exists()
    assert run_jobs(expected, tmp_path, ExecutionOptions(), workers=1) == ["complete"] * 3
    run_job(expected[0], tmp_path / "one", ExecutionOptions())
    assert results_of(tmp_path / expected[0].spec.name) == results_of(tmp_path / "one" / expected[0].spec.name)


@pytest.mark.heavy
def test_an_error_in_one_job_stops_the_others_and_is_raised(tmp_path: Path):
    expected = jobs(10**6, 1, 1)
    foreign = tmp_path / expected[1].spec.name
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="contains files that do not belong to a run"):
        run_jobs(expected, tmp_path, ExecutionOptions(), workers=2)
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]
    assert Run.open(tmp_path / expected[0].spec.name).status == "stopped"
    assert not (tmp_path / expected[2].spec.name).exists()


def test_an_expired_deadline_starts_no_job(tmp_path: Path):
    assert run_jobs(jobs(1, 1), tmp_path, ExecutionOptions(deadline=0.0), workers=2) == ["stopped"] * 2
    assert list(tmp_path.iterdir()) == []
    assert run_jobs(jobs(1), tmp_path, ExecutionOptions(should_stop=lambda: True)) == ["stopped"]
    assert run_jobs([], tmp_path, ExecutionOptions()) == []


def signal_workers(number: signal.Signals) -> None:
    for child in descendants(os.getpid(), depth=1):
        if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(child, number)


@pytest.mark.heavy
def test_a_terminated_worker_interrupts_only_its_job(tmp_path: Path):
    """As schedulers do, which send SIGTERM to every process of a group."""

    def terminate(event: Event) -> None:
        signal_workers(signal.SIGTERM)

    assert run_jobs(jobs(10**6, 10**6), tmp_path, ExecutionOptions(), workers=2, on_event=terminate) == ["stopped"] * 2
    for run in map(Run.open, tmp_path.iterdir()):
        assert store.load_checkpoint(run.directory, run.spec) is not None or run.step == 0


@pytest.mark.heavy
def test_a_killed_worker_is_reported_in_one_sentence(tmp_path: Path):
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


# ---- items ----------------------------------------------------------------------------------------------------------


def test_one_worker_runs_in_this_process() -> None:
    messages: list[Any] = []

    def work(item: str, execution: ExecutionOptions, report: Any) -> int:
        report(item, len(messages))
        return os.getpid()

    def done(index: int, result: int) -> bool:
        messages.append(result)
        return index < 1  # the third is not begun

    run_parallel(work, "abc", ExecutionOptions(), 1, on_done=done, on_message=lambda *what: messages.append(what))
    assert messages == [(0, "a", 0), os.getpid(), (1, "b", 2), os.getpid()]


def raise_in_job(item: str, execution: ExecutionOptions, report: Any) -> None:
    raise RuntimeError(f"a fault in {item}")


@pytest.mark.heavy
def test_an_error_in_a_job_is_raised_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="a fault in") as raised:
        run_parallel(raise_in_job, "ab", ExecutionOptions(), 2, on_done=lambda *_: None)
    assert "in raise_in_job" in str(raised.value.__cause__)


def terminate_one_job(item: tuple[bool, Path], execution: ExecutionOptions, report: Any) -> str | None:
    """One item has its own process terminated and leaves its work; the other goes on beside it, and then ends."""
    stays, begun = item
    if stays:
        begun.touch()
        time.sleep(2)
        return "whole"
    while not begun.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    while not execution.is_over():
        time.sleep(0.01)
    return None


def endless_job(item: str, execution: ExecutionOptions, report: Any) -> None:
    """An item that never looks at its options."""
    report("begun")
    time.sleep(600)


@pytest.mark.heavy
def test_sigterm_ends_the_job_and_not_the_worker(tmp_path: Path):
    """Ended itself it would have broken the pool, and the item beside it would be lost."""
    actual: dict[int, Any] = {}
    items = [(stays, tmp_path / "begun") for stays in (False, True)]
    run_parallel(terminate_one_job, items, ExecutionOptions(), 2, on_done=actual.__setitem__)
    assert actual == {0: None, 1: "whole"}


@pytest.mark.heavy
def test_an_interrupt_ends_jobs_that_ignore_their_limits():
    def interrupt(index: int, what: str) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_parallel(endless_job, "ab", ExecutionOptions(), 2, on_done=lambda *what: None, on_message=interrupt)
    assert time.monotonic() - began < 300
    assert not multiprocessing.active_children()


# ---- what a cluster cannot do ---------------------------------------------------------------------------------------


def test_an_unavailable_worker_device_is_refused():
    with pytest.raises(InputError, match=r"^device must be auto, cpu or cuda with a cluster, got 'cuda:1'"):
        check_cluster(ClusterOptions(engine="ray", gpus_per_cell=1.0), "cuda:1")
    with pytest.raises(InputError, match=r"^gpus_per_cell must be over 0 with device cuda, got 0"):
        check_cluster(ClusterOptions(engine="ray"), "cuda")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("there", "^address must be HOST:PORT of the cluster's head, or auto, got 'there'"),
        ("ray://localhost:10001", "^address must be HOST:PORT"),
        ("localhost:1", "address: nothing answers at 'localhost:1'"),
    ],
)
def test_an_unreachable_address_is_named(address: str, says: str):
    pytest.importorskip("ray").shutdown()
    with pytest.raises(InputError, match=says):
        check_cluster(ClusterOptions(engine="ray", address=address), "cpu")


def test_missing_ray_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFailure, match="engine: ray is not installed"):
        connect(ClusterOptions(engine="ray"))


def test_jobs_waiting_on_another_are_deferred():
    waiting, after, done = [0, 1, 2, 3], {1: 0, 2: 3}, set[int]()
    assert [pop_ready(waiting, after, done) for _ in range(3)] == [0, 3, None]
    done.add(3)
    assert pop_ready(waiting, after, done) == 2
    done.add(0)
    assert [pop_ready(waiting, after, done), pop_ready(waiting, after, done)] == [1, None]


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
def test_one_job_per_core_on_a_cpu_and_one_at_a_time_on_a_gpu(
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
def test_thread_counts_respect_the_limit(monkeypatch: pytest.MonkeyPatch, asked: str, threads: int):
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


def is_alive(process: int) -> bool:
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
    result, edge = set(), {parent}
    while edge and depth:
        edge = {child for child, of in parents.items() if of in edge}
        result, depth = result | edge, depth - 1
    return result


@pytest.mark.heavy
def test_killing_the_parent_ends_all_workers_and_keeps_checkpoints(tmp_path: Path):
    specs = [tiny(seed=seed, epochs=10**6) for seed in (1, 2)]
    given = {"specs": [spec.model_dump(mode="json") for spec in specs], "out": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", SCRIPT, json.dumps(given)]) as parent:
        checkpoints = [tmp_path / spec.name / store.CHECKPOINT for spec in specs]
        wait_until(lambda: parent.poll() is not None or all(path.exists() for path in checkpoints))
        children = descendants(parent.pid)
        parent.send_signal(signal.SIGKILL)
    assert parent.returncode == -signal.SIGKILL
    assert len(children) >= 2
    wait_until(lambda: not any(map(is_alive, children)), seconds=20)
    for spec in specs:
        before = Run.open(tmp_path / spec.name)
        assert before.status == "stopped"
        assert before.step > 0
        after = train(spec, tmp_path, deadline=0.0)
        assert after.step in (before.step, before.step + 1)  # the lock is free and the checkpoint whole
