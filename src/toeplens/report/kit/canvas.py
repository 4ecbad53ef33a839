"""Building blocks of figures: a panel with its axes and traces, the plane of shares, heat maps."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from toeplens.ground.words import fixed, or_none, whole
from toeplens.lens import Estimate
from toeplens.report.kit.blocks import Panel, Sign, View
from toeplens.report.kit.colours import GUESS, faded
from toeplens.studies.kit.results import estimated

if TYPE_CHECKING:
    from toeplens.studies import Results

_GRID = "rgba(128, 136, 150, 0.22)"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_LABEL = 12  # pixels that a label needs for itself


class Canvas:
    """Builder of a panel: transparent background, no title, no dragging (so touch scrolls the page).

    Traces and layout are collected as dictionaries and passed to plotly once, which is much faster than updating a
    figure.
    """

    def __init__(self, height: int, *, left: int = 56, right: int = 10, top: int = 8, bottom: int = 42) -> None:
        self.traces: list[dict[str, Any]] = []
        self.height, self.margin = height, {"l": left, "r": right, "t": top, "b": bottom}
        axis = {"gridcolor": _GRID, "zeroline": False, "fixedrange": True, "linecolor": _GRID}
        self._axes = {"xaxis": dict(axis), "yaxis": dict(axis)}
        self._shapes: list[dict[str, Any]] = []
        self._notes: list[dict[str, Any]] = []
        self._colours: dict[str, Any] = {}

    def add(self, kind: str, **trace: Any) -> None:
        """Add a trace of plotly's type ``kind``."""
        self.traces.append({"type": kind, **trace})

    def lines(
        self,
        xs: Iterable[Any],
        ys: Iterable[Any],
        tint: str,
        hover: str | Sequence[str] = "",
        *,
        width: float = 2,
        dash: str = "solid",
        **trace: Any,
    ) -> None:
        """Add a line, with markers if ``marker`` is given. ``hover`` is a template, or one text per point."""
        trace.setdefault("mode", "lines+markers" if "marker" in trace else "lines")
        line = {"color": tint, "width": width, "dash": dash}
        self.add("scatter", x=list(xs), y=list(ys), line=line, **_pointed(hover), **trace)

    def marks(
        self,
        xs: Iterable[Any],
        ys: Iterable[Any],
        marker: dict[str, Any],
        hover: str | Sequence[str] = "",
        **trace: Any,
    ) -> None:
        """Add markers with plotly's options. ``hover`` is a template, or one text per point."""
        self.add("scatter", x=list(xs), y=list(ys), mode="markers", marker=marker, **_pointed(hover), **trace)

    def band(
        self, xs: Sequence[float], low: Sequence[Any], high: Sequence[Any], tint: str, alpha: float, key: str
    ) -> None:
        """Add a band that the legend entry ``key`` toggles."""
        edge: dict[str, Any] = {"x": xs, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "meta": key}
        self.add("scatter", y=low, **edge)
        self.add("scatter", y=high, fill="tonexty", fillcolor=faded(tint, alpha), **edge)

    def violin(self, place: float, values: Sequence[float], tint: str, hover: Sequence[str], **trace: Any) -> None:
        """Add a violin with points; ``size`` and ``opacity`` apply to the points."""
        marker = {"color": tint, "size": trace.pop("size"), "opacity": trace.pop("opacity")}
        self.add(
            "violin",
            x=[place] * len(values),
            y=values,
            hoveron="points",
            points="all",
            pointpos=0,
            spanmode="hard",
            scalemode="width",
            line={"color": tint, "width": 1},
            fillcolor=faded(tint, 0.16),
            marker=marker,
            **_pointed(hover),
            **trace,
        )

    def heat(
        self,
        z: Sequence[Sequence[float | None]],
        x: Sequence[Any],
        y: Sequence[Any],
        limit: float,
        hover: str | Sequence[Sequence[str]],
        *,
        gap: int | tuple[int, int] = 0,
        numbers: Sequence[Sequence[str]] | None = None,
        size: int = 11,
        **trace: Any,
    ) -> None:
        """Add a heat map in the page's colours from -``limit`` to ``limit``; unknown values stay empty.

        Arguments
            hover    a template, or a text a cell
            gap      pixels between columns, and between rows
            numbers  what stands in the cells, if anything, ``size`` pixels high
        """
        across, down = gap if isinstance(gap, tuple) else (gap, gap)
        if not isinstance(hover, str):
            trace |= {"customdata": hover, "hovertemplate": "%{customdata}<extra></extra>"}
        else:
            trace["hovertemplate"] = hover
        if numbers is not None:
            trace |= {"text": numbers, "texttemplate": "%{text}", "textfont": {"size": size}}
        self.add("heatmap", z=z, x=x, y=y, coloraxis="coloraxis", hoverongaps=False, xgap=across, ygap=down, **trace)
        self._colours = {"coloraxis": {"cmin": -limit, "cmax": limit, "showscale": False}}

    def straight(self, xs: Sequence[float], ys: Sequence[float], dash: str = "dot", width: float = 1) -> None:
        """Add a thin reference line without hover text."""
        self.lines(xs, ys, GUESS, width=width, dash=dash, hoverinfo="skip")

    def x(self, title: str = "", **options: Any) -> None:
        """Set options of the horizontal axis."""
        self._axes["xaxis"] |= {"title": {"text": title, "standoff": 5}, **options}

    def y(self, title: str = "", **options: Any) -> None:
        """Set options of the vertical axis."""
        self._axes["yaxis"] |= {"title": {"text": title, "standoff": 5}, **options}

    def steps(self) -> None:
        """Use the horizontal axis for training steps."""
        self.x("training step", rangemode="tozero", nticks=5)

    def percent(self, top: float, title: str = "") -> None:
        """Use the vertical axis for accuracies, from 0 to a little above ``top``."""
        self.y(title, range=[0, top * 1.05], tickformat=".0%")

    def line_at(self, at: float, *, vertical: bool = False, dash: str = "dash") -> None:
        """Add a thin line across the panel."""
        along, across = ("y", "x") if vertical else ("x", "y")
        ends = {f"{along}ref": "paper", f"{along}0": 0, f"{along}1": 1, f"{across}0": at, f"{across}1": at}
        self._shapes.append(
            {"type": "line", "line": {"color": GUESS, "width": 1, "dash": dash}, "layer": "below", **ends}
        )

    def note(self, text: str, **place: Any) -> None:
        """Add a text in or next to the panel."""
        self._notes.append({"text": text, "showarrow": False, "font": {"size": 10}, **place})

    def figure(self, **layout: Any) -> go.Figure:
        """The finished figure."""
        return go.Figure(
            data=self.traces,
            layout={
                "template": go.layout.Template(),
                "height": self.height,
                "margin": self.margin,
                "paper_bgcolor": "rgba(0,0,0,0)",
                "plot_bgcolor": "rgba(0,0,0,0)",
                "font": {"family": _FONT, "size": 12, "color": "#4a525e"},
                "showlegend": False,
                "hovermode": "closest",
                "dragmode": False,
                "shapes": self._shapes,
                "annotations": self._notes,
                **self._axes,
                **self._colours,
                **layout,
            },
        )


def guess_levels(results: Results, task: str) -> dict[str, float]:
    """The baselines of a task: ``chance``, and ``length only`` if the sequence length is informative."""
    cell = next((cell for cell in results.cells if cell.key.task == task), None)
    if cell is None:
        return {}
    helps = cell.length_chance > cell.chance * 1.02
    return {"chance": cell.chance, **({"length<br>only": cell.length_chance} if helps else {})}


def guesses_across(canvas: Canvas, levels: dict[str, float], top: float) -> None:
    """Horizontal lines at the baselines, labelled in the right margin without overlap."""
    pixels = (canvas.height - canvas.margin["t"] - canvas.margin["b"]) / (top * 1.05)
    lowest_free = 0.0
    for text, at in levels.items():
        canvas.line_at(at, dash="dot" if text == "chance" else "dash")
        half = _LABEL / 2 * (1 + text.count("<br>"))
        middle = max(at * pixels, lowest_free + half)
        lowest_free = middle + half
        canvas.note(text, xref="paper", x=1, y=at, xanchor="left", align="left", xshift=3, yshift=middle - at * pixels)
    canvas.margin["r"] = max(canvas.margin["r"], 46)


def guesses_down(canvas: Canvas, levels: dict[str, float]) -> None:
    """Vertical lines at the baselines, labelled above the panel, one row each (needs enough top margin)."""
    for row, (text, at) in enumerate(levels.items()):
        canvas.line_at(at, vertical=True, dash="dot" if text == "chance" else "dash")
        words = text.replace("<br>", " ")
        canvas.note(words, x=at, yref="paper", y=1, xanchor="left", yanchor="bottom", xshift=-3, yshift=_LABEL * row)


def plain(values: Any, digits: int = 4) -> list[float | None]:
    """Numbers for JSON, with a few significant digits; None if not finite."""
    return [or_none(float(f"{value:.{digits}g}")) for value in np.asarray(values, dtype=float).tolist()]


def by_sign(values: np.ndarray, floor: float) -> Iterator[tuple[str, str, list[float | None]]]:
    """Values above ``floor`` in size, for a logarithmic axis: dash, sign and numbers, positive then negative."""
    for dash, sign, part in (("solid", "", values), ("dot", "−", -values)):
        shown = np.where(part > floor, part, np.nan)
        if np.isfinite(shown).any():
            yield dash, sign, plain(shown)


def untagged(text: str) -> str:
    """A text escaped for plotly."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _pointed(hover: str | Sequence[str]) -> dict[str, Any]:
    if isinstance(hover, str):
        return {"hovertemplate": hover} if hover else {}
    return {"text": hover, "hovertemplate": "%{text}<extra></extra>"}


# ---- the plane of positional and symbolic shares ---------------------------------------------------------------------

_SMALLEST, _LARGEST = 5.0, 20.0  # pixels across: of a head without which nothing is lost, and everything


def triangle() -> Canvas:
    canvas = Canvas(380, left=46, right=6, top=4, bottom=40)
    axis = {"range": [-0.1, 1.06], "tickvals": [0, 0.25, 0.5, 0.75, 1], "constrain": "domain"}
    canvas.x("positional share", **axis)
    canvas.y("symbolic share", scaleanchor="x", **axis)
    canvas.straight([0, 1, 0, 0], [0, 0, 1, 0], dash="solid")
    canvas.note("<b>positional</b>", x=1.03, y=-0.06, xanchor="right")
    canvas.note("<b>symbolic</b>", x=0.08, y=1.02, xanchor="left")
    canvas.note("<b>interaction</b>", x=0, y=-0.06, xanchor="left")
    return canvas


@dataclass(frozen=True)
class Look:
    """The look of an encoding or a task on the page.

    key            its label in the study; its entry in a legend, and its traces' meta
    tint           colour
    symbol, glyph  its marker, by plotly's name and as a character
    """

    key: str
    title: str
    tint: str
    symbol: str
    glyph: str

    def add(self, canvas: Canvas, xs: Iterable[float], ys: Iterable[float], hover: str, **trace: Any) -> None:
        """Add markers that its legend entry toggles; ``marker`` overrides its options."""
        marker = {"color": self.tint, "symbol": self.symbol} | trace.pop("marker")
        canvas.marks(xs, ys, marker, hover, name=untagged(self.title), meta=self.key, **trace)

    def heads(self, lost: Iterable[float]) -> dict[str, Any]:
        """Markers of heads; the size is the accuracy drop from ablating the head."""
        sizes = [round(_SMALLEST + (_LARGEST - _SMALLEST) * min(1.0, drop) ** 0.5, 1) for drop in lost]
        return {"color": self.tint, "symbol": self.symbol, "size": sizes, "opacity": 0.6, "line": {"width": 0}}

    @property
    def sign(self) -> Sign:
        """Its legend entry."""
        return Sign(self.key, self.title, self.tint, self.glyph)

    def panel(self, figure: go.Figure) -> Panel:
        """A panel with its title and marker."""
        return Panel(self.title, figure, tint=self.tint, glyph=self.glyph)


def legend(looks: Iterable[Look], views: Iterable[View]) -> list[Sign]:
    """The legend entries of the looks that have a trace."""
    panels = [panel for view in views for group in view.groups for panel in group.panels]
    drawn = {trace.meta for panel in panels for trace in cast("tuple[Any, ...]", panel.figure.data)}
    return [look.sign for look in looks if look.key in drawn]


# ---- maps of numbers by row and column -------------------------------------------------------------------------------

FEW = 16  # rows and columns up to which cells have numbers and all rows have labels
_TALL = 720  # pixels that rows take at most


def heat(
    shares: Float[np.ndarray, "R C"],
    rows: Sequence[str],
    columns: Sequence[str],
    limit: float,
    *,
    ticks: tuple[Sequence[int], Sequence[str]],
    title: str,
    right: int = 6,
    hover: Sequence[Sequence[str]] | None = None,
    numbers: Sequence[Sequence[str]] | None = None,
) -> go.Figure:
    """A heat map of shares by row and column; unknown values stay empty.

    columns  unique names of the columns, for hover texts
    limit    the share at the end of the colour scale
    ticks    which columns have a label below, and the labels
    hover    tooltip of each cell (default: its share)
    numbers  text in the cells (default: the shares of a few, unless ``hover`` is set)
    """
    count = len(rows)
    size = 22 if count <= FEW else max(4, min(14, _TALL // count))
    few = count <= FEW and len(columns) <= FEW
    longest = max((len(row) for row in rows), default=0)
    below = 34 + 15 * (1 + max((text.count("<br>") for text in ticks[1]), default=0))
    canvas = Canvas(min(size * count, _TALL) + below, left=14 + 7 * longest, right=right, top=4, bottom=below - 4)
    step = max(1, -(-count * 14 // min(size * count, _TALL)))
    canvas.heat(
        [plain(row, 6 if hover else 3) for row in shares],
        list(columns),
        list(rows),
        limit,
        hover or "%{y}, %{x}: %{z:.1%}<extra></extra>",
        gap=(int(len(columns) <= 2 * FEW), int(count <= 2 * FEW)),  # none where cells are small
        numbers=numbers if hover else [[whole(value) for value in row] for row in shares] if few else None,
        size=10,
    )
    axis: dict[str, Any] = {"showgrid": False, "type": "category", "ticks": "", "tickangle": 0}
    canvas.x(title, tickvals=list(ticks[0]), ticktext=list(ticks[1]), **axis)
    shown = list(range(0, count, step))
    canvas.y("", autorange="reversed", tickvals=shown, ticktext=[rows[i] for i in shown], **axis)
    return canvas.figure()


# ---- dot plots: rows with one number per seed, their mean, and Student's interval of the mean ------------------------


@dataclass(frozen=True)
class Series:
    """A series of a dot plot with one marker.

    key     its entry in the legend; empty without one
    values  for each line of the figure, a number a seed; a line without numbers stays empty
    tints   for each line, its colour
    """

    key: str
    title: str
    symbol: str
    values: Sequence[Mapping[int, float]]
    tints: Sequence[str]


def dots(
    lines: Sequence[str],
    series: Sequence[Series],
    title: str,
    *,
    scale: float = 1.0,
    digits: int = 1,
    span: tuple[float, float] | None = None,
    marks: Sequence[float] = (),
) -> go.Figure:
    """A dot plot with rows from top to bottom: each seed is a small ring, the mean a marker with its interval.

    Arguments
        lines   what stands at the left
        series  drawn next to each other in each row
        title   of the numbers' axis
        scale   what numbers are multiplied by
        digits  decimals of printed numbers
        span    ends of the axis (default: the range of the values, and half as much on each side for
                intervals; longer intervals are clipped and printed in full)
        marks   where thin lines go, in the axis's unit
    """
    wrapped = ["<br>".join(textwrap.wrap(line, 24)) or " " for line in lines]
    heights = [max(15 * (1 + text.count("<br>")), 13 * len(series)) + 8 for text in wrapped]
    canvas = Canvas(44 + sum(heights), right=14, top=4, bottom=40, left=20)
    centres = [sum(heights[:i]) + height / 2 for i, height in enumerate(heights)]
    ends = _needed(series, scale, marks) if span is None else span
    for place, one in enumerate(series):
        offset = (place - (len(series) - 1) / 2) * 12
        _add(canvas, lines, one, [centre + offset for centre in centres], scale, digits, clip=span is None)
    for mark in marks:
        canvas.line_at(mark, vertical=True)
    canvas.y(tickvals=centres, ticktext=wrapped, range=[sum(heights), 0], automargin=True, showgrid=False)
    canvas.x(title, **({} if ends is None else {"range": list(ends)}), nticks=7)
    return canvas.figure()


def _needed(series: Sequence[Series], scale: float, marks: Sequence[float]) -> tuple[float, float] | None:
    found = [values for one in series for values in one.values]
    seen = [scale * value for values in found for value in values.values() if isfinite(value)] + list(marks)
    if len(set(seen)) < 2:
        return None
    means = [mean for values in found if (mean := estimated(dict(values))) and isfinite(mean.low)]
    low, high = min(seen), max(seen)
    room = (high - low) / 2
    low = max(low - room, min([low, *(scale * mean.low for mean in means)]))
    high = min(high + room, max([high, *(scale * mean.high for mean in means)]))
    margin = (high - low) / 25
    return low - margin, high + margin


def _add(
    canvas: Canvas,
    lines: Sequence[str],
    one: Series,
    places: Sequence[float],
    scale: float,
    digits: int,
    *,
    clip: bool,
) -> None:
    rings = [
        (scale * value, place, tint, f"<b>{line}</b><br>{one.title}seed {seed}: {scale * value:.{digits}f}")
        for line, values, place, tint in zip(lines, one.values, places, one.tints, strict=True)
        if len(values) > 1
        for seed, value in values.items()
        if isfinite(value)
    ]
    xs, ys, tints, told = zip(*rings, strict=True) if rings else ((), (), (), ())
    marker = {"symbol": "circle-open", "size": 5, "color": list(tints), "opacity": 0.75}
    canvas.marks(xs, ys, marker, list(told), meta=one.key)
    means = [
        (estimate, place, tint, line)
        for line, values, place, tint in zip(lines, one.values, places, one.tints, strict=True)
        if (estimate := estimated(dict(values))) and isfinite(estimate.value)
    ]
    reach = [scale * (e.high - e.value) if isfinite(e.high) else 0 for e, *_ in means]
    canvas.marks(
        [scale * mean[0].value for mean in means],
        [mean[1] for mean in means],
        {"symbol": one.symbol, "size": 9, "color": [mean[2] for mean in means]},
        [f"<b>{line}</b><br>{one.title}{told_mean(e, scale, digits)}" for e, _, _, line in means],
        cliponaxis=clip,
        error_x={"type": "data", "array": reach, "color": "rgba(128, 136, 150, 0.9)", "thickness": 1.5, "width": 3},
        meta=one.key,
    )


def told_mean(estimate: Estimate, scale: float = 1.0, digits: int = 1) -> str:
    """A mean with its interval, in words."""
    value, low, high = (fixed(scale * e, digits) for e in (estimate.value, estimate.low, estimate.high))
    return f"{value} (one seed)" if estimate.count == 1 else f"{value} [{low}, {high}] over {estimate.count} seeds"
