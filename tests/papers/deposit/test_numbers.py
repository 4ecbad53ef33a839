"""A study's numbers from its cells to its tables: skill is over the length's guess, diverged models count nowhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.papers.deposit.numbers import ablated, behaviour, extrapolated, made, reproduced
from tests.studies import measures

from toeplens.papers.deposit import accuracy_table
from toeplens.studies import CellResult, Key, Results
from toeplens.studies.grid import grid_spec
from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.measured import matrix
from toeplens.studies.grid.relations import relations


def test_a_row_of_table_1() -> None:
    first, second, _, gone = reproduced()
    assert [first.peak, second.peak] == pytest.approx([0.5 / 0.7, 0.3 / 0.5]), "of what is over the guess"
    assert gone.deposits() == []
    rope, nope = accuracy_table(Results(reproduced()), ["paper"])
    assert (rope.label, rope.paper, rope.seeds, rope.diverged) == ("rope", 92.64, 2, 0)
    assert (rope.accuracy, rope.lowest, rope.highest) == (pytest.approx(0.8), 0.7, 0.9)
    assert (rope.largest_drop, rope.where) == (pytest.approx(0.4), "layer 1 head 1, layer 2 head 2")
    assert rope.kinds == ["single-head", "redundant"], "of the first seed"
    assert (rope.chance, rope.length_chance, rope.parameters) == (0.1, 0.2, 1000)
    assert (nope.label, nope.accuracy, nope.seeds, nope.diverged) == ("nope", 0.28, 2, 1)


# ---- a grid study ---------------------------------------------------------------------------------------------------

SPEC = grid_spec(
    {
        "tasks": {"index": {"options": {"length": 10, "words": 8}}},
        "encodings": {name: {} for name in ("rope", "nope", "alibi", "t5")},
        "seeds": 2,
        "training": {"train_examples": 64, "test_examples": 32, "epochs": 1},
    }
)


def grid_cell(label: str, seed: int, accuracy: float, *longer: float | None) -> CellResult:
    """Without its second head half of the skill is gone; that head is 0.2 positional, the first 0.8 and worth less."""
    half = (accuracy - 0.1) / 2
    return made(
        Key("paper", "index", label, seed),
        (accuracy,),
        ablated([[0.1, half]], [[accuracy, accuracy - half, 0.1]]),
        by_loss=replace(ablated([[0.1, half]], [[np.nan] * 3]), baseline=0.5, metric="loss"),
        measures={
            "behaviour": behaviour([[0.8, 0.2]], [[0.1, 0.6]]),
            "toeplitz": measures.toeplitz([[0.9, None]]),
            "extrapolation": extrapolated(accuracy, *longer),
        },
    )


GRID = [
    grid_cell("rope", 42, 0.9, 0.7, 0.55, None),
    grid_cell("rope", 43, 0.7, 0.55, 0.325, 0.1),
    grid_cell("nope", 42, 0.25, 0.2, 0.2, 0.2),
    replace(grid_cell("nope", 43, 0.9, 0.9, 0.9, 0.9), status="diverged"),
]


def test_skill_on_longer_texts_is_over_their_own_guess() -> None:
    first = GRID[0]
    assert heads.skill_at(first, 1.0) == pytest.approx((0.9 - 0.2) / 0.8)
    assert heads.skill_at(first, 1.5) == pytest.approx((0.55 - 0.1) / 0.9)
    assert heads.kept(first) == pytest.approx(0.5 / 0.875)
    assert np.isnan(heads.skill_at(first, 2.0)), "there is no such text"
    assert np.isnan(heads.kept(GRID[2])), "a model without skill keeps none"
    lower = extrapolated(0.9, 0.9, 0.55, 0.9)
    lower["rows"][2] |= {"chance": 0.3}
    assert heads.skill_at(replace(first, measures={"extrapolation": lower}), 1.5) == pytest.approx(0.25 / 0.7)


def test_a_row_of_the_matrix() -> None:
    rope, nope = matrix(SPEC, Results(GRID))
    assert (rope.label, rope.seeds, rope.diverged) == ("rope", 2, 0)
    assert (rope.accuracy, rope.lowest, rope.highest) == (pytest.approx(0.8), 0.7, 0.9)
    assert rope.skill == pytest.approx((0.875 + 0.625) / 2)
    assert rope.kept == pytest.approx((0.5 / 0.875 + 0.25 / 0.625) / 2)
    shares = [(0.1 * at[0] + half * at[1]) / (0.1 + half) for half in (0.4, 0.3) for at in ((0.8, 0.2), (0.1, 0.6))]
    assert rope.positional == pytest.approx(np.mean(shares[::2]))
    assert rope.symbolic == pytest.approx(np.mean(shares[1::2]))
    assert rope.toeplitz == pytest.approx(0.9)
    assert rope.peak == pytest.approx((0.4 / 0.7 + 0.3 / 0.5) / 2)
    assert (rope.rule, rope.rule_accuracy, rope.train_seconds) == ("bag", 0.3, 2.0)
    assert (nope.accuracy, nope.seeds, nope.diverged, nope.kept) == (0.25, 2, 1, None)


def test_the_points_of_a_relation_are_the_models_with_skill() -> None:
    found = relations(SPEC, Results([*GRID, grid_cell("t5", 42, 0.6, 0.5, 0.4, 0.3)]))
    at = {(one.figure, one.task, one.factor): one for one in found}
    one = at["deposit", None, 1.5]
    assert [(p.label, p.seed, p.task) for p in one.points] == [
        ("rope", 42, "index"),
        ("rope", 43, "index"),
        ("t5", 42, "index"),
    ]
    assert [p.figure for p in one.points] == pytest.approx([0.4 / 0.7, 0.3 / 0.5, 0.25 / 0.4])
    assert [p.kept for p in one.points] == pytest.approx([0.5 / 0.875, 0.25 / 0.625, (0.3 / 0.9) / (0.4 / 0.8)])
    assert (one.encodings, one.value) == (2, None), "four encodings at least say anything"
    assert [p.seed for p in at["deposit", None, 2.0].points] == [43, 42], "the first has no texts of that length"
    assert at["positional", None, 1.5].points[0].figure == pytest.approx((0.1 * 0.8 + 0.4 * 0.2) / 0.5)
