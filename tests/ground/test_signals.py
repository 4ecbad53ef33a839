"""The first signal sets a flag, a second Ctrl-C raises; children are left to their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from toeplens.ground.signals import ignored_by_children, stop_on_signals


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_sets_a_flag_and_only_a_second_ctrl_c_raises(number: signal.Signals):
    before = handlers()
    with stop_on_signals() as stopped:
        assert not stopped()
        os.kill(os.getpid(), number)
        assert stopped()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stopped()
    assert handlers() == before


def test_processes_started_within_it_ignore_ctrl_c():
    before = handlers()
    ask = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    with ignored_by_children():
        told = subprocess.run([sys.executable, "-S", "-c", ask], capture_output=True, text=True).stdout
    assert told == "True\n"
    assert handlers() == before


def test_in_another_thread_handlers_stay_as_they_are():
    seen: list[object] = []

    def work() -> None:
        with ignored_by_children():
            seen.append(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handlers()]
