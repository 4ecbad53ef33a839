"""One process at a time in a directory: a lock that dies with its holder."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from toeplens.ground.errors import InputError
from toeplens.ground.files import environment_failure, is_leftover

LOCK = ".lock"
_LOOK = 0.1


class Busy(InputError):
    """Somebody else holds the directory."""


@dataclass
class _Held:
    """A directory that a thread of this process holds, and how many times it has entered."""

    thread: int
    entered: int = 1


_held: dict[Path, _Held] = {}
_guard = threading.Lock()


@contextmanager
def locked(directory: Path, what: str, *, until: Callable[[], bool] | None = None) -> Iterator[None]:
    """Hold ``directory``, which exists, tidied of files that a killed process left half-written.

    Arguments
        what   what the directory is, for the sentence: ``run``, ``study``, ``audit``
        until  if given, wait for another process until this is true; else one that is held is refused at once

    The thread that holds a directory may enter it again; another thread or process raises `Busy`. The lock is
    the operating system's: it is gone with its holder, however that ends. The file stays.
    """
    place = Path(directory).resolve()
    while True:
        try:
            stream = _enter(place, what)
            break
        except Busy:
            if until is None or until():
                raise
            time.sleep(_LOOK)
    try:
        if stream is not None:
            for leftover in filter(is_leftover, place.iterdir()):
                leftover.unlink(missing_ok=True)
        yield
    finally:
        with _guard:
            held = _held[place]
            held.entered -= 1
            if not held.entered:
                del _held[place]
        if stream is not None:
            stream.close()


def _enter(place: Path, what: str) -> TextIO | None:
    """Take the lock; None where this thread has it already."""
    busy = Busy(f"{what}: {place} is being worked on by another process; wait until it is done.")
    with _guard:
        held = _held.get(place)
        if held is not None:
            if held.thread != threading.get_ident():
                raise busy
            held.entered += 1
            return None
        try:
            stream = (place / LOCK).open("w", encoding="utf-8")
        except OSError as error:
            raise environment_failure(error, place / LOCK) from None
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.close()
            raise busy from None
        _held[place] = _Held(threading.get_ident())
        return stream


def names_in(directory: Path) -> set[str]:
    """What a directory holds, but for the lock and what a killed process left half-written."""
    return {path.name for path in directory.iterdir() if path.name != LOCK and not is_leftover(path)}
