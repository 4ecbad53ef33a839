"""Make the pages of docs/gallery from the records, by the commands that docs/findings/gallery.md shows.

    python tools/gallery.py

`tests/docs/test_gallery.py` holds that they are what these commands make.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "docs" / "gallery"
RECORDS = ("laptop", "canonical", "smollm2", "language", "audit-smollm2")


def commands() -> dict[str, tuple[str, ...]]:
    """What makes each page, by its file."""
    return {f"{name}.html": ("report", f"results/{name}") for name in RECORDS}


def make(place: Path) -> None:
    """Make all of them in ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    for page, command in commands().items():
        subprocess.run([sys.executable, "-m", "toeplens", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        shutil.move(ROOT / command[1] / "report.html", place / page)


if __name__ == "__main__":
    make(PLACE)
    for path in sorted(PLACE.glob("*.html")):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.2f} MB")
