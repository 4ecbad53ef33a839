"""What numbered figures are made of: blocks, their views, groups of panels, and legends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import plotly.graph_objects as go


@dataclass(frozen=True)
class Sign:
    """An entry of a legend: a glyph or a dash. ``key`` is its traces' meta; empty where nothing can be switched."""

    key: str
    title: str
    tint: str = ""
    glyph: str = ""
    dash: str = ""


@dataclass(frozen=True)
class Panel:
    """One plot: its figure, and the same in words; ``legend`` is one of its own."""

    title: str
    figure: go.Figure
    words: str
    tint: str = ""
    glyph: str = ""
    legend: Sequence[Sign] = ()


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

    @classmethod
    def of(cls, panels: list[Panel], title: str = "", note: str = "") -> View:
        """Panels side by side, without a heading."""
        return cls(title, [Group("", panels, note)])


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
    """A figure, numbered once its page is put together (`numbered`).

    width   of its panels, a class of the style sheet: ``wide``, ``full``, ``medium`` or ``small``
    legend  shown above; entries with a key switch their traces off and on
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
        """The panels with the ids of their places on the page."""
        return [
            (f"{self.id}-{v}-{g}-{p}", panel)
            for v, view in enumerate(self.views)
            for g, group in enumerate(view.groups)
            for p, panel in enumerate(group.panels)
        ]


def numbered(blocks: Iterable[Block], first: int = 1) -> dict[str, Block]:
    """The figures that have a panel, by id and numbered in order, without the views that have none."""
    found: dict[str, Block] = {}
    for block in blocks:
        views = [view for view in block.views if any(group.panels for group in view.groups)]
        if views:
            found[block.id] = replace(block, views=views, number=first + len(found))
    return found
