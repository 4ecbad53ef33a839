"""Tables of a page as comma-separated values, and as LaTeX with the rules of booktabs for a paper of two columns."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from toeplens.report.kit.tables import DASH, Cell, Table

_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # as a spreadsheet knows one, in wide letters too
_NUMBER = re.compile(r"[-+]\.?\d[\d.,]*(?:[eE][-+]?\d+)?(?: ?%)?(?: [\w(±[].*)?")  # with a unit or a note


def told_apart(tables: Iterable[Table]) -> list[Table]:
    """The tables that have a row, those of the same name numbered."""
    found: list[Table] = []
    counts: dict[str, int] = {}
    for table in tables:
        if table.body:
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
    "[": "{[}",  # else the option of a line's end
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

_LONG = 40  # characters of a cell from which on its column is wrapped
_NARROW = 55  # characters that a line of one column of text has room for
_NAME = 16  # characters of a column's name in a line
_TALL = 45  # rows that a page has room for
_FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"  # made smaller if it is too wide
HEADER = "% needs \\usepackage{array,booktabs,graphicx}"


def escaped(text: str) -> str:
    """A text as LaTeX sets it; letters of other scripts stay as they are."""
    return "".join(_ESCAPES.get(letter, letter) for letter in text)


def latex_of(table: Table) -> str:
    """A table as a float with its caption and the label ``tab:NAME``; one taller than a page as a ``longtable``.

    A table wider than a column of text is a ``table*``; what is wider than that is made smaller.
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
    """The names of the columns; a group's name stands over a rule, a column's in the last of its rows."""
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
