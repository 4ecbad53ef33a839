"""Heat maps of an audit: attention by distance, use of RoPE frequencies, and the effect of each frequency band."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from toeplens.ground.words import fixed, significant
from toeplens.report.kit.blocks import Block, Group, Panel, Ramp, View
from toeplens.report.kit.canvas import FEW, Canvas, heat
from toeplens.studies.auditing.record import AuditRecord, BandRecord, HeadRecord, LayerRecord
from toeplens.studies.auditing.result import Audit
from toeplens.studies.auditing.words import Names, layer_spans, place_title, told, unit


def limit_of(tables: Sequence[Float[np.ndarray, "R C"]]) -> float:
    """The upper end of the colour scale of several tables: the largest share, rounded up to a multiple of 0.05."""
    top = max((float(np.nanmax(np.abs(table), initial=0.0)) for table in tables), default=0.0)
    return max(0.05, float(np.ceil(round(20 * top, 9)) / 20))


# ---- by distance ----------------------------------------------------------------------------------------------------

_DISTANCES = 10  # up to this many distances, all are labelled
_BY_DISTANCE = (
    "Share of each head’s attention (%) on the query token itself (0) and in distance bins of doubling width, both "
    "sides together, without attention on a sink. Uniform attention mostly falls into the wide bins on the right. "
    "Heads are sorted by mean distance."
)


def distances(audit: Audit) -> Block:
    """A view with a map of all heads for each side and kind, and a view per layer; empty without profiles."""
    names = Names.of(audit)
    found = {
        place: [one for one in audit.heads if one.profile and (one.side, one.kind) == place] for place in names.places
    }
    found = {  # by mean distance
        place: sorted(heads, key=lambda head: np.inf if head.distance is None else head.distance)
        for place, heads in found.items()
        if heads
    }
    tables = [_profiles(heads) for heads in found.values()]
    limit = limit_of(tables)
    groups = [
        Group(place_title(place) if len(found) > 1 else "", [_by_distance(names, heads, limit, "All heads")])
        for place, heads in found.items()
    ]
    views = [View("all heads", groups)] if groups else []
    for layer in audit.layers:
        if heads := [head for head in audit.of(layer) if head.profile]:
            title = names.layer(layer)
            at_most = layer.chunk or layer.window
            if layer.window is not None and not layer.causal:
                at_most = 2 * layer.window - 1
            sees = "" if at_most is None else f", at most {at_most} visible keys"
            panel = _by_distance(names, heads, limit, f"{names.short_layer(layer)}{sees}")
            views.append(View.of([panel], title))
    ramp = Ramp("0%", f"{limit:.0%} of the attention", half=True)
    return Block("distance", "Attention by distance", _BY_DISTANCE, views, "full", ramp=ramp)


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
_BY_FREQUENCY = (
    "RoPE frequencies in rad per position, with the wavelength in tokens below. Left: share of the norms of queries "
    "and keys in each frequency. Right: share of the variance of the logits; it is negative (blue) if a frequency "
    "counteracts the others. “No rotation”: dimensions that are not rotated. “Bias”: positional bias added to the "
    "logits. The menu selects the mean over the heads of every layer, or the heads of one layer."
)
Table = Float[np.ndarray, "R C"]


def frequencies(audit: Audit) -> Block:
    """A view of all layers with a map per set of frequencies, and a view per layer; empty without rotation."""
    names = Names.of(audit)
    rotary = [
        one
        for one in audit.layers
        if one.frequencies
        and any(len(getattr(head, use)) == _width(one, use) for head in audit.of(one) for use in _USES)
    ]
    tables = {(i, use): _table(list(audit.of(one)), one, use) for i, one in enumerate(rotary) for use in _USES}
    means = {}
    for place, table in tables.items():
        known = table[~np.isnan(table).all(1)]
        means[place] = known.mean(0) if len(known) else np.full(table.shape[1], np.nan)
    groups, limit = [], limit_of([mean[None] for mean in means.values()])
    for i, turned in enumerate(one.frequencies for one in rotary):
        same = [j for j, one in enumerate(rotary) if alike(one.frequencies, turned)]
        if same[0] != i:
            continue
        rows = [names.short_layer(rotary[i]) for i in same]
        panels = [_use_panel(np.array([means[i, use] for i in same]), rows, turned, use, limit) for use in _USES]
        title = layer_spans(names, [rotary[i] for i in same])
        groups.append(Group(f"Mean over heads, {title}", _shown(panels)))
    views = [View("all layers (mean over heads)", groups)] if groups else []
    for i, one in enumerate(rotary):
        rows = [f"H{head.head + 1}" for head in audit.of(one)]
        limit = limit_of([tables[i, use] for use in _USES])
        panels = [_use_panel(tables[i, use], rows, one.frequencies, use, limit) for use in _USES]
        views.append(View.of(_shown(panels), names.layer(one)))
    ramp = Ramp("counteracts the others", "used most")
    return Block("frequencies", "Use of RoPE frequencies", _BY_FREQUENCY, views, ramp=ramp)


def alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two rotations have the same frequencies, up to the rounding with which they were measured."""
    return len(one) == len(other) and np.allclose(one, other, rtol=1e-3, atol=1e-9)


def _shown(panels: list[Panel | None]) -> list[Panel]:
    return [panel for panel in panels if panel is not None]


def _width(layer: LayerRecord, use: str) -> int:
    return len(layer.frequencies) + (1 if use == "norm_use" else 2)


def _table(heads: Sequence[HeadRecord], layer: LayerRecord, use: str) -> Table:
    """One row per head; NaN if unknown."""
    width = _width(layer, use)
    rows = (getattr(head, use) for head in heads)
    return np.array([row if len(row) == width else [np.nan] * width for row in rows], dtype=float)


def _use_panel(table: Table, rows: list[str], turned: Sequence[float], use: str, limit: float) -> Panel | None:
    """A map; columns for dimensions without rotation and for a bias are only shown if used."""
    if np.isnan(table).all():
        return None
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
    shown = heat(table, rows, columns, limit, ticks=(ticks, [labels[i] for i in ticks]), title=title, right=14)
    return Panel(_USES[use], shown)


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
_RAMP = Ramp("freezing helps", "freezing hurts")


def by_band(audit: AuditRecord) -> Block:
    """The effect of each band in each layer; empty if bands were not measured."""
    caption, kept = _caption(audit), _kept(audit)
    if not kept:
        return Block("bands", "", caption, [], "full", ramp=_RAMP)
    table = _effects(audit)
    worst = max(audit.bands, key=lambda band: band.effect or 0.0)
    text = f"Largest effect: {told(worst.effect)}, for {_place(audit, worst)}."
    panel = Panel("Effect of each band, by layer", _figure(audit, table, _limit(table)), text)
    return Block("bands", "Effects of freezing frequency bands", caption, [View.of([panel])], "full", ramp=_RAMP)


def bands_of_both(first: AuditRecord, second: AuditRecord, names: tuple[str, str]) -> Block:
    """The bands of two audits on one scale, a view each, and the difference if the two have the same bands.

    Empty if either has no bands, or if their effects are of different kinds.
    """
    caption = f"{_caption(first)} Both models share one scale."
    if not (first.bands and second.bands) or first.effect != second.effect:
        return Block("bands", "", caption, [], "full", ramp=_RAMP)
    tables = _effects(first), _effects(second)
    limit, views = max(map(_limit, tables)), []
    for audit, name, table in zip((first, second), names, tables, strict=True):
        worst = max(audit.bands, key=lambda band: band.effect or 0.0)
        text = f"Largest effect in {name}: {told(worst.effect)}, for {_place(audit, worst)}."
        views.append(View.of([Panel(name, _figure(audit, table, limit), text)], name))
    bands = [[(x.side, x.kind, x.layer, x.first, x.last) for x in audit.bands] for audit in (first, second)]
    if bands[0] == bands[1]:
        change = tables[1] - tables[0]
        called = Names.of(first).short_layer
        said = [
            [f"{text} → {told(band.effect)}" for text, band in zip(_words(called(layer), own), others, strict=True)]
            for (layer, own), (_, others) in zip(_kept(first), _kept(second), strict=True)
        ]
        pairs = zip(first.bands, second.bands, strict=True)
        moved = [(abs((b.effect or 0.0) - (a.effect or 0.0)), a, b) for a, b in pairs]
        _, one, other = max(moved, key=lambda each: each[0])
        text = (
            f"Largest change: {_place(first, one)}, from {told(one.effect)} in {names[0]} to {told(other.effect)} in "
            f"{names[1]}."
        )
        title = f"{names[1]} − {names[0]}"
        views.append(View.of([Panel(title, _figure(first, change, _limit(change), said), text)], "difference"))
    return Block("bands", "Effects of freezing frequency bands", caption, views, "full", ramp=_RAMP)


def _caption(audit: AuditRecord) -> str:
    return (
        "Each cell is a band of RoPE pairs whose rotation is frozen in all heads of a layer: their content still "
        f"contributes to the logits, their position does not. The colour shows the {unit(audit)}. Bands are labelled "
        "by their first and last pair, counted from 1. Hover over a cell for its frequencies and interval."
    )


def _kept(audit: AuditRecord) -> list[tuple[LayerRecord, list[BandRecord]]]:
    """The layers that have bands, with their bands."""
    return [(layer, row) for layer in audit.layers if (row := audit.bands_of(layer))]


def _place(audit: AuditRecord, band: BandRecord) -> str:
    return f"pairs {band.first + 1} to {band.last + 1} in {Names.of(audit).layer(audit.layer_of(band))}"


def _effects(audit: AuditRecord) -> Float[np.ndarray, "L n"]:
    """Effects by layer and band; NaN if unknown, and after a layer's last band."""
    kept = _kept(audit)
    table = np.full((len(kept), max(len(row) for _, row in kept)), np.nan)
    for row, (_, bands) in zip(table, kept, strict=True):
        row[: len(bands)] = [np.nan if band.effect is None else band.effect for band in bands]
    return table


def _limit(table: Float[np.ndarray, "L n"]) -> float:
    return max(float(np.nanmax(np.abs(table), initial=0.0)), _LEAST)


def _figure(
    audit: AuditRecord, table: Float[np.ndarray, "L n"], limit: float, said: list[list[str]] | None = None
) -> go.Figure:
    kept, names = _kept(audit), Names.of(audit)
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
