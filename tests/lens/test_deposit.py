"""The deposit's statistics are their definitions, and its kinds are what their thresholds say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.lens import HeadAblation, LayerDeposit, deposit, gini
from toeplens.utils import InputError

CHANCE = 0.1
# multiples of 1/1024: sums, differences and doublings of them are exact
drop = st.integers(-512, 1024).map(lambda n: n / 1024)
drops_of_a_layer = st.lists(drop, min_size=1, max_size=9)


def make_ablation(
    *layers: list[float], accuracy: float = 0.9, chance: float = CHANCE, curves: list[list[float]] | None = None
) -> HeadAblation:
    """An ablation with these drops; without curves, drops of one layer add up as far as accuracy 0."""
    drops = np.array(layers, dtype=float)
    if curves is None:
        ordered = -np.sort(-drops, axis=1)
        lost = np.concatenate((np.zeros((len(drops), 1)), np.cumsum(ordered, axis=1)), axis=1)
        cumulative = np.clip(accuracy - lost, 0, 1)
    else:
        cumulative = np.array(curves, dtype=float)
    return HeadAblation(drops, drops, drops, accuracy, cumulative, 1000, chance)


def deposit_of(drops: list[float], **given: Any) -> LayerDeposit:
    return deposit(make_ablation(drops, **given))[0]


def gini_of_pairs(values: list[float]) -> float:
    """Half the relative mean absolute difference, over all pairs."""
    count, total = len(values), sum(values)
    return sum(abs(a - b) for a in values for b in values) / (2 * count * total) if total else 0.0


@given(drops_of_a_layer)
def test_every_statistic_is_its_definition(drops: list[float]):
    actual = deposit_of(drops)
    skill = 0.9 - CHANCE
    d = [max(x, 0.0) for x in drops]
    first, second = sorted([*d, 0.0], reverse=True)[:2]
    assert actual.peak == pytest.approx(first / skill, rel=1e-12)
    assert actual.second == pytest.approx(second / skill, rel=1e-12)
    assert actual.lead == pytest.approx((first - second) / skill, rel=1e-12, abs=1e-15)
    assert actual.head == d.index(first)
    assert actual.gini == gini(np.array(d)) == pytest.approx(gini_of_pairs(d), abs=1e-12)
    if sum(d):
        assert actual.top_share == pytest.approx(first / sum(d), rel=1e-12)
        assert actual.effective_heads == pytest.approx(sum(d) ** 2 / sum(x * x for x in d), rel=1e-12)
    else:
        assert actual.top_share == actual.effective_heads == 0.0


def test_each_layer_has_its_own_statistics():
    actual = deposit(make_ablation([0.8, 0.0], [0.0, 0.1]))
    assert [layer.head for layer in actual] == [0, 1]
    assert actual == [deposit_of([0.8, 0.0]), deposit_of([0.0, 0.1])]


def curve(heads: int, gone_at: int | None, accuracy: float = 0.9) -> list[float]:
    """Accuracy with 0, 1, ... heads ablated: chance from ``gone_at`` on."""
    return [CHANCE if gone_at is not None and k >= gone_at else accuracy for k in range(heads + 1)]


KINDS = [  # kind, drops, curve or the number of heads from which on accuracy is chance, that of half of the skill
    # one head carries it
    ("single-head", [0.8, 0.0, 0.0, 0.0], 1, 1),
    ("single-head", [0.0, 0.4, 0.2, 0.1], 1, 1),  # just half of the skill, and the second just half of that
    ("single-head", [0.41, 0.0, 0.0, 0.0], None, None),
    ("single-head", [0.7], 1, 1),
    # two heads carry it
    ("few-head", [0.1, 0.1, 0.0, 0.0], 2, 2),
    ("few-head", [0.0] * 16, 4, 4),
    ("few-head", [0.39, 0.0, 0.0, 0.0], 2, 2),  # one head, but less than half of the skill
    ("few-head", [0.8, 0.41, 0.0, 0.0], 1, 1),  # the second is more than half of the first
    ("few-head", [0.1] * 3, [0.9, 0.51, 0.49, 0.2], 2),
    ("few-head", [0.2, 0.1, 0.1, 0.0, 0.0, 0.0], [0.9, 0.7, 0.4, 0.8, 0.8, 0.8, 0.8], 2),  # although three do not
    # many together carry it
    ("distributed", [0.1] * 4, 3, 3),
    ("distributed", [0.0] * 16, 5, 5),
    ("distributed", [0.2, 0.1, 0.1, 0.0, 0.0, 0.0], [0.9, 0.8, 0.8, 0.8, 0.4, 0.8, 0.8], 4),
    # the layer can be spared
    ("redundant", [0.1, 0.05, 0.0, 0.0], None, None),
    ("redundant", [-0.1] * 4, None, None),
    ("redundant", [0.2, 0.1, 0.1, 0.0, 0.0, 0.0], [0.9, 0.8, 0.7, 0.6, 0.6, 0.7, 0.8], None),
]


@pytest.mark.parametrize(("kind", "drops", "gone", "half_at"), KINDS)
def test_kinds_follow_the_thresholds(kind: str, drops: list[float], gone: Any, half_at: int | None):
    """Skill is 0.9 - 0.1, so half of it is gone at an accuracy of 0.5."""
    actual = deposit_of(drops, curves=[gone if isinstance(gone, list) else curve(len(drops), gone)])
    assert (actual.kind, actual.half_at) == (kind, half_at)


@given(drops_of_a_layer, st.floats(-0.5, 0.0499), st.booleans())
def test_a_model_without_skill_has_no_deposit(drops: list[float], over: float, flat: bool):
    curves = [curve(len(drops), None if flat else 1, accuracy=0.5 + over)]
    assert deposit_of(drops, accuracy=0.5 + over, chance=0.5, curves=curves).kind == "no-skill"


def test_at_or_below_chance_no_share_of_skill_is_defined():
    for accuracy in (CHANCE, CHANCE / 2):
        actual = deposit_of([0.05, 0.02], accuracy=accuracy)
        assert (actual.peak, actual.second, actual.lead, actual.half_at) == (0, 0, 0, None)
        assert actual.top_share == pytest.approx(5 / 7)


@pytest.mark.parametrize("metric", ["loss", "kl"])
def test_a_deposit_needs_the_accuracy_metric(metric: Any) -> None:
    with pytest.raises(InputError, match=f"ablation must have the metric 'accuracy' for a deposit, got '{metric}'"):
        deposit(replace(make_ablation([0.3, 0.2]), metric=metric))


def test_a_kind_needs_the_cumulative_part() -> None:
    """Without it not even half of the skill could be seen to go, and every layer would be redundant."""
    make = make_ablation([0.3, 0.2])
    with pytest.raises(InputError, match="ablation must include the cumulative part"):
        deposit(replace(make, cumulative=np.full_like(make.cumulative, np.nan)))
