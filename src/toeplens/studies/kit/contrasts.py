"""Contrasts: weighted sums of means over trained models, with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import stdtr, stdtrit

from toeplens.lens import Estimate

Values = Sequence[float] | Mapping[int, float] | np.ndarray  # one per seed, or by seed
GRAIN = 0.005
MOST_TIMES = 4  # suggest at most this multiple of the current number of models


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of means over models, such as one encoding's mean minus another's.

    Models of different terms are treated as independent (Welch). In the studies so far, sharing the examples of a seed
    did not correlate them, and pairing would halve the degrees of freedom. Terms may have different seeds.

    terms  weights, and values of the models
    grain  minimum standard deviation of a model's value, such as the sampling error of a test accuracy
    missing  how many models have no value, and why; empty if all have one
    """

    terms: tuple[tuple[float, tuple[float, ...]], ...]
    grain: float = GRAIN
    missing: str = ""

    @property
    def seeds(self) -> int:
        """The number of seeds of the smallest term."""
        return min(len(values) for _, values in self.terms)

    @property
    def known(self) -> bool:
        """Whether every model has a value."""
        return all(np.isfinite(values).all() for _, values in self.terms)

    @cached_property
    def value(self) -> float:
        """The weighted sum."""
        return float(sum(weight * np.mean(values) for weight, values in self.terms))

    @cached_property
    def _errors(self) -> np.ndarray:
        """Variance of the mean of each term; needs at least two models."""
        floor = self.grain**2
        spreads = [max(float(np.var(values, ddof=1)), floor) / len(values) for _, values in self.terms]
        return np.array([weight**2 * spread for (weight, _), spread in zip(self.terms, spreads, strict=True)])

    @cached_property
    def error(self) -> float:
        """Standard error; needs at least two models per term."""
        return float(np.sqrt(self._errors.sum()))

    @cached_property
    def freedom(self) -> float:
        """Degrees of freedom by Welch and Satterthwaite; with one term those of Student's t."""
        errors, counts = self._errors, np.array([len(values) for _, values in self.terms])
        total = errors.sum()
        return float(total**2 / (errors**2 / (counts - 1)).sum()) if total > 0 else float(counts.min() - 1)

    def interval(self, level: float) -> tuple[float, float]:
        """Interval with coverage 1 - ``level``."""
        half = float(stdtrit(self.freedom, 1 - level / 2)) * self.error
        return self.value - half, self.value + half

    def estimate(self, level: float = 0.05) -> Estimate:
        """The sum with its interval, which is unbounded if a term has only one model."""
        low, high = self.interval(level) if self.seeds > 1 else (-np.inf, np.inf)
        return Estimate(self.value, low, high, self.seeds)

    def above(self, bar: float) -> float:
        """P-value against the sum being at ``bar`` or below."""
        return self._beyond(bar, 1)

    def below(self, bar: float) -> float:
        """P-value against the sum being at ``bar`` or above."""
        return self._beyond(bar, -1)

    def _beyond(self, bar: float, side: int) -> float:
        if not np.isfinite(bar):
            return float(side * bar > 0)
        lead = side * (self.value - bar)
        return float(lead <= 0) if self.error == 0 else float(stdtr(self.freedom, -lead / self.error))

    def seeds_to_decide(self, bar: float, level: float) -> int | None:
        """Seeds needed if mean and spread stay the same; None if more than `MOST_TIMES` times the current number."""
        distance = abs(self.value - bar)
        for count in range(self.seeds + 1, MOST_TIMES * self.seeds + 1):
            growth = count / self.seeds
            freedom = self.freedom * (count - 1) / (self.seeds - 1)
            if float(stdtrit(freedom, 1 - level / 2)) * self.error / growth**0.5 < distance:
                return count
        return None


def contrast(*terms: tuple[float, Values], grain: float = GRAIN) -> Contrast:
    """A `Contrast` of weights and values, one per seed."""
    listed = ((w, values.values() if isinstance(values, Mapping) else values) for w, values in terms)
    return Contrast(tuple((weight, tuple(map(float, values))) for weight, values in listed), grain)


def of_one(values: Values, grain: float = GRAIN) -> Contrast:
    """The mean over one set of models."""
    return contrast((1.0, values), grain=grain)


def difference(first: Values, second: Values, grain: float = GRAIN) -> Contrast:
    """One mean minus another."""
    return contrast((1.0, first), (-1.0, second), grain=grain)
