"""The page of a run's decomposed attention logits: shares of each head, curves by distance, maps, a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from toeplens.lens import toeplitz_part
from toeplens.lens.logits import KINDS, PURE_SHARE
from toeplens.report.charts import (
    alt,
    chart_data,
    color_shape,
    facet_grid,
    heatmap,
    line_chart,
    nominal,
    numeric,
    tooltip,
)
from toeplens.report.page import Figure, Page, Section
from toeplens.report.tables import Table, TableCell, make_table
from toeplens.report.theme import COLOURS, Style, styles
from toeplens.studies.decomposition import LayerShares, LayerStructure, RunStructure
from toeplens.utils.files import read_yaml
from toeplens.utils.formatting import join_list, percent, sig_figs, to_sci

_TEXTS = read_yaml(Path(__file__).with_name("decomposition.yaml"))
_CAPTIONS: dict[str, str] = _TEXTS["captions"]
_COLOURS: dict[str, str] = _TEXTS["colours"]
LOGITS = {"softmax": "row-centred logits", "logits": "logits"}
UNSPLIT = "content or coupled, not separable"
MIN_SHARE = 0.005  # parts whose share never exceeds this are not drawn
COLOUR_COVERAGE = 0.98  # share of a map's logits that its colour scale covers


def structure_page(structure: RunStructure) -> Page:
    """The page of a decomposed run."""
    picture = _means_figure(structure)
    if any(layer.parts for layer in structure.layers):
        picture = Figure("kinds", "Position, content, and coupled part", kinds_chart(structure), _CAPTIONS["kinds"])
    accuracy = (
        "no test accuracy recorded" if structure.accuracy is None else f"test accuracy {percent(structure.accuracy)}"
    )
    makers = (_products_section, _distance_section, _example_section, _rotary_section, _origins_section, _heads_section)
    return Page(
        "decompose",
        f"{structure.encoding}: decomposed attention logits of run {structure.run}",
        f"How much of the attention logits of {structure.encoding} is position?",
        _answer(structure),
        picture,
        [section for make in makers for section in make(structure)],
        [
            f"Run {structure.run}: task {structure.task}, {structure.protocol} protocol, {accuracy}, "
            f"{structure.sequences:,} test sequences. It is one model, so these numbers say nothing about other seeds."
        ],
        [
            f"{which}: no decomposition. Reason: {reason} Only the logits by distance are shown."
            for which, reason in _missing_layers(structure)
        ],
    )


def _split_layers(structure: RunStructure) -> Iterator[tuple[LayerStructure, LayerShares]]:
    return ((layer, layer.parts) for layer in structure.layers if layer.parts is not None)


def _missing_layers(structure: RunStructure) -> list[tuple[str, str]]:
    """Layers without decomposition, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for layer in structure.layers:
        if layer.parts is None:
            reasons.setdefault(layer.reason, []).append(str(layer.layer + 1))
    return [(f"Layer{'s' if len(ids) > 1 else ''} {join_list(ids)}", reason) for reason, ids in reasons.items()]


def _answer(structure: RunStructure) -> str:
    tables = [(layer, parts.kinds["softmax"][:, 0]) for layer, parts in _split_layers(structure)]
    split = bool(tables)
    tables = tables or [(layer, layer.explained) for layer in structure.layers]
    pairs = [(float(v), f"layer {layer.layer + 1}, head {head}") for layer, t in tables for head, v in enumerate(t, 1)]
    values = [pair for pair in pairs if np.isfinite(pair[0])]
    lead = (
        "Position makes up"
        if split
        else "These logits cannot be decomposed into content and position. Distance explains"
    )
    if not values:
        return f"{lead} an unknown share of the logits of all heads."
    mean, (top, top_head) = float(np.mean([value for value, _ in values])), max(values)
    text = (
        f"{lead} {percent(mean)} of the {LOGITS['softmax'] if split else 'logits'} on average over {len(values)} heads"
    )
    text += f", and most in {top_head} ({percent(top)})."
    shares = [float(v) for _, parts in _split_layers(structure) for v in parts.fixed if np.isfinite(v)]
    if shares:
        text += (
            f" The position part is {percent(float(np.mean(shares)))} Toeplitz on average ({percent(min(shares))} to "
            f"{percent(max(shares))} over heads)."
        )
    return text


def _layer_panels(chart: Any, titles: Iterable[str]) -> Any:
    """A panel per layer, at most three in a row."""
    order = list(dict.fromkeys(titles))
    return facet_grid(chart, "layer", order, columns=min(3, len(order)) or 1)


def _title(layer: LayerStructure) -> str:
    return f"Layer {layer.layer + 1}"


def shares_chart(tables: Mapping[str, Float[np.ndarray, "H P"]], parts: Sequence[str]) -> Any:
    """Shares as stacked bars, one per head and a panel per layer; negative shares are below zero."""
    rows = [
        {"layer": layer, "head": head, "series": name, "order": index, "share": float(value)}
        for layer, table in tables.items()
        for head, shares in enumerate(table, 1)
        for index, (name, value) in enumerate(zip(parts, shares, strict=True))
        if np.isfinite(value)
    ]
    part_styles = [Style(name, _COLOURS.get(name, "#9aa3b0")) for name in parts]
    x = nominal("head", sorted({row["head"] for row in rows}), "head") | {"axis": {"labelOverlap": True}}
    bars = (
        alt.Chart(chart_data(rows))
        .mark_bar()
        .encode(
            x=alt.X(**x),
            y=alt.Y(**numeric("share", "share", format=".0%"), stack="zero"),
            order=alt.Order("order:Q"),
            tooltip=tooltip(layer="Layer", head="Head", series="Part", share="Share|.1%"),
            **color_shape("series", part_styles, shape=False),
        )
    )
    return _layer_panels(bars.properties(height=230), tables)


def kinds_chart(structure: RunStructure) -> Any:
    """Shares of position, content and their coupling; 1 minus position where content is not known."""
    tables = {}
    for layer, parts in _split_layers(structure):
        kinds = parts.kinds["softmax"]
        tables[_title(layer)] = np.column_stack((kinds, np.where(np.isnan(kinds[:, 1]), 1 - kinds[:, 0], np.nan)))
    unsplit = any(np.isfinite(table[:, -1]).any() for table in tables.values())
    if not unsplit:
        tables = {title: table[:, :-1] for title, table in tables.items()}
    return shares_chart(tables, [*KINDS, *([UNSPLIT] if unsplit else [])])


def _products_section(structure: RunStructure) -> list[Section]:
    layers = list(_split_layers(structure))
    if not layers:
        return []
    order = list(dict.fromkeys(name for _, parts in layers for name in parts.names))
    tables = {_title(layer): np.full((len(parts.shares["softmax"]), len(order)), np.nan) for layer, parts in layers}
    for table, (_, parts) in zip(tables.values(), layers, strict=True):
        table[:, [order.index(name) for name in parts.names]] = parts.shares["softmax"]
    large = [
        max(float(np.nanmax(np.abs(t[:, n]), initial=0)) for t in tables.values()) > MIN_SHARE
        for n in range(len(order))
    ]
    drawn, small = (
        [name for name, is_large in zip(order, large, strict=True) if is_large is kind] for kind in (True, False)
    )
    counts = Counter(name for _, parts in layers for name in parts.named).most_common()
    text = f"Heads by type: {join_list(f'{name} ({count})' for name, count in counts)}."
    text += f" Not shown, as never above {MIN_SHARE:.1%}: {join_list(small)}." if small else ""
    chart = shares_chart({title: table[:, large] for title, table in tables.items()}, drawn)
    figure = Figure("parts", "Products of content and position", chart, _CAPTIONS["parts"])
    return [Section("Which products of content and position?", [figure, text])]


def layers_chart(structure: RunStructure, xs: str, values: Mapping[str, Any], x: Any, y: Any) -> Any:
    """A curve per head and a panel per layer, from values by layer and the layers' attribute ``xs``."""
    rows = [
        {"layer": _title(layer), "series": f"head {head}", "x": float(position), "value": float(value)}
        for layer in structure.layers
        for head, row in enumerate(values.get(_title(layer), ()), 1)
        for position, value in zip(getattr(layer, xs), row, strict=True)
        if position > 0 or xs == "offsets"
    ]
    heads = dict.fromkeys(row["series"] for row in rows)
    chart = line_chart(rows, x, y, styles((head, head) for head in heads).values(), points=False)
    return _layer_panels(chart.properties(height=220), [row["layer"] for row in rows])


def distance_chart(structure: RunStructure, values: Mapping[str, Any]) -> Any:
    """Values of each layer by distance."""
    return layers_chart(structure, "offsets", values, numeric("x", "distance i − j (tokens)"), numeric("value", "nats"))


def symbol_chart(structure: RunStructure) -> Any:
    """Symbol of each head, on a logarithmic axis of angles."""
    x = numeric("x", "φ (rad per token)", kind="log", format="~g", tickCount=4)
    symbols = {_title(layer): layer.symbol for layer in structure.layers}
    return layers_chart(structure, "angles", symbols, x, numeric("value", "symbol", kind="symlog", tickCount=5))


def _means_figure(structure: RunStructure) -> Figure:
    means = {_title(layer): layer.means for layer in structure.layers}
    return Figure("means", "Mean of the logits by distance", distance_chart(structure, means), _CAPTIONS["means"])


def _distance_section(structure: RunStructure) -> list[Section]:
    kernels = {_title(layer): parts.kernel for layer, parts in _split_layers(structure)}
    parts: list[Any] = []
    if kernels:
        chart = distance_chart(structure, kernels)
        parts = [Figure("kernels", "Position kernel by distance", chart, _CAPTIONS["kernels"])]
        texts = (f"{_title(layer)}: Toeplitz share {_range(part.fixed)}." for layer, part in _split_layers(structure))
        parts.append(" ".join(texts))
    explained = " ".join(
        f"{_title(item)}: distance explains {_range(item.explained)} of the variance of the logits; expected for "
        f"contents without structure: {100 * item.chance:.2g}%."
        for item in structure.layers
    )
    symbol = Figure(
        "symbol", f"Symbol of the {'kernel' if kernels else 'mean'}", symbol_chart(structure), _CAPTIONS["symbol"]
    )
    means = [Section("Mean of the logits by distance", [_means_figure(structure), explained])] if kernels else []
    details = [*means, Section("Symbol, eigenvalues and fitted decay", [symbol, kernels_table(structure)])]
    return [Section("Is it a function of distance?", parts or [explained], details, id="distance")]


def _range(values: Float[np.ndarray, "H"]) -> str:
    """The smallest and the largest share with their heads."""
    if np.isnan(values).all():
        return "unknown"
    ends = dict.fromkeys((int(np.nanargmin(values)), int(np.nanargmax(values))))
    return " to ".join(f"{percent(values[head])} (head {head + 1})" for head in ends)


def kernels_table(structure: RunStructure) -> Table:
    """For each head the decay fitted to its means, and the ranges of its kernel's symbol and eigenvalues."""
    rows = []
    for layer in structure.layers:
        for head in range(len(layer.means)):
            decay = layer.decays[head] if layer.decays else None
            fit = ["–"] * 3
            if decay is not None and decay.is_good_fit:
                fit = [decay.form, percent(decay.r2), sig_figs(decay.half_distance)]
            ends = layer.ends[head] if layer.ends else None
            pairs = [(ends.symbol_low, ends.symbol_high), (ends.lowest, ends.highest)] if ends else []
            ranges = [f"{sig_figs(low)} to {sig_figs(high)}" for low, high in pairs] or ["–", "–"]
            rows.append([f"L{layer.layer + 1} H{head + 1}", *fit, *ranges])
    columns = ["Head", "Decay", "Explained", "Half distance (tokens)", "Symbol", "Eigenvalues"]
    note = "Decay: curve fitted to the mean logits, where it explains them. Symbol: without window."
    return make_table("Kernels", columns, rows, right=range(2, 6), note=note, css="numbers small")


def _example_section(structure: RunStructure) -> list[Section]:
    heads = [
        (float(np.nan_to_num(layer.explained[head])), layer, index)
        for layer in structure.layers
        for index, head in enumerate(layer.heads)
    ]
    if not heads:
        return []
    _, layer, index = max(heads, key=lambda item: item[0])
    example, head = layer.example[index], layer.heads[index]
    part, energy = diagonals_only(example), float(np.nansum(example**2))
    share = float(np.nansum(part**2)) / energy if energy else np.nan
    text = (
        f"Layer {layer.layer + 1}, head {head + 1}: Toeplitz share {percent(share)} in this sequence, "
        f"{percent(layer.toeplitz[head])} over all of them."
    )
    figure = Figure("logits", "One sequence", example_chart(example, part), _CAPTIONS["logits"])
    return [Section("How does the head that depends most on distance look?", [figure, text])]


def diagonals_only(example: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """Each diagonal replaced by its mean over visible entries; NaN where the example is NaN."""
    logits = torch.from_numpy(np.asarray(example, dtype=np.float64))
    visible = logits.isfinite()
    sums, counts = (toeplitz_part(x, causal=False) for x in (logits.where(visible, 0), visible.double()))
    return (sums / counts).masked_fill(~visible, torch.nan).numpy()


def example_chart(example: Float[np.ndarray, "n n"], part: Float[np.ndarray, "n n"]) -> Any:
    """Logits and their Toeplitz part side by side, on one symmetric colour scale that a few large logits do not set."""
    sizes = np.abs(example[np.isfinite(example)])
    limit = max(float(np.quantile(sizes, COLOUR_COVERAGE)) if sizes.size else 0.0, 1e-9)
    rows = [
        {"map": title, "query": int(i) + 1, "key": int(j) + 1, "logit": float(f"{values[i, j]:.3g}"), "blank": ""}
        for title, values in (("logits", example), ("Toeplitz part", part))
        for i, j in np.argwhere(np.isfinite(values))
    ]
    x, y = (
        nominal(name, range(1, 1 + len(example)), name) | {"axis": {"labelOverlap": True}} for name in ("key", "query")
    )
    tips = tooltip(map="Map", query="Query", key="Key", logit="Logit (nats)|.3f")
    options: dict[str, Any] = {"size": max(5, 360 // len(example)), "marks": "blank", "form": ".2g"}
    chart = heatmap(rows, x, y, "logit", title="nats", domain=(-limit, limit), tips=tips, **options)
    return facet_grid(chart, "map", ["logits", "Toeplitz part"], columns=2)


def _rotary_section(structure: RunStructure) -> list[Section]:
    rows = []
    for layer, parts in _split_layers(structure):
        if parts.branches is not None:
            for head, shares in enumerate(parts.branches["softmax"], 1):
                named_shares = [("none", shares[0]), *((str(n), v) for n, v in enumerate(shares[1:], 1))]
                labels = {"layer": _title(layer), "head": head, "blank": ""}
                rows += [{**labels, "frequency": name, "share": float(v)} for name, v in named_shares]
    if not rows:
        return []
    if not any(row["share"] for row in rows if row["frequency"] == "none" and np.isfinite(row["share"])):
        rows = [row for row in rows if row["frequency"] != "none"]  # all dimensions are rotated
    limit = max((abs(row["share"]) for row in rows if np.isfinite(row["share"])), default=0.01)
    x, y = nominal("frequency", [row["frequency"] for row in rows], "frequency"), nominal("head", [], "head")
    tips = tooltip(layer="Layer", head="Head", frequency="Frequency", share="Share|.1%")
    heads = max(row["head"] for row in rows)
    options: dict[str, Any] = {"size": max(10, min(22, 240 // heads)), "marks": "blank", "form": ".0%"}
    scale = (-max(limit, 0.01), max(limit, 0.01))
    y |= {"sort": "ascending"}
    chart = heatmap(
        rows, x | {"axis": {"labelOverlap": True}}, y, "share", title="share", domain=scale, tips=tips, **options
    )
    figure = Figure(
        "frequency", "Shares by frequency", _layer_panels(chart, [r["layer"] for r in rows]), _CAPTIONS["frequency"]
    )
    return [Section("Which frequencies carry the logits?", [figure])]


def _origins_section(structure: RunStructure) -> list[Section]:
    stats, title = structure.origins, "Where do the class logits come from?"
    if stats is None:
        reason = f"Not available. {structure.no_origins}" if structure.no_origins else "Not computed for this record."
        return [Section(title, [reason], id="origins")]
    rows = [{"part": _TEXTS["origins"][name], "value": value} for name, value in stats.parts.items()]
    bars = (
        alt.Chart(chart_data(rows))
        .mark_bar(height=14, color=COLOURS["blue"])
        .encode(
            x=alt.X(**numeric("value", "mean logit", tickCount=6)),
            y=alt.Y(**nominal("part", [row["part"] for row in rows])),
            tooltip=tooltip(part="Part", value="Logit|.3f"),
        )
    )
    text = (
        f"Mean logit: {stats.logit:.3g} over {stats.sequences} sequences. Position makes up {percent(stats.share)} of "
        f"the sum of absolute values. The parts add up to each logit within {stats.error:.0e} of this sum."
    )
    figure = Figure("origins", "Parts of the mean logit", bars.properties(height=24 * len(rows)), _CAPTIONS["origins"])
    return [Section(title, [figure, text])]


def _strongest_frequency(parts: LayerShares | None, head: int) -> str:
    """The frequency with the largest share of a head's row-centred logits, and the share."""
    row = parts.branches["softmax"][head] if parts and parts.branches else np.array([np.nan])
    if np.isnan(row).all():
        return "–"
    best = int(np.nanargmax(row))
    return f"{f'{best} of {len(row) - 1}' if best else 'not rotated'}, {percent(row[best])}"


def heads_table(structure: RunStructure) -> Table:
    """All heads: shares by kind, type, Toeplitz shares, and the strongest frequency."""
    decomposed = list(_split_layers(structure))
    has_rotation = any(parts.branches for _, parts in decomposed)
    rows: list[list[str | TableCell]] = []
    for layer in structure.layers:
        for head in range(len(layer.means)):
            row: list[str | TableCell] = [TableCell(f"L{layer.layer + 1} H{head + 1}", row_css="" if head else "first")]
            if parts := layer.parts:
                row += [percent(value) for logit_kind in LOGITS for value in parts.kinds[logit_kind][head]]
                row += [parts.named[head], percent(parts.fixed[head])]
            elif decomposed:
                row += ["no decomposition", *["–"] * 7]
            row += [percent(layer.toeplitz[head]), percent(layer.explained[head])]
            rows.append([*row, _strongest_frequency(layer.parts, head)] if has_rotation else row)
    columns = ["Head"]
    if decomposed:
        columns += [f"{kind.capitalize()}{of}" for of in (" (centred)", "") for kind in KINDS]
        columns += ["Type", "Kernel Toeplitz"]
    columns += ["Logits Toeplitz", "By distance", *(["Strongest frequency"] if has_rotation else [])]
    note = "L2 H3 is layer 2, head 3. Centred: of the row-centred logits; frequency 1 is the fastest. A dash: unknown."
    right = [index for index, name in enumerate(columns) if name not in ("Head", "Type", "Strongest frequency")]
    return make_table("All heads", columns, rows, right=right, note=note, css="numbers small")


def _heads_section(structure: RunStructure) -> list[Section]:
    errors = [parts.error for _, parts in _split_layers(structure)]
    type_texts = "; ".join(f"{name}: {definitions}" for name, definitions in _TEXTS["named"].items())
    terms = dict(_TEXTS["terms"]) | {"Type": f"{Template(type_texts).substitute(pure=f'{PURE_SHARE:.0%}')}."}
    if errors:
        split = _TEXTS["splits"].get(structure.split, structure.split)
        terms["Split"] = (
            f"{structure.split}: position is {split}. The parts add up to the logits within {to_sci(max(errors))}."
        )
    definitions = make_table("Definitions", [], [[name, text] for name, text in terms.items()], css="facts")
    return [Section("All heads", [heads_table(structure)], [Section("Definitions", [definitions])], id="heads")]
