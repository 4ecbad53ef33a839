"""The figure of position in the residual stream: what becomes of the sinusoid when RoPE is there as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from toeplens.lens.stream.representation import Representation
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.page.look import TASKS, colour, marker, name
from toeplens.papers.deposit.page.parts import legend, protocol_title
from toeplens.report.kit.blocks import Block, Group, Panel, View
from toeplens.report.kit.canvas import Canvas
from toeplens.studies import CellResult

MEASURE = "representation"
_SHOWN: dict[str, tuple[str, str]] = {
    "alignment": ("Share of position’s variance in the sinusoid’s directions", "share"),
    "coefficient": ("How much of the sinusoid is left (1: all, 0: none)", "coefficient"),
    "variance_share": ("Position’s share of the stream’s variance", "share"),
    "decodability": ("How well position can be read (R² of a linear probe)", "R²"),
}
_COMPARED: dict[Protocol, tuple[str, ...]] = {
    "released": ("rope", "absolute", "rope-alone"),
    "paper": ("rope-absolute", "absolute", "rope"),
}


@dataclass(frozen=True)
class Line:
    """A quantity of one encoding's models: by layer, a row a seed."""

    label: str
    seeds: list[int]
    values: np.ndarray


def representation(state: Reproduction) -> Block:
    """Where position is in the stream, layer by layer: RoPE + sinusoid against the sinusoid alone."""
    views, labels = [], set[str]()
    for task in TASKS:
        for quantity, (title, axis) in _SHOWN.items():
            panels = []
            for protocol in state.plan.protocols:
                found = lines(state, protocol, task, quantity)
                if found:
                    labels |= {line.label for line in found}
                    drawn = by_layer(found, protocol, axis)
                    panels.append(Panel(protocol_title(protocol), drawn, f"{title}. {_words(found, protocol)}"))
            views.append(View(f"{TASKS[task]}: {title[0].lower()}{title[1:]}", [Group("", panels)]))
    caption = (
        "Position in the residual stream before each layer (the mean over texts, by position), on test texts: how much "
        "of it there is, whether it still lies in the directions of the sinusoid that was added at the input, and how "
        "well a linear probe reads it. Lines are means over seeds, points are seeds; a point is missing where there is "
        "no position in the stream, or no sinusoid to compare it with."
    )
    title = "What becomes of the sinusoid when RoPE is there as well"
    return Block("representation", title, caption, views, legend=legend(state, labels))


def lines(state: Reproduction, protocol: Protocol, task: str, quantity: str) -> list[Line]:
    """The encodings that have the quantity defined anywhere."""
    found = []
    for label in _COMPARED[protocol]:
        cells = [cell for cell in state.results.under(protocol).of(task, label) if cell.measures.get(MEASURE)]
        if cells:
            values = np.array([_by_layer(cell, quantity) for cell in cells])
            if np.isfinite(values).any():
                found.append(Line(label, [cell.key.seed for cell in cells], values))
    return found


def _by_layer(cell: CellResult, quantity: str) -> np.ndarray:
    return getattr(Representation.from_dict(cell.measures[MEASURE]), quantity)


def by_layer(found: Sequence[Line], protocol: Protocol, axis: str) -> go.Figure:
    """A line an encoding through the means over seeds, and a point a seed."""
    canvas = Canvas(250, left=54, bottom=40)
    low = min(0.0, min(float(np.nanmin(line.values)) for line in found))
    high = max(1.0, max(float(np.nanmax(line.values)) for line in found))
    for index, line in enumerate(found):
        depth, tint, text = line.values.shape[1], colour(line.label), name(protocol, line.label)
        moved = 0.05 * (index - (len(found) - 1) / 2)  # so that points of two encodings do not hide each other
        kept = [
            (layer + 1 + moved, round(float(value), 4), seed)
            for seed, row in zip(line.seeds, line.values, strict=True)
            for layer, value in enumerate(row)
            if np.isfinite(value)
        ]
        canvas.add(
            "scatter",
            x=[x for x, _, _ in kept],
            y=[y for _, y, _ in kept],
            mode="markers",
            marker={"symbol": "circle-open", "size": 5, "color": tint, "opacity": 0.7},
            text=[f"<b>{text}</b>, seed {seed}: {y:.2f}" for _, y, seed in kept],
            hovertemplate="%{text}<extra></extra>",
            meta=line.label,
        )
        means = _means(line.values)
        canvas.add(
            "scatter",
            x=[layer + 1 + moved for layer in range(depth)],
            y=means,
            mode="lines+markers",
            line={"color": tint, "width": 2},
            marker={"symbol": marker(line.label), "size": 8},
            text=[
                f"<b>{text}</b>, before layer {layer + 1}: {m:.2f}" if m is not None else ""
                for layer, m in enumerate(means)
            ],
            hovertemplate="%{text}<extra></extra>",
            meta=line.label,
        )
    canvas.x("before layer", dtick=1)
    canvas.y(axis, range=[low - 0.05 * (high - low), high + 0.05 * (high - low)])
    return canvas.figure()


def _means(values: np.ndarray) -> list[float | None]:
    """The mean over the seeds that have the quantity, by layer."""
    return [round(float(np.mean(kept)), 4) if len(kept := column[np.isfinite(column)]) else None for column in values.T]


def _words(found: Sequence[Line], protocol: Protocol) -> str:
    parts = []
    for line in found:
        means = ", ".join("–" if mean is None else f"{mean:.2f}" for mean in _means(line.values))
        parts.append(f"{name(protocol, line.label)} {means}")
    return f"Mean over seeds, layer by layer: {'; '.join(parts)}."
