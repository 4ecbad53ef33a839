"""The page of the mathematics: every statement with its verdict, and plots of the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from toeplens.papers.mathematics.statements import UNIVERSAL, Record
from toeplens.papers.mathematics.study import Theory
from toeplens.papers.mathematics.trained import STATES
from toeplens.report.kit.blocks import Block, Panel, Sign, View, numbered
from toeplens.report.kit.canvas import Canvas, plain
from toeplens.report.kit.colours import BLUE, GREEN, GREY, ORANGE, PINK, RED
from toeplens.report.kit.page import Page, ledger, ledger_table, write_report
from toeplens.studies import RULE
from toeplens.studies.kit.claims import read_yaml
from toeplens.studies.kit.verdicts import OPEN

_TEXTS = read_yaml(Path(__file__).with_name("page.yaml"))
Curve = tuple[str, str, str, Iterable[Any], Iterable[Any]]  # title, colour, dash, and the points


def write_theory(theory: Theory) -> Path:
    """Write the study's page to ``report.html`` in its directory; returns its path."""
    return write_report(theory.directory, render_theory(theory))


def render_theory(theory: Theory) -> str:
    """The page as one self-contained HTML document. Deterministic."""
    return theory_page(theory).html()


def theory_page(theory: Theory) -> Page:
    """The figures and the ledger of the mathematics."""
    sections = [name for name in _SECTIONS if theory.records.get(name)]
    claims = ledger(theory.entries)
    views = {name: [View.of(_SECTIONS[name](list(theory.records[name])))] for name in sections}
    return Page(
        "papers/mathematics/page.html.j2",
        numbered(Block(name, _TEXTS["sections"][name]["title"], "", found, "") for name, found in views.items()),
        {"claims": ledger_table(claims, "Statement")},
        {
            "theory": theory,
            "short": [(name, _TEXTS["sections"][name]["short"]) for name in sections],
            "claims": claims,
            "tally": Counter("open" if entry.verdict in OPEN else entry.verdict for entry in theory.entries),
            "rules": (UNIVERSAL, RULE),
        },
    )


def _panel(plot: str, canvas: Canvas, legend: Sequence[Sign], **words: Any) -> Panel:
    """A plot with its texts and axes in page.yaml, in whose title ``words`` are filled in."""
    own = _TEXTS["plots"][plot]
    both = {name: {"type": "log", "dtick": float(np.log10(2))} if name in own.get("log", "") else {} for name in "xy"}
    canvas.x(own.get("x", ""), **both["x"])
    canvas.y(own.get("y", ""), **both["y"], **own.get("options", {}))
    for at, dash in own.get("lines", {}).items():
        canvas.line_at(at, dash=dash)
    return Panel(Template(own["title"]).substitute(words), canvas.figure(), own["shows"], legend=legend)


def _plot(plot: str, curves: Sequence[Curve], mode: str = "lines+markers", **words: Any) -> Panel:
    canvas = Canvas(270)
    for name, tint, dash, xs, ys in curves:
        points, marker = (map(float, xs), plain(list(ys), 5)), {"color": tint, "size": 6}
        canvas.lines(*points, tint, "%{x:.4g}: %{y:.4g}", dash=dash, mode=mode, marker=marker, name=name)
    return _panel(plot, canvas, [Sign("", name, tint, dash=dash) for name, tint, dash, _, _ in curves], **words)


def _means(records: list[Record], *path: str) -> np.ndarray:
    """Mean over seeds of a table of numbers."""
    return np.mean([np.asarray(reduce(getitem, path, record), dtype=float) for record in records], axis=0)


def _filling(records: list[Record]) -> list[Panel]:
    holes, tints = records[0]["holes"], (GREY, GREEN, ORANGE, PINK)
    rows = zip(holes["degrees"], tints, _means(records, "holes", "lengths"), strict=True)
    return [_plot("holes", [(f"degree {degree}", tint, "solid", holes["sizes"], row) for degree, tint, row in rows])]


def _contraction(records: list[Record]) -> list[Panel]:
    sizes, searched = records[0]["sizes"], records[0]["free"]["searched_sizes"]
    example, index = sizes["example"], range(1, len(sizes["example"]["w"]) + 1)
    found, known, bound = (_means(records, "free", f"ratio_{kind}") for kind in ("found", "known_positive", "bound"))
    tints, rows = (GREY, GREEN, ORANGE, PINK, BLUE), _means(records, "sizes", "width_ratio")
    return [
        _plot(
            "random-w",
            [
                ("W, and W∘E of one frequency", GREY, "solid", index, sorted(example["w"])),
                ("W∘Ē, the mean over frequencies", BLUE, "solid", index, sorted(example["mean"])),
            ],
            "lines",
        ),
        _plot(
            "free",
            [
                ("widest found, W positive definite", PINK, "solid", searched, found),
                ("widest found, symbol of W positive too", ORANGE, "dash", searched, known),
                ("upper bound √(N/2)", GREY, "dot", searched, bound),
            ],
        ),
        _plot(
            "rope",
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
            "ranges",
            [
                ("widest f found by search", PINK, "solid", ranges["sizes"], program),
                ("widest known f", ORANGE, "dash", ranges["fejer_sizes"], ranges["ratio_fejer"]),
            ],
        ),
        _plot(
            "symbols",
            [
                ("W = T(3, 1, 1, 0, ..)", GREY, "solid", angles, symbols["w"]["symbol"]),
                ("W∘E", PINK, "solid", angles, symbols["product"]["symbol"]),
            ],
            "lines",
        ),
    ]


def _heads(records: list[Record]) -> list[Panel]:
    def points(plot: str, encodings: Mapping[str, tuple[str, str]], *path: str) -> Panel:
        """Side by side for each state: the numbers at a path, one per head or, if they are of the curve, per model."""
        canvas, per_model = Canvas(270), path[0] == "curve"
        for place, (label, (name, tint)) in enumerate(encodings.items()):
            for side, state in enumerate(STATES):
                found = [record.get(f"{label} {state}") for record in records]
                values = np.ravel([reduce(getitem, path, each) for each in found if each]).tolist()
                at = side + (place - (len(encodings) - 1) / 2) * 0.34
                shifts = np.linspace(-0.12, 0.12, max(1, len(values)))
                xs = [side] * len(values) if per_model else [float(f"{at + shift:.4f}") for shift in shifts]
                marker = {"color": tint, "size": 6} if per_model else {"color": tint, "size": 5, "opacity": 0.65}
                canvas.marks(xs, plain(values), marker, "%{y:.3g}", name=name)
        canvas.x(tickvals=[0, 1], ticktext=list(STATES), range=[-0.5, 1.5])
        return _panel(plot, canvas, [Sign("", *sign, dash="solid") for sign in encodings.values()])

    return [
        points("range", {"rope": ("RoPE", BLUE), "alibi": ("ALiBi", RED)}, "width"),
        points("phase", {"rope": ("RoPE", BLUE)}, "phase_error"),
        points("curve", {"learned": ("a learned table", PINK)}, "curve", "neighbour_error"),
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
        _plot("random-signs", [(*encoding, *shares(width, key)) for key, encoding in encodings.items()], width=width)
        for width in sorted({row["width"] for row in records[0]["rows"] if row["width"] >= 4})[:3]
    ]


def _estimators(records: list[Record]) -> list[Panel]:
    sizes = records[0]["levinson"]["sizes"]
    contents = (("separate content", BLUE, "own"), ("content shared by query and key", PINK, "shared"))
    return [
        _plot(
            "levinson",
            [
                (name, tint, "solid", sizes, np.maximum(_means(records, "levinson", kind, key), 1e-16))
                for name, tint, kind in contents
            ],
            what=what,
        )
        for key, what in (
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
    return [_plot("tables", [(*encoding, *errors(encoding[0])) for encoding in encodings])]


_SECTIONS: dict[str, Callable[[list[Record]], list[Panel]]] = {
    "filling": _filling,
    "contraction": _contraction,
    "phases": _phases,
    "heads": _heads,
    "expressiveness": _expressiveness,
    "estimators": _estimators,
    "manifold": _manifold,
}
