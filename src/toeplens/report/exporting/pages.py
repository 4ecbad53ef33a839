"""A page as a file: whether this version made it, and what its plots are."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from toeplens.ground import InputError
from toeplens.report.kit.packing import unpack

_PLOTS = re.compile(r'<script type="text/plain" id="figures">(.*?)</script>', re.DOTALL)
_PROGRAM = "report/kit/page.js"  # every page with plots holds it as it is


def current(page: Path) -> bool:
    """Whether a page holds the program that this version's pages hold."""
    program = (files("toeplens") / _PROGRAM).read_text(encoding="utf-8")
    return program in page.read_text(encoding="utf-8", errors="replace")


def plots_in(html: str, page: Path) -> dict[str, Any]:
    """The plots of a page by their places; a page whose plots cannot be read raises `InputError`."""
    found = _PLOTS.search(html)
    if found is None:
        return {}
    try:
        return dict(json.loads(unpack(found[1])))
    except ValueError:
        raise InputError(f"page: the plots of {page} cannot be read; make it again with 'toeplens report'.") from None
