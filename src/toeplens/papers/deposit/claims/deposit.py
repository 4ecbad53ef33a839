"""Claims about heads: is the skill deposited in one head, where, and under which encodings?"""

from __future__ import annotations

import numpy as np

from toeplens.papers.deposit.claims.common import FINAL, V1, full_rope, paired_peaks, peak_layer, single_head, skilled
from toeplens.papers.deposit.labels import title
from toeplens.papers.deposit.questions import CORE
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.results import ONLY_SKILLED, CellResult, Results
from toeplens.studies.kit.verdicts import Finding, above, below, found, opposite, seen, within
from toeplens.training.presets import COUNT, DISTANCE

_NO_DEPOSIT_NEEDED = ("nope", "alibi", "relative", "absolute")


def _first_layer_deposit(results: Results) -> list[Finding]:
    cells = skilled(results.of(DISTANCE, "rope"))
    drops = [float(cell.ablation.drops[0].max()) for cell in cells if cell.ablation]
    others = [float(np.sort(cell.ablation.drops.ravel())[-2]) for cell in cells if cell.ablation]
    return [
        seen("RoPE's first layer is single-head", [single_head(cell, slice(0, 1)) for cell in cells]),
        above("RoPE's largest first-layer drop", drops, 0.5),
        below("the second largest drop of any head", others, 0.25),
    ]


def _shallow_deposit(results: Results) -> list[Finding]:
    cells = skilled(results.of(DISTANCE, "rope"))
    half = max((len(cell.deposits()) for cell in cells), default=0) // 2
    return [
        seen(
            "a layer in RoPE's first half is single-head",
            [single_head(cell, slice(0, max(1, half))) for cell in cells],
        )
    ]


def _only_rope(results: Results) -> list[Finding]:
    findings = []
    for label in _NO_DEPOSIT_NEEDED:
        cells = results.of(DISTANCE, label)
        able = skilled(cells)
        if able:
            findings.append(opposite(seen(f"{title(label)} has a single-head layer", [single_head(c) for c in able])))
        else:
            why = "learned too little for its heads to matter" if cells else "has no finished run"
            findings.append(Finding("undecided", f"{title(label)} {why}"))
    return findings


def _not_on_count(results: Results) -> list[Finding]:
    cells = skilled(results.of(COUNT, "rope"))
    return [opposite(seen("RoPE has a single-head layer on Task 2", [single_head(cell) for cell in cells]))]


def _mla_diffuse(results: Results) -> list[Finding]:
    cells = skilled(results.of(DISTANCE, "mla"))
    return [opposite(seen("MLA has a single-head layer", [single_head(cell) for cell in cells]))]


def _displaced(results: Results) -> list[Finding]:
    # in the released protocol the program's "rope" is RoPE + sinusoid
    cells = skilled(results.of(DISTANCE, "rope-absolute") or results.of(DISTANCE, "rope"))
    first = [float(cell.ablation.drops[0].max()) for cell in cells if cell.ablation]
    return [
        below("RoPE + sinusoid: largest drop in the first layer", first, 0.1),
        seen(
            "RoPE + sinusoid: a layer after the first is single-head", [single_head(c, slice(1, None)) for c in cells]
        ),
    ]


def _few_heads_suffice(results: Results) -> list[Finding]:
    # the partial-RoPE program has no sinusoid, so it is compared with RoPE alone
    full = full_rope(results, DISTANCE)
    return [
        above(f"{title(label)} - {title(full)}", results.difference(DISTANCE, label, full), -0.05)
        for label in ("partial-1", "partial-2")
    ]


def _more_under_rope(results: Results) -> list[Finding]:
    return [
        above(f"peak, RoPE - {title(other)}", paired_peaks(results, DISTANCE, "rope", other), 0.0)
        for other in _NO_DEPOSIT_NEEDED
    ]


def _absolute_uneven(results: Results) -> list[Finding]:
    drops = [np.sort(cell.ablation.drops[0]) for cell in skilled(results.of(DISTANCE, "absolute")) if cell.ablation]
    return [
        above("Absolute: largest drop in the first layer", [float(d[-1]) for d in drops], 0.1),
        below("Absolute: smallest drop in the first layer", [float(d[0]) for d in drops], 0.02),
    ]


def _alike(results: Results) -> list[Finding]:
    pairs = (("nope", "relative"), ("nope", "alibi"), ("relative", "alibi"))
    return [
        within(f"peak, {title(a)} - {title(b)}", paired_peaks(results, DISTANCE, a, b), -0.2, 0.2) for a, b in pairs
    ]


def _mla_average(results: Results) -> list[Finding]:
    def spread(cell: CellResult) -> float:
        return float(np.mean([layer.effective_heads for layer in cell.deposits()]))

    rope = {cell.key.seed: cell for cell in skilled(results.of(DISTANCE, "rope"))}
    cells = [cell for cell in skilled(results.of(DISTANCE, "mla")) if cell.key.seed in rope]
    values = [spread(cell) - spread(rope[cell.key.seed]) for cell in cells]
    return [above("effective heads, mean over the layers, MLA - RoPE", values, 0.0)]


def _dropout(results: Results) -> list[Finding]:
    with_dropout = skilled(results.of(DISTANCE, "rope/dropout"))
    return [
        seen("RoPE with dropout has a single-head layer", [single_head(cell) for cell in with_dropout]),
        above("peak, RoPE with dropout - RoPE", paired_peaks(results, DISTANCE, "rope/dropout", "rope"), -0.1),
    ]


def _partial(results: Results) -> list[CellResult]:
    labels = [label for label in results.labels(DISTANCE) if label.startswith("partial-")]
    return [cell for label in labels for cell in skilled(results.of(DISTANCE, label))]


def _partial_moves(results: Results) -> list[Finding]:
    cells = _partial(results)
    return [
        found("partial RoPE: the largest drop lies after the first layer", [peak_layer(cell) > 0 for cell in cells]),
        found(
            "partial RoPE: the first layer is not single-head and a later one is",
            [not single_head(cell, slice(0, 1)) and single_head(cell, slice(1, None)) for cell in cells],
        ),
    ]


def _partial_count(results: Results) -> list[Finding]:
    return [
        above(f"NoPE - {title(label)}", results.difference(COUNT, "nope", label), 0.0)
        for label in ("partial-1", "partial-2")
    ]


def _partial_below(results: Results) -> list[Finding]:
    full = full_rope(results, DISTANCE)
    return [
        within(f"{title(full)} - {title(label)}", results.difference(DISTANCE, full, label), 0.0, 0.1)
        for label in ("partial-1", "partial-2", "partial-3")
    ]


CLAIMS: tuple[Claim[Results], ...] = (
    Claim(
        "deposit-first-layer",
        f"{FINAL}, 5",
        "Removing one first-layer head of RoPE costs about 60 points on Task 1; other heads have little effect.",
        "RoPE's first layer is single-head, its largest drop over 0.5, and the next largest "
        "drop of any head in any layer under 0.25. Only models with skill of at least 0.25 count.",
        _first_layer_deposit,
        CORE,
    ),
    Claim(
        "deposit-shallow",
        f"{V1}, 5.1",
        "Under RoPE one shallow head carries the positional work of Task 1.",
        "Some layer in the first half of RoPE's layers is single-head. Only models with skill of at least 0.25 count.",
        _shallow_deposit,
        CORE,
    ),
    Claim(
        "deposit-only-rope",
        f"{V1}, 5.1",
        "No such deposit appears under NoPE, ALiBi, relative or absolute encodings.",
        "None of them has a single-head layer; one that learned less than a skill of 0.25 is undecided.",
        _only_rope,
        CORE,
    ),
    Claim(
        "deposit-not-task2",
        f"{V1}, 5.1",
        "RoPE shows no deposit on Task 2.",
        "No layer of RoPE on Task 2 is single-head. Only models with skill of at least 0.25 count.",
        _not_on_count,
        CORE,
    ),
    Claim(
        "mla-removes-deposit",
        f"{V1}, 5.2",
        "Under MLA no single head is indispensable for Task 1.",
        "No layer of MLA is single-head. Only models with skill of at least 0.25 count.",
        _mla_diffuse,
        CORE,
    ),
    Claim(
        "rope-absolute-moves-deposit",
        f"{V1}, 5.2, Fig. 6",
        "With a sinusoid at the input RoPE's deposit leaves the first layer and reappears from the second on.",
        "RoPE + sinusoid: largest first-layer drop under 0.1, and some later layer single-head.",
        _displaced,
        CORE,
    ),
    Claim(
        "one-or-two-heads-suffice",
        f"{FINAL}, 5",
        "RoPE on one or two heads does about as well on Task 1 as RoPE on all.",
        "RoPE on 1 head, and on 2 heads, less full RoPE, paired by seed: above -0.05, each.",
        _few_heads_suffice,
        CORE,
    ),
    Claim(
        "deposit-more-under-rope",
        f"{V1}, 3.3",
        "The deposit is more prominent under RoPE than under encodings with less structure.",
        f"Peak (largest loss by one head as a share of the skill) of RoPE less that of NoPE, ALiBi, relative and "
        f"absolute, paired by seed: above 0, each. {ONLY_SKILLED}",
        _more_under_rope,
        CORE,
    ),
    Claim(
        "absolute-uneven",
        f"{V1}, C.2",
        "Absolute encoding has some significant and some insignificant heads in the shallow layer.",
        f"In its first layer the largest drop is above 0.1 and the smallest below 0.02. {ONLY_SKILLED}",
        _absolute_uneven,
        CORE,
    ),
    Claim(
        "nope-relative-alibi-alike",
        f"{V1}, C.2",
        "NoPE, relative and ALiBi spread position over their heads alike.",
        f"Their peaks differ, pair by pair and paired by seed, by less than 0.2. {ONLY_SKILLED}",
        _alike,
        CORE,
    ),
    Claim(
        "mla-average-deposit",
        f"{V1}, 1 and 5.2",
        "MLA has a more distributed, average deposit.",
        f"Effective heads, mean over the layers, MLA less RoPE, paired by seed: above 0. {ONLY_SKILLED}",
        _mla_average,
        CORE,
    ),
    Claim(
        "dropout-keeps-deposit",
        f"{V1}, Remark C.1",
        "The deposit is not removed by ordinary dropout.",
        f"RoPE trained with dropout 0.1 has a single-head layer, and its peak less that of RoPE as the scale has it, "
        f"paired by seed, is above -0.1. {ONLY_SKILLED}",
        _dropout,
        "others",
    ),
    Claim(
        "partial-below-full",
        f"{V1}, 5.1, Fig. 5",
        "With only a handful of rotating heads, Task 1 stays a little below what full RoPE reaches.",
        "RoPE less RoPE on 1, 2 and 3 heads, paired by seed: between 0 and 0.1, each.",
        _partial_below,
        "partial",
    ),
    Claim(
        "partial-hurts-count",
        f"{V1}, 5.1, Fig. 5",
        "Partial RoPE harms generalisation on Task 2.",
        "NoPE less RoPE on 1 and on 2 heads on Task 2, paired by seed: above 0, each.",
        _partial_count,
        "partial",
    ),
    Claim(
        "partial-moves-deposit",
        f"{V1}, C.3",
        "Under partial RoPE the largest deposit may lie in the second or third layer, and the first may have none.",
        "In some model of partial RoPE the largest drop lies after the first layer; in some the first layer is not "
        f"single-head and a later one is. {ONLY_SKILLED}",
        _partial_moves,
        "partial",
    ),
)
