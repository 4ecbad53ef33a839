"""What a page holds compressed: the program that draws, and what is drawn.

Both are gzip in base64, unpacked by the browser before anything else, at once, so that a page is whole when it has
loaded (docs/decisions/04).
"""

from __future__ import annotations

import base64
import gzip
from functools import cache
from importlib.resources import files

from toeplens.ground.files import unzipped
from toeplens.ground.reading import LARGEST
from toeplens.version import __version__

FORMAT = 1  # of pages; another number wherever one is read or put together otherwise
MADE_BY = f"format {FORMAT}, toeplens {__version__}"  # in the head of every page
_VENDORED = "report/kit/vendored"
PLOTLY, PAKO = f"{_VENDORED}/plotly-cartesian.min.js.gz", f"{_VENDORED}/pako_inflate.min.js"  # tools/page_programs.py


def pack(text: str) -> str:
    """``text`` compressed, in letters that no element of a page ends at; the same each time."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def unpack(packed: str) -> str:
    """The inverse of `pack`; anything else raises `ValueError`."""
    return unzipped(base64.b64decode(packed, validate=True), LARGEST).decode()


@cache
def packed_plotly() -> str:
    """The program that draws, as `pack` gives it."""
    return base64.b64encode((files("toeplens") / PLOTLY).read_bytes()).decode()


def plotly() -> str:
    """The program that draws, to lie beside pages."""
    return unpack(packed_plotly())
