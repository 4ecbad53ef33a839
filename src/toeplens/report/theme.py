"""Colours and shapes of all charts, readable on a light and a dark page, and the Vega configuration of both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toeplens.utils.files import read_yaml

_THEME: dict[str, Any] = read_yaml(Path(__file__).with_name("theme.yaml"))
COLOURS: dict[str, str] = _THEME["colours"]
SHAPES: dict[str, str] = _THEME["shapes"]  # shape: the same marker as a character, for text and tables
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"


@dataclass(frozen=True)
class Style:
    """How one series looks in every chart: its title, colour and shape (a Vega symbol)."""

    title: str
    colour: str
    shape: str = "circle"

    @property
    def tint(self) -> str:
        """The colour, as tables read it."""
        return self.colour

    @property
    def glyph(self) -> str:
        """The shape as a character."""
        return SHAPES[self.shape]


def style(title: str, name: str = "", index: int = 0) -> Style:
    """The style of a series: that of ``name`` if it has its own, such as ``rope``; else that number ``index`` has."""
    named = _THEME["series"].get(name)
    colour, shape = named if named else _THEME["order"][index % len(_THEME["order"])]
    return Style(title, str(COLOURS.get(colour, colour)), shape)


def styles(titles: Iterable[tuple[str, str]]) -> dict[str, Style]:
    """Styles of series by name, from pairs of name and title; names without a style of their own take one in turn.

    Colours that no other series has come first.
    """
    pairs = list(titles)
    named = {name: style(title, name) for name, title in pairs if name in _THEME["series"]}
    used, colours = {(item.colour, item.shape) for item in named.values()}, {item.colour for item in named.values()}
    order = [(style("", index=index), index) for index in range(len(_THEME["order"]))]
    unused = [(item.colour in colours, index) for item, index in order if (item.colour, item.shape) not in used]
    cycle = [index for _, index in sorted(unused)] or [0]
    others = [(name, title) for name, title in pairs if name not in named]
    result = named | {name: style(title, index=cycle[n % len(cycle)]) for n, (name, title) in enumerate(others)}
    return {name: result[name] for name, _ in pairs}


def vega_config(*, dark: bool = False, font: str = _FONT) -> dict[str, Any]:
    """The Vega configuration of a chart on a light or a dark page; the background is transparent."""
    ink, faint, grid = _THEME["dark" if dark else "light"]["ink"]
    low, middle, high = _THEME["dark" if dark else "light"]["diverging"]
    title = {"titleColor": ink, "titleFontSize": 12, "titleFontWeight": 500}
    labels = {"labelColor": faint, "labelFontSize": 11}
    return {
        "background": "transparent",
        "font": font,
        "aria": False,
        "view": {"stroke": None, "continuousWidth": 420, "continuousHeight": 260},
        "axis": {**title, **labels, "gridColor": grid, "domainColor": grid, "tickColor": grid, "labelLimit": 240},
        "axisX": {"labelAngle": 0, "labelOverlap": True},
        "axisDiscrete": {"grid": False},
        "legend": {**title, **labels, "orient": "top", "labelLimit": 260, "titleLimit": 400, "symbolOpacity": 1},
        "header": {**title, **labels, "labelFontSize": 12, "labelFontWeight": 600, "labelColor": ink},
        "title": {"color": ink, "anchor": "start", "fontSize": 12, "subtitleColor": faint, "subtitleFontSize": 11},
        "text": {"color": ink, "fontSize": 11},
        "rule": {"color": faint},
        "point": {"filled": True, "size": 55, "opacity": 0.85},
        "line": {"strokeWidth": 2},
        "range": {
            "category": [
                COLOURS[name] for name in ("blue", "orange", "green", "pink", "purple", "red", "cyan", "brown")
            ],
            "diverging": [low, middle, high],
            "heatmap": [middle, high],
            "ramp": [middle, high],
        },
    }
