"""Claims about accuracy: which encoding learns which task, how fast, and what it over-learns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from toeplens.papers.deposit.claims.common import BETTER, FINAL, V1, beats, expected
from toeplens.papers.deposit.labels import title
from toeplens.papers.deposit.questions import CORE
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.results import CellResult, Results
from toeplens.studies.kit.verdicts import Finding, above, below, within
from toeplens.training.presets import COUNT, DISTANCE


def _rope_best(results: Results) -> list[Finding]:
    return beats(results, DISTANCE, "rope", ("absolute", "relative", "alibi", "nope", "random"))


def _rope_fastest(results: Results) -> list[Finding]:
    return [
        above(
            f"mean accuracy over the epochs, RoPE - {title(other)}",
            results.speed_difference(DISTANCE, "rope", other),
            0.0,
        )
        for other in ("absolute", "relative", "alibi", "nope", "random")
        if expected(results, DISTANCE, other)
    ]


def _absolute_second(results: Results) -> list[Finding]:
    worse = beats(results, DISTANCE, "absolute", ("relative", "alibi", "nope", "random"))
    return [above("RoPE - Absolute", results.difference(DISTANCE, "rope", "absolute"), 0.0), *worse]


def _do_not_learn(results: Results, labels: Sequence[str]) -> list[Finding]:
    return [below(f"skill of {title(label)}", results.skill(DISTANCE, label), 0.25) for label in labels]


def _nope_relative_fail(results: Results) -> list[Finding]:
    return _do_not_learn(results, ("nope", "relative"))


def _alibi_poor(results: Results) -> list[Finding]:
    return [below("skill of ALiBi - half the skill of RoPE", *_minus_half(results))]


def _minus_half(results: Results) -> tuple[np.ndarray, float]:
    rope = {cell.key.seed: cell.skill for cell in results.of(DISTANCE, "rope")}
    cells = [cell for cell in results.of(DISTANCE, "alibi") if cell.key.seed in rope]
    return np.array([cell.skill - rope[cell.key.seed] / 2 for cell in cells]), 0.0


def _table1_distance(results: Results) -> list[Finding]:
    return [*beats(results, DISTANCE, "rope", ("mla",)), *beats(results, DISTANCE, "mla", ("nope",))]


def _table1_count(results: Results) -> list[Finding]:
    return [*beats(results, COUNT, "mla", ("nope", "rope")), *beats(results, COUNT, "nope", ("rope",))]


def _rope_count_superior(results: Results) -> list[Finding]:
    return beats(results, COUNT, "rope", ("nope",))


def _train(cell: CellResult) -> float:
    """Train accuracy after the last epoch; NaN for a run that diverged, whatever its last row says."""
    value = cell.epochs[-1].get("train_accuracy") if cell.epochs and cell.status != "diverged" else None
    return float("nan") if value is None else float(value)


def _gap(cell: CellResult) -> float:
    """Train accuracy less test accuracy, after the last epoch."""
    return _train(cell) - cell.accuracy


def _largest_gap(results: Results, task: str, first: str, others: Sequence[str]) -> list[Finding]:
    return [
        above(f"train - test gap, {title(first)} - {title(other)}", results.paired(task, first, other, _gap), 0.0)
        for other in others
    ]


def _convergence_order(results: Results) -> list[Finding]:
    order = ("rope", "absolute", "alibi")
    return [
        above(
            f"mean accuracy over the epochs, {title(first)} - {title(second)}",
            results.speed_difference(DISTANCE, first, second),
            0.0,
        )
        for first, second in itertools.pairwise(order)
    ]


def _rope_small_gap(results: Results) -> list[Finding]:
    return [
        below(f"train - test gap, RoPE - {title(other)}", results.paired(DISTANCE, "rope", other, _gap), 0.0)
        for other in ("absolute", "relative", "alibi", "nope")
    ]


def _random_overfits(results: Results) -> list[Finding]:
    train = results.paired(DISTANCE, "random", "absolute", _train)
    return [
        within("train accuracy, Random - Absolute", train, -0.1, 0.1),
        below("test accuracy, Random - Absolute", results.difference(DISTANCE, "random", "absolute"), 0.0),
    ]


def _positions_cost(results: Results) -> list[Finding]:
    return beats(results, COUNT, "nope", ("absolute", "rope", "relative", "alibi", "random"))


def _absolute_mild(results: Results) -> list[Finding]:
    return [within("NoPE - Absolute", results.difference(COUNT, "nope", "absolute"), 0.0, 0.1)]


def _relative_like_nope(results: Results) -> list[Finding]:
    return [within("Relative - NoPE", results.difference(COUNT, "relative", "nope"), -0.05, 0.05)]


def _random_count_gap(results: Results) -> list[Finding]:
    return _largest_gap(results, COUNT, "random", ("rope", "absolute", "relative", "alibi", "nope"))


def _alibi_worst(results: Results) -> list[Finding]:
    others = ("nope", "rope", "absolute", "relative", "random", "mla")
    return [above(f"{title(o)} - ALiBi", results.difference(COUNT, o, "alibi"), 0.0) for o in others]


def _mla_near_best(results: Results) -> list[Finding]:
    findings = []
    for task, name in ((DISTANCE, "Task 1"), (COUNT, "Task 2")):
        rivals = [label for label in results.labels(task) if "/" not in label and not label.startswith("partial-")]
        accuracies = {label: results.accuracy(task, label) for label in rivals}
        means = {label: float(a[np.isfinite(a)].mean()) for label, a in accuracies.items() if np.isfinite(a).any()}
        best = max(means, key=means.__getitem__, default="mla")
        # Table 1's encodings are on every task of every scale: without them there is no best yet
        known = {"rope", "nope"} <= means.keys()
        gap = results.difference(task, "mla", best) if known else []
        findings.append(above(f"{name}: MLA - {title(best)}, the best", gap, -0.1))
    return findings


def _mla_small_cost(results: Results) -> list[Finding]:
    return [within("RoPE - MLA", results.difference(DISTANCE, "rope", "mla"), 0.0, 0.1)]


CLAIMS: tuple[Claim[Results], ...] = (
    Claim(
        "task1-rope-best",
        f"{V1}, 4.2",
        "On Task 1 RoPE generalises best of the basic encodings.",
        f"RoPE against absolute, relative, ALiBi, NoPE (and random, where run): {BETTER}, each.",
        _rope_best,
        CORE,
    ),
    Claim(
        "task1-rope-fastest",
        f"{V1}, 4.2",
        "On Task 1 RoPE converges fastest.",
        "RoPE's mean test accuracy over all epochs, paired by seed, above each other basic encoding's.",
        _rope_fastest,
        CORE,
    ),
    Claim(
        "task1-absolute-second",
        f"{V1}, 4.2",
        "On Task 1 absolute encoding ranks second, after RoPE.",
        f"RoPE over absolute, and absolute over relative, ALiBi, NoPE (and random, where run): {BETTER}, each.",
        _absolute_second,
        CORE,
    ),
    Claim(
        "task1-nope-relative-fail",
        f"{V1}, 4.2",
        "Neither NoPE nor the relative encoding generalises on Task 1.",
        "Skill (accuracy over the best guess from the length, as a share of the rest) of each under 0.25.",
        _nope_relative_fail,
        CORE,
    ),
    Claim(
        "task1-alibi-poor",
        f"{V1}, 4.2",
        "ALiBi performs poorly on Task 1.",
        "Skill of ALiBi under half of RoPE's, paired by seed.",
        _alibi_poor,
        CORE,
    ),
    Claim(
        "table1-task1-order",
        f"{V1}, Table 1",
        "Task 1: RoPE (92.64) over MLA (88.34) over NoPE (3.51).",
        f"RoPE over MLA, and MLA over NoPE: {BETTER}, each.",
        _table1_distance,
        CORE,
    ),
    Claim(
        "table1-task2-order",
        f"{V1}, Table 1",
        "Task 2: MLA (97.41) over NoPE (77.69) over RoPE (69.43).",
        f"MLA over NoPE, MLA over RoPE, NoPE over RoPE: {BETTER}, each.",
        _table1_count,
        CORE,
    ),
    Claim(
        "task2-rope-superior",
        f"{V1}, 4.2 (against its own Table 1)",
        "On Task 2 RoPE imposes little overhead and yields superior test accuracy.",
        f"RoPE over NoPE: {BETTER}.",
        _rope_count_superior,
        CORE,
    ),
    Claim(
        "task1-convergence-order",
        f"{V1}, 4.2",
        "On Task 1 the order of convergence is RoPE, Absolute, ALiBi.",
        "Mean test accuracy over all epochs, paired by seed: RoPE over absolute, absolute over ALiBi, each above 0.",
        _convergence_order,
        CORE,
    ),
    Claim(
        "task1-rope-smallest-gap",
        f"{V1}, 4.2",
        "On Task 1 RoPE has a minimal generalisation gap.",
        "Final train less test accuracy of RoPE less that of absolute, relative, ALiBi, NoPE, by seed: below 0, each.",
        _rope_small_gap,
        CORE,
    ),
    Claim(
        "mla-near-best",
        f"{FINAL}, 5",
        "MLA comes near the best encoding on both tasks.",
        "On each task, MLA less the encoding with the best mean test accuracy, paired by seed: above -0.1.",
        _mla_near_best,
        CORE,
    ),
    Claim(
        "mla-small-cost",
        f"{V1}, C.3",
        "MLA costs a little generalisation on Task 1.",
        "RoPE less MLA, paired by seed: between 0 and 0.1.",
        _mla_small_cost,
        CORE,
    ),
    Claim(
        "task1-random-overfits",
        f"{V1}, 4.2",
        "On Task 1 a random table matches absolute encoding in training accuracy but generalises worse.",
        "Final train accuracy, Random less Absolute: between -0.1 and 0.1; test accuracy: below 0. Paired by seed.",
        _random_overfits,
        "others",
    ),
    Claim(
        "task2-positions-cost",
        f"{V1}, 4.2",
        "On Task 2 imposing position degrades generalisation.",
        f"NoPE over absolute, RoPE, relative, ALiBi and random: {BETTER}, each.",
        _positions_cost,
        "others",
    ),
    Claim(
        "task2-absolute-mild",
        f"{V1}, 4.2",
        "On Task 2 absolute encoding costs a mild penalty.",
        "NoPE less absolute, paired by seed: between 0 and 0.1.",
        _absolute_mild,
        "others",
    ),
    Claim(
        "task2-relative-like-nope",
        f"{V1}, 4.2",
        "On Task 2 the relative encoding matches NoPE.",
        "Relative less NoPE, paired by seed: between -0.05 and 0.05.",
        _relative_like_nope,
        "others",
    ),
    Claim(
        "task2-random-largest-gap",
        f"{V1}, 4.2",
        "On Task 2 a random table has the largest gap between train and test.",
        "Final train less test accuracy of Random, less that of RoPE, absolute, relative, ALiBi and NoPE, by seed: "
        "above 0, each.",
        _random_count_gap,
        "others",
    ),
    Claim(
        "task2-alibi-worst",
        f"{V1}, 4.2; {FINAL}, 5",
        "On Task 2 ALiBi is worst of all.",
        "NoPE, RoPE, absolute, relative, random and MLA less ALiBi, paired by seed: above 0, each.",
        _alibi_worst,
        "others",
    ),
)
