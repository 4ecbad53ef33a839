"""RollPE, URPE and MLA's logits (eq. 12), in loops; what each reading cannot reach, against other ways of asking."""

from __future__ import annotations

import cmath

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toeplens.papers.mathematics.latent import (
    beyond_mixture,
    beyond_scalar,
    beyond_toeplitz,
    grams,
    ours,
    paired,
    waves,
)
from toeplens.papers.mathematics.related import (
    BIASES,
    ROTATIONS,
    equal_tokens,
    fourier_basis,
    no_rotation,
    rolled_logits,
    rope_logits,
    spread,
    urpe_outputs,
)


def test_rolled_products_in_a_loop() -> None:
    q, k = np.random.default_rng(0).normal(size=(2, 4, 5))
    found = rolled_logits(q, k, 2)
    for i, j in np.ndindex(4, 4):
        wanted = sum(q[i, (c - 2 * i) % 5] * k[j, (c - 2 * j) % 5] for c in range(5))
        assert found[i, j] == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("width", [3, 4, 7, 8])
def test_the_fourier_basis_is_orthonormal_and_turns_a_shift_into_angles(width: int) -> None:
    basis = fourier_basis(width)
    assert basis.shape[1] == width + (1 if width % 2 else 2)
    np.testing.assert_allclose(basis @ basis.T, np.eye(width), atol=1e-12)
    row = np.random.default_rng(1).normal(size=width)
    before, after = (x @ basis[:, ::2] + 1j * (x @ basis[:, 1::2]) for x in (row, np.roll(row, 1)))
    turns = np.exp(2j * np.pi * np.arange(basis.shape[1] // 2) / width)
    np.testing.assert_allclose(after, before * turns, atol=1e-12)


def test_other_frequencies_are_no_roll() -> None:
    q, k = np.random.default_rng(2).normal(size=(2, 6, 8))
    assert np.abs(rope_logits(q, k, 1) - rolled_logits(q, k, 1)).max() < 1e-12
    assert np.abs(rope_logits(q, k, 2) - rolled_logits(q, k, 1)).max() > 0.1


@pytest.mark.parametrize("width", [3, 4, 6, 7])
@pytest.mark.parametrize("speed", [1, 2, 3])
def test_a_shift_is_a_rotation_of_pairs_just_where_its_eigenvalues_pair_up(width: int, speed: int) -> None:
    values = np.exp(2j * np.pi * speed * np.arange(width) / width)
    real = [sum(abs(values - one) < 1e-9) for one in (1, -1)]  # others come with their conjugates
    assert (no_rotation(width, speed) < 1e-9) == all(count % 2 == 0 for count in real)


@pytest.mark.parametrize("causal", [True, False])
def test_equal_tokens_can_be_told_apart_by_what_is_no_bias(causal: bool) -> None:
    """The same models with vectors at the input, or with factors on the weights: it is not the text that hides it."""
    for encoding in (*BIASES, *ROTATIONS):
        assert spread(equal_tokens(encoding, 2, causal, 3)) < 1e-12
    for encoding in ("sinusoidal", "urpe"):
        assert spread(equal_tokens(encoding, 2, causal, 3)) > 0.01


def test_spread_by_hand() -> None:
    assert spread(torch.tensor([[1.0, -4.0], [1.0, -3.0]])) == pytest.approx(0.25)


@pytest.mark.parametrize("causal", [True, False])
def test_factors_give_any_outputs(causal: bool) -> None:
    target = np.random.default_rng(4).normal(size=7)
    np.testing.assert_allclose(urpe_outputs(target, causal), target, atol=1e-12)


ANGLES = {2: [1.0], 4: [1.0, 0.01]}  # base 10000


def vectors(seed: int, size: int, width: int) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).normal(size=(4, size, width)))


@pytest.mark.parametrize("width", ANGLES)
def test_our_mla_is_a_plain_branch_and_a_turned_one(width: int) -> None:
    q_content, k_content, q, k = vectors(0, 5, width)
    found = ours(np.concatenate((q_content, q), 1), np.concatenate((k_content, k), 1), width)
    for i in range(5):
        for j in range(5):
            plain = sum(a * b for a, b in zip(q_content[i], k_content[j], strict=True))
            turned = sum(
                complex(q[i, 2 * t], q[i, 2 * t + 1])
                * complex(k[j, 2 * t], -k[j, 2 * t + 1])
                * cmath.exp(1j * (i - j) * angle)
                for t, angle in enumerate(ANGLES[width])
            )
            assert found[i, j] == pytest.approx(plain + turned.real, abs=1e-12)


def test_gram_matrices_and_waves_entry_by_entry() -> None:
    q, k = (paired(x) for x in vectors(1, 4, 6)[:2])
    wave = waves(np.array([0.3, 2.0, 0.0]), 4)
    for t, i, j in np.ndindex(3, 4, 4):
        assert grams(q, k)[t, i, j] == pytest.approx(q[i, t] * k[j, t].conjugate(), abs=1e-14)
        assert wave[t, i, j] == pytest.approx(cmath.exp(1j * (i - j) * (0.3, 2.0, 0.0)[t]), abs=1e-14)
    x = vectors(1, 4, 6)[0]
    assert paired(x)[2, 1] == complex(x[2, 2], x[2, 3])


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
    assert beyond_scalar(logits, fixed, gram) == pytest.approx(error(complex(best)), rel=1e-9)
    for _ in range(10):
        assert error(complex(best) + rng.normal() + 1j * rng.normal()) >= beyond_scalar(logits, fixed, gram)
        kernel = rng.normal(size=(7, 2)) @ [1, 1j]
        toeplitz = kernel[np.subtract.outer(np.arange(4), np.arange(4)) + 3]
        assert error(toeplitz) >= beyond_toeplitz(logits, fixed, gram)
    assert beyond_toeplitz(logits, fixed, gram) <= beyond_scalar(logits, fixed, gram)


def test_a_toeplitz_factor_is_found_again() -> None:
    gram, kernel = complex_matrix(2, 6), np.random.default_rng(3).normal(size=(11, 2)) @ [1, 1j]
    toeplitz = kernel[np.subtract.outer(np.arange(6), np.arange(6)) + 5]
    fixed = np.real(gram)
    assert beyond_toeplitz(fixed + np.real(gram * toeplitz), fixed, gram) < 1e-13
    assert beyond_scalar(fixed + np.real(gram * (2 - 1j)), fixed, gram) < 1e-13


@given(seed=st.integers(0, 999))
def test_no_mixture_of_the_branches_gets_below_the_bound(seed: int) -> None:
    """Alternating least squares over (c_1, c_2) and α, from a random start, stays above the bound."""
    rng = np.random.default_rng(seed)
    first, second, wave = complex_matrix(seed, 6), complex_matrix(seed + 1, 6), waves(np.array([1.0]), 6)[0]
    logits = np.real(first + second * wave)
    bound = beyond_mixture(logits, first, second, wave)
    assert bound > 0

    def fitted(terms: list[np.ndarray], wanted: np.ndarray) -> np.ndarray:
        design = np.stack([part.ravel() for term in terms for part in (np.real(term), -np.imag(term))], 1)
        found = np.linalg.lstsq(design, wanted.ravel(), rcond=None)[0]
        return found[::2] + 1j * found[1::2]

    alpha = complex(*rng.normal(size=2))
    for _ in range(30):
        c = fitted([first * (alpha * wave + 1), second * (alpha * wave + 1)], logits)
        mixed = c[0] * first + c[1] * second
        alpha = complex(fitted([mixed * wave], logits - np.real(mixed))[0])
        rest = logits - np.real(mixed * (alpha * wave + 1))
        assert np.linalg.norm(rest) / np.linalg.norm(logits) >= bound
