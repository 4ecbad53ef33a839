"""Language models of a grid study, and labels of lengths and encodings on its page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from toeplens import tasks
from toeplens.engine.language import Bits
from toeplens.ground.records import Record
from toeplens.report.grid.look import encoding_looks, finished
from toeplens.report.kit.canvas import Look
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid, GridSpec
from toeplens.studies.grid import language as figures
from toeplens.tasks.language import LanguageTask

Kind = TypeVar("Kind", bound=Record)
Cells = dict[str, list[CellResult]]  # by the encoding's label

_PARTS = {0.25: "¼", 0.5: "½"}


def language_tasks(spec: GridSpec) -> list[str]:
    """The labels of language tasks (real or synthetic text), if the study measures ``bits``."""
    if "bits" not in spec.measures:
        return []
    return [label for label, part in spec.tasks.items() if issubclass(tasks.get(part.task or label), LanguageTask)]


def only_language(spec: GridSpec) -> bool:
    """Whether all tasks of the study are language tasks."""
    return language_tasks(spec) == list(spec.tasks)


def measured(state: Grid, task: str) -> Cells:
    """The evaluated language models of a task, by encoding in the page's order; scans are left out."""
    found = {
        label: [cell for cell in finished(state, task, label) if figures.is_language(cell)]
        for label in encoding_looks(state.spec)
    }
    return {label: cells for label, cells in found.items() if cells}


def every(state: Grid) -> list[tuple[str, Cells]]:
    """The evaluated models of each task, with the task's title if there are several."""
    tasks = language_tasks(state.spec)
    found = [(state.spec.title_of(task) if len(tasks) > 1 else "", measured(state, task)) for task in tasks]
    return [(title, cells) for title, cells in found if cells]


def looks_of(state: Grid, cells: Iterable[str]) -> list[Look]:
    """The looks of these encodings, in the page's order."""
    wanted = set(cells)
    return [one for label, one in encoding_looks(state.spec).items() if label in wanted]


def record(cell: CellResult, name: str, kind: type[Kind]) -> Kind | None:
    """A measure of a cell; None if it was not measured or does not apply to the encoding."""
    found = cell.measure(name)
    return found if isinstance(found, kind) else None


def trained_length(cells: Cells) -> int:
    """The training length in tokens."""
    bits = next(found for each in cells.values() for cell in each if (found := record(cell, "bits", Bits)))
    return next(row.length for row in bits.lengths if row.factor == 1)


def times(factor: float) -> str:
    """A multiple of the training length as an axis label."""
    return _PARTS.get(factor, f"{factor:g}")


def viewed(title: str, view: str) -> str:
    """The title of a view of a task."""
    return f"{title}: {view}" if title and view else title or view
