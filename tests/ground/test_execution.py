"""How work is run: what options come to and what they refuse, deadlines, and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from toeplens.ground import InputError, execution
from toeplens.ground.execution import (
    LOGGERS,
    ClusterOptions,
    ExecutionOptions,
    cluster_of,
    ignored_by_children,
    seconds,
    stop_on_signals,
)
from toeplens.training.loggers import OPENERS

RAY = {"engine": "ray"}


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("9m", 540), ("2h", 7200), ("5", 5), ("0.5m", 30), (" 7 s ", 7)]
)
def test_times_are_read_as_people_write_them(text: str, expected: float):
    assert seconds(text) == expected


@pytest.mark.parametrize(("budget", "reserve"), [("9m", 20), ("25s", 6.25)])
def test_a_time_budget_leaves_time_to_write_everything_down(budget: str, reserve: float):
    given = ExecutionOptions(time_budget=budget)
    left = given.left()
    assert left is not None
    assert left == pytest.approx(seconds(budget) - reserve, abs=2)
    assert replace(given, device="cpu").deadline == given.deadline, "it begins once"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"stack": 0}, "^stack must be from 1 to 256, got 0"),
        ({"stack": 257}, "^stack must be from 1 to 256, got 257"),
        ({"follow": ("tensorbord",)}, r"^follow must be .*, got 'tensorbord'; did you mean 'tensorboard'\?"),
        ({"time_budget": "5 minutes"}, "^time_budget must be a positive time such as"),
        ({"time_budget": "0s"}, "^time_budget must be a positive time such as"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], says: str):
    with pytest.raises(InputError, match=says):
        ExecutionOptions(**given)


def test_loggers_are_known_by_name_each_once():
    assert ExecutionOptions(follow=("wandb", "tensorboard", "wandb")).follow == ("wandb", "tensorboard")
    assert tuple(OPENERS) == LOGGERS


def test_work_is_over_when_someone_says_so_or_time_is_up_whatever_the_clock_is_set_to(monkeypatch: pytest.MonkeyPatch):
    wall, steady = [100.0], [7.0]
    monkeypatch.setattr(execution, "time", SimpleNamespace(time=lambda: wall[0], monotonic=lambda: steady[0]))
    assert not ExecutionOptions().over(1e9)
    assert ExecutionOptions(should_stop=lambda: True).over()
    assert ExecutionOptions(deadline=100.0).over()
    assert not ExecutionOptions(deadline=101.0).over()
    assert ExecutionOptions(deadline=101.0).over(ahead=1.0)
    asked = ExecutionOptions(deadline=110.0)
    wall[0], steady[0] = 20.0, 16.0  # set back after 9 seconds
    assert (asked.over(), asked.left()) == (False, 1.0)
    steady[0] = 17.0
    assert replace(asked, device="cpu").over()


def test_workers_are_a_number_or_options():
    assert cluster_of(None) == cluster_of(ClusterOptions()) == ClusterOptions()
    assert cluster_of(3) == ClusterOptions(workers=3)
    given = ClusterOptions(**RAY, cpus_per_cell=2.0, gpus_per_cell=0.25, memory_per_cell="1.5G")
    assert (given.cpus, given.gpus, given.memory, given.on_ray) == (2.0, 0.25, 1_500_000_000, True)
    assert (ClusterOptions(**RAY).cpus, ClusterOptions(**RAY).gpus, ClusterOptions(**RAY).memory) == (1.0, 0.0, None)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"engine": "slurm"}, "^engine must be one of local, ray, got 'slurm'"),
        ({"address": "head:6379"}, "^address must not be set without --engine ray, got 'head:6379'"),
        (RAY | {"memory_per_cell": "much"}, "^memory_per_cell must be a positive size such as 500M or 4G, got 'much'"),
        (RAY | {"cpus_per_cell": 0.0}, "^cpus_per_cell must be finite and over 0, got 0.0"),
        (RAY | {"gpus_per_cell": 1.5}, "^gpus_per_cell must be a whole number if it is over 1, got 1.5"),
        (RAY | {"workers": 0}, "^workers must be at least 1, got 0"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(given: dict[str, Any], says: str):
    with pytest.raises(InputError, match=says):
        ClusterOptions(**given)


@pytest.mark.parametrize(
    ("given", "asked", "device"),
    [({}, "auto", "cpu"), ({"gpus_per_cell": 0.25}, "auto", "cuda"), ({"gpus_per_cell": 1.0}, "cpu", "cpu")],
)
def test_a_device_is_the_workers_and_not_this_machines(given: dict[str, Any], asked: str, device: str):
    assert ClusterOptions(**RAY, **given).device(asked) == device


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
