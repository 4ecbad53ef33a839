"""What is done beside a pass is done by whichever thread is free, and its errors are not lost."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from functools import partial

import pytest
import torch

from toeplens.studies.kit.beside import beside


@pytest.fixture(autouse=True)
def threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_it_is_done_in_another_thread_with_half_of_the_threads() -> None:
    seen: list[tuple[int, bool, int]] = []

    def work(number: int) -> int:
        seen.append((number, threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        return 10 * number

    with beside() as start:
        assert torch.get_num_threads() == 4  # as long as nothing is done beside
        found = []
        for number in range(5):
            found.append(start(partial(work, number)))
            assert found[-1].result() == 10 * number  # nothing waits
        assert torch.get_num_threads() == 2
    assert seen == [(number, False, 2) for number in range(5)]
    assert torch.get_num_threads() == 4


def test_who_is_ahead_takes_a_piece_and_in_the_end_what_is_left() -> None:
    begun, go = threading.Event(), threading.Event()
    seen: list[tuple[int, bool]] = []

    def work(number: int) -> int:
        here = threading.current_thread() is threading.main_thread()
        if not here:
            begun.set()
            assert go.wait(10)
        seen.append((number, here))
        if number == 2:
            go.set()
        return number

    with beside() as start:
        found = [start(partial(work, number)) for number in range(5)]
        assert seen == [(3, True), (4, True)]  # the other has one, and two wait for it
        assert begun.wait(10)
    assert [each.result() for each in found] == list(range(5))
    assert sorted(seen) == [(0, False), (1, True), (2, True), (3, True), (4, True)]


@pytest.mark.parametrize("after", [0, 1])
def test_an_error_is_raised_where_the_next_begins_or_on_leaving(after: int) -> None:
    def fail() -> None:
        raise ValueError("no")

    reached = []

    def both() -> None:
        with beside() as start:
            wait([start(fail)])
            for _ in range(after):
                start(lambda: None)
            reached.append(1)

    with pytest.raises(ValueError, match="no"):
        both()
    assert len(reached) == 1 - after
    assert torch.get_num_threads() == 4


def test_an_error_outside_goes_on_and_leaves_the_threads_as_they_were() -> None:
    def both() -> None:
        with beside() as start:
            start(lambda: None)
            raise KeyError

    with pytest.raises(KeyError):
        both()
    assert torch.get_num_threads() == 4


def test_each_thread_has_its_own_back() -> None:
    """Whichever begins and ends first."""
    ready, begun, over = threading.Event(), threading.Event(), threading.Event()
    found: list[int] = []

    def other() -> None:
        assert torch.get_num_threads() == 4  # a thread has its number from its first use of torch on
        ready.set()
        begun.wait(10)
        with beside() as start:
            start(lambda: None)
            over.set()
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait(10)
    with beside() as start:
        start(lambda: None)
        begun.set()
        over.wait(10)
    thread.join()
    assert (torch.get_num_threads(), found) == (4, [4])


def test_one_thread_does_it_at_once() -> None:
    torch.set_num_threads(1)
    where: list[threading.Thread] = []
    with beside() as start:
        assert start(lambda: where.append(threading.current_thread())).done()
    assert where == [threading.main_thread()]
