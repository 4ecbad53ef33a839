"""A page as a reader sees it: its text and its charts."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from typing import Any


class PageText(HTMLParser):
    """The page's words."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.skip = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.skip = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.skip = False

    def handle_data(self, data: str) -> None:
        if not self.skip:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def charts(page: str) -> dict[str, Any]:
    """The page's charts as Vega-Lite, by name."""
    (result,) = re.findall(r'<script type="text/plain" id="charts">(.*?)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(result, validate=True)))
