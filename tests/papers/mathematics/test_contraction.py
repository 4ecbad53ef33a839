"""Proposition B.3: spectra of W, W∘E and W + B against matrices written out."""

from __future__ import annotations

import cmath
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.papers.mathematics.contraction import bounds_broken, contraction, kept, rope, rotations


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return contraction(0, tries=20)


def wishart(rng: np.random.Generator, size: int, columns: int) -> np.ndarray:
    x = rng.normal(size=(size, columns))
    return x @ x.T / columns


@given(size=st.integers(1, 6), count=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_mean_of_rotations_entry_by_entry(size: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    frequencies, weights = rng.uniform(0, 7, (2, count)), rng.dirichlet(np.ones(count), 2)
    batch = rotations(frequencies, weights, size)
    for b in range(2):
        for i in range(size):
            for j in range(size):
                by_hand = sum(w * cmath.exp(1j * (i - j) * t) for w, t in zip(weights[b], frequencies[b], strict=True))
                assert batch[b, i, j] == pytest.approx(by_hand, abs=1e-14)
        assert np.linalg.eigvalsh(batch[b])[0] > -1e-12


def test_rope_by_hand() -> None:
    by_hand = [
        [sum(cmath.exp(1j * (i - j) * 10000 ** (-2 * t / 8)) for t in range(4)) / 4 for j in range(5)] for i in range(5)
    ]
    np.testing.assert_allclose(rope(8, 5), by_hand, atol=1e-14)


def test_a_definite_unimodular_matrix_does_not_exist() -> None:
    """One frequency is singular; other phases are indefinite, as the eigenvalues sum to N and their squares to N²."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        psi = rng.uniform(0, 2 * np.pi, 4)
        e = np.array(
            [[cmath.exp(1j * np.sign(i - j) * psi[abs(i - j)] * (i != j)) for j in range(4)] for i in range(4)]
        )
        values = np.linalg.eigvalsh(e)
        assert values[0] < 1e-12
        assert (values**2).sum() == pytest.approx(16)


def test_counterexamples_by_hand() -> None:
    """I + J, spectrum {1, 1, 4}, with i below and -i above the diagonal has {2, 2 ± √3}: wider. T(3, 1, -1), {1, 4, 4},
    with ψ = (0, 0, π) becomes T(3, 1, 1), {2, 2, 5}: as wide, but outside."""
    w = np.eye(3) + np.ones((3, 3))
    e = np.array([[1, -1j, -1j], [1j, 1, -1j], [1j, 1j, 1]])
    np.testing.assert_allclose(np.linalg.eigvalsh(w), [1, 1, 4], atol=1e-12)
    np.testing.assert_allclose(np.linalg.eigvalsh(w * e), [2 - 3**0.5, 2, 2 + 3**0.5], atol=1e-12)
    w, e = np.array([[3, 1, -1], [1, 3, 1], [-1, 1, 3]]), np.array([[1, 1, -1], [1, 1, 1], [-1, 1, 1]])
    np.testing.assert_allclose(np.linalg.eigvalsh(w), [1, 4, 4], atol=1e-12)
    np.testing.assert_allclose(np.linalg.eigvalsh(w * e), [2, 2, 5], atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 8, 64])
def test_flat_matrices_by_their_cotangents(size: int) -> None:
    """I + J against 2 on the diagonal and ±i off it: widths N and 2 cot(π/2N)."""
    w = np.eye(size) + np.ones((size, size))
    index = np.arange(size)
    e = np.where(index[:, None] == index, 1, 1j * np.sign(index[:, None] - index))
    assert np.ptp(np.linalg.eigvalsh(w)) == pytest.approx(size)
    assert np.ptp(np.linalg.eigvalsh(w * e)) == pytest.approx(2 / math.tan(math.pi / 2 / size))


def test_two_frequencies_that_narrow_nothing() -> None:
    """T(2, 0, 1) and frequencies 0 and π: Ē is 1 on the even diagonals, on which W lives. Both ends are kept."""
    w = np.array([[2.0, 0, 1], [0, 2, 0], [1, 0, 2]])
    mean = rotations(np.array([0, np.pi]), np.array([0.5, 0.5]), 3)
    np.testing.assert_allclose(w * mean, w, atol=1e-15)
    assert kept(w, mean)[:2] == pytest.approx((1, 1))
    mean = rotations(np.array([0, 1.0]), np.array([0.5, 0.5]), 3)
    assert max(kept(w, mean)[:2]) < 1 - 1e-3
    identity = np.eye(3)
    assert kept(identity, mean) == pytest.approx((1, 1, 1, 1))


@given(size=st.integers(2, 9), count=st.integers(1, 4), rank=st.integers(1, 9), seed=st.integers(0, 999))
def test_bounds_by_what_is_kept(size: int, count: int, rank: int, seed: int) -> None:
    """float64: Schur's bound and the two-sided ones, for W of any rank, and their invariance under scaling W."""
    rng = np.random.default_rng(seed)
    w = wishart(rng, size, rank)
    mean = rotations(rng.uniform(0, 7, count), rng.dirichlet(np.ones(count)), size)
    before, after = np.linalg.eigvalsh(w), np.linalg.eigvalsh(w * mean)
    low, high, next_low, next_high = kept(w, mean)
    scale = 1e-9 * before[-1]
    assert before[0] - scale <= after[0] <= after[-1] <= before[-1] + scale
    assert before[0] + np.ptp(before) * high - scale <= after[-1] <= next_high + (before[-1] - next_high) * high + scale
    assert next_low - (next_low - before[0]) * low - scale <= after[0] <= before[-1] - np.ptp(before) * low + scale
    assert bounds_broken(w, mean) < 1e-9
    assert bounds_broken(5 * w, mean) == pytest.approx(bounds_broken(w, mean), abs=1e-9)


def test_a_factor_that_is_not_semi_definite_breaks_the_bounds() -> None:
    rng = np.random.default_rng(0)
    broken = []
    for _ in range(50):
        factor = np.sign(rng.normal(size=(5, 5)))
        factor = np.triu(factor, 1) + np.triu(factor, 1).T + np.eye(5)
        broken.append(bounds_broken(wishart(rng, 5, 10), factor))
    assert max(broken) > 0.1


@pytest.mark.heavy
def test_the_example_of_the_theory(record: dict[str, Any]) -> None:
    """N = 64, square Wishart W in about [0, 4], RoPE with d = 16: clearly narrower, as in theory section 5."""
    example = record["sizes"]["example"]
    assert len(example["w"]) == len(example["mean"]) == 64
    assert example["w"][0] < 0.01 < 0.1 < example["mean"][0]
    assert 2 < example["mean"][-1] < 3.2 < example["w"][-1]
    rng = np.random.default_rng(5)
    w = wishart(rng, 64, 64)
    values = np.linalg.eigvalsh(w * rope(16, 64))
    assert abs(values[0] - example["mean"][0]) < 0.1
    assert abs(values[-1] - example["mean"][-1]) < 0.6


@pytest.mark.heavy
def test_one_frequency_contracts_nothing_and_many_do(record: dict[str, Any]) -> None:
    sizes = record["sizes"]
    ratios, conditions = np.array(sizes["width_ratio"]), np.array(sizes["condition"])
    assert ratios.shape == conditions.shape == (5, 7)
    np.testing.assert_allclose(ratios[:, 0], 1, rtol=1e-5)
    np.testing.assert_allclose(conditions[:, 0], sizes["condition_w"], rtol=1e-5)
    assert (ratios[:, 1:] < 0.95).all()
    assert (conditions[:, 1:] < np.array(sizes["condition_w"])[:, None]).all()


@pytest.mark.heavy
def test_what_is_written_out_can_be_verified(record: dict[str, Any]) -> None:
    free = record["free"]
    for case in (free["known"], free["found"]):
        size = case["size"]
        column = [complex(*pair) for pair in case["w"]]
        w = [[column[i - j] if i >= j else column[j - i].conjugate() for j in range(size)] for i in range(size)]
        turn = [[cmath.exp(1j * np.sign(i - j) * case["phases"][abs(i - j)]) for j in range(size)] for i in range(size)]
        before, after = np.linalg.eigvalsh(w), np.linalg.eigvalsh(np.array(w) * np.array(turn))
        assert before[0] > 0
        np.testing.assert_allclose(before, case["eigenvalues"], atol=1e-5)
        np.testing.assert_allclose(after, case["product"], atol=1e-5)
        assert after[0] < before[0] or after[-1] > before[-1]
        assert np.ptp(after) > 1.1 * np.ptp(before)
    assert free["ratio_found"][0] == pytest.approx(1, abs=1e-5)
    assert all(found <= bound + 1e-5 for found, bound in zip(free["ratio_found"], free["ratio_bound"], strict=True))
    assert free["ratio_found"][-1] > 3
    np.testing.assert_allclose(
        free["ratio_known_positive"], [2 / n / math.tan(math.pi / 2 / n) for n in free["searched_sizes"]], rtol=1e-5
    )
    assert free["random_outside_share"][0] == 0
    assert min(free["random_outside_share"][1:]) > 0.5
