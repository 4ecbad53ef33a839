"""Bits per byte by text length, and loss by position in the text."""

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
    "end": "end of the text",
    "gain": "increase at the end due to text before the last training length",
    "whole": "whole text",
    "sliding": "whole text, sliding window",
}
_UNIT = "bits per byte"
_ROOM = 0.15  # upper end of the close-up: bits above the worst encoding at the training length
_LATER = 8  # positions left out of the second panel; with so little context all encodings are similar
_Lines = list[tuple[Look, Spreads]]


def by_length(state: Grid) -> Block:
    """Bits per byte by length, a line per encoding; a view per evaluation mode."""
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
        "Bits per byte on held-out documents by text length, in multiples of the training length; lower is better. One "
        "line per encoding, mean over seeds; bands show the range over seeds, not over documents. End of the text: the "
        "last half training length, the same tokens at every length, so a rising line shows the harm of a longer "
        "context. Whole text: all tokens, which differ between lengths; compare encodings, not lengths. Sliding "
        "window: a window of the training length that moves by half its size. Click an encoding to hide or show it."
    )
    signs = [one.sign for one in looks_of(state, shown)]
    return Block("bits", "Bits per byte by length", caption, views, legend=signs)


def _rows(cell: CellResult) -> Sequence[AtLength]:
    found = record(cell, "bits", Bits)
    return () if found is None else found.lengths


def _panels(lines: _Lines, part: Part) -> list[Panel]:
    """All lines and, if some rise high, a close-up of the lowest part."""
    if not lines:
        return []
    unit = f"increase ({_UNIT})" if part == "gain" else _UNIT
    panels = [Panel("All encodings", _drawn(lines, part, unit).figure())]
    means = [spread.mean for _, found in lines for _, spread in found]
    low, high = min(means), max(means)
    top = max(found[0][1].mean for _, found in lines) + _ROOM
    if high > top + _ROOM:
        canvas, room = _drawn(lines, part, unit), 0.06 * (top - low)
        canvas.y(unit, range=[low - room, top])
        panels.append(Panel("Close-up", canvas.figure(), f"The same data up to {fixed(top)}."))
    return panels


def _drawn(lines: _Lines, part: Part, unit: str) -> Canvas:
    canvas, factors = Canvas(320, left=56), sorted({at for _, found in lines for at, _ in found})
    if part == "gain":
        canvas.line_at(0)
    for one, found in lines:
        line(canvas, one, found, digits=3, places={at: f"{times(at)} × the training length" for at in factors})
    canvas.x("length / training length", type="log", tickvals=factors, ticktext=[times(at) for at in factors])
    canvas.y(unit)
    return canvas


def _counted(cells: Cells) -> str:
    """The number of texts and documents."""
    rows = [row for each in cells.values() for cell in each for row in _rows(cell) if row.texts]
    if not rows:
        return ""
    most = max(rows, key=lambda row: row.texts)
    few = (
        " With so few documents, rely on differences between encodings rather than on absolute values."
        if most.documents < 10
        else ""
    )
    return f"{most.texts} texts from {most.documents} documents, the same for all encodings.{few}"


# ---- by position ----------------------------------------------------------------------------------------------------


def by_position(state: Grid) -> Block:
    """The loss per token by position, in bins of doubling width; a line per encoding."""
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
        "Loss of a token by its position in the longest evaluated texts; lower is better. Positions are binned: 1, 2, "
        "3–4, 5–8 and so on. Mean over seeds, bands show the range. A falling line means that more context helps; a "
        "rise beyond the training length shows where the encoding fails. Bins contain different tokens, so small steps "
        "may come from the texts. All encodings read the same texts; an encoding with a smaller maximum length reads "
        "only their ends. Click an encoding to hide or show it."
    )
    signs = [one.sign for one in looks_of(state, shown)]
    return Block("positions", "Loss by position", caption, views, legend=signs)


_Bins = list[tuple[float, Spread, str]]  # middle of the bin (counted from 1), its loss, and its name


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
    """The lines starting from a position."""
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
    canvas.y("bits per token")
    title = f"From position {first + 1:g}" if first else "All positions"
    return Panel(title, canvas.figure())
