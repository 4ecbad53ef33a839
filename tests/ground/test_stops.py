"""Work is asked to stop, then interrupted, then ended: by signals and by whatever says that time is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from toeplens.ground.stops import EXIT_CODE, Interrupted, interrupted_by_signals, interruptible, stop_on_signals

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in WATCHED]


def signalled(*numbers: int) -> None:
    """Work that lasts, with these signals on the way."""
    for number in numbers:
        os.kill(os.getpid(), number)
    time.sleep(30)


def test_what_goes_on_past_its_grace_is_interrupted_wherever_it_is():
    before, began = handlers(), time.monotonic()
    with pytest.raises(Interrupted), interruptible(lambda: True, grace=0.1):
        time.sleep(600)
    assert 0.1 <= time.monotonic() - began < 600
    assert handlers() == before


def test_an_interruption_that_is_swallowed_comes_again():
    def deaf() -> None:
        with pytest.raises(Interrupted):
            time.sleep(30)
        time.sleep(30)

    with pytest.raises(Interrupted), interruptible(lambda: True, grace=0.0):
        deaf()


def test_what_ends_in_time_is_left_alone():
    over = threading.Event()
    with interruptible(over.is_set, grace=0.3):
        over.set()
        time.sleep(0.12)
    time.sleep(0.4)  # nothing comes after


def test_outside_the_main_thread_nothing_is_interrupted():
    seen: list[str] = []

    def work() -> None:
        with interruptible(lambda: True, grace=0.0), interrupted_by_signals(lambda: None):
            time.sleep(0.15)
            seen.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["done"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_first_and_then_interrupts(number: int):
    before = handlers()
    with stop_on_signals() as stopped:
        assert not stopped()
        os.kill(os.getpid(), number)
        assert stopped()
    assert handlers() == before
    with pytest.raises(Interrupted), stop_on_signals(grace=0.1):
        signalled(number)


def test_a_second_ctrl_c_interrupts_at_once():
    with pytest.raises(Interrupted), stop_on_signals(grace=60):
        signalled(signal.SIGINT, signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_other_work_is_interrupted_at_once(number: int):
    before = handlers()
    with pytest.raises(Interrupted), interrupted_by_signals(lambda: None):
        signalled(number)
    assert handlers() == before


STUCK = """
import os, signal, time
from toeplens.ground.stops import Interrupted, interrupted_by_signals
with interrupted_by_signals(lambda: print("ended", flush=True), at_most=0.3):
    while True:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        except Interrupted:
            pass
"""


def test_a_process_that_does_not_hear_is_ended():
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout) == (EXIT_CODE, "ended\n")
