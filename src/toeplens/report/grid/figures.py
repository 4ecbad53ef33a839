"""A grid study's figures: shares of heads, training, scans of an option, use of frequencies, and longer sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log10, nan

import numpy as np

from toeplens.engine import LengthResult
from toeplens.ground.words import listed, signed
from toeplens.report.grid.look import (
    Spread,
    block,
    draw_lines,
    encoding_looks,
    finished,
    models_of,
    signs,
    spreads,
    task_looks,
)
from toeplens.report.kit.blocks import Block, Group, Panel, View
from toeplens.report.kit.canvas import Canvas, Look, legend, triangle, untagged
from toeplens.report.kit.colours import GREY, PALETTE
from toeplens.studies import CellResult
from toeplens.studies.grid import FIGURES, Column, Grid, Relation
from toeplens.studies.grid import measured as heads
from toeplens.studies.kit.results import SKILLED

Point = tuple[float, float, float, tuple[object, ...]]  # x, y, accuracy drop when ablated, values of the tooltip


def _points(
    cell: CellResult, title: str, x: tuple[heads.Heads, int], y: heads.Heads, *others: heads.Heads
) -> list[Point]:
    """The heads of a model with finite ``x`` (values and decimals) and ``y``."""
    lost = heads.drops(cell)
    if lost is None:
        return []
    values, digits = x
    return [
        (
            round(float(values[at]), digits),
            round(float(y[at]), 4),
            float(lost[at]),
            (
                f"{title}, seed {cell.key.seed}, layer {at[0] + 1}, head {at[1] + 1}",
                *(round(float(other[at]), 4) for other in others),
                round(100 * float(lost[at]), 1),
            ),
        )
        for at in np.ndindex(lost.shape)
        if np.isfinite(values[at]) and np.isfinite(y[at])
    ]


def _add_points(canvas: Canvas, one: Look, points: Sequence[Point], hover: str) -> None:
    """Add marks; ``hover`` ends with the accuracy drop."""
    if points:
        x, y, lost, told = zip(*points, strict=True)
        hover = f"%{{customdata[0]}}<br>{hover} points accuracy drop when ablated"
        one.add(canvas, x, y, hover, marker=one.heads(lost), customdata=list(told))


# ---- shares ----------------------------------------------------------------------------------------------------------

_Models = dict[tuple[str, Look], list[CellResult]]  # by task and encoding


def _shares(cell: CellResult, title: str) -> list[Point]:
    found = cell.measure("behaviour")
    return [] if found is None else _points(cell, title, (found.positional, 4), found.symbolic, found.interaction)


def without_shares(state: Grid) -> list[tuple[str, str]]:
    """Titles of the encodings without marks in `plane`, and the reasons."""
    missing = []
    for label, one in encoding_looks(state.spec).items():
        cells = [cell for cell in state.results.cells if cell.key.label == label and cell.status == "complete"]
        skilled = [cell for cell in cells if cell.skilled]
        if any(_shares(cell, "") for cell in skilled):
            continue
        reasons = list(dict.fromkeys(why for cell in cells if (why := cell.reason("behaviour"))))
        if not cells:
            why = "no model is finished"
        elif reasons:
            why = " ".join(reasons)
        elif "behaviour" not in state.spec.measures:
            why = "the study does not include the measure behaviour"
        elif not skilled:
            why = f"no model has at least {SKILLED:.0%} skill"
        else:
            why = "not measured, or the logits do not vary"
        missing.append((one.title, why.rstrip(".")))
    return missing


def plane(state: Grid) -> Block:
    """All heads of models with skill, and means weighted by ablation effect; a view for all tasks and for each."""
    by_task = {task: models_of(state, task, skilled=True) for task in state.spec.tasks}
    shown = [task for task, found in by_task.items() if any(found.values())]
    views = []
    for some in ([shown] if len(shown) > 1 else []) + [[task] for task in shown]:
        mine = {(task, one): found for task in some for one, found in by_task[task].items()}
        drawn = {
            "Each head": _heads(state, mine),
            "Mean over heads, weighted by ablation effect": _means(state, mine, rings=len(some) == 1),
        }
        panels = [Panel(title, canvas.figure()) for title, canvas in drawn.items() if len(canvas.traces) > 1]
        views.append(View.of(panels, "all tasks" if len(some) > 1 else state.spec.title_of(some[0])))
    return block("plane", views, words={"skill": f"{SKILLED:.0%}"}, legend=signs(state, views))


def _heads(state: Grid, models: _Models) -> Canvas:
    canvas = triangle()
    hover = "positional %{x:.2f}, symbolic %{y:.2f}, interaction %{customdata[1]:.2f}<br>%{customdata[2]:.1f}"
    for one in dict.fromkeys(one for _, one in models):
        points = [
            point
            for (task, of), found in models.items()
            if of == one
            for cell in found
            for point in _shares(cell, untagged(state.spec.title_of(task)))
        ]
        _add_points(canvas, one, points, hover)
    return canvas


def _means(state: Grid, models: _Models, *, rings: bool) -> Canvas:
    """A mark per encoding and task; ``rings``: one per seed, too."""
    canvas = triangle()
    for one in dict.fromkeys(one for _, one in models):
        rows = []
        for (task, of), found in models.items():
            if of == one:
                each = [tuple(heads.carried(cell, share) for share in ("positional", "symbolic")) for cell in found]
                if each := [pair for pair in each if np.isfinite(pair).all()]:
                    rows.append((state.spec.title_of(task), each))
        if not rows:
            continue
        if rings and len(rows[0][1]) > 1:
            x, y = ([round(value, 4) for value in values] for values in zip(*rows[0][1], strict=True))
            ring = {"color": one.tint, "symbol": "circle-open", "size": 6}
            canvas.marks(x, y, ring, hoverinfo="skip", meta=one.key)
        means = zip(*(np.mean(each, axis=0).tolist() for _, each in rows), strict=True)
        x, y = ([round(value, 4) for value in values] for values in means)
        one.add(
            canvas,
            x,
            y,
            "%{customdata[0]}<br>positional %{customdata[1]}<br>symbolic %{customdata[2]}",
            marker={"size": 10, "opacity": 0.85},
            customdata=[
                [untagged(title), *(Spread.of(values).told() for values in zip(*each, strict=True))]
                for title, each in rows
            ],
        )
    return canvas


# ---- during training -------------------------------------------------------------------------------------------------

_LINES = {  # lines of the figure, by their key in a row of training probes
    "accuracy": Look("accuracy", "accuracy", GREY, "circle", "●"),
    "positional": Look("positional", "positional share", *PALETTE[0]),
    "symbolic": Look("symbolic", "symbolic share", *PALETTE[1]),
    "interaction": Look("interaction", "interaction share", *PALETTE[2]),
}


def training(state: Grid) -> Block:
    """The finally most important head at each checkpoint; a view per encoding, a panel per task."""
    views = []
    for label, encoding in encoding_looks(state.spec).items():
        panels = []
        for task in state.spec.tasks:
            cells = [cell for cell in finished(state, task, label) if followed(cell, "accuracy")]
            if not cells:
                continue
            canvas = Canvas(220, left=46, bottom=38)
            canvas.line_at(0, dash="dot")
            for key, one in _LINES.items():
                draw_lines(canvas, {one: cells}, lambda cell, key=key: followed(cell, key), name=f"{one.title} ")
            canvas.steps()
            canvas.y("", range=[-0.02, 1.04], tickformat=".0%")
            panels.append(Panel(state.spec.title_of(task), canvas.figure()))
        views.append(View.of(panels, encoding.title))
    legend = [one.sign for one in _LINES.values()]
    return block("training", views, "medium", legend=legend)


def followed(cell: CellResult, name: str) -> list[tuple[int, float]]:
    """Step and value of the accuracy, or of a share of the head with the largest ablation effect after training.

    Shares are empty for a model without skill or without significant heads, and if the encoding has no such shares.
    """
    rows = [row for row in cell.watched if row.get("accuracy") is not None]
    if name == "accuracy":
        return [(int(row["step"]), float(row["accuracy"])) for row in rows]
    lost = heads.costs(cell)
    if lost is None or not cell.skilled or not lost.any():
        return []
    at = np.unravel_index(int(lost.argmax()), lost.shape)
    return [(int(row["step"]), float(heads.array(row[name])[at])) for row in rows if row.get(name) is not None]


# ---- scans of an option ----------------------------------------------------------------------------------------------

_UNITS = {"frequencies": "rad per position"}  # of scanned options
_DECADES = 2  # wider scans have a logarithmic axis
_SCANS: dict[str, list[tuple[Callable[[CellResult], float], str, str]]] = {  # of each line: value, dash and name
    "Test accuracy": [(lambda cell: cell.accuracy, "solid", "")],
    "Shares of the heads, weighted by ablation effect": [
        (lambda cell: heads.carried(cell, "positional") if cell.skilled else nan, "solid", "positional "),
        (lambda cell: heads.carried(cell, "symbolic") if cell.skilled else nan, "dash", "symbolic "),
    ],
}


def scans(state: Grid) -> Block:
    """Accuracy and weighted shares of the heads against each scanned option."""
    by_scan: dict[str, list[Column]] = {}
    for column in state.spec.columns():
        if column.scan:
            by_scan.setdefault(column.scan, []).append(column)
    groups = []
    for label, columns in by_scan.items():
        part = state.spec.encodings[label]
        panels = [panel for title in _SCANS if (panel := _scan(state, columns, title))]
        groups.append(Group(f"{part.title or label}, by {next(iter(part.scan))}", panels))
    views = [View("", [group for group in groups if group.panels])]
    return block(
        "scan", views, words={"skill": f"{SKILLED:.0%}"}, legend=legend(task_looks(state.spec).values(), views)
    )


def _scan(state: Grid, columns: Sequence[Column], title: str) -> Panel | None:
    canvas, looks = Canvas(300, left=50), task_looks(state.spec)
    values = {column.label: float(column.value or 0) for column in columns}
    for task in columns[0].tasks:
        cells = {looks[task]: [cell for label in values for cell in finished(state, task, label)]}
        for of, dash, name in _SCANS[title]:
            draw_lines(canvas, cells, lambda cell, of=of: [(values[cell.key.label], of(cell))], dash=dash, name=name)
    if not canvas.traces:
        return None
    low, high = min(values.values()), max(values.values())
    if low > 0 and log10(high / low) > _DECADES:
        low, high = log10(low), log10(high)
        canvas.x(type="log", dtick=1)
    room = 0.04 * (high - low) or 1.0
    option = next(iter(state.spec.encodings[columns[0].scan].scan))
    canvas.x(f"{option}, {_UNITS[option]}" if option in _UNITS else option, range=[low - room, high + room])
    canvas.y("", range=[-0.02, 1.04], tickformat=".0%")
    return Panel(title, canvas.figure())


# ---- frequencies -----------------------------------------------------------------------------------------------------


def centres(state: Grid) -> Block:
    """Each head of a rotary encoding: centre of its frequency use against its positional share."""
    looks, columns, panels = task_looks(state.spec), {column.label: column for column in state.spec.columns()}, []
    for title, scan in (("Encodings with several frequencies", False), ("Scans, one value per model", True)):
        canvas = Canvas(320, left=50)
        for one in looks.values():
            points = []
            for cell in state.results.cells:
                use, shares = cell.measure("frequency"), cell.measure("behaviour")
                column = columns[cell.key.label]
                if cell.key.task == one.key and cell.skilled and bool(column.scan) == scan and use and shares:
                    points += _points(cell, untagged(column.title), (use.centre, 3), shares.positional)
            _add_points(canvas, one, points, "centre %{x:.2f} octaves, positional %{y:.2f}<br>%{customdata[1]:.1f}")
        canvas.x("centre of frequency use (octaves)")
        canvas.y("positional share", range=[-0.04, 1.04])
        if canvas.traces:
            panels.append(Panel(title, canvas.figure()))
    views = [View.of(panels)]
    signs = legend(looks.values(), views)
    return block("centre", views, legend=signs)


def bands(state: Grid) -> Block:
    """The effect of freezing each frequency, a panel per encoding."""
    tasks, panels = task_looks(state.spec), []
    for label, encoding in encoding_looks(state.spec).items():
        canvas = Canvas(230, left=62, bottom=40)
        cells = {one: [cell for cell in finished(state, task, label) if cell.skilled] for task, one in tasks.items()}
        draw_lines(canvas, cells, lambda cell: worth(cell).items())
        if canvas.traces:
            canvas.x("rad per position", type="log", dtick=1)
            canvas.y("nats", rangemode="tozero")
            panels.append(encoding.panel(canvas.figure()))
    views = [View.of(panels)]
    return block("bands", views, "medium", legend=legend(tasks.values(), views))


def worth(cell: CellResult) -> dict[float, float]:
    """Loss increase in nats per frequency above 0, summed over the heads that have it; empty if not measured."""
    lost, use = cell.measure("bands"), cell.measure("frequency")
    total: dict[float, float] = {}
    if lost is None or use is None:
        return total
    for drops, frequencies in zip(lost.drops, use.frequencies, strict=True):
        for head, turning in zip(drops, frequencies, strict=True):
            for drop, frequency in zip(head, turning, strict=True):
                if frequency > 0 and np.isfinite(drop):
                    total[frequency] = total.get(frequency, 0.0) + drop
    return total


# ---- longer sequences ------------------------------------------------------------------------------------------------


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
    missing = [f"{state.spec.title_of(task)}: {why}" for task in state.spec.tasks if (why := _cannot(state, task))]
    views = [View.of(panels, note=" ".join(missing))]
    return block("lengths", views, "medium", legend=signs(state, views))


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


def relations(state: Grid) -> Block:
    """Each model: a property of its heads against its remaining skill; a view per property, a panel per length."""
    every = [relation for relation in state.relations if relation.task is None]
    views = [
        View.of([_scatter(state, relation, title) for relation in every if relation.figure == figure], title)
        for figure, (title, _) in FIGURES.items()
        if any(relation.figure == figure for relation in every)
    ]
    return block("relations", views, legend=signs(state, views))


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
