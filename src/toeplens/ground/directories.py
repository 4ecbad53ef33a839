"""Directories that commands fill: each its own kind of output, held by one process at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from toeplens.ground.errors import InputError
from toeplens.ground.files import is_leftover, make_directory
from toeplens.ground.locks import LOCK, locked

_RECORDS = {"spec.json": "a run", "study.json": "a study", "survey.json": "a survey", "audit.json": "an audit"}


@contextmanager
def entered(directory: Path, what: str, marks: Collection[str]) -> Iterator[None]:
    """Make a directory, or enter one of the same kind, and hold it; one that stays empty is not left behind.

    Arguments
        what   what is to be in it, for sentences: ``audit``, ``survey``
        marks  names of which any tells that an earlier one is in it

    Raises `InputError` for a directory that holds something else, or that another process holds.
    """
    try:
        made = not directory.exists()
    except OSError as error:  # no name of a file
        raise InputError(f"out: no directory can be called so: {(error.strerror or str(error)).lower()}.") from None
    make_directory(directory)
    there = {path.name for path in directory.iterdir() if path.name != LOCK and not is_leftover(path)}
    for name, kind in _RECORDS.items():
        if name in there and name not in marks:
            raise InputError(f"out: {directory} holds {kind}; give an empty or new directory.")
    if there and not there & set(marks):
        raise InputError(f"out: {directory} holds files that are not the {what}'s; give an empty or new directory.")
    try:
        with locked(directory, what):
            yield
    finally:
        if made and [path.name for path in directory.iterdir()] == [LOCK]:
            (directory / LOCK).unlink()
            directory.rmdir()
