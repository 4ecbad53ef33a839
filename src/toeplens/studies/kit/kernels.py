"""Functions of distance: the best-fitting decay, and the range of the spectrum of the Toeplitz matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int

from toeplens.lens import hermitian_part, szego
from toeplens.lens.toeplitz.decay import Form, fit_decays
from toeplens.utils.formatting import finite_or_none
from toeplens.utils.records import FiniteFloat, NonNegativeInt, Record

_MIN_DISTANCES = 4  # minimum number of distances for a fit
MAX_ROWS = 256  # maximum number of rows of a kernel's matrix
_MIN_EXPLAINED = 0.5  # minimum share of the variance of mean logits that a reported decay explains


@dataclass(frozen=True)
class KernelDecay(Record):
    """The curve that best fits a head's mean logit as a function of distance (`toeplens.lens.fit_decay`)."""

    form: Form  # key of `toeplens.lens.toeplitz.decay.FORMS`
    parameters: dict[str, FiniteFloat | None]  # by name, distances in tokens
    r2: FiniteFloat | None  # explained share of the variance of the mean logits; None if they are constant
    half_distance: FiniteFloat | None  # tokens until half of the decay; None for a form without a limit

    @property
    def is_good_fit(self) -> bool:
        """Whether the curve explains at least half of the variance."""
        return self.r2 is not None and self.r2 >= _MIN_EXPLAINED


@dataclass(frozen=True)
class SpectrumRange(Record):
    """Range of the spectrum of a kernel's Toeplitz matrix (Hermitian part; Szegő)."""

    size: NonNegativeInt  # number of rows of the matrix
    symbol_low: FiniteFloat  # range of the symbol, which contains the eigenvalues for any size
    symbol_high: FiniteFloat
    lowest: FiniteFloat  # extreme eigenvalues at this size
    highest: FiniteFloat


def decays_of(
    offsets: Int[np.ndarray, "D"], means: Float[np.ndarray, "H D"], counts: Float[np.ndarray, "H D"]
) -> list[KernelDecay | None]:
    """The best-fitting decay of each head's mean logits, with keys before and after the query taken together.

    None for too few distances.
    """
    if (counts != counts[:1]).any():
        return [fit for rows in zip(means, counts, strict=True) for fit in decays_of(offsets, *(x[None] for x in rows))]
    distances, pairs = np.abs(offsets), np.bincount(np.abs(offsets), counts[0])
    if (pairs > 0).sum() < _MIN_DISTANCES:
        return [None] * len(means)
    sums = np.stack([np.bincount(distances, counts[0] * row) for row in np.nan_to_num(means)])
    decays: list[KernelDecay | None] = []
    for best, *_ in fit_decays(np.arange(len(pairs)), sums / np.maximum(pairs, 1), counts=pairs):
        parameters = {name: finite_or_none(value) for name, value in best.parameters.items()}
        decays.append(KernelDecay(best.form, parameters, finite_or_none(best.r2), finite_or_none(best.half_distance)))
    return decays


def spectrum_range(kernel: Float[np.ndarray, "D"]) -> SpectrumRange:
    """The spectral range of a kernel at offsets -(M-1) .. M-1, cut to its middle for more than `MAX_ROWS` rows."""
    cut = max(0, len(kernel) // 2 + 1 - MAX_ROWS)
    return _spectrum_range(np.ascontiguousarray(kernel[cut : len(kernel) - cut], dtype=np.float64).tobytes())


@lru_cache(maxsize=1024)  # layers often share kernels
def _spectrum_range(kernel: bytes) -> SpectrumRange:
    values = hermitian_part(np.frombuffer(kernel))
    size = len(values) // 2 + 1
    result = szego(values, [size])
    return SpectrumRange(size, result.symbol_low, result.symbol_high, float(result.lowest[0]), float(result.highest[0]))
