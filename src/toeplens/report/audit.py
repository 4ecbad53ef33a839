"""The page of an audit: the heads of a model that are worth a look, what they attend to, and whether it is proved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import floor, log10, pi
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from toeplens.ground.words import fixed, listed, percent, significant
from toeplens.report.charts import Chart, alt, data, grid, heat, looks, names, number, plane, tooltip
from toeplens.report.page import Figure, Page, Section
from toeplens.report.tables import DASH, Cell, Table, code, make_table, settings_table
from toeplens.report.theme import COLOURS, Style
from toeplens.studies.auditing import words
from toeplens.studies.auditing.record import COLUMNS, SOURCES, AuditRecord, BandRecord, HeadRecord, LayerRecord
from toeplens.studies.auditing.result import Audit
from toeplens.studies.auditing.words import PATTERN, UNIFORM, Names, layer_spans, place_title
from toeplens.studies.kit.questions import RETRIEVES

NUMBERS = tuple(name for name in COLUMNS if name not in ("side", "kind", "layer", "head"))
EFFECTS = ("effect", "effect_low", "effect_high")
SHARES = ("positional", "symbolic", "interaction")
MOST = 10  # heads to look at
_LEAST = 0.2  # share from which on a head is one to look at
_TOKENS = 400  # tokens of the first sequence that are shown
_BARS = 400  # heads up to which their intervals are drawn

# kinds of heads by their column, with the value that makes a head one, in the order in which they are told
ROLES: dict[str, tuple[Style, float]] = {
    "previous": (Style("Previous token", COLOURS["blue"], "circle"), PATTERN),
    "induction": (Style("Induction", COLOURS["green"], "diamond"), PATTERN),
    "retrieval": (Style("Retrieval", COLOURS["purple"], "triangle-down"), RETRIEVES),
    "duplicate": (Style("Duplicate token", COLOURS["cyan"], "triangle-right"), PATTERN),
    "first": (Style("First token", COLOURS["brown"], "triangle-left"), PATTERN),
}
IDLE = Style("Near-uniform, no effect", "#b05c7d", "stroke")
OTHER = Style("Other", COLOURS["grey"], "circle")
_REASONS = {
    "effect": "effect",
    "previous": "attention on the previous token",
    "induction": "attention after an earlier copy (induction)",
    "retrieval": "retrieval score",
    "duplicate": "attention on earlier copies",
    "positional": "positional share",
}


# ---- heads -----------------------------------------------------------------------------------------------------------


def known(audit: AuditRecord) -> list[str]:
    """The columns of numbers that are known for at least one head."""
    return [name for name in NUMBERS if any(getattr(head, name) is not None for head in audit.heads)]


def digits_of(column: str, *audits: AuditRecord) -> int:
    """Decimals of a column; for effects, enough to show three significant digits of the largest."""
    if column not in EFFECTS:
        return {"distance": 1, "half_distance": 1, "centre": 2, "dead": 0}.get(column, 3)
    size = max((abs(head.effect) for audit in audits for head in audit.heads if head.effect is not None), default=0.0)
    return min(12, max(0, 2 - floor(log10(size)))) if size else 3


def idle(audit: AuditRecord, head: HeadRecord) -> bool:
    """Whether a head does nothing: nearly uniform attention, and no effect if effects were measured."""
    if head.entropy is None or head.entropy < UNIFORM:
        return False
    if head.effect is None:
        return True
    if head.effect_low is not None and head.effect_high is not None:
        return head.effect_low <= 0 <= head.effect_high
    return abs(head.effect) <= 0.01 * max(abs(each.effect or 0.0) for each in audit.heads)


def role(audit: AuditRecord, head: HeadRecord) -> Style:
    """The kind of a head: that of its attention pattern, if it has one."""
    if idle(audit, head):
        return IDLE
    found = (style for name, (style, least) in ROLES.items() if (getattr(head, name) or 0.0) > least)
    return next(found, OTHER)


def to_look_at(audit: AuditRecord) -> dict[int, list[str]]:
    """Heads to look at, by index in the record, each with the reasons: the largest of each kind, in turns."""
    orders: dict[str, list[int]] = {}
    for name in _REASONS:
        values = {i: v for i, head in enumerate(audit.heads) if (v := getattr(head, name)) is not None}
        least = 0.0 if name == "effect" else ROLES[name][1] if name == "retrieval" else _LEAST
        kept = [i for i, value in values.items() if value > least and not idle(audit, audit.heads[i])]
        if name == "effect":
            kept = [i for i in kept if (low := audit.heads[i].effect_low) is None or low > 0]
        orders[name] = sorted(kept, key=lambda i: -values[i])
    found: dict[int, str] = {}
    for turn in range(MOST):
        for name, order in orders.items():
            if len(found) < MOST and turn < len(order):
                free = next((i for i in order if i not in found), None)
                if free is not None:
                    found[free] = name
    ranks = {i: {name: order.index(i) for name, order in orders.items() if i in order} for i in found}
    reasons = {i: [name for name, rank in own.items() if rank < 3 or name == found[i]] for i, own in ranks.items()}

    def order(i: int) -> tuple[int, float]:
        name = "effect" if found[i] == "effect" else pattern_of(audit, audit.heads[i], reasons[i]) or found[i]
        return list(_REASONS).index(name), -getattr(audit.heads[i], name)

    return {i: reasons[i] for i in sorted(found, key=order)}


def pattern_of(audit: AuditRecord, head: HeadRecord, reasons: Sequence[str] = ()) -> str:
    """The column of a head's attention pattern: that of its kind, or else of the reason to look at it; may be empty."""
    style = role(audit, head)
    own = (name for name, (one, _) in ROLES.items() if one is style and name != "first")
    return next(own, next((name for name in reasons if name in ROLES), ""))


def _label(audit: AuditRecord, head: HeadRecord, reasons: Sequence[str]) -> str:
    """A head in a line: L9 H8: previous token 0.84, positional 0.83."""
    pattern = pattern_of(audit, head, reasons)
    told = [f"{ROLES[pattern][0].title.lower()} {fixed(getattr(head, pattern))}"] if pattern else []
    told += [f"positional {fixed(head.positional)}"] if head.positional is not None else []
    told += [f"effect {significant(head.effect)}"] if head.effect is not None else []
    return f"{Names.of(audit).short(head)}: {', '.join(told)}"


_TIPS = {
    "positional": "Positional|.2f",
    "symbolic": "Symbolic|.2f",
    "previous": "Previous token|.2f",
    "induction": "Induction|.2f",
    "retrieval": "Retrieval|.2f",
    "duplicate": "Duplicate token|.2f",
    "first": "First token|.2f",
    "distance": "Mean distance|.1f",
    "frequency": "Mean frequency|.2~r",
    "effect": "Effect|.3~r",
}


def head_rows(audit: AuditRecord, columns: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The heads as rows of charts, with some columns of numbers; ``frequency`` is the mean RoPE frequency used."""
    called = Names.of(audit)
    return [
        {
            "name": called.short(head),
            "place": place_title((head.side, head.kind)),
            "layer": head.layer + 1,
            "head": head.head + 1,
            "role": role(audit, head).title,
            **{name: _number(head, name) for name in columns},
        }
        for head in audit.heads
    ]


def _number(head: HeadRecord, name: str) -> float | None:
    if name == "frequency":
        return None if head.centre is None else 2.0**head.centre
    return getattr(head, name)


def head_tips(audit: AuditRecord, columns: Iterable[str]) -> list[Any]:
    """What a head says when pointed at: the columns that are known."""
    shown = {name: _TIPS[name] for name in columns if name in _TIPS}
    return tooltip(name="Head", role="Kind", **shown)


def by_place(chart: Chart, audit: AuditRecord, *, free: Sequence[str] = ()) -> Chart:
    """A panel for each side and kind of attention, if there are several."""
    places = Names.of(audit).places
    return chart if len(places) < 2 else grid(chart, "place", map(place_title, places), free=free)


# ---- the map ---------------------------------------------------------------------------------------------------------


def map_column(audit: AuditRecord) -> str:
    """The column that colours the map of heads; empty if nothing is known."""
    return next((name for name in ("positional", "previous", "first", "entropy", "effect") if name in known(audit)), "")


def map_chart(audit: AuditRecord) -> Chart:
    """Heads by layer, coloured by positional share; the heads to look at are numbered, outlined and named."""
    column, chosen = map_column(audit), to_look_at(audit)
    columns = [column, *(name for name in _TIPS if name in known(audit) and name != column)]
    rows = head_rows(audit, columns)
    for row, head in zip(rows, audit.heads, strict=True):
        row["mark"] = "–" if idle(audit, head) else ""
        row["kind"] = ROLES[pattern][0].title if (pattern := pattern_of(audit, head)) else None
    for order, (i, reasons) in enumerate(chosen.items(), 1):
        pattern = pattern_of(audit, audit.heads[i], reasons)
        rows[i] |= {"mark": str(order), "kind": ROLES[pattern][0].title if pattern else None}
    end = 1.0 if column != "effect" else max((abs(head.effect or 0.0) for head in audit.heads), default=0.0) or 1.0
    domain = (-end, end) if column == "effect" else (0.0, end)
    title = f"{column} share" if column in SHARES else column
    return numbered_map(audit, rows, column, domain, title, named(audit, chosen), head_tips(audit, columns))


def named(audit: AuditRecord, chosen: dict[int, list[str]]) -> list[str]:
    """The chosen heads in numbered lines."""
    return [f"{n}  {_label(audit, audit.heads[i], reasons)}" for n, (i, reasons) in enumerate(chosen.items(), 1)]


def numbered_map(
    audit: AuditRecord,
    rows: Sequence[dict[str, Any]],
    column: str,
    domain: tuple[float, float],
    title: str,
    lines: Sequence[str],
    tips: Sequence[Any],
) -> Chart:
    """A map of heads whose rows have a ``mark`` in their cell and a ``kind`` for their outline; lines go below it."""
    layers, heads = (sorted({row[name] for row in rows}) for name in ("layer", "head"))
    axes = names("layer", layers, "layer"), names("head", heads, "head")
    size = max(9, min(22, 440 // len(heads)))
    made = heat(rows, *axes, column, title=title, domain=domain, tips=tips, size=size, marks="mark")
    kinds = [style for style, _ in ROLES.values() if style.title in {row["kind"] for row in rows}]
    if kinds:
        scale = alt.Scale(domain=[each.title for each in kinds], range=[each.colour for each in kinds])
        stroke = alt.Stroke(
            field="kind",
            type="nominal",
            title=None,
            scale=scale,
            legend=alt.Legend(symbolType="square", orient="bottom"),
        )
        frame = alt.Chart().mark_rect(filled=False, strokeWidth=2.5).transform_filter("datum.kind != null")
        frame = frame.encode(x=alt.X(**axes[0]), y=alt.Y(**axes[1]), stroke=stroke, tooltip=list(tips))
        made = alt.layer(*made.layer, frame, data=made.data).properties(height=made.height)
    made = by_place(made, audit)
    if lines:
        made = made.properties(title=alt.Title("Heads to look at", subtitle=list(lines), orient="bottom", offset=8))
    return made


# ---- other charts ----------------------------------------------------------------------------------------------------


def kinds_of(audit: AuditRecord) -> list[Style]:
    """The kinds of heads that occur, for the legend."""
    found = {role(audit, head) for head in audit.heads}
    return [style for style in (*(one for one, _ in ROLES.values()), OTHER, IDLE) if style in found]


def frequency_chart(audit: AuditRecord) -> Chart:
    """Heads by the mean frequency that they use and their positional share."""
    columns = ("positional", "frequency")
    rows = [row for row in head_rows(audit, columns) if None not in (row["frequency"], row["positional"])]
    ends = [floor(log10(of(row["frequency"] for row in rows))) for of in (min, max)]
    powers = [10.0**power for power in range(ends[0], ends[1] + 2)]
    title = "mean RoPE frequency used (rad per position)"
    x = number("frequency", title, kind="log", format="~g", values=powers, domain=[powers[0], powers[-1]])
    y = number("positional", "positional share", domain=[0, 1], format=".1f")
    marks = alt.Chart(data(rows)).mark_point(opacity=0.65)
    made = marks.encode(x=alt.X(**x), y=alt.Y(**y), tooltip=head_tips(audit, columns), **looks("role", kinds_of(audit)))
    return by_place(made.properties(height=300), audit)


def shares_chart(audit: AuditRecord) -> Chart:
    """Heads by positional and symbolic share."""
    size = ["effect"] if audit.effect == "loss" and "effect" in known(audit) else []
    columns = [*SHARES, *size]
    rows = [row for row in head_rows(audit, columns) if None not in [row[share] for share in SHARES]]
    for row in rows if size else ():
        row["effect"] = max(0.0, row["effect"] or 0.0)
    return plane(rows, kinds_of(audit), tips=head_tips(audit, columns), series="role", size="".join(size))


_USES = {"variance_use": "Share of the logits’ variance", "norm_use": "Share of ‖q‖ ‖k‖"}


def use_rows(audit: AuditRecord) -> list[dict[str, Any]]:
    """Mean use of each RoPE frequency over the heads of each layer."""
    called, rows = Names.of(audit), []
    for layer in audit.layers:
        for use, title in _USES.items():
            known = [found for head in audit.of(layer) if (found := getattr(head, use))]
            if not known or not layer.frequencies:
                continue
            mean, turns = np.mean(known, axis=0).tolist(), layer.frequencies
            pairs: list[tuple[str, float, float | None]] = [("none", mean[0], None)]
            pairs += [(str(n + 1), mean[n + 1], turn) for n, turn in enumerate(turns)]
            pairs += [("bias", mean[-1], None)] if use == "variance_use" else []
            for pair, value, turn in pairs:
                wave = 2 * pi / abs(turn) if turn else None
                row = {"layer": called.short_layer(layer), "use": title, "pair": pair, "value": value}
                rows.append(row | {"frequency": turn, "wavelength": wave})
    used = {row["pair"] for row in rows if row["value"]}
    return [row for row in rows if row["pair"] in used or row["frequency"] is not None]


def use_chart(rows: Sequence[dict[str, Any]]) -> Chart:
    """Mean use of each RoPE pair by layer."""
    titles = [title for title in _USES.values() if title in {row["use"] for row in rows}]
    end = max(abs(row["value"]) for row in rows) or 1.0
    low = min(row["value"] for row in rows)
    told = tooltip(layer="Layer", pair="RoPE pair", frequency="rad per position|.3~g", wavelength="Wavelength|,.0f")
    pairs = sorted(
        {row["pair"] for row in rows}, key=lambda pair: (pair == "bias", 0 if pair == "none" else _int(pair))
    )
    layers = [row["layer"] for row in rows]
    axes = names("pair", pairs, "RoPE pair (1: fastest)"), names("layer", layers, None)
    told = [*told, alt.Tooltip("value:Q", title="Share", format=".3f")]
    domain = (-end if low < -0.01 * end else 0.0, end)
    made = heat(rows, *axes, "value", title="share", domain=domain, tips=told, size=_rows(layers), marks="mark")
    return grid(made, "use", titles, columns=2)


def _int(pair: str) -> int:
    return int(pair) if pair.isdigit() else 0


def _rows(values: Iterable[Any]) -> int:
    return max(9, min(20, 440 // len(set(values))))


_AXES = {"loss": "effect on the loss (nats per token)", "states": "effect on the last hidden states"}


def effects_chart(audit: AuditRecord) -> Chart:
    """The effect of each head above its layer, with its interval; the largest are named."""
    counts = {(layer.side, layer.kind, layer.layer): max(1, layer.heads) for layer in audit.layers}
    columns = [name for name in (*EFFECTS, "positional") if name in known(audit)]
    rows = [row for row in head_rows(audit, columns) if row["effect"] is not None]
    measured = [head for head in audit.heads if head.effect is not None]
    top = sorted(measured, key=lambda head: -(head.effect or 0.0))[:5]
    for row, head in zip(rows, measured, strict=True):
        row["at"] = head.layer + 1 + 0.72 * ((head.head + 0.5) / counts[head.place] - 0.5)
        row["label"] = f"H{head.head + 1}" if head in top else None
    layers = sorted({row["layer"] for row in rows})
    ticks = layers[:: -(-len(layers) // 16)]
    x = number("at", "layer", domain=[layers[0] - 0.6, layers[-1] + 0.6], values=ticks, grid=False, format="d")
    y = alt.Y(**number("effect", _AXES[audit.effect or "loss"], format="~g"))
    base = alt.Chart(data(rows)).encode(x=alt.X(**x))
    look = looks("role", kinds_of(audit))
    layered: list[Any] = []
    if "effect_low" in known(audit) and len(rows) <= _BARS:
        ends = {"y": alt.Y(field="effect_low", type="quantitative"), "y2": alt.Y2(field="effect_high")}
        layered.append(base.mark_rule(opacity=0.4).encode(**ends))
    layered.append(base.mark_point(size=32).encode(y=y, tooltip=head_tips(audit, columns), **look))
    text = base.mark_text(dy=-9).transform_filter("datum.label != null")
    layered.append(text.encode(y=y, text=alt.Text(field="label", type="nominal")))
    return by_place(alt.layer(*layered).properties(height=280), audit)


def band_rows(audit: AuditRecord) -> list[dict[str, Any]]:
    """The effect of each frequency band of each layer."""
    called = Names.of(audit)
    return [
        {
            "layer": called.short_layer(layer),
            "band": f"{band.first + 1}–{band.last + 1}",
            "effect": band.effect,
            "low": band.effect_low,
            "high": band.effect_high,
            "turns": f"{significant(band.fastest)} to {significant(band.slowest)} rad per position",
        }
        for layer in audit.layers
        for band in audit.bands_of(layer)
    ]


def bands_chart(rows: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> Chart:
    """The effect of freezing each frequency band, by layer; ``columns``: more columns to tell."""
    bands = sorted({row["band"] for row in rows}, key=lambda band: [int(end) for end in band.split("–")])
    end = max((abs(row["effect"]) for row in rows if row["effect"] is not None), default=0.0) or 1e-6
    told = tooltip(layer="Layer", band="Pairs", turns="Frequencies", effect="Effect|.3~r", **dict.fromkeys(columns))
    told += tooltip(low="95% interval from|.3~r", high="to|.3~r") if not columns else []
    axes = names("band", bands, "RoPE pairs (1: fastest)"), names("layer", [row["layer"] for row in rows], None)
    return heat(rows, *axes, "effect", title="effect", domain=(-end, end), tips=told, form=".3~f")


# ---- tables ----------------------------------------------------------------------------------------------------------


def look_table(audit: AuditRecord, chosen: dict[int, list[str]]) -> Table:
    """The heads to look at, each with the reasons."""
    called, shown = Names.of(audit), known(audit)
    columns = [
        name
        for name in ("positional", "previous", "induction", "retrieval", "duplicate", "distance", "effect")
        if name in shown
    ]
    rows: list[list[str | Cell]] = []
    ranks = {
        name: sorted((v for head in audit.heads if (v := getattr(head, name)) is not None), reverse=True)
        for name in _REASONS
    }
    for order, (i, reasons) in enumerate(chosen.items(), 1):
        head = audit.heads[i]
        why = [f"{_ordinal(ranks[name].index(getattr(head, name)) + 1)}largest {_REASONS[name]}" for name in reasons]
        text = listed(why)
        row: list[str | Cell] = [f"{order}  {called.short(head)}", text[0].upper() + text[1:]]
        rows.append(
            [
                *row,
                *(
                    fixed(
                        getattr(head, name),
                        min(2, digits_of(name, audit)) if name != "effect" else digits_of(name, audit),
                    )
                    for name in columns
                ),
            ]
        )
    titles = ["Head", "Why", *(name.capitalize() for name in columns)]
    return make_table("Heads to look at", titles, rows, right=range(2, len(titles)), css="numbers small")


def _ordinal(rank: int) -> str:
    return "" if rank == 1 else f"{rank}{({2: 'nd', 3: 'rd'}).get(rank, 'th')} "


def heads_table(audit: AuditRecord) -> Table:
    """All heads with every known number; layers and heads are counted from 1."""
    called, shown = Names.of(audit), known(audit)
    digits = {name: digits_of(name, audit) for name in shown}
    rows = [
        [called.short(head), str(head.layer + 1), str(head.head + 1)]
        + [fixed(getattr(head, name), count) for name, count in digits.items()]
        for head in audit.heads
    ]
    titles = ["head", "layer", "index in layer", *(name.replace("_", " ") for name in shown)]
    note = "Click a column name to sort. Layers and heads are counted from 1 here, and from 0 in heads.csv."
    return make_table("All heads", titles, rows, right=range(1, len(titles)), note=note, css="numbers small sortable")


def columns_table(audit: AuditRecord) -> Table:
    """What the columns of numbers mean."""
    rows = [
        [name.replace("_", " "), COLUMNS[name] + (f" ({SOURCES[name]})" if name in SOURCES else "")]
        for name in known(audit)
    ]
    return make_table("Columns", [], rows, css="facts")


def deposits_table(audit: Audit) -> Table:
    """How the effects of each layer are distributed over its heads."""
    called, rows, digits = Names.of(audit), [], digits_of("effect", audit)
    for layer in audit.layers if audit.effect else ():
        if not (found := layer.deposit):
            continue
        top = words.top_head(audit, layer) if found.get("top_share") is not None else None
        row = [called.short_layer(layer), fixed(found.get("helps"), digits), fixed(found.get("harms"), digits)]
        row += [f"head {top.head + 1}" if top else DASH, fixed(top.effect if top else None, digits)]
        row += [interval(top, digits) if top else DASH, percent(found.get("top_share"))]
        row += [f"{fixed(found.get('effective_heads'), 1)} of {layer.heads}", fixed(found.get("gini"), 2)]
        rows.append([*row, fixed(found.get("lead"), digits)])
    titles = ["Positive", "Negative", "Largest", "Effect", "Interval", "Share", "Effective heads", "Gini", "Lead"]
    return make_table(
        "Deposit by layer", ["Layer", *titles], rows, right=(1, 2, *range(4, 10)), note=_DEPOSIT, css="numbers small"
    )


def interval(one: HeadRecord | BandRecord, digits: int) -> str:
    """The 95% interval of an effect; a dash if there is none."""
    if one.effect_low is None or one.effect_high is None:
        return DASH
    return f"{fixed(one.effect_low, digits)} to {fixed(one.effect_high, digits)}"


def layers_table(audit: AuditRecord, layers: Sequence[LayerRecord], name: str) -> Table:
    """Attention calls, and how much the recomputed values differ from the model's own."""
    called, power, rows = Names.of(audit), words.power, []
    logits, unknown = (any(getattr(layer, name) is not None for layer in layers) for name in ("logit", "unknown"))
    for layer in layers:
        over = f" over {layer.key_heads}" if layer.key_heads != layer.heads else ""
        cap = "" if layer.softcap is None else f", capped at {layer.softcap:g}"
        row: list[str | Cell] = [called.short_layer(layer), code(layer.module), f"{layer.heads}{over}"]
        row += [str(layer.head_dim), f"{layer.scale:.4g}{cap}", visible(layer), layer.position]
        row += [power(layer.weights), power(layer.outputs), power(layer.tolerance)]
        rows.append([*row, *[words.size(layer.logit)] * logits, *[layer.unknown or "known"] * unknown])
    titles = [
        "Layer",
        "Module",
        "Heads",
        "Width",
        "Scale",
        "Visible keys",
        "Position",
        "Weights",
        "Outputs",
        "Rounding",
    ]
    titles += ["Largest logit"] * logits + ["Shares"] * unknown
    right = (2, 3, 4, 7, 8, 9, *([10] if logits else []))
    return make_table(name, titles, rows, right=right, note=_LAYERS, css="numbers small")


def visible(layer: LayerRecord) -> str:
    """The keys that a query can attend to."""
    if layer.chunk is not None:
        return f"itself and earlier keys in its chunk of {layer.chunk}"
    if layer.window is not None and not layer.causal:
        return f"itself and {layer.window - 1} keys on either side"
    if layer.window is not None:
        return f"itself and {layer.window - 1} earlier keys"
    others = "keys that are not masked" if "mask" in layer.position else "all keys"
    return "itself and all earlier keys" if layer.causal else others


# ---- the page --------------------------------------------------------------------------------------------------------

_MAP = (
    "Positional share: how much of the variance of a head’s logits the position of the key explains. Numbers: heads "
    "named below, the strongest of each kind. Outlined: heads with a pattern. –: nearly uniform attention, no effect."
)
_FREQUENCY = (
    "Each mark is a head. x: mean of the RoPE frequencies, weighted by their share of the variance of its logits (0.1 "
    "rad per position is a full turn in 63 tokens). y: positional share."
)
_SHARES = (
    "Shares of the variance of a head’s logits that are explained by the position of keys (positional), by their "
    "content (symbolic), and only by both together (interaction: the distance to the slanted line). They describe "
    "logits, not function: heads of an untrained model often look symbolic, too."
)
_USE = (
    "Mean over the heads of a layer, by RoPE pair. A negative share (blue) means that a frequency counteracts the "
    "others. None: dimensions without rotation. Bias: positional bias added to the logits."
)
BANDS = (
    "Each cell is a band of RoPE pairs whose rotation is frozen in all heads of a layer: their content still "
    "contributes to the logits, their position does not. Blue: freezing helps."
)
_DEPOSIT = (
    "Positive, negative: sums of the layer’s effects of either sign. The deposit describes how the positive effects d "
    "are distributed over heads; a dash means that their sum is within noise. Share: max d / Σd. Effective heads: "
    "(Σd)² / Σd², which is 1 if one head has everything. Gini: 0 if all heads are equal. Lead: largest minus second "
    "largest effect."
)
_LAYERS = (
    "Heads: query heads; “8 over 2” means 8 query heads share 2 key heads. Width: dimension of queries and keys. "
    "Scale: factor of q · k. Weights: largest difference of an attention weight; a dash if the model exposes none. "
    "Outputs: largest difference of a head’s output, relative to the layer’s largest. Rounding: largest weight "
    "difference that rounding explains."
)


def audit_page(audit: Audit) -> Page:
    """The page of an audit."""
    name, chosen = "/".join(Path(words.model(audit)).parts[-2:]), to_look_at(audit)
    lines = "; ".join(named(audit, chosen))
    picture = Figure("map", "Heads by layer", map_chart(audit), _MAP, lines) if map_column(audit) else None
    matter = "matter, and which " if audit.effect else ""
    return Page(
        "audit",
        f"{name}: audit",
        f"Which heads of {name} {matter}depend on position?",
        _answer(audit),
        picture,
        [
            *_position_sections(audit),
            _look_section(audit, chosen),
            *_effect_sections(audit),
            *_band_sections(audit),
            _proof_section(audit),
        ],
        list(_notes(audit)),
        list(_warnings(audit)),
    )


def _answer(audit: Audit) -> str:
    """The largest effect with its interval, then how many heads follow a pattern or depend on position."""
    told = words.findings(audit)[:1] if any(one.effect is not None for one in (*audit.heads, *audit.bands)) else []
    counts = []
    for name, (style, least) in ROLES.items():
        if top := words.largest(audit.heads, name):
            count = sum((getattr(head, name) or 0.0) > least for head in audit.heads)
            best = f" (strongest: {Names.of(audit).short(top[0])}, {fixed(top[1])})" if name != "first" else ""
            counts.append(f"{count} {style.title.lower().replace(' ', '-')} heads{best}")
    if counts:
        told.append(f"The model’s {len(audit.heads)} heads include {listed(counts)}.")
    if counted := [head for head in audit.heads if head.positional is not None and not idle(audit, head)]:
        both = [sum((getattr(head, share) or 0.0) > PATTERN for head in counted) for share in SHARES[:2]]
        without = sum(idle(audit, head) for head in audit.heads)
        less = f"; {without} do nothing and are not counted" if without else ""
        told.append(f"The logits of {both[0]} depend mostly on position, of {both[1]} mostly on content{less}.")
    return " ".join(told) or "No values are known for any head."


def _warnings(audit: Audit) -> Iterator[str]:
    if not words.proved(audit):
        yield (
            "Not proved: at least one layer differs from the model by more than the tolerance (listed below). Do not "
            "trust the numbers of its heads."
        )
    for which, why in words.unknown(audit)[:4]:
        yield f"Shares unknown in {which}. Reason: {why.rstrip('.')}."
    if random := audit.about.get("random_weights"):
        yield (
            f"Random weights: tensors missing from the checkpoint and initialised randomly ({len(random)}): "
            f"{_some(random)}. Results downstream of them do not describe a trained model."
        )


def _notes(audit: Audit) -> Iterator[str]:
    yield f"Audited on {words.audited(audit)}. Layers and heads are counted from 1."
    if unused := audit.about.get("unused_weights"):
        yield f"Unused weights of the checkpoint ({len(unused)}): {_some(unused)}."
    if token := audit.about.get("unused_bos"):
        yield f"The tokenizer has a beginning-of-sequence token, {token}, but does not add it to sequences."
    if not audit.effect:
        yield words.effects(audit)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _position_sections(audit: Audit) -> list[Section]:
    """Positional share against frequency, and the other shares."""
    both = [head for head in audit.heads if None not in (head.centre, head.positional)]
    split = [head for head in audit.heads if None not in (head.positional, head.symbolic, head.interaction)]
    shares = [Figure("shares", "Positional and symbolic share", shares_chart(audit), _SHARES)] if split else []
    rows = use_rows(audit)
    use = []
    if rows:
        figure = Figure("use", "Use of RoPE frequencies", use_chart(rows), _USE)
        use = [Section("Use of each frequency, by layer", [figure])]
    if not both:
        return [Section("Position or content?", [*shares], use)] if shares or use else []
    groups = {over: [2.0**h.centre for h in both if (h.positional > PATTERN) == over] for over in (True, False)}
    told = [
        f"{significant(median(each), 2)} in the {len(each)} heads {text}"
        for each, text in ((groups[True], f"with a positional share over {PATTERN:g}"), (groups[False], "with less"))
        if each
    ]
    text = f"Median of the mean frequency: {listed(told)} (rad per position)."
    figure = Figure("frequency", "Positional share by frequency", frequency_chart(audit), _FREQUENCY)
    details = [Section("Positional, symbolic or both", [*shares])] if shares else []
    return [Section("Do positional heads use fast frequencies?", [figure, text], [*details, *use])]


def _look_section(audit: Audit, chosen: dict[int, list[str]]) -> Section:
    """The heads to look at, and all heads."""
    text = (
        "The largest of each kind, in turns: effect of ablation, attention on the previous token, after an earlier "
        "copy, on copies, retrieval score and positional share. Heads that do nothing are left out."
    )
    if not chosen:
        text = "No head has a pattern, a positional share or an effect that stands out."
    details = [
        Section(f"All {len(audit.heads)} heads", [heads_table(audit)], id="heads"),
        Section("What the columns mean", [columns_table(audit)]),
        Section("More findings", words.findings(audit)),
    ]
    table = [look_table(audit, chosen)] if chosen else []
    return Section("Which heads should I look at?", [text, *table], [each for each in details if each.parts], id="look")


def _effect_sections(audit: Audit) -> list[Section]:
    if audit.effect is None or all(head.effect is None for head in audit.heads):
        return []
    top = max((head for head in audit.heads if head.effect is not None), key=lambda head: head.effect or 0.0)
    bars = "effect_low" in known(audit) and len(audit.heads) <= _BARS
    caption = "Each mark is a head, above its layer." + f" Lines: 95% intervals {words.over(audit)}." * bars
    figure = Figure("effects", f"Effect of {words.done(audit)} each head", effects_chart(audit), caption)
    text = f"{words.effects(audit)} Largest: {significant(top.effect)}, for {Names.of(audit).head(top)}."
    table = deposits_table(audit)
    return [
        Section(
            "Which heads matter?",
            [figure, text],
            [Section("Deposit by layer", [table])] if table.body else [],
            "effect",
        )
    ]


def _band_sections(audit: Audit) -> list[Section]:
    if not audit.bands:
        return []
    top = max(audit.bands, key=lambda band: band.effect or 0.0)
    text = f"{words.effects(audit)} Largest: {significant(top.effect)}, for {band_name(audit, top)}."
    figure = Figure("bands", "Effect of freezing each band", bands_chart(band_rows(audit)), BANDS)
    return [Section("Which frequencies matter?", [figure, text])]


def band_name(audit: AuditRecord, band: BandRecord) -> str:
    """A band in a sentence."""
    return f"pairs {band.first + 1} to {band.last + 1} in {Names.of(audit).layer(audit.layer_of(band))}"


def _proof_section(audit: Audit) -> Section:
    """Whether the recomputed attention is the model's, then layers and settings."""
    failed = [layer for layer in audit.layers if not words.within(layer)]
    shown = [layers_table(audit, failed, "Layers above the tolerance")] if failed else []
    details = [
        Section(f"All {len(audit.layers)} layers", [layers_table(audit, audit.layers, "Layers")]),
        Section("Settings", [settings_table(audit.about.items())]),
    ]
    if audit.words:
        more = len(audit.words) - _TOKENS
        tokens = " ".join(audit.words[:_TOKENS]) + (f" … ({more} more)" if more > 0 else "")
        details.append(Section("Tokens of the first sequence", [tokens]))
    said = (
        "All layers are within tolerance."
        if not failed
        else f"Above tolerance: {layer_spans(Names.of(audit), failed)}."
    )
    return Section("Is it proved?", [f"{said} {words.proof(audit)}", *shown], details, id="proof")
