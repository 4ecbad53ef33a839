"""The plane of positional and symbolic shares: its ground, and how heads are marked on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from toeplens.report.kit.blocks import Sign
from toeplens.report.kit.canvas import Canvas, untagged

_SMALLEST, _LARGEST = 5.0, 20.0  # pixels across: of a head without which nothing is lost, and everything


def triangle() -> Canvas:
    canvas = Canvas(380, left=46, right=6, top=4, bottom=40)
    axis = {"range": [-0.1, 1.06], "tickvals": [0, 0.25, 0.5, 0.75, 1], "constrain": "domain"}
    canvas.x("positional share", **axis)
    canvas.y("symbolic share", scaleanchor="x", **axis)
    canvas.straight([0, 1, 0, 0], [0, 0, 1, 0], dash="solid")
    canvas.note("<b>positional</b>", x=1.03, y=-0.06, xanchor="right")
    canvas.note("<b>symbolic</b>", x=0.08, y=1.02, xanchor="left")
    canvas.note("<b>interaction</b>", x=0, y=-0.06, xanchor="left")
    return canvas


@dataclass(frozen=True)
class Look:
    """An encoding or a task as the page shows it.

    key            its label in the study; its entry in a legend, and its traces' meta
    tint           colour
    symbol, glyph  its marker, by plotly's name and as a character
    """

    key: str
    title: str
    tint: str
    symbol: str
    glyph: str

    def add(self, canvas: Canvas, xs: Iterable[float], ys: Iterable[float], hover: str, **trace: Any) -> None:
        """Marks on a canvas that its entry in the legend switches; ``marker`` says how they differ from its own."""
        marker = {"color": self.tint, "symbol": self.symbol} | trace.pop("marker")
        canvas.marks(xs, ys, marker, hover, name=untagged(self.title), meta=self.key, **trace)

    def heads(self, lost: Iterable[float]) -> dict[str, Any]:
        """Markers of heads, the larger the more accuracy is lost without the head."""
        sizes = [round(_SMALLEST + (_LARGEST - _SMALLEST) * min(1.0, drop) ** 0.5, 1) for drop in lost]
        return {"color": self.tint, "symbol": self.symbol, "size": sizes, "opacity": 0.6, "line": {"width": 0}}

    @property
    def sign(self) -> Sign:
        """Its entry in a legend."""
        return Sign(self.key, self.title, self.tint, self.glyph)
