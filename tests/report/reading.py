"""A page as a reader sees it: its text, its tables, its figures, and what these say when they are pointed at."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from typing import Any

from toeplens.report.kit.page import PAKO, asset, packed_plotly


class Text(HTMLParser):
    """The page's words, its tables by label, its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.attributes: list[tuple[str, str, str | None]] = []
        self.label, self.skip, self.in_cell, self.rows = "", False, False, []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value) for key, value in attrs]
        self.skip = tag in ("script", "style")
        if dict(attrs).get("role") == "region":
            self.label = dict(attrs)["aria-label"] or ""
        if tag == "table":
            self.rows = self.tables[self.label] = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self.skip = False
        if tag in ("td", "th", "table"):
            self.in_cell = False

    def handle_data(self, data: str) -> None:
        if not self.skip:
            self.words.append(data)
            if self.in_cell:
                self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def rows_of(page: str | Text, label: str) -> dict[str, list[str]]:
    """The cells of a table by the row's name, without the sign before it, each with single spaces."""
    found = page if isinstance(page, Text) else Text(without_plotly(page))
    rows = [[" ".join(cell.split()) for cell in row] for row in found.tables[label]]
    return {re.sub(r"^\W+ (?=\w)", "", row[0]): row[1:] for row in rows if row}


def without_plotly(page: str) -> str:
    """The page without the library that draws, which is in it once, and the one that unpacks it."""
    assert page.count(packed_plotly()) == 1, "plotly.js is there, once"
    return page.replace(packed_plotly(), "").replace(asset(PAKO), "")


def figures(page: str) -> dict[str, Any]:
    """The page's plots by their places."""
    (found,) = re.findall(r'<script type="text/plain" id="figures">(.*?)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(found, validate=True)))


def traces(page: str, place: str) -> dict[str, dict[str, Any]]:
    """The last trace of each legend entry: bands and rings come before what they belong to."""
    return {trace["meta"]: trace for trace in figures(page)[place]["data"] if "meta" in trace}


def stands_alone(page: str) -> bool:
    """Whether the page, without plotly, tells the browser to ask for nothing, and has nothing to ask for."""
    own = without_plotly(page) if packed_plotly() in page else page
    return "default-src 'none'" in own and not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)|url\((?!#)""", own)


def hovers(trace: Any) -> list[str]:
    """What each point of a trace says when it is pointed at: the template with the point's numbers, without marks."""
    grid = trace.type == "heatmap"
    places = [(i, j) for i, row in enumerate(trace.z) for j in range(len(row))] if grid else range(len(trace.x))
    return [_hover(trace, place) for place in places]


def _hover(trace: Any, place: Any) -> str:
    def at(values: Any) -> Any:
        return values[place[0]][place[1]] if isinstance(place, tuple) else values[place]

    def told(match: re.Match[str]) -> str:
        name, index, form = match[1], match[2], match[3]
        value = at(getattr(trace, name))
        value = value[int(index)] if index is not None else value
        return _formed(value, form)

    text = re.sub(r"%\{(\w+)(?:\[(\d+)\])?(?::([^}]+))?\}", told, trace.hovertemplate)
    return re.sub(r"<br>", " | ", text.replace("<extra></extra>", "")).replace("<b>", "").replace("</b>", "")


def _formed(value: Any, form: str | None) -> str:
    if form is None:
        return f"{value:g}" if isinstance(value, float) else str(value)
    return format(value, form)
