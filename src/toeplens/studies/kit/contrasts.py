"""What is compared: a mean over trained models, or a weighted sum of such means, with the interval of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import stdtr, stdtrit

from toeplens.lens import Estimate

Values = Sequence[float] | Mapping[int, float] | np.ndarray  # one a seed, or by seed
GRAIN = 0.005
MOST_TIMES = 4  # as many models as there are, that somebody may be told to train


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of means over models, such as one encoding's mean less another's.

    Models of different terms are taken as independent (Welch): that they share a seed's examples made their figures no
    more alike in the studies so far, and pairing costs half of the degrees of freedom. Terms may have different seeds.

    terms  weight, and figures of the models
    grain  a model's figure is not known better than this, in its own unit: where models agree more closely, their
           spread is taken to be this (a test accuracy on a thousand examples has such an error of its own)
    missing  how many models have no figure, and why, in a few words; empty if all have one
    """

    terms: tuple[tuple[float, tuple[float, ...]], ...]
    grain: float = GRAIN
    missing: str = ""

    @property
    def seeds(self) -> int:
        """Of the term that has the fewest."""
        return min(len(values) for _, values in self.terms)

    @property
    def known(self) -> bool:
        """Whether every model has a figure."""
        return all(np.isfinite(values).all() for _, values in self.terms)

    @cached_property
    def value(self) -> float:
        """The sum itself."""
        return float(sum(weight * np.mean(values) for weight, values in self.terms))

    @cached_property
    def _errors(self) -> np.ndarray:
        """Of each term, the variance of its mean; two models at least."""
        floor = self.grain**2
        spreads = [max(float(np.var(values, ddof=1)), floor) / len(values) for _, values in self.terms]
        return np.array([weight**2 * spread for (weight, _), spread in zip(self.terms, spreads, strict=True)])

    @cached_property
    def error(self) -> float:
        """Standard error; two models a term at least."""
        return float(np.sqrt(self._errors.sum()))

    @cached_property
    def freedom(self) -> float:
        """Degrees of freedom by Welch and Satterthwaite; with one term those of Student."""
        errors, counts = self._errors, np.array([len(values) for _, values in self.terms])
        total = errors.sum()
        return float(total**2 / (errors**2 / (counts - 1)).sum()) if total > 0 else float(counts.min() - 1)

    def interval(self, level: float) -> tuple[float, float]:
        """Of coverage 1 - ``level``."""
        half = float(stdtrit(self.freedom, 1 - level / 2)) * self.error
        return self.value - half, self.value + half

    def estimate(self, level: float = 0.05) -> Estimate:
        """The sum with its interval, which is unbounded where a term has one model."""
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
        """How many seeds would do, if means and spreads stay; None if more than `MOST_TIMES` as many as now."""
        distance = abs(self.value - bar)
        for count in range(self.seeds + 1, MOST_TIMES * self.seeds + 1):
            growth = count / self.seeds
            freedom = self.freedom * (count - 1) / (self.seeds - 1)
            if float(stdtrit(freedom, 1 - level / 2)) * self.error / growth**0.5 < distance:
                return count
        return None


def contrast(*terms: tuple[float, Values], grain: float = GRAIN) -> Contrast:
    """A `Contrast` of weights with figures, one a seed."""
    listed = ((w, values.values() if isinstance(values, Mapping) else values) for w, values in terms)
    return Contrast(tuple((weight, tuple(map(float, values))) for weight, values in listed), grain)


def of_one(values: Values, grain: float = GRAIN) -> Contrast:
    """The mean of one kind of model."""
    return contrast((1.0, values), grain=grain)


def difference(first: Values, second: Values, grain: float = GRAIN) -> Contrast:
    """One mean less another."""
    return contrast((1.0, first), (-1.0, second), grain=grain)
