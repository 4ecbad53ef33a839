"""What numbered figures are made of: blocks, their views, groups of panels, and legends."""

from __future__ import annotations

from dataclasses import dataclass, field

import plotly.graph_objects as go


@dataclass(frozen=True)
class Panel:
    """One plot: its figure, and the same in words."""

    title: str
    figure: go.Figure
    words: str
    tint: str = ""
    glyph: str = ""


@dataclass(frozen=True)
class Group:
    """Panels that stand together under a heading; ``note`` says what is missing."""

    title: str
    panels: list[Panel]
    note: str = ""


@dataclass(frozen=True)
class View:
    """One of the choices of a figure's menu."""

    title: str
    groups: list[Group]


@dataclass(frozen=True)
class Sign:
    """An entry of a legend: a glyph or a dash. ``key`` is its traces' meta; empty where nothing can be switched."""

    key: str
    title: str
    tint: str = ""
    glyph: str = ""
    dash: str = ""


@dataclass(frozen=True)
class Ramp:
    """A colour scale's legend: what stands at its two ends.

    half  whether it begins at nothing, so that only the warm half of the colours is used
    """

    low: str
    high: str
    half: bool = False


@dataclass(frozen=True)
class Block:
    """A numbered figure.

    width   ``wide`` or ``small`` panels
    legend  shown above; entries with a key switch their traces off and on
    ramp    the colour scale of its heat maps
    """

    id: str
    number: int
    title: str
    caption: str
    views: list[View]
    width: str = "wide"
    legend: list[Sign] = field(default_factory=list)
    ramp: Ramp | None = None
