"""Each test that the page on faults names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "reliability.md").read_text("utf-8"))))


def test_the_page_names_tests():
    assert len(NAMED) > 20


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_the_page_names_is_there(file: str, name: str):
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE)
