"""Export for papers: figures of a page as images, tables as CSV and LaTeX with booktabs.

Figures have column width, 8 pt text and a white background, and are drawn by kaleido in a local browser. Sizes are in
page pixels, with `PIXELS` per inch, so that 12 px text on the page becomes 8 pt text in print.
"""

from __future__ import annotations

import asyncio
import csv
import importlib
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any, Literal

from toeplens.ground import EnvironmentFailure, write_bytes
from toeplens.ground.files import read_yaml
from toeplens.report.kit.blocks import Block, Panel, Sign
from toeplens.report.kit.canvas import untagged
from toeplens.report.kit.colours import FAMILIES, HEAT, OTHER, PALETTE, head_look
from toeplens.report.kit.tables import DASH, Cell, Table, slug

Format = Literal["svg", "png", "pdf"]
FORMATS: tuple[Format, ...] = ("svg", "png", "pdf")
INCHES = {1: 3.25, 2: 6.75}  # by number of columns, on a two-column page
PIXELS = 108  # per inch: 12 px are 8 pt
_DOTS, _CSS = 300, 96  # dots per inch of PNG; CSS pixels per inch
_INK, _FAINT = "#1b1f24", "#4a525e"
_FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
_LETTER = 6.5  # mean width of a letter in pixels, at a font size of 11
_TITLE, _RAMP, _LINE, _MARK = 22, 20, 18, 52  # heights; width of a legend entry without its text
_SYMBOLS = {glyph: symbol for _, symbol, glyph in (*FAMILIES.values(), OTHER, *PALETTE, *map(head_look, range(16)))}
_ON_SCREEN = re.compile(
    r" ?\b(?:Press(?! et al)|Point at|Click|Hover over)\b[^.]*\.|[;,] (?:hover|point at)\b[^.]*(?=\.)"
)
_MOST = 4  # maximum number of tabs
_MISSING = "figures: kaleido is not installed. Run: pip install 'toeplens[figures]'."
_NO_BROWSER = (
    "figures: Chrome or Chromium is not installed. Run 'apt-get install chromium' or 'kaleido_get_chrome', or set "
    "BROWSER_PATH."
)


@dataclass(frozen=True)
class Printed:
    """A panel for print: its plot, its size in page pixels, and the titles of its view, group and panel."""

    plot: dict[str, Any]
    width: int
    height: int
    view: str
    group: str
    panel: str

    @property
    def inches(self) -> tuple[float, float]:
        """Width and height in print."""
        return self.width / PIXELS, self.height / PIXELS


def printed_caption(block: Block) -> str:
    """A figure's caption without sentences on interaction."""
    return _ON_SCREEN.sub("", block.caption).strip()


def printed_panels(block: Block, columns: int | None = None) -> dict[str, Printed]:
    """The panels of a figure by file name: the figure's name, then as much of their titles as needed to be unique.

    columns  1 or 2 (default: depends on the figure)
    """
    every = [(view, group, panel) for view in block.views for group in view.groups for panel in group.panels]
    views, groups = {view.title for view, *_ in every}, {group.title for _, group, _ in every}
    found: dict[str, Printed] = {}
    for view, group, panel in every:
        parts = [view.title if len(views) > 1 else "", group.title if len(groups) > 1 else "", panel.title]
        parts = [slug(part) for part in parts] if len(every) > 1 else []
        name = first = "-".join(dict.fromkeys([block.id, *filter(None, parts)]))
        number = 1
        while name in found:
            number += 1
            name = f"{first}-{number}"
        width = round(INCHES[columns or (2 if block.width == "full" else 1)] * PIXELS)
        plot, height = _printed(block, panel, width, titled=len(every) > 1)
        found[name] = Printed(plot, width, height, view.title, group.title, panel.title)
    return found


def _printed(block: Block, panel: Panel, width: int, *, titled: bool) -> tuple[dict[str, Any], int]:
    """A panel's plot with title and legend, and its height."""
    page = panel.figure.to_plotly_json()
    data, layout = [{**trace, "showlegend": False} for trace in page["data"]], page["layout"]
    margin, there = layout.get("margin", {}), {trace.get("meta") for trace in data}
    title, top = untagged(panel.title) if titled else "", int(margin.get("t", 8))
    signs = [sign for sign in (*block.legend, *panel.legend) if sign.title and (not sign.key or sign.key in there)]
    ramped = block.ramp is not None and "coloraxis" in layout
    across = max(1, int(width / (max((len(sign.title) for sign in signs), default=0) * _LETTER + _MARK)))
    above = (_TITLE if title else 4) + (ceil(len(signs) / across) * _LINE + 6 if signs else 0) + _RAMP * ramped
    plain = int(layout.get("height") or width / 1.84)
    height = plain + above
    layout |= {"width": width, "height": height, "autosize": False, "margin": {**margin, "t": top + above}}
    layout |= {"paper_bgcolor": "white", "plot_bgcolor": "white", "showlegend": bool(signs)}
    layout["font"] = {**layout.get("font", {}), "family": _FONT, "color": _INK}
    for name in [name for name in layout if name.startswith(("xaxis", "yaxis"))]:
        layout[name] = {"automargin": True, "linecolor": _FAINT, **layout[name]}
    corner = {"x": 0, "xref": "container", "xanchor": "left", "yref": "container", "yanchor": "top"}
    if title:
        most = int(width / 7.35)
        text = title if len(title) <= most else f"{title[: most - 1].rstrip()}…"
        words = {"text": f"<b>{text}</b>", "font": {"size": 12, "color": _INK}}
        layout["title"] = {**words, **corner, "y": 1, "pad": {"l": 4, "t": 4}}
    if signs:
        data += [_entry(sign) for sign in signs]
        place = {**corner, "y": 1 - (_TITLE if title else 2) / height, "orientation": "h", "tracegroupgap": 0}
        look = {"font": {"size": 11}, "itemsizing": "constant", "traceorder": "normal", "bgcolor": "rgba(0,0,0,0)"}
        layout["legend"] = {**place, **look}
    if "coloraxis" in layout:
        inside = max(1, plain - top - margin.get("b", 40))
        layout["coloraxis"] = _colours(block, layout["coloraxis"], (top + 6) / inside)
    return {"data": data, "layout": layout}, height


def _entry(sign: Sign) -> dict[str, Any]:
    """An empty trace that shows a legend entry."""
    tint = sign.tint if sign.tint and "var(" not in sign.tint else _FAINT
    points: dict[str, Any] = {"type": "scatter", "x": [None], "y": [None], "hoverinfo": "skip"}
    points |= {"name": untagged(sign.title), "showlegend": True}
    if sign.dash:
        return {**points, "mode": "lines", "line": {"color": tint, "dash": sign.dash, "width": 2}}
    if shape := getattr(sign, "shape", ""):
        pattern = {"shape": shape, "fgcolor": "white", "size": 5}
        return {**points, "type": "bar", "marker": {"color": tint, "pattern": pattern}}
    symbol = _SYMBOLS.get(sign.glyph, "circle") if sign.glyph else "square"
    return {**points, "mode": "markers", "marker": {"color": tint, "symbol": symbol, "size": 8}}


def _colours(block: Block, axis: dict[str, Any], above: float) -> dict[str, Any]:
    """The page's light colour scale, with a labelled colour bar above the panel."""
    low, middle, high = HEAT["light"]
    made = {**axis, "colorscale": [[0, low], [0.5, middle], [1, high]], "showscale": block.ramp is not None}
    if block.ramp is None:
        return made
    if block.ramp.half:
        made |= {"cmin": 0, "colorscale": [[0, middle], [1, high]]}
    ticks = {"tickvals": [made.get("cmin"), made.get("cmax")], "ticks": "", "tickfont": {"size": 11}}
    ticks["ticktext"] = [untagged(block.ramp.low), untagged(block.ramp.high)]
    bar = {"orientation": "h", "thickness": 7, "len": 0.5, "x": 0.5, "xpad": 0, "ypad": 0, "outlinewidth": 0}
    return made | {"colorbar": {**bar, **ticks, "y": 1 + above / 2, "yanchor": "bottom"}}


def draw(
    panels: Mapping[Path, Printed],
    form: Format,
    *,
    tabs: int = 2,
    on_done: Callable[[Path], None] = lambda path: None,
) -> None:
    """Draw panels into files, each written atomically.

    Arguments
        panels   panels by file
        form     ``svg``, ``png`` (300 dots per inch) or ``pdf``
        tabs     number of panels drawn in parallel
        on_done  called with each written file

    Raises `EnvironmentFailure` without kaleido or a browser, and if the browser fails.
    """
    kaleido, errors = programs()
    work = _draw(kaleido, panels, form, min(tabs, _MOST, len(panels)), on_done)
    try:
        with ThreadPoolExecutor(1) as beside:  # in a notebook, the main thread already runs an event loop
            beside.submit(asyncio.run, work).result()
    except errors.ChromeNotFoundError:
        raise EnvironmentFailure(_NO_BROWSER) from None
    except (errors.BrowserClosedError, errors.BrowserFailedError, errors.ChannelClosedError, TimeoutError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise EnvironmentFailure(f"figures: the browser failed to draw them ({said[:200]}).") from None


def programs() -> tuple[Any, Any]:
    """Kaleido and the errors of its browser; raises `EnvironmentFailure` if it is not installed."""
    try:
        return importlib.import_module("kaleido"), importlib.import_module("choreographer.errors")
    except ImportError:
        raise EnvironmentFailure(_MISSING) from None


async def _draw(
    kaleido: Any, panels: Mapping[Path, Printed], form: Format, tabs: int, on_done: Callable[[Path], None]
) -> None:
    """Draw with a limited number of tabs."""
    scale = (_DOTS if form == "png" else _CSS) / PIXELS
    # a proxy that does not exist, so that the browser makes no network requests
    async with kaleido.Kaleido(n=tabs, mathjax=False, proxy_server="127.0.0.1:9") as browser:
        free = asyncio.Semaphore(tabs)

        async def one(path: Path, panel: Printed) -> None:
            async with free:
                size = {"width": panel.width, "height": panel.height}
                write_bytes(path, await browser.calc_fig(panel.plot, opts={"format": form, "scale": scale, **size}))
                on_done(path)

        async with asyncio.TaskGroup() as group:
            for path, panel in panels.items():
                group.create_task(one(path, panel))


# ---- tables ----------------------------------------------------------------------------------------------------------

_FORMULA = tuple("=+-@＝＋－＠")  # characters that start a formula in a spreadsheet, including full-width ones
_NUMBER = re.compile(r"[-+]\.?\d[\d.,]*(?:[eE][-+]?\d+)?(?: ?%)?(?: [\w(±[].*)?")  # with an optional unit or note


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

_TEX: dict[str, dict[str, str]] = read_yaml(Path(__file__).with_name("latex.yaml"))
_ESCAPES = _TEX["text"] | {sign: f"${name}$" for sign, name in _TEX["math"].items()}

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
    by_column = list(zip(*body, strict=True))
    room = sum(min(_LONG, max(3 + len(cell.whole) for cell in cells)) for cells in by_column)
    lines = [" & ".join(map(_cell, row)) + r" \\" for row in body]
    told = f"{table.name}. {table.note}".strip()
    caption = rf"\caption{{{escaped(told)}}}\label{{tab:{table.file}}}"
    columns = ""
    for cells in by_column:
        wraps, right = any(len(cell.plain) > _LONG for cell in cells), any(cell.right for cell in cells)
        columns += r">{\raggedright\arraybackslash}p{0.4\linewidth}" if wraps else "r" if right else "l"
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
