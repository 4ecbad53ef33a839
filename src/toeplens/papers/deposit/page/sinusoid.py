"""The figures of RoPE together with an absolute encoding: what becomes of the sinusoid when RoPE is there as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from toeplens.ground.words import fixed
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.page.accuracy import accuracy_panel
from toeplens.papers.deposit.page.heads import heat_panel
from toeplens.papers.deposit.page.look import (
    TASKS,
    beside,
    colour,
    drop_limit,
    drop_ramp,
    legend,
    marker,
    name,
    under_headings,
)
from toeplens.report.kit.blocks import Block, Panel
from toeplens.report.kit.canvas import Canvas
from toeplens.training.presets import DISTANCE

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


def sinusoid(state: Reproduction) -> Block:
    """RoPE with an absolute encoding (Fig. 6)."""
    limit = drop_limit(state)

    def draw(protocol: Protocol) -> list[Panel]:
        pair = ("rope-alone", "rope") if protocol == "released" else ("rope", "rope-absolute")
        under = state.results.under(protocol)
        first = [cell for label in pair for cell in under.of(DISTANCE, label)[:1]]
        maps = [heat_panel(cell, limit) for cell in first if cell.ablation is not None]
        accuracies = accuracy_panel(state, protocol, DISTANCE, (*pair, "absolute"), "Test accuracy")
        return [accuracies, *maps] if maps and accuracies else []

    caption = (
        "Task 1 with RoPE alone, and with a sinusoid added to the input as well (the paper’s Fig. 6): its "
        "accuracy, and where its heads matter (first seed; the colours of the other heat maps)."
    )
    title = "RoPE together with an absolute encoding"
    return Block("sinusoid", title, caption, [under_headings(state, draw)], "medium", ramp=drop_ramp(limit))


@dataclass(frozen=True)
class Line:
    """A quantity of one encoding's models: by layer, a row a seed."""

    label: str
    seeds: list[int]
    values: np.ndarray

    @property
    def means(self) -> list[float | None]:
        """The mean over the seeds that have the quantity, by layer."""
        kept = [column[np.isfinite(column)] for column in self.values.T]
        return [round(float(np.mean(values)), 4) if len(values) else None for values in kept]


def representation(state: Reproduction) -> Block:
    """Where position is in the stream, layer by layer: RoPE + sinusoid against the sinusoid alone."""
    views, labels = [], set[str]()
    for task in TASKS:
        for quantity, (title, axis) in _SHOWN.items():

            def draw(
                protocol: Protocol, task: str = task, quantity: str = quantity, axis: str = axis
            ) -> go.Figure | None:
                found = lines(state, protocol, task, quantity)
                if not found:
                    return None
                labels.update(line.label for line in found)
                return by_layer(found, protocol, axis)

            views.append(beside(state, draw, f"{TASKS[task]}: {title[0].lower()}{title[1:]}"))
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
        cells = [cell for cell in state.results.under(protocol).of(task, label) if cell.measure("representation")]
        values = np.array([getattr(cell.measure("representation"), quantity) for cell in cells])
        if np.isfinite(values).any():
            found.append(Line(label, [cell.key.seed for cell in cells], values))
    return found


def by_layer(found: Sequence[Line], protocol: Protocol, axis: str) -> go.Figure:
    """A line an encoding through the means over seeds, and a point a seed."""
    canvas = Canvas(250, left=54, bottom=40)
    low = min(0.0, min(float(np.nanmin(line.values)) for line in found))
    high = max(1.0, max(float(np.nanmax(line.values)) for line in found))
    for index, line in enumerate(found):
        tint, text = colour(line.label), name(protocol, line.label)
        moved = 0.05 * (index - (len(found) - 1) / 2)  # so that points of two encodings do not hide each other
        kept = [
            (layer + 1 + moved, round(float(value), 4), seed)
            for seed, row in zip(line.seeds, line.values, strict=True)
            for layer, value in enumerate(row)
            if np.isfinite(value)
        ]
        canvas.marks(
            [x for x, _, _ in kept],
            [y for _, y, _ in kept],
            {"symbol": "circle-open", "size": 5, "color": tint, "opacity": 0.7},
            [f"<b>{text}</b>, seed {seed}: {y:.2f}" for _, y, seed in kept],
            meta=line.label,
        )
        told = [f"<b>{text}</b>, before layer {i}: {fixed(mean)}" for i, mean in enumerate(line.means, start=1)]
        places = [layer + 1 + moved for layer in range(len(told))]
        look = {"symbol": marker(line.label), "size": 8}
        canvas.lines(places, line.means, tint, told, marker=look, meta=line.label)
    canvas.x("before layer", dtick=1)
    canvas.y(axis, range=[low - 0.05 * (high - low), high + 0.05 * (high - low)])
    return canvas.figure()
