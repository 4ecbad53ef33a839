"""Tables of language models: benefits and costs of encodings, context extension, and missing measures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from toeplens.engine.language import Bits, Copying, Extended, Extension, Needles
from toeplens.ground.words import fixed, listed, percent, signed
from toeplens.report.grid.language.cells import every, language_tasks, looks_of, record, times, viewed
from toeplens.report.grid.look import Spread, encoding_looks, finished
from toeplens.report.kit.canvas import Look
from toeplens.report.kit.colours import OTHER
from toeplens.report.kit.tables import Cell, Table, make_table
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid
from toeplens.studies.grid import language as figures
from toeplens.studies.grid.language import LanguageRow


@dataclass(frozen=True)
class Prices:
    """Benefits and costs of a task's encodings: the table, best first, and the best row.

    title   title of the task, if there are several
    seeds   the smallest number of seeds of an encoding
    ngrams  number of context tokens and bits per byte of n-gram baselines on the same texts; empty if not fitted
    """

    title: str
    table: Table
    best: LanguageRow
    seeds: int
    ngrams: list[tuple[str, str]]


def prices(state: Grid) -> list[Prices]:
    """One table per task with evaluated language models."""
    tasks, rows = language_tasks(state.spec), figures.language_rows(state.spec, state.results)
    found = [(task, [row for row in rows if row.task == task]) for task in tasks]
    return [
        _prices(state, task, state.spec.title_of(task) if len(tasks) > 1 else "", mine) for task, mine in found if mine
    ]


def _prices(state: Grid, task: str, title: str, rows: list[LanguageRow]) -> Prices:
    looks, far = encoding_looks(state.spec), f"{figures.LONG:g}×"
    cells = {row.label: [c for c in finished(state, task, row.label) if figures.is_language(c)] for row in rows}
    fastest = min((row.seconds for row in rows if row.seconds), default=None)
    lines: list[list[str | Cell]] = [
        [
            Cell(row.title, sign=looks.get(row.label) or Look(row.label, row.title, *OTHER)),
            Cell(fixed(row.bits, 3), (_range(cells[row.label], figures.bits),), right=True),
            Cell(signed(row.lost, 3), (_range(cells[row.label], figures.lost),), right=True),
            Cell(percent(row.needle), right=True, css="edge"),
            percent(row.needle_long),
            Cell(fixed(row.copied, 2), right=True, css="edge"),
            percent(row.deposit),
            Cell(f"{row.parameters:,}", right=True, css="edge"),
            fixed(row.seconds / fastest if row.seconds and fastest else None),
        ]
        for row in rows
    ]
    measured = [record(cell, "bits", Bits) for each in cells.values() for cell in each]
    counted = [found.ngrams for found in measured if found and found.ngrams]
    orders = sorted({order for table in counted for order in table}, key=int)
    ngrams = [(n, fixed(float(np.mean([table[n] for table in counted if n in table])), 3)) for n in orders]
    for place, (order, bits) in enumerate(ngrams):
        name = f"{int(order) + 1}-gram model"
        blank = [Cell(css="edge" if at in (3, 5, 7) else "") for at in range(2, 9)]
        lines.append([Cell(name, row_css="guess" if place else "guess first"), bits, *blank])
    down, edge = {"down": 2, "right": True}, {"down": 2, "right": True, "css": "edge"}
    groups = [
        Cell("Encoding", down=2),
        Cell("Bits per byte", **down),
        Cell(f"Loss at\n{far}", **down),
        Cell("Needles found", across=2, css="group"),
        Cell("Copy gain\n(bits)", **edge),
        Cell("Position in\none head", **down),
        Cell("Parameters", **edge),
        Cell("Relative\ntime", **down),
    ]
    table = make_table(
        "Benefits and costs of encodings" + (f", {title}" if title else ""),
        [Cell("at 1×", right=True, css="edge"), Cell(f"at {far}", right=True)],
        lines,
        groups=groups,
        right=range(1, 9),
        note="Mean over seeds. Bits per byte at the training length. Small print: lowest and highest seed.",
        css="numbers prices",
    )
    return Prices(title, table, rows[0], min(row.seeds for row in rows), ngrams)


def _range(cells: Sequence[CellResult], figure: Callable[[CellResult], float]) -> str:
    spread = Spread.of(map(figure, cells))
    return f"{fixed(spread.low, 3)} to {fixed(spread.high, 3)}" if spread.count > 1 else ""


# ---- context extension -----------------------------------------------------------------------------------------------

_METHODS = {
    "none": "Unchanged",
    "interpolation": "Position interpolation",
    "ntk": "NTK-aware",
    "dynamic": "Dynamic NTK",
    "yarn": "YaRN",
    "longrope": "LongRoPE",
    "p-rope": "p-RoPE, lowest quarter frozen",
    "rerope": "ReRoPE",
    "self-extend": "Self-Extend",
    "dropped": "Position dropped",
    "scaled": "Scaled logits",
}
_KINDS = ("extension", "extension-tuned")


@dataclass(frozen=True)
class Ways:
    """Context extension of an encoding.

    target    target length as a multiple of the training length
    settings  searched settings: method and seeds, and the result
    texts     number of evaluated texts
    """

    look: Look
    title: str
    table: Table
    target: str
    settings: list[tuple[str, str]]
    texts: int


def extensions(state: Grid) -> list[Ways]:
    """One table per encoding with context extension; the table of missing measures lists the others."""
    found = []
    for task, cells in every(state):
        for one in looks_of(state, cells):
            halves = [[r for cell in cells[one.key] if (r := record(cell, name, Extension))] for name in _KINDS]
            if any(halves):
                found.append(_ways(one, viewed(task, one.title), cells[one.key], [half for half in halves if half]))
    return found


def _ways(one: Look, title: str, cells: Sequence[CellResult], halves: Sequence[Sequence[Extension]]) -> Ways:
    rows = [row for half in halves for each in half for row in each.rows]
    groups, names, places = [Cell("Change", down=2)], list[str | Cell](), []
    for half in halves:
        factors = sorted({row.factor for each in half for row in each.rows})
        steps = max(each.steps for each in half)
        text = f"After {steps} tuning steps" if steps else "Without tuning"
        groups.append(Cell(text, across=len(factors), css="group"))
        names += [Cell(times(at), right=True, css="" if place else "edge") for place, at in enumerate(factors)]
        places += [(half, factor, "" if place else "edge ") for place, factor in enumerate(factors)]
    lines: list[list[str | Cell]] = []
    for method in dict.fromkeys(row.method for row in rows):
        line: list[str | Cell] = [_METHODS.get(method, method)]
        for half, at, edge in places:
            mine = [row for each in half for row in each.rows if (row.method, row.factor) == (method, at)]
            line.append(_way(mine, edge))
        lines.append(line)
    table = make_table(
        f"Context extension, {title}",
        names,
        lines,
        groups=groups,
        note="Bits per byte at the end of longer texts; columns are multiples of the training length. Small print: "
        "difference from the unchanged model.",
        css="numbers extensions",
    )
    return Ways(one, title, table, str(halves[0][0].target), _settings(cells), max(row.texts for row in rows))


def _way(rows: Sequence[Extended], edge: str) -> Cell:
    """A method at a length: bits per byte, difference, and whether its interval excludes 0 in every seed."""
    bits = Spread.of(row.bits.value if row.bits else None for row in rows)
    text = fixed(bits.mean, 3)
    if not bits.count or all(row.method == "none" and not row.tuned for row in rows):
        return Cell(text, right=True, css=edge)
    gains = [row.gain for row in rows if row.gain]
    helps = sum(one.high is not None and one.high < 0 for one in gains)
    harms = sum(one.low is not None and one.low > 0 for one in gains)
    gain = signed(Spread.of(one.value for one in gains).mean, 3)
    if gains and len(gains) in (helps, harms):
        css = f"{edge}tint {'more' if helps else 'less'}"
        return Cell(text, (gain, "helps" if helps else "harms"), right=True, css=css, style="--size:26%")
    some = f"{helps + harms} of {len(gains)} seeds" if helps or harms else ""
    return Cell(text, (gain, some), right=True, css=edge)


def _settings(cells: Sequence[CellResult]) -> list[tuple[str, str]]:
    """Searched settings of each model; LongRoPE's factors go from the fastest pair to the slowest."""
    found: dict[tuple[str, str], list[int]] = {}
    for cell in cells:
        made = record(cell, "extension", Extension)
        for row in made.rows if made else ():
            if row.set:
                found.setdefault((_METHODS.get(row.method, row.method), row.set), [])
                if cell.key.seed not in (seeds := found[_METHODS.get(row.method, row.method), row.set]):
                    seeds.append(cell.key.seed)
    return [(f"{method}, seed {', '.join(map(str, sorted(seeds)))}", told) for (method, told), seeds in found.items()]


# ---- what is missing -------------------------------------------------------------------------------------------------

_NAMES = {
    "bits": "longer texts",
    "needles": "needles",
    "copying": "copies",
    "extension": "context extension without tuning",
    "extension-tuned": "context extension after tuning",
    "patterns": "head types",
    "position-loss": "effect of removing position from a head",
}
_GIVEN = re.compile(r"'[^']*' was given; |, got '[^']*'")  # the encoding's name, which the row has already


def missing(state: Grid) -> Table:
    """Missing measures of the evaluated language models, their encodings, and the reasons."""
    lines = []
    for task, cells in every(state):
        found: dict[tuple[str, str], tuple[list[float], list[str]]] = {}
        for one in looks_of(state, cells):
            for cell in cells[one.key]:
                for name, factor, why in _reasons(cell):
                    factors, titles = found.setdefault((name, _GIVEN.sub("", why)), ([], []))
                    factors += [factor] if factor is not None and factor not in factors else []
                    titles += [one.title] if one.title not in titles else []
        for (name, why), (factors, titles) in found.items():
            at = f" at {listed(map(times, sorted(factors)))} × the training length" if factors else ""
            whose = "all encodings" if len(titles) == len(cells) > 1 else listed(titles)
            lines.append([f"{name}{at}", f"{task}, {whose}" if task else whose, why])
    return make_table("Missing measures", ["Measure", "Encodings", "Reason"], lines, css="reasons")


def _reasons(cell: CellResult) -> Iterator[tuple[str, float | None, str]]:
    """Missing measures, their length (None: all), and the reason."""
    for name, content in cell.measures.items():
        if set(content) == {"why"}:
            yield _NAMES.get(name, f"the measure {name}"), None, content["why"]
    bits, needles, copying = (
        record(cell, "bits", Bits),
        record(cell, "needles", Needles),
        record(cell, "copying", Copying),
    )
    tables = {"bits": bits and bits.lengths, "needles": needles and needles.rows, "copying": copying and copying.rows}
    for name, rows in tables.items():
        for row in rows or ():
            if row.why:
                yield _NAMES[name], row.factor, row.why
    for name in _KINDS:
        made = record(cell, name, Extension)
        for row in made.rows if made else ():
            if row.why:
                yield f"{_NAMES[name]}, {row.method}", row.factor, row.why
