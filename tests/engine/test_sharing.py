"""Runs that are lost to another worker are left to it; a store that does not answer is asked again for a while."""

from __future__ import annotations

import shutil
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.builders import taken, tiny

from toeplens.engine import Job, Limits, carry_out, many, patience, sharing
from toeplens.engine.leases import take
from toeplens.engine.many import _bring, _work
from toeplens.engine.patience import patiently
from toeplens.engine.pool import Put
from toeplens.engine.store import Store
from toeplens.ground import EnvironmentFailure
from toeplens.training import Run


@pytest.fixture
def job() -> Job:
    return Job(tiny(epochs=3), "one", 20)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long."""
    monkeypatch.setattr(patience, "_FIRST", 0.01)


def nothing(told: Any) -> None:
    """Who hears of no progress."""


# ---- lost leases ----------------------------------------------------------------------------------------------------


def test_a_run_that_is_lost_is_put_off_and_nothing_is_stopped(
    job: Job, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sharing, "take", partial(take, seconds=0.3))
    store, units = Store(url), iter(range(10**6))

    def taken_over() -> bool:
        if next(units) == 4:
            assert store.create(f"{job.spec.name}/leases/000002.json", b"{}")
            time.sleep(0.5)
        return False

    limits = Limits(checkpoint_seconds=0.0, store=url, should_stop=taken_over)
    assert _work(([job], None), limits, nothing) is Put.OFF
    assert _work(([job], None), limits, nothing) == "complete"  # who took it has given it back
    assert _work(([job], None), Limits(store=f"{url}-of-another", should_stop=lambda: True), nothing) is None


def test_a_run_that_is_lost_as_it_ends_is_not_said_to_be_finished(
    job: Job, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What was published then lies under a number that is not read."""
    publish = sharing._Likeness.publish

    def late(likeness: Any) -> None:
        Store(url).create(f"{job.spec.name}/leases/000002.json", b"{}")  # and no renewal is due for ten seconds
        publish(likeness)

    monkeypatch.setattr(sharing._Likeness, "publish", late)
    assert _work(([job], None), Limits(store=url), nothing) is Put.OFF


def test_a_lease_that_could_not_be_renewed_is_kept_unless_it_was_taken_over(url: str, monkeypatch: pytest.MonkeyPatch):
    store, write, gone = Store(url), Store.write, threading.Event()

    def fails(self: Store, name: str, content: bytes) -> None:
        if gone.is_set():
            raise EnvironmentFailure("the network is gone")
        write(self, name, content)

    monkeypatch.setattr(Store, "write", fails)
    lease = take(store, "run", seconds=0.2)
    gone.set()
    time.sleep(0.6)
    assert not lease.lost
    gone.clear()
    lease.release()
    assert taken(store, "run", over=lambda: True) == 2


@pytest.mark.parametrize("foreign", [".DS_Store", "readme.txt", "7.json.bak", "x7.json"])
def test_what_is_no_lease_is_nobodys(url: str, foreign: str):
    store = Store(url)
    store.write(f"run/leases/{foreign}", b"x")
    lease = take(store, "run")
    assert lease.number == 1
    assert not lease.look()
    lease.release()


@pytest.mark.parametrize("content", [b"", b"{half", b"[]", b'{"at": "now", "seconds": 1}', b'{"beat": 1}', b"\xff"])
def test_a_damaged_lease_is_taken_over_once_nothing_has_moved(url: str, content: bytes):
    store = Store(url)
    store.write("run/leases/000001.json", content)
    assert taken(store, "run", seconds=0.1) == 2


# ---- a store that does not answer -----------------------------------------------------------------------------------


class Failing:
    """A store whose requests of one kind fail, from the ``first`` on, so many times."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kind: str, times: float, about: str = "", first: int = 1
    ) -> None:
        self.left, self.asked, ask = times, 0, getattr(Store, kind)

        def asked(store: Store, name: str, *given: Any) -> Any:
            self.asked += about in name
            if about in name and self.asked >= first and self.left > 0:
                self.left -= 1
                raise EnvironmentFailure(f"cannot {kind} {name}: the network is gone; nothing is lost.")
            return ask(store, name, *given)

        monkeypatch.setattr(Store, kind, asked)


@pytest.mark.parametrize(
    ("kind", "about", "first"),
    [
        ("names", "leases", 1),
        ("create", "", 1),
        ("read", "", 1),
        ("names", "manifests", 1),
        ("names", "manifests", 2),  # when it is seen whether there is less than here
        ("write", "0000", 1),
        ("write", "manifests", 1),
        ("names", "leases", 2),  # when it is seen whether it was taken over
    ],
)
def test_at_the_beginning_and_the_end_it_is_asked_again(
    job: Job, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, about: str, first: int
):
    carry_out(job, tmp_path / "first", Limits(store=url, deadline=time.time()))  # so that there is something to read
    failing = Failing(monkeypatch, kind, 3, about, first)
    assert _work(([job], None), Limits(store=url), nothing) == "complete"
    assert failing.left == 0
    assert sharing.fetch(Store(url), tmp_path / "fetched" / job.spec.name)
    assert Run.open(tmp_path / "fetched" / job.spec.name).status == "complete"


def test_a_finished_run_whose_store_stays_away_lies_where_the_error_says(
    job: Job, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(patience, "PATIENCE", 0.1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with monkeypatch.context() as away:
        Failing(away, "write", float("inf"), "manifests")
        with pytest.raises(
            EnvironmentFailure, match=r"the network is gone; nothing is lost; what was made lies in "
        ) as told:
            _work(([job], None), Limits(store=url), nothing)
    directory = Path(str(told.value).split(" lies in ")[1].split(" on ")[0])
    assert Run.open(directory / job.spec.name).status == "complete"
    shutil.copytree(directory / job.spec.name, tmp_path / "out" / job.spec.name)  # as the page on scale says
    many._level(Store(url), [job], tmp_path / "out", Limits(store=url))
    assert sharing.fetch(Store(url), tmp_path / "fetched" / job.spec.name)


def test_where_nothing_was_made_nothing_is_left(job: Job, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(patience, "PATIENCE", 0.1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    Failing(monkeypatch, "create", float("inf"))
    with pytest.raises(EnvironmentFailure, match=r"the network is gone; nothing is lost\.$"):
        _work(([job], None), Limits(store=url), nothing)
    assert not list(tmp_path.glob("toeplens-*"))


def test_patience_has_an_end_and_a_stop_ends_it_at_once(monkeypatch: pytest.MonkeyPatch):
    now, asked = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(patience, "_FIRST", 1.0)

    def fails() -> None:
        asked.append(round(now[0]))
        raise EnvironmentFailure("gone")

    with pytest.raises(EnvironmentFailure):
        patiently(fails)
    assert asked[:6] == [0, 1, 3, 7, 15, 31]
    assert 270 < asked[-1] <= 300
    asked.clear()
    with pytest.raises(EnvironmentFailure):
        patiently(fails, over=lambda: True)
    assert len(asked) == 1


def test_a_run_that_is_said_to_be_finished_and_is_not_there_is_an_error(
    job: Job, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(patience, "PATIENCE", 0.1)
    directory = tmp_path / "out" / job.spec.name
    with pytest.raises(EnvironmentFailure, match=f"does not hold the run {job.spec.name}, which a worker has finished"):
        _bring(Store(url), job, directory, Limits(store=url), finished=True)
    _bring(Store(url), job, directory, Limits(store=url), finished=False)
    _work(([job], None), Limits(store=url), nothing)
    _bring(Store(url), job, directory, Limits(store=url), finished=True)
    assert Run.open(directory).status == "complete"
