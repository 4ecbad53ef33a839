"""Models of a grid study as rows of charts: means over seeds, which encoding is best, parts of a section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from toeplens import tasks
from toeplens.ground.words import fixed, listed
from toeplens.lens import Estimate
from toeplens.report.charts import alt, data, grid, looks
from toeplens.report.page import Figure, Section
from toeplens.report.theme import Style, styles
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid, GridSpec
from toeplens.studies.kit.verdicts import GRAIN, LEVEL, difference, of_one
from toeplens.tasks.language import LanguageTask

Chart = Any  # an Altair chart, or None if there is nothing to draw
Rows = list[dict[str, Any]]
Parts = list[Any]  # figures, tables and texts of a section


def encoding_styles(spec: GridSpec) -> dict[str, Style]:
    """The encodings by label, without scans."""
    return styles((column.label, column.title) for column in spec.columns() if not column.scan)


def task_styles(spec: GridSpec) -> list[Style]:
    """The tasks in the study's order."""
    return list(styles((f"task {task}", spec.title_of(task)) for task in spec.tasks).values())


def language_tasks(spec: GridSpec) -> list[str]:
    """The labels of language tasks (real or synthetic text), if the study measures ``bits``."""
    if "bits" not in spec.measures:
        return []
    return [label for label, part in spec.tasks.items() if issubclass(tasks.get(part.task or label), LanguageTask)]


def models(state: Grid, *, skilled: bool = False, scans: bool = False) -> Iterator[tuple[CellResult, dict[str, Any]]]:
    """The finished models by task and encoding, each with these columns of its rows; diverged ones are left out."""
    for task in state.spec.tasks:
        for column in state.spec.columns():
            for cell in state.results.of(task, column.label) if bool(column.scan) == scans else ():
                if cell.status == "complete" and (cell.skilled or not skilled):
                    yield cell, {"task": state.spec.title_of(task), "series": column.title}


def seed_means(rows: Iterable[Mapping[str, Any]], *, grain: float | None = None) -> Rows:
    """Mean ``value`` of rows that agree in every other column, with ``low``, ``high`` and the number of ``seeds``.

    grain  minimum standard deviation of a value, for a 95% interval over seeds (default: their range)
    """
    groups: dict[tuple[tuple[str, Any], ...], list[float]] = {}
    for row in rows:
        if isfinite(row["value"]):
            groups.setdefault(tuple((k, v) for k, v in row.items() if k != "value"), []).append(float(row["value"]))
    made = []
    for key, values in groups.items():
        low, high = min(values), max(values)
        if grain is not None and len(values) > 1:
            low, high = of_one(values, grain).interval(LEVEL)
        made.append({**dict(key), "value": float(np.mean(values)), "low": low, "high": high, "seeds": len(values)})
    return made


def told(values: Iterable[float | None], digits: int = 2, scale: float = 1) -> str:
    """The mean as text, with the range in brackets if there are several values; a dash if there are none."""
    found = [scale * value for value in values if value is not None and isfinite(value)]
    if len(found) < 2:
        return fixed(found[0] if found else None, digits)
    return f"{fixed(float(np.mean(found)), digits)} ({fixed(min(found), digits)} to {fixed(max(found), digits)})"


# ---- which encoding is best ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """An encoding among those of a task: its mean over seeds, and whether it equals the best within the errors."""

    title: str
    mean: Estimate
    equal: bool


def ranked(values: Mapping[str, Sequence[float]], *, lower: bool = False, grain: float = GRAIN) -> list[Standing]:
    """Encodings from best to worst by their mean over models.

    An encoding equals the best if the interval of their difference includes 0; the 95% are shared by all comparisons
    of the task (Bonferroni). With one seed, only equal values are equal.

    Arguments
        values  values of the models by encoding
        lower   whether lower is better
        grain   minimum standard deviation of a value
    """
    found = [(title, each) for title, all_ in values.items() if (each := [v for v in all_ if isfinite(v)])]
    found.sort(key=lambda pair: float(np.mean(pair[1])) * (1 if lower else -1))
    made = []
    for title, each in found:
        lead = difference(each, found[0][1], grain)
        low, high = lead.interval(LEVEL / max(1, len(found) - 1)) if lead.seeds > 1 else (lead.value, lead.value)
        made.append(Standing(title, of_one(each, grain).estimate(), low <= 0 <= high))
    return made


def best_of(standings: Sequence[Standing]) -> list[str]:
    """The best encoding and all that equal it."""
    return [each.title for each in standings if each.equal]


def by_task(
    state: Grid, value: Callable[[CellResult], float], *, lower: bool = False, grain: float = GRAIN
) -> dict[str, list[Standing]]:
    """The standings of each task that has any."""
    found: dict[str, dict[str, list[float]]] = {}
    for cell, row in models(state):
        found.setdefault(row["task"], {}).setdefault(row["series"], []).append(value(cell))
    made = {task: ranked(values, lower=lower, grain=grain) for task, values in found.items()}
    return {task: each for task, each in made.items() if each}


def interval_text(found: Estimate, digits: int = 3) -> str:
    """A mean with its interval over seeds; without one for a single seed."""
    value, *ends = (fixed(each, digits) for each in (found.value, found.low, found.high))
    return f"{value} [{', '.join(ends)}]".replace(" ", "\u00a0") if isfinite(found.low) else value


def accuracy_text(found: Estimate) -> str:
    """A mean accuracy in per cent with its interval over seeds, which ends at 0 and 100."""
    ends = [100 * min(1.0, max(0.0, each)) if isfinite(found.low) else each for each in (found.low, found.high)]
    return interval_text(Estimate(100 * found.value, *ends, found.count), 1).replace("\u00a0[", "%\u00a0[", 1)


def tally(standings: Mapping[str, Sequence[Standing]], groups: int = 2) -> str:
    """Which encodings are most often among the best, as "A and B on 3 of 4 tasks; C on 2 of 4"."""
    counts: dict[str, list[int]] = {}
    for each in standings.values():
        for one in each:
            count = counts.setdefault(one.title, [0, 0])
            count[0] += one.equal
            count[1] += 1
    by_count: dict[tuple[int, int], list[str]] = {}
    for title, (best, of) in sorted(counts.items(), key=lambda pair: -pair[1][0]):
        by_count.setdefault((best, of), []).append(title)
    told = [f"{listed(titles)} on {best} of {of} tasks" for (best, of), titles in by_count.items() if best]
    return "; ".join(told[:groups]).replace(" tasks; ", " tasks, ")


# ---- parts of a section ----------------------------------------------------------------------------------------------


def figure(id: str, title: str, chart: Chart, caption: str) -> list[Figure]:
    """The figure of a chart, if there is one."""
    return [] if chart is None else [Figure(id, title, chart, caption)]


def section(title: str, id: str, parts: Parts, folded: Mapping[str, Parts] | None = None) -> list[Section]:
    """A section without what is empty; none if nothing is left."""
    details = [Section(name, each, id=f"{id}-{n}") for n, (name, each) in enumerate((folded or {}).items()) if each]
    parts = [each for each in parts if each]
    return [Section(title, parts, details, id)] if parts or details else []


def panels(chart: Chart, rows: Rows, field: str, *, columns: int = 4, height: int = 150, free: Sequence[str] = ()):
    """Small multiples by ``field``, of which a single panel is the chart itself."""
    order = list(dict.fromkeys(row[field] for row in rows))
    if len(order) < 2:
        return chart
    return grid(chart.properties(height=height), field, order, columns=columns, free=free)


def scatter(
    rows: Rows, x: Mapping[str, Any], y: Mapping[str, Any], styles: Iterable[Style], tips: Sequence[Any]
) -> Chart:
    """Points by two numbers, with ``size`` as the area if the rows have it."""
    made = alt.Chart(data(rows)).mark_point(opacity=0.6).properties(height=300)
    made = made.encode(x=alt.X(**x), y=alt.Y(**y), tooltip=list(tips), **looks("series", styles))
    if not rows or "size" not in rows[0]:
        return made
    sizes = alt.Scale(type="sqrt", range=[12, 220], domainMin=0)
    return made.encode(size=alt.Size(field="size", type="quantitative", scale=sizes, legend=None))


def drawn(styles: Iterable[Style], rows: Rows) -> list[Style]:
    """The styles of the series that the rows have."""
    there = {row["series"] for row in rows}
    return [each for each in styles if each.title in there]
