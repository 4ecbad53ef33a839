"""The page of the mathematics: every statement with its verdict, and the numbers behind them as plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from toeplens.ground import write_text
from toeplens.papers.mathematics import UNIVERSAL, Record, Theory
from toeplens.report.kit.canvas import Canvas
from toeplens.report.kit.ledger import claim_rows
from toeplens.report.kit.page import PAGE, environment, inline, script_json
from toeplens.studies import RULE

_BLUE, _ORANGE, _GREEN, _PINK, _GREY = "#2f6fe0", "#de7a00", "#1d9a5b", "#c8479f", "#858b95"
_HEIGHT = 270
_OCTAVE = float(np.log10(2))  # between ticks of a logarithmic axis
Curve = tuple[str, str, str]  # its name, its colour, its dash


@dataclass(frozen=True)
class Plot:
    """A plot with its legend and what it says in words."""

    id: str
    title: str
    words: str
    figure: go.Figure
    legend: list[Curve]


def write_theory(theory: Theory) -> Path:
    """Write the study's page to ``report.html`` in its directory; returns its path."""
    path = theory.directory / PAGE
    write_text(path, render_theory(theory))
    return path


def render_theory(theory: Theory) -> str:
    """The page as one self-contained HTML document; the same state gives the same document."""
    makers: list[tuple[str, str, Callable[[list[Record]], list[Plot]]]] = [
        ("contraction", "Spectral contraction (Proposition B.3)", _contraction),
        ("phases", "Lemma B.1 and what follows from it", _phases),
        ("heads", "Real heads", _heads),
        ("expressiveness", "Expressiveness (Proposition B.2)", _expressiveness),
        ("estimators", "Taking position out again (Appendix C.4)", _estimators),
    ]
    sections = [
        (name, title, make(list(theory.records[name]))) for name, title, make in makers if theory.records.get(name)
    ]
    tally = Counter(entry.verdict for entry in theory.entries)
    return (
        environment()
        .get_template("papers/mathematics/page.html.j2")
        .render(
            theory=theory,
            claims=claim_rows(theory.entries),
            tally=tally,
            sections=sections,
            rules=(UNIVERSAL, RULE),
            figures=script_json({plot.id: plot.figure for _, _, plots in sections for plot in plots}),
            plotly=Markup(inline(get_plotlyjs())),
        )
    )


# ---- what several plots need ---------------------------------------------------------------------------------------


def _curve(canvas: Canvas, curve: Curve, xs: Iterable[float], ys: Iterable[Any], *, mode: str = "lines") -> None:
    name, tint, dash = curve
    canvas.add(
        "scatter",
        x=[float(x) for x in xs],
        y=[float(f"{y:.5g}") for y in ys],
        mode=mode,
        line={"color": tint, "width": 2, "dash": dash},
        marker={"color": tint, "size": 6},
        name=name,
        hovertemplate="%{x:.4g}: %{y:.4g}",
    )


def _means(records: list[Record], pick: Callable[[Mapping[str, Any]], Any]) -> np.ndarray:
    """The mean over seeds of a table of numbers."""
    return np.mean([np.asarray(pick(record), dtype=float) for record in records], axis=0)


# ---- the sections --------------------------------------------------------------------------------------------------


def _contraction(records: list[Record]) -> list[Plot]:
    example = records[0]["sizes"]["example"]
    canvas = Canvas(_HEIGHT)
    own, mean = ("W, and W∘E of one frequency", _GREY, "solid"), ("W∘Ē, the mean over frequencies", _BLUE, "solid")
    for curve, values in ((own, example["w"]), (mean, example["mean"])):
        _curve(canvas, curve, range(1, len(values) + 1), sorted(values))
    canvas.x("eigenvalue, in order")
    canvas.y("")
    spectrum = canvas.figure()

    canvas = Canvas(_HEIGHT)
    free = records[0]["free"]
    found = ("widest found, W positive definite", _PINK, "solid")
    known = ("widest found, symbol of W positive too", _ORANGE, "dash")
    bound = ("√(N/2), never passed", _GREY, "dot")
    for curve, key in ((found, "ratio_found"), (known, "ratio_known_positive"), (bound, "ratio_bound")):
        rows = _means(records, lambda record, key=key: record["free"][key])
        _curve(canvas, curve, free["searched_sizes"], rows, mode="lines+markers")
    canvas.x("N", type="log", dtick=_OCTAVE)
    canvas.y("width of W∘E over width of W", type="log", dtick=_OCTAVE)
    canvas.line_at(1)
    widest = canvas.figure()

    canvas = Canvas(_HEIGHT)
    sizes = records[0]["sizes"]
    table = _means(records, lambda record: record["sizes"]["width_ratio"])
    tints = (_GREY, _GREEN, _ORANGE, _PINK, _BLUE)
    curves = [(f"N = {n}", tint, "solid") for n, tint in zip(sizes["lengths"], tints, strict=False)]
    for curve, row in zip(curves, table, strict=True):
        _curve(canvas, curve, sizes["head_dims"], row, mode="lines+markers")
    canvas.x("dimensions of the head", type="log", dtick=_OCTAVE)
    canvas.y("width of W∘Ē over width of W", range=[0.4, 1.05])
    canvas.line_at(1)
    return [
        Plot(
            "eigenvalues",
            "Eigenvalues of a random W, with and without",
            "One frequency turns W into a matrix with the same eigenvalues; only their mean narrows the range.",
            spectrum,
            [own, mean],
        ),
        Plot(
            "free",
            "Free phases: the range can grow",
            "E with |E_ij| = 1 and a phase for each offset, as in the paper's symbols. Above 1 the spectrum is wider.",
            widest,
            [found, known, bound],
        ),
        Plot(
            "narrowing",
            "How much the mean over RoPE's frequencies narrows",
            "By head size and length, W random and positive definite; one frequency (2 dimensions) changes nothing.",
            canvas.figure(),
            curves,
        ),
    ]


def _phases(records: list[Record]) -> list[Plot]:
    ranges = records[0]["ranges"]
    canvas = Canvas(_HEIGHT)
    program = ("widest f found for its g, by search", _PINK, "solid")
    fejer = ("widest f known", _ORANGE, "dash")
    rows = _means(records, lambda record: record["ranges"]["ratio_program"])
    _curve(canvas, fejer, ranges["fejer_sizes"], ranges["ratio_fejer"], mode="lines+markers")
    _curve(canvas, program, ranges["sizes"], rows, mode="lines+markers")
    canvas.x("N", type="log", dtick=_OCTAVE)
    canvas.y("range of f over range of g", range=[0.95, 1.32])
    canvas.line_at(1)
    canvas.line_at(4 / np.pi, dash="dot")
    widest = canvas.figure()

    toeplitz = records[0]["toeplitz"]
    canvas = Canvas(_HEIGHT)
    own, turned = ("W = T(3, 1, 1, 0, ..)", _GREY, "solid"), ("W∘E", _PINK, "solid")
    for curve, key in ((own, "w"), (turned, "product")):
        _curve(canvas, curve, toeplitz["angles"], toeplitz[key]["symbol"])
    canvas.x("angle")
    canvas.y("symbol")
    return [
        Plot(
            "ranges",
            "“The range of g never falls below that of f”",
            "It does, from N = 3 on, by up to 4/π (dotted). Weights w and phases found by search.",
            widest,
            [program, fejer],
        ),
        Plot(
            "symbols",
            "So a product can be wider, by Szegő’s own theorem",
            "Symbols of a Toeplitz matrix and of its product with a unimodular one: the second has the wider range.",
            canvas.figure(),
            [own, turned],
        ),
    ]


def _heads(records: list[Record]) -> list[Plot]:
    plots = []
    rope, alibi = ("RoPE", _BLUE, "solid"), ("ALiBi", "#d2453d", "solid")
    for key, title, words, labels, bar in (
        (
            "width",
            "Eigenvalue range of a head's logits, with position over without",
            "A point is a head, of every seed and layer. Below 1 position narrows the range, above it widens it.",
            (("rope", rope), ("alibi", alibi)),
            1.0,
        ),
        (
            "phase_error",
            "How far a head is from one phase a distance",
            "Least relative error of the logits as a Gram matrix times one Toeplitz phase; 0 is the paper's form.",
            (("rope", rope),),
            0.05,
        ),
    ):
        canvas = Canvas(_HEIGHT)
        for place, (label, curve) in enumerate(labels):
            for side, state in enumerate(("untrained", "trained")):
                tables = [found[key] for record in records if key in (found := record.get(f"{label} {state}", {}))]
                values = [value for table in tables for row in table for value in row]
                shift = np.linspace(-0.12, 0.12, max(1, len(values)))
                at = side + (place - (len(labels) - 1) / 2) * 0.34
                canvas.add(
                    "scatter",
                    x=[float(f"{at + d:.4f}") for d in shift],
                    y=[float(f"{value:.4g}") for value in values],
                    mode="markers",
                    marker={"color": curve[1], "size": 5, "opacity": 0.65},
                    name=curve[0],
                    hovertemplate="%{y:.3g}",
                )
        canvas.x("", tickvals=[0, 1], ticktext=["untrained", "trained"], range=[-0.5, 1.5])
        canvas.y("", **({"type": "log", "dtick": _OCTAVE} if key == "width" else {"rangemode": "tozero"}))
        canvas.line_at(bar)
        plots.append(Plot(f"heads-{key}", title, words, canvas.figure(), [curve for _, curve in labels]))
    return plots


def _expressiveness(records: list[Record]) -> list[Plot]:
    plots = []
    bound = ("additive, any width: exact", _GREY, "dash")
    additive = ("additive, this width: found", "#d2453d", "solid")
    rotary = ("RoPE, this width: found", _BLUE, "solid")
    one = ("one angle only: found", _GREEN, "dot")
    curves = ((additive, "additive"), (bound, "bound"), (rotary, "rotary"), (one, "one_angle"))
    widths = sorted({row["width"] for row in records[0]["rows"]})
    for width in [w for w in widths if w >= 4][:3]:
        canvas = Canvas(_HEIGHT)
        rows = [row for row in records[0]["rows"] if row["family"] == "random" and row["width"] == width]
        for curve, key in curves:
            table = [
                np.mean([_row(record, "random", row["size"], width)["means"][key][0] for record in records])
                for row in rows
            ]
            _curve(canvas, curve, [row["constraints"] for row in rows], table, mode="lines+markers")
        canvas.x("wanted signs (content pair and offset)")
        canvas.y("share of instances met", range=[-0.04, 1.06], tickformat=".0%")
        plots.append(
            Plot(
                f"feasible-{width}",
                f"Random signs, width {width}",
                "Share of random instances that can be met; the additive bound is exact, whatever the width.",
                canvas.figure(),
                [curve for curve, _ in curves],
            )
        )
    return plots


def _row(record: Record, family: str, size: int, width: int) -> Mapping[str, Any]:
    wanted = (family, size, width)
    return next(row for row in record["rows"] if (row["family"], row["size"], row["width"]) == wanted)


def _estimators(records: list[Record]) -> list[Plot]:
    plots = []
    own, shared = ("content of their own", _BLUE, "solid"), ("content that query and key share", _PINK, "solid")
    for key, title in (
        ("predictor", "Levinson: the predictor of a planted kernel"),
        ("frequencies", "Levinson: the frequencies of planted sinusoids"),
    ):
        canvas = Canvas(_HEIGHT)
        sizes = records[0]["levinson"]["sizes"]
        for curve, kind in ((own, "own"), (shared, "shared")):
            rows = _means(records, lambda record, kind=kind, key=key: record["levinson"][kind][key])
            _curve(canvas, curve, sizes, np.maximum(rows, 1e-16), mode="lines+markers")
        canvas.x("size of content against position")
        canvas.y("relative error", type="log", exponentformat="power")
        words = "Exact without content; content that queries and keys share makes a noise at distance 0 that ruins it."
        plots.append(Plot(f"levinson-{key}", title, words, canvas.figure(), [own, shared]))
    return plots
