"""Fetch the JavaScript libraries of the pages from the npm registry into src/toeplens/report/kit/vendored.

    python tools/page_programs.py

These are plotly's smallest bundle with heat maps, in the version of plotly.py, compressed, and pako's inflate, which
unpacks it in the browser. `tests/report/kit/test_dots.py` checks the versions.
"""

from __future__ import annotations

import gzip
import subprocess
import tarfile
import tempfile
from pathlib import Path

from plotly.offline import get_plotlyjs_version

PLACE = Path(__file__).resolve().parents[1] / "src" / "toeplens" / "report" / "kit" / "vendored"
PAKO = "2.2.0"
PROGRAMS = {
    "plotly-cartesian.min.js.gz": (f"plotly.js-cartesian-dist-min@{get_plotlyjs_version()}", "plotly-cartesian.min.js"),
    "pako_inflate.min.js": (f"pako@{PAKO}", "dist/pako_inflate.min.js"),
}


def main() -> None:
    """Write each program and its licence."""
    PLACE.mkdir(exist_ok=True)
    for name, (package, inner) in PROGRAMS.items():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True)
            (packed,) = Path(folder).glob("*.tgz")
            with tarfile.open(packed) as archive:
                archive.extractall(folder, filter="data")
            program = (Path(folder) / "package" / inner).read_bytes()
            licence = (Path(folder) / "package" / "LICENSE").read_bytes()
        compressed = gzip.compress(program, mtime=0) if name.endswith(".gz") else program
        (PLACE / name).write_bytes(compressed)
        (PLACE / f"{name.partition('.')[0]}.LICENSE").write_bytes(licence)
        print(f"{name}: {package}, {len(compressed):,} bytes")


if __name__ == "__main__":
    main()
