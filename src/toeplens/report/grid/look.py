"""What the figures of a grid study share: looks of encodings and tasks, models of a cell, aggregation over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from toeplens import tasks
from toeplens.ground.words import fixed
from toeplens.report.kit.blocks import Sign, Texts, View
from toeplens.report.kit.canvas import Canvas, Look, legend, untagged
from toeplens.report.kit.colours import ENCODINGS, FAMILIES, PALETTE
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid, GridSpec
from toeplens.studies.grid.language import is_language
from toeplens.tasks.language import LanguageTask

TEXTS = Texts(Path(__file__).with_name("texts.yaml"))
block = TEXTS.block


def encoding_looks(spec: GridSpec) -> dict[str, Look]:
    """The encodings by label, without scans: first those with a look on the other pages, then the others."""
    columns = [column for column in spec.columns() if not column.scan]
    families = {column.label: ENCODINGS.get(column.label) for column in columns}
    for column in columns:
        family = ENCODINGS.get(column.encoding)
        if families[column.label] is None and not column.options and family not in families.values():
            families[column.label] = family
    order = list(FAMILIES)
    known = {
        label: FAMILIES[family]
        for label, family in sorted(families.items(), key=lambda pair: order.index(pair[1]) if pair[1] else len(order))
        if family is not None
    }
    taken = {tint for tint, _, _ in known.values()}
    spare = [one for one in PALETTE if one[0] not in taken] or list(PALETTE)
    others = [column.label for column in columns if column.label not in known]
    known |= {label: spare[i % len(spare)] for i, label in enumerate(others)}
    titles = {column.label: column.title for column in columns}
    return {label: Look(label, titles[label], *one) for label, one in known.items()}


def signs(state: Grid, views: Iterable[View]) -> list[Sign]:
    """The legend of the encodings that are drawn."""
    return legend(encoding_looks(state.spec).values(), views)


def task_looks(spec: GridSpec) -> dict[str, Look]:
    """The tasks in the study's order, by label."""
    return {label: Look(label, spec.title_of(label), *PALETTE[i % len(PALETTE)]) for i, label in enumerate(spec.tasks)}


def finished(state: Grid, task: str, label: str) -> list[CellResult]:
    """The models of a cell, by seed, without diverged ones."""
    return [cell for cell in state.results.of(task, label) if cell.status == "complete"]


Cells = dict[Look, list[CellResult]]  # by encoding


def models_of(state: Grid, task: str, *, skilled: bool = False) -> Cells:
    """The finished models of a task, by encoding in the page's order; ``skilled``: only those with skill."""
    return {
        one: [cell for cell in finished(state, task, label) if cell.skilled or not skilled]
        for label, one in encoding_looks(state.spec).items()
    }


@dataclass(frozen=True)
class Spread:
    """Mean and range over seeds with a finite value; NaN and a count of 0 if there are none."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        """From one value per seed, NaN or None if unknown."""
        found = [float(value) for value in values if value is not None and isfinite(value)]
        if not found:
            return cls(float("nan"), float("nan"), float("nan"), 0)
        return cls(float(np.mean(found)), min(found), max(found), len(found))

    def told(self, digits: int = 2, *, percent: bool = False) -> str:
        """The mean as text, with the range if there are several seeds; a dash if there are none."""
        scale, unit = (100, "%") if percent else (1, "")
        mean, low, high = (fixed(scale * value, digits) for value in (self.mean, self.low, self.high))
        return f"{mean}{unit} ({low} to {high})" if self.count > 1 else f"{mean}{unit}" if self.count else mean


Spreads = list[tuple[float, Spread]]  # by x


def spreads(pairs: Iterable[tuple[float, float]]) -> Spreads:
    """The values grouped by x, in order, without groups that have no finite value."""
    found: dict[float, list[float]] = {}
    for at, value in pairs:
        found.setdefault(at, []).append(value)
    made = [(at, Spread.of(found[at])) for at in sorted(found)]
    return [(at, spread) for at, spread in made if spread.count]


def line(
    canvas: Canvas,
    one: Look,
    found: Spreads,
    *,
    dash: str = "solid",
    name: str = "",
    digits: int = 2,
    percent: bool = False,
    places: Mapping[float, str] | None = None,
) -> None:
    """A line of means, with the range as a band if there are several seeds.

    Arguments
        name     prefix of the value in tooltips
        digits   decimals in tooltips; ``percent`` shows shares as percentages
        places   names of the x values in tooltips (default: the values themselves)
    """
    xs = [float(f"{at:.6g}") for at, _ in found]
    if any(spread.count > 1 for _, spread in found):
        low, high = [round(spread.low, 5) for _, spread in found], [round(spread.high, 5) for _, spread in found]
        canvas.band(xs, low, high, one.tint, 0.1, one.key)
    called = places or {at: f"{at:g}" for at, _ in found}
    canvas.lines(
        xs,
        [round(spread.mean, 5) for _, spread in found],
        one.tint,
        "%{customdata[1]}: %{customdata[0]}",
        dash=dash,
        marker={"color": one.tint, "symbol": one.symbol, "size": 7},
        customdata=[[f"{name}{spread.told(digits, percent=percent)}", called[at]] for at, spread in found],
        name=untagged(one.title),
        meta=one.key,
    )


def draw_lines(
    canvas: Canvas,
    cells: Mapping[Look, Iterable[CellResult]],
    values: Callable[[CellResult], Iterable[tuple[float, float]]],
    **options: Any,
) -> None:
    """A line per look, of the x and y that ``values`` finds in its models; ``options``: see `line`."""
    for one, found in cells.items():
        if means := spreads(pair for cell in found for pair in values(cell)):
            line(canvas, one, means, **options)


# ---- language models -------------------------------------------------------------------------------------------------


def language_tasks(spec: GridSpec) -> list[str]:
    """The labels of language tasks (real or synthetic text), if the study measures ``bits``."""
    if "bits" not in spec.measures:
        return []
    return [label for label, part in spec.tasks.items() if issubclass(tasks.get(part.task or label), LanguageTask)]


def only_language(spec: GridSpec) -> bool:
    """Whether all tasks of the study are language tasks."""
    return language_tasks(spec) == list(spec.tasks)


def every(state: Grid, *measures: str) -> list[tuple[str, Cells]]:
    """The evaluated language models of each task, with the task's title if there are several.

    By encoding in the page's order, without scans; with ``measures`` only the models that have all of them.
    """

    def evaluated(cell: CellResult) -> bool:
        return is_language(cell) and all(cell.measure(name) is not None for name in measures)

    names, made = language_tasks(state.spec), []
    for task in names:
        found = {one: list(filter(evaluated, cells)) for one, cells in models_of(state, task).items()}
        if found := {one: cells for one, cells in found.items() if cells}:
            made.append((state.spec.title_of(task) if len(names) > 1 else "", found))
    return made


def times(factor: float) -> str:
    """A multiple of the training length as an axis label."""
    return {0.25: "¼", 0.5: "½"}.get(factor, f"{factor:g}")


def viewed(title: str, view: str) -> str:
    """The title of a view of a task."""
    return f"{title}: {view}" if title and view else title or view
