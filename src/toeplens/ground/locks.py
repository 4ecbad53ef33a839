"""Directory locks: one process at a time; the lock is released when its holder ends."""

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
