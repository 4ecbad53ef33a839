"""Claims about heads: is the skill deposited in one head, where, and under which encodings?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from toeplens.papers.deposit.claims.common import (
    FINAL,
    V1,
    able,
    against,
    between,
    both_positions,
    compare,
    core,
    full_rope,
    models,
    none,
    others,
    over,
    partially,
    under,
)
from toeplens.papers.deposit.labels import Label, title
from toeplens.studies.kit.claims import Claim, every
from toeplens.studies.kit.results import ONLY_SKILLED, CellResult, Figure, Results
from toeplens.studies.kit.verdicts import Finding, found, seen
from toeplens.training.presets import COUNT, DISTANCE

_FIRST, _LATER = slice(0, 1), slice(1, None)
_PEAK = Figure("peak, ", lambda cell: cell.peak, able)
_SPREAD = Figure(
    "effective heads, mean over the layers, ",
    lambda cell: float(np.mean([layer.effective_heads for layer in cell.deposits()])),
    able,
)
_NO_DEPOSIT_NEEDED = ("nope", "alibi", "relative", "absolute")


def _single_head(layers: slice = slice(None)) -> Callable[[CellResult], bool]:
    """Whether a layer of a model, among ``layers``, is single-head."""
    return lambda cell: any(layer.kind == "single-head" for layer in cell.deposits()[layers])


def _in_first_layer(rank: int) -> Callable[[CellResult], float]:
    """What is lost with the head of the first layer that is ``rank``th, from the least on."""
    return lambda cell: float(np.sort(cell.ablation.drops[0])[rank]) if cell.ablation else np.nan


def _second(cell: CellResult) -> float:
    return float(np.sort(cell.ablation.drops.ravel())[-2]) if cell.ablation else np.nan


def _shallow(cell: CellResult) -> bool:
    return _single_head(slice(0, max(1, len(cell.deposits()) // 2)))(cell)


def _only_rope(results: Results) -> list[Finding]:
    findings = []
    for label in _NO_DEPOSIT_NEEDED:
        cells = results.of(DISTANCE, label)
        if any(map(able, cells)):
            findings += models(label, (f"{title(label)} has a single-head layer", _single_head(), none))(results)
        else:
            why = "learned too little for its heads to matter" if cells else "has no finished run"
            findings.append(Finding("undecided", f"{title(label)} {why}"))
    return findings


def _displaced(results: Results) -> list[Finding]:
    return models(
        both_positions(results),
        ("RoPE + sinusoid: largest drop in the first layer", _in_first_layer(-1), under(0.1)),
        ("RoPE + sinusoid: a layer after the first is single-head", _single_head(_LATER), seen),
    )(results)


def _few_heads_suffice(results: Results) -> list[Finding]:
    # the partial-RoPE program has no sinusoid, so it is compared with RoPE alone
    pairs = [(label, full_rope(results)) for label in ("partial-1", "partial-2")]
    return compare(DISTANCE, pairs, test=over(-0.05))(results)


def _partial_below(results: Results) -> list[Finding]:
    pairs = against(full_rope(results), "partial-1", "partial-2", "partial-3")
    return compare(DISTANCE, pairs, test=between(0.0, 0.1))(results)


def _partial_moves(results: Results) -> list[Finding]:
    labels = [label for label in results.labels(DISTANCE) if Label.parse(label).heads is not None]
    cells = [cell for label in labels for cell in results.of(DISTANCE, label) if able(cell)]
    first, later = _single_head(_FIRST), _single_head(_LATER)
    return [
        found(
            "partial RoPE: the largest drop lies after the first layer",
            [bool(np.argmax([layer.peak for layer in cell.deposits()])) for cell in cells],
        ),
        found(
            "partial RoPE: the first layer is not single-head and a later one is",
            [not first(cell) and later(cell) for cell in cells],
        ),
    ]


CLAIMS: tuple[Claim[Results], ...] = (
    core(
        "deposit-first-layer",
        f"{FINAL}, 5",
        "Removing one first-layer head of RoPE costs about 60 points on Task 1; other heads have little effect.",
        "RoPE's first layer is single-head, its largest drop over 0.5, and the next largest "
        "drop of any head in any layer under 0.25. Only models with skill of at least 0.25 count.",
        models(
            "rope",
            ("RoPE's first layer is single-head", _single_head(_FIRST), seen),
            ("RoPE's largest first-layer drop", _in_first_layer(-1), over(0.5)),
            ("the second largest drop of any head", _second, under(0.25)),
        ),
    ),
    core(
        "deposit-shallow",
        f"{V1}, 5.1",
        "Under RoPE one shallow head carries the positional work of Task 1.",
        "Some layer in the first half of RoPE's layers is single-head. Only models with skill of at least 0.25 count.",
        models("rope", ("a layer in RoPE's first half is single-head", _shallow, seen)),
    ),
    core(
        "deposit-only-rope",
        f"{V1}, 5.1",
        "No such deposit appears under NoPE, ALiBi, relative or absolute encodings.",
        "None of them has a single-head layer; one that learned less than a skill of 0.25 is undecided.",
        _only_rope,
    ),
    core(
        "deposit-not-task2",
        f"{V1}, 5.1",
        "RoPE shows no deposit on Task 2.",
        "No layer of RoPE on Task 2 is single-head. Only models with skill of at least 0.25 count.",
        models("rope", ("RoPE has a single-head layer on Task 2", _single_head(), none), task=COUNT),
    ),
    core(
        "mla-removes-deposit",
        f"{V1}, 5.2",
        "Under MLA no single head is indispensable for Task 1.",
        "No layer of MLA is single-head. Only models with skill of at least 0.25 count.",
        models("mla", ("MLA has a single-head layer", _single_head(), none)),
    ),
    core(
        "rope-absolute-moves-deposit",
        f"{V1}, 5.2, Fig. 6",
        "With a sinusoid at the input RoPE's deposit leaves the first layer and reappears from the second on.",
        "RoPE + sinusoid: largest first-layer drop under 0.1, and some later layer single-head.",
        _displaced,
    ),
    core(
        "one-or-two-heads-suffice",
        f"{FINAL}, 5",
        "RoPE on one or two heads does about as well on Task 1 as RoPE on all.",
        "RoPE on 1 head, and on 2 heads, less full RoPE, paired by seed: above -0.05, each.",
        _few_heads_suffice,
    ),
    core(
        "deposit-more-under-rope",
        f"{V1}, 3.3",
        "The deposit is more prominent under RoPE than under encodings with less structure.",
        f"Peak (largest loss by one head as a share of the skill) of RoPE less that of NoPE, ALiBi, relative and "
        f"absolute, paired by seed: above 0, each. {ONLY_SKILLED}",
        compare(DISTANCE, against("rope", *_NO_DEPOSIT_NEEDED), _PEAK),
    ),
    core(
        "absolute-uneven",
        f"{V1}, C.2",
        "Absolute encoding has some significant and some insignificant heads in the shallow layer.",
        f"In its first layer the largest drop is above 0.1 and the smallest below 0.02. {ONLY_SKILLED}",
        models(
            "absolute",
            ("Absolute: largest drop in the first layer", _in_first_layer(-1), over(0.1)),
            ("Absolute: smallest drop in the first layer", _in_first_layer(0), under(0.02)),
        ),
    ),
    core(
        "nope-relative-alibi-alike",
        f"{V1}, C.2",
        "NoPE, relative and ALiBi spread position over their heads alike.",
        f"Their peaks differ, pair by pair and paired by seed, by less than 0.2. {ONLY_SKILLED}",
        compare(
            DISTANCE,
            (("nope", "relative"), ("nope", "alibi"), ("relative", "alibi")),
            _PEAK,
            between(-0.2, 0.2),
        ),
    ),
    core(
        "mla-average-deposit",
        f"{V1}, 1 and 5.2",
        "MLA has a more distributed, average deposit.",
        f"Effective heads, mean over the layers, MLA less RoPE, paired by seed: above 0. {ONLY_SKILLED}",
        compare(DISTANCE, against("mla", "rope"), _SPREAD),
    ),
    others(
        "dropout-keeps-deposit",
        f"{V1}, Remark C.1",
        "The deposit is not removed by ordinary dropout.",
        f"RoPE trained with dropout 0.1 has a single-head layer, and its peak less that of RoPE as the scale has it, "
        f"paired by seed, is above -0.1. {ONLY_SKILLED}",
        every(
            models("rope/dropout", ("RoPE with dropout has a single-head layer", _single_head(), seen)),
            compare(
                DISTANCE,
                against("rope/dropout", "rope"),
                _PEAK,
                over(-0.1),
                "peak, RoPE with dropout - RoPE",
            ),
        ),
    ),
    partially(
        "partial-below-full",
        f"{V1}, 5.1, Fig. 5",
        "With only a handful of rotating heads, Task 1 stays a little below what full RoPE reaches.",
        "RoPE less RoPE on 1, 2 and 3 heads, paired by seed: between 0 and 0.1, each.",
        _partial_below,
    ),
    partially(
        "partial-hurts-count",
        f"{V1}, 5.1, Fig. 5",
        "Partial RoPE harms generalisation on Task 2.",
        "NoPE less RoPE on 1 and on 2 heads on Task 2, paired by seed: above 0, each.",
        compare(COUNT, against("nope", "partial-1", "partial-2")),
    ),
    partially(
        "partial-moves-deposit",
        f"{V1}, C.3",
        "Under partial RoPE the largest deposit may lie in the second or third layer, and the first may have none.",
        "In some model of partial RoPE the largest drop lies after the first layer; in some the first layer is not "
        f"single-head and a later one is. {ONLY_SKILLED}",
        _partial_moves,
    ),
)
