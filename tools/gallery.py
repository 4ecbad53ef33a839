"""Make the pages of docs/gallery from the records, as `toeplens report` does.

    python tools/gallery.py

The pages share one copy of the program that draws their charts. `tests/docs/test_gallery.py` limits their size and
compares them with what this makes.
"""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path

from toeplens.cli.studies import page_in
from toeplens.report.page import SCRIPT, drawing_program

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "docs" / "gallery"
RECORDS = ("desk", "laptop", "canonical", "smollm2", "language", "audit-smollm2")


def make(place: Path) -> None:
    """Make all pages in ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    (place / SCRIPT).write_text(drawing_program(), "utf-8")
    with chdir(ROOT):  # a page names the directory of its record
        for name in RECORDS:
            page = page_in(Path("results") / name).html(script=SCRIPT)
            (place / f"{name}.html").write_text(page, "utf-8")


if __name__ == "__main__":
    make(PLACE)
    for path in sorted(PLACE.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.2f} MB")
