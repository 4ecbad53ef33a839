"""Output directories at a URL: a local working copy, and runs that are fetched and published.

Each run is one archive, ``runs/NAME.zip``, which is written atomically. All other files (study.json, records, pages)
are separate objects. A run's content only depends on its spec, so two writers of one run write the same content.
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

from toeplens.ground import EnvironmentFailure, InputError, invalid, write_bytes
from toeplens.ground.errors import first_line
from toeplens.ground.execution import ExecutionOptions
from toeplens.ground.files import is_leftover, make_directory
from toeplens.ground.outputs import LOCK
from toeplens.training.run import CHECKPOINT, PROGRESS, RESULT

RUNS, _DRIVER, _STUDY = "runs", "driver.json", "study.json"
_BEAT, _GONE = 20.0, 60.0  # seconds between a driver's heartbeats, and without one until it counts as dead

Files = dict[str, bytes]  # contents of a directory by relative path


class Remote:
    """An output directory on any fsspec file system: ``s3://bucket/path``, ``gs://``, ``abfs://``.

    Credentials and endpoints come from the file system's environment variables, such as `AWS_ENDPOINT_URL`.

    Raises
        InputError          the URL has no path, or its file system is not installed
        EnvironmentFailure  the file system does not respond, or denies access
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
        """The content of an object, or None."""
        return self._request("read", name, self._fs.cat_file)

    def write(self, name: str, content: bytes) -> None:
        """Write an object atomically, replacing an existing one."""
        if isinstance(self._fs, LocalFileSystem):
            path = Path(f"{self._root}/{name}")
            make_directory(path.parent)
            write_bytes(path, content)
        else:
            self._request("write", name, self._fs.pipe_file, content)

    def files(self) -> list[str]:
        """Names of all objects except runs and the driver's file."""
        found = self._request("list", "", self._fs.find) or ()
        names = [str(path).removeprefix(self._root).lstrip("/") for path in found]
        return [name for name in names if name != _DRIVER and not name.startswith(f"{RUNS}/")]

    def fetch(self, directory: Path) -> Files:
        """Update a run's directory if the published run is further; returns the published files."""
        name, here = f"{RUNS}/{directory.name}.zip", _files(directory)
        if RESULT in here and self._request("read", name, self._fs.size) == len(_packed(here)):
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
            _write(directory, there)
        return there

    def publish(self, directory: Path, there: Files) -> Files:
        """Publish a run's directory if it differs from ``there``; returns the published files."""
        here = _files(directory)
        if here != there:
            self.write(f"{RUNS}/{directory.name}.zip", _packed(here))
        return here

    def _request(self, what: str, name: str, ask: Any, *given: Any) -> Any:
        try:
            return ask(f"{self._root}/{name}", *given)
        except Exception as error:  # file systems raise different errors for network, credentials, permissions
            if isinstance(error, FileNotFoundError) and what != "write":
                return None
            raise EnvironmentFailure(f"Cannot {what} {self.url}/{name}: {first_line(error)}.") from None

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Be the only driver of this directory; raises `InputError` if another one is alive."""
        try:
            other = json.loads(self.read(_DRIVER) or b"{}")
            age = time.time() - float(other.get("time", 0.0))
        except (ValueError, TypeError, AttributeError):  # a damaged file counts as no driver
            other, age = {}, _GONE
        if age < _GONE and not _is_dead(other):
            raise InputError(
                f"out: {self.url} is in use by process {other.get('process')} of {other.get('host')} (last seen "
                f"{max(0.0, age):.0f} seconds ago). Wait until it is done."
            )
        ended = threading.Event()

        def sign() -> None:
            owner = {"host": socket.gethostname(), "process": os.getpid(), "time": time.time()}
            self.write(_DRIVER, json.dumps(owner).encode())

        def beat() -> None:
            while not ended.wait(_BEAT):
                with suppress(EnvironmentFailure):  # retried at the next beat
                    sign()

        sign()
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with suppress(EnvironmentFailure):
                self._request("remove", _DRIVER, self._fs.rm_file)


@contextmanager
def working_copy(url: str) -> Iterator[Path]:
    """A local working copy of ``url``: existing files are fetched first, and new ones published at the end.

    It is in ``toeplens/outputs`` of ``$TOEPLENS_CACHE``, ``$XDG_CACHE_HOME`` or ``~/.cache``, and may be deleted
    between commands. Runs are fetched and published separately (`published`). Only one process at a time; a second one
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
        _write(directory, {name: content for name, content in there.items() if _is_inside(name)})

        def publish() -> None:
            for name, content in _files(directory).items():
                if not name.startswith(f"{RUNS}/") and there.get(name) != content:
                    remote.write(name, content)

        with _finally(publish):
            yield directory


@contextmanager
def published(directory: Path, limits: ExecutionOptions) -> Iterator[ExecutionOptions]:
    """Fetch a run before work starts, and publish its progress, if ``limits`` have a URL.

    Inside, the limits' `should_stop` publishes new files every `checkpoint_seconds`, at points where no file is
    half-written. Failures are retried the next time, and raised at the end.
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
    """Publish at the end; an earlier exception takes precedence."""
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


def _write(directory: Path, files: Files) -> None:
    last = (CHECKPOINT, PROGRESS, RESULT)  # as they state the progress of the others
    for path in [*(each for each in files if each not in last), *(each for each in last if each in files)]:
        make_directory((directory / path).parent)
        write_bytes(directory / path, files[path])


def _packed(files: Files) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in files:
            archive.writestr(path, files[path])
    return content.getvalue()


def _progress(files: Files) -> tuple[bool, int, int, int]:
    """Comparable progress of a run: whether it is trained, steps, number of records, number of parts."""
    parts = sum("/" in path for path in files)
    step = int(json.loads(files.get(PROGRESS, b"{}")).get("step", 0))
    return RESULT in files, step, len(files) - parts, parts


def _is_inside(path: str) -> bool:
    """Whether a relative path stays inside its directory."""
    return not PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts and not path.endswith("/")


def _is_dead(driver: dict[str, Any]) -> bool:
    """Whether the driver was a process on this machine that has ended."""
    if driver.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(driver["process"]), 0)
    except (ProcessLookupError, KeyError, ValueError):
        return True
    except PermissionError:
        pass
    return False
