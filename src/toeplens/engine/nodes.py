"""What a Ray cluster is asked before it is given work: does it answer, has it this package, is there room."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toeplens.ground import EnvironmentFailure, InputError
from toeplens.ground.machine import cores, size

_ANSWER = 5.0  # seconds for an address to take a connection
_PROBE = 120.0  # seconds for a machine to start a process that imports this package


@dataclass(frozen=True)
class Cluster:
    """Machines that Ray has brought together, and what a piece of work needs of one of them.

    address  ``HOST:PORT`` of its head, from one of its machines; ``auto`` for the one that runs on this machine; None
             to have Ray started on this machine, for this process
    cpus     cores of a piece, and its threads
    gpus     GPUs of a piece: 0.25 for four pieces on each
    memory   bytes that a piece reserves; None for none
    at_once  pieces at a time at most; None for as many as there is room for
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    memory: int | None = None
    at_once: int | None = None

    def __post_init__(self) -> None:
        for name, given, positive in (("cpus_per_cell", self.cpus, True), ("gpus_per_cell", self.gpus, False)):
            if not (given > 0 if positive else given >= 0) or (given > 1 and given != int(given)):
                low = "over 0" if positive else "0 or more"
                raise InputError(f"{name}: {given} was given; it must be {low}, and a whole number if it is over 1.")
        if self.memory is not None and self.memory < 1:
            raise InputError(f"memory_per_cell: {self.memory} was given; it must be at least 1 byte.")
        if self.at_once is not None and self.at_once < 1:
            raise InputError(f"workers: {self.at_once} was given; it must be at least 1.")

    @property
    def threads(self) -> int:
        """Threads of a piece."""
        return max(1, int(self.cpus))

    @property
    def needs(self) -> dict[str, float]:
        """What a piece needs, by Ray's names."""
        needs = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory or 0)}
        return {name: amount for name, amount in needs.items() if amount}

    def room(self) -> int:
        """How many pieces there is room for, on all machines that are there now."""
        return sum(_fits(node["Resources"], self.needs) for node in _nodes())

    def must_serve(self, device: str, seen_by_all: Path | None = None) -> None:
        """Raise an `InputError` unless the cluster answers and all its machines can do the work.

        ``seen_by_all`` is a directory of this machine that each of them must see, where there is no store.
        """
        if device.startswith("cuda") and not self.gpus:
            raise InputError(f"gpus_per_cell: 0 was given with device {device}; it must be over 0.")
        self.join()
        nodes = _nodes()
        for name, amount in self.needs.items():
            most = max((node["Resources"].get(name, 0.0) for node in nodes), default=0.0)
            if most < amount:
                field = {"CPU": "cpus_per_cell", "GPU": "gpus_per_cell", "memory": "memory_per_cell"}[name]
                told = {"CPU": f"{most:g} cores", "GPU": f"{most:g} GPUs", "memory": size(int(most))}[name]
                given = size(int(amount)) if name == "memory" else f"{amount:g}"
                raise InputError(f"{field}: {given} was given; the largest machine of the cluster has {told}.")
        if not any(_fits(node["Resources"], self.needs) for node in nodes):
            raise InputError(f"cpus_per_cell: no machine of the cluster has all that a cell needs ({self._told()}).")
        _must_be_alike(self.needs, seen_by_all)

    def _told(self) -> str:
        told = {"CPU": "cores", "GPU": "GPUs", "memory": "bytes of memory"}
        return ", ".join(f"{amount:g} {told[name]}" for name, amount in self.needs.items())

    def join(self) -> Any:
        """Connect this process to the cluster, for as long as it lives; gives Ray's module."""
        try:
            import ray
        except ImportError:
            raise EnvironmentFailure("engine: ray is not installed; pip install 'toeplens[ray]'.") from None
        if ray.is_initialized():
            return ray
        if self.address is not None and self.address != "auto":
            _must_answer(self.address)
        here: dict[str, Any] = {"num_cpus": cores()} if self.address is None else {}
        with _handlers_kept():
            try:
                ray.init(
                    address=self.address or "local",
                    configure_logging=False,
                    log_to_driver=False,
                    include_dashboard=False if self.address is None else None,
                    **here,
                )
            except Exception as error:  # Ray has a kind for each thing that was not there
                reason = (str(error).splitlines() or [""])[0].rstrip(". ")
                given = "none" if self.address is None else repr(self.address)
                raise InputError(f"address: {given} was given; Ray does not answer there ({reason}).") from None
        return ray


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _fits(resources: dict[str, float], needs: dict[str, float]) -> int:
    """How many pieces with these needs a machine with these resources holds."""
    return min(int(resources.get(name, 0.0) / amount + 1e-9) for name, amount in needs.items())


def _must_answer(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not host or not port.isdecimal():
        raise InputError(f"address: {address!r} was given; it must be HOST:PORT of the cluster's head, or auto.")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER).close()
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise InputError(f"address: {address!r} was given; nothing answers there ({reason}).") from None


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """What Ray's start changes of how this process takes signals is set back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _must_be_alike(needs: dict[str, float], seen_by_all: Path | None) -> None:
    """Raise unless each machine that can take a piece has this package's source, and sees the directory."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe, seen = _probe(), None if seen_by_all is None else str(seen_by_all.resolve())
    own = probe(None)
    remote = ray.remote(probe)
    asked = {}
    for node in _nodes():
        if _fits(node["Resources"], needs):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:8]})"
            asked[name] = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(seen)
    for name, answer in asked.items():
        try:
            found: Any = ray.get(answer, timeout=_PROBE)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
            raise EnvironmentFailure(f"the cluster's machine {name} does not answer: {reason}.") from None
        if "missing" in found:
            raise InputError(f"address: the cluster's machine {name} cannot load toeplens ({found['missing']}).")
        if found["version"] != own["version"]:
            raise InputError(
                f"address: the cluster's machine {name} has toeplens {found['version']}; this one has {own['version']}."
            )
        if found["source"] != own["source"]:
            raise InputError(
                f"address: the cluster's machine {name} has toeplens {own['version']} of another source; install the "
                f"same on both."
            )
        if not found["sees"]:
            raise InputError(
                f"out: the cluster's machine {name} does not see {seen}; give a directory that all share, or a store."
            )


def _probe() -> Callable[[str | None], dict[str, Any]]:
    """What each machine is asked; made inside a function, so that it travels whole: the package may not be there."""

    def probe(sees: str | None) -> dict[str, Any]:
        import hashlib
        import importlib
        import os
        from pathlib import Path

        try:
            package = Path(str(importlib.import_module("toeplens").__file__)).parent
            version = importlib.import_module("toeplens.version").__version__
        except Exception as error:
            return {"missing": f"{type(error).__name__}: {error}"}
        digest = hashlib.sha256()
        for path in sorted(package.rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
        return {"version": version, "source": digest.hexdigest(), "sees": sees is None or os.path.exists(sees)}

    return probe
