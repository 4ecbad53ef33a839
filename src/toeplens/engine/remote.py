"""An output directory that is a URL: a local working copy of it, and runs that are published whole and fetched.

Each run is one archive, ``runs/NAME.zip``, written in one piece: a reader sees the last or the one before, never half.
All other files (study.json, records, pages) are objects of their own. A run's content depends on its spec alone, so two
writers of one run write the same.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from toeplens.engine.pool import Limits
from toeplens.ground import EnvironmentFailure, InputError, invalid, write_bytes
from toeplens.ground.errors import first_line
from toeplens.ground.files import is_leftover, make_directory
from toeplens.ground.locks import LOCK
from toeplens.training.run import CHECKPOINT, PROGRESS, RESULT

RUNS, _DRIVER, _STUDY = "runs", "driver.json", "study.json"
_BEAT, _GONE = 20.0, 60.0  # seconds between two signs of life of a driver, and without one until it counts as gone

Files = dict[str, bytes]  # what a directory holds, by the paths in it


class Remote:
    """An output directory on any file system of fsspec: ``s3://bucket/path``, ``gs://``, ``abfs://``.

    Credentials and endpoints are taken from the file system's own environment variables, such as `AWS_ENDPOINT_URL`.

    Raises
        InputError          the URL names no place, or no file system that is installed
        EnvironmentFailure  the file system does not answer, or refuses
    """

    def __init__(self, url: str) -> None:
        try:
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise invalid("out", "be a URL of a file system that is installed", got=f"{url!r}: {error}") from None
        if not root.strip("/"):
            raise invalid("out", "name a place such as s3://bucket/path", url)
        self.url, self._root = url.rstrip("/"), root.rstrip("/")

    def read(self, name: str) -> bytes | None:
        """The object of this name, or None."""
        with suppress(FileNotFoundError):
            return self._request("read", name, self._fs.cat_file)
        return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object whole, in place of one that may be there."""
        if isinstance(self._fs, LocalFileSystem):
            path = Path(f"{self._root}/{name}")
            make_directory(path.parent)
            write_bytes(path, content)
        else:
            self._request("write", name, self._fs.pipe_file, content)

    def files(self) -> list[str]:
        """Names of all objects but the runs and the driver's."""
        found = self._request("list", "", self._fs.find)
        names = [str(path).removeprefix(self._root).lstrip("/") for path in found]
        return [name for name in names if name != _DRIVER and not name.startswith(f"{RUNS}/")]

    def fetch(self, directory: Path) -> Files:
        """Bring a run's directory up to what is published of it, if that is further; gives what is published."""
        name, here = f"{RUNS}/{directory.name}.zip", _files(directory)
        if RESULT in here and self._size(name) == len(_packed(here)):
            return here
        content = self.read(name)
        if content is None:
            return {}
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                there = {path: archive.read(path) for path in archive.namelist() if _is_inside(path)}
            behind = _progress(here) < _progress(there)
        except (zipfile.BadZipFile, ValueError) as error:
            raise InputError(
                f"out: {self.url}/{name} is damaged ({error}). Delete it to train the run again."
            ) from None
        if behind:
            for path in here.keys() - there.keys():
                (directory / path).unlink(missing_ok=True)
            last = {CHECKPOINT: 1, PROGRESS: 2, RESULT: 3}  # those that say how far the others are
            for path in sorted(there, key=lambda each: last.get(each, 0)):
                make_directory((directory / path).parent)
                write_bytes(directory / path, there[path])
        return there

    def publish(self, directory: Path, there: Files) -> Files:
        """Publish a run's directory unless it is what is ``there``; gives what is there then."""
        here = _files(directory)
        if here != there:
            self.write(f"{RUNS}/{directory.name}.zip", _packed(here))
        return here

    def _size(self, name: str) -> int | None:
        with suppress(FileNotFoundError):
            return self._request("read", name, self._fs.size)
        return None

    def _request(self, what: str, name: str, ask: Any, *given: Any) -> Any:
        try:
            return ask(f"{self._root}/{name}", *given)
        except Exception as error:  # each file system has its own kinds for a network, a credential, a permission
            if isinstance(error, FileNotFoundError) and what != "write":
                raise
            raise EnvironmentFailure(f"Cannot {what} {self.url}/{name}: {first_line(error)}.") from None

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Be the one driver of what is here; another that has given a sign of life of late is refused."""
        try:
            other = json.loads(self.read(_DRIVER) or b"{}")
            age = time.time() - float(other.get("time", 0.0))
        except (ValueError, TypeError, AttributeError):  # damaged, so nobody's
            other, age = {}, _GONE
        if age < _GONE and not _is_dead(other):
            raise InputError(
                f"out: {self.url} is in use by process {other.get('process')} of {other.get('host')} (last seen "
                f"{max(0.0, age):.0f} seconds ago). Wait until it is done."
            )
        owner, ended = {"host": socket.gethostname(), "process": os.getpid()}, threading.Event()

        def sign() -> None:
            self.write(_DRIVER, json.dumps({**owner, "time": time.time()}).encode())

        def beat() -> None:
            while not ended.wait(_BEAT):
                with suppress(EnvironmentFailure):  # tried again
                    sign()

        sign()
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with suppress(EnvironmentFailure, FileNotFoundError):
                self._request("remove", _DRIVER, self._fs.rm_file)


@contextmanager
def working_copy(url: str) -> Iterator[Path]:
    """A local directory that stands for ``url``: what is there is fetched first, and what is new published at the end.

    It is in ``toeplens/outputs`` of ``$TOEPLENS_CACHE``, else of ``$XDG_CACHE_HOME``, else of ``~/.cache``, and may be
    deleted between commands. Runs are left to those who train them (`published`). One process at a time: a second
    raises `InputError`.
    """
    remote = Remote(url)
    cache = os.environ.get("TOEPLENS_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    named = f"{PurePosixPath(remote.url).name}-{hashlib.sha256(remote.url.encode()).hexdigest()[:12]}"
    directory = make_directory(Path(cache) / "toeplens" / "outputs" / named)
    with remote.driven():
        names = remote.files()
        if names and _STUDY not in names:
            raise InputError(f"out: {url} contains files that do not belong to a study. Choose another place.")
        there = {name: remote.read(name) or b"" for name in names}
        for name, content in there.items():
            if _is_inside(name):
                make_directory((directory / name).parent)
                write_bytes(directory / name, content)

        def publish() -> None:
            for name, content in _files(directory).items():
                if not name.startswith(f"{RUNS}/") and there.get(name) != content:
                    remote.write(name, content)

        with _finally(publish):
            yield directory


@contextmanager
def published(directory: Path, limits: Limits) -> Iterator[Limits]:
    """Fetch a run before it is worked on, and publish it as it grows, where ``limits`` say where to.

    Within it, the limits' `should_stop` publishes what is new each `checkpoint_seconds`; nothing is half-written
    whenever it is asked. What fails then is tried again the next time, and raised in the end.
    """
    if limits.publish is None:
        yield limits
        return
    remote = Remote(limits.publish)
    there, last = remote.fetch(directory), time.monotonic()

    def should_stop() -> bool:
        nonlocal there, last
        if time.monotonic() - last >= limits.checkpoint_seconds:
            with suppress(EnvironmentFailure):
                there = remote.publish(directory, there)
            last = time.monotonic()
        return limits.should_stop()

    with _finally(lambda: remote.publish(directory, there)):
        yield replace(limits, should_stop=should_stop)


@contextmanager
def _finally(publish: Callable[[], Any]) -> Iterator[None]:
    """Publish in the end; what was raised before goes first."""
    try:
        yield
    except BaseException:
        with suppress(EnvironmentFailure):
            publish()
        raise
    publish()


def _files(directory: Path) -> Files:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != LOCK and not is_leftover(path)
    }


def _packed(files: Files) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in files:
            archive.writestr(path, files[path])
    return content.getvalue()


def _progress(files: Files) -> tuple[bool, int, int, int]:
    """How far a run is, comparable: whether it is trained, its steps, what is measured of it, and parts of that."""
    parts = sum("/" in path for path in files)
    step = int(json.loads(files.get(PROGRESS, b"{}")).get("step", 0))
    return RESULT in files, step, len(files) - parts, parts


def _is_inside(path: str) -> bool:
    """Whether a path stays in the directory that it is of."""
    return not PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts and not path.endswith("/")


def _is_dead(driver: dict[str, Any]) -> bool:
    """Whether a driver was a process of this machine that has ended."""
    if driver.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(driver["process"]), 0)
    except (ProcessLookupError, KeyError, ValueError):
        return True
    except PermissionError:
        pass
    return False
