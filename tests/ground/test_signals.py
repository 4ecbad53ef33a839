"""The first signal sets a flag, a second Ctrl-C raises; children are left to their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from toeplens.ground.execution import ignored_by_children, stop_on_signals


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


def test_processes_started_within_it_ignore_ctrl_c_and_here_it_waits():
    ask = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('alive')"
    with stop_on_signals() as stopped:
        with ignored_by_children():
            told = subprocess.run([sys.executable, "-S", "-c", ask], capture_output=True, text=True).stdout
            os.kill(os.getpid(), signal.SIGINT)
        assert stopped(), "it is not lost"
    assert told == "alive\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
