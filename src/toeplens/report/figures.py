"""The report's figures, each one panel: a plotly figure without a title, so that it fits any width."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from toeplens.model import Protocol
from toeplens.report.canvas import GUESS, blank, faded, guesses, level, number, or_none, percent_axis
from toeplens.report.look import HEAT, TASKS, colour, marker, name, ordered, percent, points
from toeplens.studies import CellResult, Results
from toeplens.studies.reproduce import Row

Split = Literal["train", "test"]

_LAYERS = ("#2f6fe0", "#de7a00", "#1d9a5b", "#c8479f", "#858b95", "#8456d8", "#d2453d", "#0e9bb5")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def convergence(results: Results, protocol: Protocol, task: str, split: Split, top: float = 1.0) -> go.Figure:
    """Accuracy by epoch, a line an encoding; with several seeds the mean, and the range as a band (Figs. 2 and 3).

    Arguments
        results        the study's finished cells
        protocol, task, split  what the panel shows
        top            upper end of the accuracy axis, so that panels can share it
    """
    under = results.under(protocol)
    figure = blank(300)
    for label in ordered(under.labels(task)):
        if label.startswith("partial-"):
            continue
        curves = [[number(row.get(f"{split}_accuracy")) for row in cell.epochs] for cell in under.of(task, label)]
        _add_curve(figure, curves, label, name(protocol, label))
    guesses(figure, under, task)
    figure.update_xaxes(title_text="epoch", tickformat="d", rangemode="tozero")
    percent_axis(figure, top, f"{split} accuracy")
    return figure


def _add_curve(figure: go.Figure, curves: list[list[float]], label: str, text: str) -> None:
    curves = [curve for curve in curves if curve]
    if not curves:
        return
    length = max(len(curve) for curve in curves)
    epochs = list(range(1, length + 1))
    columns = [[c[i] for c in curves if i < len(c) and isfinite(c[i])] for i in range(length)]
    if len(curves) > 1:
        low = [min(column, default=None) for column in columns]
        high = [max(column, default=None) for column in columns]
        edge: dict[str, Any] = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "meta": label}
        figure.add_scatter(x=epochs, y=low, **edge)
        figure.add_scatter(x=epochs, y=high, fill="tonexty", fillcolor=faded(colour(label), 0.15), **edge)
    means = [sum(column) / len(column) if column else None for column in columns]
    ranges = [f"{percent(min(c))} to {percent(max(c))}, {len(c)} seeds" if len(c) > 1 else "one seed" for c in columns]
    figure.add_scatter(
        x=epochs,
        y=means,
        mode="lines+markers" if length <= 30 else "lines",
        line={"color": colour(label), "width": 2},
        marker={"symbol": marker(label), "size": 7},
        meta=label,
        customdata=ranges,
        name=text,
        hovertemplate=f"<b>{text}</b><br>epoch %{{x}}: %{{y:.1%}}<br>%{{customdata}}<extra></extra>",
    )


def accuracies(rows: Sequence[Row], results: Results, top: float = 1.0) -> go.Figure:
    """Final test accuracies of one protocol and task: a large marker the mean, small ones the seeds, best on top."""
    figure = blank(64 + 30 * max(1, len(rows)))
    names = [name(row.protocol, row.label) for row in rows]
    for row, text in zip(rows, names, strict=True):
        _add_accuracy(figure, row, text, results)
    told = [(row.paper / 100, text) for row, text in zip(rows, names, strict=True) if row.paper is not None]
    if told:
        figure.add_scatter(
            x=[value for value, _ in told],
            y=[text for _, text in told],
            mode="markers",
            marker={"symbol": "line-ns-open", "size": 15, "color": GUESS, "line": {"width": 2.5}},
            hovertemplate="<b>%{y}</b><br>the paper's Table 1: %{x:.2%}<extra></extra>",
        )
    if rows:
        guesses(figure, results.under(rows[0].protocol), rows[0].task, vertical=True)
    figure.update_yaxes(
        categoryorder="array", categoryarray=names[::-1], automargin=True, showgrid=False, range=[-0.6, len(rows) - 0.1]
    )
    figure.update_xaxes(
        range=[0, max(top * 1.13, max((value for value, _ in told), default=0) * 1.05)], tickformat=".0%"
    )
    return figure


def _add_accuracy(figure: go.Figure, row: Row, text: str, results: Results) -> None:
    cells = [cell for cell in results.under(row.protocol).of(row.task, row.label) if cell.status == "complete"]
    if row.accuracy is None:
        figure.add_scatter(
            x=[0], y=[text], mode="text", text=["  diverged"], textposition="middle right", hoverinfo="skip"
        )
        return
    seeds = f"{percent(row.lowest)} to {percent(row.highest)} over {len(cells)} seeds" if len(cells) > 1 else "one seed"
    if len(cells) > 1:
        figure.add_scatter(
            x=[cell.accuracy for cell in cells],
            y=[text] * len(cells),
            mode="markers",
            marker={"symbol": "circle-open", "size": 6, "color": colour(row.label)},
            customdata=[cell.key.seed for cell in cells],
            hovertemplate=f"<b>{text}</b><br>seed %{{customdata}}: %{{x:.1%}}<extra></extra>",
        )
    figure.add_scatter(
        x=[row.accuracy],
        y=[text],
        mode="markers+text",
        marker={"symbol": marker(row.label), "size": 11, "color": colour(row.label)},
        text=[percent(row.accuracy, sign=False)],
        textposition="middle right" if row.highest == row.accuracy else "top center",
        hovertemplate=f"<b>{text}</b><br>%{{x:.1%}}, {seeds}<extra></extra>",
    )


def heatmap(cell: CellResult, limit: float) -> go.Figure:
    """What silencing each head of a model costs, layer by head (Figs. 4, 7 and 8); ``limit`` ends the colour scale."""
    assert cell.ablation is not None
    ablation = cell.ablation
    layers, heads = ablation.drops.shape
    texts = [
        [
            f"layer {layer + 1}, head {head + 1}<br><b>{points(ablation.drops[layer, head])} points lost</b> "
            f"[{points(ablation.low[layer, head])}, {points(ablation.high[layer, head])}]<br>"
            f"accuracy {percent(ablation.baseline)} → {percent(ablation.baseline - ablation.drops[layer, head])}"
            for head in range(heads)
        ]
        for layer in range(layers)
    ]
    figure = blank(46 + 32 * layers)
    figure.add_heatmap(
        z=ablation.drops.tolist(),
        x=list(range(1, heads + 1)),
        y=list(range(1, layers + 1)),
        customdata=texts,
        text=[[points(round(float(drop), 2)).removesuffix(".0") for drop in row] for row in ablation.drops],
        texttemplate="%{text}" if heads <= 8 else None,
        textfont={"size": 11},
        hovertemplate="%{customdata}<extra></extra>",
        coloraxis="coloraxis",
        xgap=2,
        ygap=2,
    )
    low, middle, high = HEAT["light"]
    scale = [[0, low], [0.5, middle], [1, high]]
    figure.update_layout(
        coloraxis={"cmin": -limit, "cmax": limit, "colorscale": scale, "showscale": False},
        margin={"l": 34, "r": 4, "t": 2, "b": 34},
    )
    ticks = {"showgrid": False, "zeroline": False, "ticks": ""}
    figure.update_xaxes(title_text="head", dtick=1 if heads <= 8 else 3, tick0=1, **ticks)
    figure.update_yaxes(title_text="layer", dtick=1, autorange="reversed", **ticks)
    return figure


def drops_by_layer(cells: Sequence[CellResult], low: float, high: float) -> go.Figure:
    """The drops of all heads of all seeds, a violin a layer, every head a point (the papers' form of Figs. 4, 7, 8)."""
    figure = blank(190)
    ablated = [cell for cell in cells if cell.ablation is not None]
    layers = max((len(cell.ablation.drops) for cell in ablated if cell.ablation), default=0)
    for layer in range(layers):
        drops, texts = [], []
        for cell in ablated:
            assert cell.ablation is not None
            for head, drop in enumerate(cell.ablation.drops[layer]):
                drops.append(float(drop))
                texts.append(
                    f"layer {layer + 1}, head {head + 1}, seed {cell.key.seed}<br><b>{points(drop)} points lost</b>"
                )
        tint = colour(ablated[0].key.label)
        figure.add_violin(
            x=[layer + 1] * len(drops),
            y=drops,
            text=texts,
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
            marker={"color": tint, "size": 6, "opacity": 0.75},
        )
    figure.update_layout(margin={"l": 44, "r": 4, "t": 4, "b": 34})
    figure.update_xaxes(title_text="layer", dtick=1, showgrid=False)
    figure.update_yaxes(range=[low, high], tickformat=".0%")
    return figure


def cumulative(cells: Sequence[CellResult], top: float = 1.0) -> go.Figure:
    """Accuracy with a layer's heads silenced one by one, most important first: a line a layer, the mean over seeds."""
    figure = blank(190)
    ablations = [cell.ablation for cell in cells if cell.ablation is not None]
    if ablations:
        curves = np.mean([ablation.cumulative for ablation in ablations], axis=0)
        baseline = float(np.mean([ablation.baseline for ablation in ablations]))
        chance = ablations[0].chance
        if baseline > chance:
            level(figure, (baseline + chance) / 2, "half")
        level(figure, chance, "chance")
        for layer, curve in enumerate(curves):
            figure.add_scatter(
                x=list(range(len(curve))),
                y=[or_none(value) for value in curve.tolist()],
                mode="lines+markers",
                line={"color": _LAYERS[layer % len(_LAYERS)], "width": 2, "dash": _DASHES[layer % len(_DASHES)]},
                marker={"size": 5},
                meta=f"layer-{layer + 1}",
                hovertemplate=f"layer {layer + 1}, %{{x}} heads silenced: %{{y:.1%}}<extra></extra>",
            )
    figure.update_layout(margin={"l": 44, "r": 4, "t": 4, "b": 34})
    figure.update_xaxes(
        title_text="heads silenced", dtick=1 if not ablations or ablations[0].drops.shape[1] <= 8 else 4
    )
    figure.update_yaxes(range=[0, top * 1.04], tickformat=".0%")
    return figure


def layer_look(layer: int) -> tuple[str, str]:
    """Colour and dash of a layer in `cumulative`, for a legend."""
    return _LAYERS[layer % len(_LAYERS)], _DASHES[layer % len(_DASHES)]


def partial_rope(results: Results, protocol: Protocol, task: str, heads: int, top: float = 1.0) -> go.Figure:
    """Accuracy by the number of heads that rotate (Fig. 5): none is NoPE, all is RoPE without a sinusoid."""
    under = results.under(protocol)
    figure = blank(270)
    counts, means = [], []
    for count, label in rotated_heads(results, protocol, task, heads):
        values = [float(value) for value in under.accuracy(task, label) if isfinite(value)]
        if not values:
            continue
        counts.append(count)
        means.append(sum(values) / len(values))
        figure.add_scatter(
            x=[count] * len(values),
            y=values,
            mode="markers",
            marker={"symbol": marker(label), "size": 10, "color": colour(label)},
            hovertemplate=f"<b>{name(protocol, label)}</b><br>{count} of {heads} heads: %{{y:.1%}}<extra></extra>",
        )
    line = {"color": faded(colour("rope"), 0.6), "width": 2}
    figure.add_scatter(x=counts, y=means, mode="lines", line=line, hoverinfo="skip")
    figure.data = (figure.data[-1], *figure.data[:-1])
    guesses(figure, under, task)
    shown = sorted(set(counts))
    ends = {0: "0<br>NoPE", heads: f"{heads}<br>RoPE"}
    figure.update_xaxes(
        title_text="heads with RoPE",
        tickvals=shown,
        ticktext=[ends.get(count, str(count)) for count in shown],
        range=[-0.06 * heads, 1.06 * heads],
    )
    percent_axis(figure, top, "test accuracy")
    figure.update_layout(margin={"b": 56})
    return figure


def rotated_heads(results: Results, protocol: Protocol, task: str, heads: int) -> list[tuple[int, str]]:
    """Number of rotating heads and label of Fig. 5's finished models; the released program's "rope" is not among them."""
    full = "rope-alone" if protocol == "released" else "rope"
    labels = results.under(protocol).labels(task)
    counts = {int(label.removeprefix("partial-")): label for label in labels if label.startswith("partial-")}
    if "nope" in labels:
        counts[0] = "nope"
    if full in labels:
        counts[heads] = full
    return sorted(counts.items())


def skill_and_drop(results: Results, protocol: Protocol) -> go.Figure:
    """Each model's accuracy against the most that one of its heads carries; filled Task 1, open Task 2."""
    figure = blank(330)
    figure.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", line={"color": GUESS, "width": 1, "dash": "dot"}, hoverinfo="skip"
    )
    for cell in results.under(protocol).cells:
        if cell.ablation is None or cell.status != "complete":
            continue
        drop, text = float(cell.ablation.drops.max()), name(protocol, cell.key.label)
        first = cell.key.task == next(iter(TASKS))
        symbol = marker(cell.key.label).removesuffix("-open")
        tint = colour(cell.key.label)
        figure.add_scatter(
            x=[cell.ablation.baseline],
            y=[drop],
            mode="markers",
            marker={
                "symbol": symbol if first else f"{symbol}-open",
                "size": 11,
                "color": tint,
                "line": {"width": 1.5, "color": tint},
            },
            meta=cell.key.label,
            hovertemplate=f"<b>{text}</b>, {TASKS[cell.key.task]}, seed {cell.key.seed}<br>accuracy %{{x:.1%}}<br>"
            f"largest drop {points(drop)} points<extra></extra>",
        )
    figure.update_xaxes(title_text="accuracy of the intact model", range=[0, 1.04], tickformat=".0%")
    figure.update_yaxes(title_text="largest drop by one head", range=[-0.03, 1.04], tickformat=".0%")
    return figure
