"""A page as a file: whether it is one, whether this version made it, and what its plots are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toeplens.ground import InputError
from toeplens.report.kit.packing import MADE_BY, unpack

_MARK = '<meta name="toeplens-page" content="'


def current(page: Path) -> bool:
    """Whether this version made a page, in the format that it writes now."""
    return f'{_MARK}{MADE_BY}">' in page.read_text(encoding="utf-8", errors="replace")


def read_page(page: Path) -> str:
    """The HTML of a page. Raises `InputError` for a file that is no page of toeplens, or is not whole."""
    try:
        html = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        html = ""
    if _MARK not in html:
        raise InputError(
            f"page: {page} is no page of toeplens, or one of a version before 0.2; it must be one, or a directory of a "
            "study, an audit or a probe."
        )
    if not html.rstrip().endswith("</html>") or html.rfind("<!--") > html.rfind("-->"):
        raise _damaged(page)
    return html


@contextmanager
def readable(page: Path) -> Iterator[None]:
    """Within it whatever goes wrong with what a page holds is an `InputError`."""
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise _damaged(page) from None


def _damaged(page: Path) -> InputError:
    return InputError(f"page: {page} is damaged or cut short; make it again with 'toeplens report'.")


def script_in(html: str, name: str) -> str | None:
    """What the script of this id holds; None where there is none."""
    found = re.search(rf'<script type="[a-z/]{{1,30}}" id="{name}">', html)
    end = -1 if found is None else html.find("</script>", found.end())
    return None if found is None or end < 0 else html[found.end() : end]


def plots_in(html: str, page: Path) -> dict[str, Any]:
    """The plots of a page by their places; a page whose plots cannot be read raises `InputError`."""
    packed = script_in(html, "figures")
    if packed is None:
        return {}
    try:
        return dict(json.loads(unpack(packed)))
    except (ValueError, TypeError, RecursionError):
        raise InputError(f"page: the plots of {page} cannot be read; make it again with 'toeplens report'.") from None
