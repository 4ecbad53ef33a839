"""A run tells what it was carried out on, from step to step; what it did on the way elsewhere is not hidden."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders import StopAfter, refusal_message, tiny

from toeplens.training import Run, describe_history, plan_execution, train
from toeplens.training.environment import setup_of

pytestmark = pytest.mark.usefixtures("threads")
THIS_ENVIRONMENT = replace(setup_of(plan_execution("cpu", "off", "float32")), threads=1)


def steps(run: Run) -> list[tuple[int, int | None, int]]:
    return [(each.start, each.end, each.setup.threads) for each in run.history]


def test_a_run_resumed_elsewhere_records_both_environments(tmp_path: Path):
    torch.set_num_threads(1)
    first = train(tiny(), tmp_path, should_stop=StopAfter(1))
    assert (steps(first), first.history[0].setup) == ([(0, None, 1)], THIS_ENVIRONMENT)
    train(tiny(), tmp_path, should_stop=StopAfter(1))  # on the same set-up: the same segment
    torch.set_num_threads(2)
    run = train(tiny(), tmp_path)
    assert steps(run) == [(0, 2, 1), (2, 6, 2)]
    assert describe_history(run.history).startswith("steps 0-2 on cpu (")
    assert "2 thread(s)" in describe_history(run.history)
    assert json.loads((run.directory / "environment.json").read_text())["threads"] == 2


def test_lost_steps_are_removed_from_the_history(tmp_path: Path):
    """Killed on another set-up before its first checkpoint: the next session goes on from the old one."""
    torch.set_num_threads(1)
    run = train(tiny(), tmp_path, should_stop=StopAfter(2))
    checkpoint = (run.directory / "checkpoint.pt").read_bytes()
    torch.set_num_threads(2)
    train(tiny(), tmp_path, should_stop=StopAfter(1))
    (run.directory / "checkpoint.pt").write_bytes(checkpoint)
    torch.set_num_threads(1)
    assert steps(train(tiny(), tmp_path)) == [(0, 6, 1)]


def test_a_missing_history_is_accepted_and_a_damaged_one_refused(tmp_path: Path):
    run = train(tiny(), tmp_path)
    path = run.directory / "environment.json"
    content: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in content.items() if name != "history"}))
    assert run.history == []
    (row,) = content["history"]
    for damage in ("x", [{**row, "start": -1}], [{**row, "setup": {}}]):
        path.write_text(json.dumps({**content, "history": damage}))
        assert "environment.json is damaged" in refusal_message(lambda: run.history)


def test_a_gpu_random_state_is_preserved_while_the_run_is_on_a_cpu(tmp_path: Path):
    run = train(tiny(), tmp_path, should_stop=StopAfter(2))
    path = run.directory / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "cuda_rng": torch.arange(16, dtype=torch.uint8)}, path)
    train(tiny(), tmp_path, should_stop=StopAfter(1))
    assert torch.load(path, weights_only=True)["cuda_rng"].tolist() == list(range(16))
