"""Pieces of work on a Ray cluster's machines: each a task with its needs, done elsewhere when its worker is lost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from toeplens.engine.limits import Limits
from toeplens.engine.nodes import Cluster
from toeplens.engine.pool import Piece, Put, Told, Upcoming, Work
from toeplens.ground import EnvironmentFailure, ToeplensError

_LOOK, _ASK = 0.1, 1.0  # seconds between two looks of the driver, and of a worker
_LOST = 10  # times that a piece may lose its worker
_WAIT = 5.0  # seconds until a piece that was put off is tried again


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
    """`toeplens.engine.pool.in_processes`, on a cluster: the same work, stopped and told of in the same way.

    A piece whose worker or machine is lost is done again on another, up to `_LOST` times. If this process dies, Ray
    ends its tasks, wherever they are.
    """
    ray = cluster.join()
    desk = _desk(ray)
    task = ray.remote(_do).options(num_cpus=cluster.cpus, num_gpus=cluster.gpus, memory=cluster.memory, max_retries=0)
    plain = replace(limits, should_stop=_never, deadline=None, device=cluster.device(limits.device))
    upcoming = Upcoming(pieces, wait=_WAIT, after=after)
    waiting: dict[Any, int] = {}
    lost: Counter[int] = Counter()
    failure: BaseException | None = None
    stopping = False
    looked, room = 0.0, 0
    while True:
        try:
            if not stopping and limits.over():
                stopping = True
            if stopping:
                upcoming.clear()
                for index in ray.get(desk.stop.remote()):
                    for answer in [answer for answer, own in waiting.items() if own == index]:
                        ray.cancel(answer)
            elif time.monotonic() - looked > _ASK:
                looked, room = time.monotonic(), cluster.room()
            while len(waiting) < min(room, cluster.at_once or room) and (index := upcoming.next()) is not None:
                ray.get(desk.give.remote(index))
                answer = task.remote(desk, work, index, pieces[index], plain, limits.left(), cluster.threads)
                waiting[answer] = index
            if not waiting and not upcoming:
                break
            finished: list[Any] = []
            if waiting:
                finished, _ = ray.wait(list(waiting), timeout=_LOOK)
            else:
                time.sleep(_LOOK)
            for index, what in ray.get(desk.take.remote()):
                on_told(index, what)
        except KeyboardInterrupt as error:
            if stopping:
                raise
            stopping, failure = True, error
            continue
        for answer in finished:
            index = waiting.pop(answer)
            try:
                result = ray.get(answer)
            except ray.exceptions.TaskCancelledError:  # in its worker, too, where it is a RayTaskError besides
                continue
            except ray.exceptions.RayTaskError as error:
                stopping, failure = True, failure or _own(error)
                continue
            except ray.exceptions.RayError as error:  # the worker, its machine or what joins us to it is gone
                lost[index] += 1
                if lost[index] <= _LOST:
                    upcoming.put_first(index)
                else:
                    stopping, failure = True, failure or error
                continue
            if result is Put.OFF:
                upcoming.put_off(index)
                continue
            if result is None:
                stopping = True
            upcoming.done(index)
            try:
                on_done(index, result)
            except (ToeplensError, KeyboardInterrupt) as error:
                stopping, failure = True, failure or error
    for index, what in ray.get(desk.take.remote()):
        on_told(index, what)
    ray.kill(desk)
    if isinstance(failure, (ToeplensError, KeyboardInterrupt)):
        raise failure
    if failure is not None:
        raise EnvironmentFailure(
            f"a worker of the cluster ended unexpectedly ({type(failure).__name__}: {str(failure).splitlines()[0]}); "
            f"what was finished is kept, and the same command goes on."
        ) from failure


def _never() -> bool:
    return False


def _own(error: Any) -> BaseException:
    """What was raised in a task, as it would be raised here."""
    return error.cause if isinstance(error.cause, BaseException) else error


def _desk(ray: Any) -> Any:
    """Where this driver and its workers meet, on the driver's own machine: it ends with the driver."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(_Desk).options(num_cpus=0, scheduling_strategy=here).remote()


class _Desk:
    """What workers tell, whether they are to stop, and which pieces were given out and not begun."""

    def __init__(self) -> None:
        self.told: dict[int, Any] = {}
        self.given: set[int] = set()
        self.stopped = False

    def give(self, index: int) -> None:
        self.given.add(index)

    def begin(self, index: int) -> bool:
        """Whether a worker may begin what it was given."""
        self.given.discard(index)
        return not self.stopped

    def tell(self, index: int, what: Any) -> bool:
        """Hear the last of a piece; whether its worker is to stop."""
        if what is not None:
            self.told[index] = what
        return self.stopped

    def take(self) -> list[tuple[int, Any]]:
        told, self.told = self.told, {}
        return list(told.items())

    def stop(self) -> list[int]:
        """From now on nothing is begun; gives what was not."""
        self.stopped = True
        return list(self.given)


# ---- in a worker ----------------------------------------------------------------------------------------------------


def _do(desk: Any, work: Work[Any], index: int, piece: Any, limits: Limits, left: float | None, threads: int) -> Any:
    import ray

    torch.set_num_threads(threads)
    leaving, ended = threading.Event(), threading.Event()
    last: list[Any] = [None]  # of what was told, what the driver has not heard

    def ask(wait: float) -> None:
        what, last[0] = last[0], None
        try:
            if ray.get(desk.tell.remote(index, what), timeout=wait):
                leaving.set()
        except Exception:  # the driver is gone, and its desk with it
            leaving.set()

    def follow() -> None:
        while not ended.wait(_ASK) and not leaving.is_set():
            ask(wait=60.0)

    def tell(what: Any) -> None:
        last[0] = what

    if not ray.get(desk.begin.remote(index)):
        return None
    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        own = Limits(
            device=limits.device,
            compile=limits.compile,
            checkpoint_seconds=limits.checkpoint_seconds,
            deadline=None if left is None else time.time() + left,
            should_stop=leaving.is_set,
            store=limits.store,
            stack=limits.stack,
            follow=limits.follow,
            group=limits.group,
        )
        return work(piece, own, tell)
    finally:
        ended.set()
        follower.join()
        ask(wait=5.0)
