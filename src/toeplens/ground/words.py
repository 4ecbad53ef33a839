"""Numbers and lists in words, as pages and sentences say them."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite


def percent(value: float | None, *, sign: bool = True) -> str:
    """A share as per cent; a dash if there is none."""
    return "–" if value is None or not isfinite(value) else f"{100 * value:.1f}{'%' if sign else ''}"


def points(value: float) -> str:
    """A difference of shares, in percentage points; a true minus sign."""
    rounded = round(100 * value, 1) + 0.0
    return f"{rounded:.1f}".replace("-", "−")


def signed(value: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    text = points(value)
    return text if text.startswith("−") or text == "0.0" else f"+{text}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def listed(items: Iterable[str]) -> str:
    """Items as a list in a sentence; with semicolons where an item has a comma of its own."""
    items = list(items)
    if any("," in item for item in items):
        return "; ".join(items)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "none"


def or_none(value: float) -> float | None:
    """A figure as JSON can hold it."""
    return value if isfinite(value) else None
