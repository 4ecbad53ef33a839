"""RollPE and URPE: rolls in loops, the Fourier basis, and that equal tokens could have told positions apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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
