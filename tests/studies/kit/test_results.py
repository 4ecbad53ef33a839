"""Results are found and kept, and what is read off a learning curve is what a hand reckons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.papers.deposit.worlds import Model, distance, made_up, results

from toeplens.studies import CellResult, Key, Results
from toeplens.studies.kit.results import ACCURACY
from toeplens.studies.kit.verdicts import above
from toeplens.training.presets import COUNT, DISTANCE

value = st.integers(-100, 100).map(lambda n: n / 100)
KEY = Key("paper", DISTANCE, "rope", 0)


def curve(*rows: tuple[float, float], result: dict[str, Any] | None = None, **columns: Sequence[float]) -> CellResult:
    """A model whose guess from the length is 20 %, by train and test accuracy after each epoch."""
    told = [
        {"epoch": n, "train_accuracy": train, "test_accuracy": test, **{k: more[n - 1] for k, more in columns.items()}}
        for n, (train, test) in enumerate(rows, start=1)
    ]
    last = {"test_accuracy": rows[-1][1], "seconds": 1.0, **(result or {})}
    return replace(made_up(KEY, Model(0.5)), length_chance=0.2, epochs=told, result=last)


# ---- learning curves -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ([0.6 + 1e-9], 1.0),  # half of what is over 20 % is learned at 60 %
        ([1.0], 0.5),  # in a straight line from the guess
        ([0.4, 0.8], 1.5),  # skill 0.25, then 0.75
        ([0.1, 0.2, 1.0], 2.5),  # what is under the guess is no skill either
        ([0.5, 0.3, 0.9], 2 + (0.5 - 0.125) / (0.875 - 0.125)),  # from where it fell to
        ([0.9, 0.1, 0.1], 0.5 / 0.875),  # the first time
        ([0.2, 0.3, 0.4, 0.5], 4.0),  # never: all its epochs
    ],
)
def test_half_is_learned_where_a_straight_line_crosses_it(train: list[float], expected: float) -> None:
    cell = curve(*((each, 0.5) for each in train))
    assert cell.half_learned == pytest.approx(math.log2(expected), abs=1e-8)
    assert cell.learned_half == (max(train) > 0.59)


def test_half_is_learned_of_what_was_measured_after_the_epoch_where_it_was() -> None:
    rows = ((0.4, 0.5), (0.5, 0.6))
    assert curve(*rows, fit_accuracy=[0.6, 0.9]).half_learned == pytest.approx(0.0)
    partly = curve(*rows, fit_accuracy=[None, 0.8])  # type: ignore[list-item]
    assert partly.half_learned == pytest.approx(math.log2(1.5)), "where no example counted, the running one"


@pytest.mark.parametrize(
    ("test", "expected"),
    [([0.5], 0.0), ([0.3, 0.5, 0.9], 0.0), ([0.5, 0.4, 0.6, 0.3], 0.4), ([0.9, 0.8, 0.79], 0.1), ([0.5, 0.5], 0.0)],
)
def test_setbacks_are_all_falls_that_can_be_seen_together(test: list[float], expected: float) -> None:
    assert curve(*((0.5, each) for each in test)).setbacks == pytest.approx(expected)


@pytest.mark.parametrize(
    ("test", "result", "expected"),
    [
        # without a rule of its run: under two points in the last epoch
        ([0.1, 0.5, 0.519], {}, True),
        ([0.5, 0.521], {}, False),
        ([0.9], {}, False),
        # by the run's rule, whatever the curve
        ([0.5, 0.5], {"plateau": None}, False),
        ([0.5, 0.9], {"plateau": 3}, True),
    ],
)
def test_a_model_has_stopped_learning_by_its_own_rule_or_by_two_points(
    test: list[float], result: dict[str, Any], expected: bool
) -> None:
    cell = curve(*((0.5, each) for each in test), result=result)
    assert cell.settled == expected
    assert not replace(cell, status="diverged").settled
    assert ACCURACY.counts(cell) == expected
    assert ACCURACY.counts(replace(cell, status="diverged")), "it is known to have no accuracy"


def test_skill_is_a_share_of_what_the_length_does_not_give_away() -> None:
    assert curve((0.5, 0.6)).skill == pytest.approx(0.5)
    assert curve((0.5, 0.1)).skill == pytest.approx(-0.125)
    assert [curve((0.5, test)).skilled for test in (0.39, 0.41)] == [False, True]


def test_of_a_run_that_diverged_nothing_is_known() -> None:
    gone = replace(curve((0.9, 0.9)), status="diverged")
    assert np.isnan([gone.accuracy, gone.skill, gone.half_learned, gone.setbacks, gone.fit]).all()
    assert not gone.skilled
    assert not gone.learned_half


# ---- found and kept --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["complete", "diverged"])
def test_a_cell_reads_back_as_it_was(status: str) -> None:
    for cell in results(distance(rope=Model(0.8, status=status).single(0)), seeds=2).cells:
        again = CellResult.from_dict(cell.to_dict())
        assert again.to_dict() == cell.to_dict()
        assert again.key == cell.key
        assert bool(cell.measures) == bool(cell.by_loss) == (status == "complete")


@given(st.dictionaries(st.integers(0, 5), value), st.dictionaries(st.integers(0, 5), value))
def test_two_encodings_are_compared_over_all_their_models(first: dict[int, float], second: dict[int, float]) -> None:
    """Not in pairs: a seed that only one of them has counts too."""
    cells = [
        made_up(Key("paper", COUNT, label, seed), Model(figure))
        for label, figures in (("rope", first), ("nope", second))
        for seed, figure in sorted(figures.items())
    ]
    seen = Results(cells).difference(COUNT, "rope", "nope")
    (one, ours), (other, theirs) = seen.terms
    assert (one, other) == (1, -1)
    assert sorted(ours) == sorted(first.values())
    assert sorted(theirs) == sorted(second.values())


def test_a_comparison_without_models_says_why() -> None:
    rising, settled = Model(0.9, settled=False), Model(0.5)
    seen = Results(results({(COUNT, "rope"): rising}, 3).cells + results({(COUNT, "nope"): settled}, 1).cells)
    found = above("RoPE less NoPE", seen.difference(COUNT, "rope", "nope"), 0.0)
    words = "no finished run that counts (3 of 3 and 0 of 1 models excluded: still learning)"
    assert found.evidence == f"RoPE less NoPE: {words}"
    none = above("RoPE less ALiBi", seen.difference(COUNT, "rope", "alibi"), 0.0)
    assert none.evidence.endswith(f"(no finished model of alibi on {COUNT})")
