"""A grid study's figures and tables on longer sequences: skill by length, and its correlates."""

from __future__ import annotations

from toeplens.engine import LengthResult
from toeplens.ground.words import listed, signed
from toeplens.report.grid.look import encoding_looks, models_of, signs, spreads
from toeplens.report.kit.blocks import Block, Panel, View
from toeplens.report.kit.canvas import Canvas, untagged
from toeplens.report.kit.tables import DASH, Cell, Table, make_table
from toeplens.studies import CellResult
from toeplens.studies.grid import FIGURES, Grid, Relation
from toeplens.studies.grid import measured as heads


def lengths(state: Grid) -> Block:
    """Skill against the length of the test sequences, a panel per task."""
    low, panels = min([0.0, *(skill for cell in state.results.cells for _, skill in _by_length(cell))]), []
    for task in state.spec.tasks:
        canvas, cannot = Canvas(220, left=46, bottom=38), _cannot(state, task)
        canvas.line_at(0)
        for one, cells in models_of(state, task).items():
            found = spreads(pair for cell in cells for pair in _by_length(cell))
            if not found:
                continue
            canvas.lines(
                [factor for factor, _ in found],
                [round(spread.mean, 4) for _, spread in found],
                one.tint,
                "%{x:.3g} times the training length<br>skill %{customdata}",
                width=1.8,
                marker={"color": one.tint, "symbol": one.symbol, "size": 6},
                customdata=[spread.told(1, percent=True) for _, spread in found],
                name=untagged(one.title),
                meta=one.key,
            )
        canvas.x("times the training length", type="log", tickvals=[1, 1.25, 1.5, 2, 3, 4], range=[-0.04, 0.64])
        canvas.y("", range=[low * 1.05 - 0.02, 1.05], tickformat=".0%")
        if canvas.traces or cannot:
            panels.append(Panel(state.spec.title_of(task), canvas.figure(), "" if canvas.traces else cannot))
    caption = (
        "Skill on test sequences of the training length and longer, mean over seeds. Skill is the accuracy above the "
        "length-only baseline, relative to the maximum possible gain: 100% means all correct, 0 no better than the "
        "baseline. Lengths that a task or a model does not support are listed below. Click an encoding to hide or "
        "show it."
    )
    missing = [f"{state.spec.title_of(task)}: {why}" for task in state.spec.tasks if (why := _cannot(state, task))]
    views = [View.of(panels, note=" ".join(missing))]
    return Block("lengths", "Skill by sequence length", caption, views, "medium", signs(state, views))


def _rows(cell: CellResult) -> tuple[LengthResult, ...]:
    found = cell.measure("extrapolation")
    return () if found is None or cell.status != "complete" else found.rows


def _by_length(cell: CellResult) -> list[tuple[float, float]]:
    """Factor and skill of each evaluated length."""
    return [(round(row.factor, 4), heads.skill_at(cell, row.factor)) for row in _rows(cell) if row.accuracy is not None]


def _cannot(state: Grid, task: str) -> str:
    """Lengths without results, for which encodings, and why."""
    reasons: dict[tuple[float, str], list[str]] = {}
    for label, one in encoding_looks(state.spec).items():
        for cell in state.results.of(task, label):
            for row in _rows(cell):
                if row.accuracy is None:
                    names = reasons.setdefault((row.factor, row.why or "reason not recorded."), [])
                    names += [one.title] if one.title not in names else []
    every = [one.title for label, one in encoding_looks(state.spec).items() if state.results.of(task, label)]
    told = [
        f"not evaluated at {factor:.3g} × the training length{'' if names == every else f' ({listed(names)})'}: {why}"
        for (factor, why), names in sorted(reasons.items())
    ]
    return " ".join(told)


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


def relations(state: Grid) -> Block:
    """Each model: a property of its heads against its remaining skill; a view per property, a panel per length."""
    every = [relation for relation in state.relations if relation.task is None]
    views = [
        View.of([_scatter(state, relation, title) for relation in every if relation.figure == figure], title)
        for figure, (title, _) in FIGURES.items()
        if any(relation.figure == figure for relation in every)
    ]
    caption = (
        "One mark per model with skill: a property of its heads against its skill on longer sequences, relative to "
        "the training length. Dotted: 100% and 0%. Click an encoding to hide or show it."
    )
    return Block("relations", "Correlates of length extrapolation", caption, views, legend=signs(state, views))


def _scatter(state: Grid, relation: Relation, title: str) -> Panel:
    canvas = Canvas(270, left=52)
    canvas.line_at(1, dash="dot")
    canvas.line_at(0, dash="dot")
    for label, one in encoding_looks(state.spec).items():
        points = [point for point in relation.points if point.label == label]
        if points:
            one.add(
                canvas,
                [round(point.figure, 4) for point in points],
                [round(point.kept, 4) for point in points],
                "%{customdata}<br>%{x:.2f}: %{y:.0%} of the skill remains",
                marker={"size": 7, "opacity": 0.75},
                customdata=[f"{untagged(state.spec.title_of(point.task))}, seed {point.seed}" for point in points],
            )
    canvas.x(title)
    canvas.y("remaining skill", tickformat=".0%")
    families = f"{len(relation.families)} {'family' if len(relation.families) == 1 else 'families'}"
    counted = f"{len(relation.points)} models of {relation.encodings} encodings in {families}"
    words = f"No correlation: too few encodings, or no variation ({counted})."
    if relation.value is not None:
        ends = "no interval"
        if relation.low is not None:
            ends = f"95% interval {signed(relation.low)} to {signed(relation.high)}"
        words = f"Spearman’s correlation {signed(relation.value)}, {ends} ({counted})."
    return Panel(f"At {relation.factor:g} times the training length", canvas.figure(), words)
