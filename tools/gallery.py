"""Make the pages of docs/gallery from the records.

    python tools/gallery.py

The pages are those of `toeplens report`, but share one copy of the drawing program. `tests/docs/test_gallery.py` limits
their size and makes them again.
"""

from __future__ import annotations

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
    for name in RECORDS:
        (place / f"{name}.html").write_text(page_in(ROOT / "results" / name).html(script=SCRIPT), "utf-8")


if __name__ == "__main__":
    make(PLACE)
    for path in sorted(PLACE.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.2f} MB")
