"""Estimates are compared with exact effects as scipy compares them, on heads of every layer and every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import linregress, spearmanr

from toeplens.ground import InputError
from toeplens.lens.ablation.attribution import BAR, SAMPLE, EstimateCheck, check_estimates, sample_heads

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("layers", "heads"), [(30, 9), (6, 16), (64, 32), (2, 40), (1, 8), (3, 4)])
def test_each_layer_gives_as_many_heads_and_they_fill_the_ranks(layers: int, heads: int) -> None:
    estimates = np.argsort(RNG.random((layers, heads)), axis=1).astype(float)  # each value is its rank in the layer
    sample = sample_heads(estimates)
    sizes = {len(each) for each in sample}
    assert sizes == {min(heads, -(-SAMPLE // layers))}
    assert all(len(set(each.tolist())) == len(each) for each in sample)
    ranks = np.concatenate([values[each] for values, each in zip(estimates, sample, strict=True)])
    if layers * heads > SAMPLE:  # no quarter of the ranks is left out or preferred
        quarters = np.histogram(ranks, bins=4, range=(-0.5, heads - 0.5))[0] / len(ranks)
        assert (abs(quarters - 0.25) < 0.12).all()
    else:
        assert len(ranks) == layers * heads


def test_layers_may_differ_in_heads_and_what_has_no_estimate_is_not_drawn() -> None:
    estimates = [np.array([np.nan, 2.0, 1.0]), np.arange(5.0), np.array([np.nan])]
    assert [each.tolist() for each in sample_heads(estimates)] == [[1, 2], [0, 1, 2, 3, 4], []]
    assert check_estimates(estimates, [np.ones(2), np.ones(5), np.ones(0)]).of == 7


def test_ranks_and_slope_are_scipy_s() -> None:
    estimates = RNG.normal(size=(6, 16))
    truth = 3 * estimates + RNG.normal(size=(6, 16))
    found = check_estimates(estimates, lambda sample: [truth[i][heads] for i, heads in enumerate(sample)])
    x, y = estimates[found.layers, found.heads], truth[found.layers, found.heads]
    assert found.estimates == tuple(x)
    assert found.exact == tuple(y)
    assert found.rank_correlation == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    mirrored = linregress(np.concatenate((x, -x)), np.concatenate((y, -y)))  # a line through the origin
    assert found.slope == pytest.approx(mirrored.slope, abs=1e-12)
    assert (len(found.heads), found.of) == (36, 96)


def checked(estimates: Any, exact: Any) -> EstimateCheck:
    estimates = np.array([estimates], dtype=float)
    return check_estimates(estimates, [np.array(exact, dtype=float)], [np.arange(estimates.size)])


def test_the_verdict_names_what_holds() -> None:
    rising = np.arange(1.0, 11)
    assert checked(rising, 1.2 * rising).words == (
        "10 of 10 heads were also ablated exactly: rank correlation 1.00, exact effects 1.20 times the estimates; "
        "the estimates are confirmed."
    )
    assert "order" not in checked(rising, 1.2 * rising).words
    small = checked(rising, 30 * rising)
    assert small.holds
    assert small.words.endswith("30.00 times the estimates; the order of the estimates is right, their size is not.")
    swapped = rising.copy()
    swapped[[0, 4]] = swapped[[4, 0]]
    bad = checked(rising, swapped)
    assert bad.rank_correlation < BAR
    assert not bad.holds
    assert bad.words.endswith("the rank correlation is below 0.9, so do not read the estimates as effects.")


@pytest.mark.parametrize("estimates", [np.zeros(10), np.ones(10)])
def test_equal_estimates_are_no_effects(estimates: np.ndarray) -> None:
    found = checked(estimates, np.arange(10.0))
    assert not found.holds
    assert "rank correlation not defined" in found.words
    assert found.words.endswith("do not read the estimates as effects.")
    assert found.to_dict()["rank_correlation"] is None


def test_three_heads_confirm_nothing() -> None:
    assert not checked([1, 2, 3], [1, 2, 3]).holds
    assert "fewer than 4 heads" in checked([1, 2, 3], [1, 2, 3]).words
    assert checked([1, 2, 3, 4], [1, 2, 3, 4]).holds


def test_exact_effects_of_other_heads_are_refused() -> None:
    with pytest.raises(InputError, match=r"exact must have the lengths of the sample, \[4\], got \[3\]"):
        check_estimates(np.zeros((1, 4)), [np.zeros(3)])
