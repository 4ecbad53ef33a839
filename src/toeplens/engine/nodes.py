"""A Ray cluster: does it answer, is there room for a piece of work, and what has a piece of its machines."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from toeplens.engine.probes import Token, must_be_alike
from toeplens.ground import EnvironmentFailure, InputError, shown
from toeplens.ground.machine import cores, size

_ANSWER = 5.0  # seconds for an address to take a connection
_JOINED = 30  # seconds for Ray to join what answers there
_AT_MOST = 120.0  # seconds for a process to start, and to do that
_DEVICES = ("auto", "cpu", "cuda")


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

    def at_a_time(self) -> int:
        """How many pieces are done at a time, on the machines that are there now; joins them."""
        self.join()
        return max(1, min(self.room(), self.at_once or self.room()))

    def device(self, asked: str) -> str:
        """What a worker is told for the ``asked`` device: ``auto`` is a GPU where a piece has one, or a part of one."""
        return ("cuda" if self.gpus else "cpu") if asked == "auto" else asked

    def described(self, device: str) -> str:
        """The machines in words, before they are joined."""
        if self.device(device) == "cpu":
            return f"a cluster's machines: {self.cpus:g} core{'s' if self.cpus > 1 else ''} a cell"
        return f"a cluster's machines: {self.gpus:g} GPU{'s' if self.gpus > 1 else ''} a cell"

    def must_serve(
        self, device: str, token: Token | None = None, packages: Sequence[str] = ("torch", "transformers")
    ) -> None:
        """Raise an `InputError` unless the cluster answers and all its machines can do the work.

        device    ``auto``, ``cpu`` or ``cuda``: a piece sees no GPU but its own
        token     what each machine must see
        packages  what must have the same version on each machine as here, if it is here
        """
        if device not in _DEVICES:
            raise InputError(f"device: {shown(device)} was given; with a cluster it must be auto, cpu or cuda.")
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
        able = [node for node in nodes if _fits(node["Resources"], self.needs)]
        if not able:
            raise InputError(f"cpus_per_cell: no machine of the cluster has all that a cell needs ({self._told()}).")
        must_be_alike({_called(node): node["NodeID"] for node in able}, token, packages)

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
        if self.address is not None:
            _must_be_joined(self.address)
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


def _called(node: dict[str, Any]) -> str:
    """What people call a machine."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:8]})"


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


_TRY = """
import signal, sys
import ray
signal.alarm(int(sys.argv[2]))  # whatever Ray is at
try:
    ray.init(address=sys.argv[1], configure_logging=False, log_to_driver=False)
except Exception as error:
    print((str(error).splitlines() or [""])[0])
    sys.exit(1)
"""


def _must_be_joined(address: str) -> None:
    """Raise unless Ray can join what answers at an address.

    Tried in a process of its own: where something else answers, Ray waits for a minute or more, and then ends the
    process.
    """
    try:
        tried = subprocess.run(
            [sys.executable, "-P", "-c", _TRY, address, str(_JOINED)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_AT_MOST,
            text=True,
        )
    except subprocess.TimeoutExpired:
        tried = None
    if tried is None or tried.returncode:
        said = (tried.stdout.strip() if tried is not None else "") or f"nothing that it knows for {_JOINED} seconds"
        raise InputError(f"address: {address!r} was given; Ray does not answer there ({said.rstrip('. ')}).")


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
