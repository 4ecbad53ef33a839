"""The figures of decomposed logits: shares, curves by distance, symbols, maps, and attribution of class logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int

from toeplens.ground.words import percent, whole
from toeplens.lens import toeplitz_part
from toeplens.report.kit.blocks import Block, Panel, Sign, View
from toeplens.report.kit.canvas import Canvas, by_sign, plain
from toeplens.report.kit.colours import BLUE, head_look
from toeplens.studies.decomposition import LayerStructure, RunStructure

FEW = 8  # up to this many heads (or frequencies), numbers are shown
_NUMBER = 10  # pixels
DEPTH = 1e-3  # smallest symbol that is drawn, relative to the largest of a panel
WITHIN = 0.98  # share of a map's logits that its colour scale covers
_SPACED = {"ticks": "outside", "ticklen": 3, "tickcolor": "rgba(0,0,0,0)"}  # moves labels slightly away from a heat map
_ANGLES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)


@dataclass(frozen=True)
class Fill(Sign):
    """A legend entry for a bar.

    shape  plotly's name of the fill pattern
    ink    colour of the numbers in the bar
    """

    shape: str = ""
    ink: str = "#10141a"


UNTOLD = Fill("untold", "content or coupled, not separable", "#9aa3b0", shape=".")
FILLS = {
    "position": Fill("position", "position", BLUE, ink="#ffffff"),
    "content": Fill("content", "content", "#e58f24"),
    "coupled": Fill("coupled", "coupled", "#2a9d8f", shape="/"),
    "content-content": Fill("content-content", "content-content", "#e58f24"),
    "content-position": Fill("content-position", "content-position", "#7d55c9", shape="/", ink="#ffffff"),
    "position-content": Fill("position-content", "position-content", "#cc5f9c", shape="\\"),
    "position-position": Fill("position-position", "position-position", BLUE, ink="#ffffff"),
    "bias": Fill("bias", "bias", "#808a99", shape="."),
    "content-offset": Fill("content-offset", "content-offset", "#2a9d8f", shape="x"),
    "position-offset": Fill("position-offset", "position-offset", "#a47a34", shape="+"),
}


def head_sign(head: int) -> Sign:
    """A head's colour and marker; the index counts from 0, the title from 1."""
    tint, _, glyph = head_look(head)
    return Sign(f"head-{head + 1}", f"head {head + 1}", tint, glyph)


def span(tables: Sequence[Float[np.ndarray, "H _P"]]) -> tuple[float, float]:
    """Range of an axis for stacked shares; at least 0 to 1."""
    low = min((float(np.nansum(np.minimum(table, 0), axis=1).min(initial=0)) for table in tables), default=0.0)
    high = max((float(np.nansum(np.maximum(table, 0), axis=1).max(initial=1)) for table in tables), default=1.0)
    room = 0.025 * (high - low)
    return low - (room if low < 0 else 0), high + room


def bars(shares: Float[np.ndarray, "H P"], fills: Sequence[Fill], ends: tuple[float, float]) -> go.Figure:
    """Shares as stacked bars, one per head; negative shares are below zero, unknown ones are not drawn."""
    canvas = Canvas(270, left=48, right=6, top=6, bottom=36)
    heads = list(range(1, len(shares) + 1))
    few = len(heads) <= FEW
    drawn = {"fillmode": "overlay", "fgcolor": "rgba(255,255,255,.5)", "size": 6, "solidity": 0.22}
    for fill, column in zip(fills, shares.T, strict=True):
        pattern = {"shape": fill.shape, **drawn} if fill.shape else {}
        canvas.add(
            "bar",
            x=heads,
            y=plain(column),
            meta=fill.key,
            marker={"color": fill.tint, "line": {"width": 0}, "pattern": pattern},
            hovertemplate=f"head %{{x}}<br><b>{fill.title}</b>: %{{y:.1%}}<extra></extra>",
            **({"text": [whole(value) for value in column], "textposition": "inside", "textangle": 0} if few else {}),
            insidetextanchor="middle",
            insidetextfont={"size": _NUMBER, "color": fill.ink},
        )
    for head, row in zip(heads, shares, strict=True):
        if np.isnan(row).all():
            canvas.note("no shares", x=head, y=0, yanchor="bottom", textangle=-90, yshift=4)
    canvas.line_at(0, dash="solid")
    canvas.line_at(1, dash="dot")
    canvas.x("head", showgrid=False, range=[0.4, len(heads) + 0.6], **_head_ticks(len(heads)))
    canvas.y("", range=list(ends), tickformat=".0%")
    return canvas.figure(barmode="relative", bargap=0.22, uniformtext={"mode": "hide", "minsize": _NUMBER})


def curves(xs: Int[np.ndarray, "D"], rows: Float[np.ndarray, "H D"], ends: tuple[float, float]) -> go.Figure:
    """Values by distance, a curve per head."""
    canvas = Canvas(250, left=52)
    for head, row in enumerate(rows):
        _curve(canvas, head, xs.tolist(), plain(row), f"head {head + 1}, distance %{{x}}: %{{y:.3g}} nats", 12)
    canvas.x("distance i − j (tokens)")
    canvas.y("nats", range=list(ends))
    canvas.line_at(0)
    if len(xs) and xs[0] < 0:
        canvas.line_at(0, vertical=True, dash="dot")
    return canvas.figure()


def symbol(angles: Float[np.ndarray, "A"], rows: Float[np.ndarray, "H A"]) -> go.Figure:
    """Absolute value of the symbol on logarithmic axes, a curve per head; dotted where negative."""
    canvas = Canvas(280, left=52)
    half = angles > 0
    floor = DEPTH * max(float(np.nanmax(np.abs(rows[:, half]), initial=0)), 1e-300)
    for head, row in enumerate(rows):
        for dash, sign, values in by_sign(row[half], floor):
            told = f"head {head + 1}, φ = %{{x:.3f}}: {sign}%{{y:.3g}}"
            _curve(canvas, head, plain(angles[half]), values, told, 4, dash)
    texts = [f"{angle:g}" for angle in _ANGLES] + ["π"]
    canvas.x("φ (rad per token)", type="log", tickvals=[*_ANGLES, float(np.pi)], ticktext=texts)
    canvas.y("", type="log", dtick=1, exponentformat="power")
    return canvas.figure()


def _curve(
    canvas: Canvas, head: int, xs: list[Any], ys: list[Any], told: str, markers: int, dash: str = "solid"
) -> None:
    tint, marker, _ = head_look(head)
    marker = {"symbol": marker, "size": 6, "color": tint, "maxdisplayed": markers}
    key = head_sign(head).key
    canvas.lines(xs, ys, tint, f"{told}<extra></extra>", width=1.5, dash=dash, marker=marker, meta=key)


def diagonals_only(example: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """Each diagonal replaced by its mean over visible entries; NaN where the example is NaN."""
    logits = torch.from_numpy(np.asarray(example, dtype=np.float64))
    seen = logits.isfinite()
    sums, counts = (toeplitz_part(x, causal=False) for x in (logits.where(seen, 0), seen.double()))
    return (sums / counts).masked_fill(~seen, torch.nan).numpy()


def scale_end(example: Float[np.ndarray, "n n"]) -> float:
    """The end of a map's colour scale, so that a few large logits do not dominate."""
    sizes = np.abs(example[np.isfinite(example)])
    return max(float(np.quantile(sizes, WITHIN)) if sizes.size else 0.0, 1e-9)


def pair(example: Float[np.ndarray, "n n"], part: Float[np.ndarray, "n n"]) -> go.Figure:
    """Logits and their Toeplitz part side by side, on one symmetric colour scale."""
    canvas = Canvas(0, left=40, right=4, top=22, bottom=38)
    axis = {
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
        "showline": False,
        "constrain": "domain",
        "ticks": "",
    }
    above: dict[str, Any] = {"xanchor": "center", "yanchor": "bottom", "font": {"size": 12}}
    places = list(range(1, len(example) + 1))
    for which, (values, title) in enumerate(((example, "logits"), (part, "Toeplitz part"))):
        canvas.heat(
            [plain(row, 3) for row in values],
            places,
            places,
            scale_end(example),
            "query %{y}, key %{x}: %{z:.3g} nats<extra></extra>",
            xaxis=f"x{which + 1}",
            yaxis=f"y{which + 1}",
        )
        canvas.note(title, xref="paper", yref="paper", x=(0.24, 0.76)[which], y=1, **above)
    canvas.x("key", domain=[0, 0.48], **axis)
    canvas.y("query", autorange="reversed", scaleanchor="x", **axis)
    key = {"title": {"text": "key", "standoff": 5}}
    return canvas.figure(
        height=None,
        xaxis2={"domain": [0.52, 1], "anchor": "y2", **key, **axis},
        yaxis2={"anchor": "x2", "autorange": "reversed", "scaleanchor": "x2", "showticklabels": False, **axis},
    )


def frequencies(shares: Float[np.ndarray, "H n"], columns: Sequence[str], limit: float) -> go.Figure:
    """Shares by head and frequency; ``limit`` is the end of the colour scale."""
    heads, count = shares.shape
    few = count <= FEW + 1
    canvas = Canvas(50 + (28 if heads <= FEW else 20) * heads, left=36, right=4, top=4, bottom=46)
    canvas.heat(
        [plain(row) for row in shares],
        list(range(count)),
        list(range(1, heads + 1)),
        limit,
        "head %{y}, %{customdata}: %{z:.1%}<extra></extra>",
        gap=1,
        numbers=[[whole(value) for value in row] for row in shares] if few else None,
        size=_NUMBER,
        customdata=[[name if name.startswith("not") else f"frequency {name}" for name in columns]] * heads,
    )
    step = 1 if few else max(1, count // 6)
    ticks = list(range(0, count, step))
    texts = ["not<br>rotated" if columns[i].startswith("not") else columns[i] for i in ticks]
    canvas.x("frequency", tickvals=ticks, ticktext=texts, tickangle=0, showgrid=False, **_SPACED)
    canvas.y("head", autorange="reversed", showgrid=False, **_SPACED, **_head_ticks(heads))
    return canvas.figure()


def _head_ticks(count: int) -> dict[str, Any]:
    step = 1 if count <= FEW else 2 if count <= 2 * FEW else 5
    return {"dtick": step, "tick0": 0 if step > 1 else 1}


# ---- attribution of class logits -------------------------------------------------------------------------------------

TITLES = {
    "content": ("content", "#e58f24"),
    "position_input": ("position at the input", BLUE),
    "position_attention": ("position in the attention", "#7d55c9"),
    "biases": ("biases", "#808a99"),
    "softmax": ("remainder of the softmax", "#2a9d8f"),
}


def origins(structure: RunStructure) -> Block:
    """A bar for each part of the class logits; empty if not computed."""
    found = structure.origins
    caption = (
        "Logit of the predicted class, attributed by relevance propagation, mean over sequences. The remainder of the "
        "softmax belongs to neither position nor content: weights sum to 1 for any logits."
    )
    panels = []
    if found is not None:
        canvas, titles = Canvas(230, left=160), [TITLES[name] for name in found.parts]
        canvas.add(
            "bar",
            orientation="h",
            x=list(found.parts.values()),
            y=[title for title, _ in titles],
            marker={"color": [tint for _, tint in titles]},
            hovertemplate="%{y}: %{x:.3g}<extra></extra>",
        )
        canvas.line_at(0, vertical=True, dash="solid")
        canvas.x("logit")
        canvas.y(autorange="reversed", showgrid=False)
        parts = ", ".join(f"{TITLES[name][0]} {value:.3g}" for name, value in found.parts.items())
        words = (
            f"Mean logit: {found.logit:.3g} over {found.sequences} sequences. Parts: {parts}. Position makes up "
            f"{percent(found.share)} of the sum of absolute values. The parts add up to each logit within "
            f"{found.error:.0e} of this sum."
        )
        panels.append(Panel("Parts of the mean logit", canvas.figure(bargap=0.35), words))
    return Block("origins", "Attribution of class logits", caption, [View.of(panels)])


def decay_words(layer: LayerStructure) -> str:
    """The best-fitting decay curve of each head’s mean logit, if it explains at least half of the variance."""
    told = []
    for head, decay in enumerate(layer.decays, start=1):
        if decay is not None and decay.explains:
            half = "" if decay.half_distance is None else f", half distance {decay.half_distance:.3g} tokens"
            told.append(f"head {head} {decay.form} ({percent(decay.r2 or 0.0)} explained{half})")
    return f" Fitted decay curves: {'; '.join(told)}." if told else ""


def ends_words(layer: LayerStructure) -> str:
    """The range of the symbol of each position kernel, and of the eigenvalues of its matrix."""
    told = [
        f"head {head} {_figure(ends.symbol_low)} to {_figure(ends.symbol_high)}, eigenvalues {_figure(ends.lowest)} to "
        f"{_figure(ends.highest)}"
        for head, ends in enumerate(layer.ends, start=1)
    ]
    if not told:
        return "Symbol of each head."
    size = layer.ends[0].size
    return f"Range of the symbol without window, and of the eigenvalues of {size} rows: {'; '.join(told)}."


def _figure(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")
