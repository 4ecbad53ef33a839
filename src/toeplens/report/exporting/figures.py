"""The figures of a page, read from its HTML: their panels, and what stands around these: titles, legends, scales."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

from toeplens.report.exporting.tables import VOID, slug

_PLACE = re.compile(r"(.+)-(\d+)-(\d+)-(\d+)")  # figure, view, group, panel
_STYLE = re.compile(r"(?:^|;|-)color:\s*([^;]+)")
_STROKES = {"solid", "dash", "dot", "dashdot", "longdash", "longdashdot"}
_PATTERNS = {"rising": "/", "falling": "\\", "dotted": ".", "crossed": "x", "squared": "+"}


@dataclass
class Sign:
    """An entry of a legend; ``key`` is its traces' meta, empty where it is no trace's."""

    key: str = ""
    title: str = ""
    tint: str = ""
    glyph: str = ""
    dash: str = ""
    pattern: str = ""


@dataclass
class Panel:
    """One plot, and what stands over it; ``plot`` has its ``data`` and ``layout``."""

    place: str
    plot: Mapping[str, Any]
    view: str = ""
    group: str = ""
    title: str = ""
    legend: list[Sign] = field(default_factory=list)


@dataclass
class Figure:
    """A figure of a page.

    id       its name
    number   on the page; 0 where figures have none
    width    how wide its panels are there: ``wide``, ``full``, ``medium`` or ``small``; empty where that is not said
    legend   of all its panels
    low, high, half  the ends of its colours, if it has some, and whether they begin at nothing
    """

    id: str
    number: int = 0
    title: str = ""
    caption: str = ""
    width: str = ""
    legend: list[Sign] = field(default_factory=list)
    low: str = ""
    high: str = ""
    half: bool = False
    panels: list[Panel] = field(default_factory=list)

    def names(self) -> dict[str, Panel]:
        """Its panels by their names as files: the figure's, then as much of their titles as tells them apart."""
        views, groups = ({getattr(panel, name) for panel in self.panels} for name in ("view", "group"))
        found: dict[str, Panel] = {}
        for panel in self.panels:
            parts = [panel.view if len(views) > 1 else "", panel.group if len(groups) > 1 else "", panel.title]
            parts = [slug(part) for part in parts] if len(self.panels) > 1 else []
            name = first = "-".join(dict.fromkeys([self.id, *filter(None, parts)]))
            number = 1
            while name in found:
                number += 1
                name = f"{first}-{number}"
            found[name] = panel
        return found


def read_figures(html: str, plots: Mapping[str, Any]) -> list[Figure]:
    """The figures of a page that have a panel, in its order.

    plots  of each place of the page its ``data`` and ``layout``
    """
    reader = _Reader(plots)
    reader.feed(html)
    reader.close()
    return [figure for figure in reader.figures if figure.panels]


class _Reader(HTMLParser):
    """Walks through a page; what is being read goes to the end of ``_text`` until its element ends."""

    def __init__(self, plots: Mapping[str, Any]) -> None:
        super().__init__(convert_charrefs=True)
        self.figures: list[Figure] = []
        self._plots = plots
        self._open: list[tuple[str, str]] = []  # elements that stand open, and their classes
        self._views: list[str] = []
        self._view, self._group, self._title, self._heading = 0, "", "", ""
        self._own: list[Sign] | None = None  # the legend of a panel
        self._ramp = False  # whether the low end of the colours was read
        self._text = ""

    def _within(self, name: str) -> bool:
        return any(name in classes.split() for _, classes in self._open)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        told = {name: value or "" for name, value in attrs}
        classes = told.get("class", "").split()
        if tag not in VOID:
            self._open.append((tag, told.get("class", "")))
        if tag in ("h2", "h4", "h5", "option", "figcaption", "b"):
            self._text = "" if tag != "b" or not self._in("figcaption") else self._text
        if tag == "figure":
            width = next((name for name in classes if name in ("wide", "full", "medium", "small")), "")
            self.figures.append(Figure(told.get("id", "").removeprefix("figure-"), title=self._heading, width=width))
            self._views, self._view, self._group, self._title = [], -1, "", ""
        if not self._in("figure"):
            return
        figure = self.figures[-1]
        if "view" in classes:
            self._view, self._group = self._view + 1, ""
        elif "panel" in classes:
            self._own, self._title = [], ""
        elif "ramp" in classes:
            figure.half = "half" in classes
            self._ramp, self._text = False, ""
        elif self._within("legend") and (tag == "button" or "fixed" in classes):
            (figure.legend if self._own is None else self._own).append(Sign(told.get("data-key", "")))
            self._text = ""
        elif self._within("legend") and tag in ("span", "i"):
            self._mark(figure.legend if self._own is None else self._own, told, classes)
        elif "plot" in classes and told.get("id") in self._plots:
            self._panel(figure, told["id"])

    def _mark(self, signs: list[Sign], told: dict[str, str], classes: list[str]) -> None:
        colour = _STYLE.search(told.get("style", ""))
        if signs and colour and colour[1].strip():
            signs[-1].tint = colour[1].strip()
        if signs and "stroke" in classes:
            signs[-1].dash = next((name for name in classes if name in _STROKES), "solid")
        if signs and "fill" in classes:
            signs[-1].pattern = next((_PATTERNS[name] for name in classes if name in _PATTERNS), "")

    def _panel(self, figure: Figure, place: str) -> None:
        known = _PLACE.fullmatch(place)
        figure.id = figure.id or (known[1] if known else place)
        view = self._views[self._view] if 0 <= self._view < len(self._views) else ""
        own = self._own or []
        figure.panels.append(Panel(place, self._plots[place], view, self._group, self._title, own))

    def _in(self, name: str) -> bool:
        return any(tag == name for tag, _ in self._open)

    def handle_endtag(self, tag: str) -> None:
        if not self._in(tag):
            return
        classes = ""
        while self._open:
            last, classes = self._open.pop()
            if last == tag:
                break
        text = " ".join(self._text.split())
        if tag == "h2":
            self._heading = text
        if not self._in("figure"):
            self._own = None
            return
        figure = self.figures[-1]
        if tag == "b" and self._in("figcaption"):
            number = re.match(r"Figure (\d+)\. ", text)
            figure.number = int(number[1]) if number else 0
            figure.title = text[number.end() :].rstrip(".") if number else text
            self._text = ""
        elif tag == "figcaption":
            figure.caption = re.sub(r" ?Press an? [^.]*\.", "", text)  # which is of the page alone
        elif tag == "option":
            self._views.append(text)
        elif tag == "h4":
            self._group = text
        elif tag == "h5":
            self._title = text
        elif "panel" in classes.split():
            self._own = None
        elif self._within("ramp") and tag == "span":
            figure.low, figure.high = (figure.low, text) if self._ramp else (text, "")
            self._ramp, self._text = True, ""
        elif "glyph" in classes.split() and (self._within("legend") or self._in("h5")):
            signs = figure.legend if self._own is None else self._own
            if signs and self._within("legend"):
                signs[-1].glyph = text
            self._text = ""
        elif self._within("legend") and (tag == "button" or "fixed" in classes.split()):
            (figure.legend if self._own is None else self._own)[-1].title = text

    def handle_data(self, data: str) -> None:
        self._text += data
