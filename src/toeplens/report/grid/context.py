"""A grid study's figures of language models by text: loss by length and position, needles, and copies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log2, log10
from typing import Literal

import numpy as np

from toeplens.engine.language import AtLength
from toeplens.ground.words import fixed, percent, whole
from toeplens.report.grid.look import Cells, Spread, Spreads, every, line, signs, spreads, times, viewed
from toeplens.report.kit.blocks import Block, Panel, Ramp, View
from toeplens.report.kit.canvas import Canvas, Look, heat, untagged
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
_NEAR = 0.9  # distance in training lengths that is too close to 1 for a label
_WIDEST = 4.0  # end of the colour scale: bits per token below chance
_Lines = dict[Look, Spreads]


def by_length(state: Grid) -> Block:
    """Bits per byte by length, a line per encoding; a view per evaluation mode."""
    views = []
    for task, cells in every(state):
        for part, title in _PARTS.items():
            values = {
                one: spreads((row.factor, each.value) for row in _lengths(found) if (each := getattr(row, part)))
                for one, found in cells.items()
            }
            lines = {one: found for one, found in values.items() if found}
            views.append(View.of(_length_panels(lines, part), viewed(task, title), _counted(cells)))
    caption = (
        "Bits per byte on held-out documents by text length, in multiples of the training length; lower is better. One "
        "line per encoding, mean over seeds; bands show the range over seeds, not over documents. End of the text: the "
        "last half training length, the same tokens at every length, so a rising line shows the harm of a longer "
        "context. Whole text: all tokens, which differ between lengths; compare encodings, not lengths. Sliding "
        "window: a window of the training length that moves by half its size. Click an encoding to hide or show it."
    )
    return Block("bits", "Bits per byte by length", caption, views, legend=signs(state, views))


def _lengths(cells: Sequence[CellResult]) -> list[AtLength]:
    return [row for cell in cells for row in cell.measure("bits").lengths]


def _length_panels(lines: _Lines, part: Part) -> list[Panel]:
    """All lines and, if some rise high, a close-up of the lowest part."""
    if not lines:
        return []
    unit = f"increase ({_UNIT})" if part == "gain" else _UNIT
    factors = sorted({at for found in lines.values() for at, _ in found})

    def drawn() -> Canvas:
        canvas = Canvas(320, left=56)
        if part == "gain":
            canvas.line_at(0)
        for one, found in lines.items():
            line(canvas, one, found, digits=3, places=_of_training(factors))
        canvas.x("length / training length", type="log", tickvals=factors, ticktext=[times(at) for at in factors])
        canvas.y(unit)
        return canvas

    panels = [Panel("All encodings", drawn().figure())]
    means = [spread.mean for found in lines.values() for _, spread in found]
    low, high = min(means), max(means)
    top = max(found[0][1].mean for found in lines.values()) + _ROOM
    if high > top + _ROOM:
        canvas, room = drawn(), 0.06 * (top - low)
        canvas.y(unit, range=[low - room, top])
        panels.append(Panel("Close-up", canvas.figure(), f"The same data up to {fixed(top)}."))
    return panels


def _of_training(factors: Sequence[float]) -> dict[float, str]:
    return {at: f"{times(at)} × the training length" for at in factors}


def _counted(cells: Cells) -> str:
    """The number of texts and documents."""
    rows = [row for found in cells.values() for row in _lengths(found) if row.texts]
    if not rows:
        return ""
    most = max(rows, key=lambda row: row.texts)
    few = " With so few documents, rely on differences between encodings rather than on absolute values."
    counted = f"{most.texts} texts from {most.documents} documents, the same for all encodings."
    return counted + (few if most.documents < 10 else "")


def by_position(state: Grid) -> Block:
    """The loss per token by position, in bins of doubling width; a line per encoding."""
    views = []
    for task, cells in every(state):
        first = next(iter(cells.values()))[0]
        trained = next(row.length for row in _lengths([first]) if row.factor == 1)
        names = {at: name for found in cells.values() for cell in found for at, _, name in _bins(cell)}
        lines = {
            one: spreads((at, value) for cell in found for at, value, _ in _bins(cell)) for one, found in cells.items()
        }
        panels = [_along(lines, names, trained, after) for after in (0, _LATER)]
        views.append(View.of([panel for panel in panels if panel], task, _counted(cells)))
    caption = (
        "Loss of a token by its position in the longest evaluated texts; lower is better. Positions are binned: 1, 2, "
        "3–4, 5–8 and so on. Mean over seeds, bands show the range. A falling line means that more context helps; a "
        "rise beyond the training length shows where the encoding fails. Bins contain different tokens, so small steps "
        "may come from the texts. All encodings read the same texts; an encoding with a smaller maximum length reads "
        "only their ends. Click an encoding to hide or show it."
    )
    return Block("positions", "Loss by position", caption, views, legend=signs(state, views))


def _bins(cell: CellResult) -> list[tuple[float, float, str]]:
    """Middle of each bin (counted from 1), its loss, and its name."""
    found, made = cell.measure("bits"), []
    for (first, end), interval in zip(pairwise(found.edges.tolist()), found.positions, strict=True):
        name = f"position {end}" if end - first == 1 else f"positions {first + 1:,}–{end:,}"
        made.append(((first + 1 + end) / 2, interval.value, name))
    return made


def _along(lines: _Lines, names: dict[float, str], trained: int, after: float) -> Panel | None:
    """The lines after a position."""
    lines = {one: [(at, spread) for at, spread in found if at > after] for one, found in lines.items()}
    lines = {one: found for one, found in lines.items() if found}
    if not lines:
        return None
    canvas = Canvas(320, left=56)
    for one, found in lines.items():
        line(canvas, one, found, digits=3, places=names)
    low, reach = next(iter(lines.values()))[0][0], max(found[-1][0] for found in lines.values())
    canvas.line_at(trained, vertical=True)
    canvas.note("training length", x=log10(trained), y=1, yref="paper", xanchor="right", yanchor="top", xshift=-4)
    ticks = [4**power for power in range(12) if low / 2 <= 4**power <= 2 * reach]
    canvas.x("position of the token", type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks])
    canvas.y("bits per token")
    return Panel(f"From position {after + 1:g}" if after else "All positions", canvas.figure())


# ---- needles ---------------------------------------------------------------------------------------------------------


def needles(state: Grid) -> Block:
    """A map of depths by lengths per encoding; a view of accuracies and one of bits."""
    views: list[View] = []
    guesses: list[float] = []
    titles = {"accuracy": "accuracy on the value", "bits": "bits per token of the value"}
    for task, cells in every(state, "needles"):
        guesses.append(next(iter(cells.values()))[0].measure("needles").guess)
        for name, title in titles.items():
            panels = [_needle_map(one, found, guesses[-1], bits=name == "bits") for one, found in cells.items()]
            views.append(View.of(panels, viewed(task, title)))
    told = f" (accuracy {percent(guesses[0])}, {log2(1 / guesses[0]):.2f} bits)" if guesses else ""
    caption = (
        "A random key and its value are inserted into a text, and the key is repeated at the end. Can the model "
        "predict the value? Columns: length of the text. Rows: depth of the needle, from 0% (beginning) to 100% (just "
        "before the question). Numbers: accuracy on the value’s tokens (%), or bits per token; mean over seeds. The "
        f"neutral colour is chance level among the letters in use{told}; warm colours are better. Lengths right of 1 "
        "exceed the training length. Each cell has few needles, so single cells are noisy. The reasons for empty "
        "cells are listed below."
    )
    ramp = Ramp("below chance", "all correct")
    return Block("needles", "Needles by depth and length", caption, views, "medium", ramp=ramp)


def _needle_map(one: Look, cells: Sequence[CellResult], guess: float, *, bits: bool) -> Panel:
    """Bits, or accuracy on the value's tokens, by depth and length; colours are relative to chance."""
    rows = [row for cell in cells for row in cell.measure("needles").rows]
    depths, factors = sorted({row.depth for row in rows}), sorted({row.factor for row in rows})
    guessed = log2(1 / guess) if bits else guess
    values = np.full((len(depths), len(factors)), np.nan)
    numbers = [[""] * len(factors) for _ in depths]
    hover = [[""] * len(factors) for _ in depths]
    for y, depth in enumerate(depths):
        for x, factor in enumerate(factors):
            mine, said = [row for row in rows if (row.depth, row.factor) == (depth, factor)], "–"
            if mine:
                found = [row.bits if bits else row.accuracy for row in mine]
                spread = Spread.of(None if each is None else each.value for each in found)
                values[y, x] = guessed - spread.mean if bits else spread.mean - guessed
                numbers[y][x] = whole(spread.mean) if not bits else fixed(spread.mean, 1) if spread.count else ""
                said = f"{spread.told(2)} bits per token" if bits else f"accuracy {spread.told(1, percent=True)}"
            place = f"{untagged(one.title)}<br>{times(factor)} × the training length, depth {depth:.0%}"
            hover[y][x] = f"{place}<br>{said}<br>{mine[-1].needles if mine else 0} needles per model"
    figure = heat(
        values,
        [f"{depth:.0%}" for depth in depths],
        [f"{times(factor)} ×" for factor in factors],  # not numbers, which plotly would take for positions
        min(_WIDEST, guessed) if bits else 1 - guess,
        ticks=(range(len(factors)), [times(factor) for factor in factors]),
        title="times the training length",
        hover=hover,
        numbers=numbers,
    )
    return Panel(one.title, figure, tint=one.tint, glyph=one.glyph)


# ---- copies ----------------------------------------------------------------------------------------------------------


def copies(state: Grid) -> Block:
    """Gain at the second of two equal spans of text, by their distance."""
    views = []
    for task, cells in every(state, "copying"):
        panels = [
            _copied(cells, "gain", "Gain from the first copy", "bits per token"),
            _copied(cells, "accuracy", "Accuracy on the second copy", "accuracy"),
        ]
        views.append(View.of([panel for panel in panels if panel], task))
    caption = (
        "A span of one document is inserted twice into another text. Gain: bits per token saved at the second copy "
        "(after its first few tokens), compared with a different span in place of the first copy. Accuracy: share of "
        "correctly predicted tokens. The x axis is the distance of the copies in training lengths; distances beyond 1 "
        "were never seen in training. Mean over seeds, bands show the range. Dashed: 0 and the training length. A "
        "model that is too small or too briefly trained to copy says nothing about its encoding."
    )
    return Block("copies", "Copying by distance", caption, views, legend=signs(state, views))


def _copied(cells: Cells, name: Literal["gain", "accuracy"], title: str, axis: str) -> Panel | None:
    canvas, accuracy = Canvas(280, left=54), name == "accuracy"
    canvas.line_at(1, vertical=True)
    if not accuracy:
        canvas.line_at(0)
    values = {
        one: [
            (row.factor, each.value)
            for cell in found
            for row in cell.measure("copying").rows
            if (each := getattr(row, name))
        ]
        for one, found in cells.items()
    }
    factors = sorted({at for found in values.values() for at, _ in found})
    for one, found in values.items():
        if lines := spreads(found):
            line(canvas, one, lines, digits=1 if accuracy else 2, percent=accuracy, places=_of_training(factors))
    if not canvas.traces:
        return None
    ticks = [at for at in factors if at != _NEAR] + [1]
    canvas.x("distance / training length", type="log", tickvals=ticks, ticktext=[times(at) for at in ticks])
    canvas.y(axis, **({"range": [-0.02, 1.04], "tickformat": ".0%"} if accuracy else {}))
    return Panel(title, canvas.figure())
