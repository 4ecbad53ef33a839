"""The drawing of the house is of the house as it stands."""

from __future__ import annotations

import runpy
from pathlib import Path

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def test_the_drawing_follows_the_imports() -> None:
    """If not: python docs/images/architecture.py"""
    made = runpy.run_path(str(IMAGES / "architecture.py"))["drawing"]()
    assert (IMAGES / "architecture.svg").read_text(encoding="utf-8") == made
