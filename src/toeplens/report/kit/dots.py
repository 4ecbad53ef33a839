"""Dot plots: rows with one number per seed, their mean, and Student's interval of the mean."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import plotly.graph_objects as go

from toeplens.ground.words import fixed
from toeplens.lens import Estimate
from toeplens.report.kit.canvas import Canvas
from toeplens.studies.kit.results import estimated


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
