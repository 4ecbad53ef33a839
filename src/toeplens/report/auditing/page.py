"""The effect of each frequency band, as a figure of the page of a pretrained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from toeplens.ground.words import fixed, significant
from toeplens.report.kit.blocks import Block, Panel, Ramp, Texts, View
from toeplens.report.kit.canvas import FEW, heat
from toeplens.studies.auditing.record import AuditRecord, BandRecord, LayerRecord
from toeplens.studies.auditing.words import Names, told, unit

TEXTS = Texts(Path(__file__).with_name("texts.yaml"))

# ---- the effect of each frequency band -------------------------------------------------------------------------------

_LEAST = 1e-6  # smallest end of the colour scale
_DIGITS = 3


def by_band(audit: AuditRecord) -> Block:
    """The effect of each band in each layer; empty if bands were not measured."""
    panels = [_bands_panel(audit, "Effect of each band, by layer", "Largest effect")] if _with_bands(audit) else []
    return _bands_block(audit, [View.of(panels)])


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
