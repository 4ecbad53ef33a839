"""The map of an audit's heads, which its page's script draws, as a plot: a panel a column of numbers."""

from __future__ import annotations

import json
from typing import Any

from toeplens.ground.words import fixed
from toeplens.report.exporting.figures import Figure, Panel
from toeplens.report.exporting.pages import script_in
from toeplens.report.kit.canvas import Canvas, untagged

_CELLS = 2**20  # heads of a map at most
_ROOM = 16  # heads up to which a cell has room for its number


def read_maps(html: str) -> list[Figure]:
    """A figure a column of an audit's map; none on the pages of anything else, or of two audits side by side."""
    sheets = script_in(html, "sheets")
    content = json.loads(sheets) if sheets else {"sheets": []}
    if len(content["sheets"]) != 1:
        return []
    (sheet,) = content["sheets"]
    return [_figure(sheet, column) for column in content["columns"] if column["name"] in sheet["values"]]


def _figure(sheet: dict[str, Any], column: dict[str, Any]) -> Figure:
    name, ends = column["name"], sheet["ends"][column["name"]]
    made = Figure(f"map-{name.replace('_', '-')}", 1, f"Layers by heads: {column['title']}", column["about"])
    made.low, made.high, made.half = ends["low"], ends["high"], ends["half"]
    for number, place in enumerate(sheet["places"]):
        plot = _plot(sheet, name, number, place, column["digits"])
        title = f"{column['title']}, {place['title']}" if len(sheet["places"]) > 1 else column["title"]
        made.panels.append(Panel(f"{made.id}-{number}", plot, title=title))
    return made


def _plot(sheet: dict[str, Any], name: str, number: int, place: dict[str, Any], digits: int) -> dict[str, Any]:
    """Tones by layer and head: above 0 warm colours, below it cool ones; empty where nothing is known."""
    rows = {layer: row for row, layer in enumerate(place["layers"])}
    if not 0 < len(rows) * place["heads"] <= _CELLS:
        raise ValueError(f"{place['heads']} heads in each of {len(rows)} layers")
    tones: list[list[float | None]] = [[None] * place["heads"] for _ in rows]
    told = [[""] * place["heads"] for _ in rows]
    for at, which in enumerate(sheet["place"]):
        if which == number:
            row, head = rows[sheet["layer"][at]], sheet["head"][at]
            tones[row][head] = sheet["tones"][name][at]
            value = sheet["values"][name][at]
            told[row][head] = "" if value is None else fixed(value, min(digits, 2))
    size = 20 if len(rows) <= _ROOM else 12
    canvas = Canvas(size * len(rows) + 44, left=44, right=6, top=4, bottom=40)
    numbers = told if place["heads"] <= _ROOM and size > 12 and digits <= 3 else None
    heads = [str(head + 1) for head in range(place["heads"])]
    layers = [f"L{layer + 1}" for layer in place["layers"]]
    canvas.heat(tones, heads, layers, 1.0, "", gap=1, numbers=numbers, size=9)
    axis: dict[str, Any] = {"showgrid": False, "type": "category", "ticks": ""}
    every, down = (max(1, -(-len(each) // most)) for each, most in ((heads, 16), (layers, 24)))
    canvas.x(untagged("head"), tickvals=heads[::every], **axis)
    canvas.y("", tickvals=layers[::down], autorange="reversed", **axis)
    return canvas.figure().to_plotly_json()
