"""Output directories and pages: locks, and checks that nothing else is replaced.

A page names its command in its head, ``<meta name="generator" content="toeplens card">``, and only replaces pages of
the same command. A directory holds one kind of output and is locked by one process at a time; the lock is released
when its holder ends.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from toeplens.utils.errors import InputError, repr_of
from toeplens.utils.files import environment_failure, is_leftover, make_directory, read_bytes, write_text

LOCK = ".lock"
_POLL_SECONDS = 0.1  # seconds


class DirectoryBusy(InputError):
    """The directory is locked by another thread or process."""


@contextmanager
def lock_directory(directory: Path, what: str, *, until: Callable[[], bool] | None = None) -> Iterator[None]:
    """Lock an existing ``directory`` and remove leftovers of killed processes from it.

    Arguments
        what   what the directory is, for messages: ``run``, ``study``, ``audit``
        until  wait for the lock until this returns true; without it, a locked directory raises at once

    The thread that holds the lock may enter again; other threads and processes get `DirectoryBusy`. It is an
    operating-system lock, released when its holder ends in any way. The lock file remains.
    """
    from filelock import FileLock, Timeout  # slow import

    path = Path(directory).resolve()
    lock = FileLock(path / LOCK, timeout=0, is_singleton=True)
    while True:
        try:
            lock.acquire()
            break
        except Timeout:
            if until is None or until():
                raise DirectoryBusy(f"{what}: {path} is in use by another process. Wait until it is done.") from None
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            raise environment_failure(error, path / LOCK) from None
    try:
        if lock.lock_counter == 1:
            for leftover in filter(is_leftover, path.iterdir()):
                leftover.unlink(missing_ok=True)
        yield
    finally:
        lock.release()


def names_in(directory: Path) -> set[str]:
    """The names in a directory, without the lock and leftovers of killed processes."""
    return {path.name for path in directory.iterdir() if path.name != LOCK and not is_leftover(path)}


_HEAD_BYTES = 4096  # bytes of a file that are searched for its mark
_OUTPUT_KINDS = {
    "spec.json": "a run",
    "study.json": "a study",
    "audit.json": "an audit",
    "audits.json": "audits of several models",
    "probe.json": "a probe",
}


def check_output_file(path: Path, command: str) -> Path:
    """Check that a page of ``command`` can be written to ``path``, before the work for it begins.

    Returns the file to be written, with links resolved, and creates its directory. Raises `InputError` if
    something else is there, and `EnvironmentFailure` if the location is not writable.
    """
    path = Path(path)
    try:
        target = path.resolve()
        if target.is_dir():
            raise InputError(f"out must be a file such as {path / 'page.html'}, but {path} is a directory.")
        if target.exists():
            if not target.is_file():
                raise InputError(f"out must be a regular or new file, got {repr_of(path)}.")
            with target.open("rb") as stream:
                if f'<meta name="generator" content="toeplens {command}">'.encode() not in stream.read(_HEAD_BYTES):
                    raise InputError(
                        f"out: {path} was not written by this version of 'toeplens {command}'. Delete it or choose "
                        "another name."
                    )
        make_directory(target.parent)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except (OSError, RuntimeError) as error:
        raise environment_failure(error if isinstance(error, OSError) else OSError(str(error)), path) from None
    return target


def write_page(path: Path, page: str, command: str) -> Path:
    """Write a page of ``command`` to ``path`` if `check_output_file` allows it; returns the path."""
    write_text(check_output_file(path, command), page)
    return Path(path)


def check_same_model(path: Path, model: str, what: str) -> None:
    """Raise `InputError` if the record at ``path`` is of another model than ``model``.

    Arguments
        what  what is recorded, for messages: ``audit``, ``probe``
    """
    try:
        old = json.loads(read_bytes(path))["about"]["model"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # no readable record
        return
    if old is not None and old != model:
        raise InputError(f"out: {path.parent} contains the {what} of {repr_of(old)}. Choose an empty or new directory.")


@contextmanager
def open_output_dir(directory: Path, what: str, marks: Collection[str]) -> Iterator[None]:
    """Create a directory, or open one of the same kind, and lock it; it is removed if it stays empty.

    Arguments
        what   its intended content, for messages: ``audit``, ``probe``
        marks  names of files that identify an earlier output of this kind

    Raises `InputError` for a directory that holds something else, or is locked by another process.
    """
    try:
        created = not directory.exists()
    except OSError as error:  # no name of a file
        raise InputError(f"out must be a valid directory name ({(error.strerror or str(error)).lower()}).") from None
    make_directory(directory)
    existing = names_in(directory)
    for name, kind in _OUTPUT_KINDS.items():
        if name in existing and name not in marks:
            raise InputError(f"out: {directory} contains {kind}. Choose an empty or new directory.")
    if existing and not existing & set(marks):
        raise InputError(
            f"out: {directory} contains files that do not belong to the {what}. Choose an empty or new directory."
        )
    try:
        with lock_directory(directory, what):
            yield
    finally:
        if created and [path.name for path in directory.iterdir()] == [LOCK]:
            (directory / LOCK).unlink()
            directory.rmdir()
