"""Studies are carried out by one process at a time, and keep their time in work that has no units."""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path
from typing import Any

import pytest

from toeplens.engine import Limits
from toeplens.ground import InputError
from toeplens.papers import deposit as reproduce
from toeplens.papers import mathematics as theory
from toeplens.papers.mathematics import study as theory_study
from toeplens.studies import grid

RECORDED = Path(__file__).parents[3] / "results" / "theory" / "results.json"
OVER = Limits(device="cpu", deadline=0.0)
MADE: dict[str, Any] = {
    "reproduce": lambda out: reproduce.reproduce(out, scale="smoke", limits=OVER),
    "grid": lambda out: grid.study(grid.read_spec("canonical-smoke"), out, limits=OVER),
    "theory": lambda out: theory.check_theory(out, scale="smoke", seeds=1, limits=OVER),
}
GATHERED: dict[str, Any] = {"reproduce": reproduce.gather, "grid": grid.gather, "theory": theory.gather}


@pytest.mark.parametrize("kind", MADE)
def test_a_study_that_another_process_carries_out_is_read_and_not_written(kind: str, tmp_path: Path):
    MADE[kind](tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.json")}
    (tmp_path / "results.json").write_text("the other process's")
    with (tmp_path / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"^study: .* is being worked on by another process"):
            MADE[kind](tmp_path)
        assert GATHERED[kind](tmp_path).finished == 0
    assert (tmp_path / "results.json").read_text() == "the other process's"
    assert json.loads((tmp_path / "study.json").read_text()) == json.loads(before["study.json"])
    MADE[kind](tmp_path)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first experiment is a moment's work, the second never ends."""
    for name in theory_study.EXPERIMENTS:
        monkeypatch.setitem(theory_study.EXPERIMENTS, name, lambda seed: time.sleep(600) or {})
    recorded = json.loads(RECORDED.read_text())["records"]["contraction"][0]
    monkeypatch.setitem(theory_study.EXPERIMENTS, "contraction", lambda seed: recorded)


@pytest.mark.usefixtures("endless")
def test_an_experiment_is_left_when_its_time_is_up_and_the_finished_one_is_kept(tmp_path: Path):
    limits = Limits(device="cpu", deadline=time.time() + 1)
    began = time.monotonic()
    state = theory.check_theory(tmp_path, scale="smoke", seeds=1, workers=1, limits=limits)
    assert time.monotonic() - began < 600
    assert state.finished == 1
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["contraction-42.json"]
