"""The tables of docs/, what the package knows of the records, and the drawing of its imports are up to date."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from tests.builders import load_script

from toeplens.papers.deposit.measures import recorded_verdicts

ROOT = Path(__file__).parents[2]


@pytest.mark.heavy
def test_the_tables_match_the_records() -> None:
    assert list(load_script(ROOT / "tools" / "tables.py").outdated()) == [], "run python tools/tables.py"


def test_the_packaged_verdicts_match_the_records() -> None:
    actual = recorded_verdicts()["task1-rope-best", "paper"]
    assert [(scale, seeds) for scale, seeds, _ in actual] == [("desk", "up to 80 seeds"), ("laptop", "5 seeds")]
    assert actual[0][2] == "fails"


def test_every_folder_of_results_is_described() -> None:
    text = (ROOT / "results" / "README.md").read_text("utf-8")
    rows = set(re.findall(r"^\| `([\w.-]+)/` \|", text, re.MULTILINE))
    assert rows == {path.name for path in (ROOT / "results").iterdir() if path.is_dir()}


def test_the_architecture_drawing_matches_the_imports() -> None:
    """If not: python docs/images/architecture.py"""
    images = ROOT / "docs" / "images"
    made = runpy.run_path(str(images / "architecture.py"))["drawing"]()
    assert (images / "architecture.svg").read_text(encoding="utf-8") == made
