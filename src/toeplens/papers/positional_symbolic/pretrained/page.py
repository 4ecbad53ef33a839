"""The page of a pretrained model's study: claims, heads, and effects of frequency bands and heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from math import pi, tau
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from toeplens.lens import Estimate
from toeplens.papers.positional_symbolic.pretrained.parts import (
    NUM_BANDS,
    NUM_DRAWS,
    ModelHeads,
    effect_unit,
    effects_of,
    fastest_first,
)
from toeplens.papers.positional_symbolic.pretrained.study import PretrainedStudy, compare_by_text
from toeplens.report.charts import (
    alt,
    chart_data,
    facet_grid,
    heatmap,
    interval_chart,
    line_chart,
    nominal,
    numeric,
    tooltip,
)
from toeplens.report.page import Figure, Ledger, Page, Section, entries_by_claim, run_table
from toeplens.report.probe import behaviours_table
from toeplens.report.tables import Table, TableCell
from toeplens.report.theme import Style, style
from toeplens.studies.auditing.sentences import effect_definition
from toeplens.studies.kit.verdicts import MIN_SEEDS, verdict_text
from toeplens.studies.probing import ProbeKind, ProbeRecord
from toeplens.studies.probing.probe import mean_text
from toeplens.utils.formatting import fmt, fmt_duration, sig_figs

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
_BEHAVIOUR_STYLES: dict[ProbeKind, Style] = {
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


def pretrained_page(study: PretrainedStudy) -> Page:
    """The page of the study."""
    model = "/".join(Path(study.plan.model).parts[-2:])
    intact, run = study.probes.get("intact"), Section("How it was run", [_run_table(study)])
    details = [*_rules(study), *([run] if intact is None else [])]
    claims = Section("Which claims hold?", [Ledger(entries_by_claim(study.entries))], details, id="claims")
    skill_sections = []
    if intact is not None:
        table = behaviours_table(replace(intact, changes=()))
        skill_sections = [Section("What can the intact model do?", [table], [run], id="skills")]
    rows = head_rows(study)
    unfinished = f"{study.finished} of {study.total} parts are finished. Claims on others stay open."
    return Page(
        "pretrained",
        f"{model}: positional and symbolic heads",
        f"Do the heads of {model} use position or content?",
        _answer(study),
        Figure("plane", "Positional and symbolic share", plane_chart(rows), _PLANE.format(units=study.plan.units))
        if rows
        else None,
        [
            claims,
            *_frequency_sections(study),
            *_map_sections(study),
            *_band_sections(study),
            *_needle_sections(study),
            *skill_sections,
        ],
        [],
        [] if study.is_complete else [unfinished],
    )


def _answer(study: PretrainedStudy) -> str:
    tally = Counter(verdict_text(entry.verdict) for entry in study.entries)
    verdicts = ", ".join(f"{verdict} ({count})" for verdict, count in tally.most_common())
    text = f"Verdicts on {len(study.entries)} claims about trained models: {verdicts}."
    if (heads := study.heads("text")) is not None:
        counts = [int((heads.mean(name) > 0.5).sum()) for name in ("positional", "symbolic")]
        text = f"{counts[0]} of {len(heads.layer)} heads are mostly positional, {counts[1]} mostly symbolic. {text}"
    evidence = [finding.evidence.capitalize() for finding in study.entries[0].findings if finding.comparison]
    if len(study.plan.sequence_keys) < MIN_SEEDS:
        evidence.append(f"With so few {study.plan.units}, this is only indicative")
    return " ".join([text, *(f"{sentence}." for sentence in evidence)])


def _rules(study: PretrainedStudy) -> list[Section]:
    """How verdicts are made, and which are different with one number per text."""
    clustered, units = list(compare_by_text(study)), study.plan.units
    parts = [f"Comparisons are over {units} or over questions. {study.rule}"]
    if clustered:
        differing, texts = [comparison for comparison in clustered if comparison.differs], clustered[0].texts
        caveat = " By the rule, so few texts decide nothing." if texts < MIN_SEEDS else ""
        parts.append(
            f"{units.capitalize()} from one text are less independent than different texts. With one number for each "
            f"of the {texts} texts (95% intervals, no correction), {len(clustered) - len(differing)} of "
            f"{len(clustered)} comparisons get the same verdict.{caveat}"
        )
        for comparison in differing:
            value = mean_text(Estimate(comparison.value, comparison.low, comparison.high, texts), 3, least=None)
            parts.append(
                f"Different: {comparison.entry.claim.id}, by text {value}, {comparison.verdict}; "
                f"{comparison.finding.evidence}."
            )
    return [Section("How verdicts are made", parts)]


def _run_table(study: PretrainedStudy) -> Table:
    plan, environment = study.plan, study.environment
    texts = {name: digest[:12] for name, digest in plan.texts.items()}
    html = Markup(", ").join(Markup("{} <code>{}</code>").format(*item) for item in texts.items())
    counts = f"{plan.sequences} " + (f"groups of {plan.together} sequences" if plan.together > 1 else "sequences")
    sizes = (
        f"{counts} of {plan.tokens} tokens per text; effects on the first {plan.effect_tokens} tokens; probes of "
        f"{plan.probe_tokens} tokens; seed {plan.seed}"
    )
    rows: list[list[str | TableCell]] = [
        ["Texts", TableCell(", ".join(f"{name} {digest}" for name, digest in texts.items()), html=html)],
        ["Sizes", sizes],
        ["Time", f"{fmt_duration(environment['seconds'])} in total" if environment.get("seconds") else "not recorded"],
    ]
    return run_table(environment, rows, omit=("execution", "threads", "numpy"))


def head_rows(study: PretrainedStudy) -> list[dict[str, Any]]:
    """A row per head of the model, of random weights, and of the model on tokens in random order."""
    rows = []
    for kind, title in _KINDS.items():
        heads = study.heads(kind)
        if heads is not None:
            columns = {name: heads.mean(name) for name in ("positional", "symbolic", "centre")}
            with np.errstate(over="ignore"):
                columns["period"] = tau / 2.0 ** columns["centre"]
            for index, keys in enumerate(_head_labels(heads)):
                rows.append({"kind": title, **keys, **{name: float(values[index]) for name, values in columns.items()}})
    return rows


def _head_labels(heads: ModelHeads) -> list[dict[str, Any]]:
    mixed = len(heads.layer_groups) > 1
    return [
        {"layer": layer + 1, "head": head + 1, "keys": "window" if mixed and local else "all"}
        for layer, head, local in zip(heads.layer.tolist(), heads.head.tolist(), heads.is_local.tolist(), strict=True)
    ]


def _head_scatter(rows: list[dict[str, Any]], x: Mapping[str, Any], y: Mapping[str, Any], **tips: str) -> Any:
    """A mark per head, a panel per kind, coloured by layer."""
    rows = [row for row in rows if np.isfinite(row[x["field"]]) and np.isfinite(row[y["field"]])]
    marks = alt.Chart(chart_data(rows)).mark_point(opacity=0.7).encode(x=alt.X(**x), y=alt.Y(**y))
    layers = alt.Scale(range=["#2f6fe0", "#de7a00"], interpolate="rgb")
    colour = alt.Color(field="layer", type="quantitative", title="layer", scale=layers)
    marks = marks.encode(color=colour, tooltip=tooltip(layer="Layer", head="Head", **tips))
    if len({row["keys"] for row in rows}) > 1:
        marks = marks.encode(shape=alt.Shape(field="keys", type="nominal", title="keys"))
    return facet_grid(marks.properties(height=280), "kind", [row["kind"] for row in rows])


_POSITIONAL = numeric("positional", "positional share", domain=[-0.03, 1.03], format=".1f", tickCount=5)


def plane_chart(rows: list[dict[str, Any]]) -> Any:
    """Heads by positional and symbolic share."""
    y = _POSITIONAL | {"field": "symbolic", "title": "symbolic share"}
    return _head_scatter(rows, _POSITIONAL, y, positional="Positional share|.2f", symbolic="Symbolic share|.2f")


def _frequency_sections(study: PretrainedStudy) -> list[Section]:
    rows = [row for row in head_rows(study) if 0 < row["period"] < np.inf]
    if not rows:
        return []
    x = numeric("period", "period (tokens)", kind="log", format="~s", tickCount=5)
    chart = _head_scatter(rows, x, _POSITIONAL, period="Period|.3~s", positional="Positional share|.2f")
    texts = []
    for kind, title in _KINDS.items():
        if (heads := study.heads(kind)) is not None:
            groups = heads.layer_groups.items()
            values = {part: np.mean(heads.correlations("positional", "centre", mask)) for part, mask in groups}
            texts.append(f"{title}: " + ", ".join(f"{fmt(float(value))} ({part})" for part, value in values.items()))
    text = f"Rank correlation of positional share and frequency, mean over {study.plan.units}. {'; '.join(texts)}."
    figure = Figure("frequencies", "Positional share by frequency", chart, _PERIOD)
    return [Section("Do positional heads use fast frequencies?", [figure, text])]


def _map_sections(study: PretrainedStudy) -> list[Section]:
    heads, intact = study.heads("text"), study.probes.get("intact")
    if heads is None:
        return []
    scores = {(head.layer, head.head): head.score for head in intact.heads} if intact else {}
    keys = zip(heads.layer.tolist(), heads.head.tolist(), strict=True)
    values = {"retrieval": np.array([scores.get(key, np.nan) for key in keys])}
    values |= {name: heads.mean(name) for name in _MEASURES if name != "retrieval"}
    labelled = {_MEASURES[name]: values[name] for name in _MEASURES}
    details = []
    for name, title in _EFFECTS.items():
        if (audit := study.audits.get(name)) is not None:
            chart = map_chart(heads, {title: effects_of(audit)}, effect_unit(audit), ".3f")
            caption = f"The {effect_definition(audit)}."
            details.append(Section(f"{title}: what each head is worth", [Figure(name, title, chart, caption)]))
    caption = f"Rows are layers, columns are heads. Means over {study.plan.units}."
    return [
        Section(
            "Which heads are positional, and which retrieve?",
            [Figure("maps", "Map of heads", map_chart(heads, labelled, "value"), caption)],
            details,
        )
    ]


def map_chart(heads: ModelHeads, values: Mapping[str, Iterable[float]], title: str, form: str = ".2f") -> Any:
    """A map of heads by layer for each measure; those that are unknown for all heads are left out."""
    rows = []
    for measure, column in values.items():
        numbers = [float(value) for value in column]
        if np.isfinite(numbers).any():
            pairs = zip(_head_labels(heads), numbers, strict=True)
            rows += [{"measure": measure, **labels, "value": v, "blank": ""} for labels, v in pairs]
    largest = max((abs(row["value"]) for row in rows if np.isfinite(row["value"])), default=0.0)
    domain = (0.0, 1.0) if len(values) > 1 else (-max(1e-9, largest), max(1e-9, largest))
    x, y = (nominal(name, sorted({row[name] for row in rows}), name) for name in ("head", "layer"))
    tips = tooltip(measure="Measure", layer="Layer", head="Head", value=f"Value|{form}")
    options: dict[str, Any] = {}
    if len(values) > 1:
        options = {"size": max(9, min(20, 240 // max(1, len(y["sort"])))), "marks": "blank"}
    x["axis"] = y["axis"] = {"labelOverlap": True}
    chart = heatmap(rows, x, y, "value", title=title, domain=domain, tips=tips, form=form, **options)
    return facet_grid(chart, "measure", values) if len(values) > 1 else chart


def _loss_increase(probe: ProbeRecord, behaviour: ProbeKind) -> dict[str, Any]:
    increase = probe.summary(behaviour).more_nats
    assert increase is not None
    return {"value": increase.value, "low": increase.low, "high": increase.high}


def _band_sections(study: PretrainedStudy) -> list[Section]:
    by_band = ((band, study.probes.get(f"still-{band}")) for band in range(NUM_BANDS))
    probes = [(band, probe) for band, probe in by_band if probe and probe.changes]
    if not probes:
        return []
    rows = []
    for (behaviour, look), (band, probe) in product(_BEHAVIOUR_STYLES.items(), probes):
        keys = {"band": band + 1, "periods": _periods(study, band), "series": look.title}
        rows.append({**keys, **_loss_increase(probe, behaviour)})
    x = numeric("band", "frozen eighth of the frequencies, fastest first", values=[*range(1, 9)], domain=[0.8, 8.2])
    tips = tooltip(series="Behaviour", periods="Periods (tokens)", value="Loss increase|.3f")
    y, styles = numeric("value", _INCREASE), _BEHAVIOUR_STYLES.values()
    chart = line_chart(rows, x, y, styles, low="low", high="high", tips=tips)
    texts = []
    for look in styles:
        worst = max((row for row in rows if row["series"] == look.title), key=lambda row: row["value"])
        effect = f"{fmt(worst['value'])} nats for eighth {worst['band']} ({worst['periods']} tokens)"
        texts.append(f"{look.title}: {effect}")
    return [
        Section(
            "Which frequencies does it need?",
            [Figure("bands", "Frozen frequency bands", chart, _BANDS), f"Largest effects. {'; '.join(texts)}."],
            _layer_sections(study),
        )
    ]


def _periods(study: PretrainedStudy, band: int) -> str:
    """Periods in tokens of a band, from its fastest to its slowest frequency, over all layers."""
    speeds: list[float] = []
    for layer in next((audit.layers for audit in study.audits.values()), ()):
        if layer.frequencies:
            pairs = np.array_split(fastest_first(layer), NUM_BANDS)[band]
            speeds += [abs(layer.frequencies[pair]) for pair in pairs if layer.frequencies[pair]]
    return f"{sig_figs(2 * pi / max(speeds), 2)} to {sig_figs(2 * pi / min(speeds), 2)}" if speeds else "–"


def _layer_sections(study: PretrainedStudy) -> list[Section]:
    """The effect of freezing a band in one layer."""
    audit = study.audits.get("bands")
    rows = [
        {"layer": band.layer + 1, "pairs": f"{band.first + 1}–{band.last + 1}", "effect": band.effect}
        for band in (() if audit is None else audit.bands)
        if band.effect is not None
    ]
    if audit is None or not rows:
        return []
    limit = max(1e-9, *(abs(row["effect"]) for row in rows))
    x = nominal("pairs", [row["pairs"] for row in rows], "pairs")
    y = nominal("layer", [], "layer") | {"sort": "ascending"}
    unit = effect_unit(audit)
    tips = tooltip(layer="Layer", pairs="Pairs", effect=f"{unit.capitalize()}|.4f")
    chart = heatmap(rows, x, y, "effect", title=unit, domain=(-limit, limit), tips=tips, form=".3f")
    figure = Figure("layers", "Frozen band of one layer", chart, "Pairs of dimensions, from the fastest frequency on.")
    return [Section("In which layers?", [figure])]


def _needle_sections(study: PretrainedStudy) -> list[Section]:
    titles = {
        "no-retrieval": "retrieval heads ablated",
        **{f"no-others-{n}": f"other heads ablated ({n + 1})" for n in range(NUM_DRAWS)},
        "slow-silent": "slowest quarter removed",
        "retrieval-still": "slowest quarter frozen",
        "fast-silent": "fastest quarter removed",
        **{f"some-silent-{n}": f"random quarter removed ({n + 1})" for n in range(NUM_DRAWS)},
    }
    rows = []
    for name, title in titles.items():
        if (probe := study.probes.get(name)) and probe.changes:
            right = probe.summary("needle").changed_right
            assert right is not None
            rows.append({"change": title, "series": "change", "right": right.value, **_loss_increase(probe, "needle")})
    if not rows:
        return []
    tips = tooltip(change="Change", value="Loss increase|.3f", right="Needles found|.0%")
    changes = nominal("change", [row["change"] for row in rows])
    chart = interval_chart(rows, numeric("value", _INCREASE), changes, [style("change")], tips=tips)
    text = "; ".join(f"{row['change']} {row['right']:.0%}" for row in rows)
    figure = Figure("needles", "Effects on needles", chart, _NEEDLES)
    return [Section("Do retrieval heads find needles?", [figure, f"Needles found (all digits rank first): {text}."])]
