"""What is compared: Welch's and Student's intervals as scipy has them, and how many seeds would do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from toeplens.studies.kit.verdicts import GRAIN, MOST_TIMES, contrast, difference, of_one

NONE = 1e-12  # a grain that plays no part
value = st.integers(-100, 100).map(lambda n: n / 100)
several = st.lists(value, min_size=2, max_size=9)


def varied(*terms: list[float]) -> None:
    """Only where no term's spread is 0, which scipy leaves undefined."""
    assume(all(np.ptp(term) > 0 for term in terms))


@given(several, value)
def test_one_mean_is_compared_as_students_t_has_it(values: list[float], bar: float) -> None:
    varied(values)
    seen = of_one(values, NONE)
    test: Any = stats.ttest_1samp(values, bar, alternative="greater")
    assert seen.above(bar) == pytest.approx(float(test.pvalue), abs=1e-12)
    assert seen.below(bar) == pytest.approx(1 - float(test.pvalue), abs=1e-12)
    ends = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert seen.interval(0.05) == pytest.approx((ends.low, ends.high))
    assert seen.freedom == pytest.approx(len(values) - 1)


@given(several, several, st.sampled_from([0.01, 0.05, 0.3]))
def test_a_difference_is_compared_as_welchs_t_has_it(first: list[float], second: list[float], level: float) -> None:
    varied(first, second)
    seen = difference(first, second, NONE)
    test: Any = stats.ttest_ind(first, second, equal_var=False, alternative="greater")
    assert seen.above(0) == pytest.approx(float(test.pvalue), abs=1e-12)
    assert seen.below(0) == pytest.approx(1 - float(test.pvalue), abs=1e-12)
    assert seen.freedom == pytest.approx(float(test.df))
    ends = stats.ttest_ind(first, second, equal_var=False).confidence_interval(1 - level)
    assert seen.interval(level) == pytest.approx((ends.low, ends.high))


@given(several, several, value)
def test_a_weight_is_a_unit_of_the_figures(first: list[float], second: list[float], bar: float) -> None:
    weighed = contrast((1, first), (-0.5, second), grain=NONE)
    scaled = difference(first, [each / 2 for each in second], NONE)
    assert weighed.value == pytest.approx(scaled.value)
    varied(first, second)
    assert weighed.above(bar) == pytest.approx(scaled.above(bar))
    assert weighed.freedom == pytest.approx(scaled.freedom)


def test_models_are_no_more_alike_than_their_grain() -> None:
    """Five models with one figure have a spread of the grain, not none."""
    alike = of_one([0.9] * 5)
    assert alike.error == pytest.approx(GRAIN / math.sqrt(5))
    assert alike.error == of_one([0.9, 0.9, 0.9, 0.9, 0.9001]).error, "that agree more closely too"
    assert of_one([0.8, 0.85, 0.9, 0.95, 1.0]).error == pytest.approx(np.std([0, 1, 2, 3, 4], ddof=1) / 20 / 5**0.5)
    assert difference([0.9] * 5, [0.5] * 4).error == pytest.approx(GRAIN * math.sqrt(1 / 5 + 1 / 4))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_model_without_a_figure_is_known_to_have_none(bad: float) -> None:
    assert of_one([0.1, 0.2]).known
    assert not of_one([0.1, bad]).known
    assert not difference([0.1, 0.2], {3: bad}).known


@given(several, value, st.sampled_from([0.05, 0.2]))
def test_so_many_seeds_decide_and_one_less_does_not(values: list[float], bar: float, level: float) -> None:
    """Against the interval of so many models with the same mean and spread, written out."""
    seen = of_one(values, 0.01)
    spread = max(float(np.std(values, ddof=1)), 0.01)

    def decides(count: int) -> bool:
        half = float(stats.t.ppf(1 - level / 2, count - 1)) * spread / math.sqrt(count)
        return half < abs(float(np.mean(values)) - bar)

    more = range(len(values) + 1, MOST_TIMES * len(values) + 1)
    assert seen.seeds_to_decide(bar, level) == next((count for count in more if decides(count)), None)
