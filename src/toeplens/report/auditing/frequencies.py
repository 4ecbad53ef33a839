"""Which frequencies of the rotation heads use: of each layer, and of all layers with the same frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi

import numpy as np
from jaxtyping import Float

from toeplens.report.kit.blocks import Block, Group, Panel, Ramp, View
from toeplens.report.kit.heat import heat, limit_of
from toeplens.studies.auditing.audit import Audit
from toeplens.studies.auditing.record import HeadRecord, LayerRecord
from toeplens.studies.auditing.words import Names, layer_spans

_USES = {"norm_use": "By size: share of ‖q‖ ‖k‖", "variance_use": "By effect: share of the logits’ variance"}
_STILL, _BIAS = "not turned", "bias"
_LABELS = 6  # of frequencies below a map
_CAPTION = (
    "The frequencies of the rotation, radians a position, and below each its wavelength in tokens. Left: how much of "
    "queries’ and keys’ norms is in it. Right: how much of the variance of the logits is, which is below zero (blue) "
    "where a frequency works against the rest; “not turned” are dimensions without rotation, “bias” is what is "
    "added to the logits. The menu has the mean over the heads of every layer, and each layer’s heads."
)
Table = Float[np.ndarray, "R C"]


def frequencies(audit: Audit) -> Block:
    """A view of all layers, a map for each set of frequencies, and a view of each layer; none without rotation."""
    names = Names.of(audit)
    rotary = [one for one in audit.layers if one.frequencies and any(_uses(head, one) for head in audit.of(one))]
    tables = {(i, use): _table(list(audit.of(one)), one, use) for i, one in enumerate(rotary) for use in _USES}
    means = {place: _mean(table) for place, table in tables.items()}
    groups, limit = [], limit_of([mean[None] for mean in means.values()])
    for i, turned in enumerate(one.frequencies for one in rotary):
        same = [j for j, one in enumerate(rotary) if alike(one.frequencies, turned)]
        if same[0] != i:
            continue
        rows = [names.short_layer(rotary[i]) for i in same]
        panels = [_panel(np.array([means[i, use] for i in same]), rows, turned, use, limit) for use in _USES]
        title = layer_spans(names, [rotary[i] for i in same])
        groups.append(Group(f"{title[:1].upper()}{title[1:]}, mean over heads", _shown(panels)))
    views = [View("all layers, mean over heads", groups)] if groups else []
    for i, one in enumerate(rotary):
        rows = [f"H{head.head + 1}" for head in audit.of(one)]
        limit = limit_of([tables[i, use] for use in _USES])
        panels = [_panel(tables[i, use], rows, one.frequencies, use, limit) for use in _USES]
        views.append(View(names.layer(one), [Group("", _shown(panels))]))
    ramp = Ramp("against the rest", "used most")
    return Block("frequencies", "Frequencies of the rotation", _CAPTION, views, ramp=ramp)


def alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two rotations have the same frequencies, up to the rounding with which they were read off a model."""
    return len(one) == len(other) and np.allclose(one, other, rtol=1e-3, atol=1e-9)


def _shown(panels: list[Panel | None]) -> list[Panel]:
    return [panel for panel in panels if panel is not None]


def _uses(head: HeadRecord, layer: LayerRecord) -> bool:
    return any(len(getattr(head, use)) == _width(layer, use) for use in _USES)


def _width(layer: LayerRecord, use: str) -> int:
    return len(layer.frequencies) + (1 if use == "norm_use" else 2)


def _table(heads: Sequence[HeadRecord], layer: LayerRecord, use: str) -> Table:
    """A row a head; NaN where its use is not known."""
    width = _width(layer, use)
    rows = (getattr(head, use) for head in heads)
    return np.array([row if len(row) == width else [np.nan] * width for row in rows], dtype=float)


def _mean(table: Table) -> Float[np.ndarray, "C"]:
    known = table[~np.isnan(table).all(1)]
    return known.mean(0) if len(known) else np.full(table.shape[1], np.nan)


def _panel(table: Table, rows: list[str], turned: Sequence[float], use: str, limit: float) -> Panel | None:
    """A map without the columns of dimensions that are not turned, and of a bias, where there are none."""
    if np.isnan(table).all():
        return None
    columns = [_STILL, *(_told(pair, one) for pair, one in enumerate(turned)), _BIAS][: table.shape[1]]
    labels = ["not<br>turned", *(f"{one:.2g}<br>{_wave(one)}" for one in turned), _BIAS][: table.shape[1]]
    used = set(np.flatnonzero(np.nan_to_num(table).any(axis=0)).tolist())
    kept = [i for i, name in enumerate(columns) if name not in (_STILL, _BIAS) or i in used]
    table, columns, labels = table[:, kept], [columns[i] for i in kept], [labels[i] for i in kept]
    pairs = [i for i, name in enumerate(columns) if name not in (_STILL, _BIAS)]
    step = max(1, round((len(pairs) - 1) / (_LABELS - 1)))
    ticks = sorted({*pairs[::step], *(set(range(len(columns))) - set(pairs))} - _crowded(columns, step))
    row, column = np.unravel_index(int(np.nanargmax(table)), table.shape)
    words = f"Most is {table[row, column]:.1%}: {rows[row]}, {columns[column]}. Colours end at ±{limit:.0%}."
    title = "radians a position; wavelength in tokens"
    shown = heat(table, rows, columns, limit, ticks=(ticks, [labels[i] for i in ticks]), title=title, right=14)
    return Panel(_USES[use], shown, words)


def _crowded(columns: Sequence[str], step: int) -> set[int]:
    """The place of the last pairs where the label of a bias would run into theirs."""
    last = len(columns) - 1
    return set(range(max(0, last - step // 2), last)) if columns[last] == _BIAS and step > 1 else set()


def _wave(turn: float) -> str:
    if not turn:
        return "∞"
    length = 2 * pi / abs(turn)
    return f"{length:.2g}" if length < 10 else f"{length:,.0f}" if length < 10_000 else f"{length / 1000:,.0f}k"


def _told(pair: int, turn: float) -> str:
    return f"pair {pair}: {turn:.3g} rad a position, {_wave(turn)} tokens"
