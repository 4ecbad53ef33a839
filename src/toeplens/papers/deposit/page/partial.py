"""The figures about RoPE on some of the heads, in one layer alone, and together with an absolute encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import plotly.graph_objects as go

from toeplens.ground.words import fixed, whole
from toeplens.model import Protocol
from toeplens.papers.deposit import SCALES, Reproduction, title
from toeplens.papers.deposit.factors import concentrated
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page.accuracy import accuracy_panel
from toeplens.papers.deposit.page.deposits import SHARE
from toeplens.papers.deposit.page.heads import heat_panel
from toeplens.papers.deposit.page.look import (
    TASKS,
    accuracy_top,
    beside,
    colour,
    drop_limit,
    drop_ramp,
    legend,
    marker,
    name,
    ordered,
    protocol_title,
    under_headings,
)
from toeplens.report.kit.blocks import Block, Panel, Sign, View
from toeplens.report.kit.canvas import Canvas, guess_levels, guesses_across
from toeplens.report.kit.colours import PINK, faded
from toeplens.report.kit.dots import Series, dots
from toeplens.studies import CellResult, Results
from toeplens.training.presets import DISTANCE

_DRAWN = PINK  # heads drawn at random
Rows = Sequence[tuple[str, Sequence[CellResult]]]  # what stands at the left, and its models


def _whole_rope(protocol: Protocol) -> str:
    """The label of RoPE on all heads and nothing else; the released "rope" has a sinusoid and is not it."""
    return "rope-alone" if protocol == "released" else "rope"


def rotated_heads(
    results: Results, protocol: Protocol, task: str, heads: int, *, drawn: bool = False
) -> list[tuple[int, str]]:
    """Number of rotating heads and label of Fig. 5's finished models; the released "rope" is not among them.

    ``drawn`` asks for the models whose heads are drawn at random, without those at the two ends.
    """
    labels = results.under(protocol).labels(task)
    variant = "random" if drawn else ""
    counts = {
        at.heads: label for label in labels if (at := Label.parse(label)).heads is not None and at.variant == variant
    }
    if not drawn:
        counts |= {count: end for count, end in ((0, "nope"), (heads, _whole_rope(protocol))) if end in labels}
    return sorted(counts.items())


def accuracy(state: Reproduction) -> Block:
    """Accuracy by how many heads rotate (Fig. 5)."""
    heads = SCALES[state.plan.scale].model["num_heads"]
    panels, drawn_too = [], False
    for task, what in TASKS.items():
        for protocol in state.plan.protocols:
            found = rotated_heads(state.results, protocol, task, heads)
            if not any(Label.parse(label).heads is not None for _, label in found):
                continue
            drawn = rotated_heads(state.results, protocol, task, heads, drawn=True)
            drawn_too |= bool(drawn)
            figure = partial_rope(state.results, protocol, task, heads, accuracy_top(state, task))
            panels.append(Panel(f"{what}, {protocol_title(protocol).lower()}", figure))
    caption = (
        "Test accuracy when only some heads of every layer rotate (the paper’s Fig. 5). No rotating head is NoPE; "
        "all heads is RoPE, in the released protocol without its sinusoid, as the program for this experiment has "
        "none. A point is a seed; the line joins the means."
    )
    signs = []
    if drawn_too:
        caption += " Crosses: as many heads of each layer, drawn at random from the seed."
        signs = [
            Sign("first", "the first heads", colour("rope"), "○"),
            Sign("random", "heads drawn at random", _DRAWN, "✕"),
        ]
    return Block("partial", "RoPE on some of the heads", caption, [View.of(panels)], legend=signs)


def partial_rope(results: Results, protocol: Protocol, task: str, heads: int, top: float = 1.0) -> go.Figure:
    """Accuracy by the number of heads that rotate (Fig. 5): none is NoPE, all is RoPE without a sinusoid.

    Lines join the means over seeds: of the first heads of each layer, and of heads drawn from the seed.
    """
    under = results.under(protocol)
    canvas = Canvas(260, bottom=54)
    found = rotated_heads(results, protocol, task, heads)
    drawn = rotated_heads(results, protocol, task, heads, drawn=True)
    _add(canvas, under, protocol, task, heads, found, "")
    if drawn:
        ends = [place for place in found if place[0] in (0, heads)]
        _add(canvas, under, protocol, task, heads, sorted([*ends, *drawn]), "random")
    guesses_across(canvas, guess_levels(under, task), top)
    names = {0: "0<br>NoPE", heads: f"{heads}<br>RoPE"}
    shown = sorted({count for count, _ in [*found, *drawn]})
    texts = [names.get(count, str(count)) for count in shown]
    canvas.x("heads with RoPE", tickvals=shown, ticktext=texts, range=[-0.06 * heads, 1.06 * heads])
    canvas.percent(top, "test accuracy")
    return canvas.figure()


def _add(
    canvas: Canvas,
    under: Results,
    protocol: Protocol,
    task: str,
    heads: int,
    places: Sequence[tuple[int, str]],
    variant: str,
) -> None:
    """A line through the means, and each seed of the models that are not the line's ends."""
    values = [(n, label, [float(v) for v in under.accuracy(task, label) if isfinite(v)]) for n, label in places]
    values = [(count, label, accuracies) for count, label, accuracies in values if accuracies]
    key, tint = variant or "first", _DRAWN if variant else colour("rope")
    canvas.lines(
        [count for count, _, _ in values],
        [sum(accuracies) / len(accuracies) for _, _, accuracies in values],
        faded(tint, 0.6),
        dash="dot" if variant else "solid",
        hoverinfo="skip",
        meta=key,
    )
    for count, label, accuracies in values:
        if variant and Label.parse(label).variant != variant:
            continue
        look = {"symbol": marker(label), "size": 9, "color": colour(label)}
        if variant:
            look = {"symbol": "x-thin-open", "size": 8, "color": _DRAWN, "line": {"width": 2}}
        hover = f"<b>{name(protocol, label)}</b><br>{count} of {heads} heads: %{{y:.1%}}<extra></extra>"
        canvas.marks([count] * len(accuracies), accuracies, look, hover, meta=key)


def _in_layers(state: Reproduction, protocol: Protocol) -> list[tuple[str, list[CellResult]]]:
    """NoPE, RoPE in each layer alone, RoPE in all."""
    under = state.results.under(protocol)
    alone = [label for label in ordered(under.labels(DISTANCE)) if Label.parse(label).layer]
    found = [(label, under.of(DISTANCE, label)) for label in ("nope", *alone, _whole_rope(protocol))]
    return [(label, cells) for label, cells in found if cells]


def layers(state: Reproduction) -> Block:
    """Accuracy with RoPE in one layer alone."""

    def draw(protocol: Protocol) -> go.Figure | None:
        lines = _in_layers(state, protocol)
        if not any(Label.parse(label).layer for label, _ in lines):
            return None
        values = [{c.key.seed: c.accuracy for c in cells if c.status == "complete"} for _, cells in lines]
        series = [Series("", "", "circle", values, [colour(label) for label, _ in lines])]
        texts = [title(label) for label, _ in lines]
        span = (0, 104 * accuracy_top(state, DISTANCE))
        return dots(texts, series, "test accuracy, per cent", scale=100, span=span)

    caption = (
        "Test accuracy on Task 1 with RoPE on all heads of one layer and no encoding elsewhere, between NoPE and RoPE "
        "in every layer (without a sinusoid). Rings are seeds; the bar is the 95% interval of the mean."
    )
    return Block("partial-layers", "RoPE in one layer alone", caption, [beside(state, draw)])


def peaks(state: Reproduction) -> Block:
    """Where the deposit is as more heads rotate."""

    def draw(protocol: Protocol) -> go.Figure | None:
        rows = [(text, cells) for text, cells in _rotating(state, protocol) if any(map(concentrated, cells))]
        return peak_map(rows) if len(rows) > 2 else None

    caption = (
        "Task 1. The share of the skill that the first head of each layer carries, in per cent, the mean over seeds, "
        "as more heads of every layer rotate, and with RoPE in one layer alone: does the deposit move with the "
        "rotation (v1’s Figs. 9 to 14)? Models without skill are left out."
    )
    what = "Where the deposit is as more heads rotate"
    return Block("partial-peaks", what, caption, [beside(state, draw)], ramp=SHARE)


def _rotating(state: Reproduction, protocol: Protocol) -> Rows:
    """Models by how many of their heads rotate, then those with RoPE in one layer."""
    heads = SCALES[state.plan.scale].model["num_heads"]
    ends = {0: "0 heads (NoPE)", 1: "1 head", heads: f"{heads} heads (RoPE)"}
    found, drawn = (rotated_heads(state.results, protocol, DISTANCE, heads, drawn=random) for random in (False, True))
    places = [(count, label, ends.get(count, f"{count} heads")) for count, label in found]
    places += [(count, label, f"{count} at random") for count, label in drawn]
    under = state.results.under(protocol)
    alone = [(Label.parse(label).layer, cells) for label, cells in _in_layers(state, protocol)]
    return [(text, under.of(DISTANCE, label)) for _, label, text in sorted(places)] + [
        (f"layer {layer} alone", cells) for layer, cells in alone if layer
    ]


def peak_map(rows: Rows) -> go.Figure:
    """The share of the skill that each layer's first head carries, the mean over the seeds that have skill."""
    able = [[[layer.peak for layer in cell.deposits()] for cell in cells if concentrated(cell)] for _, cells in rows]
    shares = [np.mean(peaks, axis=0).tolist() if peaks else [] for peaks in able]
    depth = max((len(layers) for layers in shares), default=0)
    z = [[*layers, *[None] * (depth - len(layers))] for layers in shares]
    canvas = Canvas(40 + 24 * len(rows), left=20, right=4, top=2, bottom=40)
    canvas.heat(
        z,
        list(range(1, depth + 1)),
        list(range(len(rows))),
        1,
        [[_described(text, cells, layer) for layer in range(depth)] for text, cells in rows],
        gap=2,
        numbers=[["" if value is None else whole(value) for value in row] for row in z],
    )
    canvas.x("layer", dtick=1, showgrid=False)
    texts = [text for text, _ in rows]
    canvas.y(tickvals=list(range(len(rows))), ticktext=texts, autorange="reversed", automargin=True, showgrid=False)
    return canvas.figure()


def _described(text: str, cells: Sequence[CellResult], layer: int) -> str:
    able = [cell.deposits()[layer] for cell in cells if concentrated(cell)]
    each = ", ".join(f"{found.peak:.0%} (head {found.head + 1})" for found in able[:8])
    return f"<b>{text}</b>, layer {layer + 1}<br>seeds: {each}"


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
        for quantity, (what, axis) in _SHOWN.items():

            def draw(
                protocol: Protocol, task: str = task, quantity: str = quantity, axis: str = axis
            ) -> go.Figure | None:
                found = lines(state, protocol, task, quantity)
                if not found:
                    return None
                labels.update(line.label for line in found)
                return by_layer(found, protocol, axis)

            views.append(beside(state, draw, f"{TASKS[task]}: {what[0].lower()}{what[1:]}"))
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
