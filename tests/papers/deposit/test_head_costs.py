"""What silencing heads costs a model: at a moment, by a measure, and what no head tells from nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.papers.deposit.synthetic_studies import LAYERS, NATS, SINGLE, SPREAD, SyntheticModel, make_cell

from toeplens.engine.head_probe import EVENTS
from toeplens.lens import HeadAblation
from toeplens.papers.deposit.measures import END, HeadCosts, head_costs
from toeplens.studies import CellKey
from toeplens.training.presets import COUNT, DISTANCE

KEY = CellKey("paper", DISTANCE, "rope", 0)
ROPE = SyntheticModel(0.9).single_head(1)  # of a skill of 0.8 in accuracy over the guess
WHOLE = slice(None)
cost = st.integers(0, 20).map(lambda n: n / 20)


def probed_costs(costs: Any) -> HeadCosts:
    return HeadCosts(np.array(costs, dtype=float))


def head_costs_of(model: SyntheticModel, *how: Any) -> HeadCosts:
    result = head_costs(make_cell(KEY, model), *how)
    assert result is not None
    return result


def test_costs_are_shares_of_the_skill_or_nats() -> None:
    assert head_costs_of(ROPE).effects == pytest.approx(np.array([SPREAD, SINGLE, SPREAD, SPREAD]) / 0.8)
    assert head_costs_of(ROPE, END, "loss").effects == pytest.approx(NATS * np.array(ROPE.drops))
    assert head_costs_of(replace(ROPE, accuracy=0.5)).largest() == pytest.approx(0.6 / 0.4), "more of a smaller skill"


@pytest.mark.parametrize("moment", EVENTS)
def test_a_probe_step_uses_only_its_own_row(moment: str) -> None:
    earlier = replace(ROPE, looks=((moment, (SPREAD,) * LAYERS),))
    assert head_costs_of(earlier, moment).largest() == pytest.approx(0.02 / 0.8)
    assert head_costs_of(earlier, moment, "loss").largest() == pytest.approx(0.02 * NATS)
    assert head_costs_of(earlier).largest() == pytest.approx(0.6 / 0.8)
    for other in EVENTS.keys() - {moment}:
        assert head_costs(make_cell(KEY, earlier), other) is None
    assert head_costs(make_cell(CellKey("paper", COUNT, "rope", 0), ROPE), moment) is None, "nobody watched"


def test_at_the_last_step_the_finished_model_is_used() -> None:
    """Else only the models that went on would count at it, which are not a fair choice of all."""
    cell = make_cell(KEY, ROPE.with_probes("able"))
    *before, last = cell.probe_rows
    rows = [*before, last | {"events": ["plateau"]}]
    for measure in ("accuracy", "loss"):
        actual = head_costs(replace(cell, probe_rows=rows), "plateau", measure)
        assert actual is not None
        assert (actual.effects == head_costs_of(ROPE, END, measure).effects).all()
    assert head_costs(cell, "plateau") is None


def test_models_without_skill_or_ablation_have_no_head_costs() -> None:
    for measure in ("accuracy", "loss"):
        assert head_costs(make_cell(KEY, replace(ROPE, accuracy=0.3)), END, measure) is None
        assert head_costs(make_cell(KEY, replace(ROPE, status="diverged")), END, measure) is None
    bare = replace(make_cell(KEY, ROPE), by_loss=None)
    assert head_costs(bare, END, "loss") is None
    assert head_costs(bare) is not None
    weak = replace(ROPE, accuracy=0.3, looks=(("able", ROPE.drops),))
    assert head_costs(make_cell(KEY, weak), "able") is None, "by the accuracy of that moment"


def test_a_head_whose_interval_contains_0_costs_nothing() -> None:
    cell = make_cell(KEY, ROPE)
    assert cell.ablation is not None

    def told(**ends: Any) -> np.ndarray:
        given: HeadAblation = replace(cell.ablation, **ends)  # type: ignore[type-var]
        actual = head_costs(replace(cell, ablation=given))
        assert actual is not None
        return actual.effects

    drops = cell.ablation.drops
    unsure = drops - 0.02
    assert told(low=unsure)[0] == pytest.approx(0.0), "an interval that begins at 0"
    assert told(low=unsure)[1, 0] == pytest.approx(0.75)
    assert not told(low=np.full_like(drops, -0.1)).any()
    assert told(low=np.full_like(drops, math.nan)) == pytest.approx(head_costs(cell).effects), (
        "without intervals all count"
    )  # type: ignore[union-attr]
    assert not told(drops=-drops, low=-drops).any(), "whose loss is a gain"


# ---- what is read off the costs --------------------------------------------------------------------------------------


@given(st.lists(st.lists(cost, min_size=4, max_size=4), min_size=1, max_size=4))
def test_statistics_of_the_head_costs(costs: list[list[float]]) -> None:
    actual, flat = probed_costs(costs), sorted((each for row in costs for each in row), reverse=True)
    assert actual.largest() == flat[0]
    assert actual.second_largest() == flat[1]
    assert actual.second_largest(slice(0, 1)) == sorted(costs[0])[-2]
    assert actual.second_smallest(slice(0, 1)) == sorted(costs[0])[1]
    assert actual.total == pytest.approx(sum(flat))
    assert actual.num_significant == sum(each > 0 for each in flat)
    assert actual.largest(slice(1, None)) == max((each for row in costs[1:] for each in row), default=0.0)
    if actual.num_significant:
        assert actual.effective_heads == pytest.approx(sum(flat) ** 2 / sum(each**2 for each in flat))
        assert 1 <= actual.largest_layer <= len(costs)
        assert actual.top_share == pytest.approx(flat[0] / sum(flat))
    else:
        assert math.isnan(actual.top_share)
        assert math.isnan(actual.effective_heads)
        assert math.isnan(actual.largest_layer)


def test_the_layer_is_that_of_the_costliest_head_or_the_mean_of_several() -> None:
    assert probed_costs([[0.1, 0.2], [0.5, 0.0]]).largest_layer == 2
    assert probed_costs([[0.5, 0.5], [0.1, 0.0]]).largest_layer == 1
    assert probed_costs([[0.5, 0.0], [0.1, 0.0], [0.0, 0.5]]).largest_layer == 2, "a tie is not decided for the first"
