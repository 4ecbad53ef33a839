"""Compressed parts of a page: the plotly script and the figures.

Both are base64-encoded gzip. The browser unpacks them first, synchronously, so a loaded page is complete
(docs/decisions/04-studies-and-pages.md).
"""

from __future__ import annotations

import base64
import gzip
from functools import cache
from importlib.resources import files

from toeplens.ground.files import unzipped
from toeplens.ground.reading import LARGEST
from toeplens.version import __version__

FORMAT = 1  # page format; increased if pages are read or built differently
MADE_BY = f"format {FORMAT}, toeplens {__version__}"  # in the head of every page
_VENDORED = "report/kit/vendored"
PLOTLY, PAKO = f"{_VENDORED}/plotly-cartesian.min.js.gz", f"{_VENDORED}/pako_inflate.min.js"  # tools/page_programs.py


def pack(text: str) -> str:
    """``text`` compressed, as base64. Deterministic."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def unpack(packed: str) -> str:
    """The inverse of `pack`; anything else raises `ValueError`."""
    return unzipped(base64.b64decode(packed, validate=True), LARGEST).decode()


@cache
def packed_plotly() -> str:
    """The plotly script, packed."""
    return base64.b64encode((files("toeplens") / PLOTLY).read_bytes()).decode()


def plotly() -> str:
    """The plotly script, as a separate file for several pages."""
    return unpack(packed_plotly())
