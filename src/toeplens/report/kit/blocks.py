"""Parts of numbered figures: blocks, views, groups of panels, legends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any, cast

import numpy as np
import plotly.graph_objects as go

from toeplens.ground.files import read_yaml


@dataclass(frozen=True)
class Sign:
    """An entry of a legend: a glyph or a dash. ``key`` is the meta of its traces; empty if it cannot be toggled."""

    key: str
    title: str
    tint: str = ""
    glyph: str = ""
    dash: str = ""


@dataclass(frozen=True)
class Panel:
    """One plot: its figure, its description (default: generated from the figure) and its own legend."""

    title: str
    figure: go.Figure
    words: str = ""
    tint: str = ""
    glyph: str = ""
    legend: Sequence[Sign] = ()

    @property
    def alternative(self) -> str:
        """Alternative text of the plot."""
        return self.words or described(self.figure)


_FEW, _MANY = 8, 12  # maximum number of points of a trace that are listed, and of traces


def described(figure: go.Figure) -> str:
    """A plot in words: its axes, and the values of each trace, or their number and range."""
    layout, found = cast("Any", figure.layout), []
    for trace in cast("tuple[Any, ...]", figure.data):
        if trace.hoverinfo == "skip":  # a reference line or a range
            continue
        name = str(trace.name or trace.meta or "").replace("-", " ")
        if trace.type == "heatmap":
            rows = [(_place(layout.yaxis, y), row) for y, row in zip(trace.y, trace.z, strict=True)]
            points = [(f"row {y}, column {x}", z) for y, row in rows for x, z in zip(trace.x, row, strict=True)]
        else:
            pairs = list(zip(trace.x, trace.y, strict=True))
            down = (layout.yaxis.ticktext is not None and layout.yaxis.type != "log") or any(
                isinstance(y, str) for _, y in pairs
            )
            axis = layout.yaxis if down else layout.xaxis
            points = [(_place(axis, y), x) if down else (_place(axis, x), y) for x, y in pairs]
        points = [(place, each) for place, each in points if isinstance(each, int | float) and np.isfinite(each)]
        values = [value for _, value in points]
        if trace.type == "heatmap" and values:
            least, most = (of(points, key=lambda point: point[1]) for of in (min, max))
            found.append(f"{len(trace.z)} rows, from {least[1]:.3g} ({least[0]}) to {most[1]:.3g} ({most[0]})")
        elif values:
            each = ", ".join(f"{place} {value:.3g}".strip() for place, value in points)
            ends = f"{len(values)} points from {min(values):.3g} to {max(values):.3g}"
            found.append((f"{name}: " if name else "") + (each if len(values) <= _FEW else ends))
    more = [f"{len(found) - _MANY} more"] if len(found) > _MANY else []
    axes = [str(axis.title.text) for axis in (layout.yaxis, layout.xaxis) if axis.title.text]
    return f"{' by '.join(axes)}{': ' if axes else ''}{'; '.join(found[:_MANY] + more)}.".replace("<br>", " ")


def _place(axis: Any, at: Any) -> str:
    """The name of a position on an axis: the nearest tick label, or the number."""
    if isinstance(at, str) or at is None:
        return at or ""
    if axis.ticktext is None or axis.tickvals is None or axis.type == "log":
        return f"{at:.3g}"
    return str(min(zip(axis.tickvals, axis.ticktext, strict=True), key=lambda tick: abs(tick[0] - at))[1])


@dataclass(frozen=True)
class Group:
    """Panels under one heading; ``note`` lists what is missing."""

    title: str
    panels: list[Panel]
    note: str = ""


@dataclass(frozen=True)
class View:
    """One entry of a figure's menu."""

    title: str
    groups: list[Group]

    @classmethod
    def of(cls, panels: list[Panel], title: str = "", note: str = "") -> View:
        """Panels side by side, without a heading."""
        return cls(title, [Group("", panels, note)])


@dataclass(frozen=True)
class Ramp:
    """A colour scale's legend: the labels of its two ends.

    half  whether the scale starts at 0 and uses only the warm half of the colours
    """

    low: str
    high: str
    half: bool = False


@dataclass(frozen=True)
class Block:
    """A figure; `numbered` sets its number.

    width   of its panels, a class of the style sheet: ``wide``, ``full``, ``medium`` or ``small``
    legend  shown above; entries with a key toggle their traces
    ramp    the colour scale of its heat maps
    """

    id: str
    title: str
    caption: str
    views: list[View]
    width: str = "wide"
    legend: list[Sign] = field(default_factory=list)
    ramp: Ramp | None = None
    number: int = 0

    @property
    def places(self) -> list[tuple[str, Panel]]:
        """The panels with their element ids on the page."""
        return [
            (f"{self.id}-{v}-{g}-{p}", panel)
            for v, view in enumerate(self.views)
            for g, group in enumerate(view.groups)
            for p, panel in enumerate(group.panels)
        ]


def numbered(blocks: Iterable[Block], first: int = 1) -> dict[str, Block]:
    """The non-empty figures by id, numbered in order, without empty views."""
    found: dict[str, Block] = {}
    for block in blocks:
        views = [view for view in block.views if any(group.panels for group in view.groups)]
        if views:
            found[block.id] = replace(block, views=views, number=first + len(found))
    return found


class Texts(dict[str, Any]):
    """The content of a YAML file; its ``figures`` have a title and a caption by id."""

    def __init__(self, path: Path) -> None:
        super().__init__(read_yaml(path))

    def block(
        self,
        id: str,
        views: list[View],
        width: str = "wide",
        words: Mapping[str, Any] | None = None,
        text: str = "",
        **more: Any,
    ) -> Block:
        """A figure with its title and caption.

        Arguments
            words  what is filled in for ``$name``
            text   name of its text (default: the id)
            more   its legend and its ramp
        """
        own = self["figures"][text or id]
        title, caption = (Template(own[name]).substitute(words or {}) for name in ("title", "caption"))
        return Block(id, title, caption, views, width, **more)
