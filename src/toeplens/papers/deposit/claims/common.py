"""What the claims have in common: where they stand in the papers, and the checks that are put together from figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from toeplens.papers.deposit.labels import title
from toeplens.papers.deposit.questions import CORE
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.contrasts import of_one
from toeplens.studies.kit.results import ACCURACY, SKILLED, CellResult, Figure, Results
from toeplens.studies.kit.verdicts import Finding, above, below, unknown, within
from toeplens.training.presets import DISTANCE

V1 = "arXiv 2505.13027 v1"
FINAL = "ICLR 2026 version (summary)"
MARGIN = 0.02
WHY_MARGIN = "less than two points could not be seen in the source's figures, and five seeds tell them apart"
BETTER = f"mean final test accuracy higher by more than {100 * MARGIN:g} points ({WHY_MARGIN})"

Check = Callable[[Results], list[Finding]]
Test = Callable[[str, Any], Finding]
Counts = Callable[[CellResult], bool]
Pairs = Iterable[tuple[str, str]]
Asked = tuple[Figure, Test]  # of each model; how all together are judged

core = partial(Claim[Results], part=CORE)
others = partial(Claim[Results], part="others")
partially = partial(Claim[Results], part="partial")
mechanism = partial(Claim[Results], part="mechanism")


# ---- how figures are judged ------------------------------------------------------------------------------------------


def over(bar: float, unit: str = "") -> Test:
    """Are the values above a bar?"""
    return partial(above, bar=bar, unit=unit)


def under(bar: float, unit: str = "") -> Test:
    """Are the values below a bar?"""
    return partial(below, bar=bar, unit=unit)


def between(low: float, high: float, unit: str = "") -> Test:
    """Are the values between two bars?"""
    return partial(within, low=low, high=high, unit=unit)


# ---- checks ----------------------------------------------------------------------------------------------------------


def compare(task: str, pairs: Pairs, figure: Figure = ACCURACY, test: Test | None = None, what: str = "") -> Check:
    """Is a figure of the first label of each pair, less that of the second, over `MARGIN`?

    Every encoding of a claim is waited for, but for "random" as a rival: the core of the smaller scales leaves it out.

    Arguments
        test  what else it is to be
        what  begins the evidence in place of the figure's words and the two titles
    """

    def check(results: Results) -> list[Finding]:
        return [
            (test or over(MARGIN))(
                (what or f"{figure.words}{title(first)} - {title(second)}")
                + left_out(results, figure, task, first, second),
                results.difference(task, first, second, figure),
            )
            for first, second in pairs
            if second != "random" or results.of(task, second)
        ]

    return check


def left_out(results: Results, figure: Figure, task: str, *labels: str) -> str:
    """How many of the models that are compared do not count, as a remark; nothing if all do."""
    cells = [cell for label in dict.fromkeys(labels) for cell in results.of(task, label)]
    away = sum(not figure.counts(cell) for cell in cells)
    return f" ({away} of {len(cells)} models left out: {figure.without})" if away else ""


def against(first: str, *rivals: str) -> list[tuple[str, str]]:
    """An encoding and each of its rivals."""
    return [(first, rival) for rival in rivals]


def able(cell: CellResult) -> bool:
    """Whether a cell's ablation can say anything: the model learned at least a quarter of what there is to learn."""
    return cell.ablation is not None and cell.skilled


def has(measure: str, *, skill: bool = True) -> Counts:
    """Whether a cell has a measure, and unless ``skill`` is False is `able` too."""
    return lambda cell: cell.measure(measure) is not None and (able(cell) or not skill)


def models(label: str, *parts: Asked, task: str = DISTANCE) -> Check:
    """Of the models of a label that count, part by part: the figure, and how its mean is judged."""

    def check(results: Results) -> list[Finding]:
        cells = results.of(task, label)
        return [
            test(
                f"{figure.words}{title(label)}{left_out(results, figure, task, label)}",
                of_one(figure.by_seed(cells), figure.grain),
            )
            for figure, test in parts
        ]

    return check


def learned(label: str, check: Check, task: str = DISTANCE) -> Check:
    """A check of an encoding that only means something if its models have learned anything."""

    def checked(results: Results) -> list[Finding]:
        cells = results.of(task, label)
        if cells and not any(cell.skilled for cell in cells):
            why = f"no model has a skill of {SKILLED:g}, so its heads say nothing"
            return [unknown(title(label), why, "a size at which it learns")]
        return check(results)

    return checked


def on_rope(check: Callable[[str], Check]) -> Check:
    """A check of RoPE alone, on all heads, whatever its label is here."""
    return lambda results: check(full_rope(results))(results)


def full_rope(results: Results) -> str:
    """RoPE on all heads without a sinusoid: the released program's "rope" has one, that for partial RoPE none."""
    return "rope-alone" if results.of(DISTANCE, "rope-alone") else "rope"


def both_positions(results: Results) -> str:
    """RoPE + sinusoid: in the released protocol the program's "rope" is that."""
    return "rope-absolute" if results.of(DISTANCE, "rope-absolute") else "rope"
