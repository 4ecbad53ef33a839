"""Items of work in parallel: the scheduler, with processes of this machine or tasks of a Ray cluster."""

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

from toeplens.utils import EnvironmentFailure, InputError, ToeplensError, invalid
from toeplens.utils.errors import first_line
from toeplens.utils.execution import (
    ClusterOptions,
    ExecutionOptions,
    Workers,
    children_ignore_sigint,
    cluster_of,
    read_clocks,
)
from toeplens.utils.machine import is_out_of_memory, num_cores
from toeplens.utils.options import check_range

WorkFn = Callable[[Any, ExecutionOptions, Callable[..., None]], Any]  # of an item; must be importable
_POLL_SECONDS = 0.1  # seconds between two checks
_REPORT_SECONDS, _CANCEL_SECONDS = 1.0, 1.0  # seconds between two reports of a Ray task, two tries to cancel it
_RETRIES = 10  # retries of a Ray task whose worker or machine died
_MAX_WORKERS = 64  # maximum number of workers; more on larger machines


def plan_workers(jobs: int, device: str, workers: int | None) -> tuple[int, int]:
    """Number of processes, and threads per process. Default: one process per core on a CPU, one on a GPU.

    Cores are divided among processes, limited by ``OMP_NUM_THREADS`` if set.
    """
    count = workers if workers is not None else (1 if is_gpu(device) else num_cores())
    check_range("workers", count, 1, max(_MAX_WORKERS, 4 * num_cores()))
    count = max(1, min(count, jobs))
    threads = max(1, num_cores() // count)
    omp_threads = os.environ.get("OMP_NUM_THREADS", "")
    return count, min(threads, max(1, int(omp_threads))) if omp_threads.isdecimal() else threads


def is_gpu(device: str) -> bool:
    """Whether ``device`` is a GPU of this machine."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def run_parallel(
    work: WorkFn,
    items: Sequence[Any],
    execution: ExecutionOptions,
    workers: Workers = None,
    *,
    on_done: Callable[[int, Any], bool | None],
    on_message: Callable[..., None] = lambda index, *report: None,
    depends_on: Mapping[int, int] | None = None,
) -> None:
    """Do ``work(item, execution, report)`` for each item, in order and in parallel.

    An item is started only after the one that ``depends_on`` maps its index to is done. One worker on this machine is
    this process.

    ``on_done`` is called with the index and result of each item; if it returns False, no further items are started.
    ``work`` must be importable, and ``execution`` tells it when to stop: the deadline, ``execution.should_stop``,
    SIGTERM, or the end of this process. Its reports are passed to ``on_message`` with the index.

    An error in one item stops the others and is raised once they have stopped. `KeyboardInterrupt` kills the workers.
    """
    cluster, depends_on = cluster_of(workers), depends_on or {}
    remaining, completed, submitted = list(range(len(items))), set[int](), dict[Any, int]()
    failure: BaseException | None = None
    if cluster.on_ray:
        pool: ProcessPool | RayPool = RayPool(work, execution, cluster, len(items))
    else:
        count, threads = plan_workers(len(items), execution.device, cluster.workers)
        if count == 1:
            old_threads = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                while not execution.is_over() and (index := pop_ready(remaining, depends_on, completed)) is not None:
                    result = work(items[index], execution, partial(on_message, index))
                    completed.add(index)
                    if on_done(index, result) is False:
                        break
            finally:
                torch.set_num_threads(old_threads)
            return
        pool = ProcessPool(work, execution, count, threads)

    def forward_reports() -> None:
        for index, report in pool.drain_reports():
            on_message(index, *report)

    with pool:
        try:
            while True:
                if failure or execution.should_stop() or (pool.remote and execution.is_late()):
                    remaining.clear()
                    pool.stop(submitted)
                while len(submitted) < pool.count and not execution.is_over():
                    index = pop_ready(remaining, depends_on, completed)
                    if index is None:
                        break
                    submitted[pool.submit(index, items[index])] = index
                if not submitted:
                    break
                finished = pool.wait(submitted)
                forward_reports()
                for handle in finished:
                    index = submitted.pop(handle)
                    try:
                        result = pool.result(handle)
                        completed.add(index)
                        if on_done(index, result) is False:
                            remaining.clear()
                    except CancelledError:  # it was not begun
                        remaining.clear()
                    except Exception as error:
                        failure = failure or error
        except KeyboardInterrupt:
            pool.kill(submitted)
            raise
        except Exception as error:
            pool.stop(submitted)
            failure = failure or error
        forward_reports()
    if isinstance(failure, ToeplensError):
        raise failure
    if isinstance(failure, BrokenProcessPool) and execution.should_stop():
        return  # workers got SIGTERM before they could handle it
    if failure is None:
        return
    is_lost = isinstance(failure, (BrokenProcessPool, OSError)) or type(failure).__module__.partition(".")[0] == "ray"
    if not is_lost and not is_out_of_memory(failure):
        raise failure  # a fault in the code of an encoding, a task or a measure: its traceback says where
    raise EnvironmentFailure(
        f"A worker {'of the cluster' if cluster.on_ray else 'process'} ended unexpectedly "
        f"({type(failure).__name__}: {first_line(failure)}). Finished work is saved; run the same command "
        "to resume, with fewer --workers if memory is short. A script must start its study under "
        "'if __name__ == \"__main__\":', as each worker imports the script."
    ) from failure


def pop_ready(remaining: list[int], depends_on: Mapping[int, int], completed: Collection[int]) -> int | None:
    """Remove and return the first index in ``remaining`` that does not wait for an unfinished item (``depends_on``)."""
    for position, index in enumerate(remaining):
        if index not in depends_on or depends_on[index] in completed:
            return remaining.pop(position)
    return None


# ---- processes -------------------------------------------------------------------------------------------------------


class ProcessPool:
    """Processes of this machine; `RayPool` has the same methods.

    count   maximum number of submitted items
    remote  whether items may still wait for room when the deadline comes, so that they must be stopped then
    """

    remote = False

    def __init__(self, work: WorkFn, execution: ExecutionOptions, count: int, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.work, self.count = work, count
        self.execution = replace(execution, should_stop=_never_stop)
        self.stop_event, self.report_queue = context.Event(), context.Queue()
        initargs = self.stop_event, self.report_queue, threads
        self.executor = ProcessPoolExecutor(count, mp_context=context, initializer=_init_worker, initargs=initargs)

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.shutdown()

    def submit(self, index: int, item: Any) -> Any:
        """Start an item; returns a handle."""
        with children_ignore_sigint():
            return self.executor.submit(_run_item, self.work, index, item, self.execution)

    def wait(self, handles: Collection[Any]) -> Iterable[Any]:
        """Finished ones of these items, after 0.1 seconds at the latest."""
        return wait(handles, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED).done

    def result(self, handle: Any) -> Any:
        """The result of a finished item; raises its error, or `CancelledError` if it was not begun."""
        return handle.result()

    def drain_reports(self) -> Iterable[tuple[int, Any]]:
        """New reports of all items, with their indices."""
        while True:
            try:
                yield self.report_queue.get_nowait()
            except queue.Empty:
                return

    def stop(self, handles: Collection[Any]) -> None:
        """Ask all items to stop at a resumable point."""
        self.stop_event.set()

    def kill(self, handles: Collection[Any]) -> None:
        """End all items at once."""
        for process in list(self.executor._processes.values()):
            process.kill()


def _never_stop() -> bool:
    return False


# ---- in a worker ----------------------------------------------------------------------------------------------------

_stop_event: Any = None
_reports: Any = None
_work_lock = threading.Lock()
_terminating = threading.Event()


def _init_worker(stop_event: Any, reports: Any, threads: int) -> None:
    global _stop_event, _reports
    torch.set_num_threads(threads)
    _stop_event, _reports = stop_event, reports
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _terminating.set())
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End this worker when its parent has ended, after the current item has reached a resumable point.

    SIGTERM only ends the current item, as the parent ends its workers.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _terminating.set()
    with _work_lock:
        os._exit(1)


def _should_stop() -> bool:
    return _terminating.is_set() or _stop_event.is_set()


def _run_item(work: WorkFn, index: int, item: Any, execution: ExecutionOptions) -> Any:
    if _terminating.is_set():
        raise CancelledError
    with _work_lock:
        return work(item, replace(execution, should_stop=_should_stop), lambda *report: _reports.put((index, report)))


# ---- Ray -------------------------------------------------------------------------------------------------------------


def parallel_capacity(cluster: ClusterOptions) -> int:
    """The number of parallel items on the current machines; connects to the cluster."""
    needs = {name: amount for name, amount in _needs(cluster).items() if amount}
    nodes = [node["Resources"] for node in connect(cluster).nodes() if node["Alive"]]
    capacity = sum(min(int(node.get(name, 0.0) / needs[name] + 1e-9) for name in needs) for node in nodes)
    return min(capacity, cluster.workers or capacity)


def check_cluster(cluster: ClusterOptions, device: str) -> None:
    """Raise `InputError` unless the cluster responds and one of its machines has the resources for an item."""
    if device not in ("auto", "cpu", "cuda"):
        raise invalid("device", "be auto, cpu or cuda with a cluster", device)
    if device == "cuda" and not cluster.gpus:
        raise invalid("gpus_per_cell", "be over 0 with device cuda", got="0")
    if not parallel_capacity(cluster):
        needs = ", ".join(f"{amount:g} {name}" for name, amount in _needs(cluster).items() if amount)
        raise InputError(f"cpus_per_cell: no machine of the cluster has the resources that a cell needs ({needs}).")


def _needs(cluster: ClusterOptions) -> dict[str, float]:
    return {"CPU": cluster.cpus, "GPU": cluster.gpus, "memory": float(cluster.memory or 0)}


def connect(cluster: ClusterOptions) -> Any:
    """Connect this process to the cluster; returns the ray module."""
    try:
        import ray
    except ImportError:
        raise EnvironmentFailure("engine: ray is not installed. Run: pip install 'toeplens[ray]'.") from None
    if ray.is_initialized():
        return ray
    if cluster.address not in (None, "auto"):
        _check_address(cluster.address)
    options: dict[str, Any] = {"num_cpus": num_cores(), "include_dashboard": False} if cluster.address is None else {}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=cluster.address or "local", configure_logging=False, log_to_driver=False, **options)
    except Exception as error:  # Ray raises many kinds of errors
        raise InputError(f"address: Ray does not answer at {cluster.address!r} ({first_line(error)}).") from None
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray sets others there
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return ray


def _check_address(address: str) -> None:
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

    Ray retries an item whose worker or machine is lost, up to `_RETRIES` times, and ends all tasks if this process
    dies.
    """

    remote = True

    def __init__(self, work: WorkFn, execution: ExecutionOptions, cluster: ClusterOptions, num_items: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.ray = ray = connect(cluster)
        this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.actor = ray.remote(_ProgressActor).options(num_cpus=0, scheduling_strategy=this_node).remote()
        needs = {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus, "memory": cluster.memory}
        self.task = ray.remote(_run_on_ray).options(**needs, max_retries=_RETRIES)
        self.work, self.execution, self.count = work, execution, cluster.workers or max(1, num_items)
        device = cluster.device(execution.device)
        self.options = replace(execution, should_stop=lambda: False, deadline=None, device=device)
        self.threads, self.cancelled_at = max(1, int(cluster.cpus)), -_CANCEL_SECONDS

    def __enter__(self) -> RayPool:
        self.drain_reports()  # starts the actor before the first task, so that no report is lost
        return self

    def __exit__(self, *_: object) -> None:
        self.ray.kill(self.actor)

    def submit(self, index: int, item: Any) -> Any:
        left = self.execution.seconds_left()
        return self.task.remote(self.actor, self.work, index, item, self.options, left, self.threads)

    def wait(self, handles: Collection[Any]) -> Iterable[Any]:
        return self.ray.wait(list(handles), timeout=_POLL_SECONDS)[0]

    def result(self, handle: Any) -> Any:
        try:
            return self.ray.get(handle)
        except self.ray.exceptions.TaskCancelledError:  # also raised in the worker, as a RayTaskError
            raise CancelledError from None
        except self.ray.exceptions.RayTaskError as error:  # an error raised in a task
            raise (error.cause if isinstance(error.cause, Exception) else error) from None

    def drain_reports(self) -> Iterable[tuple[int, Any]]:
        return self.ray.get(self.actor.take_reports.remote())

    def stop(self, handles: Collection[Any]) -> None:
        if time.monotonic() - self.cancelled_at >= _CANCEL_SECONDS:  # again, as Ray can lose one
            self.cancelled_at = time.monotonic()
            for handle in handles:
                self.ray.cancel(handle)

    def kill(self, handles: Collection[Any]) -> None:
        for handle in handles:
            self.ray.cancel(handle, force=True)


class _ProgressActor:
    """The last report of each item; an actor on the driver's machine."""

    def __init__(self) -> None:
        self.reports: dict[int, Any] = {}

    def add_report(self, index: int, report: Any) -> None:
        self.reports[index] = report

    def take_reports(self) -> list[tuple[int, Any]]:
        reports, self.reports = self.reports, {}
        return list(reports.items())


def _run_on_ray(
    actor: Any, work: WorkFn, index: int, item: Any, execution: ExecutionOptions, time_left: float | None, threads: int
) -> Any:
    """Run an item in the main thread of a worker; `ray.cancel` (a SIGINT) asks it to stop."""
    stop_event = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop_event.set())
    torch.set_num_threads(threads)
    last: list[Any] = [None, 0.0]  # the last report, and when it was sent to the actor

    def report(*message: Any) -> None:
        last[0] = message
        if time.monotonic() - last[1] > _REPORT_SECONDS:
            actor.add_report.remote(index, message)
            last[:] = None, time.monotonic()

    deadline = None if time_left is None else time.time() + time_left
    worker_options = replace(execution, deadline=deadline, should_stop=stop_event.is_set, start_clocks=read_clocks())
    try:
        return work(item, worker_options, report)
    finally:
        if last[0] is not None:
            actor.add_report.remote(index, last[0])
