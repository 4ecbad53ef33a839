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

from toeplens.ground.errors import InputError, shown
from toeplens.ground.files import environment_failure, is_leftover, make_directory, read_bytes, write_text

LOCK = ".lock"
_POLL = 0.1  # seconds


class Busy(InputError):
    """The directory is locked by another thread or process."""


@contextmanager
def locked(directory: Path, what: str, *, until: Callable[[], bool] | None = None) -> Iterator[None]:
    """Lock an existing ``directory`` and remove leftovers of killed processes from it.

    Arguments
        what   what the directory is, for messages: ``run``, ``study``, ``audit``
        until  wait for the lock until this returns true; without it, a locked directory raises at once

    The thread that holds the lock may enter again; other threads and processes get `Busy`. It is an operating-system
    lock, released when its holder ends in any way. The lock file remains.
    """
    from filelock import FileLock, Timeout  # slow import

    place = Path(directory).resolve()
    lock = FileLock(place / LOCK, timeout=0, is_singleton=True)
    while True:
        try:
            lock.acquire()
            break
        except Timeout:
            if until is None or until():
                raise Busy(f"{what}: {place} is in use by another process. Wait until it is done.") from None
            time.sleep(_POLL)
        except OSError as error:
            raise environment_failure(error, place / LOCK) from None
    try:
        if lock.lock_counter == 1:
            for leftover in filter(is_leftover, place.iterdir()):
                leftover.unlink(missing_ok=True)
        yield
    finally:
        lock.release()


def names_in(directory: Path) -> set[str]:
    """The names in a directory, without the lock and leftovers of killed processes."""
    return {path.name for path in directory.iterdir() if path.name != LOCK and not is_leftover(path)}


_LOOKED_AT = 4096  # bytes of a file that are searched for its mark
_RECORDS = {
    "spec.json": "a run",
    "study.json": "a study",
    "audit.json": "an audit",
    "audits.json": "audits of several models",
    "probe.json": "a probe",
}


def free(path: Path, command: str) -> Path:
    """Check that a page of ``command`` can be written to ``path``, before the work for it begins.

    Returns the file to be written, with links resolved, and creates its directory. Raises `InputError` if
    something else is there, and `EnvironmentFailure` if the location is not writable.
    """
    path = Path(path)
    try:
        place = path.resolve()
        if place.is_dir():
            raise InputError(f"out must be a file such as {path / 'page.html'}, but {path} is a directory.")
        if place.exists():
            if not place.is_file():
                raise InputError(f"out must be a regular or new file, got {shown(path)}.")
            with place.open("rb") as stream:
                if f'<meta name="generator" content="toeplens {command}">'.encode() not in stream.read(_LOOKED_AT):
                    raise InputError(
                        f"out: {path} was not written by this version of 'toeplens {command}'. Delete it or choose "
                        "another name."
                    )
        make_directory(place.parent)
        with tempfile.TemporaryFile(dir=place.parent):
            pass
    except (OSError, RuntimeError) as error:
        raise environment_failure(error if isinstance(error, OSError) else OSError(str(error)), path) from None
    return place


def write_page(path: Path, page: str, command: str) -> Path:
    """Write a page of ``command`` to ``path`` if `free` allows it; returns the path."""
    write_text(free(path, command), page)
    return Path(path)


def must_be_of(path: Path, model: str, what: str) -> None:
    """Raise `InputError` if the record at ``path`` is of another model than ``model``.

    Arguments
        what  what is recorded, for messages: ``audit``, ``probe``
    """
    try:
        had = json.loads(read_bytes(path))["about"]["model"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # no readable record
        return
    if had is not None and had != model:
        raise InputError(f"out: {path.parent} contains the {what} of {shown(had)}. Choose an empty or new directory.")


@contextmanager
def entered(directory: Path, what: str, marks: Collection[str]) -> Iterator[None]:
    """Create a directory, or open one of the same kind, and lock it; it is removed if it stays empty.

    Arguments
        what   its intended content, for messages: ``audit``, ``probe``
        marks  names of files that identify an earlier output of this kind

    Raises `InputError` for a directory that holds something else, or is locked by another process.
    """
    try:
        made = not directory.exists()
    except OSError as error:  # no name of a file
        raise InputError(f"out must be a valid directory name ({(error.strerror or str(error)).lower()}).") from None
    make_directory(directory)
    there = names_in(directory)
    for name, kind in _RECORDS.items():
        if name in there and name not in marks:
            raise InputError(f"out: {directory} contains {kind}. Choose an empty or new directory.")
    if there and not there & set(marks):
        raise InputError(
            f"out: {directory} contains files that do not belong to the {what}. Choose an empty or new directory."
        )
    try:
        with locked(directory, what):
            yield
    finally:
        if made and [path.name for path in directory.iterdir()] == [LOCK]:
            (directory / LOCK).unlink()
            directory.rmdir()
