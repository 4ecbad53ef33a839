"""The figures of what is seen during training: when a head becomes worth something, and whether gradients cancel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction, title
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page.look import (
    TASKS,
    colour,
    glyph,
    layer_signs,
    model_panel,
    models,
    ordered,
    under_headings,
)
from toeplens.papers.deposit.rungs import RUNGS
from toeplens.report.kit.blocks import Block, Panel, Sign
from toeplens.report.kit.canvas import Canvas
from toeplens.report.kit.colours import GUESS, layer_look
from toeplens.studies import CellResult, Key

_FIELD = "exponent"


def training(state: Reproduction) -> Block:
    """Each head's drop against the training step, a panel a seed."""
    cells = [cell for cell in state.results.cells if Label.parse(cell.key.label).variant not in RUNGS]
    watched = {cell.key: rows for cell in cells if (rows := moments(cell))}
    seen = [row for rows in watched.values() for row in rows]
    drops_seen = [drop for row in seen for layer in row["drops"] for drop in layer]
    top = max([0.1, *drops_seen, *(row["accuracy"] for row in seen)])
    span = (min([0.0, *drops_seen]) * 1.05 - 0.02, top * 1.05)
    views = []
    for task in TASKS:
        for label in ordered(key.label for key in watched if key.task == task):

            def draw(protocol: Protocol, task: str = task, label: str = label) -> list[Panel]:
                mine = {key.seed: rows for key, rows in watched.items() if _place(key) == (protocol, task, label)}
                return [
                    Panel(f"seed {seed}", drops(rows, span), tint=colour(label), glyph=glyph(label))
                    for seed, rows in mine.items()
                ]

            views.append(under_headings(state, draw, f"{TASKS[task]}, {title(label)}"))
    signs = layer_signs(max((len(row["drops"]) for row in seen), default=0), "heads of layer")
    signs.append(Sign("accuracy", "accuracy of the intact model", GUESS, dash="solid"))
    caption = (
        "Accuracy lost when one head is silenced at that moment of training, a line a head, a panel a seed; the thick "
        "grey line is the intact model’s accuracy. Where one line leaves the others, the deposit forms."
    )
    return Block("training", "When the deposit forms", caption, views, "medium", signs)


def _place(key: Key) -> tuple[str, str, str]:
    return key.protocol, key.task, key.label


def moments(cell: CellResult) -> list[dict[str, Any]]:
    """The rows of what was watched that have drops: step, accuracy, drops [layers][heads]; what is undefined is 0."""
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
    """Each head's drop, and the accuracy, by training step.

    Arguments
        rows  see `moments`
        span  ends of the vertical axis, so that panels share it
    """
    canvas = Canvas(200, left=44, right=8, top=4, bottom=36)
    steps = [row["step"] for row in rows]
    accuracy = _rounded(row["accuracy"] for row in rows)
    hover = "step %{x}: accuracy %{y:.1%}<extra></extra>"
    canvas.lines(steps, accuracy, GUESS, hover, width=4, opacity=0.55, meta="accuracy")
    for layer in range(len(rows[0]["drops"])):
        tint, dash = layer_look(layer)
        heads = range(len(rows[0]["drops"][layer]))
        # one trace a layer: its heads follow one another, with a gap between
        values = [[*_rounded(row["drops"][layer][head] for row in rows), None] for head in heads]
        canvas.lines(
            [*steps, None] * len(heads),
            [value for line in values for value in line],
            tint,
            "%{text}<br>step %{x}: %{y:.1%} lost<extra></extra>",
            width=1.6,
            dash=dash,
            marker={"size": 3},
            text=[f"layer {layer + 1}, head {head + 1}" for head in heads for _ in [*steps, None]],
            meta=f"layer-{layer + 1}",
        )
    canvas.steps()
    canvas.y("", range=list(span), tickformat=".0%")
    return canvas.figure()


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), 4) for value in values]


def exponents(state: Reproduction) -> Block:
    """The exponent of signal to noise by batch size, against the training step: a line a layer, a panel an encoding."""
    depth = max((len(row[_FIELD]) for cell in state.results.cells for row in _rows(cell)), default=0)

    def draw(protocol: Protocol, task: str) -> list[Panel]:
        panels = []
        for _, cells in models(state, protocol, task, _rows):
            steps, found = watched(cells)
            panels.append(model_panel(cells[0], lines(steps, found)))
        return panels

    views = [under_headings(state, lambda p, task=task: draw(p, task), name) for task, name in TASKS.items()]
    caption = (
        "How signal to noise of the positional gradient at the logits falls with the batch, along training: the "
        "exponent, mean over a layer’s heads and over seeds, the band the seeds’ range. At −1/2 (dashed) the gradients "
        "of a batch cancel as noise does; the nearer to 0, the more of them is the same in every example."
    )
    title = "Do positional gradients cancel, along training"
    return Block("seed-training", title, caption, views, "small", layer_signs(depth))


def _rows(cell: CellResult) -> list[dict[str, Any]]:
    return [row for row in cell.watched if row.get(_FIELD)]


def watched(cells: Sequence[CellResult]) -> tuple[list[int], Float[np.ndarray, "seeds moments layers"]]:
    """The training steps that all of these models were looked at, and each layer's exponent there, the heads' mean."""
    steps = sorted(set.intersection(*({int(row["step"]) for row in _rows(cell)} for cell in cells)))
    found = [
        [np.array(row[_FIELD], dtype=float).mean(axis=1) for row in _rows(cell) if int(row["step"]) in steps]
        for cell in cells
    ]
    return steps, np.array(found)


def lines(steps: Sequence[int], found: Float[np.ndarray, "seeds moments layers"]) -> go.Figure:
    """A line a layer; moments at which a seed has no value are left out."""
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
