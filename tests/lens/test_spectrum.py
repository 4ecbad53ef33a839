"""The symbol of a kernel is its Fourier series, and bounds the eigenvalues of its Toeplitz matrices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from toeplens.lens import symbol


def by_hand(kernel: np.ndarray, angles: np.ndarray) -> np.ndarray:
    half = (kernel.shape[-1] - 1) // 2
    offsets = np.arange(-half, half + 1)
    return np.stack(
        [[sum(a * np.exp(1j * d * phi) for a, d in zip(row, offsets, strict=True)) for phi in angles] for row in kernel]
    )


@given(size=st.integers(1, 9), points=st.integers(1, 30), seed=st.integers(0, 99), complex_=st.booleans())
def test_it_is_the_fourier_series(size: int, points: int, seed: int, complex_: bool) -> None:
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=(2, 2 * size - 1))
    if complex_:
        kernel = kernel + 1j * rng.normal(size=kernel.shape)
    angles, values = symbol(kernel, points)
    assert len(angles) == max(points, 2 * size - 1)
    assert np.all(np.diff(angles) > 0)
    assert angles.min() >= -np.pi
    assert angles.max() < np.pi
    np.testing.assert_allclose(values, by_hand(kernel, angles), atol=1e-12)


@pytest.mark.parametrize("size", [8, 64])
def test_eigenvalues_lie_within_the_symbol_and_come_near_its_ends(size: int) -> None:
    """Szegő: a_0 = 2, a_1 = a_-1 = -1 has the symbol 2 - 2 cos(phi), from 0 to 4."""
    kernel = np.zeros(2 * size - 1)
    kernel[size - 2 : size + 1] = (-1, 2, -1)
    _, values = symbol(kernel, 1001)
    assert np.abs(values.imag).max() < 1e-12
    eigenvalues = np.linalg.eigvalsh(toeplitz(kernel[size - 1 :]))
    assert values.real.min() <= eigenvalues[0]
    assert eigenvalues[-1] <= 4.0
    assert eigenvalues[-1] > values.real.max() - 13 / size**2
