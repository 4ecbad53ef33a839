"""Work beside a model's pass: one thing at a time in another thread, with half of torch's threads for each of the two.

Most operations of measures are too small for several threads to pay; two streams of them fill two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def beside() -> Iterator[Callable[[Callable[[], T]], Future[T]]]:
    """What starts a piece of work beside what goes on, once the piece before it is done; its error is then raised.

    All that was started is finished, or has failed, on leaving. Where torch has one thread alone, a piece is done where
    it is started.
    """
    alone = torch.get_num_threads() == 1
    last: list[Future[T]] = []
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))

        def start(work: Callable[[], T]) -> Future[T]:
            if last:
                last.pop().result()
            elif not alone:
                stack.enter_context(_halved())
            last.append(_done(work) if alone else pool.submit(work))
            return last[0]

        yield start
        if last:
            last[0].result()


def _done(work: Callable[[], T]) -> Future[T]:
    found: Future[T] = Future()
    found.set_result(work())
    return found


@contextmanager
def _halved() -> Iterator[None]:
    """Half of torch's threads for the thread that calls and those that begin; it has as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)
