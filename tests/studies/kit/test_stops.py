"""Studies are carried out by one process at a time, and begin nothing once it is time to stop."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toeplens.engine import Limits
from toeplens.ground import InputError
from toeplens.ground.signals import stop_on_signals
from toeplens.papers import mathematics as theory
from toeplens.papers.mathematics import study as theory_study
from toeplens.studies import grid

RECORDED = Path(__file__).parents[3] / "results" / "theory" / "results.json"
OVER = Limits(device="cpu", deadline=0.0)


def test_a_study_that_another_process_carries_out_is_read_and_not_written(tmp_path: Path):
    def made() -> grid.Grid:
        return grid.study(grid.read_spec("canonical-smoke"), tmp_path, limits=OVER)

    made()
    before = (tmp_path / "study.json").read_bytes()
    (tmp_path / "results.json").write_text("the other process's")
    with (tmp_path / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"^study: .* is in use by another process"):
            made()
        assert grid.gather(tmp_path).finished == 0
    assert (tmp_path / "results.json").read_text() == "the other process's"
    assert json.loads((tmp_path / "study.json").read_text()) == json.loads(before)
    made()


@pytest.mark.parametrize("over", ["deadline", "signal"])
def test_no_experiment_is_begun_once_it_is_time_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: str):
    """The one that was begun is finished and kept."""
    limits = Limits(device="cpu", deadline=time.time() + 3600)
    recorded = json.loads(RECORDED.read_text())["records"]["contraction"][0]

    def made(seed: int) -> Any:
        if over == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            monkeypatch.setattr(Limits, "late", lambda self, ahead=0.0: True)
        return recorded

    for name in theory_study.EXPERIMENTS:
        monkeypatch.setitem(theory_study.EXPERIMENTS, name, lambda seed: pytest.fail("it was begun"))
    monkeypatch.setitem(theory_study.EXPERIMENTS, "contraction", made)
    with stop_on_signals() as stopped:
        limits = replace(limits, should_stop=stopped)
        state = theory.check_theory(tmp_path, scale="smoke", seeds=1, workers=1, limits=limits)
    assert state.finished == 1
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["contraction-42.json"]
