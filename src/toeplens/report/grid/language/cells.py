"""Which cells of a grid study are language models, and how their page calls lengths and encodings."""

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
    """The labels of the tasks whose models are asked about language: those of real or made-up text, with ``bits``."""
    if "bits" not in spec.measures:
        return []
    return [label for label, part in spec.tasks.items() if issubclass(tasks.get(part.task or label), LanguageTask)]


def only_language(spec: GridSpec) -> bool:
    """Whether a study asks of nothing but language."""
    return language_tasks(spec) == list(spec.tasks)


def measured(state: Grid, task: str) -> Cells:
    """The measured language models of a task, by encoding in the page's order; scans are left out."""
    found = {
        label: [cell for cell in finished(state, task, label) if figures.is_language(cell)]
        for label in encoding_looks(state.spec)
    }
    return {label: cells for label, cells in found.items() if cells}


def every(state: Grid) -> list[tuple[str, Cells]]:
    """The tasks that have such models: what each is called where there are several, and its models."""
    tasks = language_tasks(state.spec)
    found = [(state.spec.title_of(task) if len(tasks) > 1 else "", measured(state, task)) for task in tasks]
    return [(title, cells) for title, cells in found if cells]


def looks_of(state: Grid, cells: Iterable[str]) -> list[Look]:
    """How encodings look, in the page's order, of those labels alone."""
    wanted = set(cells)
    return [one for label, one in encoding_looks(state.spec).items() if label in wanted]


def record(cell: CellResult, name: str, kind: type[Kind]) -> Kind | None:
    """A measure of a cell; None where it was not made, or the encoding has no such thing."""
    found = cell.measure(name)
    return found if isinstance(found, kind) else None


def trained_length(cells: Cells) -> int:
    """Tokens of the texts of training."""
    bits = next(found for each in cells.values() for cell in each if (found := record(cell, "bits", Bits)))
    return next(row.length for row in bits.lengths if row.factor == 1)


def times(factor: float) -> str:
    """So many times the training length, as an axis says it."""
    return _PARTS.get(factor, f"{factor:g}")


def viewed(title: str, view: str) -> str:
    """The name of a view of a task."""
    return f"{title}: {view}" if title and view else title or view
