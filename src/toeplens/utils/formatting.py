"""Formatting of numbers and lists for pages and messages."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

_MAX_RANGES = 8  # maximum number of ranges listed in full
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def fmt(value: float | None, digits: int = 2) -> str:
    """A number with so many decimals and a true minus sign, without -0; a dash for None or NaN."""
    if value is None or not isfinite(value):
        return "–"
    text = f"{value:.{digits}f}"
    return (text.removeprefix("-") if float(text) == 0 else text).replace("-", "−")


def sig_figs(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits; a dash for None or NaN."""
    return "–" if value is None or not isfinite(value) else f"{value:#.{digits}g}".rstrip(".").replace("-", "−")


def to_sci(value: float | None) -> str:
    """A small number as a power of ten; a dash for None or NaN."""
    if value is None:
        return "–"
    if value == 0 or not isfinite(value):
        return f"{value:g}"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}\u00a0×\u00a010{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def percent(value: float | None, *, sign: bool = True) -> str:
    """A share in percent; a dash for None or NaN."""
    text = fmt(None if value is None else 100 * value, 1)
    return f"{text}%" if sign and text != "–" else text


def percentage_points(value: float) -> str:
    """A difference of shares, in percentage points."""
    return fmt(100 * value, 1)


def fmt_signed(value: float | None, digits: int = 2) -> str:
    """A number with its sign, except for 0 after rounding."""
    text = fmt(value, digits)
    return text if text[0] in "−–" or float(text) == 0 else f"+{text}"


def fmt_duration(seconds: float) -> str:
    """A readable duration from seconds."""
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def plural(number: int, noun: str) -> str:
    """A number with its noun, such as 1 seed or 2 seeds."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def join_list(items: Iterable[str]) -> str:
    """Items as a list in a sentence; separated by semicolons if an item contains a comma."""
    items = list(items)
    if any("," in item for item in items):
        return "; ".join(items)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "none"


def finite_or_none(value: float) -> float | None:
    """The number if it is finite, otherwise None (for JSON)."""
    return float(value) if isfinite(value) else None


def format_ranges(numbers: Iterable[int]) -> str:
    """Whole numbers with consecutive ones merged and the middle of long lists omitted: 0–3, 5."""
    ordered = sorted(set(numbers))
    starts = [n for n in ordered if n - 1 not in ordered]
    ends = [n for n in ordered if n + 1 not in ordered]
    runs = [f"{a}" if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True)]
    if len(runs) > _MAX_RANGES:
        runs[_MAX_RANGES // 2 : -1] = [f"… ({len(ordered)} in all)"]
    return ", ".join(runs)
