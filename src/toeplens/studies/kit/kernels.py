"""Functions of distance: the best-fitting decay, and the range of the spectrum of the Toeplitz matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int

from toeplens.ground import records
from toeplens.ground.records import Record
from toeplens.ground.words import or_none
from toeplens.lens import hermitian_part, szego
from toeplens.lens.toeplitz.decay import Form, fit_decays

_FEWEST = 4  # minimum number of distances for a fit
ROWS = 256  # maximum number of rows of a kernel's matrix
_EXPLAINED = 0.5  # minimum share of the variance of mean logits that a reported decay explains


@dataclass(frozen=True)
class Decay(Record):
    """The curve that best fits a head's mean logit as a function of distance (`toeplens.lens.fit_decay`)."""

    form: Form  # key of `toeplens.lens.toeplitz.decay.FORMS`
    parameters: dict[str, records.Number | None]  # by name, distances in tokens
    r2: records.Number | None  # explained share of the variance of the mean logits; None if they are constant
    half_distance: records.Number | None  # tokens until the decay is half complete; None for a form without a limit

    @property
    def explains(self) -> bool:
        """Whether the curve explains at least half of the variance."""
        return self.r2 is not None and self.r2 >= _EXPLAINED


@dataclass(frozen=True)
class KernelEnds(Record):
    """Range of the spectrum of a kernel's Toeplitz matrix (Hermitian part; Szegő)."""

    size: records.Count  # number of rows of the matrix
    symbol_low: records.Number  # range of the symbol, which contains the eigenvalues for any size
    symbol_high: records.Number
    lowest: records.Number  # extreme eigenvalues at this size
    highest: records.Number


def decays_of(
    offsets: Int[np.ndarray, "D"], means: Float[np.ndarray, "H D"], counts: Float[np.ndarray, "H D"]
) -> list[Decay | None]:
    """The best-fitting decay of each head's mean logits, with keys before and after the query taken together.

    None for too few distances.
    """
    if (counts != counts[:1]).any():
        return [one for rows in zip(means, counts, strict=True) for one in decays_of(offsets, *(x[None] for x in rows))]
    away, pairs = np.abs(offsets), np.bincount(np.abs(offsets), counts[0])
    if (pairs > 0).sum() < _FEWEST:
        return [None] * len(means)
    sums = np.stack([np.bincount(away, counts[0] * row) for row in np.nan_to_num(means)])
    found: list[Decay | None] = []
    for best, *_ in fit_decays(np.arange(len(pairs)), sums / np.maximum(pairs, 1), counts=pairs):
        parameters = {name: or_none(value) for name, value in best.parameters.items()}
        found.append(Decay(best.form, parameters, or_none(best.r2), or_none(best.half_distance)))
    return found


def kernel_ends(kernel: Float[np.ndarray, "D"]) -> KernelEnds:
    """The spectral range of a kernel at offsets -(M-1) .. M-1, cut to its middle for more than `ROWS` rows."""
    cut = max(0, len(kernel) // 2 + 1 - ROWS)
    return _ends(np.ascontiguousarray(kernel[cut : len(kernel) - cut], dtype=np.float64).tobytes())


@lru_cache(maxsize=1024)  # layers often share kernels
def _ends(kernel: bytes) -> KernelEnds:
    values = hermitian_part(np.frombuffer(kernel))
    size = len(values) // 2 + 1
    found = szego(values, [size])
    return KernelEnds(size, found.symbol_low, found.symbol_high, float(found.lowest[0]), float(found.highest[0]))
