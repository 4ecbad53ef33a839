"""A grid study's tables: accuracies, costs, and models; of language models benefits, extension, and what is missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from toeplens.engine.language import Extended, Extension
from toeplens.ground.words import fixed, listed, percent, signed
from toeplens.report.grid.look import TEXTS, Spread, encoding_looks, every, finished, language_tasks, times, viewed
from toeplens.report.kit.canvas import Look
from toeplens.report.kit.colours import OTHER
from toeplens.report.kit.tables import DASH, Cell, Table, code, make_table
from toeplens.studies import CellResult
from toeplens.studies.grid import FIGURES, Grid, Relation, Row, cells, language
from toeplens.studies.grid import measured as heads
from toeplens.studies.kit.results import skill

_DEEPEST = 55  # strongest tint of a cell in per cent, so that text stays readable


def matrix(state: Grid) -> Table:
    """Mean test accuracy of each task and encoding, with baselines; scans are left out."""
    looks = encoding_looks(state.spec)
    tasks = {column.label: column.tasks for column in state.spec.columns()}
    found = {(row.task, row.label): row for row in state.matrix()}
    rows = []
    for task in state.spec.tasks:
        mine = [row for (of, _), row in found.items() if of == task]
        most = max(mine, key=lambda row: row.seeds - row.diverged, default=None)
        guesses = [percent(each, sign=False) for each in ((most.chance, most.length_chance) if most else (None, None))]
        rule = Cell(small=(DASH,), right=True)  # the best one, from the encoding with the most finished models
        if most and most.rule is not None and most.rule_accuracy is not None:
            rule = _tinted(most.rule_accuracy, skill(most.rule_accuracy, most.length_chance), most.rule)
        each = [
            _entry(found.get((task, label)), state.spec.seeds) if task in tasks[label] else Cell() for label in looks
        ]
        rows.append([state.spec.title_of(task), *each, Cell(guesses[0], right=True, css="edge"), guesses[1], rule])
    names = [
        Cell(one.title, right=True, sign=one, css="edge" if i == 0 else "") for i, one in enumerate(looks.values())
    ]
    rules = [Cell("Constant guess", right=True, css="edge"), Cell("Length only", right=True)]
    groups = [Cell("Encoding", across=len(looks), css="group")] if looks else []
    return make_table(
        "Test accuracy by task and encoding",
        [*names, *rules, Cell("Simple rule", right=True)],
        rows,
        groups=[Cell("Task", down=2), *groups, Cell("Baselines", across=3, css="group")],
        right=range(1, len(looks) + 4),
        note="Percent, mean over seeds. Small print: lowest and highest seed.",
        css="numbers matrix",
    )


def _entry(row: Row | None, planned: int) -> Cell:
    if row is None:
        return Cell(small=(DASH,), right=True)
    count = row.seeds - row.diverged
    if not count:
        return Cell(small=("diverged" if row.seeds == 1 else f"all {row.seeds} diverged",), right=True)
    notes = [f"{row.diverged} diverged"] if row.diverged else []
    if row.learning:
        notes.append(f"{row.learning}/{count} still learning")
    if row.seeds < planned:
        notes.append(f"{row.seeds}/{planned} seeds")
    ends = (percent(end, sign=False).replace("100.0", "100") for end in (row.lowest, row.highest))  # columns are narrow
    return _tinted(row.accuracy, row.skill, "–".join(ends) if count > 1 else "", ", ".join(notes))


def _tinted(accuracy: float | None, skill: float | None, *small: str) -> Cell:
    """An accuracy, coloured by skill."""
    css = "" if skill is None else f"tint {'less' if skill < 0 else 'more'}"
    depth = 0 if skill is None else _DEEPEST * min(1.0, abs(skill))
    return Cell(percent(accuracy, sign=False), small, right=True, css=css, style=f"--size:{depth:.0f}%")


def costs(state: Grid) -> Table:
    """Cost and Toeplitz share of each encoding, means over tasks; scans are left out."""
    looks, found = encoding_looks(state.spec), state.matrix()
    first = {row.task: row.train_seconds for row in found if row.label == next(iter(looks), None)}
    lines = []
    for label, one in looks.items():
        rows = [row for row in found if row.label == label and row.seeds > row.diverged]
        if not rows:
            continue
        sizes = [row.parameters for row in rows]
        logs = [np.log(row.train_seconds / o) for row in rows if row.train_seconds and (o := first.get(row.task))]
        lines.append(
            [
                Cell(one.title, sign=one),
                str(sum(row.seeds - row.diverged for row in rows)),
                f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,}–{max(sizes):,}",
                Spread.of(row.train_seconds for row in rows).told(1),
                f"{np.exp(np.mean(logs)):.2f}" if logs else DASH,
                Spread.of(row.toeplitz for row in rows).told(1, percent=True),
            ]
        )
    over = f"Time relative to {next(iter(looks.values())).title}" if looks else "Time"
    return make_table(
        "Cost by encoding",
        ["Encoding", "Models", "Parameters", "Training time (s)", over, "Toeplitz share"],
        lines,
        right=range(1, 6),
        note="Mean over tasks; lowest and highest task in brackets.",
    )


def models(state: Grid, *, bits: bool) -> Table:
    """Every model of the grid, including scans; ``bits`` adds bits per byte."""
    done = {cell.key: cell for cell in state.results.cells}
    titles = {column.label: column.title for column in state.spec.columns()}
    lines = []
    for place in cells(state.spec):
        found, measured = done.get(place.key), []
        carried: list[float | None] = [None, None]
        if found is not None and found.skilled:
            carried = [heads.carried(found, share) for share in ("positional", "symbolic")]
        if bits:
            known = found if found is not None and language.is_language(found) else None
            measured = [fixed(known and of(known), 3) for of in (language.bits, language.lost)]
        shares = [found.accuracy, found.skill, *carried] if found is not None else [None] * 4
        lines.append(
            [
                titles[place.key.label],
                state.spec.title_of(place.key.task),
                str(place.key.seed),
                found.status if found else "not finished",
                *measured,
                *(percent(share, sign=False) for share in shares),
                code(f"runs/{place.job.spec.name}"),
            ]
        )
    shown = ["Bits\nper byte", f"Loss at\n{language.LONG:g}×", "Next-token\naccuracy, %"] if bits else ["Test, %"]
    shown += ["Skill, %", "Positional\nshare, %", "Symbolic\nshare, %"]
    right = {2, *range(4, 4 + len(shown))}
    return make_table(
        "Models", ["Encoding", "Task", "Seed", "Status", *shown, "Run"], lines, right=right, css="numbers small"
    )


def relation_tables(state: Grid) -> dict[str, Table]:
    """Correlations with the skill that remains on longer sequences: over all tasks, and for each task."""
    every = {(each.figure, each.factor): each for each in state.relations if each.task is None}
    factors = sorted({factor for _, factor in every})
    figures = [figure for figure in FIGURES if any(of == figure for of, _ in every)]
    by_figure = [(FIGURES[figure][0], [every.get((figure, factor)) for factor in factors]) for figure in figures]
    found = {(each.task, each.figure): each for each in state.relations if each.task is not None}
    tasks = [task for task in state.spec.tasks if any(task == of for of, _ in found)]
    by_task = [(state.spec.title_of(task), [found.get((task, figure)) for figure in FIGURES]) for task in tasks]
    tables = {
        "by_length": ("all tasks", "Property of the heads", [f"{factor:g}×" for factor in factors], by_figure),
        "by_task": ("each task", "Task", [title for title, _ in FIGURES.values()], by_task),
    }
    return {
        key: make_table(
            f"Correlations with the skill remaining on longer sequences, {of}",
            [corner, *(Cell(title, right=True) for title in columns)],
            [[title, *map(_relation, entries)] for title, entries in rows],
            note="Spearman’s rank correlation over models. Small print: 95% interval (jackknife over families of "
            "encodings); number of models and encodings.",
            css="numbers relations",
        )
        for key, (of, corner, columns, rows) in tables.items()
        if by_figure
    }


def _relation(found: Relation | None) -> Cell:
    if found is None:
        return Cell(DASH, right=True)
    ends = "" if found.low is None else f"{signed(found.low)} to {signed(found.high)}"
    return Cell(signed(found.value), (ends, f"{len(found.points)} models, {found.encodings} encodings"), right=True)


# ---- language models: benefits and costs -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Prices:
    """Benefits and costs of a task's encodings: the table, best first, and the best row.

    title   title of the task, if there are several
    seeds   the smallest number of seeds of an encoding
    ngrams  number of context tokens and bits per byte of n-gram baselines on the same texts; empty if not fitted
    """

    title: str
    table: Table
    best: language.LanguageRow
    seeds: int
    ngrams: list[tuple[str, str]]


def prices(state: Grid) -> list[Prices]:
    """One table per task with evaluated language models."""
    tasks, rows = language_tasks(state.spec), language.language_rows(state.spec, state.results)
    found = [(task, [row for row in rows if row.task == task]) for task in tasks]
    return [
        _prices(state, task, state.spec.title_of(task) if len(tasks) > 1 else "", mine) for task, mine in found if mine
    ]


def _prices(state: Grid, task: str, title: str, rows: list[language.LanguageRow]) -> Prices:
    looks, far = encoding_looks(state.spec), f"{language.LONG:g}×"
    cells = {row.label: [c for c in finished(state, task, row.label) if language.is_language(c)] for row in rows}
    fastest = min((row.seconds for row in rows if row.seconds), default=None)
    lines: list[list[str | Cell]] = [
        [
            Cell(row.title, sign=looks.get(row.label) or Look(row.label, row.title, *OTHER)),
            Cell(fixed(row.bits, 3), (_range(cells[row.label], language.bits),), right=True),
            Cell(signed(row.lost, 3), (_range(cells[row.label], language.lost),), right=True),
            Cell(percent(row.needle), right=True, css="edge"),
            percent(row.needle_long),
            Cell(fixed(row.copied, 2), right=True, css="edge"),
            percent(row.deposit),
            Cell(f"{row.parameters:,}", right=True, css="edge"),
            fixed(row.seconds / fastest if row.seconds and fastest else None),
        ]
        for row in rows
    ]
    measured = [cell.measure("bits") for each in cells.values() for cell in each]
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

_METHODS: dict[str, str] = TEXTS["methods"]
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
    return [
        _ways(one, viewed(task, one.title), models, halves)
        for task, by_encoding in every(state)
        for one, models in by_encoding.items()
        if (halves := [half for name in _KINDS if (half := [r for cell in models if (r := cell.measure(name))])])
    ]


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
        by_place = (
            ([row for each in half for row in each.rows if (row.method, row.factor) == (method, at)], edge)
            for half, at, edge in places
        )
        lines.append([_METHODS.get(method, method), *(_way(mine, edge) for mine, edge in by_place)])
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
    found: dict[tuple[str, str], set[int]] = {}
    for cell in cells:
        made = cell.measure("extension")
        for row in made.rows if made else ():
            if row.set:
                found.setdefault((_METHODS.get(row.method) or row.method, row.set), set()).add(cell.key.seed)
    return [(f"{method}, seed {', '.join(map(str, sorted(seeds)))}", told) for (method, told), seeds in found.items()]


# ---- what is missing -------------------------------------------------------------------------------------------------

_NAMES: dict[str, str] = TEXTS["measures"]
_GIVEN = re.compile(r"'[^']*' was given; |, got '[^']*'")  # the encoding's name, which the row has already


def missing(state: Grid) -> Table:
    """Missing measures of the evaluated language models, their encodings, and the reasons."""
    lines = []
    for task, by_encoding in every(state):
        found: dict[tuple[str, str], tuple[list[float], list[str]]] = {}
        for one, models in by_encoding.items():
            for cell in models:
                for name, factor, why in _reasons(cell):
                    factors, titles = found.setdefault((name, _GIVEN.sub("", why)), ([], []))
                    factors += [factor] if factor is not None and factor not in factors else []
                    titles += [one.title] if one.title not in titles else []
        for (name, why), (factors, titles) in found.items():
            at = f" at {listed(map(times, sorted(factors)))} × the training length" if factors else ""
            whose = "all encodings" if len(titles) == len(by_encoding) > 1 else listed(titles)
            lines.append([f"{name}{at}", f"{task}, {whose}" if task else whose, why])
    return make_table("Missing measures", ["Measure", "Encodings", "Reason"], lines, css="reasons")


def _reasons(cell: CellResult) -> Iterator[tuple[str, float | None, str]]:
    """Missing measures, their length (None: all), and the reason."""
    for name, content in cell.measures.items():
        if set(content) == {"why"}:
            yield _NAMES.get(name, f"the measure {name}"), None, content["why"]
    for name in ("bits", "needles", "copying", *_KINDS):
        found = cell.measure(name)
        for row in (found.lengths if name == "bits" else found.rows) if found else ():
            if row.why:
                yield _NAMES[name] + (f", {row.method}" if name in _KINDS else ""), row.factor, row.why
