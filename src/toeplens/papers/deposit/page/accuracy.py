"""Figures about accuracy and learning, and about RoPE on some heads, in one layer only, or with a sinusoid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, Literal, get_args

import numpy as np
import plotly.graph_objects as go

from toeplens.ground.words import fixed, percent, whole
from toeplens.model import Protocol
from toeplens.papers.deposit import SCALES, Reproduction, Row, title
from toeplens.papers.deposit.measured import concentrated
from toeplens.papers.deposit.page import style
from toeplens.papers.deposit.page.heads import SHARE, heatmap
from toeplens.papers.deposit.spec import Label
from toeplens.report.kit.blocks import Block, Group, Panel, Sign, View
from toeplens.report.kit.canvas import Canvas, dots, guess_levels, guesses_across, guesses_down
from toeplens.report.kit.colours import GUESS, PINK, faded
from toeplens.studies import CellResult, Results
from toeplens.training.presets import DISTANCE

Split = Literal["train", "test"]


def accuracy(state: Reproduction) -> Block:
    groups = [
        Group(title, [panel for p in state.plan.protocols if (panel := accuracy_panel(state, p, task))])
        for task, title in style.TASKS.items()
    ]
    size = "" if state.plan.scale == "paper" else " (larger models)"
    return style.block("accuracy", [View("", groups)], words={"size": size})


def accuracy_panel(
    state: Reproduction, protocol: Protocol, task: str, labels: Iterable[str] | None = None, title: str = ""
) -> Panel | None:
    """Accuracies of encodings (default: all); None if no model is finished."""
    wanted = None if labels is None else set(labels)
    rows = [row for row in state.table if (row.protocol, row.task) == (protocol, task)]
    rows = [row for row in rows if wanted is None or row.label in wanted]
    if not rows:
        return None
    figure = accuracies(rows, state.results, style.accuracy_top(state, task))
    return Panel(title or style.protocol_title(protocol), figure)


def learning(state: Reproduction, task: str, number: int) -> Block:
    """Learning curves of a task; ``number`` is that of the paper's figure."""

    def plain(results: Results) -> list[CellResult]:
        return [cell for cell in results.cells if cell.key.task == task and Label.parse(cell.key.label).heads is None]

    def draw(protocol: Protocol) -> list[Panel]:
        top = style.accuracy_top(state, task)
        return [
            Panel(f"{split.capitalize()} accuracy", convergence(state.results, protocol, task, split, top))
            for split in get_args(Split)
            if any(cell.epochs for cell in plain(state.results.under(protocol)))
        ]

    signs = style.legend(state, (cell.key.label for cell in plain(state.results)))
    words = {"task": style.TASKS[task], "number": number}
    views = [style.under_headings(state, draw)]
    return style.block(f"convergence-{task}", views, words=words, text="convergence", legend=signs)


def convergence(results: Results, protocol: Protocol, task: str, split: Split, top: float = 1.0) -> go.Figure:
    """Accuracy by epoch, one line per encoding: mean over seeds, with the range as a band (Figs. 2 and 3).

    Diverged runs are shown, up to where they diverged, only if all runs of an encoding diverged.

    Arguments
        results                the study's finished cells
        protocol, task, split  what the panel shows
        top                    upper end of the accuracy axis, shared by panels
    """
    under = results.under(protocol)
    canvas = Canvas(290)
    longest = 1
    for label in style.ordered(under.labels(task)):
        if Label.parse(label).heads is not None:
            continue
        cells = under.of(task, label)
        whole = [cell for cell in cells if cell.status == "complete"]
        text = style.name(protocol, label) if whole else f"{style.name(protocol, label)} (diverged)"
        curves: list[list[float]] = [
            np.array([row.get(f"{split}_accuracy") for row in cell.epochs], dtype=float).tolist()
            for cell in whole or cells
        ]
        epochs = max(([round(row["epoch"], 2) for row in cell.epochs] for cell in whole or cells), key=len, default=[])
        if whole:
            curves = [curve + curve[-1:] * (len(epochs) - len(curve)) for curve in curves]
        _add_curve(canvas, epochs, curves, label, text)
        longest = max([longest, *epochs])
    guesses_across(canvas, guess_levels(under, task), top)
    room = max(0.25, 0.02 * longest)
    canvas.x(
        "epoch",
        tickformat="d",
        range=[min(1, longest / 20) - room, longest + room],
        **({"dtick": 1} if longest <= 12 else {}),
    )
    canvas.percent(top, f"{split} accuracy")
    return canvas.figure()


def _add_curve(canvas: Canvas, epochs: list[float], curves: list[list[float]], label: str, text: str) -> None:
    length = len(epochs)
    columns = [[c[i] for c in curves if i < len(c) and isfinite(c[i])] for i in range(length)]
    if len(curves) > 1:
        low, high = ([end(column, default=None) for column in columns] for end in (min, max))
        canvas.band(epochs, low, high, style.colour(label), 0.1, label)
    canvas.lines(
        epochs,
        [sum(column) / len(column) if column else None for column in columns],
        style.colour(label),
        f"<b>{text}</b><br>epoch %{{x}}: %{{y:.1%}}<br>%{{customdata}}<extra></extra>",
        mode="lines+markers" if length <= 30 else "lines",
        marker={"symbol": style.marker(label), "size": 7},
        meta=label,
        customdata=[
            f"{percent(min(c))} to {percent(max(c))}, {len(c)} seeds" if len(c) > 1 else "one seed" for c in columns
        ],
        name=text,
    )


def accuracies(rows: Sequence[Row], results: Results, top: float = 1.0) -> go.Figure:
    """Final test accuracies of one protocol and task, best on top: large markers are means, small ones seeds."""
    canvas = Canvas(66 + 28 * max(1, len(rows)), right=60, top=32, bottom=26, left=20)
    names = [style.name(row.protocol, row.label) for row in rows]
    for row, text in zip(rows, names, strict=True):
        _add_accuracy(canvas, row, text, results)
    told = [(row.paper / 100, text) for row, text in zip(rows, names, strict=True) if row.paper is not None]
    canvas.marks(
        [value for value, _ in told],
        [text for _, text in told],
        {"symbol": "line-ns-open", "size": 15, "color": GUESS, "line": {"width": 2.5}},
        "<b>%{y}</b><br>the paper's Table 1: %{x:.2%}<extra></extra>",
        cliponaxis=False,
    )
    if rows:
        guesses_down(canvas, guess_levels(results.under(rows[0].protocol), rows[0].task))
    end = max([top, *(math.ceil(10 * value) / 10 for value, _ in told)])
    order = {"categoryorder": "array", "categoryarray": names[::-1], "range": [-0.6, len(rows) - 0.4]}
    canvas.y(**order, automargin=True, showgrid=False)
    ticks = [end * quarter / 4 for quarter in range(5)]
    texts = [f"{100 * tick:.0f}%" if quarter % 2 == 0 else "" for quarter, tick in enumerate(ticks)]
    canvas.x(range=[-0.015 * end, 1.03 * end], tickvals=ticks, ticktext=texts, tickangle=0)
    return canvas.figure()


def _add_accuracy(canvas: Canvas, row: Row, text: str, results: Results) -> None:
    cells = [cell for cell in results.under(row.protocol).of(row.task, row.label) if cell.status == "complete"]
    beside: dict[str, Any] = {"xref": "paper", "x": 1, "y": text, "xanchor": "left", "xshift": 4, "font": {"size": 12}}
    if row.accuracy is None:
        canvas.add("scatter", x=[None], y=[text], mode="markers", hoverinfo="skip")
        canvas.note("diverged", **beside)
        return
    canvas.note(percent(row.accuracy, sign=False), **beside)
    seeds = f"{percent(row.lowest)} to {percent(row.highest)} over {len(cells)} seeds" if len(cells) > 1 else "one seed"
    if len(cells) > 1:
        canvas.marks(
            [cell.accuracy for cell in cells],
            [text] * len(cells),
            {"symbol": "circle-open", "size": 6, "color": style.colour(row.label)},
            f"<b>{text}</b><br>seed %{{customdata}}: %{{x:.1%}}<extra></extra>",
            customdata=[cell.key.seed for cell in cells],
        )
    canvas.marks(
        [row.accuracy],
        [text],
        {"symbol": style.marker(row.label), "size": 11, "color": style.colour(row.label)},
        f"<b>{text}</b><br>%{{x:.1%}}, {seeds}<extra></extra>",
        cliponaxis=False,
    )


_DRAWN = PINK  # heads drawn at random
Rows = Sequence[tuple[str, Sequence[CellResult]]]  # row title and its models


def _whole_rope(protocol: Protocol) -> str:
    """Label of RoPE on all heads without a sinusoid; the released "rope" adds one."""
    return "rope-alone" if protocol == "released" else "rope"


def rotated_heads(
    results: Results, protocol: Protocol, task: str, heads: int, *, drawn: bool = False
) -> list[tuple[int, str]]:
    """Number of rotated heads and label of the finished models of Fig. 5, without the released "rope".

    With ``drawn``: the models whose heads are chosen at random, without those at the two ends.
    """
    labels = results.under(protocol).labels(task)
    variant = "random" if drawn else ""
    counts = {
        at.heads: label for label in labels if (at := Label.parse(label)).heads is not None and at.variant == variant
    }
    if not drawn:
        counts |= {count: end for count, end in ((0, "nope"), (heads, _whole_rope(protocol))) if end in labels}
    return sorted(counts.items())


def partial_accuracy(state: Reproduction) -> Block:
    heads = SCALES[state.plan.scale].model["num_heads"]
    panels, drawn_too = [], False
    for task, what in style.TASKS.items():
        for protocol in state.plan.protocols:
            found = rotated_heads(state.results, protocol, task, heads)
            if not any(Label.parse(label).heads is not None for _, label in found):
                continue
            drawn = rotated_heads(state.results, protocol, task, heads, drawn=True)
            drawn_too |= bool(drawn)
            figure = partial_rope(state.results, protocol, task, heads, style.accuracy_top(state, task))
            panels.append(Panel(f"{what}, {style.protocol_title(protocol).lower()}", figure))
    signs, more = [], ""
    if drawn_too:
        more = " Crosses: the same number of heads per layer, chosen at random."
        signs = [
            Sign("first", "the first heads", style.colour("rope"), "○"),
            Sign("random", "random heads", _DRAWN, "✕"),
        ]
    return style.block("partial", [View.of(panels)], words={"drawn": more}, legend=signs)


def partial_rope(results: Results, protocol: Protocol, task: str, heads: int, top: float = 1.0) -> go.Figure:
    """Accuracy by number of rotated heads (Fig. 5): none is NoPE, all is RoPE without a sinusoid.

    Lines join the means over seeds, for the first heads of each layer and for random heads.
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
    values = [(n, label, [float(v) for v in under.accuracy(task, label) if isfinite(v)]) for n, label in places]
    values = [(count, label, accuracies) for count, label, accuracies in values if accuracies]
    key, tint = variant or "first", _DRAWN if variant else style.colour("rope")
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
        look = {"symbol": style.marker(label), "size": 9, "color": style.colour(label)}
        if variant:
            look = {"symbol": "x-thin-open", "size": 8, "color": _DRAWN, "line": {"width": 2}}
        hover = f"<b>{style.name(protocol, label)}</b><br>{count} of {heads} heads: %{{y:.1%}}<extra></extra>"
        canvas.marks([count] * len(accuracies), accuracies, look, hover, meta=key)


def _in_layers(state: Reproduction, protocol: Protocol) -> list[tuple[str, list[CellResult]]]:
    """NoPE, RoPE in one layer only, RoPE in all layers."""
    under = state.results.under(protocol)
    alone = [label for label in style.ordered(under.labels(DISTANCE)) if Label.parse(label).layer]
    found = [(label, under.of(DISTANCE, label)) for label in ("nope", *alone, _whole_rope(protocol))]
    return [(label, cells) for label, cells in found if cells]


def layers(state: Reproduction) -> Block:
    def draw(protocol: Protocol) -> go.Figure | None:
        lines = _in_layers(state, protocol)
        if not any(Label.parse(label).layer for label, _ in lines):
            return None
        values = [{c.key.seed: c.accuracy for c in cells if c.status == "complete"} for _, cells in lines]
        series = style.one_series((label for label, _ in lines), values)
        texts = [title(label) for label, _ in lines]
        span = (0, 104 * style.accuracy_top(state, DISTANCE))
        return dots(texts, series, "test accuracy, per cent", scale=100, span=span)

    return style.block("partial-layers", [style.beside(state, draw)])


def peaks(state: Reproduction) -> Block:
    def draw(protocol: Protocol) -> go.Figure | None:
        rows = [(text, cells) for text, cells in _rotating(state, protocol) if any(map(concentrated, cells))]
        return peak_map(rows) if len(rows) > 2 else None

    return style.block("partial-peaks", [style.beside(state, draw)], ramp=SHARE)


def _rotating(state: Reproduction, protocol: Protocol) -> Rows:
    """Models by number of rotated heads, then those with RoPE in one layer."""
    heads = SCALES[state.plan.scale].model["num_heads"]
    ends = {0: "0 heads (NoPE)", 1: "1 head", heads: f"{heads} heads (RoPE)"}
    found, drawn = (rotated_heads(state.results, protocol, DISTANCE, heads, drawn=random) for random in (False, True))
    places = [(count, label, ends.get(count, f"{count} heads")) for count, label in found]
    places += [(count, label, f"{count} at random") for count, label in drawn]
    under = state.results.under(protocol)
    alone = [(Label.parse(label).layer, cells) for label, cells in _in_layers(state, protocol)]
    return [(text, under.of(DISTANCE, label)) for _, label, text in sorted(places)] + [
        (f"layer {layer} only", cells) for layer, cells in alone if layer
    ]


def peak_map(rows: Rows) -> go.Figure:
    """Share of the skill lost by ablating each layer's most important head, mean over seeds with skill."""
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


def sinusoid(state: Reproduction) -> Block:
    limit = style.drop_limit(state)

    def draw(protocol: Protocol) -> list[Panel]:
        pair = ("rope-alone", "rope") if protocol == "released" else ("rope", "rope-absolute")
        under = state.results.under(protocol)
        first = [cell for label in pair for cell in under.of(DISTANCE, label)[:1]]
        maps = [heatmap(cell, limit) for cell in first if cell.ablation is not None]
        accuracies = accuracy_panel(state, protocol, DISTANCE, (*pair, "absolute"), "Test accuracy")
        return [accuracies, *maps] if maps and accuracies else []

    return style.block("sinusoid", [style.under_headings(state, draw)], "medium", ramp=style.drop_ramp(limit))


def representation(state: Reproduction) -> Block:
    labels = set[str]()

    def draw(protocol: Protocol, task: str, quantity: str, axis: str) -> go.Figure | None:
        found = _measured(state, protocol, task, quantity)
        labels.update(found)
        return by_layer(found, protocol, axis) if found else None

    views = [
        style.beside(state, partial(draw, task=task, quantity=quantity, axis=axis), f"{name}: {what}")
        for task, name in style.TASKS.items()
        for quantity, (what, axis) in style.TEXTS["stream"].items()
    ]
    return style.block("representation", views, legend=style.legend(state, labels))


def _measured(state: Reproduction, protocol: Protocol, task: str, quantity: str) -> dict[str, dict[int, list[float]]]:
    """By encoding and seed, a quantity of the residual stream by layer; without encodings for which it is undefined."""
    under, found = state.results.under(protocol), {}
    for label in style.TEXTS["compared"][protocol]:
        cells = [cell for cell in under.of(task, label) if cell.measure("representation")]
        values = {cell.key.seed: list(getattr(cell.measure("representation"), quantity)) for cell in cells}
        if np.isfinite(list(values.values())).any():
            found[label] = values
    return found


def by_layer(found: Mapping[str, Mapping[int, Sequence[float]]], protocol: Protocol, axis: str) -> go.Figure:
    """One line per encoding through the means over seeds, one point per seed."""
    canvas = Canvas(250, left=54, bottom=40)
    every = np.concatenate([np.ravel(list(values.values())) for values in found.values()])
    low, high = min(0.0, float(np.nanmin(every))), max(1.0, float(np.nanmax(every)))
    for index, (label, values) in enumerate(found.items()):
        tint, text = style.colour(label), style.name(protocol, label)
        moved = 0.05 * (index - (len(found) - 1) / 2)  # so that points of two encodings do not hide each other
        kept = [
            (layer + moved, round(float(value), 4), seed)
            for seed, row in values.items()
            for layer, value in enumerate(row, start=1)
            if np.isfinite(value)
        ]
        canvas.marks(
            [x for x, _, _ in kept],
            [y for _, y, _ in kept],
            {"symbol": "circle-open", "size": 5, "color": tint, "opacity": 0.7},
            [f"<b>{text}</b>, seed {seed}: {y:.2f}" for _, y, seed in kept],
            meta=label,
        )
        columns = [column[np.isfinite(column)] for column in np.array(list(values.values())).T]
        means = [round(float(np.mean(column)), 4) if len(column) else None for column in columns]
        told = [f"<b>{text}</b>, before layer {layer}: {fixed(mean)}" for layer, mean in enumerate(means, start=1)]
        places = [layer + moved for layer in range(1, len(means) + 1)]
        look = {"symbol": style.marker(label), "size": 8}
        canvas.lines(places, means, tint, told, marker=look, meta=label)
    canvas.x("before layer", dtick=1)
    canvas.y(axis, range=[low - 0.05 * (high - low), high + 0.05 * (high - low)])
    return canvas.figure()
