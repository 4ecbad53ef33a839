"""A study killed at random moments loses nothing, does nothing twice and ends the same."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest
from tests.builders import script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def endurance() -> ModuleType:
    return script(ROOT / "benchmarks" / "endurance.py")


@pytest.mark.heavy
def test_three_kills_lose_repeat_and_change_nothing(endurance: ModuleType, tmp_path: Path):
    found = endurance.endure(tmp_path, kills=3, seed=1, reach=8.0, say=lambda text: None)
    assert found.kills == 3
    assert found.cells >= 3
    assert (found.lost, found.twice, found.different) == (0, 0, 0)


def test_what_is_lost_or_done_twice_is_seen(endurance: ModuleType, tmp_path: Path):
    for name in ("whole", "gone", "again", "half"):
        (tmp_path / name).mkdir()
        for record in endurance.RECORDS[: 2 if name == "half" else None]:
            (tmp_path / name / record).write_text("{}")
    (tmp_path / "begun").mkdir()
    book = endurance.Book(tmp_path)
    book.look()
    assert book.cut == {"half", "begun"}
    assert book.lost() == book.twice() == []
    (tmp_path / "gone" / "result.json").unlink()
    (tmp_path / "new").write_text("{}")
    os.replace(tmp_path / "new", tmp_path / "again" / "ablation.json")
    for record in endurance.RECORDS[2:]:
        (tmp_path / "half" / record).write_text("{}")
    book.look()
    assert book.lost() == ["gone"]
    assert set(book.twice()) == {"gone", "again"}
