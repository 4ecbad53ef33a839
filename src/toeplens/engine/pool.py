"""Pieces of work in parallel: the scheduler, with processes of this machine or tasks of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from toeplens.ground import EnvironmentFailure, InputError, ToeplensError, invalid
from toeplens.ground.errors import first_line
from toeplens.ground.execution import ClusterOptions, ExecutionOptions, Workers, clocks, cluster_of, ignored_by_children
from toeplens.ground.machine import cores, out_of_memory
from toeplens.ground.options import within

Work = Callable[[Any, ExecutionOptions, Callable[..., None]], Any]  # of a piece; must be importable
_LOOK = 0.1  # seconds between two checks
_TELL, _CANCEL = 1.0, 1.0  # seconds between two reports of a Ray task, two tries to cancel it
_RETRIES = 10  # retries of a Ray task whose worker or machine died
_ALWAYS_ALLOWED = 64  # maximum number of workers; more on larger machines


def plan_workers(jobs: int, device: str, workers: int | None) -> tuple[int, int]:
    """Number of processes, and threads per process. Default: one process per core on a CPU, one on a GPU.

    Cores are divided among processes, limited by ``OMP_NUM_THREADS`` if set.
    """
    count = workers if workers is not None else (1 if is_gpu(device) else cores())
    within("workers", count, 1, max(_ALWAYS_ALLOWED, 4 * cores()))
    count = max(1, min(count, jobs))
    threads = max(1, cores() // count)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return count, min(threads, max(1, int(asked))) if asked.isdecimal() else threads


def is_gpu(device: str) -> bool:
    """Whether ``device`` is a GPU of this machine."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def spread(
    work: Work,
    pieces: Sequence[Any],
    limits: ExecutionOptions,
    workers: Workers = None,
    *,
    on_done: Callable[[int, Any], bool | None],
    on_told: Callable[..., None] = lambda index, *what: None,
    after: Mapping[int, int] | None = None,
) -> None:
    """Do ``work(piece, limits, tell)`` for each piece, in order and in parallel.

    A piece is started only after the piece that ``after`` maps its index to is done. One worker on this machine is
    this process.

    ``on_done`` is called with the index and result of each piece; if it returns False, no further pieces are started.
    ``work`` must be importable, and its limits tell it when to stop: deadline, ``limits.should_stop``, SIGTERM, or the
    end of this process. Its reports are passed to ``on_told`` with the index.

    An error in one piece stops the others and is raised once they have stopped. `KeyboardInterrupt` kills the workers.
    """
    cluster, after = cluster_of(workers), after or {}
    left, done, waiting = list(range(len(pieces))), set[int](), dict[Any, int]()
    failure: BaseException | None = None
    if cluster.on_ray:
        pool: ProcessPool | RayPool = RayPool(work, limits, cluster, len(pieces))
    else:
        count, threads = plan_workers(len(pieces), limits.device, cluster.workers)
        if count == 1:
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                while not limits.over() and (index := take(left, after, done)) is not None:
                    result = work(pieces[index], limits, partial(on_told, index))
                    done.add(index)
                    if on_done(index, result) is False:
                        break
            finally:
                torch.set_num_threads(before)
            return
        pool = ProcessPool(work, limits, count, threads)

    def hear() -> None:
        for index, what in pool.reports():
            on_told(index, *what)

    with pool:
        try:
            while True:
                if failure or limits.should_stop() or (pool.remote and limits.late()):
                    left.clear()
                    pool.stop(waiting)
                while len(waiting) < pool.count and not limits.over():
                    index = take(left, after, done)
                    if index is None:
                        break
                    waiting[pool.submit(index, pieces[index])] = index
                if not waiting:
                    break
                finished = pool.wait(waiting)
                hear()
                for handle in finished:
                    index = waiting.pop(handle)
                    try:
                        result = pool.result(handle)
                        done.add(index)
                        if on_done(index, result) is False:
                            left.clear()
                    except CancelledError:  # it was not begun
                        left.clear()
                    except Exception as error:
                        failure = failure or error
        except KeyboardInterrupt:
            pool.kill(waiting)
            raise
        except Exception as error:
            pool.stop(waiting)
            failure = failure or error
        hear()
    if isinstance(failure, ToeplensError):
        raise failure
    if isinstance(failure, BrokenProcessPool) and limits.should_stop():
        return  # workers got SIGTERM before they could handle it
    if failure is None:
        return
    lost = isinstance(failure, (BrokenProcessPool, OSError)) or type(failure).__module__.partition(".")[0] == "ray"
    if not lost and not out_of_memory(failure):
        raise failure  # a fault in the code of an encoding, a task or a measure: its traceback says where
    raise EnvironmentFailure(
        f"A worker {'of the cluster' if cluster.on_ray else 'process'} ended unexpectedly "
        f"({type(failure).__name__}: {first_line(failure)}). Finished work is saved; run the same command "
        "to resume, with fewer --workers if memory is short. A script must start its study under "
        "'if __name__ == \"__main__\":', as each worker imports the script."
    ) from failure


def take(left: list[int], after: Mapping[int, int], done: Collection[int]) -> int | None:
    """Remove and return the first piece in ``left`` that does not wait for an unfinished piece (``after``)."""
    for place, index in enumerate(left):
        if index not in after or after[index] in done:
            return left.pop(place)
    return None


# ---- processes -------------------------------------------------------------------------------------------------------


class ProcessPool:
    """Processes of this machine; `RayPool` has the same methods.

    count   maximum number of submitted pieces
    remote  whether pieces may still wait for room when the deadline comes, so that they must be stopped then
    """

    remote = False

    def __init__(self, work: Work, limits: ExecutionOptions, count: int, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.work, self.count = work, count
        self.limits = replace(limits, should_stop=_never)
        self.stopped, self.told = context.Event(), context.Queue()
        given = self.stopped, self.told, threads
        self.executor = ProcessPoolExecutor(count, mp_context=context, initializer=_start, initargs=given)

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.shutdown()

    def submit(self, index: int, piece: Any) -> Any:
        """Start a piece; returns a handle."""
        with ignored_by_children():
            return self.executor.submit(_do, self.work, index, piece, self.limits)

    def wait(self, handles: Collection[Any]) -> Iterable[Any]:
        """Finished ones of these pieces, after 0.1 seconds at the latest."""
        return wait(handles, timeout=_LOOK, return_when=FIRST_COMPLETED).done

    def result(self, handle: Any) -> Any:
        """The result of a finished piece; raises its error, or `CancelledError` if it was not begun."""
        return handle.result()

    def reports(self) -> Iterable[tuple[int, Any]]:
        """New reports of all pieces, with their indices."""
        while True:
            try:
                yield self.told.get_nowait()
            except queue.Empty:
                return

    def stop(self, handles: Collection[Any]) -> None:
        """Ask all pieces to stop at a resumable point."""
        self.stopped.set()

    def kill(self, handles: Collection[Any]) -> None:
        """End all pieces at once."""
        for process in list(self.executor._processes.values()):
            process.kill()


def _never() -> bool:
    return False


# ---- in a worker ----------------------------------------------------------------------------------------------------

_stop: Any = None
_told: Any = None
_busy = threading.Lock()
_leaving = threading.Event()


def _start(stop: Any, told: Any, threads: int) -> None:
    global _stop, _told
    torch.set_num_threads(threads)
    _stop, _told = stop, told
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _leaving.set())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent has ended, after the current piece has reached a resumable point.

    SIGTERM only ends the current piece, as the parent ends its workers.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _leaving.set()
    with _busy:
        os._exit(1)


def _told_to_stop() -> bool:
    return _leaving.is_set() or _stop.is_set()


def _do(work: Work, index: int, piece: Any, limits: ExecutionOptions) -> Any:
    if _leaving.is_set():
        raise CancelledError
    with _busy:
        return work(piece, replace(limits, should_stop=_told_to_stop), lambda *what: _told.put((index, what)))


# ---- Ray -------------------------------------------------------------------------------------------------------------


def at_a_time(cluster: ClusterOptions) -> int:
    """The number of parallel pieces on the current machines; connects to the cluster."""
    needs = {name: amount for name, amount in _needs(cluster).items() if amount}
    nodes = [node["Resources"] for node in join(cluster).nodes() if node["Alive"]]
    room = sum(min(int(node.get(name, 0.0) / needs[name] + 1e-9) for name in needs) for node in nodes)
    return min(room, cluster.workers or room)


def must_serve(cluster: ClusterOptions, device: str) -> None:
    """Raise `InputError` unless the cluster responds and one of its machines has the resources for a piece."""
    if device not in ("auto", "cpu", "cuda"):
        raise invalid("device", "be auto, cpu or cuda with a cluster", device)
    if device == "cuda" and not cluster.gpus:
        raise invalid("gpus_per_cell", "be over 0 with device cuda", got="0")
    if not at_a_time(cluster):
        needs = ", ".join(f"{amount:g} {name}" for name, amount in _needs(cluster).items() if amount)
        raise InputError(f"cpus_per_cell: no machine of the cluster has the resources that a cell needs ({needs}).")


def _needs(cluster: ClusterOptions) -> dict[str, float]:
    return {"CPU": cluster.cpus, "GPU": cluster.gpus, "memory": float(cluster.memory or 0)}


def join(cluster: ClusterOptions) -> Any:
    """Connect this process to the cluster; returns the ray module."""
    try:
        import ray
    except ImportError:
        raise EnvironmentFailure("engine: ray is not installed. Run: pip install 'toeplens[ray]'.") from None
    if ray.is_initialized():
        return ray
    if cluster.address not in (None, "auto"):
        _must_answer(cluster.address)
    here: dict[str, Any] = {"num_cpus": cores(), "include_dashboard": False} if cluster.address is None else {}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=cluster.address or "local", configure_logging=False, log_to_driver=False, **here)
    except Exception as error:  # Ray raises many kinds of errors
        raise InputError(f"address: Ray does not answer at {cluster.address!r} ({first_line(error)}).") from None
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray sets others there
            for number, handler in handlers.items():
                signal.signal(number, handler)
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


class RayPool:
    """A `ProcessPool` on a cluster.

    Ray retries a piece whose worker or machine is lost, up to `_RETRIES` times, and ends all tasks if this process
    dies.
    """

    remote = True

    def __init__(self, work: Work, limits: ExecutionOptions, cluster: ClusterOptions, pieces: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.ray = ray = join(cluster)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.board = ray.remote(_Board).options(num_cpus=0, scheduling_strategy=here).remote()
        needs = {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus, "memory": cluster.memory}
        self.task = ray.remote(_do_on_ray).options(**needs, max_retries=_RETRIES)
        self.work, self.limits, self.count = work, limits, cluster.workers or max(1, pieces)
        self.plain = replace(limits, should_stop=lambda: False, deadline=None, device=cluster.device(limits.device))
        self.threads, self.cancelled = max(1, int(cluster.cpus)), -_CANCEL

    def __enter__(self) -> RayPool:
        self.reports()  # starts the board before the first task, so that no report is lost
        return self

    def __exit__(self, *_: object) -> None:
        self.ray.kill(self.board)

    def submit(self, index: int, piece: Any) -> Any:
        return self.task.remote(self.board, self.work, index, piece, self.plain, self.limits.left(), self.threads)

    def wait(self, handles: Collection[Any]) -> Iterable[Any]:
        return self.ray.wait(list(handles), timeout=_LOOK)[0]

    def result(self, handle: Any) -> Any:
        try:
            return self.ray.get(handle)
        except self.ray.exceptions.TaskCancelledError:  # also raised in the worker, as a RayTaskError
            raise CancelledError from None
        except self.ray.exceptions.RayTaskError as error:  # an error raised in a task
            raise (error.cause if isinstance(error.cause, Exception) else error) from None

    def reports(self) -> Iterable[tuple[int, Any]]:
        return self.ray.get(self.board.take.remote())

    def stop(self, handles: Collection[Any]) -> None:
        if time.monotonic() - self.cancelled >= _CANCEL:  # again, as Ray can lose one
            self.cancelled = time.monotonic()
            for handle in handles:
                self.ray.cancel(handle)

    def kill(self, handles: Collection[Any]) -> None:
        for handle in handles:
            self.ray.cancel(handle, force=True)


class _Board:
    """The last report of each piece; an actor on the driver's machine."""

    def __init__(self) -> None:
        self.told: dict[int, Any] = {}

    def tell(self, index: int, what: Any) -> None:
        self.told[index] = what

    def take(self) -> list[tuple[int, Any]]:
        told, self.told = self.told, {}
        return list(told.items())


def _do_on_ray(
    board: Any, work: Work, index: int, piece: Any, limits: ExecutionOptions, left: float | None, threads: int
) -> Any:
    """Run a piece in the main thread of a worker; `ray.cancel` (a SIGINT) asks it to stop."""
    leaving = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: leaving.set())
    torch.set_num_threads(threads)
    last: list[Any] = [None, 0.0]  # the last report, and when it was sent to the board

    def tell(*what: Any) -> None:
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
