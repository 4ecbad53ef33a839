"""The page of a run's decomposed attention logits: shares of each head, curves by distance, heat maps, a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float

from toeplens.ground.places import write_page
from toeplens.ground.words import listed, percent, power
from toeplens.lens.logits import KINDS, PURE
from toeplens.report.decomposition import figures
from toeplens.report.decomposition.figures import (
    FILLS,
    UNTOLD,
    decay_words,
    diagonals_only,
    ends_words,
    head_sign,
    origins,
    span,
)
from toeplens.report.kit.blocks import Block, Group, Panel, Sign, View, numbered
from toeplens.report.kit.page import render_page
from toeplens.studies.decomposition import SHOWN, LayerStructure, Parts, RunStructure

COMMAND = "decompose"
SEEN = {"softmax": "row-centred logits", "logits": "logits"}
SMALL = 0.005  # parts whose share never exceeds this are not drawn
SPLITS = {
    "mean": "the mean over sequences at each position, minus the mean over all positions",
    "input": "the vector that is added to the token embedding",
    "ablate": "the difference in the token’s vector when the encoding is switched off in the whole model",
}
_PURE = f"{PURE:.0%}"
NAMED = {
    "position": f"position makes up at least {_PURE} of the logits",
    "content": f"content makes up at least {_PURE} of the logits",
    "sum": f"the sum of position and content makes up at least {_PURE} of the logits",
    "product": f"the coupled part makes up at least {_PURE} of the logits",
    "mixed": f"neither the sum of position and content nor the coupled part reaches {_PURE} of the logits",
    "unknown": "the content part is not known for this encoding",
    "flat": "the logits do not vary",
}


def write_structure(structure: RunStructure, path: Path) -> Path:
    """Write the decomposition of a run as a self-contained HTML page, replacing only an earlier one."""
    return write_page(path, render_structure(structure), COMMAND)


def render_structure(structure: RunStructure) -> str:
    """The decomposition of a run as one HTML document; the same structure gives the same document."""
    makers = (_kinds, _parts, _distance, _symbols, _examples, _frequencies, origins)
    found = numbered(make(structure) for make in makers)
    error = max((parts.error for _, parts in _with_parts(structure)), default=None)
    return render_page(
        "report/decomposition/page.html.j2",
        found,
        command=COMMAND,
        structure=structure,
        lead=_lead(structure),
        top=_most_positional(structure),
        error=None if error is None else power(error),
        missing=_missing(structure),
        strongest=_strongest,
        rotated=any(parts.branches for _, parts in _with_parts(structure)),
        kinds=KINDS,
        named=NAMED,
        split=SPLITS.get(structure.split, structure.split),
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
    found = [
        (float(value), layer.layer + 1, head + 1)
        for layer, parts in _with_parts(structure)
        for head, value in enumerate(parts.kinds["softmax"][:, 0])
    ] or [(float(v), layer.layer + 1, head + 1) for layer in structure.layers for head, v in enumerate(layer.explained)]
    known = [each for each in found if np.isfinite(each[0])]
    if not known:
        return None
    value, layer, head = max(known, key=lambda each: each[0])
    return f"L{layer} H{head}", f"layer {layer}, head {head}", value


def _lead(structure: RunStructure) -> str:
    top = _most_positional(structure)
    names = Counter(name for _, parts in _with_parts(structure) for name in parts.named)
    if not names:
        words = "These logits cannot be decomposed into content and position parts."
        told = "" if top is None else f" Distance explains most in {top[1]}: {percent(top[2])} of the variance."
        return words + told
    words = f"Heads by type: {listed(f'{name} ({count})' for name, count in names.most_common())}."
    if top is None:
        return f"{words} The position share is unknown for all heads."
    return f"{words} The most positional head is {top[1]} ({percent(top[2])} of its row-centred logits)."


def _bar_block(
    structure: RunStructure, block: Block, tables: dict[str, list[Float[np.ndarray, "H P"]]], fills: list[figures.Fill]
) -> Block:
    """Views for row-centred logits and logits, a panel per layer; all panels share one axis."""
    layers = [layer for layer, _ in _with_parts(structure)]
    ends = span([table for found in tables.values() for table in found])
    views = []
    for which, title in SEEN.items():
        panels = [
            Panel(_title(layer), figures.bars(table, fills, ends))
            for layer, table in zip(layers, tables[which], strict=True)
        ]
        views.append(View.of(panels, title))
    return Block(block.id, block.title, block.caption, views, _width(structure), [*fills])


def _kinds(structure: RunStructure) -> Block:
    caption = (
        "One bar per head; shares add up to 100%. Position: logits of the mean content at each position. Content: "
        "logits of the contents with distance averaged out. Coupled: the remainder, which depends on both together."
    )
    found = [parts for _, parts in _with_parts(structure)]
    tables = {}
    for which in SEEN:  # last column: 1 minus position, if content is unknown
        kinds = [parts.kinds[which] for parts in found]
        tables[which] = [np.column_stack((x, np.where(np.isnan(x[:, 1]), 1 - x[:, 0], np.nan))) for x in kinds]
    fills = [*(FILLS[name] for name in KINDS), UNTOLD]
    if not any(np.isfinite(table[:, -1]).any() for each in tables.values() for table in each):
        fills.pop()
        tables = {which: [table[:, :-1] for table in each] for which, each in tables.items()}
    return _bar_block(structure, Block("kinds", "Position, content, and coupled part", caption, []), tables, fills)


def _parts(structure: RunStructure) -> Block:
    found = [parts for _, parts in _with_parts(structure)]
    names = list(dict.fromkeys(name for parts in found for name in parts.names))
    sizes = {
        name: max(
            float(np.nanmax(np.abs(parts.shares[which][:, parts.names.index(name)]), initial=0))
            for parts in found
            if name in parts.names
            for which in SEEN
        )
        for name in names
    }
    shown = [name for name in names if sizes[name] > SMALL]
    small = [name for name in names if name not in shown]
    caption = (
        "Product of query and key, split by the parts of the two vectors: content-position is the query’s content "
        "times the key’s position. Terms added by the encoding are separate parts. The split does not show the "
        "dependence on distance: a rotation also acts on content-content."
        + (f" Not shown, as never above {SMALL:.1%}: {listed(small)}." if small else "")
    )
    tables = {}
    for which in SEEN:
        tables[which] = [np.full((len(parts.shares[which]), len(shown)), np.nan) for parts in found]
        for parts, table in zip(found, tables[which], strict=True):
            there = [x for x, name in enumerate(shown) if name in parts.names]
            table[:, there] = parts.shares[which][:, [parts.names.index(shown[x]) for x in there]]
    block = Block("parts", "Products of content and position", caption, [])
    return _bar_block(structure, block, tables, [FILLS[name] for name in shown])


def _distance(structure: RunStructure) -> Block:
    known = any(layer.parts for layer in structure.layers)
    kernel = (
        "Position kernel: logits of the mean query and mean key at two positions, averaged over all pairs at the same "
        "distance. "
    )
    caption = (
        f"{kernel if known else ''}Mean of the logits: over all sequences, by distance. A constant offset does not "
        "change the softmax, so only the shape matters."
    )
    groups = []
    for layer in structure.layers:
        parts = layer.parts
        drawn = layer.means if parts is None else np.concatenate((layer.means, parts.kernel))
        low, high = float(np.nanmin(drawn, initial=0)), float(np.nanmax(drawn, initial=0))
        room = 0.06 * max(high - low, 1e-9)
        ends = low - room, high + room
        panels = []
        if parts is not None:
            words = f"Toeplitz share of the position kernel: {_range(parts.fixed)}."
            panels.append(Panel("Position kernel", figures.curves(layer.offsets, parts.kernel, ends), words))
        words = (
            f"Variance of the logits explained by distance: {_range(layer.explained)}. Expected for contents without "
            f"structure: {100 * layer.chance:.2g}%.{decay_words(layer)}"
        )
        title = "Mean of the logits" if known else _title(layer)
        panels.append(Panel(title, figures.curves(layer.offsets, layer.means, ends), words))
        groups.append(Group(_title(layer), panels))
    if not known:
        groups = [Group("", [panel for group in groups for panel in group.panels])]
    return Block("distance", "Logits by distance", caption, [View("", groups)], legend=_signs(structure))


def _symbols(structure: RunStructure) -> Block:
    known = any(layer.parts for layer in structure.layers)
    title = "Symbol of the position kernel" if known else "Symbol of the mean logits by distance"
    caption = (
        "One curve per head: Fourier series of the Hermitian part under the window 1 − |δ|/N; dotted where negative, "
        f"not shown below {figures.DEPTH:.1%} of a panel’s maximum. φ = 0 is not on the logarithmic axis."
    )
    panels = [
        Panel(_title(layer), figures.symbol(layer.angles, layer.symbol), ends_words(layer))
        for layer in structure.layers
    ]
    return Block("symbol", title, caption, [View.of(panels)], legend=_signs(structure))


def _examples(structure: RunStructure) -> Block:
    caption = (
        "Heads whose logits are best explained by distance. Each diagonal of the right map is the mean of that "
        "diagonal in the left map. Blue is negative, red positive. Every pair of maps has its own scale, which covers "
        f"{figures.WITHIN:.0%} of its logits."
    )
    groups = []
    for layer in structure.layers:
        panels = []
        for head, example in zip(layer.heads, layer.example, strict=True):
            part = diagonals_only(example)
            energy = float(np.nansum(example**2))
            here = float(np.nansum(part**2)) / energy if energy else np.nan
            words = (
                f"Toeplitz share: {percent(here)} in this sequence, {percent(layer.toeplitz[head])} over all of them. "
                f"Colour scale: ±{figures.scale_end(example):.2g} nats."
            )
            panels.append(Panel(f"Head {head + 1}", figures.pair(example, part), words))
        groups.append(Group(_title(layer), panels))
    return Block("logits", "One sequence", caption, [View("", groups)])


def _frequencies(structure: RunStructure) -> Block:
    found = [(layer, parts.branches) for layer, parts in _with_parts(structure) if parts.branches is not None]
    every = [branches[which] for _, branches in found for which in SEEN]
    still = any((np.nan_to_num(table[:, 0]) != 0).any() for table in every)
    limit = max((float(np.nanmax(np.abs(table), initial=0.01)) for table in every), default=1.0)
    views = []
    for which, title in SEEN.items():
        panels = []
        for layer, branches in found:
            table = branches[which] if still else branches[which][:, 1:]
            columns = ["not rotated"] * still + [str(i) for i in range(1, branches[which].shape[1])]
            panels.append(Panel(_title(layer), figures.frequencies(table, columns, limit)))
        views.append(View.of(panels, title))
    caption = (
        "Each head’s share (%) by RoPE frequency, from the fastest (1) to the slowest"
        f"{', after the dimensions without rotation' if still else '; all dimensions are rotated'}. Red is positive, "
        f"blue negative: the frequency counteracts the others. Colour scale: ±{limit:.0%}."
    )
    return Block("frequency", "Shares by frequency", caption, views, _width(structure))


def _strongest(parts: Parts | None, head: int) -> str:
    """The frequency with the largest share of a head's row-centred logits, and the share."""
    row = parts.branches["softmax"][head] if parts and parts.branches else np.array([np.nan])
    if np.isnan(row).all():
        return "–"
    best = int(np.nanargmax(row))
    place = f"{best} of {len(row) - 1}" if best else "not rotated"
    return f"{place}, {percent(row[best])}"


def _title(layer: LayerStructure) -> str:
    return f"Layer {layer.layer + 1}"


def _heads(structure: RunStructure) -> int:
    return max((len(layer.means) for layer in structure.layers), default=0)


def _signs(structure: RunStructure) -> list[Sign]:
    return [head_sign(head) for head in range(_heads(structure))]


def _width(structure: RunStructure) -> str:
    return "medium" if _heads(structure) <= figures.FEW else "wide"


def _range(values: Float[np.ndarray, "H"]) -> str:
    """The smallest and the largest share with their heads."""
    if np.isnan(values).all():
        return "unknown"
    low, high = int(np.nanargmin(values)), int(np.nanargmax(values))
    if low == high:
        return f"{percent(values[low])} (head {low + 1})"
    return f"{percent(values[low])} (head {low + 1}) to {percent(values[high])} (head {high + 1})"
