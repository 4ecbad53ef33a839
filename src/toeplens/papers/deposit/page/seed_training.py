"""The figure of gradient seeds along training: does the positional gradient cancel in a batch, moment by moment?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.page.look import TASKS, ordered
from toeplens.papers.deposit.page.parts import model_panel, protocol_title
from toeplens.report.kit.blocks import Block, Group, Sign, View
from toeplens.report.kit.canvas import Canvas, faded, number
from toeplens.report.kit.colours import layer_look
from toeplens.studies import CellResult

_FIELD = "exponent"


def exponents(state: Reproduction) -> Block:
    """The exponent of signal to noise by batch size, against the training step: a line a layer, a panel an encoding."""
    views, depth = [], 0
    for task in TASKS:
        groups = []
        for protocol in state.plan.protocols:
            under, panels = state.results.under(protocol), []
            for label in ordered(under.labels(task)):
                cells = [cell for cell in under.of(task, label) if _rows(cell)]
                if cells:
                    steps, found = watched(cells)
                    depth = max(depth, found.shape[-1])
                    panels.append(model_panel(cells[0], lines(steps, found), _words(steps, found)))
            groups.append(Group(protocol_title(protocol), panels))
        views.append(View(TASKS[task], groups))
    signs = [
        Sign(f"layer-{i}", f"layer {i}", tint, dash=dash)
        for i, (tint, dash) in enumerate(map(layer_look, range(depth)), start=1)
    ]
    caption = (
        "How signal to noise of the positional gradient at the logits falls with the batch, along training: the "
        "exponent, mean over a layer’s heads and over seeds, the band the seeds’ range. At −1/2 (dashed) the gradients "
        "of a batch cancel as noise does; the nearer to 0, the more of them is the same in every example."
    )
    return Block("seed-training", "Do positional gradients cancel, along training", caption, views, "small", signs)


def _rows(cell: CellResult) -> list[dict]:
    return [row for row in cell.watched if row.get(_FIELD)]


def watched(cells: Sequence[CellResult]) -> tuple[list[int], Float[np.ndarray, "seeds moments layers"]]:
    """The training steps that all of these models were looked at, and each layer's exponent there, the heads' mean."""
    steps = sorted(set.intersection(*({int(row["step"]) for row in _rows(cell)} for cell in cells)))
    found = [
        [
            [np.mean([number(head) for head in layer]) for layer in row[_FIELD]]
            for row in _rows(cell)
            if int(row["step"]) in steps
        ]
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
        at = np.asarray(steps)[kept].tolist()
        low, high, mean = (of(values[:, kept], axis=0).round(4).tolist() for of in (np.min, np.max, np.mean))
        edge = {"x": at, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "meta": f"layer-{layer + 1}"}
        if len(values) > 1:
            canvas.add("scatter", y=low, **edge)
            canvas.add("scatter", y=high, fill="tonexty", fillcolor=faded(tint, 0.12), **edge)
        canvas.add(
            "scatter",
            x=at,
            y=mean,
            mode="lines+markers",
            line={"color": tint, "width": 2, "dash": dash},
            marker={"size": 4},
            meta=f"layer-{layer + 1}",
            hovertemplate=f"layer {layer + 1}<br>step %{{x}}: %{{y:.2f}}<extra></extra>",
        )
    canvas.x("training step", rangemode="tozero", nticks=5)
    canvas.y("", range=[-0.72, 0.05], tickvals=[-0.5, -0.25, 0])
    return canvas.figure()


def _words(steps: Sequence[int], found: Float[np.ndarray, "seeds moments layers"]) -> str:
    first, last = (np.nanmean(found[:, at], axis=0) for at in (0, -1))
    told = [
        f"layer {i}: {a:.2f} at step {steps[0]}, {b:.2f} at step {steps[-1]}"
        for i, (a, b) in enumerate(zip(first, last, strict=True), start=1)
    ]
    return f"Exponents, mean over heads and {found.shape[0]} seeds. {'; '.join(told)}."
