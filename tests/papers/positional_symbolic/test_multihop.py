"""The claims about multi-hop tasks on made-up studies: each holds on the abstract's results, and fails on others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tests.papers.positional_symbolic.test_claims import SyntheticModel, cell
from tests.studies import measures

from toeplens.papers.positional_symbolic.claims import MULTIHOP, ClaimData
from toeplens.studies import CellResult, Results, Verdict, grid, judge_all

SPEC = grid.read_spec("multihop")


@dataclass(frozen=True)
class HopModel:
    """A made-up model of one layer of two heads.

    shares   positional and symbolic share of each head
    effects  loss without each head
    purity   of both heads at the checkpoints before the end, where it is that of ``shares``
    curve    accuracy at the checkpoints
    """

    accuracy: float = 0.9
    shares: tuple[tuple[float, float], tuple[float, float]] = ((0.95, 0.02), (0.05, 0.9))
    effects: tuple[float, float] = (2.0, 1.0)
    kept: float = 0.5
    purity: tuple[float, ...] = (0.5, 0.6, 0.7)
    curve: tuple[float, ...] = (0.1, 0.3, 0.6, 0.9)


NUMBER = HopModel()
LETTER = HopModel(shares=((0.02, 0.97), (0.03, 0.95)), kept=0.9)
ABSTRACT = {
    ("number", "gptj"): NUMBER,
    ("letter", "gptj"): LETTER,
    ("number", "nope"): replace(NUMBER, accuracy=0.15),
    ("letter", "nope"): LETTER,
}


def hop_cell(task: str, label: str, seed: int, model: HopModel) -> CellResult:
    positional, symbolic = (np.array([[head[n] for head in model.shares]]) for n in (0, 1))
    made = cell(task, label, seed, SyntheticModel(accuracy=model.accuracy + 0.001 * seed, kept=model.kept))
    assert made.by_loss is not None
    effects = np.array([model.effects])
    probed: list[dict[str, Any]] = [
        {"step": step, "accuracy": accuracy, "positional": [[purity + 0.01 * seed] * 2], "symbolic": [[0.1, 0.1]]}
        for step, (purity, accuracy) in enumerate(zip(model.purity, model.curve[:-1], strict=True))
    ]
    ends = {"positional": positional.tolist(), "symbolic": symbolic.tolist()}
    probed.append({"step": 9, "accuracy": model.curve[-1], **ends})
    behaviour = measures.behaviour(*(x.tolist() for x in (positional, symbolic, 1 - positional - symbolic)))
    return replace(
        made,
        by_loss=replace(made.by_loss, drops=effects, low=effects, high=effects),
        probe_rows=probed,
        measures=made.measures | {"behaviour": behaviour},
    )


def verdicts(**changes: HopModel) -> dict[str, Verdict]:
    models = ABSTRACT | {tuple(name.split("_")): model for name, model in changes.items()}
    cells = [hop_cell(task, label, seed, model) for (task, label), model in models.items() for seed in range(8)]
    entries = judge_all(MULTIHOP, ClaimData(SPEC, Results(cells), []))
    return {entry.claim.id: entry.verdict for entry in entries}


def test_all_claims_hold_on_the_abstracts_results() -> None:
    assert verdicts() == {claim.id: "holds" for claim in MULTIHOP}


@pytest.mark.parametrize(
    ("claim", "verdict", "changes"),
    [
        ("multihop-learned", "fails", {"number_gptj": replace(NUMBER, accuracy=0.4)}),
        ("multihop-pure-heads", "fails", {"letter_gptj": replace(LETTER, purity=(0.95, 0.93, 0.94))}),
        ("multihop-pure-heads", "fails", {"number_gptj": replace(NUMBER, curve=(0.9, 0.6, 0.4, 0.3))}),
        ("number-needs-both", "fails", {"number_gptj": replace(NUMBER, effects=(2.0, 0.0))}),
        ("number-needs-both", "fails", {"number_gptj": replace(NUMBER, shares=LETTER.shares)}),
        ("letter-needs-symbolic", "fails", {"letter_gptj": replace(LETTER, shares=NUMBER.shares)}),
        ("letter-needs-symbolic", "holds in part", {"letter_nope": replace(LETTER, accuracy=0.15)}),
        ("symbolic-keeps-length", "fails", {"letter_gptj": replace(LETTER, kept=0.5)}),
    ],
)
def test_each_claim_fails_on_other_results(claim: str, verdict: Verdict, changes: dict[str, HopModel]) -> None:
    assert verdicts(**changes)[claim] == verdict
