"""A page as a file: whether this version made it, and what its plots are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from toeplens.ground import InputError
from toeplens.report.kit.packing import MADE_BY, unpack

_PLOTS = re.compile(r'<script [^>]*id="figures">(.*?)</script>', re.DOTALL)  # not packed before 0.2


def current(page: Path) -> bool:
    """Whether this version made a page, in the format that it writes now."""
    return f'<meta name="toeplens-page" content="{MADE_BY}">' in page.read_text(encoding="utf-8", errors="replace")


def plots_in(html: str, page: Path) -> dict[str, Any]:
    """The plots of a page by their places; a page whose plots cannot be read raises `InputError`."""
    found = _PLOTS.search(html)
    if found is None:
        return {}
    try:
        return dict(json.loads(unpack(found[1])))
    except ValueError:
        raise InputError(f"page: the plots of {page} cannot be read; make it again with 'toeplens report'.") from None
