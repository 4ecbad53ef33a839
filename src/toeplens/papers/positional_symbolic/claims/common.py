"""What the claims have in common: sources, labels, and the checks that are put together from figures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite

from toeplens.studies.grid.study import Evidence
from toeplens.studies.kit.asking import Test, ask, ask_difference
from toeplens.studies.kit.results import ACCURACY, CellResult, Figure
from toeplens.studies.kit.verdicts import Finding

SISTER = "arXiv 2511.11579, abstract"
OURS = "ours"
PAPER = "arXiv 2505.13027 v1"
INDEX, RETRIEVAL, MIX = "index", "retrieval", "mix"
ROPE, NOPE, HIGH, LOW, SCAN = "rope", "nope", "high", "low", "turn"
STRONG = 0.5
WHY_STRONG = "from half on a correlation is commonly called large"

Check = Callable[[Evidence], list[Finding]]


def named(data: Evidence, label: str) -> str:
    """What people call an encoding; its label where the study has none of that label."""
    return next((column.title for column in data.spec.columns() if column.label == label), label)


def of_skilled(words: str, of: Callable[[CellResult], float], without: str, grain: float = 0.005) -> Figure:
    """A figure of models that learned enough, of those that have it."""
    return Figure(words, of, lambda cell: cell.skilled and isfinite(of(cell)), f"no skill, or {without}", grain)


def model(task: str, label: str, figure: Figure, test: Test) -> Check:
    """A figure's mean over the models of a task and an encoding that count."""
    return lambda data: [ask(data.results, task, label, figure, test, partial(named, data))]


def better(task: str, first: str, second: str, figure: Figure = ACCURACY, test: Test | None = None) -> Check:
    """A figure, the test accuracy unless given, of one encoding's models on a task less another's."""

    def check(data: Evidence) -> list[Finding]:
        title = partial(named, data)
        what = "" if figure.words else f"accuracy on {task}, {title(first)} - {title(second)}"
        return [ask_difference(data.results, task, first, second, title, figure=figure, test=test, what=what)]

    return check
