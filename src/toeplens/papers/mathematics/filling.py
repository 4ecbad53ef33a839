"""Szegő's theorem as arXiv 2505.13027 states it (Theorem 3.1): the eigenvalues of T_N(a) fill [min a, max a].

For a trigonometric polynomial a of degree m the theorem has a rate that can be held against numbers. Between the places
of its minimum and its maximum a runs through the whole range; neighbouring ones of N even angles lie at most s = mπ/N
of the range apart (Bernstein: |a'| is at most m times half the range), so any piece of length l holds l/s - 1 of the N
values of a at these angles. They are the eigenvalues of a circulant matrix that differs from T_N by one of rank 2m with
m eigenvalues of each sign, and so at most 2m of them are lost. A hole therefore is at most (2m + 1)s long; that says
something where it is less than the range.

For a_δ = ρ^|δ| (infinite, symbol (1 - ρ²)/(1 - 2ρ cos φ + ρ²)) the eigenvalues are values of the symbol at angles of
which each piece kπ/(N + 1) to (k + 1)π/(N + 1) holds one (Kac, Murdock and Szegő 1953), so that a hole is at most 2π/(N
+ 1) times the largest slope.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Complex, Float
from scipy.linalg import eigvals_banded, eigvalsh, toeplitz

from toeplens.lens.toeplitz.spectrum import szego
from toeplens.papers.mathematics.records import ClaimsOn, Records, generator, short, tally
from toeplens.studies.kit.claims import Claim

DEGREES = (1, 2, 4, 8)
SIZES = (32, 64, 128, 256, 512)
RATES = (0.1, 0.3, 0.5, 0.7, 0.9)
SOURCE = "arXiv 2505.13027 v1, Theorem 3.1"

_HOLE = "largest gap / bound − 1"
TALLIES: dict[str, tuple[str, str]] = {
    "inside": ("no eigenvalue lies outside", "largest distance outside, relative to the range,"),
    "filled": ("polynomials: no gap is longer than (2m + 1)mπ/N < 1 of the range", _HOLE),
    "decaying": ("a_δ = ρ^|δ|: no gap is longer than its bound < 1", _HOLE),
}


def longest_hole(eigenvalues: Float[np.ndarray, "N"], low: float, high: float) -> float:
    """The longest gap in [low, high] without an eigenvalue, relative to its length."""
    inside = np.clip(np.sort(eigenvalues), low, high)
    return float(np.diff(np.concatenate(([low], inside, [high]))).max() / (high - low))


def kernel_of(rng: np.random.Generator, degree: int) -> Complex[np.ndarray, "D"]:
    """a_δ for δ = -m to m, random and Hermitian: a real symbol, a trigonometric polynomial of degree m."""
    half = rng.normal(size=degree) + 1j * rng.normal(size=degree)
    return np.concatenate((half[::-1].conj(), [rng.normal()], half))


def eigenvalues_of(kernel: Complex[np.ndarray, "D"], size: int) -> Float[np.ndarray, "N"]:
    """The eigenvalues of T_N, ascending, computed from its diagonals."""
    half = kernel[len(kernel) // 2 :, None]
    return np.asarray(eigvals_banded(np.repeat(half, size, axis=1), lower=True))


def _over(hole: float, bound: float) -> list[float]:
    """Relative excess of a gap over its bound, negative below it; empty for a bound above 1."""
    return [hole / bound - 1] if bound < 1 else []


def filling(seed: int, *, tries: int = 20) -> dict[str, Any]:
    """The longest gap between the eigenvalues of T_N, for random symbols and sizes.

    Arguments
        seed   of the random kernels
        tries  kernels of each degree, 20 or more

    Returns ``tallies`` by statement (`tally`) and ``holes``: for each degree the mean longest hole by N.
    """
    rng = generator(seed, tries)
    inside, filled, decaying = [], [], []
    holes = np.zeros((len(DEGREES), len(SIZES)))
    for row, degree in enumerate(DEGREES):
        for _ in range(tries):
            kernel = kernel_of(rng, degree)
            found = szego(kernel, [SIZES[0]])
            low, high = found.symbol_low, found.symbol_high
            for column, size in enumerate(SIZES):
                values = eigenvalues_of(kernel, size)
                inside.append(max(low - values[0], values[-1] - high) / (high - low))
                hole = longest_hole(values, low, high)
                filled += _over(hole, (2 * degree + 1) * degree * np.pi / size)
                holes[row, column] += hole / tries
    for rate in RATES:
        angles = np.linspace(0, np.pi, 100_001)
        symbol = (1 - rate**2) / (1 - 2 * rate * np.cos(angles) + rate**2)
        low, high = symbol[-1], symbol[0]
        slope = np.abs(np.gradient(symbol, angles)).max() / (high - low)
        for size in SIZES:
            values = eigvalsh(toeplitz(rate ** np.arange(size)))
            inside.append(max(low - values[0], values[-1] - high) / (high - low))
            decaying += _over(longest_hole(values, low, high), 2 * np.pi / (size + 1) * slope)
    return {
        "seed": seed,
        "tallies": {"inside": tally(inside), "filled": tally(filled), "decaying": tally(decaying)},
        "holes": {"degrees": list(DEGREES), "sizes": list(SIZES), "lengths": short(holes)},
    }


_claim = ClaimsOn("filling", TALLIES)
CLAIMS: tuple[Claim[Records], ...] = (
    _claim(
        SOURCE,
        "szego",
        "If the symbol is real and continuous, the eigenvalues of T_N asymptotically fill [min a, max a].",
        f"Random Hermitian kernels of degree {DEGREES[0]} to {DEGREES[-1]} and a_δ = ρ^|δ|, N = {SIZES[0]} to "
        f"{SIZES[-1]}. Fails if an eigenvalue lies outside, or a gap between eigenvalues or at an end is longer than "
        f"a bound that decreases as 1/N, proved in this module for these symbols. Bounds larger than the range are "
        f"not counted.",
        ("inside", "filled", "decaying"),
    ),
)
