"""Make the pictures of the documentation that are charts of the records' pages.

python tools/pictures.py
"""

from __future__ import annotations

from pathlib import Path

import vl_convert

from toeplens.cli.studies import page_in
from toeplens.report.exporting import draw_figure

ROOT = Path(__file__).resolve().parents[1]
_SCALE = 1.5  # of 96 dots per inch
IMAGES = ROOT / "docs" / "images"
PICTURES = {  # record and chart by name
    "audit": ("audit-smollm2", "map"),
    "heads": ("laptop", "heads-by-layer"),
    "language-lengths": ("language", "bits"),
    "plane": ("canonical", "plane"),
    "real-smollm2-bands": ("smollm2", "bands"),
    "real-smollm2-frequencies": ("smollm2", "frequencies"),
    "scan": ("canonical", "scan"),
}


def main() -> None:
    """Write the pictures, two columns wide."""
    for name, (record, chart) in PICTURES.items():
        figures = {figure.id: figure for figure in page_in(ROOT / "results" / record).figures}
        picture = draw_figure(figures[chart], "svg", 2).decode()
        (IMAGES / f"{name}.png").write_bytes(vl_convert.svg_to_png(picture, scale=_SCALE))
        print(name)


if __name__ == "__main__":
    main()
