"""Make the pages of docs/gallery from the records, by the commands that docs/findings/gallery.md shows.

    python tools/gallery.py

The pages share one copy of plotly.js. `tests/docs/test_gallery.py` limits their size and compares them with what these
commands make.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from toeplens.report.card import PLOTLY
from toeplens.report.kit.page import plotly

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "docs" / "gallery"
RECORDS = ("desk", "laptop", "canonical", "smollm2", "language", "audit-smollm2")


def commands() -> dict[str, tuple[str, ...]]:
    """The command that makes each page, by file name."""
    return {f"{name}.html": ("report", f"results/{name}") for name in RECORDS}


def shared(page: str) -> str:
    """A page that loads plotly from the file next to it instead of containing it."""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>\n?', "", page)
    inside = re.compile(r'<script type="text/plain" id="plotly">[^<]*</script>')
    assert inside.search(page), "the page does not contain plotly"
    return inside.sub(f'<script src="{PLOTLY}"></script>', page)


def make(place: Path) -> None:
    """Make all pages in ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    (place / PLOTLY).write_text(plotly(), "utf-8")
    for page, command in commands().items():
        subprocess.run([sys.executable, "-m", "toeplens", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        made = ROOT / command[1] / "report.html"
        (place / page).write_text(shared(made.read_text("utf-8")), "utf-8")
        made.unlink()


if __name__ == "__main__":
    make(PLACE)
    for path in sorted(PLACE.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.2f} MB")
