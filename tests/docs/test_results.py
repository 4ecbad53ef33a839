"""results/README.md names what is there: a folder a row, and the tests that hold the records."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "results" / "README.md").read_text()


def test_every_folder_has_a_row_and_every_row_a_folder() -> None:
    rows = set(re.findall(r"^\| `([\w-]+)/` \|", TEXT, re.MULTILINE))
    assert rows == {path.name for path in (ROOT / "results").iterdir() if path.is_dir()}


def test_the_tests_that_it_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", TEXT)
    assert len(named) == 7
    assert [name for name in named if not (ROOT / name).is_file()] == []
