"""The page that compares two audits: two checkpoints, a base model and a variant, or two encodings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np

from toeplens.ground.words import fixed, significant
from toeplens.report import audit as single
from toeplens.report.audit import EFFECTS, IDLE, LIMITS, MOST, ROLES, SHARES, digits_of, idle
from toeplens.report.charts import Chart, alt, curves, data, grid, looks, number, tooltip
from toeplens.report.page import Figure, Page, Section
from toeplens.report.tables import Cell, Table, make_table
from toeplens.report.theme import Style, styles
from toeplens.studies.auditing import words
from toeplens.studies.auditing.record import HeadRecord, LayerRecord
from toeplens.studies.auditing.result import Audit
from toeplens.studies.auditing.words import PATTERN, Names, layer_spans

_OTHERS = {"effect": "Effect", "distance": "Mean distance"}
_FROM_0_TO_1 = {name: style.title for name, style in ROLES.items()}
_FROM_0_TO_1 |= {"positional": "Positional share", "symbolic": "Symbolic share"}
MEASURES = {**_OTHERS, **_FROM_0_TO_1}  # what is compared
_INPUT = ("text", "sequences", "tokens", "seed")
_FREQUENCIES = "fastest and slowest frequency"
_PASSING = ("seconds", "command", "input", "request")  # settings that are not compared
_BINS = 20
_SEEDS = "Each model is one training run, so differences are only indicative: other seeds give other numbers, too."
Pair = tuple[Audit, Audit]
Titles = tuple[str, str]
Rows = list[dict[str, Any]]


def comparison_page(first: Audit, second: Audit, titles: Titles) -> Page:
    """The page of two audits, called ``titles[0]`` and ``titles[1]``."""
    same, measured = aligned(first, second), comparable(first, second)
    pair = (first, second) if measured else (_without_effects(first), _without_effects(second))
    rows = change_rows(pair) if same else []
    notes = [f"{_SEEDS} Layers and heads are counted from 1."]
    bands = list(_band_sections(pair, titles))
    sections = [
        *_change_sections(pair, titles, rows),
        Section("What kinds of heads are there?", [kinds_table(pair, titles)], id="kinds"),
        *bands,
        _settings_section((first, second), titles, same=same),
    ]
    window, question = f"{titles[0]} and {titles[1]}: two audits", f"What changed from {titles[0]} to {titles[1]}?"
    warnings = list(_warnings((first, second), titles, same=same, measured=measured))
    answer = " ".join([_answer(pair, titles, rows), *(str(each.parts[1]) for each in bands)]).strip()
    return Page("compare", window, question, answer, _picture(pair, titles, rows), sections, notes, warnings)


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


def _value(audit: Audit, head: HeadRecord, measure: str) -> float | None:
    """A head's value; None for the shares of a head that does nothing, whose logits hardly vary."""
    return None if measure in SHARES and idle(audit, head) else getattr(head, measure)


def _values(audit: Audit, measure: str) -> list[float]:
    return [value for head in audit.heads if (value := _value(audit, head, measure)) is not None]


def change_rows(pair: Pair) -> Rows:
    """Each head and measure that both audits know: both values, and the change relative to the spread over heads.

    The spread is the standard deviation of the measure over the heads of both models.
    """
    called, rows = Names.of(pair[0]), []
    for measure, title in MEASURES.items():
        found, digits = [], digits_of(measure, *pair)
        for heads in zip(pair[0].heads, pair[1].heads, strict=True):
            before, after = (_value(audit, head, measure) for audit, head in zip(pair, heads, strict=True))
            if before is not None and after is not None:
                nothing = any(idle(audit, head) for audit, head in zip(pair, heads, strict=True))
                row = {"name": called.short(heads[0]), "measure": title, "first": before, "second": after}
                row["change"] = f"{fixed(before, digits)} → {fixed(after, digits)}"
                found.append(row | {"kind": IDLE.title if nothing else "Other heads"})
        spread = float(np.std([row[end] for row in found for end in ("first", "second")])) if found else 0.0
        rows += [row | {"size": abs(row["second"] - row["first"]) / (spread or 1.0)} for row in found]
    return rows


def _largest(rows: Rows, by: str) -> Rows:
    """For each head or measure the row with the largest change, the largest first; without changes of 0."""
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["size"]):
        found.setdefault(row[by], row)
    return [row for row in found.values() if row["size"]]


def _line(row: dict[str, Any]) -> str:
    return f"{row['name']}: {row['measure'].lower()} {row['change']}"


def map_chart(pair: Pair, rows: Rows) -> Chart:
    """Heads by layer, coloured by their largest change; the ten that changed most are numbered and named."""
    top = {row["name"]: row for row in _largest(rows, "name")}
    lines = [f"{n}  {_line(row)}" for n, row in enumerate(list(top.values())[:MOST], 1)]
    marks = {name: str(n) for n, name in enumerate(list(top)[:MOST], 1)}
    cells = []
    for head in single.head_rows(pair[0]):
        row = top.get(head["name"], {"size": 0.0, "measure": "none", "change": ""})
        head |= {name: row[name] for name in ("size", "measure", "change")}
        cells.append(head | {"mark": marks.get(head["name"], ""), "outline": None})
    tips = tooltip(name="Head", measure="Changed most", change="From, to", size="Standard deviations|.2f")
    end = max(cell["size"] for cell in cells) or 1.0
    title = "largest change (SD)"
    return single.numbered_map(pair[0], cells, "size", end, title, ["Changed most", *lines] if lines else [], tips)


def heads_chart(rows: Rows, titles: Titles) -> Chart:
    """Each head in both models, a panel per measure from 0 to 1; on the dotted line nothing changed."""
    kept = [row for row in rows if row["measure"] in _FROM_0_TO_1.values()]
    found = list(dict.fromkeys(row["measure"] for row in kept))
    ends: Rows = [
        {"measure": measure, "first": end, "second": end, "kind": None} for measure in found for end in (0, 1)
    ]
    x, y = (
        number(end, title, domain=[0, 1], tickCount=4) for end, title in zip(("first", "second"), titles, strict=True)
    )
    base = alt.Chart(data([*kept, *ends])).encode(x=alt.X(**x), y=alt.Y(**y))
    line = base.mark_line(strokeDash=[3, 3], strokeWidth=1, color="#858b95").transform_filter("datum.kind == null")
    kinds = [each for each in (Style("Other heads", "#2f6fe0"), IDLE) if each.title in {row["kind"] for row in kept}]
    marks = base.mark_point(size=26, opacity=0.55).transform_filter("datum.kind != null")
    marks = marks.encode(tooltip=tooltip(name="Head", kind="Kind", change="From, to"), **looks("kind", kinds))
    return grid(alt.layer(line, marks).properties(height=200), "measure", found)


def changes_table(pair: Pair, titles: Titles, rows: Rows) -> Table:
    """For each measure the head that changed most, the mean change, and how alike the heads are."""
    made: list[list[str | Cell]] = []
    for measure, title in MEASURES.items():
        if own := [row for row in rows if row["measure"] == title]:
            top, digits = max(own, key=lambda row: row["size"]), digits_of(measure, *pair)
            x, y = (np.array([row[end] for row in own]) for end in ("first", "second"))
            alike = float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else None
            row = [title, top["name"] if top["size"] else "none", *(fixed(top[e], digits) for e in ("first", "second"))]
            made.append([*row, fixed(fmean(y - x), digits), str((y > x).sum()), str((y < x).sum()), fixed(alike)])
    columns = ["Measure", "Largest change in", *titles, "Mean change", "Heads higher", "Heads lower", "Correlation"]
    note = "Correlation: of the values in both models, over heads."
    return make_table("What changed most", columns, made, right=range(2, 8), note=note, css="numbers small")


def _change_sections(pair: Pair, titles: Titles, rows: Rows) -> Iterator[Section]:
    if rows:
        parts: list[Any] = [changes_table(pair, titles, rows)]
        if any(row["measure"] in _FROM_0_TO_1.values() for row in rows):
            parts.append(Figure("heads", "Each head in both models", heads_chart(rows, titles), _HEADS.format(*titles)))
        yield Section("What changed most?", parts)


_MAP = (
    "Each head is coloured by its largest change among effect, attention patterns, shares and distance, in standard "
    "deviations of that measure over the heads of both models. The numbered heads are named below."
)
_HEADS = "x is a head’s value in {}, y in {}. On the dotted line nothing changed."


def distribution_chart(pair: Pair, titles: Titles) -> Chart | None:
    """The distribution of each measure from 0 to 1 over the heads of each model; None if none is in both."""
    looks, rows = list(styles(zip(("first", "second"), titles, strict=True)).values()), []
    edges = np.linspace(0, 1, _BINS + 1)
    for measure, title in _FROM_0_TO_1.items():
        both = [_values(audit, measure) for audit in pair]
        for style, values in zip(looks, both, strict=True) if all(both) else ():
            shares = np.histogram(np.clip(values, 0, 1), edges)[0] / len(values)
            pairs = zip((edges[:-1] + edges[1:]) / 2, shares, strict=True)
            rows += [{"measure": title, "series": style.title, "at": at, "share": share} for at, share in pairs]
    x, y = number("at", "value", tickCount=4), number("share", "share of heads", format=".0%", tickCount=4)
    made = curves(rows, x, y, looks, points=False).properties(height=150)
    return grid(made, "measure", [row["measure"] for row in rows]) if rows else None


def _picture(pair: Pair, titles: Titles, rows: Rows) -> Figure | None:
    if rows:
        text = "; ".join(map(_line, _largest(rows, "name")[:MOST])) or "No head changed."
        return Figure("map", "Largest change of each head", map_chart(pair, rows), _MAP, text)
    chart = distribution_chart(pair, titles)
    return (
        None if chart is None else Figure("heads", "Share of heads by value", chart, f"In {_BINS} bins of equal width.")
    )


def _counts(audit: Audit) -> dict[str, str]:
    """The heads of each kind, those that do nothing apart, and the medians."""
    limits = {**{name: LIMITS[name] for name in ROLES}, **dict.fromkeys(SHARES[:2], PATTERN)}
    active = [head for head in audit.heads if not idle(audit, head)]
    found = {IDLE.title: str(len(audit.heads) - len(active)), "All heads": str(len(audit.heads))}
    for name, title in _FROM_0_TO_1.items():
        if values := [value for head in active if (value := getattr(head, name)) is not None]:
            found[f"{title} over {limits[name]:g}"] = str(sum(value > limits[name] for value in values))
    for name, title in MEASURES.items():
        if values := _values(audit, name):
            found[f"Median: {title.lower()}"] = fixed(median(values), digits_of(name, audit))
    return found


def kinds_table(pair: Pair, titles: Titles) -> Table:
    """How many heads of each kind both models have, and the median of each measure."""
    first, second = map(_counts, pair)
    rows = [[kind, first[kind], second[kind]] for kind in first if kind in second]
    note = "Heads that do nothing have nearly uniform attention and no effect. They are not counted otherwise."
    for audit, title in zip(pair, titles, strict=True):
        if heads := [Names.of(audit).short(head) for head in audit.heads if idle(audit, head)]:
            note += f" In {title}: {', '.join(heads[:12])}{', …' * (len(heads) > 12)}."
    return make_table("Kinds of heads", ["Heads", *titles], rows, right=(1, 2), note=note, css="numbers small")


def _answer(pair: Pair, titles: Titles, rows: Rows) -> str:
    """The three measures that changed most, or the medians, then the kinds of heads."""
    first, second = map(_counts, pair)
    both = {kind: f"{first[kind]} → {second[kind]}" for kind in first if first[kind] != second.get(kind, first[kind])}
    medians = {kind.partition(": ")[2]: change for kind, change in both.items() if kind.startswith("Median: ")}
    if not rows:
        found = "; ".join(f"{kind} {change}" for kind, change in medians.items())
        return f"Medians over heads, {titles[0]} → {titles[1]}: {found}." if found else "No values are known in both."
    if not (top := _largest(rows, "measure")):
        return "No head changed."
    clear = sum(row["size"] > 1 for row in _largest(rows, "name"))
    kinds = "; ".join(f"{kind.lower()}: {change}" for kind, change in both.items() if not kind.startswith("Median"))
    return (
        f"Changed most: {'; '.join(map(_line, top[:3]))}. {clear} of {len(pair[0].heads)} heads change by more than "
        f"one standard deviation over heads in some measure. Numbers of heads: {kinds or 'the same of each kind'}."
    )


def _warnings(pair: Pair, titles: Titles, *, same: bool, measured: bool) -> Iterator[str]:
    for audit, title in zip(pair, titles, strict=True):
        if not words.proved(audit):
            yield f"{title} is not proved: a layer differs from the model by more than the tolerance."
    if inputs := [name for name in _INPUT if pair[0].about.get(name) != pair[1].about.get(name)]:
        yield (
            f"Different inputs ({', '.join(inputs)} differ). The models were not audited on the same input, so "
            "differences come from the models and their inputs."
        )
    if not measured:
        yield "Effects are not compared. The two audits measured different effects or used different methods."
    if not same:
        yield "The models have different numbers of layers or heads, so heads are not compared one by one."


def _band_sections(pair: Pair, titles: Titles) -> Iterator[Section]:
    """The bands of both on one scale, and the difference if they have the same bands."""
    if not all(audit.bands for audit in pair):
        return
    panels, text = [*titles, f"{titles[1]} − {titles[0]}"], ""
    both = [single.band_rows(audit) for audit in pair]
    rows = [row | {"model": title} for title, each in zip(titles, both, strict=True) for row in each]
    if [(row["layer"], row["band"]) for row in both[0]] == [(row["layer"], row["band"]) for row in both[1]]:
        pairs = [each for each in zip(*both, strict=True) if None not in [row["effect"] for row in each]]
        change = [
            row | {"effect": b["effect"] - row["effect"], "model": panels[2], "interval": "–"} for row, b in pairs
        ]
        i = max(range(len(pairs)), key=lambda i: abs(change[i]["effect"]), default=None)
        if i is not None:
            ends = (f"{significant(row['effect'])} in {title}" for row, title in zip(pairs[i], titles, strict=True))
            text = (
                f"Band that changed most: pairs {change[i]['band']} in {change[i]['layer']}, from {' to '.join(ends)}."
            )
        rows += change
    chart = grid(single.bands_chart(rows), "model", panels)
    figure = Figure("bands", "Effect of freezing each band", chart, single.BANDS)
    yield Section("Did the use of frequencies change?", [figure, text])


def _settings_section(pair: Pair, titles: Titles, *, same: bool) -> Section:
    facts = [
        ["Model", *(f"{words.model(audit)} {audit.about.get('class') or ''}".strip() for audit in pair)],
        ["Heads", *(f"{len(audit.heads)} in {len(audit.layers)} attention calls" for audit in pair)],
        *([name, *map(of, pair)] for name, of in _SENTENCES.items()),
    ]
    rows = [*settings_rows(pair), *(_layer_rows(pair) if same else [])]
    differ = make_table("Settings that differ", ["Setting", *titles], rows, css="small")
    details = [Section("Both audits", [make_table("The two audits", ["Setting", *titles], facts, css="small")])]
    return Section("Which settings differ?", [differ if rows else "All settings are the same."], details, "settings")


_SENTENCES = {"Audited on": words.audited, "Proof": words.proof, "Effects": words.effects}


def settings_rows(pair: Pair) -> list[list[str | Cell]]:
    """The settings of the audits that differ."""

    def text(value: Any) -> str:
        return "–" if value is None else "; ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)

    found = []
    for audit in pair:
        own = {name: value for name, value in audit.about.items() if name not in _PASSING}
        own |= {"effect": audit.effect or "none", "method of effects": audit.method}
        found.append(own | {"loss of the intact model": fixed(audit.baseline, 3)})
    rows = [[name.replace("_", " "), *(text(each.get(name)) for each in found)] for name in found[0] | found[1]]
    return [row for row in rows if row[1] != row[2]]


def _layer_rows(pair: Pair) -> list[list[str | Cell]]:
    """Differences between layers; layers with the same difference share one row."""
    found: dict[tuple[str, str, str], list[LayerRecord]] = {}
    for a, b in zip(pair[0].layers, pair[1].layers, strict=True):
        same = len(a.frequencies) == len(b.frequencies) and np.allclose(a.frequencies, b.frequencies, 1e-3, 1e-9)
        facts, others = _facts(a), _facts(b)
        for name in facts:
            if facts[name] != others[name] and not (name == _FREQUENCIES and same):  # the same but for rounding
                found.setdefault((name, facts[name], others[name]), []).append(a)
    called = Names.of(pair[0])
    return [[Cell(name, (layer_spans(called, layers),)), x, y] for (name, x, y), layers in found.items()]


def _facts(layer: LayerRecord) -> dict[str, str]:
    turns = layer.frequencies
    return {
        "module": layer.module,
        "key heads": str(layer.key_heads),
        "width": str(layer.head_dim),
        "scale": f"{layer.scale:.4g}",
        "softcap": "none" if layer.softcap is None else f"{layer.softcap:g}",
        "visible keys": single.visible(layer),
        "position": layer.position,
        _FREQUENCIES: f"{max(turns):.3g} and {min(turns):.3g} rad per position" if turns else "none",
    }
