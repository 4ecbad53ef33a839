"""The page that compares two audits: two checkpoints, a base model and a variant, or two encodings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from toeplens.ground.words import fixed, listed, significant
from toeplens.report import audit as one
from toeplens.report.audit import EFFECTS, IDLE, MOST, ROLES, SHARES, digits_of, idle
from toeplens.report.charts import (
    Chart,
    alt,
    curves,
    data,
    grid,
    heat,
    looks,
    names,
    number,
    tooltip,
)
from toeplens.report.page import Figure, Page, Section
from toeplens.report.tables import Cell, Table, make_table
from toeplens.report.theme import Style, styles
from toeplens.studies.auditing import words
from toeplens.studies.auditing.record import HeadRecord, LayerRecord
from toeplens.studies.auditing.result import Audit
from toeplens.studies.auditing.words import PATTERN, Names, layer_spans

MEASURES = {  # what is compared, in this order
    "effect": "Effect",
    "previous": "Previous token",
    "induction": "Induction",
    "retrieval": "Retrieval",
    "duplicate": "Duplicate token",
    "first": "First token",
    "positional": "Positional share",
    "symbolic": "Symbolic share",
    "distance": "Mean distance",
}
_INPUT = ("text", "sequences", "tokens", "seed")
_FREQUENCIES = "fastest and slowest frequency"
_PASSING = ("seconds", "command", "input", "request")  # settings that are not compared
_BINS = 20
Pair = tuple[Audit, Audit]
Titles = tuple[str, str]


def comparison_page(first: Audit, second: Audit, names: Titles) -> Page:
    """The page of two audits, named ``names[0]`` and ``names[1]``."""
    same, measured = aligned(first, second), comparable(first, second)
    pair = (first, second) if measured else (_without_effects(first), _without_effects(second))
    rows = change_rows(pair, names) if same else []
    return Page(
        "compare",
        f"{names[0]} and {names[1]}: two audits",
        f"What changed from {names[0]} to {names[1]}?" if same else f"How do {names[0]} and {names[1]} differ?",
        _answer(pair, names, rows),
        _picture(pair, names, rows),
        [
            *_change_sections(pair, names, rows),
            Section("What kinds of heads are there?", [kinds_table(pair, names), *_idle_text(pair, names)], id="kinds"),
            *_band_sections(pair, names),
            _settings_section(first, second, names, same=same),
        ],
        [
            "Layers and heads are counted from 1. Two single models are compared: trainings with other seeds "
            "differ, too, so differences are only indicative."
        ],
        list(_warnings(first, second, names, same=same, measured=measured)),
    )


def aligned(first: Audit, second: Audit) -> bool:
    """Whether both audits have the same heads in the same order."""
    places, others = ([(*head.place, head.head) for head in audit.heads] for audit in (first, second))
    return places == others


def comparable(first: Audit, second: Audit) -> bool:
    """Whether both audits measured the same kind of effect by the same method, or only one measured effects."""
    return len({(audit.effect, audit.method) for audit in (first, second) if audit.effect}) < 2


def _without_effects(audit: Audit) -> Audit:
    heads = tuple(replace(head, **dict.fromkeys(EFFECTS)) for head in audit.heads)
    return replace(audit, heads=heads, bands=())


def value_of(audit: Audit, head: HeadRecord, measure: str) -> float | None:
    """A head's value; None for the shares of a head that does nothing, whose logits hardly vary."""
    return None if measure in SHARES and idle(audit, head) else getattr(head, measure)


# ---- the same heads --------------------------------------------------------------------------------------------------


def change_rows(pair: Pair, names: Titles) -> list[dict[str, Any]]:
    """Each head and measure that both audits know: both values and the change, also relative to the spread over heads.

    The spread is the standard deviation of the measure over the heads of both models.
    """
    called, rows = Names.of(pair[0]), []
    for measure, title in MEASURES.items():
        known = [
            (heads[0], *found)
            for heads in zip(pair[0].heads, pair[1].heads, strict=True)
            if None not in (found := [value_of(a, h, measure) for a, h in zip(pair, heads, strict=True)])
        ]
        spread = float(np.std([values for _, *values in known])) if known else 0.0
        digits = digits_of(measure, *pair)
        for head, before, after in known:
            change, told = after - before, f"{fixed(before, digits)} → {fixed(after, digits)}"
            row = {"name": called.short(head), "layer": head.layer + 1, "head": head.head + 1}
            row |= {"place": words.place_title((head.side, head.kind)), "measure": title, "told": told}
            row |= {"first": before, "second": after, "change": change, "kind": "head"}
            rows.append(row | {"spreads": change / spread if spread else 0.0})
    nothing = {
        called.short(h)
        for h, other in zip(pair[0].heads, pair[1].heads, strict=True)
        if idle(pair[0], h) or idle(pair[1], other)
    }
    return [row | {"kind": IDLE.title if row["name"] in nothing else "Other heads"} for row in rows]


def top_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each head the measure that changed most; the heads that changed most first."""
    most: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -abs(row["spreads"])):
        most.setdefault(row["name"], row)
    return [row for row in most.values() if row["change"]]


def _line(row: dict[str, Any]) -> str:
    return f"{row['name']}: {row['measure'].lower()} {row['told']}"


def map_chart(pair: Pair, rows: list[dict[str, Any]]) -> Chart:
    """Heads by layer, coloured by their largest change; the ten that changed most are numbered and named."""
    top = {row["name"]: row for row in top_rows(rows)}
    lines = [f"{n}  {_line(row)}" for n, row in enumerate(list(top.values())[:MOST], 1)]
    marks = {name: str(n) for n, name in enumerate(list(top)[:MOST], 1)}
    cells = []
    for cell in one.head_rows(pair[0]):
        row = top.get(cell["name"], {"spreads": 0.0, "measure": "nothing changed", "told": ""})
        told = {"size": abs(row["spreads"]), "measure": row["measure"], "told": row["told"], "kind": None}
        cells.append({**cell, **told, "mark": marks.get(cell["name"], "")})
    tips = tooltip(name="Head", measure="Changed most", told="Values", size="Standard deviations|.2f")
    end = max(cell["size"] for cell in cells) or 1.0
    return one.numbered_map(pair[0], cells, "size", (0.0, end), "largest change in standard deviations", lines, tips)


def heads_chart(rows: list[dict[str, Any]], names: Titles) -> Chart:
    """Each head in both models, a panel per measure; on the dotted line nothing changed."""
    found = list(dict.fromkeys(row["measure"] for row in rows))
    lines = []
    for measure in found:
        values = [row[which] for row in rows if row["measure"] == measure for which in ("first", "second")]
        lines += [{"measure": measure, "first": end, "second": end, "kind": None} for end in (min(values), max(values))]
    kept = [{key: row[key] for key in ("measure", "name", "first", "second", "kind", "told")} for row in rows]
    kinds = [each for each in (Style("Other heads", "#2f6fe0"), IDLE) if each.title in {row["kind"] for row in rows}]
    x, y = (
        number(which, title, tickCount=4, format="~g") for which, title in zip(("first", "second"), names, strict=True)
    )
    base = alt.Chart(data([*kept, *lines])).encode(x=alt.X(**x), y=alt.Y(**y))
    line = base.mark_line(strokeDash=[3, 3], strokeWidth=1, color="#858b95").transform_filter("datum.kind == null")
    marks = base.mark_point(size=26, opacity=0.55).transform_filter("datum.kind != null")
    marks = marks.encode(tooltip=tooltip(name="Head", told="Values"), **looks("kind", kinds))
    return grid(alt.layer(line, marks).properties(height=190), "measure", found, free=("x", "y"))


def changes_chart(rows: list[dict[str, Any]]) -> Chart:
    """Change of each measure by layer and head, in standard deviations."""
    titles = list(dict.fromkeys(row["measure"] for row in rows))
    layers, heads = (sorted({row[name] for row in rows}) for name in ("layer", "head"))
    several = len({row["place"] for row in rows}) > 1
    cells = [row | {"measure": f"{row['measure']}, {row['place']}" if several else row["measure"]} for row in rows]
    cells = [
        {k: row[k] for k in ("measure", "name", "layer", "head", "told", "spreads")} | {"mark": ""} for row in cells
    ]
    titles = list(dict.fromkeys(row["measure"] for row in cells))
    axes = names("layer", layers, "layer"), names("head", heads, "head")
    tips = tooltip(name="Head", told="Values", spreads="Standard deviations|.2f")
    size = max(4, min(16, 200 // len(heads)))
    made = heat(cells, *axes, "spreads", title="change", domain=(-4, 4), tips=tips, size=size, marks="mark", form="d")
    return grid(made, "measure", titles, columns=3)


def changes_table(pair: Pair, names: Titles, rows: list[dict[str, Any]]) -> Table:
    """For each measure the head that changed most, the mean change, and how alike the heads are."""
    made: list[list[str | Cell]] = []
    for measure, title in MEASURES.items():
        own = [row for row in rows if row["measure"] == title]
        if not own:
            continue
        top, digits = max(own, key=lambda row: abs(row["change"])), digits_of(measure, *pair)
        x, y = (np.array([row[which] for row in own]) for which in ("first", "second"))
        alike = float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else None
        made.append(
            [title, top["name"] if top["change"] else "none", fixed(top["first"], digits), fixed(top["second"], digits)]
        )
        made[-1] += [fixed(fmean(y - x), digits), str(int((y > x).sum())), str(int((y < x).sum())), fixed(alike)]
    columns = ["Measure", "Largest change in", *names, "Mean change", "Heads higher", "Heads lower", "Correlation"]
    note = "Higher, lower: heads whose value increased or decreased. Correlation: of both models’ values over heads."
    return make_table("What changed most", columns, made, right=range(2, 8), note=note, css="numbers small")


def _change_sections(pair: Pair, names: Titles, rows: list[dict[str, Any]]) -> list[Section]:
    if not rows:
        return []
    figure = Figure("heads", "Each head in both models", heads_chart(rows, names), _HEADS.format(*names))
    maps = Figure("changes", "Change by layer and head", changes_chart(rows), _CHANGES.format(*names))
    details = [Section("Changes by layer and head", [maps])]
    return [Section("What changed most?", [changes_table(pair, names, rows), figure], details, "most")]


_MAP = (
    "Each head is coloured by its largest change among effect, attention patterns, shares and distance, in standard "
    "deviations of that measure over the heads of both models. The numbered heads are named below."
)
_HEADS = "One mark per head: x is its value in {}, y in {}. On the dotted line nothing changed."
_CHANGES = "{1} − {0}, in standard deviations over the heads of both models. Red: higher in {1}; blue: lower."


# ---- both cases ------------------------------------------------------------------------------------------------------


def distribution_chart(pair: Pair, names: Titles) -> Chart | None:
    """The distribution of each measure over the heads of each model; None if they have none in common."""
    looks, rows = styles(zip(("first", "second"), names, strict=True)), []
    for measure, title in MEASURES.items():
        both = [_values(audit, measure) for audit in pair]
        if all(both):
            edges = np.linspace(min(map(min, both)), max(map(max, both)) + 1e-9, _BINS + 1)
            for style, values in zip(looks.values(), both, strict=True):
                shares = np.histogram(values, edges)[0] / len(values)
                places = [fmean(ends) for ends in pairwise(edges)]
                pairs = zip(places, shares, strict=True)
                rows += [{"measure": title, "series": style.title, "at": x, "share": y} for x, y in pairs]
    if not rows:
        return None
    x, y = number("at", "value", tickCount=4), number("share", "share of heads", format=".0%", tickCount=4)
    made = curves(rows, x, y, looks.values(), points=False).properties(height=150)
    return grid(made, "measure", [row["measure"] for row in rows], free=("x", "y"))


def _values(audit: Audit, measure: str) -> list[float]:
    return [value for head in audit.heads if (value := value_of(audit, head, measure)) is not None]


def _picture(pair: Pair, names: Titles, rows: list[dict[str, Any]]) -> Figure | None:
    if rows:
        text = "; ".join(map(_line, top_rows(rows)[:MOST])) or "No head changed."
        return Figure("map", "Largest change of each head", map_chart(pair, rows), _MAP, text)
    chart = distribution_chart(pair, names)
    return chart and Figure("heads", "Distribution over heads", chart, "Share of each model’s heads, in 20 bins.")


def _counts(audit: Audit) -> dict[str, int | None]:
    """The heads of each kind; those that do nothing are a kind of their own."""
    active = [head for head in audit.heads if not idle(audit, head)]
    limits = {name: (f"{style.title}", least) for name, (style, least) in ROLES.items()}
    limits |= {name: (MEASURES[name], PATTERN) for name in SHARES[:2]}
    found: dict[str, int | None] = {}
    for name, (title, least) in limits.items():
        values = [value for head in active if (value := getattr(head, name)) is not None]
        found[f"{title} over {least:g}"] = sum(value > least for value in values) if values else None
    return found | {IDLE.title: len(audit.heads) - len(active), "All": len(audit.heads)}


def kinds_table(pair: Pair, names: Titles) -> Table:
    """How many heads of each kind there are in both models."""
    both = [_counts(audit) for audit in pair]
    rows = [
        [kind, *(str(each[kind]) for each in both)] for kind in both[0] if None not in [each[kind] for each in both]
    ]
    note = "Heads that do nothing are counted apart: they have no kind, and their shares are not compared."
    return make_table("Kinds of heads", ["Kind", *names], rows, right=(1, 2), note=note, css="numbers small")


def _idle_text(pair: Pair, titles: Titles) -> list[str]:
    """The heads that do nothing, by name."""
    found = []
    for audit, title in zip(pair, titles, strict=True):
        if heads := [Names.of(audit).short(head) for head in audit.heads if idle(audit, head)]:
            found.append(f"{', '.join(heads[:12])}{', …' * (len(heads) > 12)} in {title}")
    return [f"Heads that do nothing: {listed(found)}."] if found else []


def _answer(pair: Pair, titles: Titles, rows: list[dict[str, Any]]) -> str:
    """What changed most in patterns, shares and effects, and the kinds of heads; or the medians."""
    told = []
    if rows and (top := top_rows(rows)):
        by_measure: dict[str, dict[str, Any]] = {}
        for row in sorted(rows, key=lambda row: -abs(row["spreads"])):
            if row["change"]:
                by_measure.setdefault(row["measure"], row)
        lines = "; ".join(map(_line, list(by_measure.values())[:3]))
        clear = sum(abs(row["spreads"]) > 1 for row in top)
        told.append(
            f"Changed most: {lines}. {clear} of {len(pair[0].heads)} heads change by more than one standard deviation "
            "over heads in some measure."
        )
    elif rows:
        told.append("No head changed.")
    else:
        for measure in ("positional", "previous", "effect"):
            if all(both := [_values(audit, measure) for audit in pair]):
                ends = " and ".join(
                    f"{fixed(median(values), digits_of(measure, *pair))} ({title})"
                    for values, title in zip(both, titles, strict=True)
                )
                told.append(f"Median {MEASURES[measure].lower()}: {ends}.")
    counts = [_counts(audit) for audit in pair]
    kinds = [kind for kind in counts[0] if kind != "All" and None not in [each[kind] for each in counts]]
    moved = [
        f"{kind.lower()} {counts[0][kind]} → {counts[1][kind]}" for kind in kinds if counts[0][kind] != counts[1][kind]
    ]
    return (
        " ".join([*told, *([f"Numbers of heads: {'; '.join(moved)}."] if moved else [])]) or "Nothing can be compared."
    )


def _warnings(first: Audit, second: Audit, titles: Titles, *, same: bool, measured: bool) -> Iterator[str]:
    for audit, title in zip((first, second), titles, strict=True):
        if not words.proved(audit):
            yield f"{title} is not proved: a layer differs from the model by more than the tolerance."
    if inputs := [name for name in _INPUT if first.about.get(name) != second.about.get(name)]:
        yield (
            f"Different inputs ({', '.join(inputs)} differ). The models were not audited on the same input, so "
            "differences come from the models and their inputs."
        )
    if not measured:
        yield "Effects are not compared. The two audits measured different effects or used different methods."
    if not same:
        yield "The models have different numbers of layers or heads, so heads are not compared one by one."


def _band_sections(pair: Pair, titles: Titles) -> list[Section]:
    """The bands of both on one scale, and the difference if they have the same bands."""
    first, second = pair
    if not (first.bands and second.bands) or first.effect != second.effect:
        return []
    both = [one.band_rows(audit) for audit in pair]
    rows = [row | {"model": title} for title, each in zip(titles, both, strict=True) for row in each]
    panels, text = list(titles), ""
    if [(*band.place, band.first, band.last) for band in first.bands] == [
        (*band.place, band.first, band.last) for band in second.bands
    ]:
        panels.append(f"{titles[1]} − {titles[0]}")
        pairs = list(zip(both[0], both[1], strict=True))
        rows += [
            a | {"effect": b["effect"] - a["effect"], "model": panels[-1], "low": None, "high": None}
            for a, b in pairs
            if None not in (a["effect"], b["effect"])
        ]
        bands = zip(first.bands, second.bands, strict=True)
        a, b = max(bands, key=lambda each: abs((each[1].effect or 0.0) - (each[0].effect or 0.0)))
        text = (
            f"Largest change: {one.band_name(first, a)}, from {significant(a.effect)} in {titles[0]} to "
            f"{significant(b.effect)} in {titles[1]}."
        )
    chart = grid(one.bands_chart(rows), "model", panels)
    return [
        Section(
            "Did the frequencies change?", [Figure("bands", "Effect of freezing each band", chart, one.BANDS), text]
        )
    ]


# ---- settings --------------------------------------------------------------------------------------------------------


def _settings_section(first: Audit, second: Audit, titles: Titles, *, same: bool) -> Section:
    pair = (first, second)
    facts = [
        ["Model", *(f"{words.model(audit)} {audit.about.get('class') or ''}".strip() for audit in pair)],
        ["Heads", *(f"{len(audit.heads)} in {len(audit.layers)} attention calls" for audit in pair)],
        ["Audited on", *map(words.audited, pair)],
        ["Proof", *map(words.proof, pair)],
        ["Effects", *map(words.effects, pair)],
    ]
    rows = [*settings_rows(first, second), *(_layer_rows(first, second) if same else [])]
    differ = make_table("Settings that differ", ["Setting", *titles], rows, css="small")
    details = [Section("Both audits", [make_table("The two audits", ["", *titles], facts, css="small")])]
    return Section("Which settings differ?", [differ if rows else "All settings are the same."], details, "settings")


def settings_rows(first: Audit, second: Audit) -> list[list[str | Cell]]:
    """The settings of the audits that differ."""

    def told(value: Any) -> str:
        if isinstance(value, list | tuple):
            return "; ".join(map(str, value)) or "none"
        return "–" if value is None else str(value)

    known = [name for name in dict.fromkeys((*first.about, *second.about)) if name not in _PASSING]
    found = [(name, told(first.about.get(name)), told(second.about.get(name))) for name in known]
    found += [("effect", str(first.effect or "none"), str(second.effect or "none"))]
    found += [("method of effects", str(first.method or "–"), str(second.method or "–"))]
    found += [("loss of the intact model", fixed(first.baseline, 3), fixed(second.baseline, 3))]
    return [[name.replace("_", " "), a, b] for name, a, b in found if a != b]


def _layer_rows(first: Audit, second: Audit) -> list[list[str | Cell]]:
    """Differences between layers; layers with the same difference share one row."""
    found: dict[tuple[str, str, str], list[LayerRecord]] = {}
    for a, b in zip(first.layers, second.layers, strict=True):
        same = len(a.frequencies) == len(b.frequencies) and np.allclose(a.frequencies, b.frequencies, 1e-3, 1e-9)
        for (name, x), (_, y) in zip(_facts(a), _facts(b), strict=True):
            if x != y and not (name == _FREQUENCIES and same):  # the same up to how they were measured
                found.setdefault((name, x, y), []).append(a)
    called = Names.of(first)
    return [[Cell(name, (layer_spans(called, layers),)), x, y] for (name, x, y), layers in found.items()]


def _facts(layer: LayerRecord) -> Iterator[tuple[str, str]]:
    yield "module", layer.module
    yield "key heads", str(layer.key_heads)
    yield "width", str(layer.head_dim)
    yield "scale", f"{layer.scale:.4g}"
    yield "softcap", "none" if layer.softcap is None else f"{layer.softcap:g}"
    yield "visible keys", one.visible(layer)
    yield "position", layer.position
    turns = layer.frequencies
    yield _FREQUENCIES, f"{max(turns):.3g} and {min(turns):.3g} rad per position" if turns else "none"
