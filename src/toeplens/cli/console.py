"""How the command line prints: lines, JSON, tables, bars."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape, render
from rich.padding import Padding
from rich.progress import Progress
from rich.table import Table

from toeplens.ground.files import finite

out = Console()
err = Console(stderr=True)


def print_json(content: Any) -> None:
    """Print JSON, and nothing else, to standard output."""
    print(json.dumps(finite(content), indent=1, allow_nan=False))


def say(text: str, *, aside: bool = False) -> None:
    """Print a plain line to standard output (``aside``: standard error), without wrapping or colours."""
    (err if aside else out).print(text, highlight=False, markup=False, soft_wrap=True)


def table(title: str | None, *columns: str, rows: Iterable[Iterable[str | None]] = ()) -> Table:
    """A table whose first column is never wrapped and whose long words wrap."""
    made = Table(title=title)
    for index, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=index == 0)
    for row in rows:
        made.add_row(*row)
    return made


def brief(*columns: str) -> Table:
    """A table with one line per row, as wide as the terminal; the last column is truncated."""
    made = Table(expand=True)
    for column in columns[:-1]:
        made.add_column(column, no_wrap=True)
    made.add_column(columns[-1], no_wrap=True, overflow="ellipsis", ratio=1)
    return made


def fitted(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Table]:
    """One table, or several if the terminal is too narrow; each repeats the first column."""
    widths = [3 + max(cell_len(render(row[place]).plain) for row in (columns, *rows)) for place in range(len(columns))]
    groups: list[list[int]] = []
    room = 0
    for place in range(1, len(columns)):
        if not groups or widths[place] > room:
            groups.append([0])
            room = out.width - widths[0] - 1
        groups[-1].append(place)
        room -= widths[place]
    tables = []
    for group in groups:
        cells = [[row[place] for place in group] for row in (columns, *rows)]
        tables.append(table(None if tables else title, *cells[0], rows=cells[1:]))
    return tables


def print_in_full(entries: Iterable[tuple[str, dict[str, str]]]) -> None:
    """Print each entry's name and, below it, its facts."""
    for name, facts in entries:
        out.print(f"[bold]{escape(name)}[/]")
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(overflow="fold")
        for fact, text in facts.items():
            grid.add_row(fact, text)
        out.print(Padding(grid, (0, 0, 0, 2)))


@contextmanager
def bar(doing: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error, if it is a terminal; call the result to advance by one."""
    with Progress(console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task(doing, total=total)
        yield lambda: progress.advance(task)


def print_page(page: Path, *, as_json: bool, **more: Any) -> None:
    """Print the path of a page; as JSON, together with ``more``."""
    if as_json:
        print_json({"page": str(page), **more})
    else:
        say(f"page: {page.resolve()}")
