"""Tables of a page, which `toeplens tables` also writes as CSV and LaTeX."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup, escape

DASH = "–"  # for a missing number


def slug(text: str, max_length: int = 48) -> str:
    """A text as part of a file name: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:max_length].strip("-")


@dataclass(frozen=True)
class TableCell:
    """A cell of a table.

    text              its text; ``small``: lines of small print below it
    right             whether it is right-aligned, as numbers are
    colspan, rowspan  columns and rows that it spans
    header            whether it is a row header
    css, row_css      classes of the cell, and of the row that starts with it; ``style`` is the cell's inline style
    marker            a sign before the text: anything with a ``tint`` and a ``glyph``
    html              HTML shown on the page (default: the escaped text)
    """

    text: str = ""
    small: tuple[str, ...] = ()
    right: bool = False
    colspan: int = 1
    rowspan: int = 1
    header: bool = False
    css: str = ""
    row_css: str = ""
    style: str = ""
    marker: Any = None
    html: Markup | None = None

    @property
    def plain_text(self) -> str:
        """The text on one line."""
        return " ".join(self.text.split())

    @property
    def note(self) -> str:
        """The small print on one line."""
        return "; ".join(" ".join(line.split()) for line in self.small if line)

    @property
    def full_text(self) -> str:
        """The text with its small print in parentheses."""
        return f"{self.plain_text} ({self.note})" if self.plain_text and self.note else self.plain_text or self.note

    @property
    def markup(self) -> Markup:
        """The text as the page shows it."""
        return Markup("<br>").join(map(escape, self.text.split("\n"))) if self.html is None else self.html


@dataclass(frozen=True)
class Table:
    """A table: header rows (the last one names every column), then body rows; ``note`` states the units."""

    name: str
    head: list[list[TableCell]]
    body: list[list[TableCell]]
    note: str = ""
    css: str = "numbers"

    @property
    def file(self) -> str:
        """Its name as a file name."""
        return slug(self.name, 60) or "table"

    def expand_spans(self) -> tuple[list[list[TableCell]], list[list[TableCell]]]:
        """Head and body in rows of equal length; a spanning cell is repeated."""
        cells: dict[tuple[int, int], TableCell] = {}
        rows = [*self.head, *self.body]
        for y, row in enumerate(rows):
            x = 0
            for cell in row:
                while (y, x) in cells:
                    x += 1
                cells |= {(y + dy, x + dx): cell for dy in range(cell.rowspan) for dx in range(cell.colspan)}
                x += cell.colspan
        width = max((x for _, x in cells), default=-1) + 1
        grid = [[cells.get((y, x), TableCell()) for x in range(width)] for y in range(len(rows))]
        return grid[: len(self.head)], grid[len(self.head) :]

    def columns(self) -> list[str]:
        """What its columns are called, those of a group after the group's name; numbers where nothing names them."""
        head, body = self.expand_spans()
        if not head:
            return [str(x + 1) for x in range(len(body[0]) if body else 0)]
        names = [[row[x].plain_text for row in head] for x in range(len(head[0]))]
        return [": ".join(dict.fromkeys(filter(None, column))) for column in names]


def make_table(
    name: str,
    columns: Sequence[str | TableCell],
    rows: Iterable[Sequence[str | TableCell]],
    *,
    groups: Sequence[TableCell] = (),
    right: Collection[int] = (),
    note: str = "",
    css: str = "numbers",
) -> Table:
    """A table of texts and cells; the first cell of a row names the row.

    Arguments
        columns  their names; none for a table without
        groups   cells of a row above ``columns``
        right    columns of numbers
    """

    def make_cell(x: int, content: str | TableCell) -> TableCell:
        cell = content if isinstance(content, TableCell) else TableCell(content, right=x in right)
        return replace(cell, header=True) if x == 0 else cell

    head = [[make_cell(x, cell) for x, cell in enumerate(columns)]] if columns else []
    body = [[make_cell(x, cell) for x, cell in enumerate(row)] for row in rows]
    return Table(name, [list(groups), *head] if groups else head, body, note, css)


def code(text: str) -> TableCell:
    """A cell that shows its text as code."""
    return TableCell(text, html=Markup("<code>{}</code>").format(text))


def settings_table(settings: Iterable[tuple[str, Any]]) -> Table:
    """Settings by name, a row each; those of several values in a list."""

    def value_text(value: Any) -> str:
        return (", ".join(map(str, value)) or "none") if isinstance(value, list | tuple | dict) else str(value)

    rows = [[name.replace("_", " "), code(value_text(value))] for name, value in settings]
    return make_table("Settings", [], rows, css="facts")
