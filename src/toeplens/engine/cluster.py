"""Pieces of work as tasks on a Ray cluster, retried if a worker dies."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from toeplens.engine.pool import Limits, Piece, Told, Work, clocks, take
from toeplens.ground import EnvironmentFailure, InputError, ToeplensError, invalid
from toeplens.ground.machine import cores

_LOOK, _TELL, _CANCEL = 0.1, 1.0, 1.0  # seconds between two checks of the driver, two reports, two tries to cancel
_RETRIES = 10  # retries of a piece whose worker or machine died
_DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster, and the resources per piece of work.

    address  ``HOST:PORT`` of the cluster's head, from one of its machines; ``auto`` for the cluster on this machine;
             None to start Ray on this machine for this process
    cpus     cores and threads per piece
    gpus     GPUs per piece; 0.25 runs four pieces on each GPU
    memory   bytes reserved per piece; None for none
    at_once  maximum number of parallel pieces; None for no limit
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
                raise invalid(name, f"be {low}, and a whole number if it is over 1", given)
        if self.memory is not None and self.memory < 1:
            raise invalid("memory_per_cell", "be at least 1 byte", self.memory)
        if self.at_once is not None and self.at_once < 1:
            raise invalid("workers", "be at least 1", self.at_once)

    @property
    def threads(self) -> int:
        """Threads per piece."""
        return max(1, int(self.cpus))

    def at_a_time(self) -> int:
        """The number of parallel pieces on the current machines; connects to the cluster."""
        needs = {name: amount for name, amount in self._needs().items() if amount}
        nodes = [node["Resources"] for node in self.join().nodes() if node["Alive"]]
        room = sum(min(int(node.get(name, 0.0) / needs[name] + 1e-9) for name in needs) for node in nodes)
        return min(room, self.at_once or room)

    def device(self, asked: str) -> str:
        """The device of a worker: ``auto`` is a GPU if pieces have (part of) one."""
        return ("cuda" if self.gpus else "cpu") if asked == "auto" else asked

    def described(self, device: str) -> str:
        """A description of the machines, without connecting."""
        amount, what = (self.cpus, "core") if self.device(device) == "cpu" else (self.gpus, "GPU")
        return f"a cluster's machines: {amount:g} {what}{'s' if amount > 1 else ''} per cell"

    def must_serve(self, device: str) -> None:
        """Raise `InputError` unless the cluster responds and one of its machines has the resources for a piece."""
        if device not in _DEVICES:
            raise invalid("device", "be auto, cpu or cuda with a cluster", device)
        if device == "cuda" and not self.gpus:
            raise invalid("gpus_per_cell", "be over 0 with device cuda", got="0")
        if not self.at_a_time():
            needs = ", ".join(f"{amount:g} {name}" for name, amount in self._needs().items() if amount)
            raise InputError(f"cpus_per_cell: no machine of the cluster has the resources that a cell needs ({needs}).")

    def _needs(self) -> dict[str, float]:
        return {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory or 0)}

    def join(self) -> Any:
        """Connect this process to the cluster; returns the ray module."""
        try:
            import ray
        except ImportError:
            raise EnvironmentFailure("engine: ray is not installed. Run: pip install 'toeplens[ray]'.") from None
        if ray.is_initialized():
            return ray
        if self.address not in (None, "auto"):
            _must_answer(self.address)
        here: dict[str, Any] = {"num_cpus": cores(), "include_dashboard": False} if self.address is None else {}
        with _handlers_kept():
            try:
                ray.init(address=self.address or "local", configure_logging=False, log_to_driver=False, **here)
            except Exception as error:  # Ray raises many kinds of errors
                reason = (str(error).splitlines() or [""])[0].rstrip(". ")
                raise InputError(f"address: Ray does not answer at {self.address!r} ({reason}).") from None
        return ray


def _must_answer(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not host or not port.isdecimal():
        raise invalid("address", "be HOST:PORT of the cluster's head, or auto", address)
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise InputError(f"address: nothing answers at {address!r} ({reason}).") from None


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the signal handlers that Ray changes at start."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def in_cluster(
    work: Work[Piece],
    pieces: Sequence[Piece],
    limits: Limits,
    cluster: Cluster,
    *,
    on_done: Told,
    on_told: Told = lambda index, what: None,
    after: Mapping[int, int] | None = None,
) -> None:
    """`toeplens.engine.pool.in_processes` on a cluster.

    Ray retries a piece whose worker or machine is lost, up to `_RETRIES` times, and ends all tasks if this process
    dies.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = cluster.join()
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(_Board).options(num_cpus=0, scheduling_strategy=here).remote()
    needs = {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus, "memory": cluster.memory}
    task = ray.remote(_do).options(**needs, max_retries=_RETRIES)
    plain = replace(limits, should_stop=lambda: False, deadline=None, device=cluster.device(limits.device))
    left, done, waiting = list(range(len(pieces))), set[int](), dict[Any, int]()
    failure: BaseException | None = None
    stopping, cancelled = False, -_CANCEL

    def hear() -> None:
        for index, what in ray.get(board.take.remote()):
            on_told(index, what)

    hear()  # start the board before the first task, so that no report is lost
    while True:
        try:
            stopping = stopping or limits.over()
            if stopping and time.monotonic() - cancelled >= _CANCEL:  # Ray can lose one
                cancelled = time.monotonic()
                left.clear()
                for answer in waiting:
                    ray.cancel(answer)
            while (
                len(waiting) < (cluster.at_once or len(pieces)) and (index := take(left, after or {}, done)) is not None
            ):
                answer = task.remote(board, work, index, pieces[index], plain, limits.left(), cluster.threads)
                waiting[answer] = index
            if not waiting:
                break
            finished, _ = ray.wait(list(waiting), timeout=_LOOK)
            hear()
        except KeyboardInterrupt as error:
            if stopping:
                raise
            stopping, failure = True, error
            continue
        for answer in finished:
            index = waiting.pop(answer)
            try:
                result = ray.get(answer)
                done.add(index)
                stopping = stopping or result is None
                on_done(index, result)
            except ray.exceptions.TaskCancelledError:  # also raised in the worker, as a RayTaskError
                continue
            except ray.exceptions.RayTaskError as error:  # an error raised in a task
                stopping, failure = True, failure or (error.cause if isinstance(error.cause, BaseException) else error)
            except (ray.exceptions.RayError, ToeplensError, KeyboardInterrupt) as error:
                stopping, failure = True, failure or error
    hear()
    ray.kill(board)
    if isinstance(failure, (ToeplensError, KeyboardInterrupt)):
        raise failure
    if failure is not None:
        raise EnvironmentFailure(
            f"A worker of the cluster ended unexpectedly ({type(failure).__name__}: {str(failure).splitlines()[0]}). "
            "Finished work is saved; run the same command to resume."
        ) from failure


class _Board:
    """The last report of each piece; an actor on the driver's machine."""

    def __init__(self) -> None:
        self.told: dict[int, Any] = {}

    def tell(self, index: int, what: Any) -> None:
        self.told[index] = what

    def take(self) -> list[tuple[int, Any]]:
        told, self.told = self.told, {}
        return list(told.items())


def _do(board: Any, work: Work[Any], index: int, piece: Any, limits: Limits, left: float | None, threads: int) -> Any:
    """Run a piece in the main thread of a worker; `ray.cancel` (a SIGINT) asks it to stop."""
    leaving = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: leaving.set())
    torch.set_num_threads(threads)
    last: list[Any] = [None, 0.0]  # the last report, and when it was sent to the board

    def tell(what: Any) -> None:
        last[0] = what
        if time.monotonic() - last[1] > _TELL:
            board.tell.remote(index, what)
            last[:] = None, time.monotonic()

    deadline = None if left is None else time.time() + left
    own = replace(limits, deadline=deadline, should_stop=leaving.is_set, made=clocks())
    try:
        return work(piece, own, tell)
    finally:
        if last[0] is not None:
            board.tell.remote(index, last[0])
