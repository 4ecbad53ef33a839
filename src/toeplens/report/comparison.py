"""The page that compares two audits: two checkpoints, a base model and a variant, or two encodings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np

from toeplens.report import audit as single
from toeplens.report.audit import CUTOFFS, EFFECTS, IDLE, MAX_NOTABLE, ROLES, SHARES, digits_of, is_idle
from toeplens.report.charts import Chart, alt, chart_data, color_shape, facet_grid, line_chart, numeric, tooltip
from toeplens.report.page import Figure, Page, Section
from toeplens.report.tables import Table, TableCell, make_table
from toeplens.report.theme import Style, styles
from toeplens.studies.auditing import sentences
from toeplens.studies.auditing.record import Audit, HeadRecord, LayerRecord
from toeplens.studies.auditing.sentences import PATTERN_SHARE, HeadNames, layer_spans
from toeplens.utils.formatting import fmt, sig_figs

_OTHER_MEASURES = {"effect": "Effect", "distance": "Mean distance"}
_COLUMNS_0_TO_1 = {name: style.title for name, style in ROLES.items()}
_COLUMNS_0_TO_1 |= {"positional": "Positional share", "symbolic": "Symbolic share"}
COMPARED_COLUMNS = {**_OTHER_MEASURES, **_COLUMNS_0_TO_1}  # what is compared
_INPUT = ("text", "sequences", "tokens", "seed")
_FREQUENCIES = "fastest and slowest frequency"
_IGNORED_SETTINGS = ("seconds", "command", "input", "request")  # settings that are not compared
_BINS = 20
_SEEDS = "Each model is one training run, so differences are only indicative: other seeds give other numbers, too."
Pair = tuple[Audit, Audit]
Titles = tuple[str, str]
Rows = list[dict[str, Any]]


def comparison_page(first: Audit, second: Audit, titles: Titles) -> Page:
    """The page of two audits, called ``titles[0]`` and ``titles[1]``."""
    same_heads, same_effects = have_same_heads(first, second), have_same_effects(first, second)
    pair = (first, second) if same_effects else (_without_effects(first), _without_effects(second))
    rows = change_rows(pair) if same_heads else []
    notes = [f"{_SEEDS} Layers and heads are counted from 1."]
    bands = list(_band_sections(pair, titles))
    sections = [
        *_change_sections(pair, titles, rows),
        Section("What kinds of heads are there?", [kinds_table(pair, titles)], id="kinds"),
        *bands,
        _settings_section((first, second), titles, same_heads=same_heads),
    ]
    page_title, question = f"{titles[0]} and {titles[1]}: two audits", f"What changed from {titles[0]} to {titles[1]}?"
    warnings = list(_warnings((first, second), titles, same_heads=same_heads, same_effects=same_effects))
    answer = " ".join([_answer(pair, titles, rows), *(str(section.parts[1]) for section in bands)]).strip()
    return Page("compare", page_title, question, answer, _picture(pair, titles, rows), sections, notes, warnings)


def have_same_heads(first: Audit, second: Audit) -> bool:
    """Whether both audits have the same heads in the same order."""
    places, others = ([(*head.layer_key, head.head) for head in audit.heads] for audit in (first, second))
    return places == others


def have_same_effects(first: Audit, second: Audit) -> bool:
    """Whether both audits measured the same kind of effect by the same method, or only one measured effects."""
    return len({(audit.effect, audit.method) for audit in (first, second) if audit.effect}) < 2


def _without_effects(audit: Audit) -> Audit:
    heads = tuple(replace(head, **dict.fromkeys(EFFECTS)) for head in audit.heads)
    return replace(audit, heads=heads, bands=())


def _value(audit: Audit, head: HeadRecord, measure: str) -> float | None:
    """A head's value; None for the shares of a head that does nothing, whose logits hardly vary."""
    return None if measure in SHARES and is_idle(audit, head) else getattr(head, measure)


def _values(audit: Audit, measure: str) -> list[float]:
    return [value for head in audit.heads if (value := _value(audit, head, measure)) is not None]


def change_rows(pair: Pair) -> Rows:
    """Each head and measure that both audits know: both values, and the change relative to the spread over heads.

    The spread is the standard deviation of the measure over the heads of both models.
    """
    head_names, rows = HeadNames.of_audits(pair[0]), []
    for measure, title in COMPARED_COLUMNS.items():
        changes, digits = [], digits_of(measure, *pair)
        for heads in zip(pair[0].heads, pair[1].heads, strict=True):
            before, after = (_value(audit, head, measure) for audit, head in zip(pair, heads, strict=True))
            if before is not None and after is not None:
                is_one_idle = any(is_idle(audit, head) for audit, head in zip(pair, heads, strict=True))
                row = {"name": head_names.short(heads[0]), "measure": title, "first": before, "second": after}
                row["change"] = f"{fmt(before, digits)} → {fmt(after, digits)}"
                changes.append(row | {"kind": IDLE.title if is_one_idle else "Other heads"})
        spread = float(np.std([row[end] for row in changes for end in ("first", "second")])) if changes else 0.0
        rows += [row | {"size": abs(row["second"] - row["first"]) / (spread or 1.0)} for row in changes]
    return rows


def _largest_changes(rows: Rows, by: str) -> Rows:
    """For each head or measure the row with the largest change, the largest first; without changes of 0."""
    largest: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["size"]):
        largest.setdefault(row[by], row)
    return [row for row in largest.values() if row["size"]]


def _change(row: dict[str, Any]) -> str:
    return f"{row['name']}: {row['measure'].lower()} {row['change']}"


def map_chart(pair: Pair, rows: Rows) -> Chart:
    """Heads by layer, coloured by their largest change; the ten that changed most are numbered and named."""
    top = {row["name"]: row for row in _largest_changes(rows, "name")}
    lines = [f"{n}  {_change(row)}" for n, row in enumerate(list(top.values())[:MAX_NOTABLE], 1)]
    marks = {name: str(n) for n, name in enumerate(list(top)[:MAX_NOTABLE], 1)}
    cells = []
    for head in single.head_rows(pair[0]):
        row = top.get(head["name"], {"size": 0.0, "measure": "none", "change": ""})
        head |= {name: row[name] for name in ("size", "measure", "change")}
        cells.append(head | {"mark": marks.get(head["name"], ""), "outline": None})
    tips = tooltip(name="Head", measure="Changed most", change="From, to", size="Standard deviations|.2f")
    end = max(cell["size"] for cell in cells) or 1.0
    title = "largest change (SD)"
    return single.head_map(pair[0], cells, "size", end, title, ["Changed most", *lines] if lines else [], tips)


def heads_chart(rows: Rows, titles: Titles) -> Chart:
    """Each head in both models, a panel per measure from 0 to 1; on the dotted line nothing changed."""
    shown = [row for row in rows if row["measure"] in _COLUMNS_0_TO_1.values()]
    measures = list(dict.fromkeys(row["measure"] for row in shown))
    ends: Rows = [
        {"measure": measure, "first": end, "second": end, "kind": None} for measure in measures for end in (0, 1)
    ]
    x, y = (
        numeric(end, title, domain=[0, 1], tickCount=4) for end, title in zip(("first", "second"), titles, strict=True)
    )
    base = alt.Chart(chart_data([*shown, *ends])).encode(x=alt.X(**x), y=alt.Y(**y))
    line = base.mark_line(strokeDash=[3, 3], strokeWidth=1, color="#858b95").transform_filter("datum.kind == null")
    kinds = [kind for kind in (Style("Other heads", "#2f6fe0"), IDLE) if kind.title in {row["kind"] for row in shown}]
    marks = base.mark_point(size=26, opacity=0.55).transform_filter("datum.kind != null")
    marks = marks.encode(tooltip=tooltip(name="Head", kind="Kind", change="From, to"), **color_shape("kind", kinds))
    return facet_grid(alt.layer(line, marks).properties(height=200), "measure", measures)


def changes_table(pair: Pair, titles: Titles, rows: Rows) -> Table:
    """For each measure the head that changed most, the mean change, and how alike the heads are."""
    table_rows: list[list[str | TableCell]] = []
    for measure, title in COMPARED_COLUMNS.items():
        if measure_rows := [row for row in rows if row["measure"] == title]:
            top, digits = max(measure_rows, key=lambda row: row["size"]), digits_of(measure, *pair)
            x, y = (np.array([row[end] for row in measure_rows]) for end in ("first", "second"))
            correlation = float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else None
            row = [title, top["name"] if top["size"] else "none", *(fmt(top[e], digits) for e in ("first", "second"))]
            table_rows.append(
                [*row, fmt(fmean(y - x), digits), str((y > x).sum()), str((y < x).sum()), fmt(correlation)]
            )
    columns = ["Measure", "Largest change in", *titles, "Mean change", "Heads higher", "Heads lower", "Correlation"]
    note = "Correlation: of the values in both models, over heads."
    return make_table("What changed most", columns, table_rows, right=range(2, 8), note=note, css="numbers small")


def _change_sections(pair: Pair, titles: Titles, rows: Rows) -> Iterator[Section]:
    if rows:
        parts: list[Any] = [changes_table(pair, titles, rows)]
        if any(row["measure"] in _COLUMNS_0_TO_1.values() for row in rows):
            parts.append(Figure("heads", "Each head in both models", heads_chart(rows, titles), _HEADS.format(*titles)))
        yield Section("What changed most?", parts)


_MAP = (
    "Each head is coloured by its largest change among effect, attention patterns, shares and distance, in standard "
    "deviations of that measure over the heads of both models. The numbered heads are named below."
)
_HEADS = "x is a head’s value in {}, y in {}. On the dotted line nothing changed."


def distribution_chart(pair: Pair, titles: Titles) -> Chart | None:
    """The distribution of each measure from 0 to 1 over the heads of each model; None if none is in both."""
    model_styles, rows = list(styles(zip(("first", "second"), titles, strict=True)).values()), []
    edges = np.linspace(0, 1, _BINS + 1)
    for measure, title in _COLUMNS_0_TO_1.items():
        model_values = [_values(audit, measure) for audit in pair]
        for style, values in zip(model_styles, model_values, strict=True) if all(model_values) else ():
            shares = np.histogram(np.clip(values, 0, 1), edges)[0] / len(values)
            pairs = zip((edges[:-1] + edges[1:]) / 2, shares, strict=True)
            rows += [{"measure": title, "series": style.title, "at": centre, "share": share} for centre, share in pairs]
    x, y = numeric("at", "value", tickCount=4), numeric("share", "share of heads", format=".0%", tickCount=4)
    chart = line_chart(rows, x, y, model_styles, points=False).properties(height=150)
    return facet_grid(chart, "measure", [row["measure"] for row in rows]) if rows else None


def _picture(pair: Pair, titles: Titles, rows: Rows) -> Figure | None:
    if rows:
        text = "; ".join(map(_change, _largest_changes(rows, "name")[:MAX_NOTABLE])) or "No head changed."
        return Figure("map", "Largest change of each head", map_chart(pair, rows), _MAP, text)
    chart = distribution_chart(pair, titles)
    return (
        None if chart is None else Figure("heads", "Share of heads by value", chart, f"In {_BINS} bins of equal width.")
    )


def _counts(audit: Audit) -> dict[str, str]:
    """The heads of each kind, near-uniform ones (`is_idle`) apart, and the medians."""
    limits = {**{name: CUTOFFS[name] for name in ROLES}, **dict.fromkeys(SHARES[:2], PATTERN_SHARE)}
    active = [head for head in audit.heads if not is_idle(audit, head)]
    counts = {IDLE.title: str(len(audit.heads) - len(active)), "All heads": str(len(audit.heads))}
    for name, title in _COLUMNS_0_TO_1.items():
        if values := [value for head in active if (value := getattr(head, name)) is not None]:
            counts[f"{title} over {limits[name]:g}"] = str(sum(value > limits[name] for value in values))
    for name, title in COMPARED_COLUMNS.items():
        if values := _values(audit, name):
            counts[f"Median: {title.lower()}"] = fmt(median(values), digits_of(name, audit))
    return counts


def kinds_table(pair: Pair, titles: Titles) -> Table:
    """How many heads of each kind both models have, and the median of each measure."""
    first, second = map(_counts, pair)
    rows = [[kind, first[kind], second[kind]] for kind in first if kind in second]
    note = "Near-uniform heads have no significant effect, if effects were measured. They are not counted otherwise."
    for audit, title in zip(pair, titles, strict=True):
        if heads := [HeadNames.of_audits(audit).short(head) for head in audit.heads if is_idle(audit, head)]:
            note += f" In {title}: {', '.join(heads[:12])}{', …' * (len(heads) > 12)}."
    return make_table("Kinds of heads", ["Heads", *titles], rows, right=(1, 2), note=note, css="numbers small")


def _answer(pair: Pair, titles: Titles, rows: Rows) -> str:
    """The three measures that changed most, or the medians, then the kinds of heads."""
    first, second = map(_counts, pair)
    diffs = {kind: f"{first[kind]} → {second[kind]}" for kind in first if first[kind] != second.get(kind, first[kind])}
    medians = {kind.partition(": ")[2]: change for kind, change in diffs.items() if kind.startswith("Median: ")}
    if not rows:
        text = "; ".join(f"{kind} {change}" for kind, change in medians.items())
        return f"Medians over heads, {titles[0]} → {titles[1]}: {text}." if text else "No values are known in both."
    if not (top := _largest_changes(rows, "measure")):
        return "No head changed."
    clear = sum(row["size"] > 1 for row in _largest_changes(rows, "name"))
    kinds = "; ".join(f"{kind.lower()}: {change}" for kind, change in diffs.items() if not kind.startswith("Median"))
    return (
        f"Changed most: {'; '.join(map(_change, top[:3]))}. {clear} of {len(pair[0].heads)} heads change by more than "
        f"one standard deviation over heads in some measure. Numbers of heads: {kinds or 'the same of each kind'}."
    )


def _warnings(pair: Pair, titles: Titles, *, same_heads: bool, same_effects: bool) -> Iterator[str]:
    for audit, title in zip(pair, titles, strict=True):
        if not sentences.is_proved(audit):
            yield f"{title} is not proved: a layer differs from the model by more than the tolerance."
    if inputs := [name for name in _INPUT if pair[0].about.get(name) != pair[1].about.get(name)]:
        yield (
            f"Different inputs ({', '.join(inputs)} differ). The models were not audited on the same input, so "
            "differences come from the models and their inputs."
        )
    if not same_effects:
        yield "Effects are not compared. The two audits measured different effects or used different methods."
    if not same_heads:
        yield "The models have different numbers of layers or heads, so heads are not compared one by one."


def _band_sections(pair: Pair, titles: Titles) -> Iterator[Section]:
    """The bands of both on one scale, and the difference if they have the same bands."""
    if not all(audit.bands for audit in pair):
        return
    panels, text = [*titles, f"{titles[1]} − {titles[0]}"], ""
    bands = [single.band_rows(audit) for audit in pair]
    rows = [row | {"model": title} for title, item in zip(titles, bands, strict=True) for row in item]
    if [(row["layer"], row["band"]) for row in bands[0]] == [(row["layer"], row["band"]) for row in bands[1]]:
        pairs = [item for item in zip(*bands, strict=True) if None not in [row["effect"] for row in item]]
        change = [
            row | {"effect": b["effect"] - row["effect"], "model": panels[2], "interval": "–"} for row, b in pairs
        ]
        i = max(range(len(pairs)), key=lambda i: abs(change[i]["effect"]), default=None)
        if i is not None:
            ends = (f"{sig_figs(row['effect'])} in {title}" for row, title in zip(pairs[i], titles, strict=True))
            text = (
                f"Band that changed most: pairs {change[i]['band']} in {change[i]['layer']}, from {' to '.join(ends)}."
            )
        rows += change
    chart = facet_grid(single.bands_chart(rows), "model", panels)
    figure = Figure("bands", "Effect of freezing each band", chart, single.BANDS)
    yield Section("Did the use of frequencies change?", [figure, text])


def _settings_section(pair: Pair, titles: Titles, *, same_heads: bool) -> Section:
    facts = [
        ["Model", *(f"{sentences.model_name(audit)} {audit.about.get('class') or ''}".strip() for audit in pair)],
        ["Heads", *(f"{len(audit.heads)} in {len(audit.layers)} attention calls" for audit in pair)],
        *([name, *map(of, pair)] for name, of in _SUMMARIES.items()),
    ]
    rows = [*settings_rows(pair), *(_layer_rows(pair) if same_heads else [])]
    differ = make_table("Settings that differ", ["Setting", *titles], rows, css="small")
    details = [Section("Both audits", [make_table("The two audits", ["Setting", *titles], facts, css="small")])]
    return Section("Which settings differ?", [differ if rows else "All settings are the same."], details, "settings")


_SUMMARIES = {"Audited on": sentences.input_text, "Proof": sentences.proof_text, "Effects": sentences.effects_text}


def settings_rows(pair: Pair) -> list[list[str | TableCell]]:
    """The settings of the audits that differ."""

    def text(value: Any) -> str:
        return "–" if value is None else "; ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)

    facts = []
    for audit in pair:
        values = {name: value for name, value in audit.about.items() if name not in _IGNORED_SETTINGS}
        values |= {"effect": audit.effect or "none", "method of effects": audit.method}
        facts.append(values | {"loss of the intact model": fmt(audit.baseline, 3)})
    rows = [[name.replace("_", " "), *(text(x.get(name)) for x in facts)] for name in facts[0] | facts[1]]
    return [row for row in rows if row[1] != row[2]]


def _layer_rows(pair: Pair) -> list[list[str | TableCell]]:
    """Differences between layers; layers with the same difference share one row."""
    groups: dict[tuple[str, str, str], list[LayerRecord]] = {}
    for a, b in zip(pair[0].layers, pair[1].layers, strict=True):
        same = len(a.frequencies) == len(b.frequencies) and np.allclose(a.frequencies, b.frequencies, 1e-3, 1e-9)
        facts, others = _layer_facts(a), _layer_facts(b)
        for name in facts:
            if facts[name] != others[name] and not (name == _FREQUENCIES and same):  # the same but for rounding
                groups.setdefault((name, facts[name], others[name]), []).append(a)
    head_names = HeadNames.of_audits(pair[0])
    return [[TableCell(name, (layer_spans(head_names, layers),)), x, y] for (name, x, y), layers in groups.items()]


def _layer_facts(layer: LayerRecord) -> dict[str, str]:
    frequencies = layer.frequencies
    return {
        "module": layer.module,
        "key heads": str(layer.key_heads),
        "width": str(layer.head_dim),
        "scale": f"{layer.scale:.4g}",
        "softcap": "none" if layer.softcap is None else f"{layer.softcap:g}",
        "visible keys": single.visible_keys(layer),
        "position": layer.position,
        _FREQUENCIES: f"{max(frequencies):.3g} and {min(frequencies):.3g} rad per position" if frequencies else "none",
    }
