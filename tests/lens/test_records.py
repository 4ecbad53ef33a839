"""Records of wrong shapes are refused where they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from toeplens.ground import InputError
from toeplens.lens import HeadAblation, HeadSets, PermutationScores, PositionEffect
from toeplens.lens.ablation.margins import Margins, margins
from toeplens.lens.following.permutation import Scores
from toeplens.lens.gradients.statistics import Pool, Strength

TABLE = np.arange(6.0).reshape(2, 3)
SCORES = Scores(TABLE, TABLE, TABLE, TABLE)
CURVE = np.arange(7.0)
ORDER = [[layer, head] for layer in range(2) for head in range(3)]


def strength() -> Strength:
    pool = Pool(16, bootstrap=3)
    pool.add(np.random.default_rng(0).normal(size=(16, 2, 3, 4)))
    return pool.strength(np.array([8, 16]))


CASES: list[tuple[Any, dict[str, Any]]] = [
    (
        HeadAblation(TABLE, TABLE, TABLE, 1.0, np.zeros((2, 4)), 10, 0.1),
        {"drops": [1.0, 2.0], "low": [[1.0]], "high": TABLE[:1].tolist(), "cumulative": TABLE.tolist()},
    ),
    (
        HeadSets(1.0, 0.1, 10, CURVE, CURVE, np.stack((CURVE, CURVE)), ORDER, ORDER[:2], 0.9, 0.95),
        {"greedy": [1.0], "importance": [[1.0]], "random": [CURVE[1:].tolist()], "order": ORDER[1:]},
    ),
    (
        PermutationScores(SCORES, SCORES, (4, 4), 8, 0, (0, 1), ("none", "none")),
        {"logits": Scores(TABLE, TABLE[:1], TABLE, TABLE).__dict__, "queries": [4]},
    ),
    (
        PositionEffect(TABLE, TABLE, TABLE, (True, True), (False, False), 4),
        {"total": [1.0], "exact": [True], "variance": TABLE[:1].tolist()},
    ),
    (margins(1 + TABLE), {"ratio": [1.0], "gamma": [], "leaders": [0]}),
    (strength(), {"share": [[1.0]], "exponent_low": 1.0}),
]


@pytest.mark.parametrize(("record", "damages"), CASES, ids=[type(record).__name__ for record, _ in CASES])
def test_a_record_of_other_shapes_is_refused(record: Any, damages: dict[str, Any]) -> None:
    content = record.to_dict()
    assert type(record).from_dict(content).to_dict() == content
    for name, damage in damages.items():
        with pytest.raises(InputError, match="the record is damaged"):
            type(record).from_dict(content | {name: damage})


def test_older_records_of_traces_have_one_count_of_queries() -> None:
    content = PermutationScores(SCORES, SCORES, 4, 8, 0, (0, 1), ("none", "none")).to_dict()
    assert content["queries"] == 4
    assert PermutationScores.from_dict(content).queries == 4


def test_margins_of_nothing_read_back() -> None:
    empty = margins(np.zeros((1, 2)))
    assert Margins.from_dict(empty.to_dict()).leaders == (None,)
