"""What language models take from their context: needles by depth and length, copies by distance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2

import numpy as np

from toeplens.engine.language import Copying, Needle, Needles
from toeplens.ground.words import fixed, percent, whole
from toeplens.report.grid.language.cells import Cells, every, looks_of, record, times, viewed
from toeplens.report.grid.look import Spread, line, spreads
from toeplens.report.kit.blocks import Block, Panel, Ramp, View
from toeplens.report.kit.canvas import Canvas, Look, heat, untagged
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid

_ACCURACY, _BITS = "the value’s tokens that are the likeliest", "bits a token of the value"
_NEAR = 0.9  # of the training length: a distance too close to 1 for a label of its own
_WIDEST = 4.0  # bits a token from a guess where the colours end
_Value = Callable[[Needle], float | None]


def needles(state: Grid) -> Block:
    """A map of depths by lengths an encoding; a view of accuracies and one of bits."""
    views: list[View] = []
    guesses = []
    for task, cells in every(state):
        found = {label: each for label, each in cells.items() if any(_map(cell) for cell in each)}
        if not found:
            continue
        asked = (record(cell, "needles", Needles) for each in found.values() for cell in each)
        guesses.append(guess := next(each.guess for each in asked if each))
        looks = looks_of(state, found)
        views += [
            View.of([_panel(one, found[one.key], guess, bits=bits) for one in looks], viewed(task, title))
            for bits, title in ((False, _ACCURACY), (True, _BITS))
        ]
    told = f" ({percent(guesses[0])} right, {log2(1 / guesses[0]):.2f} bits)" if guesses else ""
    caption = (
        "A random key and its value are planted in a text, and the key stands again at its end: does the model give "
        "the value? Across, the length of the text; down, how far into it the needle stands, 0% at its beginning, 100% "
        "just before the question. Numbers are per cent of the value’s tokens that are the likeliest, or bits a token; "
        f"means over seeds. The colour of nothing is that of a guess among the letters in use{told}; warm is better. "
        "What stands right of 1 is longer than the texts of training. Few needles were planted for each cell, so a "
        "single cell says little, and a model that finds none may do so at any length. An empty cell could not be "
        "asked, and why is told below."
    )
    ramp = Ramp("worse than a guess", "all found")
    return Block("needles", "Needles by depth and length", caption, views, "medium", ramp=ramp)


def _map(cell: CellResult) -> Sequence[Needle]:
    found = record(cell, "needles", Needles)
    return [] if found is None else found.rows


def _table(cells: Sequence[CellResult], value: _Value) -> dict[tuple[float, float], Spread]:
    """By depth and factor: the values of the seeds."""
    found: dict[tuple[float, float], list[float | None]] = {}
    for cell in cells:
        for row in _map(cell):
            found.setdefault((row.depth, row.factor), []).append(value(row))
    return {place: Spread.of(values) for place, values in found.items()}


def _panel(one: Look, cells: Sequence[CellResult], guess: float, *, bits: bool) -> Panel:
    """Bits, or the share of the value's tokens that are right, by depth and length; colours are from a guess."""
    name = "bits" if bits else "accuracy"
    table = _table(cells, lambda row: None if (found := getattr(row, name)) is None else found.value)
    guessed = log2(1 / guess) if bits else guess
    depths, factors = sorted({depth for depth, _ in table}), sorted({factor for _, factor in table})
    counts = {(row.depth, row.factor): row.needles for cell in cells for row in _map(cell)}
    values = np.full((len(depths), len(factors)), np.nan)
    numbers = [[""] * len(factors) for _ in depths]
    hover = [[""] * len(factors) for _ in depths]
    for y, depth in enumerate(depths):
        for x, factor in enumerate(factors):
            said = "–"
            if spread := table.get((depth, factor)):
                values[y, x] = guessed - spread.mean if bits else spread.mean - guessed
                numbers[y][x] = whole(spread.mean) if not bits else fixed(spread.mean, 1) if spread.count else ""
                said = f"{spread.told(2)} bits a token" if bits else f"{spread.told(1, percent=True)} found"
            place = f"{untagged(one.title)}<br>{times(factor)} × the length, depth {depth:.0%}"
            hover[y][x] = f"{place}<br>{said}<br>{counts.get((depth, factor), 0)} needles a model"
    figure = heat(
        values,
        [f"{depth:.0%}" for depth in depths],
        [f"{times(factor)} ×" for factor in factors],  # no numbers, which would be taken for places
        min(_WIDEST, guessed) if bits else 1 - guess,
        ticks=(range(len(factors)), [times(factor) for factor in factors]),
        title="times the training length",
        hover=hover,
        numbers=numbers,
    )
    return Panel(one.title, figure, tint=one.tint, glyph=one.glyph)


# ---- copies ---------------------------------------------------------------------------------------------------------


def copies(state: Grid) -> Block:
    """What the first of two equal spans of text saves at the second, against how far apart the two stand."""
    views, shown = [], set()
    for task, cells in every(state):
        found = {label: [cell for cell in each if _spans(cell)] for label, each in cells.items()}
        found = {label: each for label, each in found.items() if each}
        if not found:
            continue
        looks = looks_of(state, found)
        panels = [
            _copied(looks, found, "Bits a token saved by the first copy", "bits a token", accuracy=False),
            _copied(looks, found, "Tokens that are the likeliest", "right", accuracy=True),
        ]
        shown |= set(found)
        views.append(View.of(panels, task))
    caption = (
        "A span of one document stands twice in the text of another: what does the first save at the second, after "
        "its first few tokens, against having another span in its place; and how many of the tokens are the "
        "likeliest? By the distance between the two, in training lengths. Means over seeds, bands their range; dashed, "
        "0 and where the training length ends: a distance past it was never seen in training. Below 0 the longer "
        "text does harm. A model too small or too briefly trained to copy says nothing of its encoding."
    )
    signs = [one.sign for one in looks_of(state, shown)]
    return Block("copies", "Copying by distance", caption, views, legend=signs)


def _spans(cell: CellResult) -> list[tuple[float, float, float]]:
    """Factor, accuracy and bits saved of each distance that could be asked."""
    found = record(cell, "copying", Copying)
    rows = () if found is None else found.rows
    return [(row.factor, row.accuracy.value, row.gain.value) for row in rows if row.accuracy and row.gain]


def _copied(looks: Sequence[Look], cells: Cells, title: str, axis: str, *, accuracy: bool) -> Panel:
    canvas = Canvas(280, left=54)
    canvas.line_at(1, vertical=True)
    if not accuracy:
        canvas.line_at(0)
    factors = sorted({at for each in cells.values() for cell in each for at, *_ in _spans(cell)})
    for one in looks:
        each = [span for cell in cells[one.key] for span in _spans(cell)]
        found = spreads((at, right if accuracy else saved) for at, right, saved in each)
        line(
            canvas,
            one,
            found,
            digits=1 if accuracy else 2,
            percent=accuracy,
            places={at: f"{times(at)} × the length" for at in factors},
        )
    canvas.x(
        "distance, times the training length",
        type="log",
        tickvals=(ticks := [at for at in factors if at != _NEAR] + [1]),
        ticktext=[times(at) for at in ticks],
    )
    canvas.y(axis, **({"range": [-0.02, 1.04], "tickformat": ".0%"} if accuracy else {}))
    return Panel(title, canvas.figure())
