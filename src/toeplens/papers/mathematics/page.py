"""The page of the mathematics: every statement with its verdict, and charts of the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np

from toeplens.papers.mathematics.statements import DATA, UNIVERSAL, Record
from toeplens.papers.mathematics.study import Theory
from toeplens.papers.mathematics.trained_models import LABELS, STATES
from toeplens.report.charts import (
    alt,
    chart_data,
    color_shape,
    facet_grid,
    line_chart,
    nominal,
    numeric,
    ref_lines,
    tooltip,
)
from toeplens.report.page import Figure, Ledger, Page, Section, entries_by_claim, run_table
from toeplens.report.theme import Style, style
from toeplens.studies import RULE, LedgerEntry
from toeplens.studies.kit.verdicts import MIN_SEEDS, OPEN_VERDICTS, verdict_text

_TOPICS = {
    "distance": "Toeplitz and cross terms",
    "normalising": "Softmax",
    "filling": "Szegő’s theorem",
    "latent": "MLA’s logits",
    "contraction": "Spectral contraction",
    "phases": "Lemma B.1",
    "heads": "Heads of trained models",
    "expressiveness": "Expressiveness",
    "estimators": "Separating position",
    "manifold": "Position as a curve",
    "related": "Related papers",
    "small_norm": "Small initial norm",
}
_VERDICTS = [
    Style("holds", "#1d9a5b", "circle"),
    Style("holds in part", "#de7a00", "triangle-up"),
    Style("fails", "#d2453d", "cross"),
    Style("open", "#858b95", "diamond"),
]
_PLURALS = {"holds": "hold", "holds in part": "hold in part", "fails": "fail", "open": "are open"}
_PUBLISHED, _CORRECTED = "as published", "corrected"
_BAND = "Lines: means over seeds; bands: from the smallest to the largest."
_NEIGHBOURS = (
    "Distance of a position’s vector from the midpoint of its neighbours, relative to that from the mean of all "
    "positions. Below 0.5, neighbours explain three quarters of the variance; at 1, no more than the mean does."
)


def theory_page(theory: Theory) -> Page:
    """The page of the mathematics."""
    records = {name: list(group) for name, group in theory.records.items() if group}
    claims = Section(
        "Which statements hold?",
        [Ledger(entries_by_claim(theory.entries), item_name="Statement")],
        [
            Section("How verdicts are made", [UNIVERSAL, RULE]),
            Section("How it was run", [run_table(theory.environment)]),
        ],
        id="claims",
    )
    warnings = [] if theory.is_complete else [f"{theory.progress}. Missing records leave statements undecided."]
    if theory.seeds < MIN_SEEDS:
        warnings.append(
            f"{theory.seeds} {'seeds' if theory.seeds > 1 else 'seed'}: statements about trained heads need "
            f"{MIN_SEEDS} seeds, so what is said about them is only indicative."
        )
    return Page(
        "theory",
        "The paper’s mathematics, tested",
        "Does the paper’s mathematics hold?",
        _answer(theory, records),
        Figure(
            "verdicts",
            "Verdicts by topic",
            verdicts_chart(theory.entries),
            "Each mark is a statement of arXiv 2505.13027 or of a related paper: as published, and as corrected by us.",
        ),
        [claims, *(make(records) for name, make in _SECTIONS.items() if name in records)],
        ["Counterexamples come from a seeded search and are saved in results.json."],
        warnings,
    )


def _statement_form(entry: LedgerEntry) -> str:
    corrected = "corrected" in entry.claim.source or entry.claim.id.endswith("-corrected")
    return _CORRECTED if corrected else _PUBLISHED


def _display_verdict(entry: LedgerEntry) -> str:
    return "open" if entry.verdict in OPEN_VERDICTS else entry.verdict


def _answer(theory: Theory, records: Mapping[str, list[Record]]) -> str:
    """How many statements hold, and the numbers of the central one."""
    counts_texts = []
    for form, words in ((_PUBLISHED, "as published"), (_CORRECTED, "in a corrected form")):
        tally = Counter(_display_verdict(entry) for entry in theory.entries if _statement_form(entry) == form)
        counts = [f"{tally[verdict]} {plural}" for verdict, plural in _PLURALS.items() if tally[verdict]]
        counts_texts.append(f"of {tally.total()} statements {words}, {', '.join(counts)}")
    text = f"{'; '.join(counts_texts).capitalize()}."
    if "contraction" in records:
        sizes = records["contraction"][0]["sizes"]
        ratios = _values_by_seed(records["contraction"], "free", "ratio_found")
        mean = _values_by_seed(records["contraction"], "sizes", "width_ratio")[:, -1, -1]
        text += (
            f" Its main claim, spectral contraction, fails as published: the product with a matrix of phases can "
            f"be {ratios.max():.2f} times as wide. The mean over RoPE’s frequencies is narrower: {mean.mean():.2f} of "
            f"the width ({mean.min():.2f} to {mean.max():.2f} over {len(mean)} seeds; {sizes['head_dims'][-1]} "
            f"dimensions, {sizes['lengths'][-1]} positions)."
        )
    return text


def verdicts_chart(entries: Sequence[LedgerEntry]) -> Any:
    """A mark per statement, by topic: those as published on the left, those corrected on the right."""
    topics = {claim["id"]: _TOPICS[name] for name, item in DATA["experiments"].items() for claim in item["claims"]}
    order = [item.title for item in _VERDICTS]
    rows: list[dict[str, Any]] = []
    for entry in sorted(entries, key=lambda entry: order.index(_display_verdict(entry))):
        keys = {"topic": topics[entry.claim.id], "form": _statement_form(entry)}
        index = 1 + sum((row["topic"], row["form"]) == tuple(keys.values()) for row in rows)
        words = {"statement": entry.claim.statement, "source": entry.claim.source}
        words |= {"series": _display_verdict(entry), "verdict": verdict_text(entry.verdict)}
        rows.append({**keys, "at": index, **words})
    corrected_start = max((row["at"] for row in rows if row["form"] == _PUBLISHED), default=0) + 1
    rows = [row | {"at": row["at"] + corrected_start} if row["form"] == _CORRECTED else row for row in rows]
    last_column = max((row["at"] for row in rows), default=1)
    x = alt.X(**numeric("at", "", domain=[0.5, last_column + 0.5], labels=False, grid=False, tickCount=0))
    y = alt.Y(**nominal("topic", _TOPICS.values()))
    styles = [item for item in _VERDICTS if any(row["series"] == item.title for row in rows)]
    marks = alt.Chart(chart_data(rows)).mark_point(size=110, opacity=1)
    marks = marks.encode(x=x, y=y, **color_shape("series", styles))
    marks = marks.encode(tooltip=tooltip(statement="Statement", source="Source", verdict="Verdict"))
    labels = [{"at": 0.7, "text": _PUBLISHED}, {"at": corrected_start + 0.7, "text": _CORRECTED}]
    headings = alt.Chart(chart_data(labels))
    headings = headings.mark_text(align="left", dy=-10, fontWeight=600).encode(x=x, y=alt.value(0), text="text:N")
    return alt.layer(headings, marks).properties(height=24 * len({row["topic"] for row in rows}))


def _values_by_seed(records: list[Record], *path: str) -> np.ndarray:
    """A table of numbers for each seed."""
    return np.array([np.asarray(reduce(getitem, path, record), dtype=float) for record in records])


def _mean_rows(xs: Iterable[Any], series: Mapping[str, np.ndarray], **more: str) -> list[dict[str, Any]]:
    """A row per point of each series, with its mean and its range over seeds (the first dimension)."""
    return [
        {"x": float(x), "series": name, "value": column.mean(), "low": column.min(), "high": column.max(), **more}
        for name, values in series.items()
        for x, column in zip(xs, values.T, strict=True)
    ]


def _curve_chart(rows: list[dict[str, Any]], x: dict[str, Any], y: dict[str, Any], **options: Any) -> Any:
    """Curves with bands; a logarithmic horizontal axis has a tick per point."""
    xs = sorted({row["x"] for row in rows})
    if x.get("scale", {}).get("type") == "log":
        x = numeric("x", x["title"], kind="log", values=xs, domain=[xs[0] / 1.1, xs[-1] * 1.1])
    styles = [style(name, index=n) for n, name in enumerate(dict.fromkeys(row["series"] for row in rows))]
    return line_chart(rows, x, y, styles, low="low", high="high", **options)


def _contraction_section(records: Mapping[str, list[Record]]) -> Section:
    results, details = records["contraction"], []
    sizes, ratios = results[0]["sizes"], _values_by_seed(results, "sizes", "width_ratio")
    kinds = {
        "widest found, W positive definite": "ratio_found",
        "widest known, symbol of W positive": "ratio_known_positive",
        "upper bound √(N/2)": "ratio_bound",
    }
    series = {title: _values_by_seed(results, "free", name) for title, name in kinds.items()}
    n, equal_width = numeric("x", "N", kind="log"), {"same width": 1}
    width = numeric("value", "width of W∘E / width of W", kind="log")
    free_chart = _curve_chart(_mean_rows(results[0]["free"]["searched_sizes"], series), n, width, levels=equal_width)
    series = {f"N = {length}": ratios[:, index] for index, length in enumerate(sizes["lengths"])}
    width = numeric("value", "width of W∘Ē / width of W", zero=False)
    dims = n | {"title": "head dimension"}
    mean_chart = _curve_chart(_mean_rows(sizes["head_dims"], series), dims, width, levels=equal_width)
    if "phases" in records:
        phases, ranges = records["phases"], records["phases"][0]["ranges"]
        widest = _values_by_seed(phases, "ranges", "ratio_program")
        rows = _mean_rows(ranges["sizes"], {"widest f found by search": widest})
        rows += _mean_rows(ranges["fejer_sizes"], {"widest known f": _values_by_seed(phases, "ranges", "ratio_fejer")})
        y, levels = numeric("value", "range of f / range of g", zero=False), {"same range": 1, "4/π": 4 / np.pi}
        figure = Figure("ranges", "Range of f against g", _curve_chart(rows, n, y, levels=levels), _BAND)
        details.append(Section("Lemma B.1: is the range of g never below that of f?", [figure]))
    return Section(
        "Does a rotation narrow the spectrum of W?",
        [
            Figure("free", "One phase per offset, as in the paper: it can widen", free_chart, _BAND),
            Figure("averaged", "Mean over RoPE’s frequencies, random W: it narrows", mean_chart, _BAND),
            f"A rotation by one frequency ({sizes['head_dims'][0]} dimensions) keeps {ratios[:, :, 0].mean():.3f} of "
            "the width. Only the mean over several frequencies narrows it.",
        ],
        details,
    )


def _heads_section(records: Mapping[str, list[Record]]) -> Section:
    results, encodings = records["heads"], {"rope": "RoPE", "alibi": "ALiBi"}
    widths = _state_rows(results, encodings, "width")
    trained = [row for row in widths if row["state"] == STATES[-1]]
    sentences = []
    for name in encodings.values():
        narrower = [row["value"] < 1 for row in trained if row["series"] == name]
        if narrower:
            sentences.append(f"{name} narrows the range in {sum(narrower)} of {len(narrower)} trained heads.")
    names = [f"{label} {state}" for label in LABELS for state in STATES]
    missing = [name for record in results for name in names if name not in record]
    if missing:
        sentences.append(f"{len(missing)} models diverged or are missing: {', '.join(dict.fromkeys(missing))}.")
    width = numeric("value", "range with position / without", kind="log")
    chart = strip_chart(widths, width, {"same range": 1})
    errors = _state_rows(results, {"rope": "RoPE"}, "phase_error")
    error = strip_chart(errors, numeric("value", "relative error of the logits"), {"threshold 0.05": 0.05})
    curve = _state_rows(results, {"learned": "a learned table"}, "curve", "neighbour_error")
    levels = {"three quarters of the variance": 0.5, "none of it": 1.0}
    points = strip_chart(curve, numeric("value", "neighbour error"), levels)
    return Section(
        "Do the heads of trained models behave so?",
        [
            Figure("range", "Eigenvalue range of a head’s logits", chart, "Each mark is a head of one seed’s model."),
            " ".join(sentences),
        ],
        [
            Section(
                "Are a head’s logits its Gram matrix times one phase per distance?",
                [Figure("phase", "Smallest error of that form", error, "Each mark is a head.")],
            ),
            Section(
                "Does training put positions on a curve?",
                [Figure("curve", "Distance from the midpoint of two neighbours", points, _NEIGHBOURS)],
            ),
        ],
    )


def _state_rows(records: list[Record], encodings: Mapping[str, str], *path: str) -> list[dict[str, Any]]:
    """Numbers of untrained and trained models, a row per head (or per model); ``at`` counts those of a column."""
    rows = []
    for label, title in encodings.items():
        for state in STATES:
            name = f"{label} {state}"
            by_seed = [(seed, r[name]) for seed, r in enumerate(records, 1) if name in r]
            tables = ((seed, np.ravel(reduce(getitem, path, measures))) for seed, measures in by_seed)
            values = [(seed, head, v) for seed, table in tables for head, v in enumerate(table, 1)]
            for index, (seed, head, value) in enumerate(values):
                keys = {"series": title, "state": state, "at": f"{title} {index:03d}", "seed": seed, "head": head}
                rows.append({**keys, "value": float(value)})
    return rows


def strip_chart(rows: list[dict[str, Any]], y: Mapping[str, Any], levels: Mapping[str, float]) -> Any:
    """A mark per head or model, untrained and trained side by side."""
    titles = dict.fromkeys(row["series"] for row in rows)
    styles = [style(title, title.lower(), index=n) for n, title in enumerate(titles)]
    offset = alt.XOffset(**nominal("at", sorted({row["at"] for row in rows})))
    tips = tooltip(series="Encoding", state="Model", seed="Seed number", head="Head", value="Value|.3f")
    x = alt.X(**nominal("state", STATES))
    marks = alt.Chart(chart_data(rows)).mark_point().encode(x=x, y=alt.Y(**y), xOffset=offset)
    return alt.layer(ref_lines(levels), marks.encode(tooltip=tips, **color_shape("series", styles)))


def _expressiveness_section(records: Mapping[str, list[Record]]) -> Section:
    results, rows = records["expressiveness"], []
    kinds = {"additive": "additive", "additive, any width": "bound", "RoPE": "rotary", "RoPE, one angle": "one_angle"}
    widths = sorted({row["width"] for row in results[0]["rows"] if row["width"] >= 4})[:3]
    for width in widths:
        groups = [[r for r in record["rows"] if (r["family"], r["width"]) == ("random", width)] for record in results]
        series = {
            name: np.array([[r["means"][key][0] for r in seed] for seed in groups]) for name, key in kinds.items()
        }
        rows += _mean_rows([row["constraints"] for row in groups[0]], series, width=f"width {width}")
    x, y = numeric("x", "wanted signs (content pair and offset)"), numeric("value", "share satisfied", format=".0%")
    chart = facet_grid(_curve_chart(rows, x, y), "width", [row["width"] for row in rows])
    rotary, additive = (
        {row["x"]: row["value"] for row in rows if (row["series"], row["width"]) == (name, rows[-1]["width"])}
        for name in ("RoPE", "additive, any width")
    )
    best_x = max(rotary, key=lambda x: rotary[x] - additive[x])
    text = (
        f"The gap is largest for {best_x:.0f} wanted signs at {rows[-1]['width']}: RoPE satisfies {rotary[best_x]:.0%} "
        f"of the instances, an additive encoding of any width at most {additive[best_x]:.0%}."
    )
    caption = f"Share of random instances that can be satisfied, found by search; any width: exact. {_BAND}"
    return Section("Can RoPE express more?", [Figure("signs", "Random signs", chart, caption), text])


def _separation_section(records: Mapping[str, list[Record]]) -> Section:
    results, rows = records["estimators"], []
    titles = {"predictor": "predictor of a planted kernel", "frequencies": "frequencies of planted sinusoids"}
    kinds = {"separate content": "own", "shared content": "shared"}
    for key, title in titles.items():
        errors = {name: _values_by_seed(results, "levinson", kind, key) for name, kind in kinds.items()}
        series = {name: np.maximum(values, 1e-16) for name, values in errors.items()}
        rows += _mean_rows(results[0]["levinson"]["sizes"], series, what=title)
    y = numeric("value", "relative error", kind="log", format=".0e", tickCount=6)
    chart = facet_grid(_curve_chart(rows, numeric("x", "content / position"), y), "what", titles.values(), columns=2)
    text = "Exact without content. Content that queries and keys share adds noise at distance 0 and prevents recovery."
    parts = [Figure("levinson", "Errors of Levinson’s recursion", chart, _BAND), text]
    return Section("Can position be separated from content?", parts)


_SECTIONS: dict[str, Callable[[Mapping[str, list[Record]]], Section]] = {
    "contraction": _contraction_section,
    "heads": _heads_section,
    "expressiveness": _expressiveness_section,
    "estimators": _separation_section,
}
