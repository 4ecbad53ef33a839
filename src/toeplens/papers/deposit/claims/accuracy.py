"""Claims about accuracy: which encoding learns which task, learning speed, stability and generalisation gap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toeplens.papers.deposit.claims.common import RIVALS, Test
from toeplens.papers.deposit.labels import Label, title
from toeplens.studies.kit.claims import MARGIN
from toeplens.studies.kit.results import ACCURACY, SKILLED, CellResult, Figure, Results, skill
from toeplens.studies.kit.verdicts import ENOUGH, Finding, below, contrast, one_sided, unknown
from toeplens.training.presets import COUNT, DISTANCE, starting_spec
from toeplens.training.spec import run_spec

_ANEW = (
    "newly trained models (same command, another directory): these were trained before accuracy on training examples "
    "was evaluated, or are still learning"
)
_FIT = Figure(
    "accuracy on training examples, ",
    lambda cell: cell.fit,
    lambda cell: cell.status == "diverged" or (cell.settled and cell.fit >= 0),
    "still learning, or not measured",
    wanted=_ANEW,
)
_GAP = replace(_FIT, words="train − test gap, ", of=lambda cell: cell.fit - cell.accuracy)
_SPEED = Figure(
    "log2 of the epochs until half is learned, ",
    lambda cell: cell.half_learned,
    lambda cell: cell.status == "diverged" or cell.looked_back,
    "accuracy on training examples not evaluated",
    grain=0.05,
    wanted=_ANEW,
)
_SETBACKS = Figure("sum of test accuracy drops during training, ", lambda cell: cell.setbacks)
_BIAS = Figure(
    "log2 of the learned bias's spread",
    lambda cell: cell.measure("bias").doublings,
    lambda cell: cell.measure("bias") is not None,
)
_TASKS = {DISTANCE: "Task 1", COUNT: "Task 2"}
_LEVEL = {task: replace(ACCURACY, words=f"{text}: accuracy of ") for task, text in _TASKS.items()}
_FASTER = 0.25
_SOME = 0.1  # at most this is "near"


def _faster(results: Results, fast: str, slow: str) -> list[Finding]:
    """The second needs more examples than the first.

    The number of examples of a model that never learned half is a lower bound. With such a model among the slow ones
    the claim cannot fail; with one among the fast ones it cannot hold.
    """
    cells = (results.of(DISTANCE, label.removesuffix("?")) for label in (fast, slow))
    lost, won = (any(not cell.learned_half for cell in each) for each in cells)
    return [
        one_sided(finding, holds=not lost, fails=not won, why="models that never learned half")
        for finding in Test(_SPEED, slow, fast, above=_FASTER)(results)
    ]


def _beside(results: Results, task: str, of: str, accuracy: float) -> list[Finding]:
    """Is a model's skill near that of an accuracy in the source, whose baseline is that of the source's sizes?"""

    def lead(cell: CellResult) -> float:
        spec = run_spec(**starting_spec("paper", cell.key.protocol, task, "rope", 0))
        return cell.skill - skill(accuracy, spec.guess)

    figure = replace(ACCURACY, words=f"{_TASKS[task]}: skill − skill of Table 1, ", of=lead)
    return Test(figure, of, above=-_SOME, below=_SOME, task=task)(results)


def _stablest(results: Results) -> list[Finding]:
    """Every rival's test accuracy drops by more than RoPE's; undecided if too few models of both have drops."""
    findings = []
    for rival in RIVALS:
        label = rival.removesuffix("?")
        both = [results.of(DISTANCE, each) for each in (label, "rope")]
        cells, enough = [*both[0], *both[1]], min(ENOUGH, *map(len, both))
        falls = sum(cell.setbacks > 0 for cell in cells if cell.status == "complete")
        few = f"only {falls} of {len(cells)} models have accuracy drops, too few to estimate their frequency"
        findings += [
            finding
            if falls >= enough or not finding.known
            else unknown(f"{title(label)} and {title('rope')}", few, "less stable training")
            for finding in Test(_SETBACKS, rival, "rope", above=MARGIN)(results)
        ]
    return findings


def _near_best(results: Results) -> list[Finding]:
    found: list[Finding] = []
    for task, figure in _LEVEL.items():
        plain = {label for label in results.labels(task) if Label.parse(label).plain} | {"rope", "nope"}
        found += Test(figure, "mla", sorted(plain - {"mla"}), above=-_SOME, task=task)(results)
    return found


def _bias_attenuates(results: Results) -> list[Finding]:
    counting, distance = (_BIAS.by_seed(results.of(task, "relative")) for task in (COUNT, DISTANCE))
    what = "log2 of the learned bias's spread over offsets, Task 2 − Task 1"
    return [below(what, contrast((1, counting), (-1, distance), grain=0.05), -1.0)]


KNOWN: dict[str, Any] = {
    "accuracy": ACCURACY,
    "task-1": _LEVEL[DISTANCE],
    "task-2": _LEVEL[COUNT],
    "skill": replace(ACCURACY, words="skill of ", of=lambda cell: cell.skill),
    "fit": _FIT,
    "gap": _GAP,
    "learned-gap": replace(
        _GAP,
        counts=lambda cell: (
            _FIT.counts(cell) and (cell.status == "diverged" or skill(cell.fit, cell.length_chance) >= SKILLED)
        ),
        without="still learning, not measured, or too little learned",
    ),
    "table-1": _beside,
    "faster": _faster,
    "stablest": _stablest,
    "near-best": _near_best,
    "bias-attenuates": _bias_attenuates,
}
