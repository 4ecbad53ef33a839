"""What the claims have in common: where they stand in the papers, and the checks that are put together from figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from toeplens.papers.deposit.labels import title
from toeplens.papers.deposit.questions import CORE
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.results import ACCURACY, CellResult, Figure, Results
from toeplens.studies.kit.verdicts import Finding, above, below, opposite, seen, within
from toeplens.training.presets import DISTANCE

V1 = "arXiv 2505.13027 v1"
FINAL = "ICLR 2026 version"
BETTER = "paired difference of final test accuracy over seeds above 0"

Check = Callable[[Results], list[Finding]]
Test = Callable[[str, Any], Finding]
Counts = Callable[[CellResult], bool]
Pairs = Iterable[tuple[str, str]]
Asked = tuple[str, Callable[[CellResult], float], Test]  # what, in words; of each model; how all together are judged

core = partial(Claim[Results], part=CORE)
others = partial(Claim[Results], part="others")
partially = partial(Claim[Results], part="partial")
mechanism = partial(Claim[Results], part="mechanism")


# ---- how figures are judged ------------------------------------------------------------------------------------------


def over(bar: float) -> Test:
    """Are the values above a bar?"""
    return partial(above, bar=bar)


def under(bar: float) -> Test:
    """Are the values below a bar?"""
    return partial(below, bar=bar)


def between(low: float, high: float) -> Test:
    """Are the values between two bars?"""
    return partial(within, low=low, high=high)


def none(what: str, yes: Sequence[bool]) -> Finding:
    """Has no model the property?"""
    return opposite(seen(what, yes))


# ---- checks ----------------------------------------------------------------------------------------------------------


def compare(task: str, pairs: Pairs, figure: Figure = ACCURACY, test: Test | None = None, what: str = "") -> Check:
    """Is a figure of the first label of each pair less that of the second, paired by seed, above 0?

    Every encoding of a claim is waited for, but for "random" as a rival: the core of the smaller scales leaves it out.

    Arguments
        test  what else it is to be
        what  begins the evidence in place of the figure's words and the two titles
    """

    def check(results: Results) -> list[Finding]:
        return [
            (test or over(0.0))(
                what or f"{figure.words}{title(first)} - {title(second)}",
                results.difference(task, first, second, figure),
            )
            for first, second in pairs
            if second != "random" or results.of(task, second)
        ]

    return check


def against(first: str, *rivals: str) -> list[tuple[str, str]]:
    """An encoding and each of its rivals."""
    return [(first, rival) for rival in rivals]


def able(cell: CellResult) -> bool:
    """Whether a cell's ablation can say anything: the model learned at least a quarter of what there is to learn."""
    return cell.ablation is not None and cell.skilled


def has(measure: str, *, skill: bool = True) -> Counts:
    """Whether a cell has a measure, and unless ``skill`` is False is `able` too."""
    return lambda cell: cell.measure(measure) is not None and (able(cell) or not skill)


def models(
    label: str, *parts: tuple[str, Callable[[CellResult], float], Test], task: str = DISTANCE, counts: Counts = able
) -> Check:
    """Of the models of a label that count, part by part: the words, what is asked of each, and how that is judged."""
    return lambda results: [
        test(what, [of(cell) for cell in results.of(task, label) if counts(cell)]) for what, of, test in parts
    ]


def full_rope(results: Results) -> str:
    """RoPE on all heads without a sinusoid: the released program's "rope" has one, that for partial RoPE none."""
    return "rope-alone" if results.of(DISTANCE, "rope-alone") else "rope"


def both_positions(results: Results) -> str:
    """RoPE + sinusoid: in the released protocol the program's "rope" is that."""
    return "rope-absolute" if results.of(DISTANCE, "rope-absolute") else "rope"
