"""The tables of a page, read from its HTML: names, cells as a grid, and the same as comma-separated values."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser

from toeplens.ground import InputError
from toeplens.ground.words import fixed

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
_UNSEEN = {"script", "style", "sup", "template", "svg", "button", "select"}  # marks of notes among them
_GAPS = {"br", "p", "li", "dd", "dt", "div"}
_ACROSS, _DOWN = 1000, 65534  # columns and rows of a cell at most, as in HTML
_TABLES = 1000  # of a page
_CELLS = 2**20  # places of a table, with those that a cell takes beside its own
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # as a spreadsheet knows one, in wide letters too
_NUMBER = re.compile(r"[-+]\.?\d[\d.,]*(?:[eE][-+]?\d+)?(?: ?%)?(?: [\w(±[].*)?")  # with a unit or a note
_MOST = 60  # characters of a file's name
_MADE = ("table", "changes")  # ids of tables that the pages of audits fill: all heads; those that changed most


def slug(text: str, most: int = 48) -> str:
    """A text as part of a file's name: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:most].strip("-")


@dataclass
class Cell:
    """A cell of a table.

    text          what it says; ``note`` what stands below in small print: a range, how many there are
    right         whether it is a number, so that it is set to the right
    across, down  columns and rows that it takes
    """

    text: str = ""
    note: str = ""
    right: bool = False
    across: int = 1
    down: int = 1

    @property
    def whole(self) -> str:
        """The text with its note in brackets."""
        return f"{self.text} ({self.note})" if self.text and self.note else self.text or self.note


@dataclass
class Table:
    """A table as it is read: its name, the title of its section, its rows of cells; a note on units and small print."""

    name: str
    section: str
    rows: list[list[Cell]] = field(default_factory=list)
    heads: int = 0
    id: str = ""
    note: str = ""

    @property
    def file(self) -> str:
        """Its name as that of a file."""
        return slug(self.name, _MOST) or "table"

    def grid(self) -> list[list[Cell]]:
        """Rows of equal length; a cell that takes several places stands in all of them.

        Raises `InputError` for more places than a table of a page has.
        """
        taken: dict[tuple[int, int], Cell] = {}
        for y, row in enumerate(self.rows):
            x = 0
            for cell in row:
                while (y, x) in taken:
                    x += 1
                down = min(cell.down, len(self.rows) - y)
                if len(taken) + down * cell.across > _CELLS:
                    raise InputError(
                        f"tables: {self.name!r} has more than {_CELLS:,} cells; a table has at most these."
                    )
                taken |= {(y + dy, x + dx): cell for dy in range(down) for dx in range(cell.across)}
                x += cell.across
        width = max((x for _, x in taken), default=-1) + 1
        if width * len(self.rows) > _CELLS:
            raise InputError(f"tables: {self.name!r} has more than {_CELLS:,} cells; a table has at most these.")
        return [[taken.get((y, x), _NOTHING) for x in range(width)] for y in range(len(self.rows))]

    def columns(self) -> list[str]:
        """What its columns are called, those of a group after the group's name; numbers where nothing names them."""
        grid = self.grid()
        width = len(grid[0]) if grid else 0
        if not self.heads:
            return [str(x + 1) for x in range(width)]
        return [
            ": ".join(dict.fromkeys(row[x].text for row in grid[: self.heads] if row[x].text)) for x in range(width)
        ]

    def body(self) -> list[list[Cell]]:
        """The rows below the names of the columns."""
        return self.grid()[self.heads :]


_NOTHING = Cell()


def read_tables(html: str) -> list[Table]:
    """The tables of a page that have a cell, in its order; names are made different from each other.

    Names are what the page tells those who cannot see it. The table of an audit's heads, or of two audits', which the
    page's own script makes, is made of what that is made of. Raises `InputError` for more tables than a page has.
    """
    reader = _Reader()
    reader.feed(html)
    reader.close()
    if len(reader.tables) > _TABLES:
        raise InputError(f"tables: the page has {len(reader.tables):,}; at most {_TABLES:,} are read.")
    found: list[Table] = []
    counts: dict[str, int] = {}
    for table in reader.tables:
        if table.id in _MADE and reader.sheets:
            table = _heads(table, reader.sheets)
        if not any(table.rows):
            continue
        count = counts[table.file] = counts.get(table.file, 0) + 1
        found.append(table if count == 1 else replace(table, name=f"{table.name}, {count}"))
    return found


def csv_of(table: Table) -> str:
    """A table as comma-separated values (RFC 4180): names of columns, then rows; empty where the page has a dash.

    Numbers have a plain minus sign, so that programs read them. A cell that a spreadsheet would take for a formula
    begins with an apostrophe.
    """
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(map(_plain, table.columns()))
    writer.writerows([_plain(cell.whole) for cell in row] for row in table.body())
    return stream.getvalue()


def _plain(text: str) -> str:
    text = "" if text == "–" else re.sub(r"−(?=[\d.])", "-", text)
    return f"'{text}" if text.startswith(_FORMULA) and _NUMBER.fullmatch(text) is None else text


def _heads(table: Table, sheets: str) -> Table:
    """The table of an audit's heads, or of those of two that are compared, with the columns that the page knows; layers
    and heads count from 1."""
    content = json.loads(sheets)
    own, first = content["sheets"], content["sheets"][0]
    known = [(each, [sheet for sheet in own if each["name"] in sheet["values"]]) for each in content["columns"]]
    shown = [(each, there) for each, there in known if there]
    lines = 1 if len(own) == 1 else 2
    head = [Cell(text, down=lines) for text in ("head", "layer", "head of it")]
    head += [Cell(each["title"], across=len(there)) for each, there in shown]
    under = [[Cell(sheet["name"]) for _, there in shown for sheet in there]][: lines - 1]
    rows = [
        [
            Cell(title),
            *(Cell(str(first[name][row] + 1), right=True) for name in ("layer", "head")),
            *(
                Cell(fixed(sheet["values"][each["name"]][row], each["digits"]), right=True)
                for each, there in shown
                for sheet in there
            ),
        ]
        for row, title in enumerate(first["titles"])
    ]
    return replace(table, name="All heads", rows=[head, *under, *rows], heads=lines)


class OpenElements:
    """The elements that stand open; what is asked of all of them takes no longer for many."""

    def __init__(self) -> None:
        self._elements: list[tuple[str, list[str]]] = []
        self._names: Counter[str] = Counter()
        self._classes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._elements)

    def __contains__(self, name: str) -> bool:
        return self._names[name] > 0

    def any_of(self, name: str) -> bool:
        """Whether one of them is of this class."""
        return self._classes[name] > 0

    def begin(self, name: str, classes: Iterable[str] = ()) -> None:
        """An element begins."""
        self._elements.append((name, list(classes)))
        self._names[name] += 1
        self._classes.update(self._elements[-1][1])

    def end(self, name: str) -> list[str]:
        """The innermost element of this name ends, and those in it; returns its classes. One must be there."""
        while True:
            last, classes = self._elements.pop()
            self._names[last] -= 1
            self._classes.subtract(classes)
            if last == name:
                return classes


class _Reader(HTMLParser):
    """Collects tables; ``sheets`` is the content of an audit's, empty on other pages."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[Table] = []
        self.sheets = ""
        self._open = OpenElements()
        self._unseen = 0  # how many were open outside what is not to be read, plus 1; 0 where all is
        self._label, self._note, self._title, self._heading = "", "", "", ""
        self._table: Table | None = None
        self._cell: Cell | None = None
        self._small = self._folded = self._told = self._data = False

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        if tag in _GAPS:
            self._add(" ")
        if tag in VOID:
            return
        self._open.begin(tag)
        if self._unseen:
            return
        told = {name: value or "" for name, value in attrs}
        self._data = tag == "script" and told.get("id") == "sheets"
        if tag in _UNSEEN or told.get("aria-hidden") == "true":
            self._unseen = len(self._open)
        elif "aria-label" in told and told.get("role") == "region":
            self._label, self._note = told["aria-label"], told.get("data-note", "")
        elif tag in ("h2", "h3"):
            self._heading = ""
            self._title = tag
        elif tag == "table":
            name = self._label or self._heading or "table"
            self._table = Table(
                " ".join(name.split()), " ".join(self._heading.split()), id=told.get("id", ""), note=self._note
            )
            self.tables.append(self._table)
        elif self._table is not None:
            self._inside(self._table, tag, told)

    def _inside(self, table: Table, tag: str, told: dict[str, str]) -> None:
        if tag == "tr":
            table.rows.append([])
            table.heads += "thead" in self._open
        elif tag in ("td", "th") and table.rows:
            across, down = _count(told.get("colspan"), _ACROSS), _count(told.get("rowspan"), _DOWN)
            right = "right" in told.get("class", "").split()
            self._cell = Cell(right=right, across=across, down=down)
            table.rows[-1].append(self._cell)
        elif tag == "details":
            self._folded = True
        elif tag == "summary":
            self._told = True
        elif tag == "small":
            self._small = True
            if self._cell is not None and self._cell.note:
                self._cell.note += "; "

    def handle_endtag(self, tag: str) -> None:
        if tag not in self._open:
            return
        self._open.end(tag)
        if self._unseen:
            if len(self._open) < self._unseen:
                self._unseen, self._data = 0, False
            return
        if tag == self._title:
            self._title = ""
        elif tag in ("td", "th") and self._cell is not None:
            self._cell.text, self._cell.note = (_joined(text) for text in (self._cell.text, self._cell.note))
            self._cell = None
        elif tag == "table":
            self._table, self._label, self._note = None, "", ""
        elif tag == "details":
            self._folded = False
        elif tag == "summary":
            self._told = False
        elif tag == "small":
            self._small = False

    def handle_data(self, data: str) -> None:
        if self._data:
            self.sheets += data
        elif not self._unseen:
            self._add(data)

    def _add(self, text: str) -> None:
        if self._title and not self._unseen:
            self._heading += text
        if self._cell is None or self._unseen or (self._folded and not self._told):
            return
        if self._small:
            self._cell.note += text
        else:
            self._cell.text += text


def _joined(text: str) -> str:
    return re.sub(r"(; )+$", "", " ".join(text.split()))


def _count(text: str | None, most: int) -> int:
    return min(max(1, int(text[:9])), most) if text and text.isdecimal() else 1
