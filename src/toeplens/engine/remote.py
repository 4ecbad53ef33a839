"""Output directories at a URL: a local working copy, and runs that are fetched and published.

Each run is one archive, ``runs/NAME.zip``, which is written atomically. All other files (study.json, records, pages)
are separate objects. A run's content only depends on its spec, so two writers of one run write the same content.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
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

from toeplens.training.run import CHECKPOINT, PROGRESS, RESULT
from toeplens.utils import EnvironmentFailure, InputError, invalid, write_bytes
from toeplens.utils.errors import first_line
from toeplens.utils.execution import ExecutionOptions
from toeplens.utils.files import cache_directory, is_leftover, make_directory
from toeplens.utils.outputs import LOCK

RUNS, _DRIVER, _STUDY = "runs", "driver.json", "study.json"
_PUBLISHED = ".published"  # in a working copy whose files are at the URL
_HEARTBEAT, _TIMEOUT = 20.0, 60.0  # seconds between a driver's heartbeats, and without one until it counts as dead

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
        paths = self._request("list", "", self._fs.find) or ()
        names = [str(path).removeprefix(self._root).lstrip("/") for path in paths]
        return [name for name in names if name != _DRIVER and not name.startswith(f"{RUNS}/")]

    def fetch(self, directory: Path) -> Files:
        """Update a run's directory if the published run is further; returns the published files."""
        name, local_files = f"{RUNS}/{directory.name}.zip", _read_files(directory)
        if RESULT in local_files and self._request("read", name, self._fs.size) == len(_zip_files(local_files)):
            return local_files
        content = self.read(name)
        if content is None:
            return {}
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                remote_files = {path: archive.read(path) for path in archive.namelist() if _is_inside(path)}
            is_behind = _progress_of(local_files) < _progress_of(remote_files)
        except (zipfile.BadZipFile, ValueError) as error:
            raise InputError(
                f"out: {self.url}/{name} is damaged ({error}). Delete it to train the run again."
            ) from None
        if is_behind:
            for path in local_files.keys() - remote_files.keys():
                (directory / path).unlink(missing_ok=True)
            _write_files(directory, remote_files)
        return remote_files

    def publish(self, directory: Path, remote_files: Files) -> Files:
        """Publish a run's directory if it differs from ``remote_files``; returns the published files."""
        local_files = _read_files(directory)
        if local_files != remote_files:
            self.write(f"{RUNS}/{directory.name}.zip", _zip_files(local_files))
        return local_files

    def _request(self, action: str, name: str, call: Any, *arguments: Any) -> Any:
        try:
            return call(f"{self._root}/{name}", *arguments)
        except Exception as error:  # file systems raise different errors for network, credentials, permissions
            if isinstance(error, FileNotFoundError) and action != "write":
                return None
            raise EnvironmentFailure(f"Cannot {action} {self.url}/{name}: {first_line(error)}.") from None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only driver of this directory; raises `InputError` if another one is alive."""
        try:
            driver = json.loads(self.read(_DRIVER) or b"{}")
            age = time.time() - float(driver.get("time", 0.0))
        except (ValueError, TypeError, AttributeError):  # a damaged file counts as no driver
            driver, age = {}, _TIMEOUT
        if age < _TIMEOUT and not _is_dead(driver):
            raise InputError(
                f"out: {self.url} is in use by process {driver.get('process')} of {driver.get('host')} (last seen "
                f"{max(0.0, age):.0f} seconds ago). Wait until it is done."
            )
        stop_event = threading.Event()

        def write_heartbeat() -> None:
            owner = {"host": socket.gethostname(), "process": os.getpid(), "time": time.time()}
            self.write(_DRIVER, json.dumps(owner).encode())

        def heartbeat_loop() -> None:
            while not stop_event.wait(_HEARTBEAT):
                with suppress(EnvironmentFailure):  # retried at the next beat
                    write_heartbeat()

        write_heartbeat()
        thread = threading.Thread(target=heartbeat_loop, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop_event.set()
            thread.join()
            with suppress(EnvironmentFailure):
                self._request("remove", _DRIVER, self._fs.rm_file)


@contextmanager
def working_copy(url: str) -> Iterator[Path]:
    """A local working copy of ``url``: existing files are fetched first, and new ones published at the end.

    It is in ``toeplens/outputs`` of ``$TOEPLENS_CACHE``, ``$XDG_CACHE_HOME`` or ``~/.cache``, and may be deleted
    between commands. Runs are fetched and published separately (`sync_run`). Only one process at a time; a second one
    raises `InputError`.
    """
    remote = Remote(url)
    cache_name = f"{PurePosixPath(remote.url).name}-{hashlib.sha256(remote.url.encode()).hexdigest()[:12]}"
    directory = make_directory(cache_directory("outputs") / cache_name)
    with remote.lock():
        names = remote.files()
        if names and _STUDY not in names:
            raise InputError(f"out: {url} contains files that do not belong to a study. Choose another place.")
        remote_files = {name: remote.read(name) or b"" for name in names}
        if not names and (directory / _PUBLISHED).exists():  # that study was deleted
            shutil.rmtree(directory)
            make_directory(directory)
        _write_files(directory, {name: content for name, content in remote_files.items() if _is_inside(name)})

        def publish() -> None:
            for name, content in _read_files(directory).items():
                if not name.startswith(f"{RUNS}/") and remote_files.get(name) != content:
                    remote.write(name, content)
            (directory / _PUBLISHED).touch()

        with _publish_at_end(publish):
            yield directory


@contextmanager
def sync_run(directory: Path, execution: ExecutionOptions) -> Iterator[ExecutionOptions]:
    """Fetch a run before work starts, and publish its progress, if ``execution`` has a URL.

    The `should_stop` of the yielded options publishes new files every `checkpoint_seconds`, when no file is
    half-written. Failures are retried the next time, and raised at the end.
    """
    if execution.publish is None:
        yield execution
        return
    remote = Remote(execution.publish)
    remote_files, last_time = remote.fetch(directory), time.monotonic()

    def should_stop() -> bool:
        nonlocal remote_files, last_time
        if time.monotonic() - last_time >= execution.checkpoint_seconds:
            with suppress(EnvironmentFailure):
                remote_files = remote.publish(directory, remote_files)
            last_time = time.monotonic()
        return execution.should_stop()

    with _publish_at_end(lambda: remote.publish(directory, remote_files)):
        yield replace(execution, should_stop=should_stop)


@contextmanager
def _publish_at_end(publish: Callable[[], Any]) -> Iterator[None]:
    """Publish at the end; an earlier exception takes precedence."""
    try:
        yield
    except BaseException:
        with suppress(EnvironmentFailure):
            publish()
        raise
    publish()


def _read_files(directory: Path) -> Files:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in (LOCK, _PUBLISHED) and not is_leftover(path)
    }


def _write_files(directory: Path, files: Files) -> None:
    final = (CHECKPOINT, PROGRESS, RESULT)  # as they state the progress of the others
    for path in [*(name for name in files if name not in final), *(name for name in final if name in files)]:
        make_directory((directory / path).parent)
        write_bytes(directory / path, files[path])


def _zip_files(files: Files) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in files:
            archive.writestr(path, files[path])
    return content.getvalue()


def _progress_of(files: Files) -> tuple[bool, int, int, int]:
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
