"""Claims about accuracy: which encoding learns which task, how fast, and what it over-learns."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from toeplens.papers.deposit.claims.common import BETTER, FINAL, V1, against, between, compare, core, others, under
from toeplens.papers.deposit.labels import Label, title
from toeplens.studies.kit.claims import Claim, every
from toeplens.studies.kit.results import CellResult, Figure, Results
from toeplens.studies.kit.verdicts import Finding, above, below
from toeplens.training.presets import COUNT, DISTANCE


def _train(cell: CellResult) -> float:
    """Train accuracy after the last epoch; NaN for a run that diverged, whatever its last row says."""
    value = cell.epochs[-1].get("train_accuracy") if cell.epochs and cell.status != "diverged" else None
    return float("nan") if value is None else float(value)


_SPEED = Figure("mean accuracy over the epochs, ", CellResult.mean_accuracy)
_SKILL = Figure("skill of ", lambda cell: cell.skill)
_TRAIN = Figure("train accuracy, ", _train)
_GAP = Figure("train - test gap, ", lambda cell: _train(cell) - cell.accuracy)
_RIVALS = ("absolute", "relative", "alibi", "nope", "random")
_RANDOM = against("random", "absolute")
_LESS = under(0.0)
_A_LITTLE = between(0.0, 0.1)


def _do_not_learn(results: Results) -> list[Finding]:
    skills = {label: _SKILL.by_seed(results.of(DISTANCE, label)) for label in ("nope", "relative")}
    return [below(f"{_SKILL.words}{title(label)}", skill, 0.25) for label, skill in skills.items()]


def _alibi_poor(results: Results) -> list[Finding]:
    half = Figure("", lambda cell: cell.skill / 2).by_seed(results.of(DISTANCE, "rope"))
    return [below("skill of ALiBi - half the skill of RoPE", _SKILL.by_seed(results.of(DISTANCE, "alibi")) - half, 0.0)]


def _mla_near_best(results: Results) -> list[Finding]:
    findings = []
    for task, name in ((DISTANCE, "Task 1"), (COUNT, "Task 2")):
        rivals = [label for label in results.labels(task) if Label.parse(label).plain]
        accuracies = {label: results.accuracy(task, label) for label in rivals}
        means = {label: float(a[np.isfinite(a)].mean()) for label, a in accuracies.items() if np.isfinite(a).any()}
        best = max(means, key=means.__getitem__, default="mla")
        # Table 1's encodings are on every task of every scale: without them there is no best yet
        known = {"rope", "nope"} <= means.keys()
        gap = results.difference(task, "mla", best) if known else []
        findings.append(above(f"{name}: MLA - {title(best)}, the best", gap, -0.1))
    return findings


CLAIMS: tuple[Claim[Results], ...] = (
    core(
        "task1-rope-best",
        f"{V1}, 4.2",
        "On Task 1 RoPE generalises best of the basic encodings.",
        f"RoPE against absolute, relative, ALiBi, NoPE (and random, where run): {BETTER}, each.",
        compare(DISTANCE, against("rope", *_RIVALS)),
    ),
    core(
        "task1-rope-fastest",
        f"{V1}, 4.2",
        "On Task 1 RoPE converges fastest.",
        "RoPE's mean test accuracy over all epochs, paired by seed, above each other basic encoding's.",
        compare(DISTANCE, against("rope", *_RIVALS), _SPEED),
    ),
    core(
        "task1-absolute-second",
        f"{V1}, 4.2",
        "On Task 1 absolute encoding ranks second, after RoPE.",
        f"RoPE over absolute, and absolute over relative, ALiBi, NoPE (and random, where run): {BETTER}, each.",
        every(
            compare(DISTANCE, against("rope", "absolute"), what="RoPE - Absolute"),
            compare(DISTANCE, against("absolute", *_RIVALS[1:])),
        ),
    ),
    core(
        "task1-nope-relative-fail",
        f"{V1}, 4.2",
        "Neither NoPE nor the relative encoding generalises on Task 1.",
        "Skill (accuracy over the best guess from the length, as a share of the rest) of each under 0.25.",
        _do_not_learn,
    ),
    core(
        "task1-alibi-poor",
        f"{V1}, 4.2",
        "ALiBi performs poorly on Task 1.",
        "Skill of ALiBi under half of RoPE's, paired by seed.",
        _alibi_poor,
    ),
    core(
        "table1-task1-order",
        f"{V1}, Table 1",
        "Task 1: RoPE (92.64) over MLA (88.34) over NoPE (3.51).",
        f"RoPE over MLA, and MLA over NoPE: {BETTER}, each.",
        compare(DISTANCE, (("rope", "mla"), ("mla", "nope"))),
    ),
    core(
        "table1-task2-order",
        f"{V1}, Table 1",
        "Task 2: MLA (97.41) over NoPE (77.69) over RoPE (69.43).",
        f"MLA over NoPE, MLA over RoPE, NoPE over RoPE: {BETTER}, each.",
        compare(COUNT, (("mla", "nope"), ("mla", "rope"), ("nope", "rope"))),
    ),
    core(
        "task2-rope-superior",
        f"{V1}, 4.2 (against its own Table 1)",
        "On Task 2 RoPE imposes little overhead and yields superior test accuracy.",
        f"RoPE over NoPE: {BETTER}.",
        compare(COUNT, against("rope", "nope")),
    ),
    core(
        "task1-convergence-order",
        f"{V1}, 4.2",
        "On Task 1 the order of convergence is RoPE, Absolute, ALiBi.",
        "Mean test accuracy over all epochs, paired by seed: RoPE over absolute, absolute over ALiBi, each above 0.",
        compare(DISTANCE, tuple(pairwise(("rope", "absolute", "alibi"))), _SPEED),
    ),
    core(
        "task1-rope-smallest-gap",
        f"{V1}, 4.2",
        "On Task 1 RoPE has a minimal generalisation gap.",
        "Final train less test accuracy of RoPE less that of absolute, relative, ALiBi, NoPE, by seed: below 0, each.",
        compare(DISTANCE, against("rope", *_RIVALS[:4]), _GAP, _LESS),
    ),
    core(
        "mla-near-best",
        f"{FINAL}, 5",
        "MLA comes near the best encoding on both tasks.",
        "On each task, MLA less the encoding with the best mean test accuracy, paired by seed: above -0.1.",
        _mla_near_best,
    ),
    core(
        "mla-small-cost",
        f"{V1}, C.3",
        "MLA costs a little generalisation on Task 1.",
        "RoPE less MLA, paired by seed: between 0 and 0.1.",
        compare(DISTANCE, against("rope", "mla"), test=_A_LITTLE),
    ),
    others(
        "task1-random-overfits",
        f"{V1}, 4.2",
        "On Task 1 a random table matches absolute encoding in training accuracy but generalises worse.",
        "Final train accuracy, Random less Absolute: between -0.1 and 0.1; test accuracy: below 0. Paired by seed.",
        every(
            compare(DISTANCE, _RANDOM, _TRAIN, between(-0.1, 0.1), "train accuracy, Random - Absolute"),
            compare(DISTANCE, _RANDOM, test=_LESS, what="test accuracy, Random - Absolute"),
        ),
    ),
    others(
        "task2-positions-cost",
        f"{V1}, 4.2",
        "On Task 2 imposing position degrades generalisation.",
        f"NoPE over absolute, RoPE, relative, ALiBi and random: {BETTER}, each.",
        compare(COUNT, against("nope", "absolute", "rope", "relative", "alibi", "random")),
    ),
    others(
        "task2-absolute-mild",
        f"{V1}, 4.2",
        "On Task 2 absolute encoding costs a mild penalty.",
        "NoPE less absolute, paired by seed: between 0 and 0.1.",
        compare(COUNT, against("nope", "absolute"), test=_A_LITTLE, what="NoPE - Absolute"),
    ),
    others(
        "task2-relative-like-nope",
        f"{V1}, 4.2",
        "On Task 2 the relative encoding matches NoPE.",
        "Relative less NoPE, paired by seed: between -0.05 and 0.05.",
        compare(COUNT, against("relative", "nope"), test=between(-0.05, 0.05)),
    ),
    others(
        "task2-random-largest-gap",
        f"{V1}, 4.2",
        "On Task 2 a random table has the largest gap between train and test.",
        "Final train less test accuracy of Random, less that of RoPE, absolute, relative, ALiBi and NoPE, by seed: "
        "above 0, each.",
        compare(COUNT, against("random", "rope", "absolute", "relative", "alibi", "nope"), _GAP),
    ),
    others(
        "task2-alibi-worst",
        f"{V1}, 4.2; {FINAL}, 5",
        "On Task 2 ALiBi is worst of all.",
        "NoPE, RoPE, absolute, relative, random and MLA less ALiBi, paired by seed: above 0, each.",
        compare(COUNT, [(other, "alibi") for other in ("nope", "rope", "absolute", "relative", "random", "mla")]),
    ),
)
