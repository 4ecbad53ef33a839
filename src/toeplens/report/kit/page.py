"""The shell of a page: one HTML file that needs nothing else, no network, no server, no fonts."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from toeplens.ground.words import duration, percent, points
from toeplens.report.kit.blocks import Block
from toeplens.report.kit.colours import HEAT

PAGE = "report.html"


@cache
def environment() -> Environment:
    """Every page's template by its place below ``toeplens/``, with what they all call."""
    loader = PackageLoader("toeplens", "")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.globals |= {"heat": HEAT, "asset": _asset}
    made.filters |= {"percent": percent, "points": points, "duration": duration}
    return made


def _asset(file: str) -> Markup:
    """A style sheet or a script by its place below ``toeplens/``, as it is."""
    return Markup(inline((files("toeplens") / file).read_text(encoding="utf-8")))


def inline(script: str) -> str:
    """A script that cannot end its own element."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def script_json(figures: dict[str, go.Figure]) -> Markup:
    """Plots by the id of their place, as JSON in which nothing can end the element that holds it."""
    plots = {place: figure.to_plotly_json() for place, figure in figures.items()}
    text = json.dumps(plots, separators=(",", ":"), allow_nan=False, default=list)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def places(block: Block) -> list[tuple[str, Any]]:
    """The panels of a figure with the ids of their places on the page."""
    return [
        (f"{block.id}-{v}-{g}-{p}", panel)
        for v, view in enumerate(block.views)
        for g, group in enumerate(view.groups)
        for p, panel in enumerate(group.panels)
    ]
