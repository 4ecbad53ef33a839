"""Remarks 3.1, 3.2, section 3.2, eq. 12, RollPE and URPE: what is Toeplitz, and what each reading cannot reach."""

from __future__ import annotations

import cmath
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.papers.mathematics.logits import (
    BIASES,
    ROTATIONS,
    commuting_matrix,
    complex_pairs,
    equal_token_outputs,
    fourier_basis,
    functions_of_distance,
    gram_matrices,
    mixture_bound,
    mla_logits,
    phase_matrices,
    relative_spread,
    rolled_logits,
    rope_logits,
    rotation_defect,
    scalar_error,
    share_outside,
    sinusoid_table,
    toeplitz_error,
    toeplitz_gap,
    urpe_outputs,
)


def distance_from_space(g: np.ndarray, space: np.ndarray) -> float:
    """How much of a g lies outside a space, as a share of its norm."""
    return share_outside((g / np.linalg.norm(g))[..., None], space)


def test_sinusoid_logits_entry_by_entry() -> None:
    table = sinusoid_table(4, 32)
    for i in (0, 1, 31):
        expected = [math.sin(i), math.cos(i), math.sin(i / 100), math.cos(i / 100)]
        np.testing.assert_allclose(table[i], expected, atol=1e-12)


@given(seed=st.integers(0, 999), pairs=st.integers(1, 4))
def test_commuting_matrices_commute_with_every_pair_rotation(seed: int, pairs: int) -> None:
    rng = np.random.default_rng(seed)
    head, rotation = commuting_matrix(rng, 2 * pairs), np.zeros((2 * pairs, 2 * pairs))
    for pair, angle in enumerate(rng.uniform(0, 6, size=pairs)):
        cos, sin = math.cos(angle), math.sin(angle)
        rotation[2 * pair : 2 * pair + 2, 2 * pair : 2 * pair + 2] = [[cos, -sin], [sin, cos]]
    np.testing.assert_allclose(head @ rotation, rotation @ head, atol=1e-12)


@pytest.mark.parametrize("entry", [(0, 0), (0, 1), (0, 2), (3, 1)])
def test_one_more_entry_breaks_the_toeplitz_property(entry: tuple[int, int]) -> None:
    table, head = sinusoid_table(4, 32), commuting_matrix(np.random.default_rng(1), 4)
    assert toeplitz_gap(table @ head @ table.T) < 1e-12
    head[entry] += 0.1
    assert toeplitz_gap(table @ head @ table.T) > 1e-3


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("contents", "length"), [(2, 3), (2, 5), (3, 4)])
def test_the_spaces_have_the_dimensions_counted_by_hand(contents: int, length: int, causal: bool) -> None:
    """m: C²; t: one an offset, less the constant that m has; a slope for each content, less the one that t has."""
    offsets = length if causal else 2 * length - 1
    exact = functions_of_distance(contents, length, causal=causal, rows=False)
    softened = functions_of_distance(contents, length, causal=causal, rows=True)
    assert exact.shape[:3] == softened.shape[:3] == (contents, contents, offsets)
    assert exact.shape[3] == contents**2 + offsets - 1
    assert softened.shape[3] == contents**2 + offsets - 1 + contents - 1


@given(seed=st.integers(0, 999), causal=st.booleans())
def test_constructed_logits_are_recognized_and_others_are_not(seed: int, causal: bool) -> None:
    rng, contents, length = np.random.default_rng(seed), 2, 4
    least = 0 if causal else 1 - length
    offsets = range(least, length)
    m, t, slope = rng.normal(size=(2, 2)), rng.normal(size=len(offsets)), rng.normal(size=2)
    plain, sloped, keyed = np.zeros((3, contents, contents, len(offsets)))
    for c, d, (at, delta) in itertools.product(range(2), range(2), enumerate(offsets)):
        plain[c, d, at] = m[c, d] + t[at]
        sloped[c, d, at] = plain[c, d, at] + (1 + abs(slope[c]) * c) * delta
        keyed[c, d, at] = plain[c, d, at] + (1 + d) * delta
    exact = functions_of_distance(contents, length, causal=causal, rows=False)
    softened = functions_of_distance(contents, length, causal=causal, rows=True)
    assert distance_from_space(plain, exact) < 1e-9
    assert distance_from_space(sloped, softened) < 1e-9
    for space in (exact, softened):
        assert distance_from_space(keyed, space) > 1e-3
    if abs(slope[1]) > 0.1:
        assert distance_from_space(sloped, exact) > 1e-3


@given(seed=st.integers(0, 999), rows=st.integers(1, 6), columns=st.integers(1, 6))
def test_the_gap_is_the_spread_along_diagonals(seed: int, rows: int, columns: int) -> None:
    x = np.random.default_rng(seed).normal(size=(rows, columns))
    diagonals = [np.diagonal(x, offset) for offset in range(1 - rows, columns)]
    rest = sum(float(np.var(each)) * len(each) for each in diagonals)
    assert toeplitz_gap(x) == pytest.approx(math.sqrt(rest / (x**2).sum()), rel=1e-9, abs=1e-12)


def test_rolled_products_in_a_loop() -> None:
    q, k = np.random.default_rng(0).normal(size=(2, 4, 5))
    actual = rolled_logits(q, k, 2)
    for i, j in np.ndindex(4, 4):
        expected = sum(q[i, (c - 2 * i) % 5] * k[j, (c - 2 * j) % 5] for c in range(5))
        assert actual[i, j] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("width", [3, 4, 7, 8])
def test_the_fourier_basis_is_orthonormal_and_diagonalizes_shifts(width: int) -> None:
    basis = fourier_basis(width)
    assert basis.shape[1] == width + (1 if width % 2 else 2)
    np.testing.assert_allclose(basis @ basis.T, np.eye(width), atol=1e-12)
    row = np.random.default_rng(1).normal(size=width)
    before, after = (x @ basis[:, ::2] + 1j * (x @ basis[:, 1::2]) for x in (row, np.roll(row, 1)))
    turns = np.exp(2j * np.pi * np.arange(basis.shape[1] // 2) / width)
    np.testing.assert_allclose(after, before * turns, atol=1e-12)


def test_other_frequencies_are_not_a_roll() -> None:
    q, k = np.random.default_rng(2).normal(size=(2, 6, 8))
    assert np.abs(rope_logits(q, k, 1) - rolled_logits(q, k, 1)).max() < 1e-12
    assert np.abs(rope_logits(q, k, 2) - rolled_logits(q, k, 1)).max() > 0.1


@pytest.mark.parametrize("width", [3, 4, 6, 7])
@pytest.mark.parametrize("speed", [1, 2, 3])
def test_a_shift_is_a_pair_rotation_iff_its_eigenvalues_pair_up(width: int, speed: int) -> None:
    values = np.exp(2j * np.pi * speed * np.arange(width) / width)
    real = [sum(abs(values - one) < 1e-9) for one in (1, -1)]  # others come with their conjugates
    assert (rotation_defect(width, speed) < 1e-9) == all(count % 2 == 0 for count in real)


@pytest.mark.parametrize("causal", [True, False])
def test_equal_tokens_can_be_distinguished_without_a_bias(causal: bool) -> None:
    """The same models with vectors at the input, or with factors on the weights: it is not the text that hides it."""
    for encoding in (*BIASES, *ROTATIONS):
        assert relative_spread(equal_token_outputs(encoding, 2, causal, 3)) < 1e-12
    for encoding in ("sinusoidal", "urpe"):
        assert relative_spread(equal_token_outputs(encoding, 2, causal, 3)) > 0.01


@pytest.mark.parametrize("causal", [True, False])
def test_factors_give_any_outputs(causal: bool) -> None:
    target = np.random.default_rng(4).normal(size=7)
    np.testing.assert_allclose(urpe_outputs(target, causal), target, atol=1e-12)


@pytest.mark.parametrize(("width", "angles"), [(2, [1.0]), (4, [1.0, 0.01])])
def test_our_mla_is_a_plain_and_a_rotated_branch(width: int, angles: list[float]) -> None:
    """At base 10000."""
    q_content, k_content, q, k = np.random.default_rng(0).normal(size=(4, 5, width))
    actual = mla_logits(np.concatenate((q_content, q), 1), np.concatenate((k_content, k), 1), width)
    rotated = (gram_matrices(complex_pairs(q), complex_pairs(k)) * phase_matrices(np.array(angles), 5)).sum(0)
    np.testing.assert_allclose(actual, q_content @ k_content.T + rotated.real, atol=1e-12)


def test_gram_matrices_and_waves_entry_by_entry() -> None:
    x = np.random.default_rng(1).normal(size=(2, 4, 6))
    q, k = complex_pairs(x)
    assert q[2, 1] == complex(x[0, 2, 2], x[0, 2, 3])
    wave = phase_matrices(np.array([0.3, 2.0, 0.0]), 4)
    for t, i, j in np.ndindex(3, 4, 4):
        assert gram_matrices(q, k)[t, i, j] == pytest.approx(q[i, t] * k[j, t].conjugate(), abs=1e-14)
        assert wave[t, i, j] == pytest.approx(cmath.exp(1j * (i - j) * (0.3, 2.0, 0.0)[t]), abs=1e-14)


def complex_matrix(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, size, size)).T @ [1, 1j]


@given(seed=st.integers(0, 999))
def test_no_factor_does_better_than_the_least_error(seed: int) -> None:
    """Both least errors against random factors near the best one, found again from the normal equations."""
    rng = np.random.default_rng(seed)
    logits, fixed = rng.normal(size=(2, 4, 4))
    gram = complex_matrix(seed, 4)

    def error(factor: np.ndarray | complex) -> float:
        return float(np.linalg.norm(logits - fixed - np.real(factor * gram)) / np.linalg.norm(logits))

    design = np.stack((np.real(gram).ravel(), -np.imag(gram).ravel()), 1)
    best = np.linalg.solve(design.T @ design, design.T @ (logits - fixed).ravel()) @ [1, 1j]
    assert scalar_error(logits, fixed, gram) == pytest.approx(error(complex(best)), rel=1e-9)
    for _ in range(10):
        assert error(complex(best) + rng.normal() + 1j * rng.normal()) >= scalar_error(logits, fixed, gram)
        kernel = rng.normal(size=(7, 2)) @ [1, 1j]
        toeplitz = kernel[np.subtract.outer(np.arange(4), np.arange(4)) + 3]
        assert error(toeplitz) >= toeplitz_error(logits, fixed, gram)
    assert toeplitz_error(logits, fixed, gram) <= scalar_error(logits, fixed, gram)


def test_a_toeplitz_factor_is_recovered() -> None:
    gram, kernel = complex_matrix(2, 6), np.random.default_rng(3).normal(size=(11, 2)) @ [1, 1j]
    toeplitz = kernel[np.subtract.outer(np.arange(6), np.arange(6)) + 5]
    fixed = np.real(gram)
    assert toeplitz_error(fixed + np.real(gram * toeplitz), fixed, gram) < 1e-13
    assert scalar_error(fixed + np.real(gram * (2 - 1j)), fixed, gram) < 1e-13


@given(seed=st.integers(0, 999))
def test_no_mixture_of_the_branches_gets_below_the_bound(seed: int) -> None:
    """Alternating least squares over (c_1, c_2) and α, from a random start, stays above the bound."""
    rng = np.random.default_rng(seed)
    first, second, wave = complex_matrix(seed, 6), complex_matrix(seed + 1, 6), phase_matrices(np.array([1.0]), 6)[0]
    logits = np.real(first + second * wave)
    bound = mixture_bound(logits, first, second, wave)
    assert bound > 0

    def fitted(terms: list[np.ndarray], wanted: np.ndarray) -> np.ndarray:
        design = np.stack([part.ravel() for term in terms for part in (np.real(term), -np.imag(term))], 1)
        actual = np.linalg.lstsq(design, wanted.ravel(), rcond=None)[0]
        return actual[::2] + 1j * actual[1::2]

    alpha = complex(*rng.normal(size=2))
    for _ in range(30):
        c = fitted([first * (alpha * wave + 1), second * (alpha * wave + 1)], logits)
        mixed = c[0] * first + c[1] * second
        alpha = complex(fitted([mixed * wave], logits - np.real(mixed))[0])
        rest = logits - np.real(mixed * (alpha * wave + 1))
        assert np.linalg.norm(rest) / np.linalg.norm(logits) >= bound
