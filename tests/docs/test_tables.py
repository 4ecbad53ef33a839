"""The tables of docs/, what the package knows of the records, and the drawing of its imports are up to date."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from tests.builders import script

from toeplens.papers.deposit.measured import recorded

ROOT = Path(__file__).parents[2]


@pytest.mark.heavy
def test_they_are_what_the_records_say() -> None:
    assert list(script(ROOT / "tools" / "tables.py").outdated()) == [], "run python tools/tables.py"


def test_the_package_knows_the_records_verdicts() -> None:
    found = recorded()["task1-rope-best", "paper"]
    assert [(scale, seeds) for scale, seeds, _ in found] == [("desk", "up to 80 seeds"), ("laptop", "5 seeds")]
    assert found[0][2] == "fails"


def test_every_folder_of_results_is_described() -> None:
    text = (ROOT / "results" / "README.md").read_text("utf-8")
    rows = set(re.findall(r"^\| `([\w-]+)/` \|", text, re.MULTILINE))
    assert rows == {path.name for path in (ROOT / "results").iterdir() if path.is_dir()}


def test_the_drawing_follows_the_imports() -> None:
    """If not: python docs/images/architecture.py"""
    images = ROOT / "docs" / "images"
    made = runpy.run_path(str(images / "architecture.py"))["drawing"]()
    assert (images / "architecture.svg").read_text(encoding="utf-8") == made
