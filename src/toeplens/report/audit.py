"""The page of an audit: the heads of a model that are worth a look, what they attend to, and whether it is proved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import floor, log10, pi
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from markupsafe import Markup

from toeplens.ground.words import fixed, listed, percent, power, significant
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
_LEAST = 0.2  # a share from which on a head may be one to look at
_TOKENS = 400  # tokens of the first sequence that are shown
ROLES = {  # kinds of heads by column
    "previous": Style("Previous token", COLOURS["blue"], "circle"),
    "induction": Style("Induction", COLOURS["green"], "diamond"),
    "retrieval": Style("Retrieval", COLOURS["purple"], "triangle-down"),
    "duplicate": Style("Duplicate token", COLOURS["cyan"], "triangle-right"),
    "first": Style("First token", COLOURS["brown"], "triangle-left"),
}
LIMITS = {**dict.fromkeys(ROLES, PATTERN), "retrieval": RETRIEVES}  # a head is of a kind if its value is larger
OTHER, IDLE = Style("Other", COLOURS["grey"]), Style("Near-uniform, no effect", COLOURS["pink"], "cross")
_REASONS = {  # to look at a head
    "effect": "effect",
    "previous": "attention on the previous token",
    "induction": "attention after an earlier copy (induction)",
    "retrieval": "retrieval score",
    "duplicate": "attention on earlier copies",
    "positional": "positional share",
}
_TIPS = {
    "positional": "Positional|.2f",
    "symbolic": "Symbolic|.2f",
    **{name: f"{style.title}|.2f" for name, style in ROLES.items()},
    "distance": "Mean distance|.1f",
    "frequency": "Mean frequency|.2~r",
    "effect": "Effect|.3~r",
}


def known(audit: AuditRecord) -> list[str]:
    """The columns of numbers that are known for at least one head."""
    return [name for name in NUMBERS if any(getattr(head, name) is not None for head in audit.heads)]


def digits_of(column: str, *audits: AuditRecord) -> int:
    """Decimals of a column; for effects, enough to show three significant digits of the largest."""
    if column not in EFFECTS:
        return {"distance": 1, "half_distance": 1, "centre": 2, "dead": 0}.get(column, 3)
    size = max((abs(head.effect or 0.0) for audit in audits for head in audit.heads), default=0.0)
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
    return next((style for name, style in ROLES.items() if (getattr(head, name) or 0.0) > LIMITS[name]), OTHER)


def to_look_at(audit: AuditRecord) -> dict[int, str]:
    """Heads to look at, by index in the record, each with its reason: the largest of each kind, in turns."""
    values: dict[str, dict[int, float]] = {name: {} for name in _REASONS}
    for i, head in enumerate(audit.heads):
        for name in _REASONS if not idle(audit, head) else ():
            least = {"effect": 0.0, "retrieval": RETRIEVES}.get(name, _LEAST)
            value, low = getattr(head, name), head.effect_low if name == "effect" else None
            if value is not None and value > least and (low is None or low > 0):
                values[name][i] = value
    found: dict[int, str] = {}
    for _ in range(MOST):
        for name, own in values.items():
            free = [i for i in own if i not in found]
            if free and len(found) < MOST:
                found[max(free, key=lambda i: own[i])] = name

    def order(i: int) -> tuple[int, float]:  # by pattern, the strongest first
        name = found[i] if found[i] == "effect" else _pattern(audit, audit.heads[i], found[i]) or found[i]
        return list(_REASONS).index(name), -getattr(audit.heads[i], name)

    return {i: found[i] for i in sorted(found, key=order)}


def _pattern(audit: AuditRecord, head: HeadRecord, reason: str) -> str:
    """The column of a head's pattern, except attention on the first token, or else of the reason to look at it."""
    style = role(audit, head)
    own = next((name for name, each in ROLES.items() if each is style and name != "first"), "")
    return own or (reason if reason in ROLES else "")


def named(audit: AuditRecord, chosen: dict[int, str]) -> list[str]:
    """The chosen heads in numbered lines, such as L9 H8: previous token 0.84, positional 0.83."""
    lines = []
    for n, (i, reason) in enumerate(chosen.items(), 1):
        head = audit.heads[i]
        told = [
            f"{ROLES[name].title.lower()} {fixed(getattr(head, name))}"
            for name in (_pattern(audit, head, reason),)
            if name
        ]
        told += [f"positional {fixed(head.positional)}"] if head.positional is not None else []
        told += [f"effect {significant(head.effect)}"] if head.effect is not None else []
        lines.append(f"{n}  {Names.of(audit).short(head)}: {', '.join(told)}")
    return lines


def head_rows(audit: AuditRecord, columns: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The heads as rows of charts, with some columns of numbers; ``frequency`` is the mean RoPE frequency used."""
    called, rows = Names.of(audit), []
    for head in audit.heads:
        row = {
            "name": called.short(head),
            "place": place_title((head.side, head.kind)),
            "role": role(audit, head).title,
        }
        row |= {"layer": head.layer + 1, "head": head.head + 1}
        own = {"frequency": None if head.centre is None else 2.0**head.centre}
        rows.append(row | {name: own[name] if name in own else getattr(head, name) for name in columns})
    return rows


def _head_tips(columns: Iterable[str]) -> list[Any]:
    return tooltip(name="Head", role="Kind", **{name: _TIPS[name] for name in columns if name in _TIPS})


def _by_place(chart: Chart, audit: AuditRecord) -> Chart:
    """A panel for each side and kind of attention, if there are several."""
    places = Names.of(audit).places
    return chart if len(places) < 2 else grid(chart, "place", map(place_title, places))


def _kinds(audit: AuditRecord) -> list[Style]:
    """The kinds of heads that occur, for the legend."""
    found = {role(audit, head) for head in audit.heads}
    return [style for style in (*ROLES.values(), OTHER, IDLE) if style in found]


def _map_column(audit: AuditRecord) -> str:
    """The column that colours the map of heads; empty if none is known."""
    return next((name for name in ("positional", "previous", "first", "entropy") if name in known(audit)), "")


def map_chart(audit: AuditRecord) -> Chart:
    """Heads by layer, coloured by positional share; the heads to look at are numbered, outlined and named."""
    column, chosen = _map_column(audit), to_look_at(audit)
    columns = [column, *(name for name in _TIPS if name in known(audit) and name != column)]
    rows, order = head_rows(audit, columns), {i: str(n) for n, i in enumerate(chosen, 1)}
    for i, (row, head) in enumerate(zip(rows, audit.heads, strict=True)):
        pattern = _pattern(audit, head, chosen.get(i, ""))
        row["mark"] = order.get(i, "–" if idle(audit, head) else "")
        row["outline"] = ROLES[pattern].title if pattern else None
    title = f"{column} share" if column in SHARES else column
    lines = ["Heads to look at", *named(audit, chosen)] if chosen else []
    return numbered_map(audit, rows, column, 1.0, title, lines, _head_tips(columns))


def numbered_map(
    audit: AuditRecord,
    rows: Sequence[dict[str, Any]],
    column: str,
    end: float,
    title: str,
    lines: Sequence[str],
    tips: Sequence[Any],
) -> Chart:
    """A map of heads, each with a ``mark`` in its cell and an ``outline``; lines, the first a title, are below it."""
    layers, heads = (sorted({row[name] for row in rows}) for name in ("layer", "head"))
    axes = names("layer", layers, "layer"), names("head", heads, "head")
    size = max(9, min(22, 440 // len(heads)))
    made = heat(rows, *axes, column, title=title, domain=(0.0, end), tips=tips, size=size, marks="mark")
    if kinds := [style for style in ROLES.values() if style.title in {row["outline"] for row in rows}]:
        scale = alt.Scale(domain=[each.title for each in kinds], range=[each.colour for each in kinds])
        legend = alt.Legend(symbolType="square", orient="bottom")
        stroke = alt.Stroke(field="outline", type="nominal", title=None, scale=scale, legend=legend)
        frame = alt.Chart().mark_rect(filled=False, strokeWidth=2.5).transform_filter("datum.outline != null")
        frame = frame.encode(x=alt.X(**axes[0]), y=alt.Y(**axes[1]), stroke=stroke, tooltip=list(tips))
        made = alt.layer(*made.layer, frame, data=made.data).properties(height=made.height)
    made = _by_place(made, audit)
    below = alt.Title(lines[0], subtitle=list(lines[1:]), orient="bottom", offset=8) if lines else None
    return made.properties(title=below) if below else made


def frequency_chart(audit: AuditRecord) -> Chart:
    """Heads by the mean frequency that they use and their positional share."""
    columns = ("positional", "frequency")
    rows = [row for row in head_rows(audit, columns) if None not in (row["frequency"], row["positional"])]
    low, high = (floor(log10(of(row["frequency"] for row in rows))) for of in (min, max))
    powers = [10.0**each for each in range(low, high + 2)]
    title = "mean RoPE frequency used (rad per position)"
    x = number("frequency", title, kind="log", format="~g", values=powers, domain=[powers[0], powers[-1]])
    y = number("positional", "positional share", domain=[0, 1], format=".1f")
    marks = alt.Chart(data(rows)).mark_point(opacity=0.65).properties(height=300)
    look = looks("role", _kinds(audit))
    return _by_place(marks.encode(x=alt.X(**x), y=alt.Y(**y), tooltip=_head_tips(columns), **look), audit)


def shares_chart(audit: AuditRecord) -> Chart:
    """Heads by positional and symbolic share."""
    size = "effect" if audit.effect == "loss" and "effect" in known(audit) else ""
    columns = [*SHARES, *([size] if size else [])]
    rows = [row for row in head_rows(audit, columns) if None not in [row[share] for share in SHARES]]
    for row in rows if size else ():
        row[size] = max(0.0, row[size] or 0.0)
    return plane(rows, _kinds(audit), tips=_head_tips(columns), series="role", size=size)


def use_chart(audit: AuditRecord) -> Chart | None:
    """Mean share of the logits' variance in each RoPE pair, by layer; None if unknown."""
    called, rows = Names.of(audit), []
    for layer in audit.layers:
        if found := [head.variance_use for head in audit.of(layer) if head.variance_use]:
            turns = [None, *layer.frequencies, None]
            pairs = ["none", *map(str, range(1, len(turns) - 1)), "bias"]
            for pair, turn, value in zip(pairs, turns, np.mean(found, axis=0).tolist(), strict=True):
                row = {"layer": called.short_layer(layer), "pair": pair, "value": value, "frequency": turn, "mark": ""}
                rows.append(row | {"wavelength": 2 * pi / abs(turn) if turn else None})
    if not rows:
        return None
    used = {row["pair"] for row in rows if row["value"] or row["frequency"] is not None}
    rows = [row for row in rows if row["pair"] in used]
    pairs = sorted(used, key=lambda pair: {"none": 0.5, "bias": 1e9}.get(pair) or float(pair))
    tips = tooltip(layer="Layer", pair="Pair", value="Share|.3f", frequency="Frequency|.3~g", wavelength="Tokens|,.0f")
    end = max(abs(row["value"]) for row in rows) or 1.0
    low = -end if min(row["value"] for row in rows) < -0.01 * end else 0.0
    axes = names("pair", pairs, "RoPE pair (1: fastest)"), names("layer", [row["layer"] for row in rows], None)
    return heat(rows, *axes, "value", title="share", domain=(low, end), tips=tips, marks="mark")


def effects_chart(audit: AuditRecord) -> Chart:
    """The effect of each head above its layer, with its interval; the largest are named."""
    counts = {layer.place: max(1, layer.heads) for layer in audit.layers}
    columns = [name for name in (*EFFECTS, "positional") if name in known(audit)]
    rows = [row for row in head_rows(audit, columns) if row["effect"] is not None]
    measured = [head for head in audit.heads if head.effect is not None]
    top = sorted(measured, key=lambda head: -(head.effect or 0.0))[:5]
    for row, head in zip(rows, measured, strict=True):
        row["at"] = head.layer + 1 + 0.72 * ((head.head + 0.5) / counts[head.place] - 0.5)
        row["label"] = f"L{head.layer + 1} H{head.head + 1}" if head in top else None
    layers = sorted({row["layer"] for row in rows})
    x = number("at", "layer", domain=[layers[0] - 0.6, layers[-1] + 0.6], values=layers, grid=False, format="d")
    title = "effect on the loss (nats per token)" if audit.effect == "loss" else "effect on the last hidden states"
    y = alt.Y(**number("effect", title, format="~g"))
    base = alt.Chart(data(rows)).encode(x=alt.X(**x))
    ends = {"y": alt.Y(field="effect_low", type="quantitative"), "y2": alt.Y2(field="effect_high")}
    bars = [base.mark_rule(opacity=0.4).encode(**ends)] if "effect_low" in columns else []
    points = base.mark_point(size=32).encode(y=y, tooltip=_head_tips(columns), **looks("role", _kinds(audit)))
    text = base.mark_text(dy=-9).transform_filter("datum.label != null").encode(y=y, text=alt.Text("label:N"))
    return _by_place(alt.layer(*bars, points, text).properties(height=280), audit)


def band_rows(audit: AuditRecord) -> list[dict[str, Any]]:
    """The effect of each frequency band of each layer."""
    return [
        {
            "layer": Names.of(audit).short_layer(audit.layer_of(band)),
            "band": f"{band.first + 1}–{band.last + 1}",
            "effect": band.effect,
            "interval": interval(band, 3),
            "turns": f"{significant(band.fastest)} to {significant(band.slowest)} rad per position",
        }
        for band in audit.bands
    ]


def bands_chart(rows: Sequence[dict[str, Any]]) -> Chart:
    """The effect of freezing each frequency band, by layer."""
    bands = sorted({row["band"] for row in rows}, key=lambda band: [int(end) for end in band.split("–")])
    end = max((abs(row["effect"]) for row in rows if row["effect"] is not None), default=0.0) or 1e-6
    tips = tooltip(layer="Layer", band="Pairs", turns="Frequencies", effect="Effect|.3~r", interval="95% interval")
    axes = names("band", bands, "RoPE pairs (1: fastest)"), names("layer", [row["layer"] for row in rows], None)
    return heat(rows, *axes, "effect", title="effect", domain=(-end, end), tips=tips, form=".3~f")


def look_table(audit: AuditRecord, chosen: dict[int, str]) -> Table:
    """The heads to look at, each with its reason."""
    shown = [name for name in (*SHARES[:2], *ROLES, "distance", "effect") if name in known(audit)]
    rows: list[list[str | Cell]] = []
    for n, (i, reason) in enumerate(chosen.items(), 1):
        head = audit.heads[i]
        rank = 1 + sum((getattr(each, reason) or 0.0) > getattr(head, reason) for each in audit.heads)
        order = "Largest" if rank == 1 else f"{rank}{({2: 'nd', 3: 'rd'}).get(rank, 'th')} largest"
        digits = {name: min(digits_of(name, audit), 12 if name == "effect" else 2) for name in shown}
        numbers = [fixed(getattr(head, name), count) for name, count in digits.items()]
        rows.append([f"{n}  {Names.of(audit).short(head)}", f"{order} {_REASONS[reason]}", *numbers])
    titles = ["Head", "Why", *map(str.capitalize, shown)]
    return make_table("Heads to look at", titles, rows, right=range(2, len(titles)), css="numbers small")


def heads_table(audit: AuditRecord) -> Table:
    """All heads with every known number; layers and heads are counted from 1."""
    digits = {name: digits_of(name, audit) for name in known(audit)}
    rows = [
        [Names.of(audit).short(head), str(head.layer + 1), str(head.head + 1)]
        + [fixed(getattr(head, name), count) for name, count in digits.items()]
        for head in audit.heads
    ]
    titles = ["head", "layer", "index in layer", *(name.replace("_", " ") for name in digits)]
    note = "Click a column name to sort. Layers and heads are counted from 1 here, and from 0 in heads.csv."
    return make_table("All heads", titles, rows, right=range(1, len(titles)), note=note, css="numbers small sortable")


def deposits_table(audit: AuditRecord) -> Table:
    """How the effects of each layer are distributed over its heads."""
    rows, digits = [], digits_of("effect", audit)
    for layer in audit.layers:
        if found := layer.deposit if audit.effect else {}:
            top = words.top_head(audit, layer) if found.get("top_share") is not None else None
            row = [Names.of(audit).short_layer(layer), *(fixed(found.get(name), digits) for name in ("helps", "harms"))]
            row += [f"head {top.head + 1}" if top else DASH, fixed(top.effect if top else None, digits)]
            row += [interval(top, digits) if top else DASH, percent(found.get("top_share"))]
            row += [f"{fixed(found.get('effective_heads'), 1)} of {layer.heads}", fixed(found.get("gini"), 2)]
            rows.append([*row, fixed(found.get("lead"), digits)])
    titles = [
        "Layer",
        "Positive",
        "Negative",
        "Largest",
        "Effect",
        "Interval",
        "Share",
        "Effective heads",
        "Gini",
        "Lead",
    ]
    right = (1, 2, *range(4, 10))
    return make_table("Deposit by layer", titles, rows, right=right, note=_DEPOSIT, css="numbers small")


def interval(one: HeadRecord | BandRecord, digits: int) -> str:
    """The 95% interval of an effect; a dash if there is none."""
    ends = (one.effect_low, one.effect_high)
    return DASH if None in ends else " to ".join(fixed(end, digits) for end in ends)


def layers_table(audit: AuditRecord, layers: Sequence[LayerRecord], name: str) -> Table:
    """Attention calls, and how much the recomputed values differ from the model's own."""
    rows: list[list[str | Cell]] = []
    for layer in layers:
        over = f" over {layer.key_heads}" if layer.key_heads != layer.heads else ""
        cap = "" if layer.softcap is None else f", capped at {layer.softcap:g}"
        row = [Names.of(audit).short_layer(layer), code(layer.module), f"{layer.heads}{over}", str(layer.head_dim)]
        row += [f"{layer.scale:.4g}{cap}", visible(layer), layer.position, power(layer.weights), power(layer.outputs)]
        rows.append([*row, power(layer.tolerance), words.size(layer.logit), layer.unknown or "known"])
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
    titles += ["Largest logit", "Shares"]
    return make_table(name, titles, rows, right=(2, 3, 4, 7, 8, 9, 10), note=_LAYERS, css="numbers small")


def visible(layer: LayerRecord) -> str:
    """The keys that a query can attend to."""
    if layer.chunk is not None:
        return f"itself and earlier keys in its chunk of {layer.chunk}"
    if layer.window is not None:
        return f"itself and {layer.window - 1} {'earlier keys' if layer.causal else 'keys on either side'}"
    others = "keys that are not masked" if "mask" in layer.position else "all keys"
    return "itself and all earlier keys" if layer.causal else others


_MAP = (
    "Positional share: how much of the variance of a head’s logits the position of the key explains. Numbers: heads "
    "named below. Outlined: the strongest heads of a pattern. –: nearly uniform attention, no effect."
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
_LOOK = (
    "The largest of each kind, in turns: effect, attention on the previous token, after an earlier copy (induction), "
    "on copies, retrieval score, positional share. Heads that do nothing are left out."
)


def audit_page(audit: Audit) -> Page:
    """The page of an audit."""
    name, chosen = "/".join(Path(words.model(audit)).parts[-2:]), to_look_at(audit)
    lines = "; ".join(named(audit, chosen))
    picture = Figure("map", "Heads by layer", map_chart(audit), _MAP, lines) if _map_column(audit) else None
    matter = "matter, and which " if audit.effect else ""
    sections = [*_position_sections(audit), _look_section(audit, chosen)]
    sections += [*_effect_sections(audit), _proof_section(audit)]
    question, notes = f"Which heads of {name} {matter}depend on position?", list(_notes(audit))
    return Page("audit", f"{name}: audit", question, _answer(audit), picture, sections, notes, list(_warnings(audit)))


def _answer(audit: Audit) -> str:
    """The largest effect with its interval, then how many heads follow a pattern or depend on position."""
    said = words.findings(audit)[:1] if any(each.effect is not None for each in (*audit.heads, *audit.bands)) else []
    counts = []
    for name, style in ROLES.items():
        if top := words.largest(audit.heads, name):
            count = sum((getattr(head, name) or 0.0) > LIMITS[name] for head in audit.heads)
            best = f" (strongest {Names.of(audit).short(top[0])}, {fixed(top[1])})" if name != "first" else ""
            counts.append(
                f"{count} {style.title.lower().replace(' ', '-')} (over {LIMITS[name]:g}){best}".replace(") (", ", ")
            )
    if counts:
        said.append(f"Attention patterns of the {len(audit.heads)} heads: {listed(counts)}.")
    if active := [head for head in audit.heads if head.positional is not None and not idle(audit, head)]:
        both = [sum((getattr(head, share) or 0.0) > PATTERN for head in active) for share in SHARES[:2]]
        without = sum(idle(audit, head) for head in audit.heads)
        less = f"; {without} that do nothing are not counted" if without else ""
        said.append(f"The logits of {both[0]} depend mostly on position, of {both[1]} mostly on content{less}.")
    return " ".join(said) or "No values are known for any head."


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


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:5]) + (", …" if len(items) > 5 else "")


def _position_sections(audit: Audit) -> list[Section]:
    """Positional share against frequency, and the other shares."""
    details, use = [], use_chart(audit)
    if any(None not in (head.positional, head.symbolic, head.interaction) for head in audit.heads):
        shares = Figure("shares", "Positional and symbolic share", shares_chart(audit), _SHARES)
        details.append(Section("Positional, symbolic or both", [shares]))
    if use is not None:
        figure = Figure("use", "Use of RoPE frequencies", use, _USE)
        details.append(Section("Use of each frequency, by layer", [figure]))
    groups: dict[bool, list[float]] = {True: [], False: []}
    for head in audit.heads:
        if head.centre is not None and head.positional is not None:
            groups[head.positional > PATTERN].append(2.0**head.centre)
    if not any(groups.values()):
        return [Section("Position or content?", details[0].parts, details[1:])] if details else []
    texts = {True: f"with a positional share over {PATTERN:g}", False: f"with at most {PATTERN:g}"}
    said = [
        f"{significant(median(each), 2)} in the {len(each)} heads {texts[over]}"
        for over, each in groups.items()
        if each
    ]
    figure = Figure("frequency", "Positional share by frequency", frequency_chart(audit), _FREQUENCY)
    text = f"Median of the mean frequency: {listed(said)} (rad per position)."
    return [Section("Do positional heads use fast frequencies?", [figure, text], details)]


def _look_section(audit: Audit, chosen: dict[int, str]) -> Section:
    """The heads to look at, and all heads."""
    parts = [_LOOK, look_table(audit, chosen)] if chosen else ["No head stands out by a pattern, a share or an effect."]
    columns = [
        [name.replace("_", " "), COLUMNS[name] + (f" ({SOURCES[name]})" if name in SOURCES else "")]
        for name in known(audit)
    ]
    details = [
        Section(f"All {len(audit.heads)} heads", [heads_table(audit)], id="heads"),
        Section("What the columns mean", [make_table("Columns", [], columns, css="facts")]),
        Section("More findings", words.findings(audit)),
    ]
    return Section("Which heads should I look at?", parts, [each for each in details if each.parts], id="look")


def _effect_sections(audit: Audit) -> Iterator[Section]:
    """The effects of heads and of frequency bands, whichever were measured."""
    if top := words.largest(audit.heads, "effect"):
        bars = f" Lines: 95% intervals {words.over(audit)}." * ("effect_low" in known(audit))
        caption = f"Each mark is a head, above its layer.{bars}"
        figure = Figure("effects", f"Effect of {words.done(audit)} each head", effects_chart(audit), caption)
        text = f"{words.effects(audit)} Largest: {significant(top[1])}, for {Names.of(audit).head(top[0])}."
        table = deposits_table(audit)
        yield Section(
            "Which heads matter?", [figure, text], [Section("Deposit by layer", [table])] if table.body else []
        )
    if found := words.largest(audit.bands, "effect"):
        band, layer = found[0], Names.of(audit).layer(audit.layer_of(found[0]))
        place = f"pairs {band.first + 1} to {band.last + 1} in {layer}"
        text = f"{words.effects(audit)} Largest: {significant(band.effect)}, for {place}."
        figure = Figure("bands", "Effect of freezing each band", bands_chart(band_rows(audit)), BANDS)
        yield Section("Which frequencies matter?", [figure, text])


def _proof_section(audit: Audit) -> Section:
    """Whether the recomputed attention is the model's, then layers, settings and tokens."""
    failed = [layer for layer in audit.layers if not words.within(layer)]
    shown = [layers_table(audit, failed, "Layers above the tolerance")] if failed else []
    said = f"Above tolerance: {layer_spans(Names.of(audit), failed)}." if failed else "All layers are within tolerance."
    details = [
        Section(f"All {len(audit.layers)} layers", [layers_table(audit, audit.layers, "Layers")]),
        Section("Settings", [settings_table(audit.about.items())]),
    ]
    if audit.words:
        tokens = Markup("<p><code>{}</code></p>").format(" ".join(audit.words[:_TOKENS]))
        details.append(Section(f"First tokens (up to {_TOKENS}) of the first sequence", [tokens]))
    return Section("Is it proved?", [f"{said} {words.proof(audit)}", *shown], details, id="proof")
