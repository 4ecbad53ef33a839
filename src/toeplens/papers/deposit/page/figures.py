"""The report's figures, each one panel: a plotly figure without a title, so that it fits any width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import isfinite
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from toeplens.ground.words import or_none, percent, points
from toeplens.model import Protocol
from toeplens.papers.deposit import Row
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page.look import colour, marker, name, ordered
from toeplens.report.kit.canvas import GUESS, Canvas, faded, guess_levels, guesses_across, guesses_down, number
from toeplens.report.kit.colours import HEAT, layer_look
from toeplens.studies import CellResult, Results

Split = Literal["train", "test"]


def convergence(results: Results, protocol: Protocol, task: str, split: Split, top: float = 1.0) -> go.Figure:
    """Accuracy by epoch, a line an encoding; with several seeds the mean, and the range as a band (Figs. 2 and 3).

    Diverged runs are shown, up to where they diverged, only for an encoding that has no other.

    Arguments
        results                the study's finished cells
        protocol, task, split  what the panel shows
        top                    upper end of the accuracy axis, so that panels can share it
    """
    under = results.under(protocol)
    canvas = Canvas(290)
    longest = 1
    for label in ordered(under.labels(task)):
        if Label.parse(label).heads is not None:
            continue
        cells = under.of(task, label)
        whole = [cell for cell in cells if cell.status == "complete"]
        text = name(protocol, label) if whole else f"{name(protocol, label)} (diverged)"
        curves = [[number(row.get(f"{split}_accuracy")) for row in cell.epochs] for cell in whole or cells]
        longest = max(longest, _add_curve(canvas, curves, label, text))
    guesses_across(canvas, guess_levels(under, task), top)
    room = max(0.25, 0.02 * longest)
    canvas.x("epoch", tickformat="d", range=[1 - room, longest + room], **({"dtick": 1} if longest <= 12 else {}))
    canvas.percent(top, f"{split} accuracy")
    return canvas.figure()


def _add_curve(canvas: Canvas, curves: list[list[float]], label: str, text: str) -> int:
    """Add the seeds' mean curve and range; returns how long the curve is."""
    length = max((len(curve) for curve in curves), default=0)
    epochs = list(range(1, length + 1))
    columns = [[c[i] for c in curves if i < len(c) and isfinite(c[i])] for i in range(length)]
    if len(curves) > 1:
        edge: dict[str, Any] = {"x": epochs, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "meta": label}
        canvas.add("scatter", y=[min(column, default=None) for column in columns], **edge)
        high = [max(column, default=None) for column in columns]
        canvas.add("scatter", y=high, fill="tonexty", fillcolor=faded(colour(label), 0.1), **edge)
    canvas.add(
        "scatter",
        x=epochs,
        y=[sum(column) / len(column) if column else None for column in columns],
        mode="lines+markers" if length <= 30 else "lines",
        line={"color": colour(label), "width": 2},
        marker={"symbol": marker(label), "size": 7},
        meta=label,
        customdata=[
            f"{percent(min(c))} to {percent(max(c))}, {len(c)} seeds" if len(c) > 1 else "one seed" for c in columns
        ],
        name=text,
        hovertemplate=f"<b>{text}</b><br>epoch %{{x}}: %{{y:.1%}}<br>%{{customdata}}<extra></extra>",
    )
    return length


def accuracies(rows: Sequence[Row], results: Results, top: float = 1.0) -> go.Figure:
    """Final test accuracies of one protocol and task: a large marker the mean, small ones the seeds, best on top."""
    canvas = Canvas(66 + 28 * max(1, len(rows)), right=60, top=32, bottom=26, left=20)
    names = [name(row.protocol, row.label) for row in rows]
    for row, text in zip(rows, names, strict=True):
        _add_accuracy(canvas, row, text, results)
    told = [(row.paper / 100, text) for row, text in zip(rows, names, strict=True) if row.paper is not None]
    canvas.add(
        "scatter",
        x=[value for value, _ in told],
        y=[text for _, text in told],
        mode="markers",
        cliponaxis=False,
        marker={"symbol": "line-ns-open", "size": 15, "color": GUESS, "line": {"width": 2.5}},
        hovertemplate="<b>%{y}</b><br>the paper's Table 1: %{x:.2%}<extra></extra>",
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
        canvas.add(
            "scatter",
            x=[cell.accuracy for cell in cells],
            y=[text] * len(cells),
            mode="markers",
            marker={"symbol": "circle-open", "size": 6, "color": colour(row.label)},
            customdata=[cell.key.seed for cell in cells],
            hovertemplate=f"<b>{text}</b><br>seed %{{customdata}}: %{{x:.1%}}<extra></extra>",
        )
    canvas.add(
        "scatter",
        x=[row.accuracy],
        y=[text],
        mode="markers",
        cliponaxis=False,
        marker={"symbol": marker(row.label), "size": 11, "color": colour(row.label)},
        hovertemplate=f"<b>{text}</b><br>%{{x:.1%}}, {seeds}<extra></extra>",
    )


def heatmap(cell: CellResult, limit: float) -> go.Figure:
    """What silencing each head of a model costs, layer by head (Figs. 4, 7 and 8); ``limit`` ends the colour scale."""
    if cell.ablation is None:
        return Canvas(100).figure()
    drops, few = cell.ablation.drops, cell.ablation.drops.shape[1] <= 8
    layers, heads = drops.shape
    canvas = Canvas(42 + (30 if layers <= 4 else 22) * layers, left=34, right=4, top=2, bottom=34)
    canvas.add(
        "heatmap",
        z=drops.tolist(),
        x=list(range(1, heads + 1)),
        y=list(range(1, layers + 1)),
        customdata=[[_drop_words(cell, layer, head) for head in range(heads)] for layer in range(layers)],
        hovertemplate="%{customdata}<extra></extra>",
        coloraxis="coloraxis",
        xgap=2 if few else 1,
        ygap=2 if few else 1,
        **({"text": [[_whole(drop) for drop in row] for row in drops], "texttemplate": "%{text}"} if few else {}),
        textfont={"size": 11},
    )
    plain = {"showgrid": False, "ticks": ""}
    canvas.x("head", dtick=1 if few else 5, tick0=1 if few else 0, **plain)
    canvas.y("layer", dtick=1, autorange="reversed", **plain)
    scale = [[0, HEAT["light"][0]], [0.5, HEAT["light"][1]], [1, HEAT["light"][2]]]
    return canvas.figure(coloraxis={"cmin": -limit, "cmax": limit, "colorscale": scale, "showscale": False})


def _drop_words(cell: CellResult, layer: int, head: int) -> str:
    ablation = cell.ablation
    assert ablation is not None
    drop, low, high = (values[layer, head] for values in (ablation.drops, ablation.low, ablation.high))
    return (
        f"layer {layer + 1}, head {head + 1}<br><b>{points(drop)} points lost</b> [{points(low)}, {points(high)}]<br>"
        f"accuracy {percent(ablation.baseline)} → {percent(ablation.baseline - drop)}"
    )


def _whole(drop: float) -> str:
    """A drop in whole points, for a cell of a heat map."""
    return f"{round(100 * drop) + 0:d}".replace("-", "−")


def drops_by_layer(cells: Sequence[CellResult], low: float, high: float) -> go.Figure:
    """The drops of all heads of all seeds, a violin a layer, every head a point (the papers' form of Figs. 4, 7, 8)."""
    canvas = Canvas(170, left=46, right=4, top=4, bottom=34)
    ablations = [(cell.key.seed, cell.ablation) for cell in cells if cell.ablation is not None]
    tint = colour(cells[0].key.label) if cells else GUESS
    for layer in range(max((len(ablation.drops) for _, ablation in ablations), default=0)):
        heads = [(s, h, 100 * float(d)) for s, a in ablations for h, d in enumerate(a.drops[layer])]
        canvas.add(
            "violin",
            x=[layer + 1] * len(heads),
            y=[drop for _, _, drop in heads],
            text=[
                f"layer {layer + 1}, head {h + 1}, seed {s}<br><b>{points(d / 100)} points lost</b>"
                for s, h, d in heads
            ],
            hoveron="points",
            hovertemplate="%{text}<extra></extra>",
            points="all",
            pointpos=0,
            jitter=0.5,
            spanmode="hard",
            scalemode="width",
            width=0.8,
            line={"color": tint, "width": 1},
            fillcolor=faded(tint, 0.16),
            marker={"color": tint, "size": 6 if len(heads) <= 16 else 4, "opacity": 0.75},
        )
    canvas.x("layer", dtick=1, showgrid=False)
    canvas.y("points lost", range=[100 * low, 100 * high])
    return canvas.figure()


def cumulative(cells: Sequence[CellResult], top: float = 1.0) -> go.Figure:
    """Accuracy with a layer's heads silenced one by one, most important first: a line a layer, the mean over seeds.

    The dashed line is where half of the skill is gone, the dotted one chance.
    """
    canvas = Canvas(170, left=44, right=6, top=4, bottom=34)
    ablations = [cell.ablation for cell in cells if cell.ablation is not None]
    if not ablations:
        return canvas.figure()
    curves = np.mean([ablation.cumulative for ablation in ablations], axis=0)
    baseline, chance = float(np.mean([ablation.baseline for ablation in ablations])), ablations[0].chance
    if baseline > chance:
        canvas.line_at((baseline + chance) / 2)
    canvas.line_at(chance, dash="dot")
    for layer, curve in enumerate(curves):
        tint, dash = layer_look(layer)
        canvas.add(
            "scatter",
            x=list(range(len(curve))),
            y=[or_none(value) for value in curve.tolist()],
            mode="lines+markers" if len(curve) <= 9 else "lines",
            line={"color": tint, "width": 2, "dash": dash},
            marker={"size": 5},
            meta=f"layer-{layer + 1}",
            hovertemplate=f"layer {layer + 1}, %{{x}} heads silenced: %{{y:.1%}}<extra></extra>",
        )
    canvas.x("heads silenced", dtick=1 if curves.shape[1] <= 9 else 4)
    canvas.percent(top)
    return canvas.figure()


def accuracy_and_drop(results: Results, protocol: Protocol, task: str, top: float = 1.0) -> go.Figure:
    """Each model's accuracy against the most that one of its heads carries; on the dotted line, all of the skill."""
    canvas = Canvas(310)
    cells = [cell for cell in results.under(protocol).cells if cell.key.task == task and cell.ablation is not None]
    if cells:
        chance = cells[0].chance
        line = {"color": GUESS, "width": 1, "dash": "dot"}
        canvas.add("scatter", x=[chance, top], y=[0, 100 * (top - chance)], mode="lines", line=line, hoverinfo="skip")
    for cell in cells:
        assert cell.ablation is not None
        drop = float(cell.ablation.drops.max())
        canvas.add(
            "scatter",
            x=[cell.ablation.baseline],
            y=[100 * drop],
            mode="markers",
            marker={"symbol": marker(cell.key.label), "size": 11, "color": colour(cell.key.label)},
            meta=cell.key.label,
            hovertemplate=f"<b>{name(protocol, cell.key.label)}</b>, seed {cell.key.seed}<br>accuracy %{{x:.1%}}<br>"
            f"largest drop {points(drop)} points<extra></extra>",
        )
    canvas.x("accuracy of the intact model", range=[0, top * 1.04], tickformat=".0%")
    canvas.y("largest drop by one head, points", range=[-3 * top, 104 * top])
    return canvas.figure()
