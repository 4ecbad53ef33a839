"""The gallery's pages are those of the records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.builders import load_script
from tests.report.reading import charts

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "docs" / "gallery"
BUDGET = 6.5e6  # bytes of the whole folder


def text_of(html: str) -> str:
    """A page without its compressed charts, which another version of zlib may compress differently."""
    return re.sub(r'(?<=id="charts">)[^<]*', "", html)


def test_the_gallery_lists_every_page() -> None:
    told = set(
        re.findall(
            r"\(\.\./gallery/([a-z0-9-]+\.html)\)",
            (ROOT / "docs" / "findings" / "gallery.md").read_text(encoding="utf-8"),
        )
    )
    made = {f"{name}.html" for name in load_script(ROOT / "tools" / "gallery.py").RECORDS}
    assert made == {path.name for path in GALLERY.glob("*.html")} == told


def test_the_gallery_stays_small() -> None:
    assert sum(path.stat().st_size for path in GALLERY.iterdir()) < BUDGET


@pytest.mark.heavy
def test_the_pages_are_reproducible(tmp_path: Path) -> None:
    load_script(ROOT / "tools" / "gallery.py").make(tmp_path)
    for page in sorted(tmp_path.glob("*.html")):
        new, old = (path.read_text(encoding="utf-8") for path in (page, GALLERY / page.name))
        assert charts(new) == charts(old), page.name
        assert text_of(new) == text_of(old), page.name
