"""How a head's mean logit falls with distance: five forms, fitted and ranked, for many heads at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int, Shaped
from scipy.optimize import elementwise

from toeplens.ground import InputError, invalid

Form = Literal["constant", "linear", "exponential", "power", "logarithmic"]

FORMS: Mapping[Form, str] = {
    "constant": "a",
    "linear": "a - b delta",
    "exponential": "a exp(-delta / tau) + c",
    "power": "a (1 + delta)^-p + c",
    "logarithmic": "a - b log(1 + delta)",
}

_BLOCKS = 4096  # blocks of offsets, even in the logarithm, that the search for tau and p reads
_GRID = 128  # values of tau or p, even in the logarithm, among which the search begins
_BESIDE = 1e-3  # of a step of that grid: how near its ends it is looked at
_ROUNDING = 1e-12  # of the largest |mean|: residuals below are rounding
_POWERS = (0.01, 20.0)  # p beyond: the logarithm, and a spike at the first offset


@dataclass(frozen=True)
class DecayFit:
    """One form fitted to means by offset (`fit_decay`).

    form           its name, a key of `FORMS`
    parameters     by the names in `FORMS`; a, b, c in the means' unit (b per offset, or per e-fold), tau in offsets
    r2             share of the weighted variance of the means explained; nan where the means are equal
    bic            n log(weighted mean square residual) + k log n, over n offsets with k parameters: lower is better
    half_distance  offset at which what decays has fallen to half of its value at 0, for a form that tends to a limit:
                   tau log 2, or 2^(1/p) - 1; nan for the others, and where the means are equal
    """

    form: Form
    parameters: Mapping[str, float]
    r2: float
    bic: float
    half_distance: float

    def at(self, offsets: Shaped[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """The fitted mean at ``offsets``."""
        return _value(self.form, self.parameters, offsets)


def fit_decay(
    offsets: Int[np.ndarray, "D"] | Float[np.ndarray, "D"],
    means: Float[np.ndarray, "D"],
    *,
    counts: Int[np.ndarray, "D"] | Float[np.ndarray, "D"] | None = None,
) -> list[DecayFit]:
    """Fit the forms of distance decay (`FORMS`) to a head's diagonal means, best (lowest BIC) first.

    linear is ALiBi's form (arXiv 2108.12409), logarithmic KERPLE's with an inner scale of 1 (arXiv 2205.09921).
    Weighted least squares: the linear parameters are solved exactly for each tau or p, and that one is searched on a
    grid and then between its neighbours (variable projection). Above 4096 offsets the parameters are fitted to
    count-weighted averages over blocks even in log(1 + delta - first), of a relative width of 0.4% at a million
    offsets; residuals, r2 and BIC are of all offsets at the parameters found.

    The weights take a mean of n values to vary as 1/n, independently of the others. Real means are correlated along
    delta, so that differences in BIC overstate what is known: the order is to be trusted, not its odds. The signs are
    free: a negative a or b is a growth. tau is searched from a tenth of the smallest step to 100 times the span, p
    from 0.01 to 20; at the long end of these the form is another's limit (the line, the logarithm), which then ranks
    first with a parameter less.

    Arguments
        offsets  delta >= 0, distinct, in any order
        means    mean of each diagonal; nan ones are left out
        counts   entries behind each mean, its weight (1 unless given); those of none are left out
    """
    return fit_decays(offsets, means[None], counts=counts)[0]


def fit_decays(
    offsets: Int[np.ndarray, "D"] | Float[np.ndarray, "D"],
    means: Float[np.ndarray, "H D"],
    *,
    counts: Int[np.ndarray, "D"] | Float[np.ndarray, "D"] | None = None,
) -> list[list[DecayFit]]:
    """`fit_decay` of several heads with the same counts: what it says of each, in a fraction of the time."""
    missing = np.isnan(means)
    if (missing != missing[:1]).any():
        return [fit_decays(offsets, row[None], counts=counts)[0] for row in means]
    offsets, means, weights = _usable(offsets, means, counts)
    x, y, w = _thinned(offsets, means, weights)
    first, span = x[0], x[-1] - x[0]
    shortest = max(np.diff(x).min() / 10, first / 500)  # below, exp(first / tau) would overflow
    away, ratio = x - first, np.log((1 + x) / (1 + first))

    def exponential(tau: Float[np.ndarray, "K"]) -> Float[np.ndarray, "K D"]:
        return np.exp(-away / tau[:, None])

    def power(p: Float[np.ndarray, "K"]) -> Float[np.ndarray, "K D"]:
        return np.exp(-p[:, None] * ratio)

    tau = _searched(exponential, y, w, shortest, 100 * max(span, shortest))
    p = _searched(power, y, w, *_POWERS)
    a_linear, b_linear = _lines(x, y, w)
    a_log, b_log = _lines(np.log1p(x), y, w)
    c_exp, a_exp = _lines(exponential(tau), y, w)
    c_power, a_power = _lines(power(p), y, w)
    found: dict[Form, dict[str, Float[np.ndarray, "H"]]] = {
        "constant": {"a": y @ w / w.sum()},
        "linear": {"a": a_linear, "b": -b_linear},
        "exponential": {"a": a_exp * np.exp(first / tau), "tau": tau, "c": c_exp},
        "power": {"a": a_power * (1 + first) ** p, "p": p, "c": c_power},
        "logarithmic": {"a": a_log, "b": -b_log},
    }

    def judged(head: int) -> list[DecayFit]:
        fits = []
        for form, values in found.items():
            parameters = {name: float(x[head]) for name, x in values.items()}
            fits.append(_judged(form, parameters, offsets, means[head], weights))
        return sorted(fits, key=lambda fit: fit.bic)

    return [judged(head) for head in range(len(means))]


def _usable(
    offsets: Shaped[np.ndarray, "D"], means: Float[np.ndarray, "H D"], counts: Shaped[np.ndarray, "D"] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Offsets in ascending order, means and counts in double precision, where there is a mean."""
    weights = np.ones(means.shape[1]) if counts is None else counts.astype(np.float64)
    if not (weights >= 0).all() or not np.isfinite(weights).all():
        raise InputError("counts must be finite and at least 0.")
    kept = ~np.isnan(means).any(0) & (weights > 0)
    offsets, means, weights = offsets[kept].astype(np.float64), means[:, kept].astype(np.float64), weights[kept]
    if not np.isfinite(means).all():
        raise InputError("means must be finite, or nan where there is no mean.")
    if len(offsets) and not (offsets.min() >= 0 and np.isfinite(offsets).all()):
        raise InputError("offsets must be finite and at least 0.")
    order = np.argsort(offsets)
    offsets, means, weights = offsets[order], means[:, order], weights[order]
    if (np.diff(offsets) == 0).any():
        raise InputError("offsets must be different.")
    if len(offsets) < 4:
        raise invalid("means", "have at least 4 entries to fit three parameters", len(offsets))
    return offsets, means, weights


def _thinned(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weighted averages over blocks of offsets that are even in log(1 + delta - first)."""
    if len(x) <= _BLOCKS:
        return x, y, w
    reach = np.log1p(x - x[0])
    _, block = np.unique(np.floor(reach / reach[-1] * _BLOCKS), return_inverse=True)
    total = np.bincount(block, w)
    averages = np.stack([np.bincount(block, w * row) for row in y]) / total
    return np.bincount(block, w * x) / total, averages, total


def _lines(
    g: Float[np.ndarray, "*_H D"], y: Float[np.ndarray, "H D"], w: Float[np.ndarray, "D"]
) -> tuple[Float[np.ndarray, "H"], Float[np.ndarray, "H"]]:
    """Intercept and slope of the weighted least squares line of each ``y`` on ``g``; slope 0 where it is constant."""
    total = w.sum()
    mean, level = np.asarray(g @ w / total), y @ w / total
    about = g - mean[..., None]
    spread = about**2 @ w
    product = (about * (y - level[:, None])) @ w
    slope = np.divide(product, spread, out=np.zeros_like(product), where=spread > 0)
    return level - slope * mean, slope


def _searched(
    form: Callable[[Float[np.ndarray, "K"]], Float[np.ndarray, "K D"]],
    y: Float[np.ndarray, "H D"],
    w: Float[np.ndarray, "D"],
    low: float,
    high: float,
) -> Float[np.ndarray, "H"]:
    """For each ``y``, the value in [low, high] whose ``form`` leaves the least, two linear parameters solved for."""

    def left(log_value: Float[np.ndarray, "h"], head: Int[np.ndarray, "h"]) -> Float[np.ndarray, "h"]:
        g, some = form(np.exp(log_value)), y[head]
        intercept, slope = _lines(g, some, w)
        return (some - intercept[:, None] - slope[:, None] * g) ** 2 @ w

    grid = np.linspace(np.log(low), np.log(high), _GRID)
    shapes = form(np.exp(grid))
    shapes -= (shapes @ w / w.sum())[:, None]
    spread, product = shapes**2 @ w, (w * (y - (y @ w / w.sum())[:, None])) @ shapes.T
    best = np.divide(product**2, spread, out=np.zeros_like(product), where=spread > 0).argmax(-1)
    step, heads = grid[1] - grid[0], np.arange(len(y))
    start = grid[best] + _BESIDE * step * ((best == 0).astype(float) - (best == _GRID - 1))  # inside its bracket
    bracket = grid[np.maximum(best - 1, 0)], start, grid[np.minimum(best + 1, _GRID - 1)]
    found = elementwise.find_minimum(left, bracket, args=(heads,), tolerances={"xatol": 1e-10})
    inside = found.success & (found.f_x < left(grid[best], heads))
    return np.exp(np.where(inside, found.x, grid[best]))


def _value(form: Form, given: Mapping[str, float], x: np.ndarray) -> np.ndarray:
    if form == "constant":
        return np.full(x.shape, given["a"])
    if form == "linear":
        return given["a"] - given["b"] * x
    if form == "logarithmic":
        return given["a"] - given["b"] * np.log1p(x)
    if form == "exponential":
        return given["a"] * np.exp(-x / given["tau"]) + given["c"]
    return given["a"] * (1.0 + x) ** -given["p"] + given["c"]


def _judged(form: Form, parameters: dict[str, float], x: np.ndarray, y: np.ndarray, w: np.ndarray) -> DecayFit:
    """The fit with its r2 and BIC over all offsets; residuals within rounding count as rounding, so that exact forms
    are ranked by their number of parameters."""
    floor = max((_ROUNDING * np.abs(y).max()) ** 2, np.finfo(float).tiny)
    w = w / w.sum()
    residual = float(w @ (y - _value(form, parameters, x)) ** 2)
    variance = float(w @ (y - w @ y) ** 2)
    bic = len(x) * np.log(max(residual, floor)) + len(parameters) * np.log(len(x))
    r2 = 1 - residual / variance if variance > floor else np.nan
    half = np.nan
    if form == "exponential" and variance > floor:
        half = parameters["tau"] * np.log(2)
    elif form == "power" and variance > floor:
        half = 2 ** (1 / parameters["p"]) - 1
    return DecayFit(form, parameters, r2, float(bic), float(half))
