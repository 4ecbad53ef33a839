"""Bits a byte against the length of a text, and the loss by position in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log10
from typing import Literal

from toeplens.engine.language import AtLength, Bits
from toeplens.ground.words import fixed
from toeplens.report.grid.language.cells import Cells, every, looks_of, record, times, trained_length, viewed
from toeplens.report.grid.look import Spread, Spreads, line, spreads
from toeplens.report.kit.blocks import Block, Panel, View
from toeplens.report.kit.canvas import Canvas, Look
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid

Part = Literal["end", "whole", "sliding", "gain"]
_PARTS: dict[Part, str] = {
    "end": "end of the text, read whole",
    "gain": "what the end loses by what stands before the last training length",
    "whole": "whole text, read whole",
    "sliding": "whole text, by a sliding window",
}
_UNIT = "bits a byte"
_ROOM = 0.15  # bits over the worst encoding at the training length, up to which the close-up shows
_LATER = 8  # positions that the second panel leaves out: of so little context all encodings make much the same
_Lines = list[tuple[Look, Spreads]]


def by_length(state: Grid) -> Block:
    """Bits a byte against length, a line an encoding; a view for each way of reading."""
    views, shown = [], set()
    for task, cells in every(state):
        looks = looks_of(state, cells)
        for part, title in _PARTS.items():
            lines = []
            for one in looks:
                rows = [(row.factor, getattr(row, part)) for cell in cells[one.key] for row in _rows(cell)]
                if found := spreads((factor, each.value) for factor, each in rows if each is not None):
                    lines.append((one, found))
            shown |= {one.key for one, _ in lines}
            views.append(View.of(_panels(lines, part), viewed(task, title), _counted(cells)))
    caption = (
        "How many bits a language model needs for a byte of documents that it was not trained on, against the length"
        " of the text, in training lengths; lower is better. A line is an encoding, the mean over its seeds; its "
        "band is the seeds’ range, and says nothing of other documents, on which all lines would be higher or lower "
        "together. The end of a text: the last half training length of each text, the same tokens at every length, "
        "so that a line’s rise is what the longer context costs. The whole text: all its tokens, which are other "
        "ones at each length; compare encodings with each other and with the window, not one length with another. "
        "The window is as long as training’s texts and moves by half of that. Press an encoding to hide or show it."
    )
    signs = [one.sign for one in looks_of(state, shown)]
    return Block("bits", "Bits a byte by length", caption, views, legend=signs)


def _rows(cell: CellResult) -> Sequence[AtLength]:
    found = record(cell, "bits", Bits)
    return () if found is None else found.lengths


def _panels(lines: _Lines, part: Part) -> list[Panel]:
    """All of it and, where some lines rise high, the lowest part by itself."""
    if not lines:
        return []
    unit = f"{_UNIT} lost" if part == "gain" else _UNIT
    panels = [Panel("All encodings", _drawn(lines, part, unit).figure())]
    means = [spread.mean for _, found in lines for _, spread in found]
    low, high = min(means), max(means)
    top = max(found[0][1].mean for _, found in lines) + _ROOM
    if high > top + _ROOM:
        canvas, room = _drawn(lines, part, unit), 0.06 * (top - low)
        canvas.y(unit, range=[low - room, top])
        panels.append(Panel("Close up", canvas.figure(), f"The same up to {fixed(top)}."))
    return panels


def _drawn(lines: _Lines, part: Part, unit: str) -> Canvas:
    canvas, factors = Canvas(320, left=56), sorted({at for _, found in lines for at, _ in found})
    if part == "gain":
        canvas.line_at(0)
    for one, found in lines:
        line(canvas, one, found, digits=3, places={at: f"{times(at)} × the length" for at in factors})
    canvas.x("times the training length", type="log", tickvals=factors, ticktext=[times(at) for at in factors])
    canvas.y(unit)
    return canvas


def _counted(cells: Cells) -> str:
    """From how many texts and documents the numbers come."""
    rows = [row for each in cells.values() for cell in each for row in _rows(cell) if row.texts]
    if not rows:
        return ""
    most = max(rows, key=lambda row: row.texts)
    few = (
        " Of so few documents levels say little; differences on the same tokens say more."
        if most.documents < 10
        else ""
    )
    return f"{most.texts} texts of {most.documents} documents, the same for all encodings that read them.{few}"


# ---- by position ----------------------------------------------------------------------------------------------------


def by_position(state: Grid) -> Block:
    """The loss of a token against where it stands, in bins that double; a line an encoding."""
    views, shown = [], set()
    for task, cells in every(state):
        lines = []
        for one in looks_of(state, cells):
            names = {at: name for cell in cells[one.key] for at, _, name in _bins(cell)}
            found = spreads((at, value) for cell in cells[one.key] for at, value, _ in _bins(cell))
            if found:
                lines.append((one, [(at, spread, names[at]) for at, spread in found]))
        shown |= {one.key for one, _ in lines}
        trained = trained_length(cells)
        panels = [_along(lines, trained, first) for first in (0, _LATER)]
        views.append(View.of([panel for panel in panels if panel], task, _counted(cells)))
    caption = (
        "How well a token is foretold, against its place in the longest texts that a model reads, read whole; lower is "
        "better. Places are taken together in bins that double: 1, 2, 3–4, 5–8 and so on. Means over seeds, bands "
        "their range. A line falls while more context helps; one that rises past the training length shows where the "
        "encoding fails. Tokens of one bin are not those of another, so small steps may be the texts’; all encodings "
        "read the same ones, but for one that reads less far, whose texts are the ends of the others’. Press an "
        "encoding to hide or show it."
    )
    signs = [one.sign for one in looks_of(state, shown)]
    return Block("positions", "Loss by position", caption, views, legend=signs)


_Bins = list[tuple[float, Spread, str]]  # each bin's middle, counted from 1, its loss, and its name


def _bins(cell: CellResult) -> list[tuple[float, float, str]]:
    found = record(cell, "bits", Bits)
    if found is None:
        return []
    made = []
    for (first, end), interval in zip(pairwise(found.edges.tolist()), found.positions, strict=True):
        name = f"position {end}" if end - first == 1 else f"positions {first + 1:,}–{end:,}"
        made.append(((first + 1 + end) / 2, interval.value, name))
    return made


def _along(lines: Sequence[tuple[Look, _Bins]], trained: int, first: float) -> Panel | None:
    """The lines from a position on."""
    lines = [(one, [each for each in found if each[0] > first]) for one, found in lines]
    lines = [(one, found) for one, found in lines if found]
    if not lines:
        return None
    canvas = Canvas(320, left=56)
    for one, found in lines:
        line(canvas, one, [each[:2] for each in found], digits=3, places={at: name for at, _, name in found})
    low, reach = lines[0][1][0][0], max(found[-1][0] for _, found in lines)
    canvas.line_at(trained, vertical=True)
    canvas.note("training length", x=log10(trained), y=1, yref="paper", xanchor="right", yanchor="top", xshift=-4)
    ticks = [4**power for power in range(12) if low / 2 <= 4**power <= 2 * reach]
    canvas.x("position of the token", type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks])
    canvas.y("bits a token")
    title = f"From position {first + 1:g} on" if first else "All positions"
    return Panel(title, canvas.figure())
