"""Make the pages of docs/gallery from the records, as `toeplens report` does.

    python tools/gallery.py

The pages share one copy of the program that draws their charts. `tests/docs/test_gallery.py` limits their size and
compares them with what this makes.
"""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path

from toeplens.cli.studies import page_in
from toeplens.report.page import SCRIPT, vega_script

ROOT = Path(__file__).resolve().parents[1]
GALLERY = ROOT / "docs" / "gallery"
RECORDS = ("desk", "laptop", "canonical", "smollm2", "language", "audit-smollm2")


def make(folder: Path) -> None:
    """Make all pages in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCRIPT).write_text(vega_script(), "utf-8")
    with chdir(ROOT):  # a page names the directory of its record
        for name in RECORDS:
            page = page_in(Path("results") / name).html(script=SCRIPT)
            (folder / f"{name}.html").write_text(page, "utf-8")


if __name__ == "__main__":
    make(GALLERY)
    for path in sorted(GALLERY.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.2f} MB")
