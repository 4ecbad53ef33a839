"""A grid study's figures of language models: loss by length and position, needles, copies, and head types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import log2, log10
from typing import Literal

import numpy as np
from jaxtyping import Float

from toeplens.engine.language import AtLength
from toeplens.ground.words import fixed, listed, percent, whole
from toeplens.report.grid.look import (
    Cells,
    Spread,
    Spreads,
    block,
    draw_lines,
    every,
    line,
    signs,
    spreads,
    times,
    viewed,
)
from toeplens.report.kit.blocks import Block, Panel, Ramp, View
from toeplens.report.kit.canvas import Canvas, Look, heat, untagged
from toeplens.report.kit.colours import PALETTE
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid
from toeplens.studies.grid.language import TOP, position_shares

Part = Literal["end", "whole", "sliding", "gain"]
_PARTS: dict[Part, str] = {
    "end": "end of the text",
    "gain": "increase at the end due to text before the last training length",
    "whole": "whole text",
    "sliding": "whole text, sliding window",
}
_ROOM = 0.15  # upper end of the close-up: bits above the worst encoding at the training length
_LATER = 8  # positions left out of the second panel; with so little context all encodings are similar
_NEAR = 0.9  # distance in training lengths that is too close to 1 for a label
_WIDEST = 4.0  # end of the colour scale: bits per token below chance
_Lines = dict[Look, Spreads]


def _lines(cells: Cells, values: Callable[[CellResult], Sequence[tuple[float, float]]]) -> _Lines:
    """Means of the x and y of each encoding's models; encodings without any are left out."""
    found = {one: spreads(pair for cell in models for pair in values(cell)) for one, models in cells.items()}
    return {one: means for one, means in found.items() if means}


def by_length(state: Grid) -> Block:
    """Bits per byte by length, a line per encoding; a view per evaluation mode."""
    views = []
    for task, cells in every(state):
        for part, title in _PARTS.items():
            lines = _lines(
                cells,
                lambda cell, part=part: [
                    (row.factor, each.value) for row in _lengths(cell) if (each := getattr(row, part))
                ],
            )
            views.append(View.of(_length_panels(lines, part), viewed(task, title), _counted(cells)))
    return block("bits", views, legend=signs(state, views))


def _lengths(*cells: CellResult) -> list[AtLength]:
    return [row for cell in cells for row in cell.measure("bits").lengths]


def _length_panels(lines: _Lines, part: Part) -> list[Panel]:
    """All lines and, if some rise high, a close-up of the lowest part."""
    if not lines:
        return []
    unit = "increase (bits per byte)" if part == "gain" else "bits per byte"
    factors = sorted({at for found in lines.values() for at, _ in found})

    def drawn(**axis: object) -> Canvas:
        canvas = Canvas(320, left=56)
        if part == "gain":
            canvas.line_at(0)
        for one, found in lines.items():
            line(canvas, one, found, digits=3, places=_of_training(factors))
        canvas.x("length / training length", type="log", tickvals=factors, ticktext=[times(at) for at in factors])
        canvas.y(unit, **axis)
        return canvas

    panels = [Panel("All encodings", drawn().figure())]
    means = [spread.mean for found in lines.values() for _, spread in found]
    low, top = min(means), max(found[0][1].mean for found in lines.values()) + _ROOM
    if max(means) > top + _ROOM:
        canvas = drawn(range=[low - 0.06 * (top - low), top])
        panels.append(Panel("Close-up", canvas.figure(), f"The same data up to {fixed(top)}."))
    return panels


def _of_training(factors: Sequence[float]) -> dict[float, str]:
    return {at: f"{times(at)} × the training length" for at in factors}


def _counted(cells: Cells) -> str:
    """The number of texts and documents."""
    rows = [row for found in cells.values() for row in _lengths(*found) if row.texts]
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
        trained = next(row.length for row in _lengths(first) if row.factor == 1)
        names = {at: name for found in cells.values() for cell in found for at, _, name in _bins(cell)}
        panels = []
        for after in (0, _LATER):
            lines = _lines(cells, lambda cell, after=after: [(at, value) for at, value, _ in _bins(cell) if at > after])
            if lines:
                panels.append(_position_panel(lines, names, trained, after))
        views.append(View.of(panels, task, _counted(cells)))
    return block("positions", views, legend=signs(state, views))


def _bins(cell: CellResult) -> list[tuple[float, float, str]]:
    """Middle of each bin (counted from 1), its loss, and its name."""
    found, made = cell.measure("bits"), []
    for (first, end), interval in zip(pairwise(found.edges.tolist()), found.positions, strict=True):
        name = f"position {end}" if end - first == 1 else f"positions {first + 1:,}–{end:,}"
        made.append(((first + 1 + end) / 2, interval.value, name))
    return made


def _position_panel(lines: _Lines, names: dict[float, str], trained: int, after: float) -> Panel:
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
    ramp = Ramp("below chance", "all correct")
    return block("needles", views, "medium", words={"chance": told}, ramp=ramp)


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
    return one.panel(figure)


# ---- copies ----------------------------------------------------------------------------------------------------------


def copies(state: Grid) -> Block:
    """Gain at the second of two equal spans of text, by their distance."""
    views = []
    for task, cells in every(state, "copying"):
        panels = [_copies_panel(cells, accuracy=False), _copies_panel(cells, accuracy=True)]
        views.append(View.of([panel for panel in panels if panel], task))
    return block("copies", views, legend=signs(state, views))


def _copies_panel(cells: Cells, *, accuracy: bool) -> Panel | None:
    def values(cell: CellResult) -> list[tuple[float, float]]:
        known = [(row.factor, row.accuracy if accuracy else row.gain) for row in cell.measure("copying").rows]
        return [(factor, each.value) for factor, each in known if each]

    canvas = Canvas(280, left=54)
    canvas.line_at(1, vertical=True)
    if not accuracy:
        canvas.line_at(0)
    factors = sorted({at for found in cells.values() for cell in found for at, _ in values(cell)})
    draw_lines(canvas, cells, values, digits=1 if accuracy else 2, percent=accuracy, places=_of_training(factors))
    if not canvas.traces:
        return None
    ticks = [at for at in factors if at != _NEAR] + [1]
    canvas.x("distance / training length", type="log", tickvals=ticks, ticktext=[times(at) for at in ticks])
    if accuracy:
        canvas.y("accuracy", range=[-0.02, 1.04], tickformat=".0%")
        return Panel("Accuracy on the second copy", canvas.figure())
    canvas.y("bits per token")
    return Panel("Gain from the first copy", canvas.figure())


# ---- head types ------------------------------------------------------------------------------------------------------

_SMALL, _LARGE = 6, 11  # diameter in pixels: of any head, and of the `TOP` heads of a model
_KINDS = (  # the attention of a head type, titles, and the share it is plotted against
    ("previous", "attention on the previous token", "attention on the previous token", "positional"),
    ("induction", "attention after an earlier copy (induction)", "attention after an earlier copy", "symbolic"),
)


def kinds(state: Grid) -> Block:
    """Each head's attention of a type against its share; a view per type, a panel per encoding."""
    views: list[View] = []
    layers = 0
    for task, cells in every(state, "patterns", "behaviour"):
        layers = max([layers, *(len(cell.measure("patterns").previous) for each in cells.values() for cell in each)])
        for weight, title, axis, share in _KINDS:
            panels = [_kind_panel(one, found, weight, axis, share) for one, found in cells.items()]
            views.append(View.of([panel for panel in panels if panel], viewed(task, title)))
    signs = [_layer_look(layer).sign for layer in range(layers)]
    return block("kinds", views, "medium", words={"top": TOP}, legend=signs)


def _layer_look(layer: int) -> Look:
    return Look(f"layer-{layer}", f"Layer {layer + 1}", *PALETTE[layer % len(PALETTE)])


def _kind_panel(one: Look, cells: Sequence[CellResult], weight: str, axis: str, share: str) -> Panel | None:
    points: dict[int, list[tuple[float, float, int, str]]] = {}  # by layer: weight, share, size, where
    for cell in cells:
        weights, shares = getattr(cell.measure("patterns"), weight), getattr(cell.measure("behaviour"), share)
        top = set(np.argsort(-weights, axis=None, kind="stable")[:TOP].tolist())
        for place, at in enumerate(np.ndindex(weights.shape)):
            if np.isfinite(shares[at]):
                where = f"seed {cell.key.seed}, layer {at[0] + 1}, head {at[1] + 1}"
                size = _LARGE if place in top else _SMALL
                point = round(float(weights[at]), 4), round(float(shares[at]), 4), size, where
                points.setdefault(at[0], []).append(point)
    if not points:
        return None
    canvas = Canvas(250, left=48, bottom=40)
    for layer, heads in sorted(points.items()):
        x, y, sizes, where = zip(*heads, strict=True)
        _layer_look(layer).add(
            canvas,
            x,
            y,
            f"%{{customdata}}<br>{axis} %{{x:.2f}}<br>{share} share %{{y:.2f}}",
            marker={"size": list(sizes), "opacity": 0.65, "line": {"width": 0}},
            customdata=list(where),
        )
    canvas.x(axis, range=[-0.04, 1.06], tickvals=[0, 0.25, 0.5, 0.75, 1])
    canvas.y(f"{share} share", range=[-0.06, 1.08], tickvals=[0, 0.25, 0.5, 0.75, 1])
    return one.panel(canvas.figure())


# ---- effects of each head --------------------------------------------------------------------------------------------

Heads = Float[np.ndarray, "L H"]
_Table = Callable[[CellResult], Heads | None]
_FEW = 8  # up to this many heads per layer, cells show numbers


def position(state: Grid) -> Block:
    """Each head's share of the effects of removing position; a map per encoding."""
    top = _top(state, position_shares)
    views = _views(state, position_shares, top, lambda share: f"{percent(share)} of the total effect", whole)
    ramp = Ramp("0%", f"{percent(top)} of the total effect", half=True)
    return block("position-share", views, "medium", ramp=ramp)


def without(state: Grid) -> Block:
    """The ablation effect of each head on the loss; a map per encoding."""
    top = _top(state, _lost)
    views = _views(
        state,
        _lost,
        top,
        lambda lost: f"{fixed(1000 * lost, 1)} · 10⁻³ nats per token",
        lambda lost: fixed(1000 * lost, 0),
    )
    ramp = Ramp(f"−{1000 * top:.0f}", f"{1000 * top:.0f} · 10⁻³ nats per token")
    return block("without", views, "medium", ramp=ramp)


def _lost(cell: CellResult) -> Heads | None:
    return None if cell.by_loss is None else cell.by_loss.drops


def _top(state: Grid, table: _Table) -> float:
    """The end of the colour scale."""
    found = [table(cell) for _, cells in every(state) for each in cells.values() for cell in each]
    return max((float(np.nanmax(np.abs(one))) for one in found if one is not None), default=0.0) or 1.0


def _views(
    state: Grid, table: _Table, top: float, told: Callable[[float], str], short: Callable[[float], str]
) -> list[View]:
    """The mean over seeds if there are several, and each seed separately."""
    views: list[View] = []
    for task, cells in every(state):
        tables = {one: {cell.key.seed: table(cell) for cell in found} for one, found in cells.items()}
        seeds = sorted({seed for each in tables.values() for seed in each})
        names = [one.title for one, each in tables.items() if all(found is None for found in each.values())]
        missing = f"Not shown, without any effect: {listed(names)}." if names else ""
        for seed in ([None] if len(seeds) > 1 else []) + seeds:
            panels = [
                _map(one, found, top, told, short, ordered=seed is None)
                for one, each in tables.items()
                if (found := [x for of, x in each.items() if seed in (None, of) and x is not None])
            ]
            name = "mean over seeds" if seed is None else f"seed {seed}" if len(seeds) > 1 else ""
            views.append(View.of(panels, viewed(task, name), missing))
    return views


def _map(
    one: Look,
    found: Sequence[Heads],
    top: float,
    told: Callable[[float], str],
    short: Callable[[float], str],
    *,
    ordered: bool,
) -> Panel:
    values = np.mean([-np.sort(-each, axis=1) if ordered else each for each in found], axis=0)
    layers, heads = values.shape
    columns = [f"rank {head + 1}" if ordered else f"head {head + 1}" for head in range(heads)]
    marked = range(0, heads, 1 if heads <= _FEW else 2)
    figure = heat(
        values,
        [f"L{layer + 1}" for layer in range(layers)],
        columns,
        top,
        ticks=(marked, [str(head + 1) for head in marked]),
        title="head, sorted by effect" if ordered else "head",
        hover=[
            [
                f"{untagged(one.title)}, layer {layer + 1}, {columns[head]}<br>{told(values[layer, head])}"
                for head in range(heads)
            ]
            for layer in range(layers)
        ],
        numbers=[[short(value) for value in row] for row in values] if heads <= _FEW else None,
    )
    return one.panel(figure)
