"""Does the mean of many gradients keep a fixed part, or is it noise that cancels? Signal to noise by batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from toeplens.ground import InputError
from toeplens.ground.records import Record
from toeplens.lens.kit.intervals import TAILS

SMALLEST = 8  # the first batch size


@dataclass(frozen=True)
class Strength(Record):
    """How much of single examples' vectors g is left in their mean, for one vector a place (a head, or a layer).

    strength  [*P, S] SNR_n = ||mean over a batch of n|| / sqrt(E ||g||^2), root mean square over all batches of n that
              the pool holds; n by `SeedStrength.sizes`
    exponent  [*P] slope of log SNR_n on log n by least squares: -1/2 is pure cancellation, 0 a fixed vector
    share     [*P] ||E g||^2 / E ||g||^2, the share of the energy that is the same in every example, by a U-statistic:
              unbiased up to O(1/n), so that it may fall below 0
    *_low, *_high  bootstrap intervals over the examples; NaN without resamples. That of the exponent is the exponent of
              the share's interval, the share taken to be at least 0; of an estimate below 0 the lower end is its own

    All are NaN where the vectors are 0 or undefined.
    """

    WORDS = "strength"

    strength: Float[np.ndarray, "*P S"]
    exponent: Float[np.ndarray, "*P"]
    exponent_low: Float[np.ndarray, "*P"]
    exponent_high: Float[np.ndarray, "*P"]
    share: Float[np.ndarray, "*P"]
    share_low: Float[np.ndarray, "*P"]
    share_high: Float[np.ndarray, "*P"]


class Pool:
    """Sums over a pool of examples, and over resamples of it, batch by batch: no example's vector is kept.

    Arguments
        examples   how many there will be
        bootstrap  resamples
        seed       of the resampling
    """

    def __init__(self, examples: int, *, bootstrap: int = 0, seed: int = 0) -> None:
        if examples < 1:
            raise InputError("batches: no examples that count were given; at least one is needed.")
        self.examples = examples
        rng = np.random.Generator(np.random.Philox(seed))
        drawn = rng.multinomial(examples, np.full(examples, 1 / examples), size=bootstrap)
        self._weights = np.concatenate((np.ones((1, examples)), drawn))  # the pool itself, then the resamples
        self._done = 0
        self._sum: Any = 0.0
        self._energy: Any = 0.0
        self._same: Any = 0.0

    def add(self, vectors: Float[np.ndarray, "b *P C"]) -> None:
        """The next examples' vectors, of C numbers a place."""
        size = len(vectors)
        weights = self._weights[:, self._done : self._done + size]
        self._done += size
        flat = vectors.reshape(size, -1)
        energy = np.square(vectors, dtype=np.float64).sum(-1)
        self._sum = self._sum + (weights @ flat).reshape(-1, *vectors.shape[1:])
        self._energy = self._energy + np.tensordot(weights, energy, 1)
        self._same = self._same + np.tensordot(weights**2, energy, 1)

    @property
    def mean(self) -> Float[np.ndarray, "*P C"]:
        """The mean over the pool."""
        return self._sum[0] / self.examples

    def strength(self, sizes: Int[np.ndarray, "S"], *, together: bool = False) -> Strength:
        """What is left of the vectors in means of n.

        Over ALL batches of n different examples of the pool, the mean of ||mean||^2 is exactly
        E||g||^2 (1/n + (1 - 1/n) share), with share = (n^2 ||mean||^2 - sum ||g||^2) / (n (n - 1)) / E||g||^2 over the
        pool. It is what disjoint batches estimate with more noise, and does not depend on the order of the examples.

        In a resample, pairs of one example with itself are left out of the share (they would pass for a fixed part).
        Where the share is 0 the intervals are wider than they had to be, by a factor of about the root of 3.

        Arguments
            sizes     batch sizes, at most the pool's
            together  the vectors of the last place (the heads) side by side as one
        """
        whole, energy, same = (self._sum**2).sum(-1), self._energy, self._same
        if together:
            whole, energy, same = whole.sum(-1), energy.sum(-1), same.sum(-1)
        pairs = self.examples**2 - (self._weights**2).sum(1).reshape(-1, *[1] * (whole.ndim - 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = (whole - same) / pairs / (energy / self.examples)
        shares = np.where(energy > 0, shares, np.nan)
        share = shares[0]
        low = high = np.full_like(share, np.nan)
        if len(shares) > 1:
            low, high = np.quantile(shares[1:], TAILS, axis=0)
        strength = by_size(share, sizes)
        return Strength(
            strength=strength,
            exponent=exponent(strength, sizes),
            exponent_low=exponent(by_size(np.minimum(np.clip(low, 0, None), share), sizes), sizes),
            exponent_high=exponent(by_size(np.clip(high, 0, None), sizes), sizes),
            share=share,
            share_low=low,
            share_high=high,
        )


def batch_sizes(examples: int) -> Int[np.ndarray, "S"]:
    """8, 16, 32, ..., up to the pool."""
    return 2 ** np.arange(SMALLEST.bit_length() - 1, examples.bit_length())


def by_size(share: Float[np.ndarray, "*P"], sizes: Int[np.ndarray, "S"]) -> Float[np.ndarray, "*P S"]:
    """SNR_n of independent examples of which this share of the energy is fixed: sqrt(1/n + (1 - 1/n) share)."""
    return np.sqrt(np.clip(1 / sizes + (1 - 1 / sizes) * share[..., None], 0, None))


def exponent(strength: Float[np.ndarray, "*P S"], sizes: Int[np.ndarray, "S"]) -> Float[np.ndarray, "*P"]:
    """Least-squares slope of log strength on log n; NaN with fewer than two sizes, or where nothing is left."""
    if len(sizes) < 2:
        return np.full(strength.shape[:-1], np.nan)
    x = np.log(sizes) - np.log(sizes).mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.log(strength) @ x / (x @ x)
    return np.where((strength > 0).all(-1), slope, np.nan)
