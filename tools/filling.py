"""Pages of docs/ with parts written from records: between ``<!-- found: NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path


def filled(page: Path, part: Callable[[str], Iterable[str]]) -> str:
    """The page's text, with the lines of each of its parts as ``part`` tells them by its name."""

    def written(match: re.Match[str]) -> str:
        return f"{match[1]}\n" + "\n".join(part(match[2])) + "\n<!-- end -->"

    return re.sub(r"(<!-- found: ([a-z ]+) -->)\n.*?<!-- end -->", written, page.read_text("utf-8"), flags=re.DOTALL)
