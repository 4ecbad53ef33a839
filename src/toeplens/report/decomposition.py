"""The page of a run's decomposed attention logits: shares of each head, curves by distance, heat maps, a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int

from toeplens.ground.outputs import write_page
from toeplens.ground.words import listed, percent, power, whole
from toeplens.lens import toeplitz_part
from toeplens.lens.logits import KINDS, PURE
from toeplens.report.kit.blocks import Block, Group, Panel, Sign, Texts, View, numbered
from toeplens.report.kit.canvas import Canvas, by_sign, plain
from toeplens.report.kit.colours import head_look, tint_of
from toeplens.report.kit.page import render_page
from toeplens.studies.decomposition import SHOWN, LayerStructure, Parts, RunStructure

_TEXTS = Texts(Path(__file__).with_name("decomposition.yaml"))
COMMAND = "decompose"
SEEN = {"softmax": "row-centred logits", "logits": "logits"}
SMALL = 0.005  # parts whose share never exceeds this are not drawn
FEW = 8  # up to this many heads (or frequencies), numbers are shown
DEPTH = 1e-3  # smallest symbol that is drawn, relative to the largest of a panel
WITHIN = 0.98  # share of a map's logits that its colour scale covers
ORIGINS = {name: (title, tint_of(tint)) for name, (title, tint) in _TEXTS["origins"].items()}
_NUMBER = 10  # pixels
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
    name: Fill(name, each["title"], tint_of(each["tint"]), **each["look"]) for name, each in _TEXTS["fills"].items()
}


def write_structure(structure: RunStructure, path: Path) -> Path:
    """Write the decomposition of a run as a self-contained HTML page, replacing only an earlier one."""
    return write_page(path, render_structure(structure), COMMAND)


def render_structure(structure: RunStructure) -> str:
    """The decomposition of a run as one HTML document; the same structure gives the same document."""
    makers = (_kinds, _parts, _distance, _symbols, _examples, _frequencies, _origins)
    error = max((parts.error for _, parts in _with_parts(structure)), default=None)
    return render_page(
        "report/decomposition.html.j2",
        numbered(make(structure) for make in makers),
        command=COMMAND,
        structure=structure,
        lead=_lead(structure),
        top=_most_positional(structure),
        error=None if error is None else power(error),
        missing=_missing(structure),
        strongest=_strongest,
        rotated=any(parts.branches for _, parts in _with_parts(structure)),
        kinds=KINDS,
        named={name: Template(text).substitute(pure=f"{PURE:.0%}") for name, text in _TEXTS["named"].items()},
        split=_TEXTS["splits"].get(structure.split, structure.split),
        shown=SHOWN,
    )


def _with_parts(structure: RunStructure) -> Iterator[tuple[LayerStructure, Parts]]:
    return ((layer, layer.parts) for layer in structure.layers if layer.parts is not None)


def _missing(structure: RunStructure) -> list[tuple[str, str]]:
    """Layers without decomposition, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for layer in structure.layers:
        if layer.parts is None:
            reasons.setdefault(layer.why, []).append(str(layer.layer + 1))
    return [(f"Layer{'s' if len(which) > 1 else ''} {listed(which)}", why) for why, which in reasons.items()]


def _most_positional(structure: RunStructure) -> tuple[str, str, float] | None:
    """The head with the largest position share: short name, long name, share; None if unknown for all heads.

    Without decomposition: the head whose logits are best explained by distance.
    """
    tables = [(layer, parts.kinds["softmax"][:, 0]) for layer, parts in _with_parts(structure)]
    tables = tables or [(layer, layer.explained) for layer in structure.layers]
    found = [(float(v), layer.layer + 1, head + 1) for layer, table in tables for head, v in enumerate(table)]
    known = [each for each in found if np.isfinite(each[0])]
    if not known:
        return None
    value, layer, head = max(known, key=lambda each: each[0])
    return f"L{layer} H{head}", f"layer {layer}, head {head}", value


def _lead(structure: RunStructure) -> str:
    top = _most_positional(structure)
    names = Counter(name for _, parts in _with_parts(structure) for name in parts.named)
    if not names:
        told = "" if top is None else f" Distance explains most in {top[1]}: {percent(top[2])} of the variance."
        return f"These logits cannot be decomposed into content and position parts.{told}"
    words = f"Heads by type: {listed(f'{name} ({count})' for name, count in names.most_common())}."
    if top is None:
        return f"{words} The position share is unknown for all heads."
    return f"{words} The most positional head is {top[1]} ({percent(top[2])} of its row-centred logits)."


def _strongest(parts: Parts | None, head: int) -> str:
    """The frequency with the largest share of a head's row-centred logits, and the share."""
    row = parts.branches["softmax"][head] if parts and parts.branches else np.array([np.nan])
    if np.isnan(row).all():
        return "–"
    best = int(np.nanargmax(row))
    return f"{f'{best} of {len(row) - 1}' if best else 'not rotated'}, {percent(row[best])}"


def _title(layer: LayerStructure) -> str:
    return f"Layer {layer.layer + 1}"


def _heads(structure: RunStructure) -> int:
    return max((len(layer.means) for layer in structure.layers), default=0)


def _width(structure: RunStructure) -> str:
    return "medium" if _heads(structure) <= FEW else "wide"


def _signs(structure: RunStructure) -> list[Sign]:
    looks = [head_look(head) for head in range(_heads(structure))]
    return [Sign(f"head-{head}", f"head {head}", tint, glyph) for head, (tint, _, glyph) in enumerate(looks, 1)]


def _head_ticks(count: int) -> dict[str, Any]:
    step = 1 if count <= FEW else 2 if count <= 2 * FEW else 5
    return {"dtick": step, "tick0": 0 if step > 1 else 1}


# ---- shares ----------------------------------------------------------------------------------------------------------

Tables = dict[str, list[Float[np.ndarray, "H _P"]]]  # by row-centred logits and logits: shares in each layer


def _kinds(structure: RunStructure) -> Block:
    tables: Tables = {}
    for which in SEEN:  # last column: 1 minus position, if content is unknown
        kinds = [parts.kinds[which] for _, parts in _with_parts(structure)]
        tables[which] = [np.column_stack((x, np.where(np.isnan(x[:, 1]), 1 - x[:, 0], np.nan))) for x in kinds]
    fills = [*(FILLS[name] for name in KINDS), UNTOLD]
    if not any(np.isfinite(table[:, -1]).any() for each in tables.values() for table in each):
        fills.pop()
        tables = {which: [table[:, :-1] for table in each] for which, each in tables.items()}
    return _bar_block(structure, "kinds", tables, fills)


def _parts(structure: RunStructure) -> Block:
    found = [parts for _, parts in _with_parts(structure)]
    names = list(dict.fromkeys(name for parts in found for name in parts.names))
    tables: Tables = {}
    for which in SEEN:
        tables[which] = [np.full((len(parts.shares[which]), len(names)), np.nan) for parts in found]
        for parts, table in zip(found, tables[which], strict=True):
            table[:, [names.index(name) for name in parts.names]] = parts.shares[which]
    every = [np.abs(table) for each in tables.values() for table in each]
    large = [max(float(np.nanmax(table[:, x], initial=0)) for table in every) > SMALL for x in range(len(names))]
    small = [name for name, is_large in zip(names, large, strict=True) if not is_large]
    left_out = f" Not shown, as never above {SMALL:.1%}: {listed(small)}." if small else ""
    fills = [FILLS[name] for name, is_large in zip(names, large, strict=True) if is_large]
    tables = {which: [table[:, large] for table in each] for which, each in tables.items()}
    return _bar_block(structure, "parts", tables, fills, words={"left_out": left_out})


def _bar_block(structure: RunStructure, name: str, tables: Tables, fills: Sequence[Fill], **more: Any) -> Block:
    """Views for row-centred logits and logits, a panel per layer; all panels share one axis."""
    ends = span([table for each in tables.values() for table in each])
    titles = [_title(layer) for layer, _ in _with_parts(structure)]
    views = [
        View.of([Panel(at, _bars(shares, fills, ends)) for at, shares in zip(titles, tables[which], strict=True)], seen)
        for which, seen in SEEN.items()
    ]
    return _TEXTS.block(name, views, _width(structure), legend=[*fills], **more)


def span(tables: Sequence[Float[np.ndarray, "H _P"]]) -> tuple[float, float]:
    """Range of an axis for stacked shares; at least 0 to 1."""
    low = min((float(np.nansum(np.minimum(table, 0), axis=1).min(initial=0)) for table in tables), default=0.0)
    high = max((float(np.nansum(np.maximum(table, 0), axis=1).max(initial=1)) for table in tables), default=1.0)
    room = 0.025 * (high - low)
    return low - (room if low < 0 else 0), high + room


def _bars(shares: Float[np.ndarray, "H P"], fills: Sequence[Fill], ends: tuple[float, float]) -> go.Figure:
    """Shares as stacked bars, one per head; negative shares are below zero, unknown ones are not drawn."""
    canvas = Canvas(270, left=48, right=6, top=6, bottom=36)
    heads = list(range(1, len(shares) + 1))
    drawn = {"fillmode": "overlay", "fgcolor": "rgba(255,255,255,.5)", "size": 6, "solidity": 0.22}
    for fill, column in zip(fills, shares.T, strict=True):
        numbers = {"text": [whole(value) for value in column], "textposition": "inside", "textangle": 0}
        pattern = {"shape": fill.shape, **drawn} if fill.shape else {}
        canvas.add(
            "bar",
            x=heads,
            y=plain(column),
            meta=fill.key,
            marker={"color": fill.tint, "line": {"width": 0}, "pattern": pattern},
            hovertemplate=f"head %{{x}}<br><b>{fill.title}</b>: %{{y:.1%}}<extra></extra>",
            **(numbers if len(heads) <= FEW else {}),
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


# ---- curves by distance, and their symbols ---------------------------------------------------------------------------


def _distance(structure: RunStructure) -> Block:
    known = any(layer.parts for layer in structure.layers)
    kernel = f"{_TEXTS['kernel']} " if known else ""
    groups = []
    for layer in structure.layers:
        parts, panels = layer.parts, []
        drawn = layer.means if parts is None else np.concatenate((layer.means, parts.kernel))
        if parts is not None:
            words = f"Toeplitz share of the position kernel: {_range(parts.fixed)}."
            panels.append(Panel("Position kernel", _curves(layer.offsets, parts.kernel, drawn), words))
        words = (
            f"Variance of the logits explained by distance: {_range(layer.explained)}. Expected for contents without "
            f"structure: {100 * layer.chance:.2g}%.{_decays(layer)}"
        )
        title = "Mean of the logits" if known else _title(layer)
        panels.append(Panel(title, _curves(layer.offsets, layer.means, drawn), words))
        groups.append(Group(_title(layer), panels))
    if not known:
        groups = [Group("", [panel for group in groups for panel in group.panels])]
    return _TEXTS.block("distance", [View("", groups)], words={"kernel": kernel}, legend=_signs(structure))


def _range(values: Float[np.ndarray, "H"]) -> str:
    """The smallest and the largest share with their heads."""
    if np.isnan(values).all():
        return "unknown"
    ends = dict.fromkeys((int(np.nanargmin(values)), int(np.nanargmax(values))))
    return " to ".join(f"{percent(values[head])} (head {head + 1})" for head in ends)


def _decays(layer: LayerStructure) -> str:
    told = []
    for head, decay in enumerate(layer.decays, start=1):
        if decay is not None and decay.explains:
            half = "" if decay.half_distance is None else f", half distance {decay.half_distance:.3g} tokens"
            told.append(f"head {head} {decay.form} ({percent(decay.r2 or 0.0)} explained{half})")
    return f" Fitted decay curves: {'; '.join(told)}." if told else ""


def _curves(xs: Int[np.ndarray, "D"], rows: Float[np.ndarray, "H D"], drawn: Float[np.ndarray, "R D"]) -> go.Figure:
    """Values by distance, a curve per head; all of ``drawn`` fits on the axis."""
    canvas, low, high = Canvas(250, left=52), float(np.nanmin(drawn, initial=0)), float(np.nanmax(drawn, initial=0))
    room = 0.06 * max(high - low, 1e-9)
    for head, row in enumerate(rows):
        _curve(canvas, head, xs.tolist(), plain(row), f"head {head + 1}, distance %{{x}}: %{{y:.3g}} nats", 12)
    canvas.x("distance i − j (tokens)")
    canvas.y("nats", range=[low - room, high + room])
    canvas.line_at(0)
    if len(xs) and xs[0] < 0:
        canvas.line_at(0, vertical=True, dash="dot")
    return canvas.figure()


def _symbols(structure: RunStructure) -> Block:
    known = any(layer.parts for layer in structure.layers)
    panels = [
        Panel(_title(layer), symbol(layer.angles, layer.symbol), _kernel_ends(layer)) for layer in structure.layers
    ]
    return _TEXTS.block(
        "symbol",
        [View.of(panels)],
        words={"depth": f"{DEPTH:.1%}", "of": "position kernel" if known else "mean logits by distance"},
        legend=_signs(structure),
    )


def _kernel_ends(layer: LayerStructure) -> str:
    """The range of the symbol of each position kernel, and of the eigenvalues of its matrix."""
    told = [
        f"head {head} {ends.symbol_low:.3g} to {ends.symbol_high:.3g}, eigenvalues {ends.lowest:.3g} to "
        f"{ends.highest:.3g}"
        for head, ends in enumerate(layer.ends, start=1)
    ]
    if not told:
        return "Symbol of each head."
    ends = "; ".join(told).replace("-", "−")
    return f"Range of the symbol without window, and of the eigenvalues of {layer.ends[0].size} rows: {ends}."


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
    tint, shape, _ = head_look(head)
    marker = {"symbol": shape, "size": 6, "color": tint, "maxdisplayed": markers}
    canvas.lines(xs, ys, tint, f"{told}<extra></extra>", width=1.5, dash=dash, marker=marker, meta=f"head-{head + 1}")


# ---- maps ------------------------------------------------------------------------------------------------------------


def _examples(structure: RunStructure) -> Block:
    groups = []
    for layer in structure.layers:
        panels = []
        for head, example in zip(layer.heads, layer.example, strict=True):
            part = diagonals_only(example)
            energy = float(np.nansum(example**2))
            here = float(np.nansum(part**2)) / energy if energy else np.nan
            words = (
                f"Toeplitz share: {percent(here)} in this sequence, {percent(layer.toeplitz[head])} over all of them. "
                f"Colour scale: ±{_scale_end(example):.2g} nats."
            )
            panels.append(Panel(f"Head {head + 1}", pair(example, part), words))
        groups.append(Group(_title(layer), panels))
    return _TEXTS.block("logits", [View("", groups)], words={"share": f"{WITHIN:.0%}"})


def diagonals_only(example: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """Each diagonal replaced by its mean over visible entries; NaN where the example is NaN."""
    logits = torch.from_numpy(np.asarray(example, dtype=np.float64))
    seen = logits.isfinite()
    sums, counts = (toeplitz_part(x, causal=False) for x in (logits.where(seen, 0), seen.double()))
    return (sums / counts).masked_fill(~seen, torch.nan).numpy()


def _scale_end(example: Float[np.ndarray, "n n"]) -> float:
    """The end of a map's colour scale, so that a few large logits do not dominate."""
    sizes = np.abs(example[np.isfinite(example)])
    return max(float(np.quantile(sizes, WITHIN)) if sizes.size else 0.0, 1e-9)


def pair(example: Float[np.ndarray, "n n"], part: Float[np.ndarray, "n n"]) -> go.Figure:
    """Logits and their Toeplitz part side by side, on one symmetric colour scale."""
    canvas, places = Canvas(0, left=40, right=4, top=22, bottom=38), list(range(1, len(example) + 1))
    axis = dict.fromkeys(("showgrid", "zeroline", "showline"), False) | {"fixedrange": True}
    axis |= {"constrain": "domain", "ticks": ""}
    above: dict[str, Any] = {"xanchor": "center", "yanchor": "bottom", "font": {"size": 12}}
    for which, (values, title) in enumerate(((example, "logits"), (part, "Toeplitz part"))):
        canvas.heat(
            [plain(row, 3) for row in values],
            places,
            places,
            _scale_end(example),
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


def _frequencies(structure: RunStructure) -> Block:
    found = [(layer, parts.branches) for layer, parts in _with_parts(structure) if parts.branches is not None]
    every = [branches[which] for _, branches in found for which in SEEN]
    still = any((np.nan_to_num(table[:, 0]) != 0).any() for table in every)
    limit = max((float(np.nanmax(np.abs(table), initial=0.01)) for table in every), default=1.0)
    views = [
        View.of([Panel(_title(at), _frequency_map(each[which], limit, still=still)) for at, each in found], title)
        for which, title in SEEN.items()
    ]
    return _TEXTS.block(
        "frequency",
        views,
        _width(structure),
        words={
            "others": ", after the dimensions without rotation" if still else "; all dimensions are rotated",
            "limit": f"{limit:.0%}",
        },
    )


def _frequency_map(branches: Float[np.ndarray, "H n1"], limit: float, *, still: bool) -> go.Figure:
    """Shares by head and frequency, and with ``still`` of the dimensions without rotation first."""
    first = 0 if still else 1
    shares, frequencies = branches[:, first:], range(first, branches.shape[1])
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
        customdata=[[f"frequency {i}" if i else "not rotated" for i in frequencies]] * heads,
    )
    ticks = list(range(0, count, 1 if few else max(1, count // 6)))
    texts = [str(frequencies[i]) if frequencies[i] else "not<br>rotated" for i in ticks]
    canvas.x("frequency", tickvals=ticks, ticktext=texts, tickangle=0, showgrid=False, **_SPACED)
    canvas.y("head", autorange="reversed", showgrid=False, **_SPACED, **_head_ticks(heads))
    return canvas.figure()


# ---- attribution of class logits -------------------------------------------------------------------------------------


def _origins(structure: RunStructure) -> Block:
    """A bar for each part of the class logits; empty if not computed."""
    found = structure.origins
    panels = []
    if found is not None:
        canvas, looks = Canvas(230, left=160), [ORIGINS[name] for name in found.parts]
        canvas.add(
            "bar",
            orientation="h",
            x=list(found.parts.values()),
            y=[title for title, _ in looks],
            marker={"color": [tint for _, tint in looks]},
            hovertemplate="%{y}: %{x:.3g}<extra></extra>",
        )
        canvas.line_at(0, vertical=True, dash="solid")
        canvas.x("logit")
        canvas.y(autorange="reversed", showgrid=False)
        parts = ", ".join(f"{ORIGINS[name][0]} {value:.3g}" for name, value in found.parts.items())
        words = (
            f"Mean logit: {found.logit:.3g} over {found.sequences} sequences. Parts: {parts}. Position makes up "
            f"{percent(found.share)} of the sum of absolute values. The parts add up to each logit within "
            f"{found.error:.0e} of this sum."
        )
        panels.append(Panel("Parts of the mean logit", canvas.figure(bargap=0.35), words))
    return _TEXTS.block("origins", [View.of(panels)])
