"""Lemma B.1: amplitudes, ranges and Toeplitz spectra against dense grids."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.papers.mathematics.phases import (
    _narrowness,
    amplitude,
    best_ratio,
    hermitian,
    misalignment,
    peak,
    phases,
    span,
    turned,
    widest,
)

ANGLES = np.linspace(-np.pi, np.pi, 100_001)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return phases(0, tries=20)


def wave(weights: Any, psi: Any, angles: np.ndarray = ANGLES) -> np.ndarray:
    return sum((2 * w * np.cos(p + i * angles) for i, (w, p) in enumerate(zip(weights, psi, strict=True))), 0 * angles)


@given(size=st.integers(1, 12), seed=st.integers(0, 999))
def test_extremes_are_those_of_a_dense_grid(size: int, seed: int) -> None:
    """float64: the grid misses a maximum by at most Σ w_i i² h² / 4 with h its step, under 1e-6 here."""
    rng = np.random.default_rng(seed)
    weights, psi = rng.exponential(size=size), rng.uniform(0, 2 * np.pi, size)
    values = wave(weights, psi)
    coefficients = weights * np.exp(1j * psi)
    assert values.max() - 1e-12 <= peak(coefficients) <= values.max() + 1e-6
    assert np.abs(values).max() - 1e-12 <= amplitude(coefficients) <= np.abs(values).max() + 1e-6
    assert np.ptp(values) - 1e-12 <= span(coefficients) <= np.ptp(values) + 2e-6
    turn = np.exp(1j * np.arange(size) * rng.uniform(0, 2 * np.pi))
    np.testing.assert_allclose(span(coefficients * turn), span(coefficients), rtol=1e-12)


def test_extremes_of_a_batch_are_those_of_its_rows() -> None:
    rows = np.random.default_rng(0).normal(size=(2, 3, 5)) + 0j
    np.testing.assert_allclose(span(rows), [[span(row) for row in block] for block in rows], rtol=1e-14)


def test_equality_without_phases_that_coincide() -> None:
    """θ = (any, 0, π), w = 1: f is g. And θ = (0.4, -φ, π/2 - φ, 2π/3 - φ) with φ = 0.7, found by no search."""
    assert wave([1, 1, 1], [0, 0, 2 * np.pi]).max() == pytest.approx(6, abs=1e-12)
    assert misalignment(np.ones(3), np.array([2.5, 0, np.pi])) < 1e-12
    theta = np.array([0.4, -0.7, np.pi - 0.7, 2 * np.pi / 3 - 0.7])
    assert wave([1, 2, 3, 4], np.arange(4) * theta).max() == pytest.approx(20, abs=1e-6)
    assert misalignment(np.array([1.0, 2, 3, 4]), theta) < 1e-12
    assert misalignment(np.array([1.0, 2, 3, 4]), theta + np.array([9, 0, 0, 0])) < 1e-12
    assert misalignment(np.array([1.0, 2, 3, 4]), theta + np.array([0, 0, 0.05, 0])) > 0.02


def test_the_target_pi_needs_w_0_to_be_0() -> None:
    """w = (w_0, 1, 1), θ = (0, π, π/2): f = 2 w_0 - 2 cos θ - 2 cos 2θ reaches ± (4 + 2 w_0) only for w_0 = 0."""
    theta = np.array([0, np.pi, np.pi / 2])
    assert misalignment(np.array([0.0, 1, 1]), theta) < 1e-12
    assert misalignment(np.array([0.5, 1, 1]), theta) > 0.5
    assert np.abs(wave([0, 1, 1], [0, np.pi, np.pi])).max() == pytest.approx(4)
    assert np.abs(wave([0.5, 1, 1], [0, np.pi, np.pi])).max() < 3.5
    assert misalignment(np.array([1.0, 0, 0]), theta) == 0


@given(size=st.integers(2, 7), seed=st.integers(0, 999))
def test_misalignment_by_hand(size: int, seed: int) -> None:
    """Against a dense grid of φ: the candidates are not far above the best φ, and 0 only where it is."""
    rng = np.random.default_rng(seed)
    weights, theta = rng.uniform(0.1, 1, size), rng.uniform(0, 2 * np.pi, size)
    if seed % 2:
        theta = 2 * np.pi * rng.integers(0, 9, size) / np.maximum(np.arange(size), 1) + rng.uniform(0, 6)
    grid = np.linspace(0, 2 * np.pi, 20_001)
    worst = np.max([np.abs(np.angle(np.exp(1j * i * (theta[i] + grid)))) for i in range(1, size)], axis=0)
    found = misalignment(weights, theta)
    assert found >= worst.min() - size * 2e-4
    assert found <= size * worst.min() + size * 2e-4


@pytest.mark.parametrize("size", [2, 3, 5, 9])
def test_no_phases_are_wider_than_the_turned_ones(size: int) -> None:
    """float64, 300 random phases for each of three γ."""
    rng = np.random.default_rng(size)
    weights = rng.exponential(size=size)
    for gap in (0.3, 2.0, np.pi):
        ends = np.array([gap / 2, -gap / 2])
        reached = np.ptp(wave(weights, turned(size, gap), ends))
        assert reached == pytest.approx(4 * sum(w * abs(math.sin(i * gap / 2)) for i, w in enumerate(weights)))
        for _ in range(300):
            assert np.ptp(wave(weights, rng.uniform(0, 2 * np.pi, size), ends)) <= reached + 1e-12


def test_a_range_above_that_of_g() -> None:
    """By hand, w = (0, 1, 1): g = 2 cos θ + 2 cos 2θ in [-9/4, 4], f = 2 sin θ + 2 sin 2θ in ± 3.52035."""
    g, f = wave([0, 1, 1], [0, 0, 0]), wave([0, 1, 1], [0, -np.pi / 2, -np.pi / 2])
    assert g.min() == pytest.approx(-2.25, abs=1e-8)
    assert np.ptp(f) == pytest.approx(7.0407, abs=1e-4)
    np.testing.assert_allclose(span(np.array([0, 1, 1]) * np.exp(1j * turned(3, 2.0))), np.ptp(f), atol=1e-6)


@pytest.mark.parametrize("size", [3, 4, 6])
def test_programs_come_near_fejer_and_not_above_four_over_pi(size: int) -> None:
    ratio, weights, gap = best_ratio(size)
    fejer = 2 / size / math.tan(math.pi / 2 / size)
    assert fejer - 1e-3 < ratio < 4 / math.pi
    direct = np.ptp(wave(weights, turned(size, gap))) / np.ptp(wave(weights, np.zeros(size)))
    assert ratio == pytest.approx(direct, abs=1e-6)


@given(size=st.integers(1, 6), seed=st.integers(0, 99))
def test_hermitian_toeplitz_entry_by_entry(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    column = rng.normal(size=size) + 1j * rng.normal(size=size) * (np.arange(size) > 0)
    matrix = hermitian(column)
    for i in range(size):
        for j in range(size):
            assert matrix[i, j] == (column[i - j] if i >= j else column[j - i].conjugate())


def test_the_gradient_of_the_optimisation() -> None:
    """Central differences with a step of 1e-6, away from repeated eigenvalues."""
    x = np.random.default_rng(1).normal(size=12)
    _, gradient = _narrowness(x)
    for k, step in enumerate(1e-6 * np.eye(12)):
        assert gradient[k] == pytest.approx((_narrowness(x + step)[0] - _narrowness(x - step)[0]) / 2e-6, abs=1e-6)


@pytest.mark.parametrize("positive", [False, True])
def test_the_widest_found_is_what_its_numbers_give(positive: bool) -> None:
    case = widest(4, np.random.default_rng(0), starts=4, positive=positive)
    column = np.array([complex(*pair) for pair in case["w"]])
    turns = np.exp(1j * np.array(case["phases"]))
    w = np.array([[column[i - j] if i >= j else column[j - i].conj() for j in range(4)] for i in range(4)])
    e = np.array([[turns[i - j] if i >= j else turns[j - i].conj() for j in range(4)] for i in range(4)])
    before, after = np.linalg.eigvalsh(w), np.linalg.eigvalsh(w * e)
    assert before[0] > 0
    assert np.ptp(after) / np.ptp(before) == pytest.approx(case["ratio"], rel=1e-5)
    assert case["ratio"] > (1.2 if positive else 1.18)
    assert case["ratio"] < (1.2072 if positive else math.sqrt(2) + 1e-6)
    assert not positive or (np.real(column) > 0).all()


def test_what_is_written_out_can_be_verified(record: dict[str, Any]) -> None:
    shown = record["equality"]
    assert wave(shown["w"], np.arange(4) * np.array(shown["theta"])).max() == pytest.approx(
        2 * sum(shown["w"]), abs=1e-4
    )
    assert np.ptp(np.cos(shown["theta"][1:])) > 1e-3 or np.ptp(np.sin(shown["theta"][1:])) > 1e-3
    spectra = record["toeplitz"]
    for name, last in (("w", 6.25), ("product", 7.04069)):
        assert spectra[name]["limit"] == pytest.approx(last, abs=1e-5)
        assert np.all(np.diff(spectra[name]["widths"]) > 0)
        assert spectra[name]["widths"][-1] == pytest.approx(last, abs=3e-3)
    ranges = record["ranges"]
    exact = [2 / n / math.tan(math.pi / 2 / n) for n in ranges["fejer_sizes"]]
    np.testing.assert_allclose(ranges["ratio_fejer"], exact, rtol=1e-5)
