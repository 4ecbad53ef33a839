"""What decides at the edges of measures: rounding that is taken for nothing, ends that are refined, quantiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from toeplens.lens import behaviour, szego, toeplitz_profile
from toeplens.lens.gradients import Pool


def test_a_variance_below_rounding_is_none() -> None:
    """Keys that are equal but for 1e-6 of their size: 2.5e-13 of the energy, under the 1e-12 that is rounding."""
    made = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 9, 4, generator=made, dtype=torch.float64)
    q, k = torch.ones_like(noise), 1 + 1e-6 * noise
    assert behaviour(q, k).flat.all()
    assert np.isnan(behaviour(q, k).symbolic).all()
    assert toeplitz_profile(q, k).variance_explained.isnan().all()
    k = 1 + 1e-5 * noise
    assert not behaviour(q, k).flat.any()
    assert toeplitz_profile(q, k).variance_explained.isfinite().all()
    nothing = torch.zeros_like(q)
    assert toeplitz_profile(nothing, nothing).share.isnan().all()
    cancelled = toeplitz_profile(q, k * 0 + 1, bias=torch.full((9,), -4.0 + 1e-6, dtype=torch.float64))
    assert cancelled.share.isnan().all()


def test_the_interval_of_a_share_has_its_tails() -> None:
    """Resample by resample, with pairs of one example with itself left out."""
    vectors = np.random.default_rng(0).normal(size=(20, 3)) + 0.3
    pool = Pool(20, bootstrap=200, seed=4)
    pool.add(vectors[:, None])
    found = pool.strength(np.array([8, 16]))
    rng = np.random.Generator(np.random.Philox(4))
    shares = []
    for weights in rng.multinomial(20, np.full(20, 1 / 20), size=200):
        drawn = np.repeat(vectors, weights, axis=0)
        products = drawn @ drawn.T
        which = np.repeat(np.arange(20), weights)
        shares.append(products[which[:, None] != which].mean() / np.diag(products).mean())
    expected = np.quantile(shares, [0.025, 0.975])
    np.testing.assert_allclose([found.share_low[0], found.share_high[0]], expected, rtol=1e-9)


def test_the_ends_of_a_symbol_are_found_between_the_angles_of_the_grid() -> None:
    """2 cos(phi + 0.3) has its ends at angles that no even grid has."""
    found = szego(np.array([np.exp(-0.3j), 0, np.exp(0.3j)]), [4])
    assert found.symbol_low == pytest.approx(-2, abs=1e-12)
    assert found.symbol_high == pytest.approx(2, abs=1e-12)
