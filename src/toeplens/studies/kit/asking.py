"""How claims test values of trained models: one margin, one wording, and a note on excluded models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

from toeplens.ground.words import listed
from toeplens.studies.kit.contrasts import of_one
from toeplens.studies.kit.results import ACCURACY, UNRULED, Figure, Results
from toeplens.studies.kit.verdicts import NONE_COUNTS, Finding, above, below, within

MARGIN = 0.02
WHY_MARGIN = "smaller differences are not visible in the source's figures, and five seeds can resolve this one"
BETTER = f"mean final test accuracy higher by more than {100 * MARGIN:g} points ({WHY_MARGIN})"
STOPPED = f"Only models that have stopped learning count ({UNRULED})."

Test = Callable[[str, Any], Finding]
Title = Callable[[str], str]  # of a label


def chance(share: float) -> float:
    """Standard deviation of a binary outcome with this share."""
    return sqrt(share * (1 - share))


def over(bar: float, unit: str = "") -> Test:
    """Are the values above a threshold?"""
    return partial(above, bar=bar, unit=unit)


def under(bar: float, unit: str = "") -> Test:
    """Are the values below a threshold?"""
    return partial(below, bar=bar, unit=unit)


def between(low: float, high: float, unit: str = "") -> Test:
    """Are the values between two thresholds?"""
    return partial(within, low=low, high=high, unit=unit)


def ask(results: Results, task: str, label: str, figure: Figure, test: Test, title: Title) -> Finding:
    """Test a value's mean over the models of an encoding that count."""
    what = f"{figure.words}{title(label)}{left_out(results, figure, task, label)}"
    finding = test(what, of_one(figure.by_seed(results.of(task, label)), figure.grain))
    return _wanting(finding, results, figure, task, title, label)


def ask_difference(
    results: Results,
    task: str,
    first: str,
    second: str,
    title: Title,
    *,
    figure: Figure = ACCURACY,
    test: Test | None = None,
    what: str = "",
) -> Finding:
    """Test a value's mean over the models of ``first`` minus that of ``second``.

    Arguments
        test  the test (default: more than `MARGIN`)
        what  beginning of the evidence (default: the value's name and the two titles)
    """
    words = what or f"{figure.words}{title(first)} − {title(second)}"
    missing = left_out(results, figure, task, first, second)
    compared = replace(results.difference(task, first, second, figure), missing="")  # `words` says it
    finding = (test or over(MARGIN))(words + missing, compared)
    return _wanting(finding, results, figure, task, title, first, second)


def _wanting(finding: Finding, results: Results, figure: Figure, task: str, title: Title, *labels: str) -> Finding:
    """The finding; if no model counts, with the runs that are needed."""
    if finding.known or finding.wanting != NONE_COUNTS:
        return finding
    absent = [title(label) for label in dict.fromkeys(labels) if not results.of(task, label)]
    again = "; to add missing measures, run the same command again (needs the weights)"
    wanted = f"models that are not left out ({figure.without}){again if 'not measured' in figure.without else ''}"
    return replace(finding, wanting=f"finished models of {listed(absent)}" if absent else figure.wanted or wanted)


def left_out(results: Results, figure: Figure, task: str, *labels: str) -> str:
    """`Results.left_out` in parentheses."""
    found = results.left_out(figure, task, *labels)
    return f" ({found})" if found else ""
