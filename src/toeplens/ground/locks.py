"""One process at a time in a directory: a lock that dies with its holder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from toeplens.ground.errors import InputError
from toeplens.ground.files import environment_failure, is_leftover

LOCK = ".lock"
_POLL = 0.1  # seconds


class Busy(InputError):
    """Somebody else holds the directory."""


@contextmanager
def locked(directory: Path, what: str, *, until: Callable[[], bool] | None = None) -> Iterator[None]:
    """Hold ``directory``, which exists, tidied of files that a killed process left half-written.

    Arguments
        what   what the directory is, for the sentence: ``run``, ``study``, ``audit``
        until  if given, wait for another process until this is true; else one that is held is refused at once

    The thread that holds a directory may enter it again; another thread or process raises `Busy`. The lock is
    the operating system's: it is gone with its holder, however that ends. The file stays.
    """
    from filelock import FileLock, Timeout  # which --help does without

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
    """What a directory holds, but for the lock and what a killed process left half-written."""
    return {path.name for path in directory.iterdir() if path.name != LOCK and not is_leftover(path)}
