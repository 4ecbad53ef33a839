"""The page of an audit: map, table and figures of all heads of a model, and the proof."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.colors import sample_colorscale

from toeplens.ground.words import fixed, percent, significant
from toeplens.report.kit.blocks import Block, Group, Panel, Ramp, Texts, View, numbered
from toeplens.report.kit.canvas import FEW, Canvas, Look, heat, triangle
from toeplens.report.kit.colours import DEPTHS, GUESS
from toeplens.report.kit.page import Page, write_report
from toeplens.report.kit.tables import DASH, Cell, Table, code, make_table, settings_table
from toeplens.studies.auditing import words
from toeplens.studies.auditing.record import AuditRecord, BandRecord, HeadRecord, LayerRecord
from toeplens.studies.auditing.result import Audit, columns, content, digits_of, scales_of, sheet, values_of
from toeplens.studies.auditing.words import (
    PATTERN,
    UNIFORM,
    Names,
    done,
    harmful,
    layer_spans,
    model,
    over,
    place_title,
    told,
    unit,
)

TEXTS = Texts(Path(__file__).with_name("texts.yaml"))
_MARKERS = (("circle", "●"), ("square", "■"), ("diamond", "◆"), ("triangle-up", "▲"))
_SHARES = ("positional", "symbolic", "interaction")
_MARGIN = 0.06  # margin beyond shares outside the triangle
_PLAIN = 0.04  # size of marks without effects, relative to the largest


def _by_place(names: Names, heads: Iterable[HeadRecord]) -> dict[tuple[str, str], list[HeadRecord]]:
    """Heads by side and kind, without empty ones."""
    found: dict[tuple[str, str], list[HeadRecord]] = {place: [] for place in names.places}
    for head in heads:
        found[head.side, head.kind].append(head)
    return {place: own for place, own in found.items() if own}


def plane(audit: Audit) -> Block:
    """One mark per head, by its shares; empty if none are known."""
    known = [head for head in audit.heads if None not in (head.positional, head.symbolic, head.interaction)]
    places = _by_place(Names.of(audit), known)
    looks = {
        place: Look(f"place-{i}", place_title(place), "", *_MARKERS[i % len(_MARKERS)])
        for i, place in enumerate(places)
    }
    sized = " Larger marks have larger effects." if audit.effect else ""
    views = [View.of([_plane_panel(audit, {looks[place]: heads for place, heads in places.items()})])] if known else []
    signs = [look.sign for look in looks.values()] if len(looks) > 1 else []
    return TEXTS.block(
        "plane",
        views,
        words={"sized": sized, "click": " Click a legend entry to hide or show it." if len(places) > 1 else ""},
        legend=signs,
    )


def tints(audit: Audit, heads: Sequence[HeadRecord]) -> list[str]:
    """Each head's colour, by its layer among the layers of its side and kind."""
    last = {
        place: max(one.layer for one in audit.layers if (one.side, one.kind) == place)
        for place in Names.of(audit).places
    }
    depths = [head.layer / max(1, last[head.side, head.kind]) for head in heads]
    return [str(colour) for colour in sample_colorscale(list(DEPTHS), depths)] if depths else []


def _plane_panel(audit: Audit, by_look: dict[Look, list[HeadRecord]]) -> Panel:
    canvas, digits, names = triangle(), digits_of("effect", values_of(audit)), Names.of(audit)
    known = [head for heads in by_look.values() for head in heads]
    largest = max((head.effect or 0 for head in audit.heads), default=0)
    for look, heads in by_look.items():
        sizes = [max(0.0, head.effect or 0) / largest if largest > 0 else _PLAIN for head in heads]
        canvas.marks(
            [round(head.positional or 0.0, 4) for head in heads],
            [round(head.symbolic or 0.0, 4) for head in heads],
            look.heads(sizes) | {"color": tints(audit, heads)},
            "%{customdata[0]}<br>positional %{x:.3f}, symbolic %{y:.3f}, "
            "interaction %{customdata[1]}%{customdata[2]}<extra></extra>",
            customdata=[
                [
                    names.short(head),
                    told(head.interaction),
                    f"<br>effect {told(head.effect, digits)}" * bool(audit.effect),
                ]
                for head in heads
            ],
            meta=look.key,
        )
    for axis, share in ((canvas.x, "positional"), (canvas.y, "symbolic")):
        found = [getattr(head, share) for head in known]
        axis(f"{share} share", range=[min(-0.1, min(found) - _MARGIN), max(1.06, max(found) + _MARGIN)])
    telling = [head for head in known if head.entropy is None or head.entropy < UNIFORM]
    counts = ", ".join(f"{sum(getattr(head, share) > PATTERN for head in telling)} {share}" for share in _SHARES)
    text = f"Heads with a share over {PATTERN:g}: {counts} (of {len(telling)})."
    if len(telling) < len(known):
        text += (
            f" Not counted: {len(known) - len(telling)} heads with nearly uniform attention (entropy {UNIFORM:g} or "
            "more), whose logits hardly vary."
        )
    return Panel("Each head", canvas.figure(), text)


# ---- effects ---------------------------------------------------------------------------------------------------------

_BARS = 400  # up to this many heads, intervals are drawn
_WIDE = 0.36  # half the width over which a layer's heads are spread
_AXES = {"loss": "effect on the loss (nats per token)", "states": "effect on the last hidden states"}


def layer_effects(audit: Audit) -> Block:
    """One mark per head above its layer, with its interval; empty without effects."""
    names = Names.of(audit)
    measured = [head for head in audit.heads if head.effect is not None]
    groups = [
        Group(place_title(place) if len(names.places) > 1 else "", [_effects_panel(audit, names, heads)])
        for place, heads in _by_place(names, measured).items()
    ]
    bars = any(head.effect_low is not None for head in measured) and len(measured) <= _BARS
    below = len(harmful(audit))
    views = [View("", groups)] if groups and audit.effect else []
    return TEXTS.block(
        "effects",
        views,
        "full",
        words={
            "unit": unit(audit),
            "intervals": f" Thin lines: 95% intervals {over(audit)}." if bars else "",
            "below": f" Heads whose interval lies below zero: {below}." if below else "",
            "done": done(audit),
        },
    )


def _effects_panel(audit: Audit, names: Names, heads: list[HeadRecord]) -> Panel:
    canvas = Canvas(300, left=64)
    layers = [one for one in audit.layers if (one.side, one.kind) == (heads[0].side, heads[0].kind)]
    counts = {one.layer: max(one.heads, 1) for one in layers}
    digits = digits_of("effect", values_of(audit))
    lines: dict[str, Any] = {}
    if len(audit.heads) <= _BARS and any(head.effect_low is not None for head in heads):
        up, down = ([_reach(head, way) for head in heads] for way in ("effect_high", "effect_low"))
        lines = {
            "error_y": {"array": up, "arrayminus": down, "symmetric": False, "color": GUESS, "width": 0, "thickness": 1}
        }
    between = [f" ({interval})" if (interval := interval_told(head, digits)) else "" for head in heads]
    canvas.marks(
        [round(head.layer + 1 + _WIDE * (2 * (head.head + 0.5) / counts[head.layer] - 1), 4) for head in heads],
        [float(f"{head.effect or 0:.6g}") for head in heads],
        {"color": tints(audit, heads), "size": 6 if len(heads) <= _BARS else 4},
        [f"{names.short(h)}: {told(h.effect, digits)}{ends}" for h, ends in zip(heads, between, strict=True)],
        **lines,
    )
    canvas.line_at(0, dash="solid")
    first, last = min(counts) + 1, max(counts) + 1
    step = max(1, -(-last // 16))
    canvas.x("layer", showgrid=False, range=[first - 0.6, last + 0.6], dtick=step, tick0=1)
    canvas.y(_AXES[audit.effect or "loss"], exponentformat="power")
    top = max(heads, key=lambda head: head.effect or 0)
    words = f"Largest effect: {significant(top.effect)}, for {names.head(top)}."
    return Panel("Effect of each head, by layer", canvas.figure(), words)


def _reach(head: HeadRecord, end: str) -> float:
    other = getattr(head, end)
    return 0.0 if other is None or head.effect is None else float(f"{max(0.0, abs(other - head.effect)):.6g}")


def interval_told(head: HeadRecord, digits: int) -> str:
    """The interval of a head's effect; empty if there is none."""
    if head.effect_low is None or head.effect_high is None:
        return ""
    return f"{told(head.effect_low, digits)} to {told(head.effect_high, digits)}"


# ---- by distance ----------------------------------------------------------------------------------------------------

_DISTANCES = 10  # up to this many distances, all are labelled


def limit_of(tables: Sequence[Float[np.ndarray, "R C"]]) -> float:
    """The upper end of the colour scale of several tables: the largest share, rounded up to a multiple of 0.05."""
    top = max((float(np.nanmax(np.abs(table), initial=0.0)) for table in tables), default=0.0)
    return max(0.05, float(np.ceil(round(20 * top, 9)) / 20))


def distances(audit: Audit) -> Block:
    """A view with a map of all heads for each side and kind, and a view per layer; empty without profiles."""
    names = Names.of(audit)
    by_distance = sorted(audit.heads, key=lambda head: np.inf if head.distance is None else head.distance)
    found = _by_place(names, (head for head in by_distance if head.profile))
    limit = limit_of([_profiles(heads) for heads in found.values()])
    groups = [
        Group(place_title(place) if len(found) > 1 else "", [_by_distance(names, heads, limit, "All heads")])
        for place, heads in found.items()
    ]
    views = [View("all heads", groups)] if groups else []
    for layer in audit.layers:
        if heads := [head for head in audit.of(layer) if head.profile]:
            at_most = layer.chunk or layer.window
            if layer.window is not None and not layer.causal:
                at_most = 2 * layer.window - 1
            title = names.short_layer(layer) + ("" if at_most is None else f", at most {at_most} visible keys")
            views.append(View.of([_by_distance(names, heads, limit, title)], names.layer(layer)))
    ramp = Ramp("0%", f"{limit:.0%} of the attention", half=True)
    return TEXTS.block("distance", views, "full", ramp=ramp)


def bins(count: int) -> list[str]:
    """The labels of distance bins: 0, 1, 2–3, 4–7, ..."""
    starts = [0, *(2**power for power in range(count - 1))]
    return [str(a) if a < 2 else f"{a}–{2 * a - 1}" for a in starts]


def _profiles(heads: Sequence[HeadRecord]) -> Float[np.ndarray, "H B"]:
    width = max(len(head.profile) for head in heads)
    return np.array([[*head.profile, *[np.nan] * (width - len(head.profile))] for head in heads], dtype=float)


def _by_distance(names: Names, heads: Sequence[HeadRecord], limit: float, title: str) -> Panel:
    table = _profiles(heads)
    labels = bins(table.shape[1])
    marked = range(0, len(labels), 1 if len(labels) <= _DISTANCES else 2)
    ticks = (marked, [labels[i].partition("–")[0] for i in marked])
    rows = [names.short(head) for head in heads]
    return Panel(title, heat(table, rows, labels, limit, ticks=ticks, title="distance in tokens (start of bin)"))


# ---- by frequency ---------------------------------------------------------------------------------------------------

_USES = {"norm_use": "Share of ‖q‖ ‖k‖", "variance_use": "Share of the variance of the logits"}
_STILL, _BIAS = "no rotation", "bias"
_TICKS = 6  # frequencies labelled below a map
Shares = Float[np.ndarray, "R C"]


def frequencies(audit: Audit) -> Block:
    """A view of all layers with a map per set of frequencies, and a view per layer; empty without rotation."""
    names = Names.of(audit)
    rotary = [
        one
        for one in audit.layers
        if one.frequencies
        and any(len(getattr(head, use)) == _width(one, use) for head in audit.of(one) for use in _USES)
    ]
    tables: dict[tuple[int, str], Shares] = {}  # one row per head; NaN if unknown
    means: dict[tuple[int, str], Float[np.ndarray, "C"]] = {}
    for i, one in enumerate(rotary):
        for use in _USES:
            width, found = _width(one, use), [getattr(head, use) for head in audit.of(one)]
            tables[i, use] = np.array([row if len(row) == width else [np.nan] * width for row in found], dtype=float)
            known = [row for row in tables[i, use] if not np.isnan(row).all()]
            means[i, use] = np.mean(known, axis=0) if known else np.full(width, np.nan)
    groups, limit = [], limit_of([mean[None] for mean in means.values()])
    for i, turned in enumerate(one.frequencies for one in rotary):
        same = [j for j, one in enumerate(rotary) if alike(one.frequencies, turned)]
        if same[0] != i:
            continue
        rows = [names.short_layer(rotary[i]) for i in same]
        panels = _use_panels({use: np.array([means[i, use] for i in same]) for use in _USES}, rows, turned, limit)
        groups.append(Group(f"Mean over heads, {layer_spans(names, [rotary[i] for i in same])}", panels))
    views = [View("all layers (mean over heads)", groups)] if groups else []
    for i, one in enumerate(rotary):
        rows = [f"H{head.head + 1}" for head in audit.of(one)]
        own = {use: tables[i, use] for use in _USES}
        views.append(View.of(_use_panels(own, rows, one.frequencies, limit_of([*own.values()])), names.layer(one)))
    ramp = Ramp("counteracts the others", "used most")
    return TEXTS.block("frequencies", views, ramp=ramp)


def alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two rotations have the same frequencies, up to the rounding with which they were measured."""
    return len(one) == len(other) and np.allclose(one, other, rtol=1e-3, atol=1e-9)


def _width(layer: LayerRecord, use: str) -> int:
    return len(layer.frequencies) + (1 if use == "norm_use" else 2)


def _use_panels(tables: dict[str, Shares], rows: list[str], turned: Sequence[float], limit: float) -> list[Panel]:
    found = [(use, table) for use, table in tables.items() if not np.isnan(table).all()]
    return [Panel(_USES[use], _use_map(table, rows, turned, limit)) for use, table in found]


def _use_map(table: Shares, rows: list[str], turned: Sequence[float], limit: float) -> go.Figure:
    """A map; columns for dimensions without rotation and for a bias are only shown if used."""
    told = (f"pair {pair}: {one:.3g} rad per position, {_wave(one)} tokens" for pair, one in enumerate(turned))
    columns = [_STILL, *told, _BIAS][: table.shape[1]]
    labels = ["no<br>rotation", *(f"{one:.2g}<br>{_wave(one)}" for one in turned), _BIAS][: table.shape[1]]
    used = set(np.flatnonzero(np.nan_to_num(table).any(axis=0)).tolist())
    kept = [i for i, name in enumerate(columns) if name not in (_STILL, _BIAS) or i in used]
    table, columns, labels = table[:, kept], [columns[i] for i in kept], [labels[i] for i in kept]
    pairs = [i for i, name in enumerate(columns) if name not in (_STILL, _BIAS)]
    step = max(1, round((len(pairs) - 1) / (_TICKS - 1)))
    last = len(columns) - 1  # the label "bias" would overlap those of the last pairs
    crowded = range(max(0, last - step // 2), last) if columns[last] == _BIAS and step > 1 else ()
    ticks = sorted({*pairs[::step], *(set(range(len(columns))) - set(pairs))} - set(crowded))
    title = "rad per position; wavelength in tokens"
    return heat(table, rows, columns, limit, ticks=(ticks, [labels[i] for i in ticks]), title=title, right=14)


def _wave(turn: float) -> str:
    if not turn:
        return "∞"
    length = 2 * pi / abs(turn)
    return f"{length:.2g}" if length < 10 else f"{length:,.0f}" if length < 10_000 else f"{length / 1000:,.0f}k"


# ---- the map that the page's script draws, for print -----------------------------------------------------------------

_ROOM = 16  # up to this many heads, cells show their values


def head_map(sheet: dict[str, Any], column: dict[str, Any]) -> Block:
    """Layers by heads, coloured by a column of an audit's sheet: one panel per side and kind of attention."""
    name, ends = column["name"], sheet["ends"][column["name"]]
    several = len(sheet["places"]) > 1
    panels = [
        Panel(f"{column['title']}, {place['title']}" if several else column["title"], _tones(sheet, column, i), "")
        for i, place in enumerate(sheet["places"])
    ]
    title, ramp = f"Layers by heads: {column['title']}", Ramp(ends["low"], ends["high"], ends["half"])
    return Block(f"map-{name.replace('_', '-')}", title, column["about"], [View.of(panels)], "", ramp=ramp, number=1)


def _tones(sheet: dict[str, Any], column: dict[str, Any], which: int) -> go.Figure:
    """Tones by layer and head: warm above 0, cool below 0, empty if unknown."""
    place, name = sheet["places"][which], column["name"]
    rows = {layer: row for row, layer in enumerate(place["layers"])}
    tones: list[list[float | None]] = [[None] * place["heads"] for _ in rows]
    numbers = [[""] * place["heads"] for _ in rows]
    for at, of in enumerate(sheet["place"]):
        if of == which:
            row, head, value = rows[sheet["layer"][at]], sheet["head"][at], sheet["values"][name][at]
            tones[row][head] = sheet["tones"][name][at]
            numbers[row][head] = "" if value is None else fixed(value, min(column["digits"], 2))
    size = 20 if len(rows) <= _ROOM else 12
    canvas = Canvas(size * len(rows) + 44, left=44, right=6, top=4, bottom=40)
    heads, layers = [str(head + 1) for head in range(place["heads"])], [f"L{layer + 1}" for layer in place["layers"]]
    roomy = place["heads"] <= _ROOM and size > 12 and column["digits"] <= 3
    canvas.heat(tones, heads, layers, 1.0, "", gap=1, numbers=numbers if roomy else None, size=9)
    axis: dict[str, Any] = {"showgrid": False, "type": "category", "ticks": ""}
    canvas.x("head", tickvals=heads[:: -(-len(heads) // 16) or 1], **axis)
    canvas.y("", tickvals=layers[:: -(-len(layers) // 24) or 1], autorange="reversed", **axis)
    return canvas.figure()


# ---- the effect of each frequency band -------------------------------------------------------------------------------

_LEAST = 1e-6  # smallest end of the colour scale
_DIGITS = 3


def by_band(audit: AuditRecord) -> Block:
    """The effect of each band in each layer; empty if bands were not measured."""
    panels = [_bands_panel(audit, "Effect of each band, by layer", "Largest effect")] if _with_bands(audit) else []
    return _bands_block(audit, [View.of(panels)])


def bands_of_both(first: AuditRecord, second: AuditRecord, names: tuple[str, str]) -> Block:
    """The bands of two audits on one scale, a view each, and the difference if the two have the same bands.

    Empty if either has no bands, or if their effects are of different kinds.
    """
    if not (first.bands and second.bands) or first.effect != second.effect:
        return _bands_block(first, [])
    limit = max(_limit(_effects(first)), _limit(_effects(second)))
    views = [
        View.of([_bands_panel(audit, name, f"Largest effect in {name}", limit)], name)
        for audit, name in zip((first, second), names, strict=True)
    ]
    bands = [[(x.side, x.kind, x.layer, x.first, x.last) for x in audit.bands] for audit in (first, second)]
    if bands[0] == bands[1]:
        called, change = Names.of(first).short_layer, _effects(second) - _effects(first)
        said = [
            [f"{text} → {told(band.effect)}" for text, band in zip(_words(called(layer), own), others, strict=True)]
            for (layer, own), (_, others) in zip(_with_bands(first), _with_bands(second), strict=True)
        ]
        one, other = max(
            zip(first.bands, second.bands, strict=True),
            key=lambda pair: abs((pair[1].effect or 0.0) - (pair[0].effect or 0.0)),
        )
        text = (
            f"Largest change: {_place(first, one)}, from {told(one.effect)} in {names[0]} to {told(other.effect)} in "
            f"{names[1]}."
        )
        figure = _bands_map(first, change, _limit(change), said)
        views.append(View.of([Panel(f"{names[1]} − {names[0]}", figure, text)], "difference"))
    return _bands_block(first, views, " Both models share one scale.")


def _bands_block(audit: AuditRecord, views: list[View], more: str = "") -> Block:
    ramp = Ramp("freezing helps", "freezing hurts")
    return TEXTS.block("bands", views, "full", words={"unit": unit(audit), "more": more}, ramp=ramp)


def _bands_panel(audit: AuditRecord, title: str, largest: str, limit: float | None = None) -> Panel:
    table, worst = _effects(audit), max(audit.bands, key=lambda band: band.effect or 0.0)
    figure = _bands_map(audit, table, limit or _limit(table))
    return Panel(title, figure, f"{largest}: {told(worst.effect)}, for {_place(audit, worst)}.")


def _with_bands(audit: AuditRecord) -> list[tuple[LayerRecord, list[BandRecord]]]:
    """The layers that have bands, with their bands."""
    return [(layer, row) for layer in audit.layers if (row := audit.bands_of(layer))]


def _place(audit: AuditRecord, band: BandRecord) -> str:
    return f"pairs {band.first + 1} to {band.last + 1} in {Names.of(audit).layer(audit.layer_of(band))}"


def _effects(audit: AuditRecord) -> Float[np.ndarray, "L n"]:
    """Effects by layer and band; NaN if unknown, and after a layer's last band."""
    kept = _with_bands(audit)
    table = np.full((len(kept), max(len(row) for _, row in kept)), np.nan)
    for row, (_, bands) in zip(table, kept, strict=True):
        row[: len(bands)] = [np.nan if band.effect is None else band.effect for band in bands]
    return table


def _limit(table: Float[np.ndarray, "L n"]) -> float:
    return max(float(np.nanmax(np.abs(table), initial=0.0)), _LEAST)


def _bands_map(
    audit: AuditRecord, table: Float[np.ndarray, "L n"], limit: float, said: list[list[str]] | None = None
) -> go.Figure:
    kept, names = _with_bands(audit), Names.of(audit)
    said = said or [_words(names.short_layer(layer), bands) for layer, bands in kept]
    columns = [f"{band.first + 1}–{band.last + 1}" for band in max((row for _, row in kept), key=len)]
    numbers = [["" if np.isnan(value) else fixed(float(value), _DIGITS) for value in row] for row in table]
    return heat(
        table,
        [names.short_layer(layer) for layer, _ in kept],
        columns,
        limit,
        ticks=(range(len(columns)), columns),
        title="RoPE pairs",
        hover=[row + [""] * (len(columns) - len(row)) for row in said],
        numbers=numbers if max(table.shape) <= FEW else None,
    )


def _words(layer: str, bands: Sequence[BandRecord]) -> list[str]:
    found = []
    for band in bands:
        ends = ""
        if band.effect_low is not None and band.effect_high is not None:
            ends = f" ({significant(band.effect_low)} to {significant(band.effect_high)})"
        turns = f"{significant(band.fastest)} to {significant(band.slowest)} rad per position"
        found.append(f"{layer}, pairs {band.first + 1}–{band.last + 1}, {turns}: {told(band.effect)}{ends}")
    return found


# ---- the page --------------------------------------------------------------------------------------------------------


_MAKERS = (plane, frequencies, distances, layer_effects, by_band)
_FIRST = 2  # number of the first of these figures; the map is Figure 1
_WORDS = 400  # tokens of the first sequence that are shown
PREFERRED = ("effect", "positional", "distance")  # columns that colour the map initially, if known


def write_audit(audit: Audit, directory: Path, parquet: bytes | None = None) -> Path:
    """Write the audit's page to ``report.html`` in ``directory``, whole or not at all; returns its path."""
    return write_report(directory, render_audit(audit, parquet))


def render_audit(audit: Audit, parquet: bytes | None = None) -> str:
    """The audit as one self-contained HTML document; the same record gives the same document.

    ``parquet``: the table of heads as a Parquet file, for download; without it the page only offers CSV.
    """
    return audit_page(audit, parquet).html()


def audit_page(audit: Audit, parquet: bytes | None = None) -> Page:
    """The figures and tables of an audit; see `render_audit`."""
    values = values_of(audit)
    shown, digits = columns(values), digits_of("effect", values)
    one = sheet(model(audit), audit, values, scales_of(values), {column["name"]: column["digits"] for column in shown})
    unknown = words.unknown(audit)
    tables = {
        "heads": _heads_table(one, shown),
        "deposits": _deposits_table(audit, digits),
        "layers": _layers_table(audit, with_shares=bool(unknown)),
        "settings": settings_table(audit.about.items()),
    }
    return Page(
        "report/auditing/page.html.j2",
        numbered((make(audit) for make in _MAKERS), _FIRST),
        {name: table for name, table in tables.items() if table.body},
        {
            "command": "audit",
            "audit": audit,
            "words": words,
            "model": model(audit),
            "columns": shown,
            "chosen": chosen(shown),
            "sheet": one,
            "all_layers": sorted({layer.layer for layer in audit.layers}),
            "unknown": unknown,
            "logits": any(layer.logit is not None for layer in audit.layers),
            "tokens": audit.words[:_WORDS],
            "content": content(shown, [one]),
            "parquet": None if parquet is None else base64.b64encode(parquet).decode(),
            "file": file_name(model(audit)),
        },
        [head_map(one, column) for column in shown],
    )


def _heads_table(one: dict[str, Any], shown: list[dict[str, Any]]) -> Table:
    """All heads, as the page's script shows them; layers and heads are counted from 1."""
    rows = [
        [title, str(layer + 1), str(head + 1), *(fixed(one["values"][c["name"]][at], c["digits"]) for c in shown)]
        for at, (title, layer, head) in enumerate(zip(one["titles"], one["layer"], one["head"], strict=True))
    ]
    names = ["head", "layer", "index in layer", *(column["title"] for column in shown)]
    return make_table("All heads", names, rows, right=range(1, len(names)))


def _deposits_table(audit: Audit, digits: int) -> Table:
    """How the effects of each layer are distributed over its heads."""
    names, told, rows = words.Names.of(audit), words.told, []
    for layer in audit.layers if audit.effect else ():
        found, name = layer.deposit, names.short_layer(layer)
        if not found:
            continue
        top = words.top_head(audit, layer) if found.get("top_share") is not None else None
        row = [name, told(found.get("helps"), digits), told(found.get("harms"), digits)]
        row += [f"head {top.head + 1}" if top else DASH, told(top.effect if top else None, digits)]
        row += [(interval_told(top, digits) if top else "") or DASH, percent(found.get("top_share"))]
        row += [f"{told(found.get('effective_heads'), 1)} of {layer.heads}", told(found.get("gini"), 2)]
        rows.append([*row, told(found.get("lead"), digits)])
    shown = ["Positive", "Negative", "Largest", "Effect", "Interval", "Share", "Effective heads", "Gini", "Lead"]
    right = (1, 2, *range(4, 10))
    return make_table("Deposit by layer", ["Layer", *shown], rows, right=right, css="numbers small")


def _layers_table(audit: Audit, *, with_shares: bool) -> Table:
    """Every attention call, and how much the recomputed values differ from the model's own."""
    names, power, rows = words.Names.of(audit), words.power, []
    logits = any(layer.logit is not None for layer in audit.layers)
    for layer in audit.layers:
        over = f" over {layer.key_heads}" if layer.key_heads != layer.heads else ""
        cap = "" if layer.softcap is None else f", capped at {layer.softcap:g}"
        row: list[str | Cell] = [names.short_layer(layer), code(layer.module), f"{layer.heads}{over}"]
        row += [str(layer.head_dim), f"{layer.scale:.4g}{cap}", Cell(sees(layer)), Cell(layer.position)]
        row += [power(layer.weights), power(layer.outputs), power(layer.tolerance)]
        row += [words.size(layer.logit)] * logits + [Cell(layer.unknown or "known")] * with_shares
        rows.append(row)
    shown = ["Layer", "Module", "Heads", "Width", "Scale", "Visible keys", "Position", "Weights", "Outputs", "Rounding"]
    shown += ["Largest logit"] * logits + ["Shares"] * with_shares
    right = (2, 3, 4, 7, 8, 9, *([10] if logits else []))
    return make_table("Layers", shown, rows, right=right, css="numbers small layers")


def chosen(shown: list[dict[str, Any]]) -> str:
    """The column that colours the map initially; empty if there is none."""
    names = [column["name"] for column in shown]
    return next((name for name in (*PREFERRED, *names) if name in names), "")


def file_name(name: str) -> str:
    """A file name for downloads: the model's name with only letters, digits, dots and dashes."""
    kept = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in name)
    return kept.strip("-.")[-80:] or "audit"


def sees(layer: LayerRecord) -> str:
    """The keys that a query can attend to."""
    if layer.chunk is not None:
        return f"itself and earlier keys in its chunk of {layer.chunk}"
    if layer.window is not None and not layer.causal:
        return f"itself and {layer.window - 1} keys on either side"
    if layer.window is not None:
        return f"itself and {layer.window - 1} earlier keys"
    others = "keys that are not masked" if "mask" in layer.position else "all keys"
    return "itself and all earlier keys" if layer.causal else others
