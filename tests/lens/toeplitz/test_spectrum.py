"""The symbol of a kernel is its Fourier series, bounds the eigenvalues of its Toeplitz matrices, and is filled by
them; products and extreme eigenvalues without the matrix are those of the matrix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import eigvalsh, toeplitz

from toeplens.ground import InputError
from toeplens.lens import symbol
from toeplens.lens.toeplitz import spectrum
from toeplens.lens.toeplitz.spectrum import extreme_eigenvalues, hermitian_part, szego, toeplitz_operator


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
    assert len(angles) == points
    assert np.all(np.diff(angles) > 0)
    assert angles.min() >= -np.pi
    assert angles.max() < np.pi
    np.testing.assert_allclose(values, by_hand(kernel, angles), atol=1e-12)


def test_no_angles_are_refused() -> None:
    with pytest.raises(InputError, match="points must be at least 1, got 0"):
        symbol(np.ones(5), 0)


def mirrored(half: np.ndarray) -> np.ndarray:
    """The Hermitian kernel with a_0, a_1, ... given."""
    return np.concatenate((half[:0:-1].conj(), half))


def hermitian(name: str, size: int) -> np.ndarray:
    delta = np.arange(size)
    rng = np.random.Generator(np.random.Philox(7))
    halves = {
        "alibi": -delta / 8,
        "slow exponential": np.exp(-delta / 200),
        "gaussian": np.exp(-((delta / 20) ** 2) / 2),
        "hat": np.maximum(1 - delta / 50, 0) * np.cos(1.3 * delta),
        "noise": rng.normal(size=size),
        "complex noise": np.concatenate(([0.3], rng.normal(size=size - 1) + 1j * rng.normal(size=size - 1))),
        "zero": np.zeros(size),
    }
    return mirrored(halves[name])


def dense(kernel: np.ndarray, size: int) -> np.ndarray:
    """T_ij = a_(i-j), written out; 0 where the kernel has no value."""
    half = len(kernel) // 2
    matrix = np.zeros((size, size), dtype=kernel.dtype)
    for i in range(size):
        for j in range(size):
            if abs(i - j) <= half:
                matrix[i, j] = kernel[half + i - j]
    return matrix


@given(
    half=st.integers(0, 6),
    size=st.integers(1, 9),
    columns=st.integers(1, 3),
    seed=st.integers(0, 99),
    complex_=st.booleans(),
)
def test_the_operator_is_the_matrix(half: int, size: int, columns: int, seed: int, complex_: bool) -> None:
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=2 * half + 1)
    x = rng.normal(size=(size, columns)) + 1j * rng.normal(size=(size, columns))
    if complex_:
        kernel = kernel + 1j * rng.normal(size=kernel.shape)
    matrix = dense(kernel, size)
    operator = toeplitz_operator(kernel, size)
    assert operator.dtype == kernel.dtype
    np.testing.assert_allclose(operator.matmat(x), matrix @ x, atol=1e-12)
    np.testing.assert_allclose(operator.matvec(x[:, 0]), matrix @ x[:, 0], atol=1e-12)
    np.testing.assert_allclose(operator.rmatmat(x), matrix.conj().T @ x, atol=1e-12)
    np.testing.assert_allclose(operator.rmatvec(x[:, 0]), matrix.conj().T @ x[:, 0], atol=1e-12)


@given(half=st.integers(0, 6), seed=st.integers(0, 99))
def test_the_hermitian_part_is_that_of_the_matrix(half: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=2 * half + 1) + 1j * rng.normal(size=2 * half + 1)
    matrix = dense(kernel, half + 1)
    np.testing.assert_allclose(dense(hermitian_part(kernel), half + 1), (matrix + matrix.conj().T) / 2, atol=1e-15)
    np.testing.assert_allclose(symbol(hermitian_part(kernel))[1], np.real(symbol(kernel)[1]), atol=1e-12)


@pytest.mark.parametrize("name", ["alibi", "slow exponential", "gaussian", "hat", "noise", "complex noise", "zero"])
def test_the_extremes_are_those_of_the_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clustered ends too: within 1e-8 of the symbol's largest modulus, in float64, and never outside the spectrum."""
    size = 512
    kernel = hermitian(name, size)
    half = kernel[size - 1 :]
    eigenvalues = eigvalsh(toeplitz(half, half.conj()))
    assert extreme_eigenvalues(kernel, size) == pytest.approx((eigenvalues[0], eigenvalues[-1]), abs=1e-12)
    scale = np.abs(symbol(kernel)[1]).max()
    monkeypatch.setattr(spectrum, "DENSE_UP_TO", 64)
    lowest, highest = extreme_eigenvalues(kernel, size)
    assert -1e-13 * scale <= lowest - eigenvalues[0] <= 1e-8 * scale
    assert -1e-13 * scale <= eigenvalues[-1] - highest <= 1e-8 * scale


def test_large_matrices_are_never_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 - 2 cos(phi): the eigenvalues of T_N are 2 - 2 cos(pi k / (N + 1)); the dense solver's way is barred."""
    monkeypatch.setattr(spectrum, "toeplitz", lambda *_: pytest.fail("a dense matrix was formed"))
    size = 4096
    lowest, highest = extreme_eigenvalues(np.array([-1.0, 2.0, -1.0]), size)
    assert lowest == pytest.approx(2 - 2 * np.cos(np.pi / (size + 1)), abs=1e-7)
    assert highest == pytest.approx(2 + 2 * np.cos(np.pi / (size + 1)), abs=1e-7)


def test_szego_ends_gaps_and_distribution_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 - 2 cos(phi): everything is known in closed form."""
    monkeypatch.setattr(spectrum, "DENSE_UP_TO", 64)
    sizes = [1, 4, 16, 64, 256]
    found = szego(np.array([-1.0, 2.0, -1.0]), sizes)
    assert (found.symbol_low, found.symbol_high) == pytest.approx((0, 4), abs=1e-12)
    assert found.sizes.tolist() == sizes
    for index, size in enumerate(sizes):
        eigenvalues = 2 - 2 * np.cos(np.pi * np.arange(1, size + 1) / (size + 1))
        assert found.lowest[index] == pytest.approx(eigenvalues[0], abs=1e-8)
        assert found.highest[index] == pytest.approx(eigenvalues[-1], abs=1e-8)
        assert found.gap_low[index] == pytest.approx(eigenvalues[0], abs=1e-8)
        assert found.gap_high[index] == pytest.approx(4 - eigenvalues[-1], abs=1e-8)
        at_angles = np.sort([2 - 2 * np.cos(2 * np.pi * k / size) for k in range(size)])
        wanted = np.abs(eigenvalues - at_angles).max() if size <= 64 else np.nan
        assert found.distribution_gap[index] == pytest.approx(wanted, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize(
    ("kernel", "size", "message"),
    [
        (np.array([0.0, 2.0, 1.0]), 5, "kernel must be Hermitian.*hermitian_part"),
        (np.array([1j, 2.0, 1j]), 5, "kernel must be Hermitian"),
        (np.array([1.0, 2.0]), 5, "odd number"),
        (np.array([np.nan, 2.0, np.nan]), 5, "kernel must be finite"),
        (np.array([1.0, 2.0, 1.0]), 0, "must be at least 1, got 0"),
    ],
)
def test_what_has_no_extremes_is_refused(kernel: np.ndarray, size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        extreme_eigenvalues(kernel, size)
    with pytest.raises(InputError, match=message):
        szego(kernel, [size])
