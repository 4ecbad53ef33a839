"""How a head's mean logit falls with distance: five curves, fitted and ranked, for many heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int, Shaped
from scipy.optimize import elementwise

from toeplens.utils import InputError, invalid

Form = Literal["constant", "linear", "exponential", "power", "logarithmic"]

FORMS: Mapping[Form, str] = {
    "constant": "a",
    "linear": "a - b delta",
    "exponential": "a exp(-delta / tau) + c",
    "power": "a (1 + delta)^-p + c",
    "logarithmic": "a - b log(1 + delta)",
}

_BLOCKS = 4096  # logarithmically spaced blocks of offsets used in the search for tau and p
_GRID = 128  # logarithmically spaced starting values of tau or p
_EDGE_OFFSET = 1e-3  # of a grid step: distance from the ends of the grid at which the search may start
_ROUNDING = 1e-12  # residuals below this part of the largest |mean| are rounding errors
_POWER_RANGE = (0.01, 20.0)  # range of p; beyond it the curve is the logarithm, or a spike at the first offset


@dataclass(frozen=True)
class DecayFit:
    """One curve fitted to means by offset (`fit_decay`).

    form           its name, a key of `FORMS`
    parameters     by the names in `FORMS`; a, b, c in the means' unit (b per offset, or per e-fold), tau in offsets
    r2             share of the weighted variance of the means explained; nan if the means are equal
    bic            n log(weighted mean square residual) + k log n, over n offsets with k parameters: lower is better
    half_distance  offset at which the decaying part has fallen to half of its value at 0, for curves with a limit:
                   tau log 2, or 2^(1/p) - 1; nan for the others, and if the means are equal
    """

    form: Form
    parameters: Mapping[str, float]
    r2: float
    bic: float
    half_distance: float

    def evaluate(self, offsets: Shaped[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """The fitted mean at ``offsets``."""
        return _evaluate(self.form, self.parameters, offsets)


def fit_decay(
    offsets: Int[np.ndarray, "D"] | Float[np.ndarray, "D"],
    means: Float[np.ndarray, "D"],
    *,
    counts: Int[np.ndarray, "D"] | Float[np.ndarray, "D"] | None = None,
) -> list[DecayFit]:
    """Fit the curves of distance decay (`FORMS`) to a head's diagonal means, best (lowest BIC) first.

    linear is ALiBi's form (arXiv 2108.12409), logarithmic KERPLE's with an inner scale of 1 (arXiv 2205.09921).
    Weighted least squares: for each tau or p the linear parameters are solved exactly; tau or p is searched on a grid
    and then between grid points (variable projection). Above 4096 offsets the parameters are fitted to count-weighted
    averages over blocks, equal in log(1 + delta - first); residuals, r2 and BIC are computed over all offsets.

    Real means are correlated along delta, so differences in BIC are overstated: trust the order, not its odds. A
    negative a or b is growth. tau is searched from a tenth of the smallest step to 100 times the span, p from 0.01 to
    20; at the long end the curve becomes the line or the logarithm, which then ranks first, with one parameter less.

    Arguments
        offsets  delta >= 0, distinct, in any order
        means    mean of each diagonal; nan values are ignored
        counts   number of entries behind each mean, its weight (default: 1); zero counts are ignored
    """
    return fit_decays(offsets, means[None], counts=counts)[0]


def fit_decays(
    offsets: Int[np.ndarray, "D"] | Float[np.ndarray, "D"],
    means: Float[np.ndarray, "H D"],
    *,
    counts: Int[np.ndarray, "D"] | Float[np.ndarray, "D"] | None = None,
) -> list[list[DecayFit]]:
    """`fit_decay` for several heads with the same counts, in a fraction of the time."""
    missing = np.isnan(means)
    if (missing != missing[:1]).any():
        return [fit_decays(offsets, row[None], counts=counts)[0] for row in means]
    offsets, means, weights = _valid_points(offsets, means, counts)
    x, y, w = offsets, means, weights
    if len(x) > _BLOCKS:  # weighted averages over blocks of offsets, equal in log(1 + delta - first)
        reach = np.log1p(x - x[0])
        _, block = np.unique(np.floor(reach / reach[-1] * _BLOCKS), return_inverse=True)
        total = np.bincount(block, w)
        averages = np.stack([np.bincount(block, w * row) for row in y]) / total
        x, y, w = np.bincount(block, w * x) / total, averages, total
    first, span = x[0], x[-1] - x[0]
    shortest = max(np.diff(x).min() / 10, first / 500)  # below, exp(first / tau) would overflow
    distance, ratio = x - first, np.log((1 + x) / (1 + first))

    slowest, fastest = np.transpose([(0.01 / max(span, shortest), 1 / shortest), _POWER_RANGE])
    (tau, p), (c_exp, c_power), (a_exp, a_power) = _fit_curves(np.stack((distance, ratio)), y, w, slowest, fastest)
    tau = 1 / tau
    a_linear, b_linear = _fit_lines(x, y, w)
    a_log, b_log = _fit_lines(np.log1p(x), y, w)
    parameters_by_form: dict[Form, dict[str, Float[np.ndarray, "H"]]] = {
        "constant": {"a": y @ w / w.sum()},
        "linear": {"a": a_linear, "b": -b_linear},
        "exponential": {"a": a_exp * np.exp(first / tau), "tau": tau, "c": c_exp},
        "power": {"a": a_power * (1 + first) ** p, "p": p, "c": c_power},
        "logarithmic": {"a": a_log, "b": -b_log},
    }

    fits = []
    for head, head_means in enumerate(means):
        head_fits = []
        for form, values in parameters_by_form.items():
            parameters = {name: float(x[head]) for name, x in values.items()}
            head_fits.append(_score_fit(form, parameters, offsets, head_means, weights))
        fits.append(sorted(head_fits, key=lambda fit: fit.bic))
    return fits


def _valid_points(
    offsets: Shaped[np.ndarray, "D"], means: Float[np.ndarray, "H D"], counts: Shaped[np.ndarray, "D"] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Offsets in ascending order, means and counts in double precision, where the mean is defined."""
    weights = np.ones(means.shape[1]) if counts is None else np.asarray(counts, dtype=np.float64)
    for name, values in (("offsets", offsets), ("counts", weights)):
        if values.shape != means.shape[1:]:
            raise invalid(name, f"have shape {list(means.shape[1:])}, as means", got=f"shape {list(values.shape)}")
    if not (weights >= 0).all() or not np.isfinite(weights).all():
        raise InputError("counts must be finite and at least 0.")
    valid = ~np.isnan(means).any(0) & (weights > 0)
    offsets, means, weights = offsets[valid].astype(np.float64), means[:, valid].astype(np.float64), weights[valid]
    if not np.isfinite(means).all():
        raise InputError("means must be finite, or nan where there is no mean.")
    if len(offsets) and not (offsets.min() >= 0 and np.isfinite(offsets).all()):
        raise InputError("offsets must be finite and at least 0.")
    order = np.argsort(offsets)
    offsets, means, weights = offsets[order], means[:, order], weights[order]
    repeated = offsets[1:][np.diff(offsets) == 0]
    if len(repeated):
        raise invalid("offsets", "be unique", got=f"{repeated[0]:g} more than once")
    if len(offsets) < 4:
        raise invalid("means", "have at least 4 entries that are not nan and have a positive count", len(offsets))
    return offsets, means, weights


def _fit_lines(
    g: Float[np.ndarray, "*_H D"], y: Float[np.ndarray, "H D"], w: Float[np.ndarray, "D"]
) -> tuple[Float[np.ndarray, "H"], Float[np.ndarray, "H"]]:
    """Intercept and slope of the weighted least-squares line of each ``y`` on ``g``; slope 0 if it is constant."""
    total = w.sum()
    mean, level = np.asarray(g @ w / total), y @ w / total
    centred = g - mean[..., None]
    spread = centred**2 @ w
    product = (centred * (y - level[:, None])) @ w
    slope = np.divide(product, spread, out=np.zeros_like(product), where=spread > 0)
    return level - slope * mean, slope


def _fit_curves(
    x: Float[np.ndarray, "C D"],
    y: Float[np.ndarray, "H D"],
    w: Float[np.ndarray, "D"],
    low: Float[np.ndarray, "C"],
    high: Float[np.ndarray, "C"],
) -> tuple[Float[np.ndarray, "C H"], Float[np.ndarray, "C H"], Float[np.ndarray, "C H"]]:
    """Rate r, constant c and factor a of the curve c + a exp(-r x) with the least residual, for each x and each y, with
    the rate of an x from its ``low`` to its ``high``."""
    count, heads = len(x), len(y)

    def fit(log_rate: Float[np.ndarray, "n"], row: Int[np.ndarray, "n"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shapes, targets = np.exp(-np.exp(log_rate)[:, None] * x[row // heads]), y[row % heads]
        intercept, slope = _fit_lines(shapes, targets, w)
        return (targets - intercept[:, None] - slope[:, None] * shapes) ** 2 @ w, intercept, slope

    grid = np.linspace(np.log(low), np.log(high), _GRID, axis=-1)
    shapes = np.exp(-np.exp(grid)[..., None] * x[:, None])
    shapes -= (shapes @ w / w.sum())[..., None]
    spread, product = (shapes**2 @ w)[:, None], (w * (y - (y @ w / w.sum())[:, None])) @ shapes.mT
    best = np.divide(product**2, spread, out=np.zeros_like(product), where=spread > 0).argmax(-1)
    step, rows = grid[:, 1:2] - grid[:, :1], np.arange(count * heads)
    inside = _EDGE_OFFSET * step * ((best == 0).astype(float) - (best == _GRID - 1))  # the start, inside its bracket
    around = [np.take_along_axis(grid, (best + shift).clip(0, _GRID - 1), 1) for shift in (-1, 0, 1)]
    bracket = [points.ravel() for points in (around[0], around[1] + inside, around[2])]
    result = elementwise.find_minimum(lambda *at: fit(*at)[0], bracket, args=(rows,), tolerances={"xatol": 1e-10})
    grid_best = around[1].ravel()
    is_better = result.success & (result.f_x < fit(grid_best, rows)[0])
    log_rate = np.where(is_better, result.x, grid_best)
    fitted = (np.exp(log_rate), *fit(log_rate, rows)[1:])
    rate, intercept, slope = (values.reshape(count, heads) for values in fitted)
    return rate, intercept, slope


def _evaluate(form: Form, parameters: Mapping[str, float], x: np.ndarray) -> np.ndarray:
    if form == "constant":
        return np.full(x.shape, parameters["a"])
    if form == "linear":
        return parameters["a"] - parameters["b"] * x
    if form == "logarithmic":
        return parameters["a"] - parameters["b"] * np.log1p(x)
    if form == "exponential":
        return parameters["a"] * np.exp(-x / parameters["tau"]) + parameters["c"]
    return parameters["a"] * (1.0 + x) ** -parameters["p"] + parameters["c"]


def _score_fit(form: Form, parameters: dict[str, float], x: np.ndarray, y: np.ndarray, w: np.ndarray) -> DecayFit:
    """The fit with its r2 and BIC; residuals of at least rounding, so that exact curves rank by their parameters."""
    floor = max((_ROUNDING * np.abs(y).max()) ** 2, np.finfo(float).tiny)
    w = w / w.sum()
    residual = float(w @ (y - _evaluate(form, parameters, x)) ** 2)
    variance = float(w @ (y - w @ y) ** 2)
    bic = len(x) * np.log(max(residual, floor)) + len(parameters) * np.log(len(x))
    r2 = half = np.nan
    if variance > floor:
        r2 = 1 - residual / variance
        if form == "exponential":
            half = parameters["tau"] * np.log(2)
        elif form == "power":
            half = 2 ** (1 / parameters["p"]) - 1
    return DecayFit(form, parameters, r2, float(bic), float(half))
