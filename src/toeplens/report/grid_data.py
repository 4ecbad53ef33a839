"""Models of a grid study as rows of charts: means over seeds, which encoding is best, parts of a section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from toeplens import tasks
from toeplens.lens import Estimate
from toeplens.report.charts import alt, chart_data, color_shape, facet_grid, line_chart, tooltip
from toeplens.report.page import Figure, Section
from toeplens.report.theme import Style, styles
from toeplens.studies import CellResult
from toeplens.studies.grid import GridSpec, GridStudy
from toeplens.studies.kit.verdicts import GRAIN, LEVEL, difference, mean_contrast
from toeplens.tasks.language import LanguageTask
from toeplens.utils.files import read_yaml
from toeplens.utils.formatting import fmt, join_list

Chart = Any  # an Altair chart, or None if there is nothing to draw
Rows = list[dict[str, Any]]
Parts = list[Any]  # figures, tables and texts of a section
TEXTS: dict[str, Any] = read_yaml(Path(__file__).with_name("grid.yaml"))
MEAN_TOOLTIP = {"value": "Mean|.3~g", "low": "From|.3~g", "high": "To|.3~g", "seeds": "Seeds"}  # of tooltips


def style_map(spec: GridSpec) -> dict[str, Style]:
    """The encodings by label, without scans."""
    return styles((column.label, column.title) for column in spec.columns() if not column.scan)


def task_styles(spec: GridSpec) -> list[Style]:
    """The tasks in the study's order."""
    return list(styles((f"task {task}", spec.title_of(task)) for task in spec.tasks).values())


def language_tasks(spec: GridSpec) -> list[str]:
    """The labels of language tasks (real or synthetic text), if the study measures ``bits``."""
    labels = (task for task, part in spec.tasks.items() if issubclass(tasks.get(part.task or task), LanguageTask))
    return list(labels) if "bits" in spec.measures else []


def models(
    state: GridStudy, *, skilled: bool = False, scans: bool = False
) -> Iterator[tuple[CellResult, dict[str, Any]]]:
    """The finished models by task and encoding, each with these columns of its rows; diverged ones are left out."""
    for task in state.spec.tasks:
        for column in state.spec.columns():
            for cell in state.results.cells_of(task, column.label) if bool(column.scan) == scans else ():
                if cell.status == "complete" and (cell.is_skilled or not skilled):
                    yield cell, {"task": state.spec.title_of(task), "series": column.title}


def seed_means(rows: Iterable[Mapping[str, Any]], *, grain: float | None = None) -> Rows:
    """Mean ``value`` of rows that agree in every other column, with ``low``, ``high`` and the number of ``seeds``.

    grain  minimum standard deviation of a value, for a 95% interval over seeds (default: their range)
    """
    groups: dict[tuple[tuple[str, Any], ...], list[float]] = {}
    for row in rows:
        if isfinite(row["value"]):
            groups.setdefault(tuple((k, v) for k, v in row.items() if k != "value"), []).append(float(row["value"]))
    means = []
    for key, values in groups.items():
        ends = (min(values), max(values))
        low, high = mean_contrast(values, grain).interval(LEVEL) if grain is not None and len(values) > 1 else ends
        means.append({**dict(key), "value": float(np.mean(values)), "low": low, "high": high, "seeds": len(values)})
    return means


def mean_text(values: Iterable[float | None], digits: int = 2, scale: float = 1) -> str:
    """The mean as text, with the range in brackets if there are several values; a dash if there are none."""
    nums = [scale * value for value in values if value is not None and isfinite(value)]
    if len(nums) < 2:
        return fmt(nums[0] if nums else None, digits)
    return f"{fmt(float(np.mean(nums)), digits)} ({fmt(min(nums), digits)} to {fmt(max(nums), digits)})"


@dataclass(frozen=True)
class EncodingRank:
    """An encoding on a task: its mean over seeds, and whether it ties with the best."""

    title: str
    mean: Estimate
    is_tied: bool


def rank_encodings(
    values: Mapping[str, Sequence[float]], *, lower: bool = False, grain: float = GRAIN
) -> list[EncodingRank]:
    """Encodings from best to worst by their mean over models.

    An encoding ties with the best if the interval of their difference includes 0; the 95% are shared by all
    comparisons of the task (Bonferroni). With one seed, only equal values tie.

    Arguments
        values  values of the models by encoding
        lower   whether lower is better
        grain   minimum standard deviation of a value
    """
    groups = [(title, numbers) for title, raw in values.items() if (numbers := [v for v in raw if isfinite(v)])]
    groups.sort(key=lambda pair: float(np.mean(pair[1])) * (1 if lower else -1))
    ranking = []
    for title, numbers in groups:
        lead = difference(numbers, groups[0][1], grain)
        low, high = lead.interval(LEVEL / max(1, len(groups) - 1)) if lead.seeds > 1 else (lead.value, lead.value)
        ranking.append(EncodingRank(title, mean_contrast(numbers, grain).estimate(), low <= 0 <= high))
    return ranking


def rankings(
    state: GridStudy, value: Callable[[CellResult], float], *, lower: bool = False, grain: float = GRAIN
) -> dict[str, list[EncodingRank]]:
    """The standings of each task that has any, by its title."""
    groups: dict[str, dict[str, list[float]]] = {}
    for cell, row in models(state):
        groups.setdefault(row["task"], {}).setdefault(row["series"], []).append(value(cell))
    ranks = {task: rank_encodings(values, lower=lower, grain=grain) for task, values in groups.items()}
    return {task: ranking for task, ranking in ranks.items() if ranking}


def best_of(standings: Sequence[EncodingRank]) -> list[str]:
    """The best encoding and all that tie with it."""
    return [rank.title for rank in standings if rank.is_tied]


def tally(standings: Mapping[str, Sequence[EncodingRank]], groups: int = 2) -> str:
    """Which encodings are most often best or tied, as "A and B on 3 of 4 tasks, C on 2 of 4 tasks"."""
    ranks = [rank for item in standings.values() for rank in item]
    counts: dict[tuple[int, int], list[str]] = {}
    for title in dict.fromkeys(rank.title for rank in ranks):
        tied = [rank.is_tied for rank in ranks if rank.title == title]
        counts.setdefault((sum(tied), len(tied)), []).append(title)
    best = sorted(((*key, titles) for key, titles in counts.items() if key[0]), key=lambda item: -item[0])
    return ", ".join(f"{join_list(titles)} on {count} of {total} tasks" for count, total, titles in best[:groups])


def interval_text(estimate: Estimate, digits: int = 3) -> str:
    """A mean with its interval over seeds; without one for a single seed."""
    value, *ends = (fmt(number, digits) for number in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{', '.join(ends)}]".replace(" ", "\u00a0") if isfinite(estimate.low) else value


def accuracy_text(estimate: Estimate) -> str:
    """A mean accuracy in per cent with its interval over seeds, which ends at 0 and 100."""
    value, low, high = (100 * share for share in (estimate.value, max(0.0, estimate.low), min(1.0, estimate.high)))
    texts = [fmt(share, 1) for share in (value, low, high)]
    return f"{texts[0]}%\u00a0[{texts[1]},\u00a0{texts[2]}]" if isfinite(estimate.low) else f"{texts[0]}%"


def figure(id: str, chart: Chart, name: str = "", title: str = "") -> Parts:
    """The figure of a chart with its caption, if there is one; ``name`` is added to its name."""
    heading, caption = TEXTS["figures"][id]
    return [] if chart is None else [Figure(id + name, title or heading, chart, caption)]


def section(title: str, id: str, parts: Parts, folded: Mapping[str, Parts] | None = None) -> list[Section]:
    """A section without what is empty; none if nothing is left."""
    nonempty = {name: content for name, each in (folded or {}).items() if (content := [part for part in each if part])}
    details, parts = [Section(name, entry) for name, entry in nonempty.items()], [part for part in parts if part]
    return [Section(title, parts, details, id)] if parts or details else []


def styles_in(styles: Iterable[Style], rows: Rows) -> list[Style]:
    """The styles of the series that the rows have."""
    titles = {row["series"] for row in rows}
    return [style for style in styles if style.title in titles]


def panels(chart: Chart, rows: Rows, field: str, columns: int, height: int, free: Sequence[str] = ()) -> Chart:
    """Small multiples by ``field``, of which a single panel is the chart itself."""
    order = list(dict.fromkeys(row[field] for row in rows))
    chart = chart.properties(height=height if len(order) > 1 else max(260, height))
    return facet_grid(chart, field, order, columns=columns, free=free) if len(order) > 1 else chart


def line_panels(
    rows: Rows,
    styles: Iterable[Style],
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    field: str,
    columns: int,
    height: int,
    *,
    band: bool = True,
    points: bool = True,
    free: Sequence[str] = (),
) -> Chart:
    """Means of series by x with their ranges over seeds, a panel per value of ``field``."""
    if not rows:
        return None
    tips = tooltip(series="Series", **{x["field"]: f"{x['title'].capitalize()}|.3~g"}, **MEAN_TOOLTIP)
    chart = line_chart(rows, x, y, styles_in(styles, rows), low="low" * band, high="high", points=points, tips=tips)
    return panels(chart, rows, field, columns, height, free)


def scatter(
    rows: Rows, styles: Iterable[Style], x: Mapping[str, Any], y: Mapping[str, Any], height: int, **tips: str
) -> Chart:
    """Points by two numbers with ``size`` as their area, a panel per ``panel``."""
    if not rows:
        return None
    sizes = alt.Scale(type="sqrt", range=[12, 220], domainMin=0)
    size = alt.Size(field="size", type="quantitative", scale=sizes, legend=None)
    chart = alt.Chart(chart_data(rows)).mark_point(opacity=0.6).encode(x=alt.X(**x), y=alt.Y(**y), size=size)
    chart = chart.encode(
        tooltip=tooltip(series="Series", head="Head", **tips), **color_shape("series", styles_in(styles, rows))
    )
    return panels(chart, rows, "panel", 2, height)
