"""The papers' empirical claims that this study can decide. Rules were written before any run of the study."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toeplens.studies.claims import Claim
from toeplens.studies.reproduce.labels import title
from toeplens.studies.reproduce.scales import COUNT, DISTANCE
from toeplens.studies.results import CellResult, Results
from toeplens.studies.verdicts import Finding, above, below, opposite, seen

_V1 = "arXiv 2505.13027 v1"
_FINAL = "ICLR 2026 version"
_BETTER = "paired difference of final test accuracy over seeds above 0"
_NO_DEPOSIT_NEEDED = ("nope", "alibi", "relative", "absolute")


def _beats(results: Results, task: str, first: str, others: Sequence[str]) -> list[Finding]:
    """Is ``first`` more accurate than each of the others that were run?"""
    return [
        above(f"{title(first)} - {title(other)}", results.difference(task, first, other), 0.0)
        for other in others
        if _expected(results, task, other)
    ]


def _expected(results: Results, task: str, label: str) -> bool:
    """Every encoding of a claim is waited for, but for "random", which the smaller scales leave out."""
    return label != "random" or bool(results.of(task, label))


def _skilled(cells: Sequence[CellResult]) -> list[CellResult]:
    """Cells whose ablation can say anything: the model learned at least a quarter of what there is to learn."""
    return [cell for cell in cells if cell.ablation and cell.skill >= 0.25]


def _single_head(cell: CellResult, layers: slice = slice(None)) -> bool:
    return any(layer.kind == "single-head" for layer in cell.deposits()[layers])


def _rope_best(results: Results) -> list[Finding]:
    return _beats(results, DISTANCE, "rope", ("absolute", "relative", "alibi", "nope", "random"))


def _rope_fastest(results: Results) -> list[Finding]:
    return [
        above(
            f"mean accuracy over the epochs, RoPE - {title(other)}",
            results.speed_difference(DISTANCE, "rope", other),
            0.0,
        )
        for other in ("absolute", "relative", "alibi", "nope", "random")
        if _expected(results, DISTANCE, other)
    ]


def _absolute_second(results: Results) -> list[Finding]:
    worse = _beats(results, DISTANCE, "absolute", ("relative", "alibi", "nope", "random"))
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
    return [*_beats(results, DISTANCE, "rope", ("mla",)), *_beats(results, DISTANCE, "mla", ("nope",))]


def _table1_count(results: Results) -> list[Finding]:
    return [*_beats(results, COUNT, "mla", ("nope", "rope")), *_beats(results, COUNT, "nope", ("rope",))]


def _rope_count_superior(results: Results) -> list[Finding]:
    return _beats(results, COUNT, "rope", ("nope",))


def _first_layer_deposit(results: Results) -> list[Finding]:
    cells = _skilled(results.of(DISTANCE, "rope"))
    drops = [float(cell.ablation.drops[0].max()) for cell in cells if cell.ablation]
    others = [float(np.sort(cell.ablation.drops.ravel())[-2]) for cell in cells if cell.ablation]
    return [
        seen("RoPE's first layer is single-head", [_single_head(cell, slice(0, 1)) for cell in cells]),
        above("RoPE's largest first-layer drop", drops, 0.5),
        below("the second largest drop of any head", others, 0.25),
    ]


def _shallow_deposit(results: Results) -> list[Finding]:
    cells = _skilled(results.of(DISTANCE, "rope"))
    half = max((len(cell.deposits()) for cell in cells), default=0) // 2
    return [
        seen(
            "a layer in RoPE's first half is single-head",
            [_single_head(cell, slice(0, max(1, half))) for cell in cells],
        )
    ]


def _only_rope(results: Results) -> list[Finding]:
    findings = []
    for label in _NO_DEPOSIT_NEEDED:
        cells = results.of(DISTANCE, label)
        skilled = _skilled(cells)
        if skilled:
            findings.append(
                opposite(seen(f"{title(label)} has a single-head layer", [_single_head(c) for c in skilled]))
            )
        else:
            why = "learned too little for its heads to matter" if cells else "has no finished run"
            findings.append(Finding("undecided", f"{title(label)} {why}"))
    return findings


def _not_on_count(results: Results) -> list[Finding]:
    cells = _skilled(results.of(COUNT, "rope"))
    return [opposite(seen("RoPE has a single-head layer on Task 2", [_single_head(cell) for cell in cells]))]


def _mla_diffuse(results: Results) -> list[Finding]:
    cells = _skilled(results.of(DISTANCE, "mla"))
    return [opposite(seen("MLA has a single-head layer", [_single_head(cell) for cell in cells]))]


def _displaced(results: Results) -> list[Finding]:
    # in the released protocol the program's "rope" is RoPE + sinusoid
    cells = _skilled(results.of(DISTANCE, "rope-absolute") or results.of(DISTANCE, "rope"))
    first = [float(cell.ablation.drops[0].max()) for cell in cells if cell.ablation]
    return [
        below("RoPE + sinusoid: largest drop in the first layer", first, 0.1),
        seen(
            "RoPE + sinusoid: a layer after the first is single-head", [_single_head(c, slice(1, None)) for c in cells]
        ),
    ]


def _few_heads_suffice(results: Results) -> list[Finding]:
    # the partial-RoPE program has no sinusoid, so it is compared with RoPE alone
    full = "rope-alone" if results.of(DISTANCE, "rope-alone") else "rope"
    return [
        above(f"{title(label)} - {title(full)}", results.difference(DISTANCE, label, full), -0.05)
        for label in ("partial-1", "partial-2")
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "task1-rope-best",
        f"{_V1}, 4.2",
        "On Task 1 RoPE generalises best of the basic encodings.",
        f"RoPE against absolute, relative, ALiBi, NoPE (and random, where run): {_BETTER}, each.",
        _rope_best,
    ),
    Claim(
        "task1-rope-fastest",
        f"{_V1}, 4.2",
        "On Task 1 RoPE converges fastest.",
        "RoPE's mean test accuracy over all epochs, paired by seed, above each other basic encoding's.",
        _rope_fastest,
    ),
    Claim(
        "task1-absolute-second",
        f"{_V1}, 4.2",
        "On Task 1 absolute encoding ranks second, after RoPE.",
        f"RoPE over absolute, and absolute over relative, ALiBi, NoPE (and random, where run): {_BETTER}, each.",
        _absolute_second,
    ),
    Claim(
        "task1-nope-relative-fail",
        f"{_V1}, 4.2",
        "Neither NoPE nor the relative encoding generalises on Task 1.",
        "Skill (accuracy over the best guess from the length, as a share of the rest) of each under 0.25.",
        _nope_relative_fail,
    ),
    Claim(
        "task1-alibi-poor",
        f"{_V1}, 4.2",
        "ALiBi performs poorly on Task 1.",
        "Skill of ALiBi under half of RoPE's, paired by seed.",
        _alibi_poor,
    ),
    Claim(
        "table1-task1-order",
        f"{_V1}, Table 1",
        "Task 1: RoPE (92.64) over MLA (88.34) over NoPE (3.51).",
        f"RoPE over MLA, and MLA over NoPE: {_BETTER}, each.",
        _table1_distance,
    ),
    Claim(
        "table1-task2-order",
        f"{_V1}, Table 1",
        "Task 2: MLA (97.41) over NoPE (77.69) over RoPE (69.43).",
        f"MLA over NoPE, MLA over RoPE, NoPE over RoPE: {_BETTER}, each.",
        _table1_count,
    ),
    Claim(
        "task2-rope-superior",
        f"{_V1}, 4.2 (against its own Table 1)",
        "On Task 2 RoPE imposes little overhead and yields superior test accuracy.",
        f"RoPE over NoPE: {_BETTER}.",
        _rope_count_superior,
    ),
    Claim(
        "deposit-first-layer",
        f"{_FINAL}, 5",
        "Removing one first-layer head of RoPE costs about 60 points on Task 1; other heads have little effect.",
        "RoPE's first layer is single-head, its largest drop over 0.5, and the next largest "
        "drop of any head in any layer under 0.25. Only models with skill of at least 0.25 count.",
        _first_layer_deposit,
    ),
    Claim(
        "deposit-shallow",
        f"{_V1}, 5.1",
        "Under RoPE one shallow head carries the positional work of Task 1.",
        "Some layer in the first half of RoPE's layers is single-head. Only models with skill of at least 0.25 count.",
        _shallow_deposit,
    ),
    Claim(
        "deposit-only-rope",
        f"{_V1}, 5.1",
        "No such deposit appears under NoPE, ALiBi, relative or absolute encodings.",
        "None of them has a single-head layer; one that learned less than a skill of 0.25 is undecided.",
        _only_rope,
    ),
    Claim(
        "deposit-not-task2",
        f"{_V1}, 5.1",
        "RoPE shows no deposit on Task 2.",
        "No layer of RoPE on Task 2 is single-head. Only models with skill of at least 0.25 count.",
        _not_on_count,
    ),
    Claim(
        "mla-removes-deposit",
        f"{_V1}, 5.2",
        "Under MLA no single head is indispensable for Task 1.",
        "No layer of MLA is single-head. Only models with skill of at least 0.25 count.",
        _mla_diffuse,
    ),
    Claim(
        "rope-absolute-moves-deposit",
        f"{_V1}, 5.2, Fig. 6",
        "With a sinusoid at the input RoPE's deposit leaves the first layer and reappears from the second on.",
        "RoPE + sinusoid: largest first-layer drop under 0.1, and some later layer single-head.",
        _displaced,
    ),
    Claim(
        "one-or-two-heads-suffice",
        f"{_FINAL}, 5",
        "RoPE on one or two heads does about as well on Task 1 as RoPE on all.",
        "RoPE on 1 head, and on 2 heads, less full RoPE, paired by seed: above -0.05, each.",
        _few_heads_suffice,
    ),
)
