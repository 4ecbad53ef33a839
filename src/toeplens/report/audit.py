"""The page of an audit: the heads of a model that are worth a look, what they attend to, and whether it is proved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import floor, log10, pi
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from markupsafe import Markup

from toeplens.report.charts import (
    Chart,
    alt,
    chart_data,
    color_shape,
    facet_grid,
    heatmap,
    nominal,
    numeric,
    share_plane,
    tooltip,
)
from toeplens.report.page import Figure, Page, Section
from toeplens.report.tables import DASH, Table, TableCell, code, make_table, settings_table
from toeplens.report.theme import COLOURS, Style
from toeplens.studies.auditing import sentences
from toeplens.studies.auditing.record import COLUMNS, SOURCES, Audit, BandRecord, HeadRecord, LayerRecord
from toeplens.studies.auditing.sentences import PATTERN_SHARE, UNIFORM_ENTROPY, HeadNames, layer_spans, side_kind_title
from toeplens.studies.kit.probe_items import MIN_RETRIEVAL
from toeplens.utils.formatting import fmt, join_list, percent, sig_figs, to_sci

NUMBERS = tuple(name for name in COLUMNS if name not in ("side", "kind", "layer", "head"))
EFFECTS = ("effect", "effect_low", "effect_high")
SHARES = ("positional", "symbolic", "interaction")
MAX_NOTABLE = 10  # heads to look at
_MIN_SHARE = 0.2  # a share from which on a head may be one to look at
_MAX_TOKENS = 400  # tokens of the first sequence that are shown
ROLES = {  # kinds of heads by column
    "previous": Style("Previous token", COLOURS["blue"], "circle"),
    "induction": Style("Induction", COLOURS["green"], "diamond"),
    "retrieval": Style("Retrieval", COLOURS["purple"], "triangle-down"),
    "duplicate": Style("Duplicate token", COLOURS["cyan"], "triangle-right"),
    "first": Style("First token", COLOURS["brown"], "triangle-left"),
}
# a head is of a kind if its value is larger
CUTOFFS = {**dict.fromkeys(ROLES, PATTERN_SHARE), "retrieval": MIN_RETRIEVAL}
OTHER, IDLE = Style("Other", COLOURS["grey"]), Style("Near-uniform", COLOURS["pink"], "cross")
_REASONS = {  # to look at a head
    "effect": "effect",
    "previous": "attention on the previous token",
    "induction": "attention after an earlier copy (induction)",
    "retrieval": "retrieval score",
    "duplicate": "attention on earlier copies",
    "positional": "positional share",
}
_TOOLTIPS = {
    "positional": "Positional|.2f",
    "symbolic": "Symbolic|.2f",
    **{name: f"{style.title}|.2f" for name, style in ROLES.items()},
    "distance": "Mean distance|.1f",
    "frequency": "Mean frequency|.2~r",
    "effect": "Effect|.3~r",
}


def known_columns(audit: Audit) -> list[str]:
    """The columns of numbers that are known for at least one head."""
    return [name for name in NUMBERS if any(getattr(head, name) is not None for head in audit.heads)]


def digits_of(column: str, *audits: Audit) -> int:
    """Decimals of a column; for effects, enough to show three significant digits of the largest."""
    if column not in EFFECTS:
        return {"distance": 1, "half_distance": 1, "centre": 2, "dead": 0}.get(column, 3)
    size = max((abs(head.effect or 0.0) for audit in audits for head in audit.heads), default=0.0)
    return min(12, max(0, 2 - floor(log10(size)))) if size else 3


def is_idle(audit: Audit, head: HeadRecord) -> bool:
    """Whether a head has nearly uniform attention, and no significant effect if effects were measured."""
    if head.entropy is None or head.entropy < UNIFORM_ENTROPY:
        return False
    if head.effect is None:
        return True
    if head.effect_low is not None and head.effect_high is not None:
        return head.effect_low <= 0 <= head.effect_high
    return abs(head.effect) <= 0.01 * max(abs(other.effect or 0.0) for other in audit.heads)


def head_role(audit: Audit, head: HeadRecord) -> Style:
    """The kind of a head: that of its attention pattern, if it has one."""
    if is_idle(audit, head):
        return IDLE
    return next((style for name, style in ROLES.items() if (getattr(head, name) or 0.0) > CUTOFFS[name]), OTHER)


def notable_heads(audit: Audit) -> dict[int, str]:
    """Heads to look at, by index in the record, each with its reason: the largest of each kind, in turns."""
    values: dict[str, dict[int, float]] = {name: {} for name in _REASONS}
    for i, head in enumerate(audit.heads):
        for name in _REASONS if not is_idle(audit, head) else ():
            threshold = {"effect": 0.0, "retrieval": MIN_RETRIEVAL}.get(name, _MIN_SHARE)
            value, low = getattr(head, name), head.effect_low if name == "effect" else None
            if value is not None and value > threshold and (low is None or low > 0):
                values[name][i] = value
    chosen: dict[int, str] = {}
    for _ in range(MAX_NOTABLE):
        for name, candidates in values.items():
            unused = [i for i in candidates if i not in chosen]
            if unused and len(chosen) < MAX_NOTABLE:
                chosen[max(unused, key=lambda i: candidates[i])] = name

    def order(i: int) -> tuple[int, float]:  # by pattern, the strongest first
        name = chosen[i] if chosen[i] == "effect" else _pattern_column(audit, audit.heads[i], chosen[i]) or chosen[i]
        return list(_REASONS).index(name), -getattr(audit.heads[i], name)

    return {i: chosen[i] for i in sorted(chosen, key=order)}


def _pattern_column(audit: Audit, head: HeadRecord, reason: str) -> str:
    """The column of a head's pattern, except attention on the first token, or else of the reason to look at it."""
    style = head_role(audit, head)
    column = next((name for name, candidate in ROLES.items() if candidate is style and name != "first"), "")
    return column or (reason if reason in ROLES else "")


def describe_heads(audit: Audit, chosen: dict[int, str]) -> list[str]:
    """The chosen heads in numbered lines, such as L9 H8: previous token 0.84, positional 0.83."""
    lines = []
    for n, (i, reason) in enumerate(chosen.items(), 1):
        head = audit.heads[i]
        facts = [
            f"{ROLES[name].title.lower()} {fmt(getattr(head, name))}"
            for name in (_pattern_column(audit, head, reason),)
            if name
        ]
        facts += [f"positional {fmt(head.positional)}"] if head.positional is not None else []
        facts += [f"effect {sig_figs(head.effect)}"] if head.effect is not None else []
        lines.append(f"{n}  {HeadNames.of_audits(audit).short(head)}: {', '.join(facts)}")
    return lines


def head_rows(audit: Audit, columns: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The heads as rows of charts, with some columns of numbers; ``frequency`` is the mean RoPE frequency used."""
    head_names, rows = HeadNames.of_audits(audit), []
    for head in audit.heads:
        row = {
            "name": head_names.short(head),
            "place": side_kind_title((head.side, head.kind)),
            "role": head_role(audit, head).title,
        }
        row |= {"layer": head.layer + 1, "head": head.head + 1}
        computed = {"frequency": None if head.centre is None else 2.0**head.centre}
        rows.append(row | {name: computed[name] if name in computed else getattr(head, name) for name in columns})
    return rows


def _head_tips(columns: Iterable[str]) -> list[Any]:
    return tooltip(name="Head", role="Kind", **{name: _TOOLTIPS[name] for name in columns if name in _TOOLTIPS})


def _attention_panels(chart: Chart, audit: Audit) -> Chart:
    """A panel for each side and kind of attention, if there are several."""
    places = HeadNames.of_audits(audit).side_kinds
    return chart if len(places) < 2 else facet_grid(chart, "place", map(side_kind_title, places))


def _roles(audit: Audit) -> list[Style]:
    """The kinds of heads that occur, for the legend."""
    roles = {head_role(audit, head) for head in audit.heads}
    return [style for style in (*ROLES.values(), OTHER, IDLE) if style in roles]


def _map_column(audit: Audit) -> str:
    """The column that colours the map of heads; empty if none is known."""
    return next((name for name in ("positional", "previous", "first", "entropy") if name in known_columns(audit)), "")


def map_chart(audit: Audit) -> Chart:
    """Heads by layer, coloured by positional share; the heads to look at are numbered, outlined and named."""
    column, chosen = _map_column(audit), notable_heads(audit)
    columns = [column, *(name for name in _TOOLTIPS if name in known_columns(audit) and name != column)]
    rows, order = head_rows(audit, columns), {i: str(n) for n, i in enumerate(chosen, 1)}
    for i, (row, head) in enumerate(zip(rows, audit.heads, strict=True)):
        pattern = _pattern_column(audit, head, chosen.get(i, ""))
        row["mark"] = order.get(i, "–" if is_idle(audit, head) else "")
        row["outline"] = ROLES[pattern].title if pattern else None
    title = f"{column} share" if column in SHARES else column
    lines = ["Heads to look at", *describe_heads(audit, chosen)] if chosen else []
    return head_map(audit, rows, column, 1.0, title, lines, _head_tips(columns))


def head_map(
    audit: Audit,
    rows: Sequence[dict[str, Any]],
    column: str,
    end: float,
    title: str,
    lines: Sequence[str],
    tips: Sequence[Any],
) -> Chart:
    """A map of heads, each with a ``mark`` in its cell and an ``outline``; lines, the first a title, are below it."""
    layers, heads = (sorted({row[name] for row in rows}) for name in ("layer", "head"))
    axes = nominal("layer", layers, "layer"), nominal("head", heads, "head")
    size = max(9, min(22, 440 // len(heads)))
    chart = heatmap(rows, *axes, column, title=title, domain=(0.0, end), tips=tips, size=size, marks="mark")
    if kinds := [style for style in ROLES.values() if style.title in {row["outline"] for row in rows}]:
        scale = alt.Scale(domain=[kind.title for kind in kinds], range=[kind.colour for kind in kinds])
        legend = alt.Legend(symbolType="square", orient="bottom")
        stroke = alt.Stroke(field="outline", type="nominal", title=None, scale=scale, legend=legend)
        frame = alt.Chart().mark_rect(filled=False, strokeWidth=2.5).transform_filter("datum.outline != null")
        frame = frame.encode(x=alt.X(**axes[0]), y=alt.Y(**axes[1]), stroke=stroke, tooltip=list(tips))
        chart = alt.layer(*chart.layer, frame, data=chart.data).properties(height=chart.height)
    chart = _attention_panels(chart, audit)
    caption = alt.Title(lines[0], subtitle=list(lines[1:]), orient="bottom", offset=8) if lines else None
    return chart.properties(title=caption) if caption else chart


def frequency_chart(audit: Audit) -> Chart:
    """Heads by the mean frequency that they use and their positional share."""
    columns = ("positional", "frequency")
    rows = [row for row in head_rows(audit, columns) if None not in (row["frequency"], row["positional"])]
    low, high = (floor(log10(pick(row["frequency"] for row in rows))) for pick in (min, max))
    powers = [10.0**exponent for exponent in range(low, high + 2)]
    title = "mean RoPE frequency used (rad per position)"
    x = numeric("frequency", title, kind="log", format="~g", values=powers, domain=[powers[0], powers[-1]])
    y = numeric("positional", "positional share", domain=[0, 1], format=".1f")
    marks = alt.Chart(chart_data(rows)).mark_point(opacity=0.65).properties(height=300)
    mark_style = color_shape("role", _roles(audit))
    return _attention_panels(marks.encode(x=alt.X(**x), y=alt.Y(**y), tooltip=_head_tips(columns), **mark_style), audit)


def shares_chart(audit: Audit) -> Chart:
    """Heads by positional and symbolic share."""
    size = "effect" if audit.effect == "loss" and "effect" in known_columns(audit) else ""
    columns = [*SHARES, *([size] if size else [])]
    rows = [row for row in head_rows(audit, columns) if None not in [row[share] for share in SHARES]]
    for row in rows if size else ():
        row[size] = max(0.0, row[size] or 0.0)
    return share_plane(rows, _roles(audit), tips=_head_tips(columns), series="role", size=size)


def frequency_use_chart(audit: Audit) -> Chart | None:
    """Mean share of the logits' variance in each RoPE pair, by layer; None if unknown."""
    head_names, rows = HeadNames.of_audits(audit), []
    for layer in audit.layers:
        if uses := [head.variance_use for head in audit.heads_of(layer) if head.variance_use]:
            freqs = [None, *layer.frequencies, None]
            pairs = ["none", *map(str, range(1, len(freqs) - 1)), "bias"]
            for pair, freq, value in zip(pairs, freqs, np.mean(uses, axis=0).tolist(), strict=True):
                row = {"layer": head_names.short_layer(layer), "pair": pair, "value": value, "mark": ""}
                rows.append(row | {"frequency": freq, "wavelength": 2 * pi / abs(freq) if freq else None})
    if not rows:
        return None
    used = {row["pair"] for row in rows if row["value"] or row["frequency"] is not None}
    rows = [row for row in rows if row["pair"] in used]
    pairs = sorted(used, key=lambda pair: {"none": 0.5, "bias": 1e9}.get(pair) or float(pair))
    tips = tooltip(layer="Layer", pair="Pair", value="Share|.3f", frequency="Frequency|.3~g", wavelength="Tokens|,.0f")
    end = max(abs(row["value"]) for row in rows) or 1.0
    low = -end if min(row["value"] for row in rows) < -0.01 * end else 0.0
    axes = nominal("pair", pairs, "RoPE pair (1: fastest)"), nominal("layer", [row["layer"] for row in rows], None)
    return heatmap(rows, *axes, "value", title="share", domain=(low, end), tips=tips, marks="mark")


def effects_chart(audit: Audit) -> Chart:
    """The effect of each head above its layer, with its interval; the largest are named."""
    counts = {layer.layer_key: max(1, layer.heads) for layer in audit.layers}
    columns = [name for name in (*EFFECTS, "positional") if name in known_columns(audit)]
    rows = [row for row in head_rows(audit, columns) if row["effect"] is not None]
    measured = [head for head in audit.heads if head.effect is not None]
    top = sorted(measured, key=lambda head: -(head.effect or 0.0))[:5]
    for row, head in zip(rows, measured, strict=True):
        row["at"] = head.layer + 1 + 0.72 * ((head.head + 0.5) / counts[head.layer_key] - 0.5)
        row["label"] = f"L{head.layer + 1} H{head.head + 1}" if head in top else None
    layers = sorted({row["layer"] for row in rows})
    x = numeric("at", "layer", domain=[layers[0] - 0.6, layers[-1] + 0.6], values=layers, grid=False, format="d")
    title = "effect on the loss (nats per token)" if audit.effect == "loss" else "effect on the last hidden states"
    y = alt.Y(**numeric("effect", title, format="~g"))
    base = alt.Chart(chart_data(rows)).encode(x=alt.X(**x))
    ends = {"y": alt.Y(field="effect_low", type="quantitative"), "y2": alt.Y2(field="effect_high")}
    bars = [base.mark_rule(opacity=0.4).encode(**ends)] if "effect_low" in columns else []
    points = base.mark_point(size=32).encode(y=y, tooltip=_head_tips(columns), **color_shape("role", _roles(audit)))
    text = base.mark_text(dy=-9).transform_filter("datum.label != null").encode(y=y, text=alt.Text("label:N"))
    return _attention_panels(alt.layer(*bars, points, text).properties(height=280), audit)


def band_rows(audit: Audit) -> list[dict[str, Any]]:
    """The effect of each frequency band of each layer."""
    return [
        {
            "layer": HeadNames.of_audits(audit).short_layer(audit.layer_of(band)),
            "band": f"{band.first + 1}–{band.last + 1}",
            "effect": band.effect,
            "interval": effect_interval(band, 3),
            "turns": f"{sig_figs(band.fastest)} to {sig_figs(band.slowest)} rad per position",
        }
        for band in audit.bands
    ]


def bands_chart(rows: Sequence[dict[str, Any]]) -> Chart:
    """The effect of freezing each frequency band, by layer."""
    bands = sorted({row["band"] for row in rows}, key=lambda band: [int(end) for end in band.split("–")])
    end = max((abs(row["effect"]) for row in rows if row["effect"] is not None), default=0.0) or 1e-6
    tips = tooltip(layer="Layer", band="Pairs", turns="Frequencies", effect="Effect|.3~r", interval="95% interval")
    axes = nominal("band", bands, "RoPE pairs (1: fastest)"), nominal("layer", [row["layer"] for row in rows], None)
    return heatmap(rows, *axes, "effect", title="effect", domain=(-end, end), tips=tips, form=".3~f")


def notable_table(audit: Audit, chosen: dict[int, str]) -> Table:
    """The heads to look at, each with its reason."""
    columns = [name for name in (*SHARES[:2], *ROLES, "distance", "effect") if name in known_columns(audit)]
    rows: list[list[str | TableCell]] = []
    active = [head for head in audit.heads if not is_idle(audit, head)]
    for n, (i, reason) in enumerate(chosen.items(), 1):
        head = audit.heads[i]
        rank = 1 + sum((getattr(other, reason) or 0.0) > getattr(head, reason) for other in active)
        ending = {1: "st", 2: "nd", 3: "rd"}.get(rank % 10 * (rank // 10 % 10 != 1), "th")
        order = "Largest" if rank == 1 else f"{rank}{ending} largest"
        digits = {name: min(digits_of(name, audit), 12 if name == "effect" else 2) for name in columns}
        numbers = [fmt(getattr(head, name), count) for name, count in digits.items()]
        rows.append([f"{n}  {HeadNames.of_audits(audit).short(head)}", f"{order} {_REASONS[reason]}", *numbers])
    titles = ["Head", "Why", *map(str.capitalize, columns)]
    return make_table("Heads to look at", titles, rows, right=range(2, len(titles)), css="numbers small")


def heads_table(audit: Audit) -> Table:
    """All heads with every known number; layers and heads are counted from 1."""
    digits = {name: digits_of(name, audit) for name in known_columns(audit)}
    rows = [
        [HeadNames.of_audits(audit).short(head), str(head.layer + 1), str(head.head + 1)]
        + [fmt(getattr(head, name), count) for name, count in digits.items()]
        for head in audit.heads
    ]
    titles = ["head", "layer", "index in layer", *(name.replace("_", " ") for name in digits)]
    note = "Click a column name to sort. Layers and heads are counted from 1 here, and from 0 in heads.csv."
    return make_table("All heads", titles, rows, right=range(1, len(titles)), note=note, css="numbers small sortable")


def deposits_table(audit: Audit) -> Table:
    """How the effects of each layer are distributed over its heads."""
    rows, digits = [], digits_of("effect", audit)
    for layer in audit.layers:
        if deposit := layer.deposit if audit.effect else {}:
            top = sentences.top_head(audit, layer) if deposit.get("top_share") is not None else None
            row = [HeadNames.of_audits(audit).short_layer(layer)]
            row += [fmt(deposit.get(name), digits) for name in ("helps", "harms")]
            row += [f"head {top.head + 1}" if top else DASH, fmt(top.effect if top else None, digits)]
            row += [effect_interval(top, digits) if top else DASH, percent(deposit.get("top_share"))]
            row += [f"{fmt(deposit.get('effective_heads'), 1)} of {layer.heads}", fmt(deposit.get("gini"), 2)]
            rows.append([*row, fmt(deposit.get("lead"), digits)])
    titles = ["Layer", "Positive", "Negative", "Largest", "Effect", "Interval", "Share"]
    titles += ["Effective heads", "Gini", "Lead"]
    right = (1, 2, *range(4, 10))
    return make_table("Deposit by layer", titles, rows, right=right, note=_DEPOSIT, css="numbers small")


def effect_interval(record: HeadRecord | BandRecord, digits: int) -> str:
    """The 95% interval of an effect; a dash if there is none."""
    ends = (record.effect_low, record.effect_high)
    return DASH if None in ends else " to ".join(fmt(end, digits) for end in ends)


def layers_table(audit: Audit, layers: Sequence[LayerRecord], name: str) -> Table:
    """Attention calls, and how much the recomputed values differ from the model's own."""
    rows: list[list[str | TableCell]] = []
    for layer in layers:
        shared = f" over {layer.key_heads}" if layer.key_heads != layer.heads else ""
        cap = "" if layer.softcap is None else f", capped at {layer.softcap:g}"
        row = [HeadNames.of_audits(audit).short_layer(layer), code(layer.module)]
        row += [f"{layer.heads}{shared}", str(layer.head_dim), f"{layer.scale:.4g}{cap}"]
        row += [visible_keys(layer), layer.position]
        row += map(to_sci, (layer.weights, layer.outputs, layer.tolerance))
        rows.append([*row, sentences.fmt_logit(layer.logit), layer.unknown or "known"])
    titles = ["Layer", "Module", "Heads", "Width", "Scale", "Visible keys", "Position"]
    titles += ["Weights", "Outputs", "Rounding", "Largest logit", "Shares"]
    return make_table(name, titles, rows, right=(2, 3, 4, 7, 8, 9, 10), note=_LAYERS, css="numbers small")


def visible_keys(layer: LayerRecord) -> str:
    """The keys that a query can attend to."""
    if layer.chunk is not None:
        return f"itself and earlier keys in its chunk of {layer.chunk}"
    if layer.window is not None:
        return f"itself and {layer.window - 1} {'earlier keys' if layer.causal else 'keys on either side'}"
    others = "keys that are not masked" if "mask" in layer.position else "all keys"
    return "itself and all earlier keys" if layer.causal else others


_MAP = (
    "Positional share: how much of the variance of a head’s logits the position of the key explains. Numbers: heads "
    "named below. Outlined: the strongest heads of a pattern. –: nearly uniform attention, no significant effect."
)
_FREQUENCY = (
    "Each mark is a head. x: mean of the RoPE frequencies, weighted by their share of the variance of its logits (0.1 "
    "rad per position is a full turn in 63 tokens)."
)
_SHARES = (
    "Shares of the variance of a head’s logits that are explained by the position of keys (positional), by their "
    "content (symbolic), and only by both together (interaction: the distance to the slanted line). They describe "
    "logits, not function: heads of an untrained model often look symbolic, too."
)
_USE = (
    "Share of the variance of the logits by RoPE pair, mean over the heads of a layer. Negative (blue): the frequency "
    "counteracts the others. None: dimensions without rotation. Bias: positional bias added to the logits."
)
BANDS = (
    "Each cell is a band of RoPE pairs whose rotation is frozen in all heads of a layer: their content still "
    "contributes to the logits, their position does not. Blue: freezing helps."
)
_DEPOSIT = (
    "Positive, negative: sums of the layer’s effects of either sign. The deposit describes how the positive effects d "
    "are distributed over heads; a dash means that their sum is within noise. Share: max d / Σd. Effective heads: "
    "(Σd)² / Σd². Gini: 0 if all heads are equal. Lead: largest minus second largest effect."
)
_LAYERS = (
    "“8 over 2”: 8 query heads share 2 key heads. Width: dimension of queries and keys. Scale: factor of q · k. "
    "Weights: largest difference of an attention weight; a dash if the model exposes none. Outputs: largest difference "
    "of a head’s output, relative to the layer’s largest. Rounding: largest weight difference that rounding explains."
)
_NOTABLE = (
    "The largest of each kind, in turns: effect, attention on the previous token, after an earlier copy (induction), "
    "on copies, retrieval score, positional share. Near-uniform heads without a "
    "significant effect are left out."
)


def audit_page(audit: Audit) -> Page:
    """The page of an audit."""
    name, chosen = "/".join(Path(sentences.model_name(audit)).parts[-2:]), notable_heads(audit)
    lines = "; ".join(describe_heads(audit, chosen))
    picture = Figure("map", "Heads by layer", map_chart(audit), _MAP, lines) if _map_column(audit) else None
    matter = "matter, and which " if audit.effect else ""
    sections = [*_position_sections(audit), _notable_section(audit, chosen)]
    sections += [*_effect_sections(audit), _proof_section(audit)]
    question, notes = f"Which heads of {name} {matter}depend on position?", list(_notes(audit))
    return Page("audit", f"{name}: audit", question, _answer(audit), picture, sections, notes, list(_warnings(audit)))


def _answer(audit: Audit) -> str:
    """The largest effect with its interval, then how many heads follow a pattern or depend on position."""
    has_effects = any(row.effect is not None for row in (*audit.heads, *audit.bands))
    texts = sentences.finding_sentences(audit)[:1] if has_effects else []
    counts = []
    for name, style in ROLES.items():
        if top := sentences.top_row(audit.heads, name):
            count = sum((getattr(head, name) or 0.0) > CUTOFFS[name] for head in audit.heads)
            best = f" (strongest {HeadNames.of_audits(audit).short(top[0])}, {fmt(top[1])})" if name != "first" else ""
            counts.append(
                f"{count} {style.title.lower().replace(' ', '-')} (over {CUTOFFS[name]:g}){best}".replace(") (", ", ")
            )
    if counts:
        texts.append(f"Attention patterns of the {len(audit.heads)} heads: {join_list(counts)}.")
    if active := [head for head in audit.heads if head.positional is not None and not is_idle(audit, head)]:
        both = [sum((getattr(head, share) or 0.0) > PATTERN_SHARE for head in active) for share in SHARES[:2]]
        num_idle = sum(is_idle(audit, head) for head in audit.heads)
        idle = "nearly uniform attention" + (" and no significant effect" if audit.effect else "")
        note = f"; {num_idle} with {idle} are not counted" if num_idle else ""
        texts.append(f"The logits of {both[0]} depend mostly on position, of {both[1]} mostly on content{note}.")
    return " ".join(texts) or "No values are known for any head."


def _warnings(audit: Audit) -> Iterator[str]:
    if not sentences.is_proved(audit):
        yield (
            "Not proved: at least one layer differs from the model by more than the tolerance (listed below). Do not "
            "trust the numbers of its heads."
        )
    for which, reason in sentences.unknown_layers(audit)[:4]:
        yield f"Shares unknown in {which}. Reason: {reason.rstrip('.')}."
    if random := audit.about.get("random_weights"):
        yield (
            f"Random weights: tensors missing from the checkpoint and initialised randomly ({len(random)}): "
            f"{_first_names(random)}. Results downstream of them do not describe a trained model."
        )


def _notes(audit: Audit) -> Iterator[str]:
    yield f"Audited on {sentences.input_text(audit)}. Layers and heads are counted from 1."
    if unused := audit.about.get("unused_weights"):
        yield f"Unused weights of the checkpoint ({len(unused)}): {_first_names(unused)}."
    if token := audit.about.get("unused_bos"):
        yield f"The tokenizer has a beginning-of-text token, {token}, but does not add it to sequences."
    if not audit.effect:
        yield sentences.effects_text(audit)


def _first_names(items: Sequence[str]) -> str:
    return ", ".join(items[:5]) + (", …" if len(items) > 5 else "")


def _position_sections(audit: Audit) -> list[Section]:
    """Positional share against frequency, and the other shares."""
    details, use = [], frequency_use_chart(audit)
    if any(None not in (head.positional, head.symbolic, head.interaction) for head in audit.heads):
        shares = Figure("shares", "Positional and symbolic share", shares_chart(audit), _SHARES)
        details.append(Section("Positional, symbolic or both", [shares]))
    if use is not None:
        figure = Figure("use", "Use of RoPE frequencies", use, _USE)
        details.append(Section("Use of each frequency, by layer", [figure]))
    groups: dict[bool, list[float]] = {True: [], False: []}
    for head in audit.heads:
        if head.centre is not None and head.positional is not None:
            groups[head.positional > PATTERN_SHARE].append(2.0**head.centre)
    if not any(groups.values()):
        return [Section("Position or content?", details[0].parts, details[1:])] if details else []
    texts = {True: f"with a positional share over {PATTERN_SHARE:g}", False: f"with at most {PATTERN_SHARE:g}"}
    medians = [
        f"{sig_figs(median(values), 2)} in the {len(values)} heads {texts[over]}"
        for over, values in groups.items()
        if values
    ]
    figure = Figure("frequency", "Positional share by frequency", frequency_chart(audit), _FREQUENCY)
    text = f"Median of the mean frequency: {join_list(medians)} (rad per position)."
    return [Section("Do positional heads use fast frequencies?", [figure, text], details)]


def _notable_section(audit: Audit, chosen: dict[int, str]) -> Section:
    """The heads to look at, and all heads."""
    none = f"No head stands out by {'a pattern, a share or an effect' if audit.effect else 'a pattern or a share'}."
    parts = [_NOTABLE, notable_table(audit, chosen)] if chosen else [none]
    columns = [
        [name.replace("_", " "), COLUMNS[name] + (f" ({SOURCES[name]})" if name in SOURCES else "")]
        for name in known_columns(audit)
    ]
    details = [
        Section(f"All {len(audit.heads)} heads", [heads_table(audit)], id="heads"),
        Section("What the columns mean", [make_table("Columns", [], columns, css="facts")]),
        Section("More findings", sentences.finding_sentences(audit)),
    ]
    return Section("Which heads should I look at?", parts, [detail for detail in details if detail.parts], id="look")


def _effect_sections(audit: Audit) -> Iterator[Section]:
    """The effects of heads and of frequency bands, whichever were measured."""
    if top := sentences.top_row(audit.heads, "effect"):
        note = f" Lines: 95% intervals {sentences.intervals_over(audit)}." * ("effect_low" in known_columns(audit))
        caption = f"Each mark is a head, above its layer.{note}"
        figure = Figure("effects", f"Effect of {sentences.action(audit)} each head", effects_chart(audit), caption)
        head = HeadNames.of_audits(audit).head(top[0])
        text = f"{sentences.effects_text(audit)} Largest: {sig_figs(top[1])}, for {head}."
        table = deposits_table(audit)
        yield Section(
            "Which heads matter?", [figure, text], [Section("Deposit by layer", [table])] if table.body else []
        )
    if top_band := sentences.top_row(audit.bands, "effect"):
        band, layer = top_band[0], HeadNames.of_audits(audit).layer(audit.layer_of(top_band[0]))
        location = f"pairs {band.first + 1} to {band.last + 1} in {layer}"
        text = f"{sentences.effects_text(audit)} Largest: {sig_figs(band.effect)}, for {location}."
        figure = Figure("bands", "Effect of freezing each band", bands_chart(band_rows(audit)), BANDS)
        yield Section("Which frequencies matter?", [figure, text])


def _proof_section(audit: Audit) -> Section:
    """Whether the recomputed attention is the model's, then layers, settings and tokens."""
    failed = [layer for layer in audit.layers if not sentences.is_within_tolerance(layer)]
    tables = [layers_table(audit, failed, "Layers above the tolerance")] if failed else []
    text = f"Above tolerance: {layer_spans(HeadNames.of_audits(audit), failed)}."
    text = text if failed else "All layers are within tolerance."
    details = [
        Section(f"All {len(audit.layers)} layers", [layers_table(audit, audit.layers, "Layers")]),
        Section("Settings", [settings_table(audit.about.items())]),
    ]
    if audit.words:
        tokens = Markup("<p><code>{}</code></p>").format(" ".join(audit.words[:_MAX_TOKENS]))
        details.append(Section(f"First tokens (up to {_MAX_TOKENS}) of the first sequence", [tokens]))
    return Section("Is it proved?", [f"{text} {sentences.proof_text(audit)}", *tables], details, id="proof")
