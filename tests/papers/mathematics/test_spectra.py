"""Theorem 3.1, Lemma B.1, Proposition B.3: holes, amplitudes and spectra, against grids and matrices in full."""

from __future__ import annotations

import cmath
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.papers.mathematics.spectra import (
    _narrowness,
    amplitude,
    best_phases,
    best_ratio,
    bound_violation,
    contraction,
    hermitian_toeplitz,
    kept_shares,
    longest_hole,
    max_value,
    misalignment,
    phases,
    rope_factor,
    rotation_factors,
    search_widest,
    value_range,
)

ANGLES = np.linspace(-np.pi, np.pi, 100_001)

# ---- Theorem 3.1 ----------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=9), st.floats(-3, -1), st.floats(2, 4))
def test_the_longest_gap_matches_a_loop(values: list[float], low: float, high: float) -> None:
    ends = [low, *sorted(values), high]
    expected = max(b - a for a, b in pairwise(ends)) / (high - low)
    assert longest_hole(np.array(values), low, high) == pytest.approx(expected, abs=1e-12)


# ---- Lemma B.1 ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sums() -> dict[str, Any]:
    return phases.run(0, tries=20)


def wave(weights: Any, psi: Any, angles: np.ndarray = ANGLES) -> np.ndarray:
    return sum((2 * w * np.cos(p + i * angles) for i, (w, p) in enumerate(zip(weights, psi, strict=True))), 0 * angles)


@given(size=st.integers(1, 12), seed=st.integers(0, 999))
def test_extremes_match_a_dense_grid(size: int, seed: int) -> None:
    """float64: the grid misses a maximum by at most Σ w_i i² h² / 4 with h its step, under 1e-6 here."""
    rng = np.random.default_rng(seed)
    weights, psi = rng.exponential(size=size), rng.uniform(0, 2 * np.pi, size)
    values = wave(weights, psi)
    coefficients = weights * np.exp(1j * psi)
    assert values.max() - 1e-12 <= max_value(coefficients) <= values.max() + 1e-6
    assert np.abs(values).max() - 1e-12 <= amplitude(coefficients) <= np.abs(values).max() + 1e-6
    assert np.ptp(values) - 1e-12 <= value_range(coefficients) <= np.ptp(values) + 2e-6
    turn = np.exp(1j * np.arange(size) * rng.uniform(0, 2 * np.pi))
    np.testing.assert_allclose(value_range(coefficients * turn), value_range(coefficients), rtol=1e-12)


@pytest.mark.parametrize(
    ("weights", "theta", "reached"),
    [
        ([1, 1, 1], [2.5, 0, np.pi], True),
        ([1, 2, 3, 4], [9.4, -0.7, np.pi - 0.7, 2 * np.pi / 3 - 0.7], True),  # φ = 0.7, found by no search
        ([1, 2, 3, 4], [0.4, -0.7, np.pi - 0.65, 2 * np.pi / 3 - 0.7], False),
        ([0, 1, 1], [0, np.pi, np.pi / 2], True),  # the target π needs w_0 to be 0
        ([0.5, 1, 1], [0, np.pi, np.pi / 2], False),
        ([1, 0, 0], [0, np.pi, np.pi / 2], True),
    ],
)
def test_equality_without_phases_that_coincide(weights: list[float], theta: list[float], reached: bool) -> None:
    most = np.abs(wave(weights, np.arange(len(theta)) * np.array(theta))).max()
    assert (most > 2 * sum(weights) - 1e-6) == reached
    assert (misalignment(np.array(weights, dtype=float), np.array(theta)) < 1e-12) == reached


@given(size=st.integers(2, 7), seed=st.integers(0, 999))
def test_misalignment_by_hand(size: int, seed: int) -> None:
    """Against a dense grid of φ: the candidates are not far above the best φ, and 0 only where it is."""
    rng = np.random.default_rng(seed)
    weights, theta = rng.uniform(0.1, 1, size), rng.uniform(0, 2 * np.pi, size)
    if seed % 2:
        theta = 2 * np.pi * rng.integers(0, 9, size) / np.maximum(np.arange(size), 1) + rng.uniform(0, 6)
    grid = np.linspace(0, 2 * np.pi, 20_001)
    worst = np.max([np.abs(np.angle(np.exp(1j * i * (theta[i] + grid)))) for i in range(1, size)], axis=0)
    actual = misalignment(weights, theta)
    assert actual >= worst.min() - size * 2e-4
    assert actual <= size * worst.min() + size * 2e-4


@pytest.mark.parametrize("size", [2, 3, 5, 9])
def test_no_phases_are_wider_than_the_rotated_ones(size: int) -> None:
    """float64, 300 random phases for each of three γ."""
    rng = np.random.default_rng(size)
    weights = rng.exponential(size=size)
    for gap in (0.3, 2.0, np.pi):
        ends = np.array([gap / 2, -gap / 2])
        reached = np.ptp(wave(weights, best_phases(size, gap), ends))
        assert reached == pytest.approx(4 * sum(w * abs(math.sin(i * gap / 2)) for i, w in enumerate(weights)))
        for _ in range(300):
            assert np.ptp(wave(weights, rng.uniform(0, 2 * np.pi, size), ends)) <= reached + 1e-12


@pytest.mark.parametrize("size", [3, 4, 6])
def test_optimization_approaches_fejer_and_stays_below_4_over_pi(size: int) -> None:
    ratio, weights, gap = best_ratio(size)
    fejer = 2 / size / math.tan(math.pi / 2 / size)
    assert fejer - 1e-3 < ratio < 4 / math.pi
    direct = np.ptp(wave(weights, best_phases(size, gap))) / np.ptp(wave(weights, np.zeros(size)))
    assert ratio == pytest.approx(direct, abs=1e-6)


def full_matrix(column: Any) -> np.ndarray:
    """The Hermitian Toeplitz matrix with this first column, entry by entry."""
    index = range(len(column))
    return np.array([[column[i - j] if i >= j else np.conj(column[j - i]) for j in index] for i in index])


@given(size=st.integers(1, 6), seed=st.integers(0, 99))
def test_hermitian_toeplitz_entry_by_entry(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    column = rng.normal(size=size) + 1j * rng.normal(size=size) * (np.arange(size) > 0)
    assert (hermitian_toeplitz(column) == full_matrix(column)).all()


def test_the_gradient_of_the_optimization() -> None:
    """Central differences with a step of 1e-6, away from repeated eigenvalues."""
    x = np.random.default_rng(1).normal(size=12)
    _, gradient = _narrowness(x)
    for k, step in enumerate(1e-6 * np.eye(12)):
        assert gradient[k] == pytest.approx((_narrowness(x + step)[0] - _narrowness(x - step)[0]) / 2e-6, abs=1e-6)


def verify(case: dict[str, Any]) -> np.ndarray:
    """That a W and its phases have the spectra that are said; returns W's first column."""
    column = np.array([complex(*pair) for pair in case["w"]])
    before, after = (
        np.linalg.eigvalsh(m)
        for m in (full_matrix(column), full_matrix(column * np.exp(1j * np.array(case["phases"]))))
    )
    assert before[0] > 0
    np.testing.assert_allclose(before, case["eigenvalues"], atol=1e-5)
    np.testing.assert_allclose(after, case["product"], atol=1e-5)
    assert np.ptp(after) / np.ptp(before) == pytest.approx(case["ratio"], rel=1e-5)
    return column


@pytest.mark.parametrize(("positive", "least", "most"), [(False, 1.18, math.sqrt(2) + 1e-6), (True, 1.2, 1.2072)])
def test_the_widest_result_follows_from_its_values(positive: bool, least: float, most: float) -> None:
    case = search_widest(4, np.random.default_rng(0), starts=4, positive=positive)
    column = verify(case)
    assert least < case["ratio"] < most
    assert not positive or (np.real(column) > 0).all()


def test_written_sums_can_be_verified(sums: dict[str, Any]) -> None:
    example = sums["equality"]
    assert wave(example["w"], np.arange(4) * np.array(example["theta"])).max() == pytest.approx(
        2 * sum(example["w"]), abs=1e-4
    )
    assert np.ptp(np.cos(example["theta"][1:])) > 1e-3 or np.ptp(np.sin(example["theta"][1:])) > 1e-3
    spectra = sums["toeplitz"]
    for name, last in (("w", 6.25), ("product", 7.04069)):
        assert spectra[name]["limit"] == pytest.approx(last, abs=1e-5)
        assert np.all(np.diff(spectra[name]["widths"]) > 0)
        assert spectra[name]["widths"][-1] == pytest.approx(last, abs=3e-3)
    ranges = sums["ranges"]
    exact = [2 / n / math.tan(math.pi / 2 / n) for n in ranges["fejer_sizes"]]
    np.testing.assert_allclose(ranges["ratio_fejer"], exact, rtol=1e-5)


# ---- Proposition B.3 ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return contraction.run(0, tries=20)


def wishart(rng: np.random.Generator, size: int, columns: int) -> np.ndarray:
    x = rng.normal(size=(size, columns))
    return x @ x.T / columns


@given(size=st.integers(1, 6), count=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_mean_of_rotations_entry_by_entry(size: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    frequencies, weights = rng.uniform(0, 7, (2, count)), rng.dirichlet(np.ones(count), 2)
    for actual, angles, shares in zip(rotation_factors(frequencies, weights, size), frequencies, weights, strict=True):
        by_hand = [sum(w * cmath.exp(1j * d * t) for w, t in zip(shares, angles, strict=True)) for d in range(size)]
        np.testing.assert_allclose(actual, full_matrix(by_hand), atol=1e-14)
        assert np.linalg.eigvalsh(actual)[0] > -1e-12


def test_rope_contraction_by_hand() -> None:
    by_hand = [sum(cmath.exp(1j * d * 10000 ** (-2 * t / 8)) for t in range(4)) / 4 for d in range(5)]
    np.testing.assert_allclose(rope_factor(8, 5), full_matrix(by_hand), atol=1e-14)


def test_two_frequencies_that_do_not_narrow_the_spectrum() -> None:
    """T(2, 0, 1) and frequencies 0 and π: Ē is 1 on the even diagonals, on which W lives. Both ends are kept."""
    w = np.array([[2.0, 0, 1], [0, 2, 0], [1, 0, 2]])
    mean = rotation_factors(np.array([0, np.pi]), np.array([0.5, 0.5]), 3)
    np.testing.assert_allclose(w * mean, w, atol=1e-15)
    assert kept_shares(w, mean)[:2] == pytest.approx((1, 1))
    mean = rotation_factors(np.array([0, 1.0]), np.array([0.5, 0.5]), 3)
    assert max(kept_shares(w, mean)[:2]) < 1 - 1e-3
    identity = np.eye(3)
    assert kept_shares(identity, mean) == pytest.approx((1, 1, 1, 1))


@given(size=st.integers(2, 9), count=st.integers(1, 4), rank=st.integers(1, 9), seed=st.integers(0, 999))
def test_bounds_follow_from_the_retained_part(size: int, count: int, rank: int, seed: int) -> None:
    """float64: for W of any rank; the violation does not depend on W's scale."""
    rng = np.random.default_rng(seed)
    w = wishart(rng, size, rank)
    mean = rotation_factors(rng.uniform(0, 7, count), rng.dirichlet(np.ones(count)), size)
    assert bound_violation(w, mean) < 1e-9
    assert bound_violation(5 * w, mean) == pytest.approx(bound_violation(w, mean), abs=1e-9)


def test_a_factor_that_is_not_semi_definite_breaks_the_bounds() -> None:
    rng = np.random.default_rng(0)
    broken = []
    for _ in range(50):
        factor = np.sign(rng.normal(size=(5, 5)))
        factor = np.triu(factor, 1) + np.triu(factor, 1).T + np.eye(5)
        broken.append(bound_violation(wishart(rng, 5, 10), factor))
    assert max(broken) > 0.1


@pytest.mark.heavy
def test_many_frequencies_contract_the_spectrum_and_one_does_not(record: dict[str, Any]) -> None:
    """Also the example of theory section 5: N = 64, square Wishart W in about [0, 4], RoPE with d = 16."""
    sizes = record["sizes"]
    ratios, conditions = np.array(sizes["width_ratio"]), np.array(sizes["condition"])
    assert ratios.shape == conditions.shape == (5, 7)
    np.testing.assert_allclose(ratios[:, 0], 1, rtol=1e-5)
    np.testing.assert_allclose(conditions[:, 0], sizes["condition_w"], rtol=1e-5)
    assert (ratios[:, 1:] < 0.95).all()
    assert (conditions[:, 1:] < np.array(sizes["condition_w"])[:, None]).all()
    weights, mean = sizes["example"]["w"], sizes["example"]["mean"]
    assert weights[0] < 0.01 < 0.1 < mean[0]
    assert 2 < mean[-1] < 3.2 < weights[-1]


@pytest.mark.heavy
def test_written_counterexamples_can_be_verified(record: dict[str, Any]) -> None:
    free = record["free"]
    for case in (free["known"], free["found"]):
        verify(case)
        assert case["ratio"] > 1.1
    assert free["ratio_found"][0] == pytest.approx(1, abs=1e-5)
    assert all(actual <= bound + 1e-5 for actual, bound in zip(free["ratio_found"], free["ratio_bound"], strict=True))
    assert free["ratio_found"][-1] > 3
    exact = [2 / n / math.tan(math.pi / 2 / n) for n in free["searched_sizes"]]
    np.testing.assert_allclose(free["ratio_known_positive"], exact, rtol=1e-5)
    assert free["random_outside_share"][0] == 0
    assert min(free["random_outside_share"][1:]) > 0.5
