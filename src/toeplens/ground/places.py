"""Output locations: pages only replace pages of the same command, directories hold one kind of output.

A page names its command in its head, ``<meta name="generator" content="toeplens card">``. A directory is locked by
one process at a time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from toeplens.ground.errors import InputError, shown
from toeplens.ground.files import environment_failure, make_directory, read_bytes, write_text
from toeplens.ground.locks import LOCK, locked, names_in

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
