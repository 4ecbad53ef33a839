"""Tables of a page as CSV, and as LaTeX with booktabs for two-column papers."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from toeplens.report.kit.tables import DASH, Cell, Table

_FORMULA = (
    "=",
    "+",
    "-",
    "@",
    "＝",
    "＋",
    "－",
    "＠",
)  # characters that start a formula in a spreadsheet, including full-width ones
_NUMBER = re.compile(
    r"[-+]\.?\d[\d.,]*(?:[eE][-+]?\d+)?(?: ?%)?(?: [\w(±[].*)?"
)  # a number with an optional unit or note


def told_apart(tables: Iterable[Table]) -> list[Table]:
    """The tables that are not empty; tables with the same name are numbered."""
    found: list[Table] = []
    counts: dict[str, int] = {}
    for table in tables:
        if table.body:
            count = counts[table.file] = counts.get(table.file, 0) + 1
            found.append(table if count == 1 else replace(table, name=f"{table.name}, {count}"))
    return found


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


# ---- LaTeX -----------------------------------------------------------------------------------------------------------

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "[": "{[}",  # otherwise LaTeX reads it as an option of the line break
    "]": "{]}",
    "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
}
_GREEK = {"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ι": "iota", "λ": "lambda", "μ": "mu"}
_GREEK |= {"π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "varphi", "ω": "omega", "θ": "theta"}
_GREEK |= {"Δ": "Delta", "Σ": "Sigma", "Φ": "Phi", "Ω": "Omega"}
_SIGNS = {"≤": "le", "≥": "ge", "≈": "approx", "≡": "equiv", "≠": "ne", "×": "times", "·": "cdot", "∘": "circ"}
_SIGNS |= {"→": "rightarrow", "√": "surd", "∞": "infty", "±": "pm", "°": "{}^\\circ", "∑": "sum", "∅": "emptyset"}
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))
_PLAIN = {"–": "--", "—": "---", "−": "$-$", "…": r"\ldots{}", "’": "'", "‘": "`", "“": "``", "”": "''", "\u00a0": "~"}
_MATH = {sign: f"${name if name[0] == '{' else chr(92) + name}$" for sign, name in (_GREEK | _SIGNS).items()}
_ESCAPES = _SPECIAL | _PLAIN | _MATH | {sign: f"$^{{{digit}}}$" for sign, digit in _RAISED.items()}

_LONG = 40  # a column is wrapped if a cell has more characters
_NARROW = 55  # characters per line of one text column
_NAME = 16  # characters per line of a column name
_TALL = 45  # rows per page
_FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"  # scales down tables that are too wide
HEADER = "% needs \\usepackage{array,booktabs,graphicx}"


def escaped(text: str) -> str:
    """A text with LaTeX escapes; letters of other scripts are kept."""
    return "".join(_ESCAPES.get(letter, letter) for letter in text)


def latex_of(table: Table) -> str:
    """A table as a float with its caption and the label ``tab:NAME``, or as a ``longtable`` if taller than a page.

    Tables wider than a text column use ``table*`` and are scaled down if necessary.
    """
    (head, body), tall = table.grids(), len(table.head) + len(table.body) > _TALL
    width = len(body[0]) if body else 0
    room = sum(min(_LONG, max((3 + len(row[x].whole) for row in body), default=0)) for x in range(width))
    lines = [" & ".join(map(_cell, row)) + r" \\" for row in body]
    told = f"{table.name}. {table.note}".strip()
    caption = rf"\caption{{{escaped(told)}}}\label{{tab:{table.file}}}"
    columns = ""
    for cells in ([row[x] for row in body] for x in range(width)):
        wraps = any(len(cell.plain) > _LONG for cell in cells)
        side = "r" if any(cell.right for cell in cells) else "l"
        columns += r">{\raggedright\arraybackslash}p{0.4\linewidth}" if wraps else side
    names = _head(head)
    begun = [r"\toprule", *names, *([r"\midrule"] if names else [])]
    if tall:
        made = [HEADER + ", and longtable; not for text in two columns", r"\begingroup\footnotesize"]
        made += [rf"\begin{{longtable}}{{{columns}}}", rf"{caption} \\", *begun, r"\endfirsthead"]
        made += [*begun, r"\endhead", *lines, r"\bottomrule", r"\end{longtable}", r"\endgroup"]
    else:
        kind = "table*" if room > _NARROW else "table"
        made = [HEADER, rf"\begin{{{kind}}}", r"\centering\footnotesize\setlength{\tabcolsep}{3pt}", caption, _FITTED]
        made += [rf"\begin{{tabular}}{{{columns}}}", *begun, *lines, r"\bottomrule", r"\end{tabular}}"]
        made += [rf"\end{{{kind}}}"]
    return "\n".join(made) + "\n"


def _head(rows: Sequence[Sequence[Cell]]) -> list[str]:
    """The column names; group names have a rule below, column names are in the last row of their cell."""
    lines = []
    for y, row in enumerate(rows):
        parts, rules, x = [], [], 1
        for _, same in groupby(row, key=id):
            cells = list(same)
            cell, count = cells[0], len(cells)
            below = y + 1 < len(rows) and rows[y + 1][x - 1] is cell
            if count > 1:
                parts.append(rf"\multicolumn{{{count}}}{{c}}{{{_cell(cell)}}}")
                rules.append(rf"\cmidrule(lr){{{x}-{x + count - 1}}}")
            else:
                texts = textwrap.wrap(cell.whole, _NAME, break_long_words=False) or [""]
                name = r"\\".join(map(escaped, texts))
                side = "r" if cell.right else "l"
                parts.append("" if below else name if len(texts) == 1 else rf"\shortstack[{side}]{{{name}}}")
            x += count
        lines.append(" & ".join(parts) + r" \\" + (" " + "".join(rules) if y + 1 < len(rows) else ""))
    return lines


def _cell(cell: Cell) -> str:
    text = re.sub(r"(?<=\d) (?=%)", r"\\,", escaped(cell.plain))
    if not cell.note:
        return text
    note = rf"{{\scriptsize {escaped(cell.note)}}}"
    return f"{text} {note}" if text else note
