"""Intervals cover what they say they cover; pairs stay paired; the same seed gives the same interval."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from toeplens.lens import Estimate, bootstrap_means, mean_over_seeds
from toeplens.lens.kit.intervals import mean_over_clusters, newcombe_interval
from toeplens.utils import InputError


@pytest.mark.parametrize(
    ("mean", "draw"),
    [
        (0.5, lambda rng, shape: (rng.random(shape) < 0.5).astype(float)),
        (1.0, lambda rng, shape: rng.exponential(1.0, shape)),
        (0.3, lambda rng, shape: rng.choice([-1.0, 0.0, 1.0], p=[0.1, 0.5, 0.4], size=shape)),
    ],
    ids=["fair coin", "exponential", "paired drop"],
)
def test_intervals_have_their_nominal_coverage(mean: float, draw: Any):
    """Over 40 samples of 150 rows and 25 independent columns."""
    rng = np.random.default_rng(7)
    each = (bootstrap_means(draw(rng, (150, 25)), samples=300, seed=seed) for seed in range(40))
    assert 0.91 < np.mean([(low <= mean) & (mean <= high) for low, high in each]) < 0.975


def test_the_same_seed_gives_the_same_interval():
    values = np.random.default_rng(0).random((50, 3))
    before = np.random.get_state()[1].copy()
    first = bootstrap_means(values, seed=3)
    assert np.array_equal(before, np.random.get_state()[1])
    np.random.seed(9)
    assert np.array_equal(first, bootstrap_means(values, seed=3))
    assert not np.array_equal(first, bootstrap_means(values, seed=4))
    assert np.array_equal(bootstrap_means(values), bootstrap_means(values, seed=0))


def test_a_constant_difference_has_a_zero_width_interval():
    """Rows are resampled together: two columns that always differ by the same amount differ by it in every resample."""
    noisy = np.random.default_rng(0).normal(size=200)
    low, high = bootstrap_means(((noisy + 0.25) - noisy)[:, None])
    assert low == pytest.approx(0.25, abs=1e-12)
    assert high == pytest.approx(0.25, abs=1e-12)
    both = np.stack([noisy, noisy + 0.25], axis=1)
    low, high = bootstrap_means(both)
    assert low[1] - low[0] == pytest.approx(0.25, abs=1e-12)
    assert high[1] - high[0] == pytest.approx(0.25, abs=1e-12)
    assert high[0] - low[0] > 0.1


def test_resampling_in_chunks_matches_resampling_at_once():
    """So many rows that the resamples are drawn in several pieces."""
    values = np.random.default_rng(0).random((2**20, 1))
    low, high = bootstrap_means(values, samples=17)
    assert low < values.mean() < high
    assert high - low < 0.003


def test_without_resamples_there_are_no_intervals():
    low, high = bootstrap_means(np.ones((5, 3)), samples=0)
    assert np.isnan(low).all()
    assert np.isnan(high).all()
    assert low.shape == high.shape == (3,)
    with pytest.raises(InputError, match="samples must be at least 0, got -1"):
        bootstrap_means(np.ones((5, 3)), samples=-1)
    with pytest.raises(InputError, match="at least one example"):
        bootstrap_means(np.empty((0, 3)))


def test_intervals_of_few_or_equal_seeds() -> None:
    assert mean_over_seeds(np.array([0.7])) == Estimate(0.7, -np.inf, np.inf, 1)
    assert mean_over_seeds(np.array([0.25, 0.25, 0.25])) == Estimate(0.25, 0.25, 0.25, 3)
    with pytest.raises(InputError, match="at least one seed"):
        mean_over_seeds(np.array([]))


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12))
def test_over_seeds_matches_students_t_interval(values: list[float]):
    actual = mean_over_seeds(np.array(values))
    assert actual.value == pytest.approx(np.mean(values), abs=1e-12)
    assert actual.count == len(values)
    error = stats.sem(values)
    expected = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error) if error else None
    low, high = expected or (np.mean(values), np.mean(values))
    assert actual.low == pytest.approx(low, abs=1e-9)
    assert actual.high == pytest.approx(high, abs=1e-9)


@pytest.mark.parametrize("sizes", [(9, 1, 1, 1), (5, 3, 2, 2), (1, 4), (2, 2, 2), (7, 1, 6, 1, 5, 2, 3)])
def test_over_unequal_clusters_matches_the_formula(sizes: tuple[int, ...]):
    """The first is worth 144 / 84 clusters of equal size, less than one degree of freedom, of which it is given one."""
    rng = np.random.default_rng(0)
    clusters = rng.permutation([name for name, size in enumerate(sizes) for _ in range(size)])
    values = rng.normal(0.3, 1.0, len(clusters)) + 0.5 * clusters
    mean = sum(values) / len(values)
    squares = 0.0
    for name in range(len(sizes)):
        deviations = [value - mean for value, cluster in zip(values, clusters, strict=True) if cluster == name]
        squares += sum(deviations) ** 2
    worth = sum(sizes) ** 2 / sum(size**2 for size in sizes)
    error = (squares * worth / (worth - 1)) ** 0.5 / len(values)
    half = stats.t.ppf(0.975, max(1.0, worth - 1)) * error
    actual = mean_over_clusters(values, clusters)
    assert (actual.value, actual.low, actual.high) == pytest.approx((mean, mean - half, mean + half), rel=1e-9)
    assert actual.count == len(sizes)


def test_paired_difference_intervals_cover_the_truth_also_at_0_of_n():
    none = np.zeros(10)
    high = stats.binomtest(0, 10).proportion_ci(method="wilson").high
    assert newcombe_interval(none, none) == pytest.approx((-high, high))
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        first = (rng.random(20) < 0.3).astype(float)
        second = np.where(rng.random(20) < 0.5, first, rng.random(20) < 0.7)  # 0.15 + 0.35 right
        low, high = newcombe_interval(first, second)
        covered += low <= 0.2 <= high
        assert newcombe_interval(second, first) == pytest.approx((-high, -low))
    assert 0.92 <= covered / 400 <= 0.985
