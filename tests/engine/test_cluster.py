"""Jobs on a real Ray cluster of three machines, of which some die: nothing is lost, nothing done twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders import tiny, wait_until
from tests.engine.test_workers import results_of

from toeplens.engine import (
    ClusterOptions,
    Event,
    ExecutionOptions,
    Job,
    check_cluster,
    pool,
    run_job,
    run_jobs,
    run_parallel,
)
from toeplens.training.run import CHECKPOINT
from toeplens.utils import EnvironmentFailure, InputError

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """Three machines of one core, on this one."""
    from ray.cluster_utils import Cluster as Machines

    ray.shutdown()  # of another test
    machines = Machines(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        machines.add_node(num_cpus=1)
    machines.wait_for_nodes()
    yield machines
    ray.shutdown()
    machines.shutdown()


@pytest.fixture
def three_workers(machines: Any) -> ClusterOptions:
    return ClusterOptions(engine="ray", address=machines.address)


@pytest.fixture
def one_thread(threads: None) -> None:
    """As a worker with one core: only then are sums added in the same order."""
    torch.set_num_threads(1)


def jobs(count: int, epochs: int) -> list[Job]:
    return [Job(tiny(seed=42 + index, epochs=epochs), f"job {index}", 20) for index in range(count)]


def assert_same_as_one_process(out: Path, alone: Path, wanted: list[Job]) -> None:
    """Bit by bit: weights, figures, ablation; and no step was done twice by those that were not disturbed."""
    for job in wanted:
        run_job(job, alone, ExecutionOptions())
        assert results_of(out / job.spec.name) == results_of(alone / job.spec.name)
        assert results_of(out / job.spec.name)[-1] is not None


def worker(job: Job) -> int | None:
    """The process that holds a job's run, wherever that lies."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if str(link.readlink()).endswith(f"/{job.spec.name}/.lock"):
                return int(link.parts[2])
    return None


class Disturbance(threading.Thread):
    """Something that happens while jobs are carried out, as soon as it can; must have happened at the end."""

    def __init__(self, happens: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self.happens, self.happened, self.over = happens, False, threading.Event()
        self.start()

    def run(self) -> None:
        while not self.happened and not self.over.wait(0.02):
            self.happened = self.happens()

    def end(self) -> bool:
        self.over.set()
        self.join()
        return self.happened


@pytest.mark.parametrize("published", [False, True], ids=["a directory", "a URL"])
def test_a_killed_worker_is_replaced_and_its_run_resumed(
    three_workers: ClusterOptions, tmp_path: Path, published: bool
):
    url = f"file://{tmp_path / 'url'}"
    out, expected, messages = tmp_path / "out", jobs(3, 60), []
    kept = tmp_path / f"url/runs/{expected[0].spec.name}.zip" if published else out / expected[0].spec.name / CHECKPOINT

    def kill() -> bool:
        process = worker(expected[0]) if kept.exists() else None
        if process:
            os.kill(process, signal.SIGKILL)
        return bool(process)

    killing = Disturbance(kill)
    limits = ExecutionOptions(checkpoint_seconds=0.1, publish=url if published else None, follow=("tensorboard",))
    actual = run_jobs(expected, out, limits, workers=three_workers, on_event=messages.append)
    assert killing.end()
    assert actual == ["complete"] * 3
    events = [len(list((out / job.spec.name).glob("tensorboard/*/*"))) for job in expected]
    assert events[0] == 2  # the killed worker's too
    assert events[1:] == [1, 1]
    assert_same_as_one_process(out, tmp_path / "alone", expected)
    assert sorted(event.job for event in messages if event.status == "complete") == [0, 1, 2]
    assert any(event.status is None and 0 < event.step < event.total for event in messages)
    # again: all is there, so no worker is asked
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert run_jobs(expected, out, limits, workers=three_workers) == ["complete"] * 3
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before


def test_a_removed_machine_is_replaced_and_its_run_resumed(
    machines: Any, three_workers: ClusterOptions, tmp_path: Path
):
    out, expected = tmp_path / "out", jobs(4, 60)  # so that each machine has one
    extra = machines.add_node(num_cpus=1)
    machines.wait_for_nodes()
    raylet = extra.all_processes["raylet"][0].process.pid

    def remove() -> bool:
        for job in expected:
            process = worker(job) if (out / job.spec.name / CHECKPOINT).exists() else None
            if process and parent(process) == raylet:
                machines.remove_node(extra, allow_graceful=False)
                return True
        return False

    removing = Disturbance(remove)
    actual = run_jobs(expected, out, ExecutionOptions(checkpoint_seconds=0.1), workers=three_workers)
    assert removing.end()
    assert actual == ["complete"] * 4
    assert_same_as_one_process(out, tmp_path / "alone", expected)


def parent(process: int) -> int | None:
    try:
        return int(Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


DRIVER = """
import sys
from pathlib import Path
from tests.engine.test_cluster import jobs
from toeplens.engine import ClusterOptions, ExecutionOptions, run_jobs

if __name__ == "__main__":
    address, out = sys.argv[1:]
    cluster = ClusterOptions(engine="ray", address=address)
    run_jobs(jobs(4, 40), Path(out), ExecutionOptions(checkpoint_seconds=0.1), workers=cluster)
"""


def test_a_killed_driver_can_be_restarted_and_resumes(machines: Any, three_workers: ClusterOptions, tmp_path: Path):
    out, expected, script = tmp_path / "out", jobs(4, 40), tmp_path / "driver.py"
    script.write_text(DRIVER, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), *sys.path))}
    driver = subprocess.Popen([sys.executable, str(script), machines.address, str(out)], env=environment, text=True)
    wait_until(lambda: any((out / job.spec.name / "ablation.json").exists() for job in expected), driver)
    driver.kill()
    driver.wait()
    wait_until(lambda: not any(worker(job) for job in expected))  # Ray ends its tasks
    done = [job for job in expected if (out / job.spec.name / "ablation.json").exists()]
    before = {job.label: (out / job.spec.name / "result.json").read_bytes() for job in done}
    assert 0 < len(done) < 4
    assert run_jobs(expected, out, ExecutionOptions(), workers=three_workers) == ["complete"] * 4
    assert_same_as_one_process(out, tmp_path / "alone", expected)
    for job in done:
        assert (out / job.spec.name / "result.json").read_bytes() == before[job.label]


def test_an_interrupted_call_is_resumed_by_the_same_call(three_workers: ClusterOptions, tmp_path: Path):
    expected = jobs(4, 120)
    begun = threading.Event()

    def told(event: Event) -> None:
        if event.step:
            begun.set()

    limits = ExecutionOptions(should_stop=begun.is_set)
    actual = run_jobs(expected, tmp_path / "out", limits, workers=three_workers, on_event=told)
    assert "stopped" in actual
    assert any((tmp_path / "out" / job.spec.name / "checkpoint.pt").exists() for job in expected)
    assert run_jobs(expected, tmp_path / "out", ExecutionOptions(), workers=three_workers) == ["complete"] * 4
    assert_same_as_one_process(tmp_path / "out", tmp_path / "alone", expected)


def test_a_deadline_stops_unfinished_work(three_workers: ClusterOptions, tmp_path: Path):
    actual = run_jobs(jobs(2, 5000), tmp_path, ExecutionOptions(deadline=time.time() + 6), workers=three_workers)
    assert actual == ["stopped"] * 2


def test_an_error_in_a_job_is_raised_unchanged(three_workers: ClusterOptions, tmp_path: Path):
    job = jobs(1, 2)[0]
    (tmp_path / job.spec.name).mkdir()
    (tmp_path / job.spec.name / "somebody's.txt").touch()
    with pytest.raises(InputError, match="contains files that do not belong to a run"):
        run_jobs([job], tmp_path, ExecutionOptions(), workers=three_workers)


def test_a_job_that_loses_its_worker_repeatedly_is_an_error(
    three_workers: ClusterOptions, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool, "_RETRIES", 1)
    with pytest.raises(Exception, match="A worker of the cluster ended unexpectedly"):
        run_parallel(kill_worker, [()], ExecutionOptions(), three_workers, on_done=lambda *_: None)


def kill_worker(*_: Any) -> None:
    os._exit(1)


def test_queued_jobs_do_not_start_after_a_stop(three_workers: ClusterOptions, tmp_path: Path):
    limits = ExecutionOptions(should_stop=(tmp_path / "begun").exists)
    done: list[int] = []
    run_parallel(
        wait_for_stop, [(True, tmp_path)] * 9, limits, three_workers, on_done=lambda index, result: done.append(index)
    )
    assert len(done) <= 3


def test_a_result_that_cannot_be_saved_stops_the_other_jobs(three_workers: ClusterOptions, tmp_path: Path):
    def full(index: int, result: Any) -> None:
        if result == "whole":
            raise EnvironmentFailure("the disk is full")

    with pytest.raises(EnvironmentFailure, match="the disk is full"):
        run_parallel(
            wait_for_stop, [(False, tmp_path), (True, tmp_path)], ExecutionOptions(), three_workers, on_done=full
        )
    assert (tmp_path / "left").read_text() == "cpu"  # the device that an item without a GPU gets


def wait_for_stop(item: tuple[bool, Path], execution: ExecutionOptions, report: Any) -> str | None:
    """One item runs until it is asked to stop, and reports that; the other is done when that has begun."""
    stays, directory = item
    if stays:
        (directory / "begun").touch()
        while not execution.is_over():
            time.sleep(0.1)
        (directory / "left").write_text(execution.device)
        return None
    wait_until((directory / "begun").exists)
    return "whole"


def test_a_directory_not_shared_by_the_workers_is_named(
    three_workers: ClusterOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("toeplens.engine.jobs.is_done", lambda *_: False)
    with pytest.raises(EnvironmentFailure, match=r"^out: a worker finished the run .* Use a shared directory"):
        run_jobs(jobs(1, 1), tmp_path, ExecutionOptions(), workers=three_workers)


@pytest.mark.parametrize(
    ("given", "needs"),
    [
        ({"gpus_per_cell": 0.25}, r"\(1 CPU, 0.25 GPU\)"),
        ({"cpus_per_cell": 2.0}, r"\(2 CPU\)"),
        ({"memory_per_cell": "1000T"}, ""),
    ],
)
def test_requests_beyond_the_cluster_are_refused(machines: Any, given: dict[str, Any], needs: str):
    with pytest.raises(InputError, match=f"no machine of the cluster has the resources that a cell needs {needs}"):
        check_cluster(ClusterOptions(engine="ray", address=machines.address, **given), "auto")


def test_concurrency_is_limited_by_the_cluster(machines: Any, three_workers: ClusterOptions):
    assert pool.parallel_capacity(three_workers) == 3
    assert pool.parallel_capacity(replace(three_workers, workers=2)) == 2
