"""How a paper's claims ask figures of trained models: one margin, one wording, and what is left out is said."""

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
WHY_MARGIN = "smaller differences are not visible in the source's figures, and five seeds can detect this one"
BETTER = f"the mean final test accuracy is more than {100 * MARGIN:g} percentage points higher ({WHY_MARGIN})"
STOPPED = f"Only models that have stopped learning count ({UNRULED})."

Test = Callable[[str, Any], Finding]
Title = Callable[[str], str]  # of a label


def chance(share: float) -> float:
    """The spread of what is so or not, at this share: how far models differ that all came out alike by luck."""
    return sqrt(share * (1 - share))


def over(bar: float, unit: str = "") -> Test:
    """Are the values above a bar?"""
    return partial(above, bar=bar, unit=unit)


def under(bar: float, unit: str = "") -> Test:
    """Are the values below a bar?"""
    return partial(below, bar=bar, unit=unit)


def between(low: float, high: float, unit: str = "") -> Test:
    """Are the values between two bars?"""
    return partial(within, low=low, high=high, unit=unit)


def ask(results: Results, task: str, label: str, figure: Figure, test: Test, title: Title) -> Finding:
    """A figure's mean over the models of an encoding that count, put to a test."""
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
    """A figure's mean over the models of ``first`` less that of ``second``, put to a test.

    Arguments
        test  what it is to be; more than `MARGIN` unless given
        what  begins the evidence in place of the figure's words and the two titles
    """
    words = what or f"{figure.words}{title(first)} − {title(second)}"
    missing = left_out(results, figure, task, first, second)
    compared = replace(results.difference(task, first, second, figure), missing="")  # `words` says it
    finding = (test or over(MARGIN))(words + missing, compared)
    return _wanting(finding, results, figure, task, title, first, second)


def _wanting(finding: Finding, results: Results, figure: Figure, task: str, title: Title, *labels: str) -> Finding:
    """The finding, and where no model counts what to run."""
    if finding.known or finding.wanting != NONE_COUNTS:
        return finding
    absent = [title(label) for label in dict.fromkeys(labels) if not results.of(task, label)]
    again = "; running the same command again measures models whose weights are kept"
    wanted = f"models that are not excluded ({figure.without}){again if 'not measured' in figure.without else ''}"
    return replace(finding, wanting=f"finished models of {listed(absent)}" if absent else figure.wanted or wanted)


def left_out(results: Results, figure: Figure, task: str, *labels: str) -> str:
    """`Results.left_out` as a remark in parentheses."""
    found = results.left_out(figure, task, *labels)
    return f" ({found})" if found else ""
