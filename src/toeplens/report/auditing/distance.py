"""How far heads look: attention by distance, of all heads and of each layer's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from toeplens.report.kit.blocks import Block, Group, Panel, Ramp, View
from toeplens.report.kit.heat import heat, limit_of
from toeplens.studies.auditing.audit import Audit
from toeplens.studies.auditing.record import HeadRecord, LayerRecord
from toeplens.studies.auditing.words import Names, place_title, told

_LABELS = 10  # distances up to which all have labels
_CAPTION = (
    "The share of each head’s attention, in per cent, at the query’s own token (0) and at distances that double in "
    "width, on either side together; what a sink takes is left out. Attention that is spread evenly puts most of "
    "itself in the wide bins on the right. All heads are ordered by their mean distance, the nearest first."
)


def distances(audit: Audit) -> Block:
    """A view of all heads, a map for each side and kind, and a view of each layer; none without profiles."""
    names = Names.of(audit)
    found = {
        place: [one for one in audit.heads if one.profile and (one.side, one.kind) == place] for place in names.places
    }
    found = {place: heads for place, heads in found.items() if heads}
    tables = [_table(heads) for heads in found.values()]
    limit = limit_of(tables)
    groups = [
        Group(place_title(place) if len(found) > 1 else "", [_panel(names, _ordered(heads), limit, "All heads")])
        for place, heads in found.items()
    ]
    views = [View("all heads", groups)] if groups else []
    for layer in audit.layers:
        if heads := [head for head in audit.of(layer) if head.profile]:
            title = names.layer(layer)
            views.append(View(title, [Group("", [_panel(names, heads, limit, _sentence(layer, title))])]))
    ramp = Ramp("0%", f"{limit:.0%} of a head’s attention", half=True)
    return Block("distance", "Attention by distance", _CAPTION, views, "full", ramp=ramp)


def bins(count: int) -> list[str]:
    """The names of distances: 0, 1, 2–3, 4–7, ..."""
    starts = [0, *(2**power for power in range(count - 1))]
    return [str(a) if a < 2 else f"{a}–{2 * a - 1}" for a in starts]


def _table(heads: Sequence[HeadRecord]) -> Float[np.ndarray, "H B"]:
    width = max(len(head.profile) for head in heads)
    return np.array([[*head.profile, *[np.nan] * (width - len(head.profile))] for head in heads], dtype=float)


def _ordered(heads: Sequence[HeadRecord]) -> list[HeadRecord]:
    return sorted(heads, key=lambda head: np.inf if head.distance is None else head.distance)


def _sentence(layer: LayerRecord, title: str) -> str:
    text = f"{title[:1].upper()}{title[1:]}"
    return text if layer.window is None else f"{text}, which sees {layer.window} keys at most"


def _panel(names: Names, heads: Sequence[HeadRecord], limit: float, title: str) -> Panel:
    table = _table(heads)
    labels = bins(table.shape[1])
    known = [head for head in _ordered(heads) if head.distance is not None]
    words = f"{len(heads)} heads by {len(labels)} distances." + (
        f" Mean distance from {told(known[0].distance, 1)} tokens ({names.short(known[0])}) to "
        f"{told(known[-1].distance, 1)} ({names.short(known[-1])})."
        if known
        else ""
    )
    marked = range(0, len(labels), 1 if len(labels) <= _LABELS else 2)
    ticks = (marked, [labels[i].partition("–")[0] for i in marked])
    rows = [names.short(head) for head in heads]
    return Panel(title, heat(table, rows, labels, limit, ticks=ticks, title="distance in tokens, from"), words)
