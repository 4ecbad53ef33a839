"""Work beside a model's pass: in another thread, with half of torch's threads for each of the two.

Most operations of measures are too small for several threads to pay; two streams of them fill two cores. Where the pass
is ahead of them, its own thread takes a piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

import torch

T = TypeVar("T")
_WAITING = 3  # one that is done, and two that wait


@contextmanager
def beside() -> Iterator[Callable[[Callable[[], T]], Future[T]]]:
    """What starts a piece of work beside what goes on; an error of a piece before it that is done is then raised.

    A piece is done by the other thread, after those that it has; where one waits there already, at once by the thread
    that starts it. So neither waits for the other, and two pieces at most are held beside the one that is started. In
    the end both do what is left.

    All that was started is finished, or has failed, on leaving. Where torch has one thread alone, a piece is done where
    it is started.
    """
    alone = torch.get_num_threads() == 1
    given: deque[Future[T]] = deque()  # to the other thread, and not known to be done
    waiting: deque[tuple[Callable[[], T], Future[T]]] = deque()  # of these, what nobody has begun

    def take() -> None:
        with suppress(IndexError):  # the other was there first
            _do(*waiting.popleft())

    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        begun = False

        def start(work: Callable[[], T]) -> Future[T]:
            nonlocal begun
            found: Future[T] = Future()
            while given and given[0].done():
                given.popleft().result()
            if alone or len(given) == _WAITING:
                found.set_result(work())
                return found
            if not begun:
                begun = True
                stack.enter_context(_halved())
            given.append(found)
            waiting.append((work, found))
            pool.submit(take)
            return found

        yield start
        while waiting:
            take()
        for each in given:
            each.result()


def _do(work: Callable[[], T], found: Future[T]) -> None:
    try:
        found.set_result(work())
    except BaseException as error:  # it is raised where the result is asked for
        found.set_exception(error)


@contextmanager
def _halved() -> Iterator[None]:
    """Half of torch's threads for the thread that calls and those that begin; it has as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)
