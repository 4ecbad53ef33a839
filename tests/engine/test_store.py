"""Runs in a store: on a disk, in memory and on an S3 server; who holds one, and what is left when its holder dies."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.builders import After, taken, tiny
from tests.engine.test_many import outcome

from toeplens.engine import Job, Limits, carry_out, leases, sharing
from toeplens.engine.leases import HeldElsewhere, take
from toeplens.engine.sharing import fetch, is_behind, shared
from toeplens.engine.store import Store
from toeplens.ground import EnvironmentFailure, InputError

KINDS = ("disk", "memory", "s3")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A real S3 server of this machine, with a bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "disk":
        return str(tmp_path / "store")
    if request.param == "memory":
        return f"memory://{secrets.token_hex(4)}"
    import boto3

    address = request.getfixturevalue("server")
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("ENDPOINT_URL", address)):
        monkeypatch.setenv(f"AWS_{name}", value)
    bucket = f"runs-{secrets.token_hex(4)}"
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/study"


each_kind = pytest.mark.parametrize("url", KINDS, indirect=True)
on_disk = pytest.mark.parametrize("url", ["disk"], indirect=True)


@each_kind
def test_objects_are_read_as_they_were_written_and_made_by_one_alone(url: str):
    store, other = Store(url), Store(url)
    store.must_take()
    assert store.read("run/a") is None
    assert store.names("run") == []
    store.write("run/a", b"one")
    store.write("run/a", b"two")
    assert other.read("run/a") == b"two"
    assert store.create("run/b/c", b"first")
    assert not other.create("run/b/c", b"second")
    assert store.read("run/b/c") == b"first"
    assert other.names("run") == ["a", "b"]
    store.write("run/.a.1234abcd.tmp", b"half")  # left by somebody who was killed while writing
    assert other.names("run") == ["a", "b"]
    store.remove(["run/a", "run/b", "run/none"])
    assert other.names("run") == []


@each_kind
def test_of_many_who_create_an_object_at_once_one_is_told_that_it_did(url: str):
    stores = [Store(url) for _ in range(8)]
    begin, made = threading.Barrier(8), []

    def create(number: int) -> None:
        begin.wait()
        if stores[number].create("lease", str(number).encode()):
            made.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert stores[0].read("lease") == str(made[0]).encode()


@each_kind
def test_a_run_stopped_on_one_machine_goes_on_on_another_bit_for_bit(url: str, tmp_path: Path):
    """A machine is a directory that the other does not see."""
    job = Job(tiny(epochs=3), "one", 20)
    name = job.spec.name
    limits = Limits(checkpoint_seconds=0.0, store=url)
    assert carry_out(job, tmp_path / "a", replace(limits, should_stop=After(5))).status == "stopped"
    assert not is_behind(Store(url), tmp_path / "a" / name)
    assert carry_out(job, tmp_path / "b", limits).status == "complete"
    assert carry_out(job, tmp_path / "alone", Limits()).status == "complete"
    assert outcome(tmp_path / "b" / name) == outcome(tmp_path / "alone" / name)
    assert len(json.loads((tmp_path / "b" / name / "environment.json").read_bytes())["history"]) == 1  # the same kind
    assert fetch(Store(url), tmp_path / "c" / name)
    assert outcome(tmp_path / "c" / name) == outcome(tmp_path / "alone" / name)
    files = {path.name for path in (tmp_path / "b" / name).iterdir()} - {".lock"}
    assert {path.name for path in (tmp_path / "c" / name).iterdir()} == files
    assert not fetch(Store(url), tmp_path / "c" / name)
    held = set(Store(url).names(name))
    assert held == {"000002", "leases", "manifests"}  # nothing is kept of the first lease
    assert len(Store(url).names(f"{name}/000002")) <= len(files)  # nor of what was written over


@each_kind
def test_a_run_that_somebody_holds_is_refused_and_one_given_back_is_not(url: str, tmp_path: Path):
    job = Job(tiny(), "one")
    lease = take(Store(url), job.spec.name)
    with pytest.raises(HeldElsewhere, match=f"run: {job.spec.name} is being worked on"):
        carry_out(job, tmp_path, Limits(store=url))
    lease.release()
    assert not lease.lost
    assert carry_out(job, tmp_path, Limits(store=url)).status == "complete"


DRIVER = """
import sys
from pathlib import Path
from tests.builders import tiny
from toeplens.engine import Job, Limits, run_jobs

if __name__ == "__main__":
    out, store = sys.argv[1:]
    wanted = [Job(tiny(seed=seed, epochs=20), f"{seed}", 20) for seed in range(4)]
    print(run_jobs(wanted, Path(out), Limits(checkpoint_seconds=0.1, store=store), workers=2))
"""


@pytest.mark.heavy
@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_two_drivers_on_an_s3_server_do_no_job_twice(url: str, tmp_path: Path):
    """Two commands at once, each in a directory that the other does not see, with the same four jobs."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    drivers = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / name), url], env=environment, stdout=subprocess.PIPE, text=True
        )
        for name in ("one", "other")
    ]
    assert [driver.communicate(timeout=300)[0].strip() for driver in drivers] == [str(["complete"] * 4)] * 2
    for seed in range(4):
        job = Job(tiny(seed=seed, epochs=20), f"{seed}", 20)
        carry_out(job, tmp_path / "alone", Limits())
        here, there, alone = (tmp_path / name / job.spec.name for name in ("one", "other", "alone"))
        assert outcome(here) == outcome(there) == outcome(alone)
        assert (here / "result.json").read_bytes() == (there / "result.json").read_bytes()  # its seconds too


@on_disk
def test_a_lease_of_a_dead_process_of_this_machine_is_taken_over_at_once(url: str):
    code = (
        f"import os; from toeplens.engine import leases, store; leases.take(store.Store({url!r}), 'run'); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    begun = time.monotonic()
    assert taken(Store(url), "run") == 2
    assert time.monotonic() - begun < leases.SECONDS  # for which another machine's would be waited for


@on_disk
def test_a_lease_of_another_machine_is_taken_over_when_nothing_renews_it(url: str, monkeypatch: pytest.MonkeyPatch):
    store = Store(url)
    held = {"seconds": 0.4, "beat": "x", "machine": "another", "process": 1, "begun": "1"}
    store.create("run/leases/000001.json", json.dumps({**held, "at": time.time()}).encode())
    with pytest.raises(HeldElsewhere):
        take(store, "run")
    store.write("run/leases/000001.json", json.dumps({**held, "at": time.time() - 9}).encode())
    with pytest.raises(HeldElsewhere):  # this one has no time to watch it
        take(store, "run", over=lambda: True)
    beats = iter(range(10**6))
    read = store.read

    def renewed(name: str) -> bytes | None:  # its clock is wrong, but it lives
        return json.dumps({**held, "at": time.time() - 9, "beat": next(beats)}).encode()

    monkeypatch.setattr(store, "read", renewed)
    with pytest.raises(HeldElsewhere):
        take(store, "run")
    monkeypatch.setattr(store, "read", read)
    begun = time.monotonic()
    assert taken(store, "run") == 2
    assert time.monotonic() - begun >= 0.4


@on_disk
def test_who_lost_a_lease_leaves_the_run_and_what_it_still_writes_is_not_read(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It was taken for dead: its network had stalled."""
    job, store, name = Job(tiny(epochs=3), "one", 20), Store(url), tiny(epochs=3).name
    carry_out(job, tmp_path / "other", Limits(store=f"{url}-of-another"))
    monkeypatch.setattr(sharing, "take", partial(take, seconds=0.3))
    units = iter(range(10**6))

    def taken_over() -> bool:
        if next(units) == 4:
            assert store.create(f"{name}/leases/000002.json", b"{}")
            with shared(tmp_path / "other" / name, Limits(store=url)):  # it is further on
                time.sleep(0.3)
        return False

    with pytest.raises(HeldElsewhere, match="was taken over by another process"):
        carry_out(job, tmp_path / "a", Limits(checkpoint_seconds=0.0, store=url, should_stop=taken_over))
    assert store.names(f"{name}/manifests") == ["000001.json", "000003.json"]
    assert fetch(store, tmp_path / "b" / name)
    assert outcome(tmp_path / "b" / name) == outcome(tmp_path / "other" / name)


def test_without_a_store_nothing_is_shared(tmp_path: Path):
    with shared(tmp_path, Limits()) as within:
        assert within == Limits()


@on_disk
def test_a_store_that_fails_for_a_while_costs_nothing(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = Job(tiny(epochs=3), "one", 20)
    write, failed = Store.write, []

    def fails(self: Store, name: str, content: bytes) -> None:
        if len(failed) < 3 and "leases" not in name:
            failed.append(name)
            raise EnvironmentFailure("the network is gone")
        write(self, name, content)

    monkeypatch.setattr(Store, "write", fails)
    assert carry_out(job, tmp_path / "a", Limits(checkpoint_seconds=0.0, store=url)).status == "complete"
    assert len(failed) == 3
    assert fetch(Store(url), tmp_path / "b" / job.spec.name)
    assert outcome(tmp_path / "a" / job.spec.name) == outcome(tmp_path / "b" / job.spec.name)


@on_disk
def test_what_is_here_and_further_on_is_not_replaced(url: str, tmp_path: Path):
    job = Job(tiny(epochs=2), "one", 20)
    limits = Limits(checkpoint_seconds=0.0, store=url)
    carry_out(job, tmp_path / "a", replace(limits, should_stop=After(3)))
    carry_out(job, tmp_path / "b", Limits())
    assert is_behind(Store(url), tmp_path / "b" / job.spec.name)
    assert not fetch(Store(url), tmp_path / "b" / job.spec.name)
    carry_out(job, tmp_path / "b", limits)
    assert fetch(Store(url), tmp_path / "a" / job.spec.name)
    assert outcome(tmp_path / "a" / job.spec.name) == outcome(tmp_path / "b" / job.spec.name)


@on_disk
@pytest.mark.parametrize("content", [b"{", b"[]", b'{"far": 1, "files": {}}', b'{"far": [1], "files": {"../x": "a"}}'])
def test_a_damaged_manifest_is_named(url: str, tmp_path: Path, content: bytes):
    store = Store(url)
    store.write("run/manifests/000001.json", content)
    with pytest.raises(InputError, match=r"manifests/000001\.json is damaged"):
        fetch(store, tmp_path / "run")


def test_a_manifest_without_its_objects_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    store = Store(str(tmp_path / "store"))
    store.write("run/manifests/000001.json", b'{"far": [1, 2, 3, 4], "files": {"spec.json": "000001/a"}}')
    with pytest.raises(EnvironmentFailure, match="does not hold all that its manifest names"):
        fetch(store, tmp_path / "run")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "store: '' was given, which names no place; it must be as /path or s3://bucket/path."),
        (" ", "store: ' ' was given, which names no place"),
        ("s3://", "store: 's3://' was given, which names no place"),
        ("s3:///path", "store: 's3:///path' was given, which names no place"),
        ("gs:///", "store: 'gs:///' was given, which names no place"),
        ("file://", "store: 'file://' was given, which names no place"),
        ("s3:/bucket", "store: 's3:/bucket' was given; a URL begins with s3://, a path with / or ./."),
        ("s3:", "store: 's3:' was given; a URL begins with s3://"),
        ("s4://there", "store: s4://there was given, which is no URL of a file system"),
        ("adl://there", "store: adl://there was given; its file system is not installed"),
        ("ftp://there/x", "store: ftp://there/x was given, on which two workers could take the same run; it must be"),
        ("/proc/store", "store: /proc/store was given, but cannot write"),
    ],
)
def test_a_place_that_is_no_store_is_named(url: str, says: str):
    with pytest.raises(InputError, match=re.escape(says)):
        Store(url).must_take()


def test_a_place_where_two_could_make_the_same_object_is_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is what leases rest on: of two that create a name, one has to be told that it is there."""
    monkeypatch.setattr(Store, "create", lambda self, name, content: bool(self.write(name, b"toeplens")) or True)
    with pytest.raises(InputError, match=r"store: .* does not keep what is written there"):
        Store(str(tmp_path)).must_take()


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_store_without_the_right_to_write_is_named(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match=r"store: .* was given, but cannot write .*: this user may not write there"):
        Store(str(tmp_path)).must_take()


def test_an_s3_store_that_refuses_is_named(server: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("ENDPOINT_URL", server)):
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(InputError, match="store: s3://nowhere/x was given, but cannot write"):
        Store("s3://nowhere/x").must_take()
