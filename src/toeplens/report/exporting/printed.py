"""A panel as a paper prints it: as wide as its columns, in eight points, on white, with a title and legend of its own.

Sizes within are the page's pixels, of which `PIXELS` make an inch, so that the page's twelve pixels of type are eight
points and all else keeps its proportion to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from toeplens.report.exporting.figures import Figure, Panel, Sign
from toeplens.report.kit.canvas import untagged
from toeplens.report.kit.colours import FAMILIES, HEAT, OTHER, PALETTE, head_look

INCHES = {1: 3.25, 2: 6.75}  # by columns of a page that has two
PIXELS = 108  # an inch: 12 of them are 8 points
_INK, _FAINT = "#1b1f24", "#4a525e"
_FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
_LETTER = 7.0  # pixels, of type of 12 and in the mean
_BAR = 84  # how long the scale of colours is
_TITLE, _RAMP, _LINE, _MARK = 22, 20, 18, 52  # heights; what a legend's entry needs beside its words
_SYMBOLS = {glyph: symbol for _, symbol, glyph in (*FAMILIES.values(), OTHER, *PALETTE, *map(head_look, range(16)))}


@dataclass(frozen=True)
class Printed:
    """A panel's plot, and how large it is, in the page's pixels."""

    plot: dict[str, Any]
    width: int
    height: int

    @property
    def inches(self) -> tuple[float, float]:
        """How wide and how high it is on paper."""
        return self.width / PIXELS, self.height / PIXELS


def columns_of(figure: Figure) -> int:
    """Of a paper's two columns, those that a panel of the figure needs: both where the page gives it all its width."""
    return 2 if figure.width == "full" else 1


def printed(figure: Figure, panel: Panel, columns: int | None = None) -> Printed:
    """A panel of a figure for a paper.

    columns  1 or 2; as many as it needs, unless given
    """
    width = round(INCHES[columns or columns_of(figure)] * PIXELS)
    data = [{**trace, "showlegend": False} for trace in panel.plot["data"]]
    layout = dict(panel.plot["layout"])
    height = int(layout.get("height") or width / 1.84)
    top = int(layout.get("margin", {}).get("t", 8))
    title = untagged(panel.title) if len(figure.panels) > 1 else ""
    signs = _shown([*figure.legend, *panel.legend], data)
    ramped = bool(figure.low or figure.high) and "coloraxis" in layout
    lines = _lines(signs, width)
    above = (_TITLE if title else 4) + (lines * _LINE + 6 if signs else 0) + (_RAMP if ramped else 0)
    room = height - top - int(layout.get("margin", {}).get("b", 40))
    height += above
    layout |= {
        "width": width,
        "height": height,
        "autosize": False,
        "margin": {**layout.get("margin", {}), "t": top + above},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "font": {**layout.get("font", {}), "family": _FONT, "color": _INK},
        "showlegend": bool(signs),
    }
    for name in [name for name in layout if name.startswith(("xaxis", "yaxis"))]:
        layout[name] = {"automargin": True, "linecolor": _FAINT, **layout[name]}
    if title:
        place = {"x": 0, "xanchor": "left", "xref": "container", "y": 1, "yanchor": "top", "yref": "container"}
        words = {"text": f"<b>{_wrapped(title, width)}</b>", "font": {"size": 12, "color": _INK}}
        layout["title"] = {**words, **place, "pad": {"l": 4, "t": 4}}
    if signs:
        data += [_entry(sign) for sign in signs]
        layout["legend"] = {
            "orientation": "h",
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1 - (_TITLE if title else 2) / height,
            "yref": "container",
            "yanchor": "top",
            "font": {"size": 11},
            "itemsizing": "constant",
            "traceorder": "normal",
            "tracegroupgap": 0,
            "bgcolor": "rgba(0,0,0,0)",
        }
    if "coloraxis" in layout:
        _colour(layout, figure, top, max(1, room), _across(layout, width), ramped=ramped)
    return Printed({"data": data, "layout": layout}, width, height)


def _shown(signs: Sequence[Sign], data: Sequence[Mapping[str, Any]]) -> list[Sign]:
    """Of a legend's entries those that the panel has a trace of, and those that are no trace's."""
    there = {trace.get("meta") for trace in data}
    return [sign for sign in signs if sign.title and (not sign.key or sign.key in there)]


def _lines(signs: Sequence[Sign], width: int) -> int:
    longest = max((len(sign.title) for sign in signs), default=0)
    return ceil(len(signs) / max(1, int(width / (longest * _LETTER * 11 / 12 + _MARK)))) if signs else 0


def _entry(sign: Sign) -> dict[str, Any]:
    """A trace of no points that stands in the legend as the page's entry looks."""
    tint = sign.tint if sign.tint and "var(" not in sign.tint else _FAINT
    name = {"name": untagged(sign.title), "showlegend": True, "hoverinfo": "skip"}
    points: dict[str, Any] = {"type": "scatter", "x": [None], "y": [None], **name}
    if sign.dash:
        return {**points, "mode": "lines", "line": {"color": tint, "dash": sign.dash, "width": 2}}
    if sign.pattern:
        filled = {"color": tint, "pattern": {"shape": sign.pattern, "fgcolor": "white", "size": 5}}
        return {"type": "bar", "x": [None], "y": [None], **name, "marker": filled}
    symbol = _SYMBOLS.get(sign.glyph, "circle") if sign.glyph else "square"
    return {**points, "mode": "markers", "marker": {"color": tint, "symbol": symbol, "size": 8}}


def _colour(layout: dict[str, Any], figure: Figure, top: int, room: int, across: float, *, ramped: bool) -> None:
    """The page's light colours, and their scale above the panel, between the words of its ends."""
    low, middle, high = HEAT["light"]
    scale = [[0, low], [0.5, middle], [1, high]]
    axis = {**layout["coloraxis"], "colorscale": scale, "showscale": ramped}
    if figure.half:
        axis |= {"cmin": 0, "colorscale": [[0, middle], [1, high]]}
    if ramped:
        above = top + _RAMP / 2 - 4
        beside = (
            len(figure.high) * _LETTER * 11 / 12 + 6
        )  # from the right: the high end's words, the bar, the low end's
        bar = {"orientation": "h", "thickness": 7, "lenmode": "pixels", "len": _BAR, "xpad": 0, "ypad": 0}
        bar |= {"x": 1 - beside / across, "xanchor": "right", "y": 1 + above / room, "yanchor": "middle"}
        axis["colorbar"] = bar | {"ticks": "", "showticklabels": False, "outlinewidth": 0}
        said = {"showarrow": False, "xref": "paper", "yref": "paper", "y": 1, "yshift": above, "yanchor": "middle"}
        said |= {"font": {"size": 11}, "xanchor": "right"}
        ends = (
            {"text": untagged(figure.high), "x": 1},
            {"text": untagged(figure.low), "x": 1 - (beside + _BAR + 6) / across},
        )
        layout["annotations"] = [*layout.get("annotations", []), *({**said, **end} for end in ends)]
    layout["coloraxis"] = axis


def _across(layout: Mapping[str, Any], width: int) -> float:
    """How wide the plot is between its margins, about: the left one grows with the longest name of a row."""
    margin, rows = layout.get("margin", {}), layout.get("yaxis", {}).get("ticktext") or ("",)
    left = max(margin.get("l", 40), 18 + _LETTER * max(len(str(row)) for row in rows))
    return max(60.0, width - left - margin.get("r", 10))


def _wrapped(text: str, width: int) -> str:
    """A title that fits its line; it is cut where it does not."""
    most = int(width / (_LETTER * 1.05))
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"
