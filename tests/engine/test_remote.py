"""An output directory that is a URL: runs are published whole and resumed from another directory, by one driver."""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from tests.builders import StopAfter, tiny, wait_until
from tests.engine.test_workers import results_of

from toeplens.engine import ExecutionOptions, Job, pool, remote, run_job, run_jobs, working_copy
from toeplens.engine.jobs import _sync_job
from toeplens.engine.remote import Remote
from toeplens.utils import EnvironmentFailure, InputError


@pytest.fixture
def url() -> str:
    return f"memory://{secrets.token_hex(4)}"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOEPLENS_CACHE", str(tmp_path / "cache"))


def test_a_run_resumes_in_another_directory_bit_for_bit(url: str, tmp_path: Path):
    """Each directory is a machine's, which the others do not see."""
    job = Job(tiny(epochs=3), "one", 20)
    name, limits = job.spec.name, ExecutionOptions(checkpoint_seconds=0.0, publish=url)
    steps = [
        run_job(job, tmp_path / place, replace(limits, should_stop=StopAfter(units))).step
        for place, units in (("a", 4), ("b", 5), ("c", 1))
    ]
    assert 0 < steps[0] < steps[1] <= steps[2] < job.spec.total_steps  # each went on from what was fetched
    assert run_job(job, tmp_path / "b", limits).status == "complete"
    assert run_job(job, tmp_path / "alone", ExecutionOptions()).status == "complete"
    _sync_job(job, tmp_path / "d", limits)
    _sync_job(job, tmp_path / "a", limits)  # whose checkpoint is older
    for place in "abd":
        assert results_of(tmp_path / place / name) == results_of(tmp_path / "alone" / name)
        files = {path.name for path in (tmp_path / place / name).iterdir()} - {".lock"}
        assert files == {path.name for path in (tmp_path / "alone" / name).iterdir()} - {".lock"}
    assert Remote(url).files() == []


def test_a_run_is_published_only_when_it_has_changed(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job, written, write = Job(tiny(), "one", 20), list[str](), Remote.write

    def noted(self: Remote, name: str, content: bytes) -> None:
        written.append(name)
        if len(written) == 2:
            raise EnvironmentFailure("the network is gone")  # for a moment
        write(self, name, content)

    monkeypatch.setattr(Remote, "write", noted)
    assert run_job(job, tmp_path, ExecutionOptions(checkpoint_seconds=0.0, publish=url)).status == "complete"
    assert len(written) > 3
    assert set(written) == {f"runs/{job.spec.name}.zip"}
    written.clear()
    assert run_job(job, tmp_path, ExecutionOptions(checkpoint_seconds=0.0, publish=url)).status == "complete"
    assert written == []
    run_job(Job(tiny(seed=9), "two"), tmp_path, ExecutionOptions(publish=url))  # before its checkpoint is due
    assert len(written) == 1


def test_a_failed_publication_is_an_error_and_retried_next_time(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job, limits = Job(tiny(), "one"), ExecutionOptions(checkpoint_seconds=0.0, publish=url)
    run_job(job, tmp_path / "b", replace(limits, should_stop=StopAfter(3)))
    with monkeypatch.context() as patch:
        patch.setattr("fsspec.implementations.memory.MemoryFileSystem.pipe_file", None)
        with pytest.raises(EnvironmentFailure, match=rf"^[Cc]annot write {url}/runs/{job.spec.name}\.zip: "):
            run_job(job, tmp_path / "a", limits)
    before = results_of(tmp_path / "a" / job.spec.name)
    _sync_job(job, tmp_path / "a", limits)  # what is there is not so far
    _sync_job(job, tmp_path / "b", limits)
    assert before == results_of(tmp_path / "a" / job.spec.name) == results_of(tmp_path / "b" / job.spec.name)


def make_archive(name: str, content: bytes) -> bytes:
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w") as archive:
        archive.writestr(name, content)
    return result.getvalue()


@pytest.mark.parametrize("content", [b"half", make_archive("progress.json", b"{")])
def test_a_damaged_archive_is_named(url: str, tmp_path: Path, content: bytes):
    Remote(url).write("runs/one.zip", content)
    with pytest.raises(
        InputError, match=rf"^out: {url}/runs/one\.zip is damaged .*\. Delete it to train the run again"
    ):
        Remote(url).fetch(tmp_path / "one")


def test_archives_cannot_write_outside_their_directory(url: str, tmp_path: Path):
    Remote(url).write("runs/one.zip", make_archive("../evil.json", b"{}"))
    assert Remote(url).fetch(tmp_path / "one") == {}
    assert not (tmp_path / "evil.json").exists()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://", "out must name a place such as s3://bucket/path, got 's3://'"),
        ("s4://there", "out must be a URL of a file system that is installed, got 's4://there': "),
        ("adl://there/x", "out must be a URL of a file system that is installed, got 'adl://there/x': "),
    ],
)
def test_an_invalid_url_is_named(url: str, says: str):
    with pytest.raises(InputError, match=f"^{re.escape(says)}"):
        Remote(url)


# ---- the working copy ------------------------------------------------------------------------------------------------


def test_files_are_synced_and_runs_are_left_to_their_workers(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with working_copy(url) as directory:
        assert tmp_path / "cache" / "toeplens" / "outputs" in directory.parents
        (directory / "records").mkdir()
        (directory / "records" / "a.json").write_text("1")
        (directory / "study.json").write_text("old")
        (directory / "runs" / "x").mkdir(parents=True)
        (directory / "runs" / "x" / "spec.json").write_text("{}")
    assert sorted(Remote(url).files()) == ["records/a.json", "study.json"]
    assert Remote(url).read("runs/x/spec.json") is Remote(url).read("driver.json") is None
    monkeypatch.setenv("TOEPLENS_CACHE", str(tmp_path / "another machine"))

    def breaks_off() -> None:
        with working_copy(url) as directory:
            assert (directory / "records" / "a.json").read_text() == "1"
            (directory / "study.json").write_text("new")
            raise ZeroDivisionError  # what is new is published nevertheless

    with pytest.raises(ZeroDivisionError):
        breaks_off()
    assert Remote(url).read("study.json") == b"new"
    fsspec.filesystem("memory").rm(url, recursive=True)
    with working_copy(url) as directory:
        assert list(directory.iterdir()) == []  # a study that was deleted does not come back


def test_unrelated_files_are_not_fetched(url: str):
    Remote(url).write("thesis.txt", b"mine")
    with (
        pytest.raises(InputError, match=f"^out: {url} contains files that do not belong to a study"),
        working_copy(url),
    ):
        pass
    assert Remote(url).files() == ["thesis.txt"]


def test_a_second_driver_is_refused_unless_the_first_is_dead(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "_HEARTBEAT", 0.02)
    with working_copy(url):
        Remote(url).write("driver.json", b"{}")
        time.sleep(0.3)  # it gives a sign of life
        says = rf"^out: {url} is in use by process {os.getpid()} of .* \(last seen \d+ seconds ago\)\. Wait until"
        with pytest.raises(InputError, match=says), working_copy(url):
            pass
    ended = subprocess.Popen(["true"])
    ended.wait()
    here, now = socket.gethostname(), time.time()
    for driver in (
        {"host": here, "process": ended.pid, "time": now},
        {"host": "another", "process": 1, "time": now - 61},
        "damaged",
    ):
        Remote(url).write("driver.json", json.dumps(driver).encode())
        with working_copy(url):
            pass
    Remote(url).write("driver.json", json.dumps({"host": "another", "process": 1, "time": now - 50}).encode())
    with pytest.raises(InputError, match="is in use by process 1 of another"), working_copy(url):
        pass


# ---- an object store -------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a real S3 server of this machine, which other processes see too."""
    import boto3
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()  # of another server

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("ENDPOINT_URL", f"http://{host}:{port}")):
        monkeypatch.setenv(f"AWS_{name}", value)
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="runs")
    yield "s3://runs/study"
    server.stop()


STUDY = """
title: Small
seeds: 1
examples: 32
measures: [toeplitz]
model: {d_model: 32, d_ff: 64, num_layers: 2, num_heads: 2, dropout: 0.0}
training: {lr: 0.003, batch_size: 128, train_examples: 2048, test_examples: 64, epochs: 10}
tasks: {index: {options: {length: 10, words: 8}}}
encodings: {nope: , alibi: , rope: }
"""


@pytest.mark.heavy
def test_an_interrupted_study_resumes_on_another_machine_from_s3(bucket: str, tmp_path: Path):
    """By the command line; each machine is a cache that the other does not see."""
    (tmp_path / "small.yaml").write_text(STUDY)

    def study(machine: str, out: str | Path) -> subprocess.Popen[str]:
        environment = {**os.environ, "TOEPLENS_CACHE": str(tmp_path / machine)}
        given = ("study", tmp_path / "small.yaml", "--workers", "1", "--json", "--out", out)
        return subprocess.Popen(
            [sys.executable, "-m", "toeplens", *map(str, given)], env=environment, stdout=subprocess.PIPE, text=True
        )

    def published() -> list[str]:
        actual = Remote(bucket)._request("list", "runs", Remote(bucket)._fs.find)
        return [Path(name).stem for name in actual]

    first = study("a", bucket)
    wait_until(lambda: bool(published()), first)
    first.send_signal(signal.SIGINT)
    assert (json.loads(first.communicate()[0])["finished"], first.returncode) == (1, 130)
    other = study("b", bucket)
    assert json.loads(other.communicate()[0])["finished"] == 3
    alone = study("c", tmp_path / "alone")
    assert json.loads(alone.communicate()[0])["finished"] == 3
    (copy,) = (tmp_path / "b" / "toeplens" / "outputs").iterdir()
    runs = {run.name: results_of(run) for run in (tmp_path / "alone" / "runs").iterdir()}
    assert {run.name: results_of(run) for run in (copy / "runs").iterdir()} == runs
    assert sorted(published()) == sorted(runs)
    assert set(Remote(bucket).files()) == {"study.json", "results.json", "claims.json", "report.html"}


@pytest.mark.heavy
def test_workers_publish_the_results_of_one_process_to_s3(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "plan_workers", lambda *given: (2, torch.get_num_threads()))
    expected = [Job(tiny(seed=seed), str(seed), 20) for seed in range(3)]
    assert run_jobs(expected, tmp_path / "here", ExecutionOptions(publish=bucket), workers=2) == ["complete"] * 3
    for job in expected:
        run_job(job, tmp_path / "alone", ExecutionOptions())
        _sync_job(job, tmp_path / "there", ExecutionOptions(publish=bucket))
        assert results_of(tmp_path / "there" / job.spec.name) == results_of(tmp_path / "alone" / job.spec.name)


@pytest.mark.heavy
def test_an_s3_server_that_refuses_is_named(bucket: str):
    with (
        pytest.raises(EnvironmentFailure, match=r"^[Cc]annot write s3://nowhere/x/driver\.json: "),
        working_copy("s3://nowhere/x"),
    ):
        pass
