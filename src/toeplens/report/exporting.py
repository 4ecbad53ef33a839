"""A page's charts as PDF, SVG and PNG files sized for a paper, and its tables as CSV, LaTeX and HTML.

Charts are drawn by vl-convert, LaTeX and HTML tables are made by great-tables; neither needs a browser or a network.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
import warnings
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal

import great_tables
import pyarrow as pa
import vl_convert

from toeplens.report.charts import CONCAT_KEYS, fit_to_width
from toeplens.report.page import Figure
from toeplens.report.tables import DASH, Table, TableCell
from toeplens.report.theme import vega_config

Format = Literal["pdf", "svg", "png"]
FORMATS: tuple[Format, ...] = ("pdf", "svg", "png")
INCHES = {1: 3.25, 2: 6.75}  # by number of columns, on a two-column page
_PX_PER_INCH, _POINTS_PER_INCH, _DPI = 108, 72, 300  # per inch: of a chart (so its 12 px are 8 pt), of PDF, of PNG
_LEGEND_WIDTH = 130  # pixels of a legend's entry
_FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


def columns_of(figure: Figure) -> int:
    """The number of text columns for which a figure is made: 2 for several panels, otherwise 1."""
    return 2 if any(name in figure.spec for name in ("spec", *CONCAT_KEYS)) else 1


def draw_figure(figure: Figure, form: Format, columns: int | None = None) -> bytes:
    """A figure on white, 3.25 inches (1 column) or 6.75 inches (2 columns) wide, with text of about 8 pt.

    PNG has 300 dots per inch. ``columns`` defaults to `columns_of` the figure.
    """
    inches = INCHES[columns or columns_of(figure)]
    width = round(inches * _PX_PER_INCH)
    theme: dict[str, Any] = vega_config(font=_FONT) | {"background": "white"}
    theme["legend"] = {**theme["legend"], "columns": max(1, width // _LEGEND_WIDTH)}
    text = vl_convert.vegalite_to_svg(fit_to_width(figure.spec, width), config=theme)
    if excess := round(width - _svg_width(text)):  # panels whose axes have other widths than `fit_to_width` expects
        text = vl_convert.vegalite_to_svg(fit_to_width(figure.spec, width + excess), config=theme)
    ids: dict[str, str] = {}
    text = re.sub(r"(clip|gradient_)(\d+)", lambda x: ids.setdefault(x[0], f"{x[1]}{len(ids)}"), text)  # counted from 0
    per_inch = max(_PX_PER_INCH, _svg_width(text) / inches)  # with long titles, panels may not be narrow enough
    if form == "png":
        return vl_convert.svg_to_png(text, scale=_POINTS_PER_INCH / per_inch, ppi=_DPI)
    unit, per_unit = ("", per_inch / _POINTS_PER_INCH) if form == "pdf" else ("in", per_inch)
    width, height = (f'{name}="{float(size) / per_unit:.3f}{unit}"' for name, size in _SVG_SIZE.findall(text)[:2])
    text = _SVG_SIZE.sub("", text, count=2).replace("<svg", f"<svg {width} {height}", 1)
    return vl_convert.svg_to_pdf(text) if form == "pdf" else text.encode()


_SVG_SIZE = re.compile(r'\b(width|height)="([\d.]+)"')  # the first two are the picture's


def _svg_width(text: str) -> float:
    return float(_SVG_SIZE.findall(text)[0][1])


_FORMULA_STARTS = tuple("=+-@＝＋－＠")  # characters that start a formula in a spreadsheet, including full-width ones
_NUMBER = re.compile(r"[-+]\.?\d[\d.,]*(?:[eE][-+]?\d+)?(?: ?%)?(?: [\w(±\[].*)?")  # with an optional unit or note


def number_tables(tables: Iterable[Table]) -> list[Table]:
    """The tables that are not empty; tables with the same name are numbered."""
    result: list[Table] = []
    counts: dict[str, int] = {}
    for table in tables:
        if table.body:
            count = counts[table.file] = counts.get(table.file, 0) + 1
            result.append(table if count == 1 else replace(table, name=f"{table.name}, {count}"))
    return result


def csv_of(table: Table) -> str:
    """A table as comma-separated values (RFC 4180): column names, then rows; a dash becomes an empty cell.

    Numbers have an ASCII minus sign. Cells that a spreadsheet would read as a formula start with an apostrophe.
    """
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(map(_csv_text, table.columns()))
    writer.writerows([_csv_text(cell.full_text) for cell in row] for row in table.expand_spans()[1])
    return stream.getvalue()


def _csv_text(text: str) -> str:
    text = "" if text == DASH else re.sub(r"−(?=[\d.])", "-", text)
    return f"'{text}" if text.startswith(_FORMULA_STARTS) and _NUMBER.fullmatch(text) is None else text


def great_table(table: Table) -> great_tables.GT:
    """A table as a `great_tables.GT`, with its groups of columns as spanners; a spanning cell is shown once."""
    head, body = table.expand_spans()
    columns = [str(x) for x in range(len((head or body)[0]))]
    texts = [[_cell_text(body, y, x) for y in range(len(body))] for x in range(len(columns))]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PyArrow Table support")
        gt = great_tables.GT(pa.table(dict(zip(columns, texts, strict=True))), id=table.file, auto_align=False)
    gt = gt.tab_options(table_font_size="8pt", column_labels_hidden=not head)
    right = [x for x in columns if any(row[int(x)].right for row in body)]
    gt = gt.cols_align("left").cols_align("right", right) if right else gt.cols_align("left")
    if head:
        gt = gt.cols_label(dict(zip(columns, (cell.full_text for cell in head[-1]), strict=True)))
    for y in reversed(range(len(head) - 1)):
        for _, cells in groupby(columns, key=lambda x: id(head[y][int(x)])):
            below = list(cells)
            first = int(below[0])
            if head[y][first].full_text and head[-1][first] is not head[y][first]:
                gt = gt.tab_spanner(head[y][first].full_text, below, id=f"{table.file}-{y}-{first}")
    return gt


def _cell_text(body: list[list[TableCell]], y: int, x: int) -> str:
    """The text of a cell; of one that spans others only where it starts."""
    cell = body[y][x]
    spanned = (cell.rowspan > 1 and y > 0 and body[y - 1][x] is cell) or (
        cell.colspan > 1 and x > 0 and body[y][x - 1] is cell
    )
    return "" if spanned else cell.full_text


def html_of(table: Table) -> str:
    """A table as an HTML fragment with its own style."""
    return great_table(table).tab_header(f"{table.name}. {table.note}".strip()).as_raw_html()


_SIGNS = {"−": "-", "≤": r"\le", "≥": r"\ge", "≈": r"\approx", "≡": r"\equiv", "≠": r"\ne", "×": r"\times"}
_SIGNS |= {"∘": r"\circ", "→": r"\to", "√": r"\surd", "∞": r"\infty", "∑": r"\sum", "∅": r"\emptyset", "∈": r"\in"}
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵀ]+")
_WRAP_WIDTH = 40  # a column is wrapped if a cell has more characters
_COLUMN_WIDTH = 55  # characters per line of one text column
_PAGE_ROWS = 45  # rows per page


def latex_of(table: Table) -> str:
    """A table as a float with its caption and the label ``tab:NAME``, or as a ``longtable`` if taller than a page.

    Tables wider than a text column use ``table*`` and are scaled down if necessary.
    """
    body, tall = table.expand_spans()[1], len(table.head) + len(table.body) > _PAGE_ROWS
    widths = [max(len(cell.full_text) for cell in cells) for cells in zip(*body, strict=True)]
    caption = " ".join(f"{table.name}. {table.note}".split())
    text = great_table(table).tab_header(caption).as_latex(use_longtable=tall)
    text = re.sub(
        r"\\caption\*\{\n\{\\large (.*)\}\n\}", lambda x: rf"\caption{{{x[1]}}}\label{{tab:{table.file}}}", text
    )
    adjusted = "\\begin{adjustbox}{max width=\\linewidth}\n\\begin{tabular}{"
    text = text.replace(r"\begin{tabular*}{\linewidth}{@{\extracolsep{\fill}}", adjusted)
    text = text.replace(r"\end{tabular*}", "\\end{tabular}\n\\end{adjustbox}")
    if num_long := sum(width > _WRAP_WIDTH for width in widths):
        column_type = rf">{{\raggedright\arraybackslash}}p{{{0.7 / num_long:.2f}\linewidth}}"
        text = re.sub(
            r"(?<=table\}\{|bular\}\{)[lr]+(?=\}\n)",
            lambda x: "".join(column_type if width > _WRAP_WIDTH else a for width, a in zip(widths, x[0], strict=True)),
            text,
            count=1,
        )
    if not table.head:
        text = re.sub(r"(\\toprule\n).*?\\midrule\S*\n", r"\1", text, flags=re.DOTALL)
    if sum(min(_WRAP_WIDTH, 3 + width) for width in widths) > _COLUMN_WIDTH:
        text = text.replace("{table}", "{table*}")
    packages = "array,booktabs,longtable; not for text in two columns" if tall else "adjustbox,array,booktabs"
    return f"% needs \\usepackage{{{packages}}}\n{_to_math_mode(text)}"


def _to_math_mode(text: str) -> str:
    """The text with letters and signs that LaTeX's default fonts lack as mathematics."""
    text = text.replace("|", r"\textbar{}")
    text = _SUPERSCRIPTS.sub(lambda match: f"$^{{{unicodedata.normalize('NFKC', match[0]).replace('−', '-')}}}$", text)
    return "".join(_latex_sign(letter) if ord(letter) > 127 else letter for letter in text)


def _latex_sign(letter: str) -> str:
    name = unicodedata.name(letter, "").split()
    if name[:1] == ["GREEK"] and name[2:3] == ["LETTER"]:
        sign = name[3].lower().replace("lamda", "lambda")
        return rf"$\{sign.capitalize() if name[1] == 'CAPITAL' else sign}$"
    return f"${_SIGNS[letter]}$" if letter in _SIGNS else letter
