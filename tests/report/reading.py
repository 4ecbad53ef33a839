"""A page as a reader sees it: its text, its tables and its charts."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from typing import Any


class PageText(HTMLParser):
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


def charts(page: str) -> dict[str, Any]:
    """The page's charts as Vega-Lite, by name."""
    (result,) = re.findall(r'<script type="text/plain" id="charts">(.*?)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(result, validate=True)))
