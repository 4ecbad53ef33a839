"""The page of a pretrained model's study: claims, heads, and effects of frequency bands and heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import pi, tau
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from toeplens.ground.words import duration, fixed, significant
from toeplens.lens import Estimate
from toeplens.papers.positional_symbolic.pretrained.parts import BANDS, DRAWS, Heads, by_speed, effects_of
from toeplens.papers.positional_symbolic.pretrained.study import Pretrained, by_text
from toeplens.report.charts import alt, curves, data, grid, heat, intervals, names, number, tooltip
from toeplens.report.page import Figure, Ledger, Page, Section, ledger, run_table
from toeplens.report.probe import behaviours_table
from toeplens.report.tables import Cell, Table
from toeplens.report.theme import Style, style
from toeplens.studies.kit.verdicts import ENOUGH, verdict_text
from toeplens.studies.probing import Behaviour, ProbeRecord
from toeplens.studies.probing.probe import interval

_KINDS = {"text": "The model", "random": "Random weights", "shuffled": "Tokens in random order"}
_MEASURES = {
    "positional": "positional share",
    "symbolic": "symbolic share",
    "retrieval": "retrieval score",
    "previous": "attention on the previous token",
    "first": "attention on the first token",
    "induction": "induction",
}
_EFFECTS = {"silenced": "Ablation", "position": "Removal of its position"}
_ASKED: dict[Behaviour, Style] = {
    "copying": style("Copying", index=0),
    "needle": style("Needle", index=1),
    "loss": style("Text", index=2),
}
_INCREASE = "loss increase (nats per token)"
_PLANE = (
    "Each mark is a head: share of its logits’ variance explained by the keys’ positions and by their contents, mean "
    "over {units}. The rest is interaction."
)
_PERIOD = (
    "Horizontal: period in tokens of the frequency that a head uses (centre of gravity of the pairs’ contributions to "
    "its logits’ variance). Vertical: positional share."
)
_BANDS = (
    "The frequencies of every layer are sorted and split into eighths; one eighth is frozen in all layers and heads. "
    "Bands are 95% intervals over items."
)
_NEEDLES = (
    "Loss increase on the needle’s number, with 95% intervals over needles. A removed pair contributes nothing to the "
    "logit; a frozen pair contributes content but not position. Random: as many other heads, or other pairs."
)


def pretrained_page(study: Pretrained) -> Page:
    """The page of the study."""
    model = "/".join(Path(study.plan.model).parts[-2:])
    intact, run = study.probes.get("intact"), Section("How it was run", [_run_table(study)])
    details = [*_rules(study), *([run] if intact is None else [])]
    claims = Section("Which claims hold?", [Ledger(ledger(study.entries))], details, id="claims")
    numbers = []
    if intact is not None:
        skills = behaviours_table(replace(intact, changes=()))
        numbers = [Section("What can the intact model do?", [skills], [run], id="skills")]
    rows = head_rows(study)
    return Page(
        "pretrained",
        f"{model}: positional and symbolic heads",
        f"Do the heads of {model} use position or content?",
        _answer(study),
        Figure("plane", "Positional and symbolic share", plane_chart(rows), _PLANE.format(units=study.plan.units))
        if rows
        else None,
        [claims, *(each for make in (_frequencies, _maps, _bands, _needles) for each in make(study)), *numbers],
        [],
        []
        if study.complete
        else [f"{study.finished} of {study.total} parts are finished. Claims on others stay open."],
    )


def _answer(study: Pretrained) -> str:
    tally = Counter(verdict_text(entry.verdict) for entry in study.entries)
    said = ", ".join(f"{verdict} ({count})" for verdict, count in tally.most_common())
    text = f"Verdicts on {len(study.entries)} claims about trained models: {said}."
    if (heads := study.heads("text")) is not None:
        many = [int((heads.mean(name) > 0.5).sum()) for name in ("positional", "symbolic")]
        text = f"{many[0]} of {len(heads.layer)} heads are mostly positional, {many[1]} mostly symbolic. {text}"
    evidence = [finding.evidence.capitalize() for finding in study.entries[0].findings if finding.comparison]
    if len(study.plan.places) < ENOUGH:
        evidence.append(f"With so few {study.plan.units}, this is only indicative")
    return " ".join([text, *(f"{each}." for each in evidence)])


def _rules(study: Pretrained) -> list[Section]:
    """How verdicts are made, and which are different with one number per text."""
    clustered, units = list(by_text(study)), study.plan.units
    parts = [f"Comparisons are over {units} or over questions. {study.rule}"]
    if clustered:
        others, texts = [each for each in clustered if each.differs], clustered[0].texts
        few = " By the rule, so few texts decide nothing." if texts < ENOUGH else ""
        parts.append(
            f"{units.capitalize()} from one text are less independent than different texts. With one number for each "
            f"of the {texts} texts (95% intervals, no correction), {len(clustered) - len(others)} of "
            f"{len(clustered)} comparisons get the same verdict.{few}"
        )
        for each in others:
            value = interval(Estimate(each.value, each.low, each.high, texts), 3, least=None)
            parts.append(f"Different: {each.entry.claim.id}, by text {value}, {each.verdict}; {each.part.evidence}.")
    return [Section("How verdicts are made", parts)]


def _run_table(study: Pretrained) -> Table:
    plan, about = study.plan, study.environment
    texts = {name: digest[:12] for name, digest in plan.texts.items()}
    shown = Markup(", ").join(Markup("{} <code>{}</code>").format(*each) for each in texts.items())
    counts = f"{plan.sequences} " + (f"groups of {plan.together} sequences" if plan.together > 1 else "sequences")
    sizes = (
        f"{counts} of {plan.tokens} tokens per text; effects on the first {plan.effect_tokens} tokens; probes of "
        f"{plan.probe_tokens} tokens; seed {plan.seed}"
    )
    rows: list[list[str | Cell]] = [
        ["Texts", Cell(", ".join(f"{name} {digest}" for name, digest in texts.items()), html=shown)],
        ["Sizes", sizes],
        ["Time", f"{duration(about['seconds'])} in total" if about.get("seconds") else "not recorded"],
    ]
    return run_table(about, rows, without=("execution", "threads", "numpy"))


def head_rows(study: Pretrained) -> list[dict[str, Any]]:
    """A row per head of the model, of random weights, and of the model on tokens in random order."""
    rows = []
    for kind, title in _KINDS.items():
        heads = study.heads(kind)
        if heads is not None:
            columns = {name: heads.mean(name) for name in ("positional", "symbolic", "centre")}
            with np.errstate(over="ignore"):
                columns["period"] = tau / 2.0 ** columns["centre"]
            for at, place in enumerate(_places(heads)):
                rows.append({"kind": title, **place, **{name: float(each[at]) for name, each in columns.items()}})
    return rows


def _places(heads: Heads) -> list[dict[str, Any]]:
    mixed = len(heads.parts) > 1
    return [
        {"layer": layer + 1, "head": head + 1, "keys": "window" if mixed and local else "all"}
        for layer, head, local in zip(heads.layer.tolist(), heads.head.tolist(), heads.local.tolist(), strict=True)
    ]


def _marks(rows: list[dict[str, Any]], x: Mapping[str, Any], y: Mapping[str, Any], **tips: str) -> Any:
    """A mark per head, a panel per kind, coloured by layer."""
    rows = [row for row in rows if np.isfinite(row[x["field"]]) and np.isfinite(row[y["field"]])]
    marks = alt.Chart(data(rows)).mark_point(opacity=0.7).encode(x=alt.X(**x), y=alt.Y(**y))
    layers = alt.Scale(range=["#2f6fe0", "#de7a00"], interpolate="rgb")
    colour = alt.Color(field="layer", type="quantitative", title="layer", scale=layers)
    marks = marks.encode(color=colour, tooltip=tooltip(layer="Layer", head="Head", **tips))
    if len({row["keys"] for row in rows}) > 1:
        marks = marks.encode(shape=alt.Shape(field="keys", type="nominal", title="keys"))
    return grid(marks.properties(height=280), "kind", [row["kind"] for row in rows])


_POSITIONAL = number("positional", "positional share", domain=[-0.03, 1.03], format=".1f", tickCount=5)


def plane_chart(rows: list[dict[str, Any]]) -> Any:
    """Heads by positional and symbolic share."""
    y = _POSITIONAL | {"field": "symbolic", "title": "symbolic share"}
    return _marks(rows, _POSITIONAL, y, positional="Positional share|.2f", symbolic="Symbolic share|.2f")


def _frequencies(study: Pretrained) -> list[Section]:
    rows = [row for row in head_rows(study) if 0 < row["period"] < np.inf]
    if not rows:
        return []
    x = number("period", "period (tokens)", kind="log", format="~s", tickCount=5)
    chart = _marks(rows, x, _POSITIONAL, period="Period|.3~s", positional="Positional share|.2f")
    told = []
    for kind, title in _KINDS.items():
        if (heads := study.heads(kind)) is not None:
            each = {part: heads.correlations("positional", "centre", which) for part, which in heads.parts.items()}
            told.append(f"{title}: " + ", ".join(f"{fixed(float(np.mean(v)))} ({part})" for part, v in each.items()))
    text = f"Rank correlation of positional share and frequency, mean over {study.plan.units}. {'; '.join(told)}."
    figure = Figure("frequencies", "Positional share by frequency", chart, _PERIOD)
    return [Section("Do positional heads use fast frequencies?", [figure, text])]


def _maps(study: Pretrained) -> list[Section]:
    heads, intact = study.heads("text"), study.probes.get("intact")
    if heads is None:
        return []
    scores = {(each.layer, each.head): each.score for each in intact.heads} if intact else {}
    places = zip(heads.layer.tolist(), heads.head.tolist(), strict=True)
    values = {"retrieval": np.array([scores.get(place, np.nan) for place in places])}
    values |= {name: heads.mean(name) for name in _MEASURES if name != "retrieval"}
    named = {_MEASURES[name]: values[name] for name in _MEASURES}
    details = []
    for name, title in _EFFECTS.items():
        if (audit := study.audits.get(name)) is not None:
            chart = map_chart(heads, {title: effects_of(audit)}, "loss increase (nats)", ".3f")
            caption = "Loss increase in nats per token when one head is changed."
            details.append(Section(f"{title}: what each head is worth", [Figure(name, title, chart, caption)]))
    caption = f"Rows are layers, columns are heads. Means over {study.plan.units}."
    return [
        Section(
            "Which heads are positional, and which retrieve?",
            [Figure("maps", "Map of heads", map_chart(heads, named, "value"), caption)],
            details,
        )
    ]


def map_chart(heads: Heads, values: Mapping[str, Iterable[float]], title: str, form: str = ".2f") -> Any:
    """A map of heads by layer for each measure; those that are unknown for all heads are left out."""
    rows = []
    for measure, column in values.items():
        numbers = [float(value) for value in column]
        if np.isfinite(numbers).any():
            rows += [
                {"measure": measure, **p, "value": v, "blank": ""} for p, v in zip(_places(heads), numbers, strict=True)
            ]
    largest = max((abs(row["value"]) for row in rows if np.isfinite(row["value"])), default=0.0)
    domain = (0.0, 1.0) if len(values) > 1 else (-max(1e-9, largest), max(1e-9, largest))
    x, y = (names(name, sorted({row[name] for row in rows}), name) for name in ("head", "layer"))
    tips = tooltip(measure="Measure", layer="Layer", head="Head", value=f"Value|{form}")
    many: dict[str, Any] = {}
    if len(values) > 1:
        many = {"size": max(9, min(20, 240 // max(1, len(y["sort"])))), "marks": "blank"}
    x["axis"] = y["axis"] = {"labelOverlap": True}
    chart = heat(rows, x, y, "value", title=title, domain=domain, tips=tips, form=form, **many)
    return grid(chart, "measure", values) if len(values) > 1 else chart


def _more(probe: ProbeRecord, behaviour: Behaviour) -> dict[str, Any]:
    more = probe.summary(behaviour).more_nats
    assert more is not None
    return {"value": more.value, "low": more.low, "high": more.high}


def _bands(study: Pretrained) -> list[Section]:
    found = [(band, probe) for band in range(BANDS) if (probe := study.probes.get(f"still-{band}")) and probe.changes]
    if not found:
        return []
    rows = [
        {"band": band + 1, "periods": _periods(study, band), "series": each.title, **_more(probe, behaviour)}
        for behaviour, each in _ASKED.items()
        for band, probe in found
    ]
    x = number("band", "frozen eighth of the frequencies, fastest first", values=[*range(1, 9)], domain=[0.8, 8.2])
    tips = tooltip(series="Behaviour", periods="Periods (tokens)", value="Loss increase|.3f")
    chart = curves(rows, x, number("value", _INCREASE), _ASKED.values(), low="low", high="high", tips=tips)
    told = []
    for each in _ASKED.values():
        worst = max((row for row in rows if row["series"] == each.title), key=lambda row: row["value"])
        told.append(
            f"{each.title}: {fixed(worst['value'])} nats for eighth {worst['band']} ({worst['periods']} tokens)"
        )
    return [
        Section(
            "Which frequencies does it need?",
            [Figure("bands", "Frozen frequency bands", chart, _BANDS), f"Largest effects. {'; '.join(told)}."],
            _layered(study),
        )
    ]


def _periods(study: Pretrained, band: int) -> str:
    """Periods in tokens of a band, from its fastest to its slowest frequency, over all layers."""
    speeds: list[float] = []
    for layer in next((audit.layers for audit in study.audits.values()), ()):
        if layer.frequencies:
            pairs = np.array_split(by_speed(layer), BANDS)[band]
            speeds += [abs(layer.frequencies[pair]) for pair in pairs if layer.frequencies[pair]]
    return f"{significant(2 * pi / max(speeds), 2)} to {significant(2 * pi / min(speeds), 2)}" if speeds else "–"


def _layered(study: Pretrained) -> list[Section]:
    """The effect of freezing a band in one layer."""
    audit = study.audits.get("bands")
    rows = (
        []
        if audit is None
        else [
            {"layer": band.layer + 1, "pairs": f"{band.first + 1}–{band.last + 1}", "effect": band.effect}
            for band in audit.bands
            if band.effect is not None
        ]
    )
    if not rows:
        return []
    limit = max(1e-9, *(abs(row["effect"]) for row in rows))
    x, y = names("pairs", [row["pairs"] for row in rows], "pairs"), names("layer", [], "layer") | {"sort": "ascending"}
    tips = tooltip(layer="Layer", pairs="Pairs", effect="Loss increase|.4f")
    chart = heat(rows, x, y, "effect", title="loss increase (nats)", domain=(-limit, limit), tips=tips, form=".3f")
    figure = Figure("layers", "Frozen band of one layer", chart, "Pairs of dimensions, from the fastest frequency on.")
    return [Section("In which layers?", [figure])]


def _needles(study: Pretrained) -> list[Section]:
    named = {
        "no-retrieval": "retrieval heads ablated",
        **{f"no-others-{n}": f"other heads ablated ({n + 1})" for n in range(DRAWS)},
        "slow-silent": "slowest quarter removed",
        "retrieval-still": "slowest quarter frozen",
        "fast-silent": "fastest quarter removed",
        **{f"some-silent-{n}": f"random quarter removed ({n + 1})" for n in range(DRAWS)},
    }
    rows = []
    for name, title in named.items():
        if (probe := study.probes.get(name)) and probe.changes:
            right = probe.summary("needle").changed_right
            assert right is not None
            rows.append({"change": title, "series": "change", "right": right.value, **_more(probe, "needle")})
    if not rows:
        return []
    tips = tooltip(change="Change", value="Loss increase|.3f", right="Needles found|.0%")
    changes = names("change", [row["change"] for row in rows])
    chart = intervals(rows, number("value", _INCREASE), changes, [style("change")], tips=tips)
    text = "; ".join(f"{row['change']} {row['right']:.0%}" for row in rows)
    figure = Figure("needles", "Effects on needles", chart, _NEEDLES)
    return [Section("Do retrieval heads find needles?", [figure, f"Needles found (all digits rank first): {text}."])]
