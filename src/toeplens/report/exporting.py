"""A page's charts as PDF, SVG and PNG files sized for a paper, and its tables as CSV, LaTeX and HTML.

Charts are drawn by vl-convert, LaTeX and HTML tables are made by great-tables; neither needs a browser or a network.
"""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Literal

import great_tables
import pyarrow as pa
import vl_convert

from toeplens.report.charts import SEVERAL, sized
from toeplens.report.page import Figure
from toeplens.report.tables import DASH, Cell, Table
from toeplens.report.theme import config

Format = Literal["pdf", "svg", "png"]
FORMATS: tuple[Format, ...] = ("pdf", "svg", "png")
INCHES = {1: 3.25, 2: 6.75}  # by number of columns, on a two-column page
_PIXELS, _POINTS, _DOTS = 108, 72, 300  # per inch: of a chart (so its 12 px are 8 pt), of PDF, of PNG
_LEGEND = 130  # pixels of a legend's entry
_FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


def columns_of(figure: Figure) -> int:
    """The number of text columns for which a figure is made: 2 for several panels, otherwise 1."""
    return 2 if any(name in figure.spec for name in ("spec", *SEVERAL)) else 1


def draw(figure: Figure, form: Format, columns: int | None = None) -> bytes:
    """A figure on white, 3.25 inches (1 column) or 6.75 inches (2 columns) wide, with text of about 8 pt.

    PNG has 300 dots per inch. ``columns`` defaults to `columns_of` the figure.
    """
    width = round(INCHES[columns or columns_of(figure)] * _PIXELS)
    theme = config(font=_FONT) | {"background": "white"}
    theme["legend"] = {**theme["legend"], "columns": max(1, width // _LEGEND)}
    spec = sized(figure.spec, width)
    if form == "png":
        return vl_convert.vegalite_to_png(spec, config=theme, scale=_POINTS / _PIXELS, ppi=_DOTS)
    text = vl_convert.vegalite_to_svg(spec, config=theme)
    size = re.compile(r'(<svg[^>]*?) width="([\d.]+)" height="([\d.]+)"')
    if form == "pdf":
        return vl_convert.svg_to_pdf(size.sub(partial(_scaled, "", _POINTS), text, count=1))
    return size.sub(partial(_scaled, "in", 1), text, count=1).encode()


def _scaled(unit: str, per_inch: float, match: re.Match[str]) -> str:
    width, height = (float(match[i]) / _PIXELS * per_inch for i in (2, 3))
    return f'{match[1]} width="{width:.3f}{unit}" height="{height:.3f}{unit}"'


# ---- tables ----------------------------------------------------------------------------------------------------------

_FORMULA = tuple("=+-@＝＋－＠")  # characters that start a formula in a spreadsheet, including full-width ones
_NUMBER = re.compile(r"[-+]\.?\d[\d.,]*(?:[eE][-+]?\d+)?(?: ?%)?(?: [\w(±\[].*)?")  # with an optional unit or note
_TALL = 45  # rows per page


def numbered(tables: Iterable[Table]) -> list[Table]:
    """The tables that are not empty; tables with the same name are numbered."""
    made: list[Table] = []
    counts: dict[str, int] = {}
    for table in tables:
        if table.body:
            count = counts[table.file] = counts.get(table.file, 0) + 1
            made.append(table if count == 1 else replace(table, name=f"{table.name}, {count}"))
    return made


def csv_of(table: Table) -> str:
    """A table as comma-separated values (RFC 4180): column names, then rows; a dash becomes an empty cell.

    Numbers have an ASCII minus sign. Cells that a spreadsheet would read as a formula start with an apostrophe.
    """
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(map(_plain, table.columns()))
    writer.writerows([_plain(cell.whole) for cell in row] for row in table.grids()[1])
    return stream.getvalue()


def _plain(text: str) -> str:
    text = "" if text == DASH else re.sub(r"−(?=[\d.])", "-", text)
    return f"'{text}" if text.startswith(_FORMULA) and _NUMBER.fullmatch(text) is None else text


def latex_of(table: Table) -> str:
    """A table in LaTeX (booktabs) with caption and label ``tab:NAME``; a ``longtable`` if taller than a page."""
    made = _great(table, _in_math).as_latex(use_longtable=len(table.body) > _TALL)
    text = rf"\\caption{{\1}}\\label{{tab:{table.file}}}"
    return re.sub(r"\\caption\*\{\s*\{\\(?:large|Large) (.*?)\}\s*\}", text, made, count=1, flags=re.S)


def html_of(table: Table) -> str:
    """A table as an HTML fragment with its own style."""
    return _great(table, lambda text: text).as_raw_html()


def _in_math(text: str) -> str:
    return text.replace("−", "-")


def _great(table: Table, text_of: Callable[[str], str]) -> great_tables.GT:
    head, body = table.grids()
    names = [str(x) for x in range(len(body[0]))]
    rows = [[text_of(cell.whole) for cell in row] for row in body]
    frame = pa.table({name: [row[x] for row in rows] for x, name in enumerate(names)})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PyArrow Table support", UserWarning)
        made = great_tables.GT(frame, id=table.file)
    labels = [text_of(cell.whole) for cell in head[-1]] if head else [""] * len(names)
    right = [name for x, name in enumerate(names) if any(row[x].right for row in body)]
    made = (
        made.tab_options(table_font_size="8pt")
        .tab_header(f"{table.name}. {table.note}".strip())
        .cols_label(dict(zip(names, labels, strict=True)))
    )
    made = made.cols_align("right", columns=right) if right else made
    for row in head[:-1]:
        for cell, places in _groups(row):
            if cell.whole and cell not in (head[-1][x] for x in places):
                made = made.tab_spanner(text_of(cell.whole), columns=[names[x] for x in places], id=f"{places[0]}")
    return made


def _groups(row: list[Cell]) -> list[tuple[Cell, list[int]]]:
    """The cells of a header's row with the columns that each spans."""
    runs = [list(each) for _, each in groupby(range(len(row)), key=lambda x: id(row[x]))]
    return [(row[each[0]], each) for each in runs]
