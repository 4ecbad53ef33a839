"""What silencing heads costs a model: at a moment, by a measure, and what no head tells from nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.papers.deposit.worlds import LAYERS, NATS, SINGLE, SPREAD, Model, made_up

from toeplens.engine.head_watch import MOMENTS
from toeplens.lens import HeadAblation
from toeplens.papers.deposit.measured import END, Look, look_at
from toeplens.studies import Key
from toeplens.training.presets import COUNT, DISTANCE

KEY = Key("paper", DISTANCE, "rope", 0)
ROPE = Model(0.9).single(1)  # of a skill of 0.8 in accuracy over the guess
WHOLE = slice(None)
cost = st.integers(0, 20).map(lambda n: n / 20)


def seen(costs: Any) -> Look:
    return Look(np.array(costs, dtype=float))


def look(model: Model, *how: Any) -> Look:
    found = look_at(made_up(KEY, model), *how)
    assert found is not None
    return found


def test_costs_are_shares_of_the_skill_or_nats() -> None:
    assert look(ROPE).costs == pytest.approx(np.array([SPREAD, SINGLE, SPREAD, SPREAD]) / 0.8)
    assert look(ROPE, END, "loss").costs == pytest.approx(NATS * np.array(ROPE.drops))
    assert look(replace(ROPE, accuracy=0.5)).largest() == pytest.approx(0.6 / 0.4), "more of a smaller skill"


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_moment_is_what_was_watched_there_and_nothing_else(moment: str) -> None:
    earlier = replace(ROPE, looks=((moment, (SPREAD,) * LAYERS),))
    assert look(earlier, moment).largest() == pytest.approx(0.02 / 0.8)
    assert look(earlier, moment, "loss").largest() == pytest.approx(0.02 * NATS)
    assert look(earlier).largest() == pytest.approx(0.6 / 0.8)
    for other in MOMENTS.keys() - {moment}:
        assert look_at(made_up(KEY, earlier), other) is None
    assert look_at(made_up(Key("paper", COUNT, "rope", 0), ROPE), moment) is None, "nobody watched"


def test_where_training_ended_at_a_moment_the_finished_model_is_what_was_seen_there() -> None:
    """Else only the models that went on would count at it, which are not a fair choice of all."""
    cell = made_up(KEY, ROPE.seen("able"))
    *before, last = cell.watched
    rows = [*before, last | {"events": ["plateau"]}]
    for measure in ("accuracy", "loss"):
        found = look_at(replace(cell, watched=rows), "plateau", measure)
        assert found is not None
        assert (found.costs == look(ROPE, END, measure).costs).all()
    assert look_at(cell, "plateau") is None


def test_models_without_skill_or_ablation_have_no_look() -> None:
    for measure in ("accuracy", "loss"):
        assert look_at(made_up(KEY, replace(ROPE, accuracy=0.3)), END, measure) is None
        assert look_at(made_up(KEY, replace(ROPE, status="diverged")), END, measure) is None
    bare = replace(made_up(KEY, ROPE), by_loss=None)
    assert look_at(bare, END, "loss") is None
    assert look_at(bare) is not None
    weak = replace(ROPE, accuracy=0.3, looks=(("able", ROPE.drops),))
    assert look_at(made_up(KEY, weak), "able") is None, "by the accuracy of that moment"


def test_a_head_whose_interval_holds_nothing_costs_nothing() -> None:
    cell = made_up(KEY, ROPE)
    assert cell.ablation is not None

    def told(**ends: Any) -> np.ndarray:
        given: HeadAblation = replace(cell.ablation, **ends)  # type: ignore[type-var]
        found = look_at(replace(cell, ablation=given))
        assert found is not None
        return found.costs

    drops = cell.ablation.drops
    unsure = drops - 0.02
    assert told(low=unsure)[0] == pytest.approx(0.0), "an interval that begins at 0"
    assert told(low=unsure)[1, 0] == pytest.approx(0.75)
    assert not told(low=np.full_like(drops, -0.1)).any()
    assert told(low=np.full_like(drops, math.nan)) == pytest.approx(look_at(cell).costs), "without intervals all count"  # type: ignore[union-attr]
    assert not told(drops=-drops, low=-drops).any(), "whose loss is a gain"


# ---- what is read off the costs --------------------------------------------------------------------------------------


@given(st.lists(st.lists(cost, min_size=4, max_size=4), min_size=1, max_size=4))
def test_what_is_read_off_the_costs(costs: list[list[float]]) -> None:
    found, flat = seen(costs), sorted((each for row in costs for each in row), reverse=True)
    assert found.largest() == flat[0]
    assert found.second() == flat[1]
    assert found.second(slice(0, 1)) == sorted(costs[0])[-2]
    assert found.second_smallest(slice(0, 1)) == sorted(costs[0])[1]
    assert found.total == pytest.approx(sum(flat))
    assert found.matter == sum(each > 0 for each in flat)
    assert found.largest(slice(1, None)) == max((each for row in costs[1:] for each in row), default=0.0)
    if found.matter:
        assert found.effective_heads == pytest.approx(sum(flat) ** 2 / sum(each**2 for each in flat))
        assert 1 <= found.layer <= len(costs)
        assert found.top == pytest.approx(flat[0] / sum(flat))
    else:
        assert math.isnan(found.top)
        assert math.isnan(found.effective_heads)
        assert math.isnan(found.layer)


def test_the_layer_is_that_of_the_costliest_head_and_of_several_the_mean() -> None:
    assert seen([[0.1, 0.2], [0.5, 0.0]]).layer == 2
    assert seen([[0.5, 0.5], [0.1, 0.0]]).layer == 1
    assert seen([[0.5, 0.0], [0.1, 0.0], [0.0, 0.5]]).layer == 2, "a tie is not decided for the first"
