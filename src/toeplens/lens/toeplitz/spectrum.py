"""Spectra of Toeplitz kernels: the symbol, the extreme eigenvalues by size, and how they approach the symbol."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Complex, Float, Int, Shaped
from scipy.fft import next_fast_len
from scipy.linalg import eigvalsh, matmul_toeplitz, toeplitz
from scipy.optimize import minimize_scalar
from scipy.sparse.linalg import LinearOperator, eigsh, lobpcg

from toeplens.ground import InputError, invalid

Kernel = Float[np.ndarray, "D"] | Complex[np.ndarray, "D"]

DENSE_UP_TO = 1024  # maximum rows of a matrix whose eigenvalues are all computed, from the dense matrix
_OVERSAMPLING = 16  # angles per kernel value in the search for the symbol's extremes
_LANCZOS, _POLISHED = 1e-4, 1e-7  # residuals at which the iterations stop, relative to the largest |symbol - a_0|
_STEPS = 300  # maximum LOBPCG steps


def symbol(
    kernel: Float[np.ndarray, "*rows D"] | Complex[np.ndarray, "*rows D"], points: int | None = None
) -> tuple[Float[np.ndarray, "points"], Complex[np.ndarray, "*rows points"]]:
    """The symbol a(e^(i phi)) = sum over delta of a_delta e^(i delta phi) of a Toeplitz matrix (theory: Szegő).

    Arguments
        kernel  a_delta at delta = -(M-1), ..., M-1 in the last dimension (D = 2M - 1); for a matrix of M rows the sum
                ends there, so an infinite kernel is truncated to a window of M
        points  number of angles, evenly spaced from 0 on, at least 1 (default: D)

    Returns the angles phi in [-pi, pi) and the symbol at each; its imaginary part is 0 for a kernel with
    a_(-delta) = conj(a_delta).
    """
    size = kernel.shape[-1]
    count = size if points is None else points
    if count < 1:
        raise invalid("points", "be at least 1", points)
    half = (size - 1) // 2
    folded = np.zeros((*kernel.shape[:-1], count), dtype=np.complex128)
    places = np.arange(-half, size - half) % count  # at these angles, offsets that differ by their number coincide
    np.add.at(np.moveaxis(folded, -1, 0), places, np.moveaxis(kernel, -1, 0))
    values = np.fft.ifft(folded, axis=-1) * count  # the inverse transform has the sign e^(+i delta phi)
    angles = 2 * np.pi * np.fft.fftfreq(count)
    order = np.argsort(angles)
    return angles[order], values[..., order]


@dataclass(frozen=True)
class Szego:
    """A kernel's eigenvalues by size N, compared with its symbol (`szego`).

    sizes             [K] N
    lowest, highest   [K] the extreme eigenvalues of T_N
    symbol_low        the symbol's minimum
    symbol_high       the symbol's maximum
    gap_low           [K] lowest - symbol_low, never negative beyond rounding
    gap_high          [K] symbol_high - highest, likewise
    distribution_gap  [K] largest distance between the sorted eigenvalues and the sorted values of the symbol at N even
                      angles; nan if N is above `DENSE_UP_TO`
    """

    sizes: Int[np.ndarray, "K"]
    lowest: Float[np.ndarray, "K"]
    highest: Float[np.ndarray, "K"]
    symbol_low: float
    symbol_high: float
    gap_low: Float[np.ndarray, "K"]
    gap_high: Float[np.ndarray, "K"]
    distribution_gap: Float[np.ndarray, "K"]


def hermitian_part(
    kernel: Float[np.ndarray, "*rows D"] | Complex[np.ndarray, "*rows D"],
) -> Float[np.ndarray, "*rows D"] | Complex[np.ndarray, "*rows D"]:
    """(a_delta + conj a_(-delta)) / 2: the kernel of (T + T^H) / 2, whose symbol is the real part of T's.

    For a causal kernel (0 where delta < 0) it is half of the kernel plus half of its mirror image, with a_0 unchanged.
    """
    _odd(kernel)
    return (kernel + kernel[..., ::-1].conj()) / 2


def toeplitz_operator(kernel: Kernel, size: int) -> LinearOperator:
    """The Toeplitz matrix T_ij = a_(i-j) of ``size`` rows, as a linear operator that never forms the matrix.

    Arguments
        kernel  a_delta at delta = -(M-1), ..., M-1 (D = 2M - 1); zero beyond, if ``size`` > M
        size    number of rows N

    A product with the matrix or with its adjoint takes O(N log N).
    """
    return _operator(*_section(kernel, size))


def _operator(column: Shaped[np.ndarray, "N"], row: Shaped[np.ndarray, "N"]) -> LinearOperator:
    # pad columns to a length that suits the FFT (2N - 1 is prime for many powers of two); the padding meets only zeros
    extra = int(next_fast_len(2 * len(column) - 1)) - (2 * len(column) - 1)  # type: ignore[arg-type]

    def by_fft(column: np.ndarray, row: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        longer = np.pad(row, (0, extra))
        return lambda x: matmul_toeplitz((column, longer), np.concatenate((x, np.zeros((extra, *x.shape[1:])))))

    product, adjoint = by_fft(column, row), by_fft(row.conj(), column.conj())
    made: dict[str, Any] = {"matvec": product, "matmat": product, "rmatvec": adjoint, "rmatmat": adjoint}
    return LinearOperator(shape=(len(column), len(column)), **made | {"dtype": column.dtype})


def extreme_eigenvalues(kernel: Kernel, size: int) -> tuple[float, float]:
    """The lowest and the highest eigenvalue of a Hermitian Toeplitz matrix (theory 4), in memory O(N).

    Up to `DENSE_UP_TO` rows the matrix is solved densely. Above, Lanczos (ARPACK) on the FFT product finds the right
    extreme, and LOBPCG (Knyazev 2001, SIAM J. Sci. Comput. 23) refines it, with T. Chan's circulant (1988, SIAM J. Sci.
    Stat. Comput. 9) as preconditioner. At the minimum of a smooth symbol the eigenvalues are O(1/N^2) apart, and
    Lanczos on its own would need about N steps.

    Both numbers are then Rayleigh quotients, so they lie within the spectrum to rounding. Against dense solutions of
    smooth, truncated and random kernels their error stayed below 1e-7 of the largest |symbol - a_0|, and mostly below
    1e-9. This error is absolute: it does not bound the relative error of an eigenvalue near zero.

    Arguments
        kernel  a_delta at delta = -(M-1), ..., M-1 (D = 2M - 1), a_(-delta) = conj(a_delta); zero beyond
        size    number of rows N

    Raises `InputError` for a kernel that is not Hermitian.
    """
    _hermitian(kernel)
    if size <= DENSE_UP_TO:
        eigenvalues = eigvalsh(toeplitz(*_section(kernel, size)))
        return float(eigenvalues[0]), float(eigenvalues[-1])
    return _lowest(kernel, size), -_lowest(-kernel, size)


def szego(kernel: Kernel, sizes: Sequence[int]) -> Szego:
    """How the eigenvalues of T_N fill the range of the symbol as N grows (Grenander & Szegő 1958; theory 4).

    The symbol of the given values is a trigonometric polynomial, and T_N of any N is a section of the infinite Toeplitz
    matrix with that symbol, so all eigenvalues lie between the symbol's minimum and maximum. As N grows, the extremes
    tend to these bounds, and the sorted eigenvalues to the sorted values of the symbol at even angles. A kernel that
    extends beyond delta = M - 1 is truncated there: the symbol then has the window's ripples (a positive semi-definite
    kernel can have a truncated symbol below 0), and sizes much below M need not come near its bounds.

    Arguments
        kernel  a_delta at delta = -(M-1), ..., M-1 (D = 2M - 1), a_(-delta) = conj(a_delta)
        sizes   the sizes N; up to `DENSE_UP_TO` all eigenvalues are computed, from the dense matrix; above it only the
                extremes, by `extreme_eigenvalues` (whose accuracy also holds for the gaps)

    Raises `InputError` for a kernel that is not Hermitian.
    """
    _hermitian(kernel)
    low, high = _symbol_low(kernel), -_symbol_low(-kernel)
    ends = np.empty((len(sizes), 2))
    distribution = np.full(len(sizes), np.nan)
    for index, size in enumerate(sizes):
        if size <= DENSE_UP_TO:
            eigenvalues = eigvalsh(toeplitz(*_section(kernel, size)))
            ends[index] = eigenvalues[0], eigenvalues[-1]
            distribution[index] = np.abs(eigenvalues - np.sort(np.real(symbol(kernel, size)[1]))).max()
        else:
            ends[index] = extreme_eigenvalues(kernel, size)
    lowest, highest = ends.T
    return Szego(np.array(sizes, dtype=int), lowest, highest, low, high, lowest - low, high - highest, distribution)


def _odd(kernel: Shaped[np.ndarray, "..."]) -> None:
    if kernel.shape[-1] % 2 == 0:
        raise invalid("kernel", "have an odd number of values, 2M - 1", kernel.shape[-1])


def _hermitian(kernel: Kernel) -> None:
    _odd(kernel)
    if not np.isfinite(kernel).all():
        raise InputError("kernel must be finite.")
    if np.abs(kernel - kernel[::-1].conj()).max() > 1e-9 * np.abs(kernel).max():
        raise InputError("kernel must be Hermitian: k(-delta) = conj(k(delta)). Use `hermitian_part`.")


def _section(kernel: Kernel, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The first column and the first row of the matrix of ``size`` rows, in double precision."""
    _odd(kernel)
    if size < 1:
        raise invalid("size", "be at least 1", size)
    values = kernel.astype(np.result_type(kernel.dtype, np.float64))
    half = len(values) // 2
    missing = (0, max(0, size - half - 1))
    return np.pad(values[half : half + size], missing), np.pad(values[half::-1][:size], missing)


def _lowest(kernel: Kernel, size: int) -> float:
    """The lowest eigenvalue, by Lanczos and then by preconditioned LOBPCG; a_0, a pure shift, is set aside."""
    column, row = _section(kernel, size)
    diagonal = float(np.real(column[0]))
    column[0] = row[0] = 0
    scale = float(np.abs(symbol(np.concatenate((row[:0:-1], column)), 4 * size)[1]).max())
    if scale == 0:
        return diagonal
    # ARPACK's tolerance is relative to the eigenvalue: the shift gives it the size of the symbol, wherever it lies
    shift = 2 * scale * (np.arange(size) == 0)
    rng = np.random.Generator(np.random.Philox(0))
    start = rng.standard_normal(size).astype(column.dtype)
    _, vector = eigsh(_operator(column - shift, row - shift), 1, which="SA", v0=start, ncv=40, tol=_LANCZOS, rng=rng)  # type: ignore[arg-type]
    # the inverse of T. Chan's circulant, the nearest one to the matrix, shifted to be positive definite
    weights = np.arange(size) / size
    nearest = np.real(np.fft.fft((1 - weights) * column + weights * np.concatenate((row[:1], row[:0:-1]))))
    inverse = np.fft.ifft(1 / (nearest - nearest.min() + scale * max(size**-2.0, 1e-6)))
    inverse = inverse if np.iscomplexobj(column) else np.real(inverse)
    preconditioner = _operator(inverse, np.concatenate((inverse[:1], inverse[:0:-1])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # if the steps do not converge: documented
        values, _ = lobpcg(
            _operator(column, row), vector, M=preconditioner, largest=False, tol=_POLISHED * scale, maxiter=_STEPS
        )
    return diagonal + float(values[0])


def _symbol_low(kernel: Kernel) -> float:
    """The minimum of a real symbol: the lowest value on a fine grid, refined between its neighbours."""
    angles, values = symbol(kernel, _OVERSAMPLING * len(kernel))
    best = angles[np.real(values).argmin()]
    offsets = np.arange(len(kernel)) - len(kernel) // 2
    step = 2 * np.pi / len(angles)
    found = minimize_scalar(
        lambda phi: float((kernel * np.exp(1j * offsets * phi)).sum().real),
        bounds=(best - step, best + step),
        method="bounded",
        options={"xatol": 1e-9 * step},
    )
    return min(float(found.fun), float(np.real(values).min()))
