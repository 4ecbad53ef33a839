"""A map of an audit: what each band of frequencies of each layer is worth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from toeplens.ground.words import fixed, significant
from toeplens.report.kit.blocks import Block, Panel, Ramp, View
from toeplens.report.kit.maps import FEW, heat
from toeplens.studies.auditing.audit import Audit
from toeplens.studies.auditing.record import BandRecord
from toeplens.studies.auditing.words import Names, done, told, unit

_LEAST = 1e-6  # at the end of the colours
_DIGITS = 3


def by_band(audit: Audit) -> Block:
    """Layers by bands, each its effect; none where no bands were taken."""
    names = Names.of(audit)
    kept = [(layer, row) for layer in audit.layers if (row := audit.bands_of(layer))]
    caption = (
        "A cell is a band of the pairs of a layer’s rotation, which stands still in all of its heads: what they hold "
        f"counts, how far apart they are does not. Its colour is the {unit(audit)}. Bands are named by their first and "
        "last pair, counted from 1; point at a cell for its frequencies and its interval."
    )
    ramp = Ramp("better without", "worse without")
    if not kept:
        return Block("bands", "", caption, [], "full", ramp=ramp)
    widest = max((row for _, row in kept), key=len)
    table = np.full((len(kept), len(widest)), np.nan)
    for row, (_, bands) in zip(table, kept, strict=True):
        row[: len(bands)] = [np.nan if band.effect is None else band.effect for band in bands]
    limit = max(float(np.nanmax(np.abs(table), initial=0.0)), _LEAST)
    columns = [f"{band.first + 1}–{band.last + 1}" for band in widest]
    figure = heat(
        table,
        [names.short_layer(layer) for layer, _ in kept],
        columns,
        limit,
        ticks=(range(len(columns)), columns),
        title="pairs of the rotation",
        hover=[_words(names.short_layer(layer), bands, len(widest)) for layer, bands in kept],
        numbers=_numbers(table),
    )
    worst = max(audit.bands, key=lambda band: band.effect or 0.0)
    text = (
        f"{len(kept)} layers; the largest effect is {told(worst.effect)}, of pairs {worst.first + 1} to "
        f"{worst.last + 1} in {names.layer(audit.layer_of(worst))}."
    )
    title = f"What {done(audit)} a layer does"
    return Block(
        "bands", title, caption, [View.of([Panel("Effect of each band, by layer", figure, text)])], "full", ramp=ramp
    )


def _numbers(table: Float[np.ndarray, "L n"]) -> list[list[str]] | None:
    if max(table.shape) > FEW:
        return None
    return [["" if np.isnan(value) else fixed(float(value), _DIGITS) for value in row] for row in table]


def _words(layer: str, bands: Sequence[BandRecord], count: int) -> list[str]:
    found = []
    for band in bands:
        ends = ""
        if band.effect_low is not None and band.effect_high is not None:
            ends = f" ({significant(band.effect_low)} to {significant(band.effect_high)})"
        turns = f"{significant(band.fastest)} to {significant(band.slowest)} radians a token"
        found.append(f"{layer}, pairs {band.first + 1}–{band.last + 1}, {turns}: {told(band.effect)}{ends}")
    return found + [""] * (count - len(found))
