"""How the command line prints: lines, JSON, tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from toeplens.utils.files import nan_to_none

out = Console()
err = Console(stderr=True)
_MIN_LAST = 10  # characters of a truncated last column


def print_json(content: Any) -> None:
    """Print JSON, and nothing else, to standard output."""
    print(json.dumps(nan_to_none(content), indent=1, allow_nan=False))


def echo(text: str, *, stderr: bool = False) -> None:
    """Print a plain line to standard output (``stderr``: standard error), without wrapping or colours."""
    (err if stderr else out).print(text, highlight=False, markup=False, soft_wrap=True)


def print_table(
    title: str | None,
    columns: Sequence[str],
    rows: Iterable[Iterable[str | Text]],
    *,
    caption: str = "",
    brief: bool = False,
) -> None:
    """Print cells of plain or styled text: as one table, or as several if the terminal is too narrow.

    Each of several tables repeats the first column. ``brief`` instead prints one line per row, as wide as the terminal,
    and truncates the last column, if the others fit.
    """
    cells = [list(map(_to_text, row)) for row in (columns, *rows)]
    words = [columns[0], *(max(name.split() or [""], key=cell_len) for name in columns[1:])]  # other headers may wrap
    widths = [max([cell_len(word), *(row[n].cell_len for row in cells[1:])]) for n, word in enumerate(words)]
    brief = brief and sum(widths[:-1]) + 3 * len(columns) + _MIN_LAST <= out.width
    widest = max(1, out.width - widths[0] - 7)
    groups: list[list[int]] = [list(range(len(columns)))] if brief else []
    space = 0
    for column in range(1, 0 if brief else len(columns)):
        if not groups or widths[column] + 3 > space:
            groups.append([0])
            space = out.width - widths[0] - 4
        groups[-1].append(column)
        space -= widths[column] + 3
    for number, group in enumerate(groups, 1):
        table = Table(title=None if title is None or number > 1 else escape(title), expand=brief)
        table.caption = escape(caption) if caption and number == len(groups) else None
        for column in group:
            if brief:
                table.add_column(cells[0][column], no_wrap=True, ratio=1 if column == group[-1] else None)
            elif column == 0:
                table.add_column(cells[0][column], no_wrap=True, overflow="fold")
            else:
                table.add_column(cells[0][column], overflow="fold", min_width=min(widths[column], widest))
        for row in cells[1:]:
            table.add_row(*(row[column] for column in group))
        out.print(table)


def _to_text(content: str | Text) -> Text:
    """Plain text with control characters escaped; styled text as it is."""
    if isinstance(content, Text):
        return content
    return Text("".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in content))


def print_details(entries: Iterable[tuple[str, Mapping[str, str | Text]]]) -> None:
    """Print each entry's name and, below it, its facts."""
    for name, facts in entries:
        out.print(Text(name, "bold"))
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(overflow="fold")
        for fact, text in facts.items():
            grid.add_row(fact, _to_text(text))
        out.print(Padding(grid, (0, 0, 0, 2)))


def print_page(page: Path, *, as_json: bool, **more: Any) -> None:
    """Print the path of a page; as JSON, together with ``more``."""
    if as_json:
        print_json({"page": str(page), **more})
    else:
        echo(f"page: {page.resolve()}")
