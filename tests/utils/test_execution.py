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

from toeplens.training.loggers import OPENERS
from toeplens.utils import InputError, execution
from toeplens.utils.execution import (
    LOGGERS,
    ClusterOptions,
    ExecutionOptions,
    children_ignore_sigint,
    cluster_of,
    parse_duration,
    stop_on_signals,
)

RAY = {"engine": "ray"}


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("9m", 540), ("2h", 7200), ("5", 5), ("0.5m", 30), (" 7 s ", 7)]
)
def test_durations_are_parsed(text: str, expected: float):
    assert parse_duration(text) == expected


@pytest.mark.parametrize(("budget", "reserve"), [("9m", 20), ("25s", 6.25)])
def test_a_time_budget_reserves_time_for_writing_results(budget: str, reserve: float):
    options = ExecutionOptions(time_budget=budget)
    left = options.seconds_left()
    assert left is not None
    assert left == pytest.approx(parse_duration(budget) - reserve, abs=2)
    assert replace(options, device="cpu").deadline == options.deadline, "it begins once"


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
def test_invalid_execution_options_are_refused(given: dict[str, Any], says: str):
    with pytest.raises(InputError, match=says):
        ExecutionOptions(**given)


def test_loggers_are_named_and_deduplicated():
    assert ExecutionOptions(follow=("wandb", "tensorboard", "wandb")).follow == ("wandb", "tensorboard")
    assert tuple(OPENERS) == LOGGERS


def test_a_deadline_ends_on_request_or_by_monotonic_time(monkeypatch: pytest.MonkeyPatch):
    wall, steady = [100.0], [7.0]
    monkeypatch.setattr(execution, "time", SimpleNamespace(time=lambda: wall[0], monotonic=lambda: steady[0]))
    assert not ExecutionOptions().is_over(1e9)
    assert ExecutionOptions(should_stop=lambda: True).is_over()
    assert ExecutionOptions(deadline=100.0).is_over()
    assert not ExecutionOptions(deadline=101.0).is_over()
    assert ExecutionOptions(deadline=101.0).is_over(ahead=1.0)
    options = ExecutionOptions(deadline=110.0)
    wall[0], steady[0] = 20.0, 16.0  # set back after 9 seconds
    assert (options.is_over(), options.seconds_left()) == (False, 1.0)
    steady[0] = 17.0
    assert replace(options, device="cpu").is_over()


def test_workers_accepts_a_number_or_options():
    assert cluster_of(None) == cluster_of(ClusterOptions()) == ClusterOptions()
    assert cluster_of(3) == ClusterOptions(workers=3)
    options = ClusterOptions(**RAY, cpus_per_cell=2.0, gpus_per_cell=0.25, memory_per_cell="1.5G")
    assert (options.cpus, options.gpus, options.memory, options.on_ray) == (2.0, 0.25, 1_500_000_000, True)
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
def test_invalid_cluster_options_are_refused(given: dict[str, Any], says: str):
    with pytest.raises(InputError, match=says):
        ClusterOptions(**given)


@pytest.mark.parametrize(
    ("given", "asked", "device"),
    [({}, "auto", "cpu"), ({"gpus_per_cell": 0.25}, "auto", "cuda"), ({"gpus_per_cell": 1.0}, "cpu", "cpu")],
)
def test_the_device_is_checked_on_the_worker(given: dict[str, Any], asked: str, device: str):
    assert ClusterOptions(**RAY, **given).device(asked) == device


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_a_flag_and_a_second_ctrl_c_raises(number: signal.Signals):
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


def test_child_processes_ignore_ctrl_c_and_the_parent_defers_it():
    ask = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('alive')"
    with stop_on_signals() as stopped:
        with children_ignore_sigint():
            told = subprocess.run([sys.executable, "-S", "-c", ask], capture_output=True, text=True).stdout
            os.kill(os.getpid(), signal.SIGINT)
        assert stopped(), "it is not lost"
    assert told == "alive\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
