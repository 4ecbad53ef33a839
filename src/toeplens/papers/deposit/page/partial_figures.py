"""Figures of RoPE on some of the heads, and on some of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np
import plotly.graph_objects as go

from toeplens.model import Protocol
from toeplens.papers.deposit.factors import concentrated
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page.deposit_figures import share_axis
from toeplens.papers.deposit.page.look import colour, marker, name
from toeplens.report.kit.canvas import Canvas, faded, guess_levels, guesses_across
from toeplens.studies import CellResult, Results

DRAWN = "#c8479f"  # heads drawn at random


def whole_rope(protocol: Protocol) -> str:
    """The label of RoPE on all heads and nothing else; the released "rope" has a sinusoid and is not it."""
    return "rope-alone" if protocol == "released" else "rope"


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
    canvas.add(
        "scatter",
        x=[count for count, _, _ in values],
        y=[sum(accuracies) / len(accuracies) for _, _, accuracies in values],
        mode="lines",
        line={
            "color": faded(DRAWN if variant else colour("rope"), 0.6),
            "width": 2,
            "dash": "dot" if variant else "solid",
        },
        hoverinfo="skip",
        meta=variant or "first",
    )
    for count, label, accuracies in values:
        if variant and Label.parse(label).variant != variant:
            continue
        canvas.add(
            "scatter",
            x=[count] * len(accuracies),
            y=accuracies,
            mode="markers",
            marker={"symbol": "x-thin-open", "size": 8, "color": DRAWN, "line": {"width": 2}}
            if variant
            else {"symbol": marker(label), "size": 9, "color": colour(label)},
            hovertemplate=f"<b>{name(protocol, label)}</b><br>{count} of {heads} heads: %{{y:.1%}}<extra></extra>",
            meta=variant or "first",
        )


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
        counts |= {count: end for count, end in ((0, "nope"), (heads, whole_rope(protocol))) if end in labels}
    return sorted(counts.items())


def peaks(rows: Sequence[tuple[str, Sequence[CellResult]]]) -> go.Figure:
    """The share of the skill that each layer's first head carries, the mean over the seeds that have skill.

    Arguments
        rows  what stands at the left, and its models; from top to bottom
    """
    shares = [mean_peaks(cells) for _, cells in rows]
    depth = max((len(layers) for layers in shares), default=0)
    z = [[*layers, *[None] * (depth - len(layers))] for layers in shares]
    canvas = Canvas(40 + 24 * len(rows), left=20, right=4, top=2, bottom=40)
    canvas.add(
        "heatmap",
        z=z,
        x=list(range(1, depth + 1)),
        y=list(range(len(rows))),
        text=[["" if value is None else f"{100 * value:.0f}" for value in row] for row in z],
        texttemplate="%{text}",
        textfont={"size": 11},
        customdata=[[_words(text, cells, layer) for layer in range(depth)] for text, cells in rows],
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
        coloraxis="coloraxis",
        xgap=2,
        ygap=2,
    )
    canvas.x("layer", dtick=1, showgrid=False)
    texts = [text for text, _ in rows]
    canvas.y(tickvals=list(range(len(rows))), ticktext=texts, autorange="reversed", automargin=True, showgrid=False)
    return canvas.figure(coloraxis=share_axis())


def mean_peaks(cells: Sequence[CellResult]) -> list[float]:
    """The peak of each layer, the mean over the models that have skill; empty if none has."""
    able = [[layer.peak for layer in cell.deposits()] for cell in cells if concentrated(cell)]
    return np.mean(able, axis=0).tolist() if able else []


def _words(text: str, cells: Sequence[CellResult], layer: int) -> str:
    able = [cell.deposits()[layer] for cell in cells if concentrated(cell)]
    each = ", ".join(f"{found.peak:.0%} (head {found.head + 1})" for found in able[:8])
    return f"<b>{text}</b>, layer {layer + 1}<br>seeds: {each}"
