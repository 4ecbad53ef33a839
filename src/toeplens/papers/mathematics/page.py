"""The page of the mathematics: every statement with its verdict, and plots of the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np

from toeplens.papers.mathematics.position import NOTHING, TOLD
from toeplens.papers.mathematics.statements import UNIVERSAL, Record
from toeplens.papers.mathematics.study import Theory
from toeplens.papers.mathematics.trained import ONE_PHASE, STATES
from toeplens.report.kit.blocks import Block, Panel, Sign, View, numbered
from toeplens.report.kit.canvas import Canvas, plain
from toeplens.report.kit.colours import BLUE, GREEN, GREY, ORANGE, PINK, RED
from toeplens.report.kit.page import Page, ledger, ledger_table, write_report
from toeplens.studies import RULE
from toeplens.studies.kit.verdicts import OPEN

Axes = tuple[dict[str, Any], dict[str, Any], Mapping[float, str]]  # x, y, and the dashes of lines across by height
Curve = tuple[str, str, str, Iterable[Any], Iterable[Any]]  # title, colour, dash, and the points


def write_theory(theory: Theory) -> Path:
    """Write the study's page to ``report.html`` in its directory; returns its path."""
    return write_report(theory.directory, render_theory(theory))


def render_theory(theory: Theory) -> str:
    """The page as one self-contained HTML document. Deterministic."""
    return theory_page(theory).html()


def theory_page(theory: Theory) -> Page:
    """The figures and the ledger of the mathematics."""
    sections = [each for each in _SECTIONS if theory.records.get(each[0])]
    claims = ledger(theory.entries)
    return Page(
        "papers/mathematics/page.html.j2",
        numbered(
            Block(name, title, "", [View.of(make(list(theory.records[name])))], "") for name, title, _, make in sections
        ),
        {"claims": ledger_table(claims, "Statement")},
        {
            "theory": theory,
            "short": [(name, short) for name, _, short, _ in sections],
            "claims": claims,
            "tally": Counter("open" if entry.verdict in OPEN else entry.verdict for entry in theory.entries),
            "rules": (UNIVERSAL, RULE),
        },
    )


def _axes(x: str, y: str, log: str = "", lines: Mapping[float, str] | None = None, **options: Any) -> Axes:
    """Titles of the axes, those that are logarithmic with a tick per octave, and options of the vertical one."""
    both = {name: {"type": "log", "dtick": float(np.log10(2))} if name in log else {} for name in "xy"}
    return {"title": x, **both["x"]}, {"title": y, **both["y"], **options}, lines or {}


def _panel(title: str, words: str, axes: Axes, canvas: Canvas, legend: Sequence[Sign]) -> Panel:
    x, y, lines = axes
    canvas.x(**x)
    canvas.y(**y)
    for at, dash in lines.items():
        canvas.line_at(at, dash=dash)
    return Panel(title, canvas.figure(), words, legend=legend)


def _plot(title: str, words: str, axes: Axes, curves: Sequence[Curve], mode: str = "lines+markers") -> Panel:
    canvas = Canvas(270)
    for name, tint, dash, xs, ys in curves:
        points, marker = (map(float, xs), plain(list(ys), 5)), {"color": tint, "size": 6}
        canvas.lines(*points, tint, "%{x:.4g}: %{y:.4g}", dash=dash, mode=mode, marker=marker, name=name)
    return _panel(title, words, axes, canvas, [Sign("", name, tint, dash=dash) for name, tint, dash, _, _ in curves])


def _means(records: list[Record], *path: str) -> np.ndarray:
    """Mean over seeds of a table of numbers."""
    return np.mean([np.asarray(reduce(getitem, path, record), dtype=float) for record in records], axis=0)


def _filling(records: list[Record]) -> list[Panel]:
    holes, tints = records[0]["holes"], (GREY, GREEN, ORANGE, PINK)
    rows = zip(holes["degrees"], tints, _means(records, "holes", "lengths"), strict=True)
    ticks = {"type": "log", "tickvals": [0.003, 0.01, 0.03, 0.1], "tickformat": ".1%"}
    return [
        _plot(
            "Eigenvalues of random Toeplitz matrices fill the range",
            "The longest gap without an eigenvalue between the symbol’s minimum and maximum. It halves as N doubles.",
            _axes("N", "longest gap in the range", "x", **ticks),
            [(f"degree {degree}", tint, "solid", holes["sizes"], row) for degree, tint, row in rows],
        )
    ]


def _contraction(records: list[Record]) -> list[Panel]:
    sizes, searched = records[0]["sizes"], records[0]["free"]["searched_sizes"]
    example, index = sizes["example"], range(1, len(sizes["example"]["w"]) + 1)
    found, known, bound = (_means(records, "free", f"ratio_{kind}") for kind in ("found", "known_positive", "bound"))
    tints, rows = (GREY, GREEN, ORANGE, PINK, BLUE), _means(records, "sizes", "width_ratio")
    return [
        _plot(
            "Eigenvalues of a random W",
            "With one frequency, W∘E has the same eigenvalues as W. Only the mean over frequencies narrows the range.",
            _axes("index of the eigenvalue, sorted", ""),
            [
                ("W, and W∘E of one frequency", GREY, "solid", index, sorted(example["w"])),
                ("W∘Ē, the mean over frequencies", BLUE, "solid", index, sorted(example["mean"])),
            ],
            "lines",
        ),
        _plot(
            "Free phases: the range can grow",
            "E with |E_ij| = 1 and one phase per offset, as in the paper. Above 1 the spectrum of W∘E is wider.",
            _axes("N", "width of W∘E / width of W", "xy", {1: "dash"}),
            [
                ("widest found, W positive definite", PINK, "solid", searched, found),
                ("widest found, symbol of W positive too", ORANGE, "dash", searched, known),
                ("upper bound √(N/2)", GREY, "dot", searched, bound),
            ],
        ),
        _plot(
            "Contraction by the mean over RoPE's frequencies",
            "By head dimension and length, for random positive definite W. One frequency (2 dimensions) has no effect.",
            _axes("head dimension", "width of W∘Ē / width of W", "x", {1: "dash"}, range=[0.4, 1.05]),
            [
                (f"N = {n}", tint, "solid", sizes["head_dims"], row)
                for n, tint, row in zip(sizes["lengths"], tints, rows, strict=False)
            ],
        ),
    ]


def _phases(records: list[Record]) -> list[Panel]:
    ranges, symbols = records[0]["ranges"], records[0]["toeplitz"]
    angles, program = symbols["angles"], _means(records, "ranges", "ratio_program")
    return [
        _plot(
            "“The range of g never falls below that of f”",
            "It does from N = 3, by a factor of up to 4/π (dotted). Weights w and phases are found by search.",
            _axes("N", "range of f / range of g", "x", {1: "dash", 4 / np.pi: "dot"}, range=[0.95, 1.32]),
            [
                ("widest f found by search", PINK, "solid", ranges["sizes"], program),
                ("widest known f", ORANGE, "dash", ranges["fejer_sizes"], ranges["ratio_fejer"]),
            ],
        ),
        _plot(
            "By Szegő’s theorem, a product can have a wider spectrum",
            "Symbols of a Toeplitz matrix and of its product with a unimodular one. The product’s range is wider.",
            _axes("angle", "symbol"),
            [
                ("W = T(3, 1, 1, 0, ..)", GREY, "solid", angles, symbols["w"]["symbol"]),
                ("W∘E", PINK, "solid", angles, symbols["product"]["symbol"]),
            ],
            "lines",
        ),
    ]


def _heads(records: list[Record]) -> list[Panel]:
    def points(title: str, words: str, axes: Axes, encodings: Mapping[str, tuple[str, str]], *path: str) -> Panel:
        """Side by side for each state: the numbers at a path, one per head or, if they are of the curve, per model."""
        canvas, per_model = Canvas(270), path[0] == "curve"
        axes[0].update(tickvals=[0, 1], ticktext=list(STATES), range=[-0.5, 1.5])
        for place, (label, (name, tint)) in enumerate(encodings.items()):
            for side, state in enumerate(STATES):
                found = [record.get(f"{label} {state}") for record in records]
                values = np.ravel([reduce(getitem, path, each) for each in found if each]).tolist()
                at = side + (place - (len(encodings) - 1) / 2) * 0.34
                shifts = np.linspace(-0.12, 0.12, max(1, len(values)))
                xs = [side] * len(values) if per_model else [float(f"{at + shift:.4f}") for shift in shifts]
                marker = {"color": tint, "size": 6} if per_model else {"color": tint, "size": 5, "opacity": 0.65}
                canvas.marks(xs, plain(values), marker, "%{y:.3g}", name=name)
        return _panel(title, words, axes, canvas, [Sign("", *sign, dash="solid") for sign in encodings.values()])

    return [
        points(
            "Eigenvalue range of a head's logits, with / without position",
            "Each point is a head of one seed. Below 1, position narrows the range; above 1, it widens it.",
            _axes("", "", "y", {1.0: "dash"}),
            {"rope": ("RoPE", BLUE), "alibi": ("ALiBi", RED)},
            "width",
        ),
        points(
            "Error of the form with one phase per distance",
            "Smallest relative error of the logits as a Gram matrix times one Toeplitz phase. The paper's form has 0.",
            _axes("", "", "", {ONE_PHASE: "dash"}, rangemode="tozero"),
            {"rope": ("RoPE", BLUE)},
            "phase_error",
        ),
        points(
            "Training moves neighbours together",
            "Each point is a model. Below the dotted line neighbours explain three quarters of a position’s variance.",
            _axes("", "neighbour error", "", {TOLD: "dot", NOTHING: "dash"}, rangemode="tozero"),
            {"learned": ("a learned table", PINK)},
            "curve",
            "neighbour_error",
        ),
    ]


def _expressiveness(records: list[Record]) -> list[Panel]:
    encodings = {
        "additive": ("additive, this width (found)", RED, "solid"),
        "bound": ("additive, any width (exact)", GREY, "dash"),
        "rotary": ("RoPE, this width (found)", BLUE, "solid"),
        "one_angle": ("one angle only (found)", GREEN, "dot"),
    }

    def shares(width: int, key: str) -> tuple[list[float], np.ndarray]:
        rows = [[row for row in each["rows"] if (row["family"], row["width"]) == ("random", width)] for each in records]
        return [row["constraints"] for row in rows[0]], np.mean(
            [[row["means"][key][0] for row in own] for own in rows], 0
        )

    return [
        _plot(
            f"Random signs, width {width}",
            "Share of random instances that can be satisfied. The additive bound is exact for any width.",
            _axes(
                "wanted signs (content pair and offset)",
                "share of satisfied instances",
                range=[-0.04, 1.06],
                tickformat=".0%",
            ),
            [(*encoding, *shares(width, key)) for key, encoding in encodings.items()],
        )
        for width in sorted({row["width"] for row in records[0]["rows"] if row["width"] >= 4})[:3]
    ]


def _estimators(records: list[Record]) -> list[Panel]:
    sizes = records[0]["levinson"]["sizes"]
    contents = (("separate content", BLUE, "own"), ("content shared by query and key", PINK, "shared"))
    return [
        _plot(
            f"Levinson: the {title}",
            "Exact without content. Content shared by queries and keys adds noise at distance 0 and prevents recovery.",
            _axes("size of content relative to position", "relative error", type="log", exponentformat="power"),
            [
                (name, tint, "solid", sizes, np.maximum(_means(records, "levinson", kind, key), 1e-16))
                for name, tint, kind in contents
            ],
        )
        for key, title in (
            ("predictor", "predictor of a planted kernel"),
            ("frequencies", "frequencies of planted sinusoids"),
        )
    ]


def _manifold(records: list[Record]) -> list[Panel]:
    def errors(encoding: str) -> tuple[list[int], list[Any]]:
        rows = [row for record in records for row in record["tables"] if row["encoding"] == encoding]
        widths = sorted({row["width"] for row in rows})
        return widths, [np.mean([row["neighbour_error"] for row in rows if row["width"] == width]) for width in widths]

    encodings = (("sinusoidal", BLUE, "solid"), ("learned", PINK, "dash"), ("random-fixed", GREY, "solid"))
    return [
        _plot(
            "Untrained position tables",
            "Distance of a position from the midpoint of its two neighbours. "
            "At 1 they predict no better than the mean.",
            _axes("dimensions", "neighbour error", "x", {TOLD: "dot", NOTHING: "dash"}, rangemode="tozero"),
            [(*encoding, *errors(encoding[0])) for encoding in encodings],
        )
    ]


_SECTIONS: tuple[tuple[str, str, str, Callable[[list[Record]], list[Panel]]], ...] = (
    ("filling", "Szegő’s theorem (Theorem 3.1)", "Szegő", _filling),
    ("contraction", "Spectral contraction (Proposition B.3)", "Contraction", _contraction),
    ("phases", "Lemma B.1 and what follows from it", "Lemma B.1", _phases),
    ("heads", "Real heads", "Real heads", _heads),
    ("expressiveness", "Expressiveness (Proposition B.2)", "Expressiveness", _expressiveness),
    ("estimators", "Extracting the position component (Appendix C.4)", "Appendix C.4", _estimators),
    ("manifold", "Position as a curve (Appendix C.4)", "A curve", _manifold),
)
