"""Intervals (paired bootstrap over examples, Student's t over seeds, Wilson's for shares) and rank correlations.

`scipy.stats` takes half a second to import, so functions import it when needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.special import stdtrit

from toeplens.utils import InputError, invalid


@dataclass(frozen=True)
class Estimate:
    """A number with its interval and number of observations."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


INTERVAL_QUANTILES = (0.025, 0.975)  # quantiles of the intervals


def bootstrap_means(
    values: Float[np.ndarray, "n k"], *, samples: int = 1000, level: float = 0.95, seed: int = 0
) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "k"]]:
    """Percentile intervals of the column means, with rows resampled together (so paired columns stay paired).

    Arguments
        values   [n, k] one row per example
        samples  number of resamples; with 0 the intervals are nan
        level    coverage
    """
    count = len(values)
    if count == 0:
        raise InputError("values must have at least one example, got none.")
    if samples < 0:
        raise invalid("samples", "be at least 0", samples)
    if samples == 0:
        return np.full(values.shape[1], np.nan), np.full(values.shape[1], np.nan)
    rng = np.random.Generator(np.random.Philox(seed))
    means = np.empty((samples, values.shape[1]))
    chunk = max(1, 2**24 // count)
    for start in range(0, samples, chunk):
        size = min(chunk, samples - start)
        means[start : start + size] = rng.multinomial(count, np.full(count, 1 / count), size=size) @ values / count
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def mean_over_seeds(values: Float[np.ndarray, "s"]) -> Estimate:
    """Mean over seeds with Student's t interval; unbounded with one seed."""
    if len(values) == 0:
        raise InputError("values must have at least one seed, got none.")
    return mean_over_clusters(np.asarray(values, dtype=float), np.arange(len(values)))


def mean_over_clusters(values: Float[np.ndarray, "n"], clusters: Int[np.ndarray, "n"]) -> Estimate:
    """Mean of values that belong together in clusters (such as the windows of a document); Student's interval.

    The error is computed from the clusters' sums of deviations, so many values of one cluster count little more than
    one. Its degrees of freedom are those of the equivalent number of equal clusters, (sum n)^2 / sum n^2. ``count`` is
    the number of clusters. With one cluster the interval is unbounded.
    """
    if len(values) == 0:
        raise InputError("values must have at least one entry, got none.")
    mean = float(values.mean())
    unique, index = np.unique(clusters, return_inverse=True)
    if len(unique) == 1:
        return Estimate(mean, -np.inf, np.inf, 1)
    sums = np.bincount(index, weights=values - mean)
    effective_count = len(values) ** 2 / float((np.bincount(index).astype(float) ** 2).sum())
    error = np.sqrt((sums**2).sum() * effective_count / (effective_count - 1)) / len(values)
    half_width = float(stdtrit(max(1.0, effective_count - 1), INTERVAL_QUANTILES[1]) * error)
    return Estimate(mean, mean - half_width, mean + half_width, len(sums))


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of the share ``successes`` / ``count``.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927.
    """
    from scipy.stats import binomtest

    low, high = binomtest(successes, count).proportion_ci(method="wilson")
    return float(low), float(high)


def newcombe_interval(first: Float[np.ndarray, "n"], second: Float[np.ndarray, "n"]) -> tuple[float, float]:
    """95% interval of the share of ``second`` minus that of ``first``, for paired observations of 0 or 1.

    R. G. Newcombe, Improved confidence intervals for the difference between binomial proportions based on paired data,
    1998, method 10 without its continuity correction.
    """
    count, shares = len(first), (float(second.mean()), float(first.mean()))
    intervals = [wilson_interval(round(share * count), count) for share in shares]
    (below, above), (below_first, above_first) = (
        (share - low, high - share) for share, (low, high) in zip(shares, intervals, strict=True)
    )
    spread = float(np.sqrt(first.var() * second.var()))
    correlation = float(np.cov(first, second, bias=True)[0, 1]) / spread if spread > 0 else 0.0
    difference = shares[0] - shares[1]
    pairs = (below, above_first), (above, below_first)
    down, up = (np.sqrt(max(0.0, a**2 - 2 * correlation * a * b + b**2)) for a, b in pairs)
    return max(-1.0, difference - float(down)), min(1.0, difference + float(up))


def ranks_of(values: Float[np.ndarray, "*samples n"]) -> Float[np.ndarray, "*samples n"]:
    """Ranks from 1 within each sample, ties at their mean rank; all nan if the sample contains nan."""
    from scipy.stats import rankdata

    return rankdata(values, axis=-1)


def spearman(values: Float[np.ndarray, "2 *samples n"]) -> Float[np.ndarray, "*samples"]:
    """Spearman correlation of one or many samples, ties at their mean rank; nan if all values of one side are equal."""
    ranks = ranks_of(values)
    x, y = ranks - ranks.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1)))
