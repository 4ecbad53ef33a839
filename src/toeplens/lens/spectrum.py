"""Spectra of Toeplitz kernels."""

from __future__ import annotations

import numpy as np
from jaxtyping import Complex, Float


def symbol(
    kernel: Float[np.ndarray, "*rows D"] | Complex[np.ndarray, "*rows D"], points: int | None = None
) -> tuple[Float[np.ndarray, "points"], Complex[np.ndarray, "*rows points"]]:
    """The symbol a(e^(i phi)) = sum over delta of a_delta e^(i delta phi) of a Toeplitz matrix (theory: Szegő).

    Arguments
        kernel  a_delta at delta = -(M-1), ..., M-1 in the last dimension (D = 2M - 1); for a matrix of M rows the sum
                ends there, so that an infinite kernel is seen through a window of M
        points  angles at which the symbol is wanted, evenly from 0 on; D unless given

    Returns the angles phi in [-pi, pi) and the symbol at each; its imaginary part is 0 for a kernel with
    a_(-delta) = conj(a_delta).
    """
    size = kernel.shape[-1]
    count = max(size, points or size)
    half = (size - 1) // 2
    padded = np.zeros((*kernel.shape[:-1], count), dtype=np.complex128)
    places = np.arange(-half, size - half) % count
    padded[..., places] = kernel
    values = np.fft.ifft(padded, axis=-1) * count  # the inverse transform has the sign e^(+i delta phi)
    angles = 2 * np.pi * np.fft.fftfreq(count)
    order = np.argsort(angles)
    return angles[order], values[..., order]
