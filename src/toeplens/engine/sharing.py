"""A run's directory and its likeness in a store: fetched before the work, published during it and after.

A likeness is a manifest, written last, that names an object for each file. Objects and manifests lie under the number
of the lease they were written under, and the highest is read.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from toeplens.engine.leases import HeldElsewhere, Lease, take
from toeplens.engine.limits import Limits
from toeplens.engine.patience import patiently
from toeplens.engine.store import Store
from toeplens.ground import EnvironmentFailure, InputError, write_bytes
from toeplens.ground.files import is_leftover, make_directory
from toeplens.ground.locks import LOCK
from toeplens.training.run import CHECKPOINT, RESULT, Run

_MANIFESTS = "manifests"
_NOTHING = [0.0, 0.0, 0.0, 0.0]
_TRIES = 5  # of a fetch, while somebody publishes


@contextmanager
def shared(directory: Path, limits: Limits) -> Iterator[Limits]:
    """Hold a run in the store that ``limits`` name, if any, and keep its likeness there while its directory grows.

    Within it, the limits' `should_stop` publishes what is new from time to time, and is true too once the run is lost
    to another worker; nothing is half-written whenever it is asked. Before and after, a store that does not answer is
    asked again for a while (`toeplens.engine.patience`). Raises `toeplens.engine.leases.HeldElsewhere` if another
    worker holds the run, before or, having taken it over, in the end.
    """
    if limits.store is None:
        yield limits
        return
    store = Store(limits.store)
    lease = patiently(lambda: take(store, directory.name, limits.over), limits.over)
    try:
        patiently(lambda: fetch(store, directory), limits.over)
        likeness = patiently(lambda: _Likeness(directory, lease), limits.over)

        def should_stop() -> bool:
            likeness.follow(limits.checkpoint_seconds)
            return lease.lost or limits.should_stop()

        try:
            yield replace(limits, should_stop=should_stop)
        except BaseException:
            with suppress(EnvironmentFailure):
                likeness.publish()
            raise
        patiently(likeness.end, limits.over)
        if lease.lost:
            raise HeldElsewhere(f"run: {directory.name} was taken over by another process, in {store.url}.")
    finally:
        lease.release()


def fetch(store: Store, directory: Path) -> bool:
    """Make ``directory`` what the store has of its run, if that is further on than what is there; whether it was."""
    for _ in range(_TRIES):
        manifest = _manifest(store, directory.name)
        if manifest is None or manifest["far"] <= _far(directory):
            return False
        found = {path: store.read(f"{directory.name}/{name}") for path, name in manifest["files"].items()}
        if None not in found.values():  # else the next manifest was published meanwhile
            break
        time.sleep(0.2)
    else:
        raise EnvironmentFailure(f"{store.url}/{directory.name} does not hold all that its manifest names.")
    make_directory(directory)
    for path in _files(directory).keys() - found.keys():
        (directory / path).unlink(missing_ok=True)
    last = {CHECKPOINT: 1, RESULT: 2}  # what says how far the others are
    for path, content in sorted(found.items(), key=lambda item: last.get(item[0], 0)):
        make_directory((directory / path).parent)
        write_bytes(directory / path, content or b"")
    return True


def is_behind(store: Store, directory: Path) -> bool:
    """Whether the store has less of a run than what is there."""
    manifest = _manifest(store, directory.name)
    return _far(directory) > (_NOTHING if manifest is None else manifest["far"])


class _Likeness:
    """What is published of a directory, under a lease."""

    def __init__(self, directory: Path, lease: Lease) -> None:
        self.directory, self.lease = directory, lease
        self.had = {} if is_behind(lease.store, directory) else _files(directory)
        self.names: dict[str, str] = {}  # of the objects under this lease
        self.published = time.monotonic()

    def follow(self, seconds: float) -> None:
        """Publish if so many seconds have gone by since the last time; what fails is tried again the next time."""
        if time.monotonic() - self.published >= seconds:
            with suppress(EnvironmentFailure):
                self.publish()

    def end(self) -> None:
        """Publish what is new, and look whether that is what is read: whoever takes the run over later, reads it."""
        self.publish()
        self.lease.look()

    def publish(self) -> None:
        """Write what is new as objects, then the manifest; nothing under a lease that is lost."""
        self.published = time.monotonic()
        store, run, number = self.lease.store, self.directory.name, f"{self.lease.number:06d}"
        files = _files(self.directory)
        if self.lease.lost or files == self.had:
            return
        names = {path: self.names[path] for path in files if path in self.names and files[path] == self.had[path]}
        for path in files.keys() - names.keys():
            content = (self.directory / path).read_bytes()
            names[path] = f"{number}/{hashlib.sha256(content).hexdigest()[:32]}"
            store.write(f"{run}/{names[path]}", content)
        if self.lease.lost:
            return
        manifest = {"far": _far(self.directory), "files": names}
        store.write(f"{run}/{_MANIFESTS}/{number}.json", json.dumps(manifest, sort_keys=True).encode())
        older = set(self.names.values()) - set(names.values())
        if not self.names:  # the first under this lease: what was written under those before is read no more
            older = {name for name in store.names(run) if name.isdigit() and name < number}
        self.had, self.names = files, names
        store.remove(f"{run}/{name}" for name in older)


def _manifest(store: Store, run: str) -> dict[str, Any] | None:
    names = store.names(f"{run}/{_MANIFESTS}")
    if not names:
        return None
    where = f"{run}/{_MANIFESTS}/{names[-1]}"
    try:
        manifest = json.loads(store.read(where) or b"null")
        if isinstance(manifest["far"], list) and all(map(_is_inside, manifest["files"])):
            return manifest
    except (ValueError, TypeError, KeyError):
        pass
    raise InputError(f"store: {store.url}/{where} is damaged; delete it to go on from what was published before.")


def _is_inside(path: str) -> bool:
    """Whether a path stays in the directory that it is of."""
    return not PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts


def _files(directory: Path) -> dict[str, Any]:
    """The files of a run by their paths in its directory, each with what changes when it is written anew."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != LOCK and not is_leftover(path):
            stat = path.stat()
            found[path.relative_to(directory).as_posix()] = stat.st_ino, stat.st_mtime_ns, stat.st_size
    return found


def _far(directory: Path) -> list[float]:
    """How far a run is, comparable: whether it is trained, its steps, what is measured of it, and parts of that."""
    if not directory.is_dir() or not (files := _files(directory)):
        return _NOTHING
    parts = sum("/" in path for path in files)
    return [float(RESULT in files), float(Run.open(directory).step), float(len(files) - parts), float(parts)]
