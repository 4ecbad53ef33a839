"""A study killed at random moments loses nothing, does nothing twice and ends the same."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest
from tests.builders import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def endurance() -> ModuleType:
    return load_script(ROOT / "benchmarks" / "endurance.py")


@pytest.mark.heavy
def test_three_kills_lose_no_work_and_change_no_result(endurance: ModuleType, tmp_path: Path):
    actual = endurance.run_endurance(tmp_path, kills=3, seed=1, reach=8.0, say=lambda text: None)
    assert actual["kills"] == 3
    assert actual["cells"] >= 3
    assert [actual[name] for name in ("lost", "twice", "different")] == [0, 0, 0]


def test_lost_or_repeated_work_is_detected(endurance: ModuleType, tmp_path: Path):
    for name in ("whole", "gone", "again", "half"):
        (tmp_path / name).mkdir()
        for record in endurance.RECORDS[: 2 if name == "half" else None]:
            (tmp_path / name / record).write_text("{}")
    (tmp_path / "begun").mkdir()
    tracker = endurance.FileTracker(tmp_path)
    tracker.scan()
    assert tracker.cut == {"half", "begun"}
    assert tracker.lost_cells() == tracker.repeated_cells() == []
    (tmp_path / "gone" / "result.json").unlink()
    (tmp_path / "new").write_text("{}")
    os.replace(tmp_path / "new", tmp_path / "again" / "ablation.json")
    for record in endurance.RECORDS[2:]:
        (tmp_path / "half" / record).write_text("{}")
    tracker.scan()
    assert tracker.lost_cells() == ["gone"]
    assert set(tracker.repeated_cells()) == {"gone", "again"}
