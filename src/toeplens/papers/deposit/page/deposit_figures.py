"""Figures of the deposit by encoding: how much one head carries, in how many heads the work is, and in which layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import plotly.graph_objects as go

from toeplens.ground.words import points
from toeplens.lens import LayerDeposit
from toeplens.papers.deposit.factors import concentrated
from toeplens.papers.deposit.page.look import colour, name
from toeplens.report.kit.canvas import Canvas, faded
from toeplens.report.kit.colours import HEAT
from toeplens.studies import CellResult
from toeplens.studies.kit.results import estimated

Figure = Callable[[LayerDeposit], float]
Encodings = Sequence[tuple[str, Sequence[CellResult]]]  # label, its models that have an ablation


def by_encoding(
    encodings: Encodings, figure: Figure, title: str, *, top: float, percent: bool = False, mark: float | None = None
) -> go.Figure:
    """A violin an encoding of one figure of the most concentrated layer: a point a seed, a bar the mean.

    Arguments
        encodings  from left to right; models without skill are counted, and have no point
        figure     what is shown of the layer
        title      of its axis
        top        upper end of the axis
        percent    whether it is a share
        mark       where a thin line goes
    """
    canvas = Canvas(330, left=62, right=8, top=8, bottom=40)
    for place, (label, cells) in enumerate(encodings):
        found = [(cell, *layer) for cell in cells if (layer := concentrated(cell))]
        _add_violin(canvas, place, label, [(cell, layer, deposit, figure(deposit)) for cell, layer, deposit in found])
        if len(found) < len(cells):
            none = "no skill" if not found else f"{len(cells) - len(found)} of {len(cells)} without skill"
            canvas.note(none, x=place, y=0.02 * top, textangle=-90, yanchor="bottom", xshift=0 if not found else 13)
    if mark is not None:
        canvas.line_at(mark)
    texts = [name(cells[0].key.protocol, label) for label, cells in encodings]
    ticks = {"tickvals": list(range(len(texts))), "ticktext": texts, "tickangle": -60, "tickfont": {"size": 11}}
    canvas.x(range=[-0.6, len(texts) - 0.4], automargin=True, showgrid=False, ticklabeloverflow="allow", **ticks)
    canvas.y(title, range=[0, top], **({"tickformat": ".0%"} if percent else {}))
    return canvas.figure()


def _add_violin(
    canvas: Canvas, place: int, label: str, points_of: Sequence[tuple[CellResult, int, LayerDeposit, float]]
) -> None:
    tint, values = colour(label), [value for *_, value in points_of]
    canvas.add(
        "violin",
        x=[place] * len(values),
        y=values,
        text=[describe(cell, layer, deposit) for cell, layer, deposit, _ in points_of],
        hoveron="points",
        hovertemplate="%{text}<extra></extra>",
        points="all",
        pointpos=0,
        jitter=0.6,
        spanmode="hard",
        scalemode="width",
        width=0.85,
        line={"color": tint, "width": 1},
        fillcolor=faded(tint, 0.16),
        marker={"color": tint, "size": 6, "opacity": 0.85},
    )
    mean = estimated({index: value for index, value in enumerate(values) if isfinite(value)})
    if mean and mean.count > 1:
        canvas.add(
            "scatter",
            x=[place],
            y=[mean.value],
            mode="markers",
            marker={"symbol": "line-ew-open", "size": 17, "color": tint, "line": {"width": 2.5}},
            hoverinfo="skip",
        )


def describe(cell: CellResult, layer: int, deposit: LayerDeposit) -> str:
    """A layer of a model, for who points at it."""
    ablation = cell.ablation
    assert ablation is not None
    return (
        f"<b>{name(cell.key.protocol, cell.key.label)}</b>, seed {cell.key.seed}, layer {layer + 1}<br>"
        f"head {deposit.head + 1}: {deposit.peak:.0%} of the skill, "
        f"{points(float(ablation.drops[layer, deposit.head]))} points<br>"
        f"{deposit.kind}; effective heads {deposit.effective_heads:.1f}"
    )


def by_layer(encodings: Encodings) -> go.Figure:
    """The share of the skill that each layer's first head carries: a row a seed, encodings one under the other."""
    seeds = max(len(cells) for _, cells in encodings)
    depth = max(len(cell.deposits()) for _, cells in encodings for cell in cells)
    rows: list[list[float | None]] = []
    words: list[list[str]] = []
    middles: list[float] = []
    for _, cells in encodings:
        middles.append(len(rows) + (len(cells) - 1) / 2)
        for cell in cells:
            layers = cell.deposits() if concentrated(cell) else []
            blank = depth - len(layers)
            rows.append([layer.peak for layer in layers] + [None] * blank)
            words.append([describe(cell, i, layer) for i, layer in enumerate(layers)] + [""] * blank)
        rows.append([None] * depth)
        words.append([""] * depth)
    canvas = Canvas(round(40 + len(rows[:-1]) * (8 if seeds > 1 else 14)), left=20, right=4, top=2, bottom=40)
    canvas.add(
        "heatmap",
        z=rows[:-1],
        x=list(range(1, depth + 1)),
        y=list(range(len(rows) - 1)),
        customdata=words[:-1],
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
        coloraxis="coloraxis",
        xgap=2,
        ygap=1,
    )
    texts = [name(cells[0].key.protocol, label) for label, cells in encodings]
    canvas.x("layer", dtick=1, showgrid=False)
    range_ = [len(rows) - 1.5, -0.5]
    canvas.y(tickvals=middles, ticktext=texts, range=range_, automargin=True, showgrid=False, tickfont={"size": 11})
    return canvas.figure(coloraxis=share_axis())


def share_axis() -> dict[str, Any]:
    """The colour axis of shares: nothing is the page's ground, all of it the warm end."""
    scale = [[0, HEAT["light"][0]], [0.5, HEAT["light"][1]], [1, HEAT["light"][2]]]
    return {"cmin": -1, "cmax": 1, "colorscale": scale, "showscale": False}
