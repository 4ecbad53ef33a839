"""A map of an audit, or of two: what each band of frequencies of each layer is worth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from toeplens.ground.words import fixed, significant
from toeplens.report.kit.blocks import Block, Panel, Ramp, View
from toeplens.report.kit.maps import FEW, heat
from toeplens.studies.auditing.audit import Audit
from toeplens.studies.auditing.record import BandRecord, LayerRecord
from toeplens.studies.auditing.words import Names, done, told, unit

_LEAST = 1e-6  # at the end of the colours
_DIGITS = 3
_RAMP = Ramp("better without", "worse without")


def by_band(audit: Audit) -> Block:
    """Layers by bands, each its effect; none where no bands were taken."""
    caption, kept = _caption(audit), _kept(audit)
    if not kept:
        return Block("bands", "", caption, [], "full", ramp=_RAMP)
    table = _table(audit)
    said = [_words(Names.of(audit).short_layer(layer), bands) for layer, bands in kept]
    worst = max(audit.bands, key=lambda band: band.effect or 0.0)
    text = f"{len(kept)} layers; the largest effect is {told(worst.effect)}, of {_place(audit, worst)}."
    panel = Panel("Effect of each band, by layer", _figure(audit, table, _limit(table), said), text)
    return Block("bands", f"What {done(audit)} a layer does", caption, [View.of([panel])], "full", ramp=_RAMP)


def bands_of_both(first: Audit, second: Audit, names: tuple[str, str]) -> Block:
    """The bands of two audits in one scale, a view each, and the change where the two have the same bands.

    None where either has no bands, or their effects are of another kind.
    """
    caption = f"{_caption(first)} One scale for both."
    if not (first.bands and second.bands) or first.effect != second.effect:
        return Block("bands", "", caption, [], "full", ramp=_RAMP)
    tables = _table(first), _table(second)
    limit, views = max(map(_limit, tables)), []
    for audit, name, table in zip((first, second), names, tables, strict=True):
        said = [_words(Names.of(audit).short_layer(layer), bands) for layer, bands in _kept(audit)]
        worst = max(audit.bands, key=lambda band: band.effect or 0.0)
        text = f"The largest effect in {name} is {told(worst.effect)}, of {_place(audit, worst)}."
        views.append(View.of([Panel(name, _figure(audit, table, limit, said), text)], name))
    pairs = list(zip(first.bands, second.bands, strict=False))
    if len(first.bands) == len(second.bands) and all(_same(*pair) for pair in pairs):
        change = tables[1] - tables[0]
        called = Names.of(first).short_layer
        said = [
            [f"{text}; then {told(band.effect)}" for text, band in zip(_words(called(layer), own), bands, strict=True)]
            for (layer, own), (_, bands) in zip(_kept(first), _kept(second), strict=True)
        ]
        moved = [(abs((b.effect or 0.0) - (a.effect or 0.0)), a, b) for a, b in pairs]
        _, one, other = max(moved, key=lambda each: each[0])
        text = (
            f"Most changed are {_place(first, one)}, from {told(one.effect)} in {names[0]} to {told(other.effect)} in "
            f"{names[1]}."
        )
        title = f"{names[1]} less {names[0]}"
        views.append(View.of([Panel(title, _figure(first, change, _limit(change), said), text)], "change"))
    return Block("bands", f"What {done(first)} a layer does", caption, views, "full", ramp=_RAMP)


def _caption(audit: Audit) -> str:
    return (
        "A cell is a band of the pairs of a layer’s rotation, which stands still in all of its heads: what they hold "
        f"counts, how far apart they are does not. Its colour is the {unit(audit)}. Bands are named by their first and "
        "last pair, counted from 1; point at a cell for its frequencies and its interval."
    )


def _kept(audit: Audit) -> list[tuple[LayerRecord, list[BandRecord]]]:
    """The layers that have bands, with them."""
    return [(layer, row) for layer in audit.layers if (row := audit.bands_of(layer))]


def _place(audit: Audit, band: BandRecord) -> str:
    return f"pairs {band.first + 1} to {band.last + 1} in {Names.of(audit).layer(audit.layer_of(band))}"


def _same(one: BandRecord, other: BandRecord) -> bool:
    """Whether they are the same pairs of the same layer."""
    first, second = ((x.side, x.kind, x.layer, x.first, x.last) for x in (one, other))
    return first == second


def _table(audit: Audit) -> Float[np.ndarray, "L n"]:
    """Effects by layer and band; NaN where they are not known, and after a layer's last band."""
    kept = _kept(audit)
    table = np.full((len(kept), max(len(row) for _, row in kept)), np.nan)
    for row, (_, bands) in zip(table, kept, strict=True):
        row[: len(bands)] = [np.nan if band.effect is None else band.effect for band in bands]
    return table


def _limit(table: Float[np.ndarray, "L n"]) -> float:
    return max(float(np.nanmax(np.abs(table), initial=0.0)), _LEAST)


def _figure(audit: Audit, table: Float[np.ndarray, "L n"], limit: float, said: list[list[str]]) -> go.Figure:
    kept, names = _kept(audit), Names.of(audit)
    columns = [f"{band.first + 1}–{band.last + 1}" for band in max((row for _, row in kept), key=len)]
    return heat(
        table,
        [names.short_layer(layer) for layer, _ in kept],
        columns,
        limit,
        ticks=(range(len(columns)), columns),
        title="pairs of the rotation",
        hover=[row + [""] * (len(columns) - len(row)) for row in said],
        numbers=_numbers(table),
    )


def _numbers(table: Float[np.ndarray, "L n"]) -> list[list[str]] | None:
    if max(table.shape) > FEW:
        return None
    return [["" if np.isnan(value) else fixed(float(value), _DIGITS) for value in row] for row in table]


def _words(layer: str, bands: Sequence[BandRecord]) -> list[str]:
    found = []
    for band in bands:
        ends = ""
        if band.effect_low is not None and band.effect_high is not None:
            ends = f" ({significant(band.effect_low)} to {significant(band.effect_high)})"
        turns = f"{significant(band.fastest)} to {significant(band.slowest)} radians a token"
        found.append(f"{layer}, pairs {band.first + 1}–{band.last + 1}, {turns}: {told(band.effect)}{ends}")
    return found
