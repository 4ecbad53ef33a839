"""Who works on a run, of all machines that share a store: a lease that its holder renews, and that outlives nobody."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from toeplens.engine.store import Store
from toeplens.ground import EnvironmentFailure
from toeplens.ground.locks import Busy

SECONDS = 30.0  # without renewal, after which a lease may be taken for that of somebody who is gone
_FOLDER = "leases"


class HeldElsewhere(Busy):
    """Another worker holds the run."""


class Lease:
    """The right to work on a run, numbered: each is one more than the last, and the highest is the one that counts.

    Its object is made by one worker alone (`Store.create`) and rewritten three times in ``seconds``. One that could not
    be rewritten for longer may be taken over, and is held until it is. Who holds a lower number has lost it, and what
    it still writes under its number is not read by anyone. So clocks that go wrong and networks that stall may cost
    time, but never a run.
    """

    def __init__(self, store: Store, run: str, number: int, seconds: float) -> None:
        self.store, self.run, self.number, self.seconds = store, run, number, seconds
        self._over, self._lost = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether another was seen to hold it by now."""
        return self._lost.is_set()

    def look(self) -> bool:
        """Look whether another holds it by now."""
        if _last(self.store, self.run) > self.number:
            self._lost.set()
        return self.lost

    def release(self) -> None:
        """Give it back: the next need not wait."""
        self._over.set()
        self._thread.join()
        if not self.lost:
            with suppress(EnvironmentFailure):  # it runs out
                self.store.write(_name(self.run, self.number), b"{}")

    def _renew(self) -> None:
        while not self._over.wait(self.seconds / 3):
            with suppress(EnvironmentFailure):  # tried again
                if self.look():
                    return
                self.store.write(_name(self.run, self.number), _held(self.seconds))


def take(store: Store, run: str, over: Callable[[], bool] = lambda: False, seconds: float = SECONDS) -> Lease:
    """The lease of a run; raises `HeldElsewhere` if somebody else has it who is alive.

    One whose time stamp is more than its seconds away from this machine's clock is watched for as long again, and
    taken over if nothing moved; one of a process of this machine that is gone, at once.
    """
    last = _last(store, run)
    if last and not _is_free(store, run, last, over, seconds):
        raise HeldElsewhere(f"run: {run} is being worked on by another process, in {store.url}; wait until it is done.")
    if not store.create(_name(run, last + 1), _held(seconds)):
        raise HeldElsewhere(f"run: {run} was taken by another process, in {store.url}; wait until it is done.")
    return Lease(store, run, last + 1, seconds)


def _is_free(store: Store, run: str, number: int, over: Callable[[], bool], seconds: float) -> bool:
    name = _name(run, number)
    first = store.read(name)
    held = _content(first, seconds)
    if held is None or _is_gone(held):
        return True
    if abs(time.time() - held["at"]) <= held["seconds"]:
        return False
    ends = time.monotonic() + held["seconds"]
    while time.monotonic() < ends:
        if over() or store.read(name) != first:
            return False
        time.sleep(min(1.0, held["seconds"] / 4))
    return True


def _content(read: bytes | None, seconds: float) -> dict[str, Any] | None:
    """What a lease says of its holder; None if it was given back. One that is damaged is somebody's, since long ago."""
    try:
        content = json.loads(b"{}" if read is None else read)
        if content == {}:
            return None
        return {**content, "at": float(content["at"]), "seconds": float(content["seconds"])}
    except (ValueError, TypeError, KeyError):
        return {"at": 0.0, "seconds": seconds}


def _last(store: Store, run: str) -> int:
    """The highest number of a run's leases; other objects among them are nobody's."""
    found = (re.fullmatch(r"(\d+)\.json", name, re.ASCII) for name in store.names(f"{run}/{_FOLDER}"))
    return max((int(match[1]) for match in found if match), default=0)


def _name(run: str, number: int) -> str:
    return f"{run}/{_FOLDER}/{number:06d}.json"


def _held(seconds: float) -> bytes:
    content = {"at": time.time(), "seconds": seconds, "beat": secrets.token_hex(8), **_own()}
    return json.dumps(content).encode()


def _own() -> dict[str, Any]:
    """This process, so that one of the same machine can tell whether it still lives."""
    return {"machine": _machine(), "process": os.getpid(), "begun": _begun(os.getpid())}


def _is_gone(held: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine that has ended."""
    machine = _machine()
    return machine is not None and held.get("machine") == machine and _begun(held.get("process")) != held.get("begun")


def _machine() -> str | None:
    """This machine since it was started, as its processes see each other; None where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _begun(process: Any) -> str | None:
    """When a process began, in the kernel's ticks: its number may be given to another later."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return None
