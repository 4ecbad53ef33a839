"""One phase for all frequencies: exact where it is exact, and as loops find it everywhere else (float64)."""

from __future__ import annotations

import cmath
import dataclasses
import math

import numpy as np
import pytest
import torch

from toeplens.encodings import build
from toeplens.papers.mathematics.single_phase import QUARTILES, single_phase
from toeplens.utils import InputError


def random_case(seed: int, *shape: int) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox(seed))
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


def fit(logits: list[float], gram: list[complex], phase: float) -> float:
    return sum((x - (w * cmath.exp(1j * phase)).real) ** 2 for x, w in zip(logits, gram, strict=True))


def least_error(logits: list[float], gram: list[complex]) -> float:
    """The least squared error over one phase: a fine grid, then a golden-section search about its best points."""
    grid = [2 * math.pi * g / 400 for g in range(400)]
    near = sorted(grid, key=lambda phase: fit(logits, gram, phase))[:6]
    best = math.inf
    for start in near:
        low, high = start - 2 * math.pi / 400, start + 2 * math.pi / 400
        for _ in range(60):
            a, b = high - (high - low) * 0.6180339887498949, low + (high - low) * 0.6180339887498949
            if fit(logits, gram, a) < fit(logits, gram, b):
                high = b
            else:
                low = a
        best = min(best, fit(logits, gram, (low + high) / 2))
    return best


def reference_measures(q: np.ndarray, k: np.ndarray, thetas: np.ndarray, causal: bool) -> dict[str, np.ndarray | float]:
    """Every measure of one head, pair by pair and diagonal by diagonal."""
    size, width = q.shape
    pairs: dict[int, list[tuple[complex, complex, float]]] = {}
    for i in range(size):
        for j in range(i + 1 if causal else size):
            z = [q[i, t] * k[j, t].conjugate() for t in range(width)]
            rotated = sum(z[t] * cmath.exp(1j * (i - j) * thetas[t]) for t in range(width))
            pairs.setdefault(i - j, []).append((rotated, sum(z), sum(abs(value) for value in z)))
    flat = [pair for diagonal in pairs.values() for pair in diagonal]
    coherence = [abs(u) / total for u, _, total in flat]
    resultants = [
        abs(sum((u / w) / abs(u / w) for u, w, _ in pairs[delta]) / len(pairs[delta])) for delta in sorted(pairs)
    ]
    real = sum(least_error([u.real for u, _, _ in each], [w for _, w, _ in each]) for each in pairs.values())
    energy = sum(u.real**2 for u, _, _ in flat)
    return {
        "coherence": float(np.mean(coherence)),
        "modulus": np.quantile([abs(u / w) for u, w, _ in flat], QUARTILES, method="inverted_cdf"),
        "concentration": math.sqrt(
            sum(len(pairs[d]) * r**2 for d, r in zip(sorted(pairs), resultants, strict=True)) / len(flat)
        ),
        "error": math.sqrt(real / energy),
    }


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_measures_match_loops(seed: int, causal: bool) -> None:
    q, k = random_case(seed, 10, 3), random_case(seed + 10, 10, 3)
    thetas = np.array([1.0, 0.3, 0.02])
    actual = single_phase(q, k, thetas, causal=causal)
    for name, value in reference_measures(q, k, thetas, causal).items():
        np.testing.assert_allclose(getattr(actual, name), value, atol=1e-10, err_msg=name)


def test_measures_are_of_the_encodings_logits() -> None:
    """The logits it fits are those of `rope`: with a phase that fits nothing the error is read off directly."""
    size, n = 16, 4
    rope = build("rope", d_model=8, num_heads=1, head_dim=8, max_len=size)
    positions = torch.arange(size)
    x = torch.from_numpy(np.random.Generator(np.random.Philox(11)).normal(size=(2, 1, 1, size, 2 * n)))
    q, k = rope.rotate(x[0], x[1], positions, positions)
    logits = (q @ k.mT)[0, 0].numpy()
    pairs = torch.view_as_complex(x[:, 0, 0].unflatten(-1, (n, 2)).contiguous())
    actual = single_phase(pairs[0], pairs[1], 10000.0 ** -(np.arange(n) / n))
    gram = (pairs[0] @ pairs[1].mH).numpy()
    rest = energy = 0.0
    for delta in range(size):
        diagonal, base = np.diagonal(logits, -delta), np.diagonal(gram, -delta)
        rest += ((diagonal - (base * np.exp(1j * actual.phases[delta])).real) ** 2).sum()
        energy += (diagonal**2).sum()
    np.testing.assert_allclose(actual.error, math.sqrt(rest / energy), atol=1e-10)


def test_a_vanishing_gram_matrix_allows_no_factor() -> None:
    """z_1 = -z_2: W = 0 everywhere, U is not 0 off the main diagonal."""
    q = np.ones((6, 2), dtype=complex)
    k = np.array([1, -1]) * q
    actual = single_phase(q, k, np.array([1.0, 0.5]))
    assert np.isinf(actual.modulus).all()
    assert np.isnan(actual.phases).all()
    assert np.isnan(actual.concentration)
    np.testing.assert_allclose(actual.error, 1, atol=1e-12)


def test_without_content_all_measures_are_undefined() -> None:
    zeros = np.zeros((4, 2), dtype=complex)
    actual = single_phase(zeros, zeros, np.array([1.0, 0.5]))
    for field in dataclasses.fields(actual):
        assert np.isnan(getattr(actual, field.name)).all(), field.name


def test_invalid_input_is_refused_in_one_sentence() -> None:
    q = random_case(12, 4, 2)
    with pytest.raises(InputError, match="q must be finite"):
        single_phase(q * np.nan, q, np.ones(2))
    with pytest.raises(InputError, match="q must have at least one position"):
        single_phase(q[:0], q[:0], np.ones(2))
