"""The page of the mathematics: every statement with its verdict, and plots of the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from toeplens.papers.mathematics import UNIVERSAL, Record, Theory
from toeplens.papers.mathematics.c4.manifold import NOTHING, TOLD
from toeplens.report.kit.blocks import Block, Panel, Sign, View, numbered
from toeplens.report.kit.canvas import Canvas, plain
from toeplens.report.kit.colours import BLUE, GREEN, GREY, ORANGE, PINK, RED
from toeplens.report.kit.page import Page, ledger, ledger_table, write_report
from toeplens.studies import RULE
from toeplens.studies.kit.verdicts import OPEN

_HEIGHT = 270
_OCTAVE = float(np.log10(2))  # between ticks of a logarithmic axis


def write_theory(theory: Theory) -> Path:
    """Write the study's page to ``report.html`` in its directory; returns its path."""
    return write_report(theory.directory, render_theory(theory))


def render_theory(theory: Theory) -> str:
    """The page as one self-contained HTML document. Deterministic."""
    return theory_page(theory).html()


def theory_page(theory: Theory) -> Page:
    """The figures and the ledger of the mathematics."""
    found = [one for one in _SECTIONS if theory.records.get(one[0])]
    made = [Block(name, title, "", [View.of(make(list(theory.records[name])))], "") for name, title, _, make in found]
    claims = ledger(theory.entries)
    return Page(
        "papers/mathematics/page/page.html.j2",
        numbered(made),
        {"claims": ledger_table(claims, "Statement")},
        {
            "theory": theory,
            "short": [(name, short) for name, _, short, _ in found],
            "claims": claims,
            "tally": Counter("open" if entry.verdict in OPEN else entry.verdict for entry in theory.entries),
            "rules": (UNIVERSAL, RULE),
        },
    )


# ---- shared by several plots ---------------------------------------------------------------------------------------


def _sign(title: str, tint: str, dash: str = "solid") -> Sign:
    return Sign("", title, tint, dash=dash)


def _curve(canvas: Canvas, curve: Sign, xs: Iterable[float], ys: Iterable[Any], *, mode: str = "lines") -> None:
    canvas.lines(
        map(float, xs),
        plain(list(ys), 5),
        curve.tint,
        "%{x:.4g}: %{y:.4g}",
        dash=curve.dash,
        mode=mode,
        marker={"color": curve.tint, "size": 6},
        name=curve.title,
    )


def _means(records: list[Record], pick: Callable[[Mapping[str, Any]], Any]) -> np.ndarray:
    """Mean over seeds of a table of numbers."""
    return np.mean([np.asarray(pick(record), dtype=float) for record in records], axis=0)


# ---- the sections --------------------------------------------------------------------------------------------------


def _contraction(records: list[Record]) -> list[Panel]:
    example = records[0]["sizes"]["example"]
    canvas = Canvas(_HEIGHT)
    own, mean = _sign("W, and W∘E of one frequency", GREY), _sign("W∘Ē, the mean over frequencies", BLUE)
    for curve, values in ((own, example["w"]), (mean, example["mean"])):
        _curve(canvas, curve, range(1, len(values) + 1), sorted(values))
    canvas.x("index of the eigenvalue, sorted")
    canvas.y("")
    spectrum = canvas.figure()

    canvas = Canvas(_HEIGHT)
    free = records[0]["free"]
    found = _sign("widest found, W positive definite", PINK)
    known = _sign("widest found, symbol of W positive too", ORANGE, "dash")
    bound = _sign("upper bound √(N/2)", GREY, "dot")
    for curve, key in ((found, "ratio_found"), (known, "ratio_known_positive"), (bound, "ratio_bound")):
        rows = _means(records, lambda record, key=key: record["free"][key])
        _curve(canvas, curve, free["searched_sizes"], rows, mode="lines+markers")
    canvas.x("N", type="log", dtick=_OCTAVE)
    canvas.y("width of W∘E / width of W", type="log", dtick=_OCTAVE)
    canvas.line_at(1)
    widest = canvas.figure()

    canvas = Canvas(_HEIGHT)
    sizes = records[0]["sizes"]
    table = _means(records, lambda record: record["sizes"]["width_ratio"])
    tints = (GREY, GREEN, ORANGE, PINK, BLUE)
    curves = [_sign(f"N = {n}", tint) for n, tint in zip(sizes["lengths"], tints, strict=False)]
    for curve, row in zip(curves, table, strict=True):
        _curve(canvas, curve, sizes["head_dims"], row, mode="lines+markers")
    canvas.x("head dimension", type="log", dtick=_OCTAVE)
    canvas.y("width of W∘Ē / width of W", range=[0.4, 1.05])
    canvas.line_at(1)
    return [
        Panel(
            "Eigenvalues of a random W",
            spectrum,
            "With one frequency, W∘E has the same eigenvalues as W. Only the mean over frequencies narrows the range.",
            legend=[own, mean],
        ),
        Panel(
            "Free phases: the range can grow",
            widest,
            "E with |E_ij| = 1 and one phase per offset, as in the paper. Above 1 the spectrum of W∘E is wider.",
            legend=[found, known, bound],
        ),
        Panel(
            "Contraction by the mean over RoPE's frequencies",
            canvas.figure(),
            "By head dimension and length, for random positive definite W. One frequency (2 dimensions) has no effect.",
            legend=curves,
        ),
    ]


def _filling(records: list[Record]) -> list[Panel]:
    holes = records[0]["holes"]
    canvas = Canvas(_HEIGHT)
    table = _means(records, lambda record: record["holes"]["lengths"])
    tints = (GREY, GREEN, ORANGE, PINK)
    curves = [_sign(f"degree {m}", tint) for m, tint in zip(holes["degrees"], tints, strict=False)]
    for curve, row in zip(curves, table, strict=True):
        _curve(canvas, curve, holes["sizes"], row, mode="lines+markers")
    canvas.x("N", type="log", dtick=_OCTAVE)
    canvas.y("longest gap in the range", type="log", tickvals=[0.003, 0.01, 0.03, 0.1], tickformat=".1%")
    words = "The longest gap without an eigenvalue between the symbol’s minimum and maximum. It halves as N doubles."
    return [Panel("Eigenvalues of random Toeplitz matrices fill the range", canvas.figure(), words, legend=curves)]


def _manifold(records: list[Record]) -> list[Panel]:
    tables = [row for record in records for row in record["tables"]]
    encodings = {"sinusoidal": BLUE, "learned": PINK, "random-fixed": GREY}
    curves = [_sign(name, tint, "dash" if name == "learned" else "solid") for name, tint in encodings.items()]
    canvas = Canvas(_HEIGHT)
    for curve in curves:
        own = [row for row in tables if row["encoding"] == curve.title]
        widths = sorted({row["width"] for row in own})
        errors = [np.mean([row["neighbour_error"] for row in own if row["width"] == width]) for width in widths]
        _curve(canvas, curve, widths, errors, mode="lines+markers")
    canvas.x("dimensions", type="log", dtick=_OCTAVE)
    canvas.y("neighbour error", rangemode="tozero")
    canvas.line_at(TOLD, dash="dot")
    canvas.line_at(NOTHING)
    words = "Distance of a position from the midpoint of its two neighbours. At 1 they predict no better than the mean."
    return [Panel("Untrained position tables", canvas.figure(), words, legend=curves)]


def _phases(records: list[Record]) -> list[Panel]:
    ranges = records[0]["ranges"]
    canvas = Canvas(_HEIGHT)
    program = _sign("widest f found by search", PINK)
    fejer = _sign("widest known f", ORANGE, "dash")
    rows = _means(records, lambda record: record["ranges"]["ratio_program"])
    _curve(canvas, fejer, ranges["fejer_sizes"], ranges["ratio_fejer"], mode="lines+markers")
    _curve(canvas, program, ranges["sizes"], rows, mode="lines+markers")
    canvas.x("N", type="log", dtick=_OCTAVE)
    canvas.y("range of f / range of g", range=[0.95, 1.32])
    canvas.line_at(1)
    canvas.line_at(4 / np.pi, dash="dot")
    widest = canvas.figure()

    toeplitz = records[0]["toeplitz"]
    canvas = Canvas(_HEIGHT)
    own, turned = _sign("W = T(3, 1, 1, 0, ..)", GREY), _sign("W∘E", PINK)
    for curve, key in ((own, "w"), (turned, "product")):
        _curve(canvas, curve, toeplitz["angles"], toeplitz[key]["symbol"])
    canvas.x("angle")
    canvas.y("symbol")
    return [
        Panel(
            "“The range of g never falls below that of f”",
            widest,
            "It does from N = 3, by a factor of up to 4/π (dotted). Weights w and phases are found by search.",
            legend=[program, fejer],
        ),
        Panel(
            "By Szegő’s theorem, a product can have a wider spectrum",
            canvas.figure(),
            "Symbols of a Toeplitz matrix and of its product with a unimodular one. The product’s range is wider.",
            legend=[own, turned],
        ),
    ]


def _heads(records: list[Record]) -> list[Panel]:
    plots = []
    rope, alibi = _sign("RoPE", BLUE), _sign("ALiBi", RED)
    for key, title, words, labels, bar in (
        (
            "width",
            "Eigenvalue range of a head's logits, with / without position",
            "Each point is a head of one seed. Below 1, position narrows the range; above 1, it widens it.",
            (("rope", rope), ("alibi", alibi)),
            1.0,
        ),
        (
            "phase_error",
            "Error of the form with one phase per distance",
            "Smallest relative error of the logits as a Gram matrix times one Toeplitz phase. The paper's form has 0.",
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
                canvas.marks(
                    [float(f"{at + d:.4f}") for d in shift],
                    plain(values),
                    {"color": curve.tint, "size": 5, "opacity": 0.65},
                    "%{y:.3g}",
                    name=curve.title,
                )
        canvas.x("", tickvals=[0, 1], ticktext=["untrained", "trained"], range=[-0.5, 1.5])
        canvas.y("", **({"type": "log", "dtick": _OCTAVE} if key == "width" else {"rangemode": "tozero"}))
        canvas.line_at(bar)
        plots.append(Panel(title, canvas.figure(), words, legend=[curve for _, curve in labels]))
    return [*plots, _learned(records)]


def _learned(records: list[Record]) -> Panel:
    canvas = Canvas(_HEIGHT)
    curve = _sign("a learned table", PINK)
    for side, state in enumerate(("untrained", "trained")):
        errors = [found["curve"]["neighbour_error"] for record in records if (found := record.get(f"learned {state}"))]
        canvas.marks(
            [side] * len(errors), plain(errors), {"color": curve.tint, "size": 6}, "%{y:.3g}", name=curve.title
        )
    canvas.x("", tickvals=[0, 1], ticktext=["untrained", "trained"], range=[-0.5, 1.5])
    canvas.y("neighbour error", rangemode="tozero")
    canvas.line_at(TOLD, dash="dot")
    canvas.line_at(NOTHING)
    words = "Each point is a model. Below the dotted line neighbours explain three quarters of a position’s variance."
    return Panel("Training moves neighbours together", canvas.figure(), words, legend=[curve])


def _expressiveness(records: list[Record]) -> list[Panel]:
    plots = []
    bound = _sign("additive, any width (exact)", GREY, "dash")
    additive = _sign("additive, this width (found)", RED)
    rotary = _sign("RoPE, this width (found)", BLUE)
    one = _sign("one angle only (found)", GREEN, "dot")
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
        canvas.y("share of satisfied instances", range=[-0.04, 1.06], tickformat=".0%")
        plots.append(
            Panel(
                f"Random signs, width {width}",
                canvas.figure(),
                "Share of random instances that can be satisfied. The additive bound is exact for any width.",
                legend=[curve for curve, _ in curves],
            )
        )
    return plots


def _row(record: Record, family: str, size: int, width: int) -> Mapping[str, Any]:
    wanted = (family, size, width)
    return next(row for row in record["rows"] if (row["family"], row["size"], row["width"]) == wanted)


def _estimators(records: list[Record]) -> list[Panel]:
    plots = []
    own, shared = _sign("separate content", BLUE), _sign("content shared by query and key", PINK)
    for key, title in (
        ("predictor", "Levinson: the predictor of a planted kernel"),
        ("frequencies", "Levinson: the frequencies of planted sinusoids"),
    ):
        canvas = Canvas(_HEIGHT)
        sizes = records[0]["levinson"]["sizes"]
        for curve, kind in ((own, "own"), (shared, "shared")):
            rows = _means(records, lambda record, kind=kind, key=key: record["levinson"][kind][key])
            _curve(canvas, curve, sizes, np.maximum(rows, 1e-16), mode="lines+markers")
        canvas.x("size of content relative to position")
        canvas.y("relative error", type="log", exponentformat="power")
        words = (
            "Exact without content. Content shared by queries and keys adds noise at distance 0 and prevents recovery."
        )
        plots.append(Panel(title, canvas.figure(), words, legend=[own, shared]))
    return plots


_SECTIONS: tuple[tuple[str, str, str, Callable[[list[Record]], list[Panel]]], ...] = (
    ("filling", "Szegő’s theorem (Theorem 3.1)", "Szegő", _filling),
    ("contraction", "Spectral contraction (Proposition B.3)", "Contraction", _contraction),
    ("phases", "Lemma B.1 and what follows from it", "Lemma B.1", _phases),
    ("heads", "Real heads", "Real heads", _heads),
    ("expressiveness", "Expressiveness (Proposition B.2)", "Expressiveness", _expressiveness),
    ("estimators", "Extracting the position component (Appendix C.4)", "Appendix C.4", _estimators),
    ("manifold", "Position as a curve (Appendix C.4)", "A curve", _manifold),
)
