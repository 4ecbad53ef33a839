"""Where output goes: pages that replace nothing but older pages of their command, directories of one kind of output.

A page names its command in its head, ``<meta name="generator" content="toeplens card">``; a directory is held by one
process at a time.
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

_LOOKED_AT = 4096  # bytes of a file in which its mark is looked for
_RECORDS = {
    "spec.json": "a run",
    "study.json": "a study",
    "audit.json": "an audit",
    "audits.json": "audits of several models",
    "probe.json": "a probe",
}


def free(path: Path, command: str) -> Path:
    """Check that a page of ``command`` can be written to ``path``, before the work that it is to show.

    Returns the file that would be written, which a link leads to; its directory is made. Raises `InputError` where
    something else lies there, `EnvironmentFailure` where nothing can be written.
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
    """Write a page of ``command`` to ``path`` where `free` allows it; returns the path."""
    write_text(free(path, command), page)
    return Path(path)


def must_be_of(path: Path, model: str, what: str) -> None:
    """Refuse to replace the record of another model, at ``path``, by that of ``model``.

    Arguments
        what  what is recorded, for the sentence: ``audit``, ``probe``
    """
    try:
        had = json.loads(read_bytes(path))["about"]["model"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # there is none, or none that could be read
        return
    if had is not None and had != model:
        raise InputError(f"out: {path.parent} contains the {what} of {shown(had)}. Choose an empty or new directory.")


@contextmanager
def entered(directory: Path, what: str, marks: Collection[str]) -> Iterator[None]:
    """Make a directory, or enter one of the same kind, and hold it; one that stays empty is not left behind.

    Arguments
        what   what is to be in it, for sentences: ``audit``, ``probe``
        marks  names of which any tells that an earlier one is in it

    Raises `InputError` for a directory that holds something else, or that another process holds.
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
