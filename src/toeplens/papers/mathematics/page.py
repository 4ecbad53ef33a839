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

from toeplens.ground.files import read_yaml
from toeplens.papers.mathematics.statements import UNIVERSAL, Record
from toeplens.papers.mathematics.study import Theory
from toeplens.papers.mathematics.trained import STATES
from toeplens.report.kit.blocks import Block, Panel, Sign, View, numbered
from toeplens.report.kit.canvas import Canvas, plain
from toeplens.report.kit.colours import BLUE, PINK, RED, TINTS
from toeplens.report.kit.page import Page, ledger, ledger_table
from toeplens.studies import RULE
from toeplens.studies.kit.verdicts import OPEN

_TEXTS = read_yaml(Path(__file__).with_name("page.yaml"))
Points = tuple[Iterable[Any], Iterable[Any]]  # of a curve: x and y


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


def _plot(
    plot: str, points: Iterable[Points], mode: str = "lines+markers", numbers: Sequence[int] = (), **words: Any
) -> Panel:
    """Curves with their titles, colours and dashes in page.yaml, where ``$n`` is one of ``numbers`` each."""
    canvas, signs = Canvas(270), []
    for place, ((title, tint, dash), (xs, ys)) in enumerate(zip(_TEXTS["plots"][plot]["curves"], points, strict=False)):
        sign = Sign("", Template(title).substitute(n=numbers[place] if numbers else ""), TINTS[tint], dash=dash)
        told = {"name": sign.title, "mode": mode, "marker": {"color": sign.tint, "size": 6}}
        canvas.lines(map(float, xs), plain(list(ys), 5), sign.tint, "%{x:.4g}: %{y:.4g}", dash=dash, **told)
        signs.append(sign)
    return _panel(plot, canvas, signs, **words)


def _means(records: list[Record], *path: str) -> np.ndarray:
    """Mean over seeds of a table of numbers."""
    return np.mean([np.asarray(reduce(getitem, path, record), dtype=float) for record in records], axis=0)


def _filling(records: list[Record]) -> list[Panel]:
    holes, rows = records[0]["holes"], _means(records, "holes", "lengths")
    return [_plot("holes", [(holes["sizes"], row) for row in rows], numbers=holes["degrees"])]


def _contraction(records: list[Record]) -> list[Panel]:
    sizes, searched = records[0]["sizes"], records[0]["free"]["searched_sizes"]
    example, index = sizes["example"], range(1, len(sizes["example"]["w"]) + 1)
    ratios = [(searched, _means(records, "free", f"ratio_{kind}")) for kind in ("found", "known_positive", "bound")]
    rows = [(sizes["head_dims"], row) for row in _means(records, "sizes", "width_ratio")]
    return [
        _plot("random-w", [(index, sorted(example[name])) for name in ("w", "mean")], "lines"),
        _plot("free", ratios),
        _plot("rope", rows, numbers=sizes["lengths"]),
    ]


def _phases(records: list[Record]) -> list[Panel]:
    ranges, symbols = records[0]["ranges"], records[0]["toeplitz"]
    program = ranges["sizes"], _means(records, "ranges", "ratio_program")
    return [
        _plot("ranges", [program, (ranges["fejer_sizes"], ranges["ratio_fejer"])]),
        _plot("symbols", [(symbols["angles"], symbols[name]["symbol"]) for name in ("w", "product")], "lines"),
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
    def shares(width: int, key: str) -> Points:
        rows = [[row for row in each["rows"] if (row["family"], row["width"]) == ("random", width)] for each in records]
        return [row["constraints"] for row in rows[0]], np.mean(
            [[row["means"][key][0] for row in own] for own in rows], 0
        )

    return [
        _plot("random-signs", [shares(width, key) for key in ("additive", "bound", "rotary", "one_angle")], width=width)
        for width in sorted({row["width"] for row in records[0]["rows"] if row["width"] >= 4})[:3]
    ]


def _estimators(records: list[Record]) -> list[Panel]:
    def errors(kind: str, key: str) -> Points:
        return records[0]["levinson"]["sizes"], np.maximum(_means(records, "levinson", kind, key), 1e-16)

    plots = (("predictor", "predictor of a planted kernel"), ("frequencies", "frequencies of planted sinusoids"))
    return [_plot("levinson", [errors(kind, key) for kind in ("own", "shared")], what=what) for key, what in plots]


def _manifold(records: list[Record]) -> list[Panel]:
    def errors(encoding: str) -> Points:
        rows = [row for record in records for row in record["tables"] if row["encoding"] == encoding]
        widths = sorted({row["width"] for row in rows})
        return widths, [np.mean([row["neighbour_error"] for row in rows if row["width"] == width]) for width in widths]

    return [_plot("tables", map(errors, ("sinusoidal", "learned", "random-fixed")))]


_SECTIONS: dict[str, Callable[[list[Record]], list[Panel]]] = {
    "filling": _filling,
    "contraction": _contraction,
    "phases": _phases,
    "heads": _heads,
    "expressiveness": _expressiveness,
    "estimators": _estimators,
    "manifold": _manifold,
}
