"""An extension of griffe that converts our docstrings to Markdown.

A docstring has one line per argument or field: the name, at least two spaces, the description, and continuation lines
below the description. These lines become a list. The headings ``Arguments`` and ``Returns`` become bold. A public
constant without a docstring is explained by the comment on its first line or right above it; without a comment it is
not in the reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

HEADINGS = ("Arguments", "Returns", "Yields", "Raises")
NAME = r"\*{0,2}[A-Za-z_][\w.]*"
ITEM = re.compile(rf"^(?P<indent> *)(?P<names>{NAME}(?:, {NAME})*)  +(?P<text>\S.*)$")
CODE = re.compile(r"(``.*?``|`[^`]*`)", re.DOTALL)


def escape_markdown(text: str) -> str:
    """Brackets and stars outside of code are what they are, no Markdown."""
    plain = [re.sub(r"([\[\]*])", r"\\\1", part).replace("<", "&lt;") for part in CODE.split(text)[::2]]
    return "".join(part for pair in zip(plain, [*CODE.findall(text), ""], strict=True) for part in pair)


def as_markdown(text: str) -> str:
    """A docstring with its tables of names as lists."""
    return "\n".join(_lines(text.splitlines())).strip()


def _lines(lines: list[str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        if (result := ITEM.match(line)) and len(result["indent"]) <= 4:
            told, at = _item(lines, at, len(result["indent"]))
            names = ", ".join(f"`{name}`" for name in result["names"].split(", "))
            yield from ("", f"- {names}: {told}", "")
        elif line.strip() in HEADINGS:
            yield from ("", f"**{line.strip()}**", "")
            at += 1
            while at < len(lines) and lines[at].strip() and not ITEM.match(lines[at]):
                yield escape_markdown(lines[at].strip())
                at += 1
        else:
            yield line if line.startswith("    ") else escape_markdown(line)
            at += 1


def _item(lines: list[str], at: int, indent: int) -> tuple[str, int]:
    """What is said of a name, its further lines too, and where the next begins."""
    result = ITEM.match(lines[at])
    assert result is not None
    item_lines = [result["text"]]
    at += 1
    while at < len(lines) and len(lines[at]) - len(lines[at].lstrip()) > indent and lines[at].strip():
        item_lines.append(lines[at].strip())
        at += 1
    return escape_markdown(" ".join(item_lines)), at


def comment_of(constant: griffe.Object) -> str:
    """What is said beside a constant, or right above it."""
    lines = [] if constant.parent is None else constant.parent.lines
    at = (constant.lineno or 1) - 1
    comment = lines[at].partition("  # ")[2].strip() if at < len(lines) else ""
    above: list[str] = []
    while at and lines[at - 1].startswith("# "):
        at -= 1
        above.insert(0, lines[at][2:].strip())
    said = comment or " ".join(above)
    return said[:1].upper() + said[1:] + "." if said else ""


class HouseDocstrings(griffe.Extension):
    """What mkdocstrings is given instead of the docstrings as they stand."""

    def on_object(self, *, obj: griffe.Object, loader: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
        elif obj.is_attribute and obj.parent and obj.parent.is_module and (said := comment_of(obj)):
            obj.docstring = griffe.Docstring(escape_markdown(said), parent=obj)
