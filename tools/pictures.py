"""Make the pictures of docs/findings that are figures of the records' pages, as a browser shows them.

python tools/pictures.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "docs" / "images"
_WAIT = 15_000  # milliseconds


class Picture(NamedTuple):
    """A part of a record's page, by what selects it, in a window of some width."""

    record: str
    part: str
    width: int


PICTURES = {
    "real-smollm2-frequencies": Picture("smollm2", "#figure-frequencies .panels", 1280),
    "real-smollm2-bands": Picture("smollm2", "#figure-bands", 560),
    "language-lengths": Picture("language", "#figure-bits", 1000),
    "scan": Picture("canonical", "#figure-scan", 1000),
}


def main() -> None:
    """Write each page, and each picture of it."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    for record in {picture.record for picture in PICTURES.values()}:
        subprocess.run([sys.executable, "-m", "toeplens", "report", f"results/{record}"], cwd=ROOT, check=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, picture in PICTURES.items():
            page = browser.new_page(
                viewport={"width": picture.width, "height": 900}, device_scale_factor=2, color_scheme="light"
            )
            page.goto((ROOT / "results" / picture.record / "report.html").as_uri())
            part = page.locator(picture.part)
            part.scroll_into_view_if_needed()
            part.locator(".main-svg").first.wait_for(timeout=_WAIT)  # plots are drawn when they come near
            shot = part.screenshot(timeout=_WAIT, style=".save, figcaption { display: none }")
            drawn = Image.open(BytesIO(shot)).convert("RGB").quantize(128, Image.Quantize.MEDIANCUT)
            drawn.save(PLACE / f"{name}.png", optimize=True)
            page.close()
            print(name)
        browser.close()


if __name__ == "__main__":
    main()
