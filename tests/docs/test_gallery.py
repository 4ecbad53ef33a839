"""The gallery's pages are those of the records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.builders import script
from tests.report.reading import charts

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "docs" / "gallery"
BUDGET = 6.5e6  # bytes of the whole folder


def words(html: str) -> str:
    """A page without its compressed charts, which another version of zlib may compress differently."""
    return re.sub(r'(?<=id="charts">)[^<]*', "", html)


def test_the_gallery_shows_the_pages_that_are_there() -> None:
    told = set(
        re.findall(
            r"\(\.\./gallery/([a-z0-9-]+\.html)\)",
            (ROOT / "docs" / "findings" / "gallery.md").read_text(encoding="utf-8"),
        )
    )
    made = {f"{name}.html" for name in script(ROOT / "tools" / "gallery.py").RECORDS}
    assert made == {path.name for path in GALLERY.glob("*.html")} == told


def test_the_gallery_stays_small() -> None:
    assert sum(path.stat().st_size for path in GALLERY.iterdir()) < BUDGET


@pytest.mark.heavy
def test_the_pages_are_made_again(tmp_path: Path) -> None:
    script(ROOT / "tools" / "gallery.py").make(tmp_path)
    for made in sorted(tmp_path.glob("*.html")):
        new, old = (path.read_text(encoding="utf-8") for path in (made, GALLERY / made.name))
        assert charts(new) == charts(old), made.name
        assert words(new) == words(old), made.name
