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
from tests.engine.test_many import outcome

from toeplens.engine import ClusterOptions, Event, ExecutionOptions, Job, must_serve, pool, run_job, run_jobs, spread
from toeplens.ground import EnvironmentFailure, InputError
from toeplens.training.run import CHECKPOINT

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
def three(machines: Any) -> ClusterOptions:
    return ClusterOptions(engine="ray", address=machines.address)


@pytest.fixture
def one_thread(threads: None) -> None:
    """As a worker with one core: only then are sums added in the same order."""
    torch.set_num_threads(1)


def jobs(count: int, epochs: int) -> list[Job]:
    return [Job(tiny(seed=42 + index, epochs=epochs), f"job {index}", 20) for index in range(count)]


def must_be_those_of_one_process(out: Path, alone: Path, wanted: list[Job]) -> None:
    """Bit by bit: weights, figures, ablation; and no step was done twice by those that were not disturbed."""
    for job in wanted:
        run_job(job, alone, ExecutionOptions())
        assert outcome(out / job.spec.name) == outcome(alone / job.spec.name)
        assert outcome(out / job.spec.name)[-1] is not None


def worker(job: Job) -> int | None:
    """The process that holds a job's run, wherever that lies."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if str(link.readlink()).endswith(f"/{job.spec.name}/.lock"):
                return int(link.parts[2])
    return None


class Meanwhile(threading.Thread):
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
def test_a_worker_that_is_killed_is_replaced_and_its_run_goes_on(
    three: ClusterOptions, tmp_path: Path, published: bool
):
    url = f"file://{tmp_path / 'url'}"
    out, wanted, told = tmp_path / "out", jobs(3, 60), []
    kept = tmp_path / f"url/runs/{wanted[0].spec.name}.zip" if published else out / wanted[0].spec.name / CHECKPOINT

    def kill() -> bool:
        process = worker(wanted[0]) if kept.exists() else None
        if process:
            os.kill(process, signal.SIGKILL)
        return bool(process)

    killing = Meanwhile(kill)
    limits = ExecutionOptions(checkpoint_seconds=0.1, publish=url if published else None, follow=("tensorboard",))
    found = run_jobs(wanted, out, limits, workers=three, on_event=told.append)
    assert killing.end()
    assert found == ["complete"] * 3
    events = [len(list((out / job.spec.name).glob("tensorboard/*/*"))) for job in wanted]
    assert events[0] == 2  # the killed worker's too
    assert events[1:] == [1, 1]
    must_be_those_of_one_process(out, tmp_path / "alone", wanted)
    assert sorted(event.job for event in told if event.status == "complete") == [0, 1, 2]
    assert any(event.status is None and 0 < event.step < event.total for event in told)
    # again: all is there, so no worker is asked
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert run_jobs(wanted, out, limits, workers=three) == ["complete"] * 3
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before


def test_a_machine_that_is_removed_is_replaced_and_its_run_goes_on(
    machines: Any, three: ClusterOptions, tmp_path: Path
):
    out, wanted = tmp_path / "out", jobs(4, 60)  # so that each machine has one
    extra = machines.add_node(num_cpus=1)
    machines.wait_for_nodes()
    raylet = extra.all_processes["raylet"][0].process.pid

    def remove() -> bool:
        for job in wanted:
            process = worker(job) if (out / job.spec.name / CHECKPOINT).exists() else None
            if process and parent(process) == raylet:
                machines.remove_node(extra, allow_graceful=False)
                return True
        return False

    removing = Meanwhile(remove)
    found = run_jobs(wanted, out, ExecutionOptions(checkpoint_seconds=0.1), workers=three)
    assert removing.end()
    assert found == ["complete"] * 4
    must_be_those_of_one_process(out, tmp_path / "alone", wanted)


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


def test_a_driver_that_is_killed_is_started_again_and_goes_on(machines: Any, three: ClusterOptions, tmp_path: Path):
    out, wanted, script = tmp_path / "out", jobs(4, 40), tmp_path / "driver.py"
    script.write_text(DRIVER, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), *sys.path))}
    driver = subprocess.Popen([sys.executable, str(script), machines.address, str(out)], env=environment, text=True)
    wait_until(lambda: any((out / job.spec.name / "ablation.json").exists() for job in wanted), driver)
    driver.kill()
    driver.wait()
    wait_until(lambda: not any(worker(job) for job in wanted))  # Ray ends its tasks
    done = [job for job in wanted if (out / job.spec.name / "ablation.json").exists()]
    before = {job.label: (out / job.spec.name / "result.json").read_bytes() for job in done}
    assert 0 < len(done) < 4
    assert run_jobs(wanted, out, ExecutionOptions(), workers=three) == ["complete"] * 4
    must_be_those_of_one_process(out, tmp_path / "alone", wanted)
    for job in done:
        assert (out / job.spec.name / "result.json").read_bytes() == before[job.label]


def test_a_stop_is_heard_and_the_same_call_goes_on(three: ClusterOptions, tmp_path: Path):
    wanted = jobs(4, 120)
    begun = threading.Event()

    def told(event: Event) -> None:
        if event.step:
            begun.set()

    limits = ExecutionOptions(should_stop=begun.is_set)
    found = run_jobs(wanted, tmp_path / "out", limits, workers=three, on_event=told)
    assert "stopped" in found
    assert any((tmp_path / "out" / job.spec.name / "checkpoint.pt").exists() for job in wanted)
    assert run_jobs(wanted, tmp_path / "out", ExecutionOptions(), workers=three) == ["complete"] * 4
    must_be_those_of_one_process(tmp_path / "out", tmp_path / "alone", wanted)


def test_a_deadline_stops_work_that_is_far_from_done(three: ClusterOptions, tmp_path: Path):
    found = run_jobs(jobs(2, 5000), tmp_path, ExecutionOptions(deadline=time.time() + 6), workers=three)
    assert found == ["stopped"] * 2


def test_an_error_in_a_job_is_raised_as_it_is(three: ClusterOptions, tmp_path: Path):
    job = jobs(1, 2)[0]
    (tmp_path / job.spec.name).mkdir()
    (tmp_path / job.spec.name / "somebody's.txt").touch()
    with pytest.raises(InputError, match="contains files that do not belong to a run"):
        run_jobs([job], tmp_path, ExecutionOptions(), workers=three)


def test_a_piece_that_loses_its_worker_again_and_again_ends_it(three: ClusterOptions, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "_RETRIES", 1)
    with pytest.raises(Exception, match="A worker of the cluster ended unexpectedly"):
        spread(dies, [()], ExecutionOptions(), three, on_done=lambda *_: None)


def dies(*_: Any) -> None:
    os._exit(1)


def test_what_waits_for_room_is_not_begun_once_it_is_to_stop(three: ClusterOptions, tmp_path: Path):
    limits = ExecutionOptions(should_stop=(tmp_path / "begun").exists)
    done: list[int] = []
    spread(stays, [(True, tmp_path)] * 9, limits, three, on_done=lambda index, result: done.append(index))
    assert len(done) <= 3


def test_what_cannot_be_kept_stops_the_other_pieces(three: ClusterOptions, tmp_path: Path):
    def full(index: int, result: Any) -> None:
        if result == "whole":
            raise EnvironmentFailure("the disk is full")

    with pytest.raises(EnvironmentFailure, match="the disk is full"):
        spread(stays, [(False, tmp_path), (True, tmp_path)], ExecutionOptions(), three, on_done=full)
    assert (tmp_path / "left").read_text() == "cpu"  # what a piece without a GPU is told


def stays(piece: tuple[bool, Path], limits: ExecutionOptions, tell: Any) -> str | None:
    """One piece stays until it is told to stop, and says so; the other is done when that has begun."""
    stays, directory = piece
    if stays:
        (directory / "begun").touch()
        while not limits.over():
            time.sleep(0.1)
        (directory / "left").write_text(limits.device)
        return None
    wait_until((directory / "begun").exists)
    return "whole"


def test_a_directory_that_the_workers_do_not_share_is_named(
    three: ClusterOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("toeplens.engine.jobs.is_done", lambda *_: False)
    with pytest.raises(EnvironmentFailure, match=r"^out: a worker finished the run .* Use a shared directory"):
        run_jobs(jobs(1, 1), tmp_path, ExecutionOptions(), workers=three)


@pytest.mark.parametrize(
    ("given", "needs"),
    [
        ({"gpus_per_cell": 0.25}, r"\(1 CPU, 0.25 GPU\)"),
        ({"cpus_per_cell": 2.0}, r"\(2 CPU\)"),
        ({"memory_per_cell": "1000T"}, ""),
    ],
)
def test_more_than_the_cluster_has_is_refused(machines: Any, given: dict[str, Any], needs: str):
    with pytest.raises(InputError, match=f"no machine of the cluster has the resources that a cell needs {needs}"):
        must_serve(ClusterOptions(engine="ray", address=machines.address, **given), "auto")


def test_as_many_at_a_time_as_there_is_room_for(machines: Any, three: ClusterOptions):
    assert pool.at_a_time(three) == 3
    assert pool.at_a_time(replace(three, workers=2)) == 2
