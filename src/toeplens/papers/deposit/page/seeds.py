"""Figures of gradient seeds and of training: positional gradients by batch size, and ablation effects by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from toeplens.lens import SeedStrength
from toeplens.lens.gradients import LEVELS, Level, margins
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction, title
from toeplens.papers.deposit.measured import Values
from toeplens.papers.deposit.page import style
from toeplens.papers.deposit.spec import RUNGS, Label
from toeplens.report.kit.blocks import Block, Panel, Sign, View
from toeplens.report.kit.canvas import Canvas, Series, dots, plain
from toeplens.report.kit.colours import GUESS, layer_look
from toeplens.studies import CellResult, Key

_LEVELS: dict[Level, str] = {
    "parameters": "weight gradient that changes the head’s positional effect",
    "logits": "gradient at the logits, by distance",
}
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
Records = list[tuple[str, dict[int, SeedStrength]]]  # label: record by seed
ByLayer = Callable[[SeedStrength], np.ndarray]


def strength_of(cell: CellResult) -> SeedStrength | None:
    """The seed strength of a cell; None if not measured."""
    found = cell.measure("seed")
    return found and found.strength


def _views(state: Reproduction, draw: Callable[[Protocol, Records, Level], go.Figure], what: str = "") -> list[View]:
    """One view per task and level, one panel per protocol with records of that level."""

    def known(cell: CellResult, level: Level) -> bool:
        record = strength_of(cell)
        return record is not None and level in record.levels

    def drawn(protocol: Protocol, task: str, level: Level) -> go.Figure | None:
        found = style.models(state, protocol, task, partial(known, level=level))
        records = [(label, {c.key.seed: c.measure("seed").strength for c in cells}) for label, cells in found]
        return draw(protocol, records, level) if records else None

    return [
        style.beside(state, partial(drawn, task=task, level=level), f"{named}: {_LEVELS[level]}{what}")
        for task, named in style.TASKS.items()
        for level in LEVELS[::-1]
    ]


def strength(state: Reproduction) -> Block:
    labels = set[str]()

    def draw(protocol: Protocol, found: Records, level: Level) -> go.Figure:
        labels.update(label for label, _ in found)
        return by_size(protocol, found, level)

    views = _views(state, draw)
    return style.block("seed-strength", views, legend=style.legend(state, labels))


def exponent(state: Reproduction) -> Block:
    def draw(protocol: Protocol, found: Records, level: Level) -> go.Figure:
        return _lines(protocol, found, lambda one: one.levels[level].layers.exponent, "exponent", -0.5)

    return style.block("seed-exponent", _views(state, draw), legend=_signs(state))


def lead(state: Reproduction) -> Block:
    views = []
    for what, of, axis in (
        ("ratio of the largest to the second largest head", lambda signal: margins(signal).ratio, "largest / second"),
        ("ratio of a layer divided by the next layer’s", lambda signal: margins(signal).gamma, "ratio / next layer’s"),
    ):

        def draw(protocol: Protocol, found: Records, level: Level, of=of, axis=axis) -> go.Figure:
            return _lines(protocol, found, lambda one: of(one.levels[level].signal), axis, 1.0)

        views += _views(state, draw, f"; {what}")
    return style.block("seed-lead", views, legend=_signs(state))


def by_size(protocol: Protocol, found: Records, level: Level) -> go.Figure:
    canvas, sizes = Canvas(300), list(next(iter(found[0][1].values())).sizes)
    canvas.straight(sizes, [n**-0.5 for n in sizes], width=1.5)
    for label, records in found:
        mean = np.mean([record.levels[level].layers.strength[0] for record in records.values()], axis=0)
        canvas.lines(
            sizes,
            plain(mean, 5),
            style.colour(label),
            f"<b>{style.name(protocol, label)}</b><br>%{{x}} examples: %{{y:.3f}}<extra></extra>",
            marker={"symbol": style.marker(label), "size": 7},
            meta=label,
        )
    canvas.x("examples in the mean", type="log", tickvals=sizes[:: max(1, len(sizes) // 6)])
    canvas.y("signal to noise", type="log", tickvals=_TICKS, ticktext=[f"{tick:g}" for tick in _TICKS])
    return canvas.figure()


def _lines(protocol: Protocol, found: Records, of: ByLayer, axis: str, mark: float) -> go.Figure:
    """Dots: one row per encoding, one series per layer."""
    each = [{seed: of(record) for seed, record in records.items()} for _, records in found]
    lines = [style.name(protocol, label) for label, _ in found]
    series = []
    for layer in range(max(len(layers) for seeds in each for layers in seeds.values())):
        values: list[Values] = [
            {seed: float(layers[layer]) for seed, layers in seeds.items() if np.isfinite(layers[layer])}
            for seeds in each
        ]
        tints = [layer_look(layer)[0]] * len(values)
        series.append(Series(f"layer-{layer + 1}", f"layer {layer + 1}<br>", "circle", values, tints))
    return dots(lines, series, axis, digits=2, marks=(mark,))


def _signs(state: Reproduction) -> list[Sign]:
    records = [record for cell in state.results.cells if (record := strength_of(cell))]
    depth = max((len(level.signal) for record in records for level in record.levels.values()), default=0)
    return style.layer_signs(depth, dots=True)


_FIELD = "exponent"


def training(state: Reproduction) -> Block:
    cells = [cell for cell in state.results.cells if Label.parse(cell.key.label).variant not in RUNGS]
    watched = {cell.key: rows for cell in cells if (rows := moments(cell))}
    seen = [row for rows in watched.values() for row in rows]
    drops_seen = [drop for row in seen for layer in row["drops"] for drop in layer]
    top = max([0.1, *drops_seen, *(row["accuracy"] for row in seen)])
    span = (min([0.0, *drops_seen]) * 1.05 - 0.02, top * 1.05)
    views = []
    for task in style.TASKS:
        for label in style.ordered(key.label for key in watched if key.task == task):

            def draw(protocol: Protocol, task: str = task, label: str = label) -> list[Panel]:
                mine = {key.seed: rows for key, rows in watched.items() if key == Key(protocol, task, label, key.seed)}
                return [
                    Panel(f"seed {seed}", drops(rows, span), tint=style.colour(label), glyph=style.glyph(label))
                    for seed, rows in mine.items()
                ]

            views.append(style.under_headings(state, draw, f"{style.TASKS[task]}, {title(label)}"))
    signs = style.layer_signs(max((len(row["drops"]) for row in seen), default=0), "heads of layer")
    signs.append(Sign("accuracy", "accuracy of the intact model", GUESS, dash="solid"))
    return style.block("training", views, "medium", legend=signs)


def moments(cell: CellResult) -> list[dict[str, Any]]:
    """The checkpoints with ablation effects: step, accuracy, drops [layers][heads]; undefined values are 0."""
    return [
        {
            "step": int(row["step"]),
            "accuracy": float(row["accuracy"] or 0),
            "drops": [[float(drop or 0) for drop in layer] for layer in row["drops"]],
        }
        for row in cell.watched
        if row.get("drops")
    ]


def drops(rows: Sequence[dict[str, Any]], span: tuple[float, float]) -> go.Figure:
    """Each head's accuracy drop, and the accuracy, by training step.

    Arguments
        rows  see `moments`
        span  ends of the vertical axis, shared by panels
    """
    canvas = Canvas(200, left=44, right=8, top=4, bottom=36)
    steps = [row["step"] for row in rows]
    accuracy = [round(row["accuracy"], 4) for row in rows]
    hover = "step %{x}: accuracy %{y:.1%}<extra></extra>"
    canvas.lines(steps, accuracy, GUESS, hover, width=4, opacity=0.55, meta="accuracy")
    for layer in range(len(rows[0]["drops"])):
        tint, dash = layer_look(layer)
        heads = range(len(rows[0]["drops"][layer]))
        # one trace per layer: its heads one after another, separated by gaps
        values = [[*(round(row["drops"][layer][head], 4) for row in rows), None] for head in heads]
        canvas.lines(
            [*steps, None] * len(heads),
            [value for line in values for value in line],
            tint,
            "%{text}<br>step %{x}: accuracy drop %{y:.1%}<extra></extra>",
            width=1.6,
            dash=dash,
            marker={"size": 3},
            text=[f"layer {layer + 1}, head {head + 1}" for head in heads for _ in [*steps, None]],
            meta=f"layer-{layer + 1}",
        )
    canvas.steps()
    canvas.y("", range=list(span), tickformat=".0%")
    return canvas.figure()


def exponents(state: Reproduction) -> Block:
    depth = max((len(row[_FIELD]) for cell in state.results.cells for row in _rows(cell)), default=0)

    views = style.by_model(state, _rows, lambda cells: lines(*watched(cells)))
    return style.block("seed-training", views, "small", legend=style.layer_signs(depth))


def _rows(cell: CellResult) -> list[dict[str, Any]]:
    return [row for row in cell.watched if row.get(_FIELD)]


def watched(cells: Sequence[CellResult]) -> tuple[list[int], Float[np.ndarray, "seeds moments layers"]]:
    """The checkpoint steps that all models share, and each layer's exponent there (mean over heads)."""
    steps = sorted(set.intersection(*({int(row["step"]) for row in _rows(cell)} for cell in cells)))
    found = [
        [np.array(row[_FIELD], dtype=float).mean(axis=1) for row in _rows(cell) if int(row["step"]) in steps]
        for cell in cells
    ]
    return steps, np.array(found)


def lines(steps: Sequence[int], found: Float[np.ndarray, "seeds moments layers"]) -> go.Figure:
    """One line per layer; checkpoints at which a seed has no value are excluded."""
    canvas = Canvas(200, left=38, right=8, top=4, bottom=36)
    canvas.line_at(-0.5)
    for layer in range(found.shape[-1]):
        tint, dash = layer_look(layer)
        values = found[:, :, layer]
        kept = np.isfinite(values).all(0)
        at, key = np.asarray(steps)[kept].tolist(), f"layer-{layer + 1}"
        low, high, mean = (of(values[:, kept], axis=0).round(4).tolist() for of in (np.min, np.max, np.mean))
        if len(values) > 1:
            canvas.band(at, low, high, tint, 0.12, key)
        hover = f"layer {layer + 1}<br>step %{{x}}: %{{y:.2f}}<extra></extra>"
        canvas.lines(at, mean, tint, hover, dash=dash, marker={"size": 4}, meta=key)
    canvas.steps()
    canvas.y("", range=[-0.72, 0.05], tickvals=[-0.5, -0.25, 0])
    return canvas.figure()
