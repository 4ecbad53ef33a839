"""What is said of a function of the distance: the form of decay that fits it, and the ends of its matrix's spectrum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int

from toeplens.ground import reading
from toeplens.ground.records import Record
from toeplens.ground.words import or_none
from toeplens.lens import hermitian_part, szego
from toeplens.lens.toeplitz.decay import Form, fit_decays

_FEWEST = 4  # distances that a decay is fitted to, at least
ROWS = 256  # of a kernel as a matrix, at most
_EXPLAINED = 0.5  # of the variance of mean logits over distances: a form of decay below that is not spoken of


@dataclass(frozen=True)
class Decay(Record):
    """The form that tells best how a head's mean logit changes with the distance of query and key.

    form           a key of `toeplens.lens.toeplitz.decay.FORMS`, the best of those that `toeplens.lens.fit_decay` ranks
    parameters     by the names there, distances in tokens
    r2             share of the variance of the mean logits over distances that it explains; None where they are equal
    half_distance  tokens after which what decays has fallen to half; None for a form without a limit
    """

    form: Form
    parameters: dict[str, reading.Number | None]
    r2: reading.Number | None
    half_distance: reading.Number | None

    @property
    def explains(self) -> bool:
        """Whether the form says at least half of what there is to say."""
        return self.r2 is not None and self.r2 >= _EXPLAINED


@dataclass(frozen=True)
class KernelEnds(Record):
    """The ends of the spectrum of a kernel by offset, as a matrix of queries by keys (its Hermitian part; Szegő).

    size                     rows of the matrix
    symbol_low, symbol_high  the ends of the symbol, between which all eigenvalues of any size lie
    lowest, highest          the extreme eigenvalues at this size
    """

    size: reading.Count
    symbol_low: reading.Number
    symbol_high: reading.Number
    lowest: reading.Number
    highest: reading.Number


def decays_of(
    offsets: Int[np.ndarray, "D"], means: Float[np.ndarray, "H D"], counts: Float[np.ndarray, "H D"]
) -> list[Decay | None]:
    """The form that fits each head's mean logits by offset best, keys before and after the query together.

    None of too few.
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
    """The spectrum's ends of a kernel at offsets -(M-1) .. M-1, of its middle where there are more than `ROWS` rows."""
    cut = max(0, len(kernel) // 2 + 1 - ROWS)
    return _ends(np.ascontiguousarray(kernel[cut : len(kernel) - cut], dtype=np.float64).tobytes())


@lru_cache(maxsize=1024)  # layers mostly share them
def _ends(kernel: bytes) -> KernelEnds:
    values = hermitian_part(np.frombuffer(kernel))
    size = len(values) // 2 + 1
    found = szego(values, [size])
    return KernelEnds(size, found.symbol_low, found.symbol_high, float(found.lowest[0]), float(found.highest[0]))
