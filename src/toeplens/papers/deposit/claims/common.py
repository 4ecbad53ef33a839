"""What the claims have in common: where they stand in the papers, and the checks that are put together from figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from toeplens.papers.deposit.labels import title
from toeplens.papers.deposit.questions import CORE
from toeplens.studies.kit.asking import BETTER as BETTER
from toeplens.studies.kit.asking import MARGIN as MARGIN
from toeplens.studies.kit.asking import STOPPED as STOPPED
from toeplens.studies.kit.asking import WHY_MARGIN as WHY_MARGIN
from toeplens.studies.kit.asking import Test, ask, ask_difference
from toeplens.studies.kit.asking import between as between
from toeplens.studies.kit.asking import left_out as left_out
from toeplens.studies.kit.asking import over as over
from toeplens.studies.kit.asking import under as under
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.results import ACCURACY, SKILLED, CellResult, Figure, Results
from toeplens.studies.kit.verdicts import Finding, unknown
from toeplens.training.presets import DISTANCE

V1 = "arXiv 2505.13027 v1"
FINAL = "ICLR 2026 version (summary)"

Check = Callable[[Results], list[Finding]]
Counts = Callable[[CellResult], bool]
Pairs = Iterable[tuple[str, str]]
Asked = tuple[Figure, Test]  # of each model; how all together are judged

core = partial(Claim[Results], part=CORE)
others = partial(Claim[Results], part="others")
partially = partial(Claim[Results], part="partial")
mechanism = partial(Claim[Results], part="mechanism")


# ---- checks ----------------------------------------------------------------------------------------------------------


def there(results: Results, task: str, pairs: Pairs) -> list[tuple[str, str]]:
    """The pairs without those whose rival is "random" where nobody trained it."""
    return [pair for pair in pairs if pair[1] != "random" or results.of(task, pair[1])]


def compare(task: str, pairs: Pairs, figure: Figure = ACCURACY, test: Test | None = None, what: str = "") -> Check:
    """Is a figure of the first label of each pair, less that of the second, over `MARGIN`?

    Every encoding of a claim is waited for, but for "random" as a rival: the core of the smaller scales leaves it out.

    Arguments
        test  what else it is to be
        what  begins the evidence in place of the figure's words and the two titles
    """

    def check(results: Results) -> list[Finding]:
        return [
            ask_difference(results, task, first, second, title, figure=figure, test=test, what=what)
            for first, second in there(results, task, pairs)
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


def models(label: str, *parts: Asked, task: str = DISTANCE) -> Check:
    """Of the models of a label that count, part by part: the figure, and how its mean is judged."""

    return lambda results: [ask(results, task, label, figure, test, title) for figure, test in parts]


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
    """RoPE on all heads without a sinusoid: the released program's "rope" has one, that for partial RoPE none.

    By the protocol, not by what is there: else a study that has not finished would be judged on the other of the two.
    """
    return "rope-alone" if is_released(results) else "rope"


def both_positions(results: Results) -> str:
    """RoPE + sinusoid: in the released protocol the program's "rope" is that."""
    return "rope" if is_released(results) else "rope-absolute"


def is_released(results: Results) -> bool:
    """Whether these are models of the released protocol, or would be if there were any."""
    return results.protocol == "released" or any(cell.key.protocol == "released" for cell in results.cells)
