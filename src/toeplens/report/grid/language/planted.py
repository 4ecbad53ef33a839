"""Use of context by language models: needles by depth and length, copies by distance."""

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

_ACCURACY, _BITS = "accuracy on the value", "bits per token of the value"
_NEAR = 0.9  # distance in training lengths that is too close to 1 for a label
_WIDEST = 4.0  # end of the colour scale: bits per token below chance
_Value = Callable[[Needle], float | None]


def needles(state: Grid) -> Block:
    """A map of depths by lengths per encoding; a view of accuracies and one of bits."""
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


def _map(cell: CellResult) -> Sequence[Needle]:
    found = record(cell, "needles", Needles)
    return [] if found is None else found.rows


def _table(cells: Sequence[CellResult], value: _Value) -> dict[tuple[float, float], Spread]:
    """The values of the seeds, by depth and factor."""
    found: dict[tuple[float, float], list[float | None]] = {}
    for cell in cells:
        for row in _map(cell):
            found.setdefault((row.depth, row.factor), []).append(value(row))
    return {place: Spread.of(values) for place, values in found.items()}


def _panel(one: Look, cells: Sequence[CellResult], guess: float, *, bits: bool) -> Panel:
    """Bits, or accuracy on the value's tokens, by depth and length; colours are relative to chance."""
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
                said = f"{spread.told(2)} bits per token" if bits else f"accuracy {spread.told(1, percent=True)}"
            place = f"{untagged(one.title)}<br>{times(factor)} × the training length, depth {depth:.0%}"
            hover[y][x] = f"{place}<br>{said}<br>{counts.get((depth, factor), 0)} needles per model"
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


# ---- copies ---------------------------------------------------------------------------------------------------------


def copies(state: Grid) -> Block:
    """Gain at the second of two equal spans of text, by their distance."""
    views, shown = [], set()
    for task, cells in every(state):
        found = {label: [cell for cell in each if _spans(cell)] for label, each in cells.items()}
        found = {label: each for label, each in found.items() if each}
        if not found:
            continue
        looks = looks_of(state, found)
        panels = [
            _copied(looks, found, "Gain from the first copy", "bits per token", accuracy=False),
            _copied(looks, found, "Accuracy on the second copy", "accuracy", accuracy=True),
        ]
        shown |= set(found)
        views.append(View.of(panels, task))
    caption = (
        "A span of one document is inserted twice into another text. Gain: bits per token saved at the second copy "
        "(after its first few tokens), compared with a different span in place of the first copy. Accuracy: share of "
        "correctly predicted tokens. The x axis is the distance of the copies in training lengths; distances beyond 1 "
        "were never seen in training. Mean over seeds, bands show the range. Dashed: 0 and the training length. A "
        "model that is too small or too briefly trained to copy says nothing about its encoding."
    )
    signs = [one.sign for one in looks_of(state, shown)]
    return Block("copies", "Copying by distance", caption, views, legend=signs)


def _spans(cell: CellResult) -> list[tuple[float, float, float]]:
    """Factor, accuracy and gain of each distance that could be evaluated."""
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
            places={at: f"{times(at)} × the training length" for at in factors},
        )
    canvas.x(
        "distance / training length",
        type="log",
        tickvals=(ticks := [at for at in factors if at != _NEAR] + [1]),
        ticktext=[times(at) for at in ticks],
    )
    canvas.y(axis, **({"range": [-0.02, 1.04], "tickformat": ".0%"} if accuracy else {}))
    return Panel(title, canvas.figure())
