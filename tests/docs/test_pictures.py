"""The pictures of docs/real-models.md are of the records as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.builders import script

Image = pytest.importorskip("PIL.Image")

ROOT = Path(__file__).resolve().parents[2]
PICTURES = script(ROOT / "tools" / "pictures.py").PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_of_its_record(name: str) -> None:
    """By the digest that it holds; `python tools/pictures.py` makes it again."""
    with Image.open(ROOT / "docs" / "images" / f"{name}.png") as picture:
        assert picture.info["record"] == PICTURES[name].digest
        assert 1000 <= picture.width <= 2100


def test_the_page_shows_them() -> None:
    shown = re.findall(r"images/(real-\S+)\.png", (ROOT / "docs" / "real-models.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(PICTURES)
