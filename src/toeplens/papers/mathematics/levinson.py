"""The predictor (Levinson-Durbin) and the frequencies of a Toeplitz kernel.

arXiv 2505.13027 v1 (appendix C.4) says that in an ideal case the Levinson-Durbin recursion recovers the position part
from the values of the Toeplitz matrix. What is true: from exact values p_i . p_j = r_(i-j), the recursion gives the
predictor of the positions, and the predictor's roots give the frequencies. No method gives the positions themselves,
except up to an orthogonal map. Nor can the recursion say which part of a matrix is position (stationary content adds to
r in the same way), and close frequencies amplify errors of the values without bound: for rotary positions at base
10000, four frequencies are already too close to 0 to be distinguished in double precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.linalg import solve_toeplitz, toeplitz

from toeplens.utils import InputError


@dataclass(frozen=True)
class LinearPredictor:
    """The best linear predictor p_i ~ sum over k = 1..K of c_k p_(i-k) (`linear_predictor`).

    coefficients  [K] c_1, ..., c_K
    variance      mean square error, in the unit of r_0 (= the mean square of p); 0 for a sum of at most K / 2
                  sinusoids. If negative, the values do not belong to a positive semi-definite matrix and the prediction
                  is meaningless
    """

    coefficients: Float[np.ndarray, "K"]
    variance: float


def linear_predictor(autocorrelation: Float[np.ndarray, "M"], order: int) -> LinearPredictor:
    """The linear predictor of a stationary sequence from its ``order`` previous values (`scipy.linalg.solve_toeplitz`).

    Of the autocorrelation r_delta = E[p_i . p_(i-delta)] the first order + 1 values are read. Raises `InputError` if
    the matrix of r is singular to rounding, as for a sum of sinusoids with fewer than ``order`` roots: then many
    predictors are exact, and a lower order has a unique one. If r is not positive definite, the recursion may lose
    digits.
    """
    values = autocorrelation[: order + 1].astype(np.float64)
    if np.linalg.matrix_rank(toeplitz(values[:order]), hermitian=True) < order:
        raise InputError(f"order: a predictor of lower order than {order} is already exact.")
    coefficients = solve_toeplitz(values[:-1], values[1:])
    return LinearPredictor(coefficients, float(values[0] - coefficients @ values[1:]))


def prony_frequencies(autocorrelation: Float[np.ndarray, "M"], count: int) -> Float[np.ndarray, "count"]:
    """The frequencies theta_t of r_delta = sum over t of w_t cos(delta theta_t), w_t != 0, in ascending order (Prony).

    Such a sequence is predicted exactly by its last 2 ``count`` values, and the roots of the predictor's polynomial
    z^2n - sum c_k z^(2n-k) are e^(+-i theta_t). With errors in r the roots leave the unit circle; their angles are used
    anyway, and a pair that has become real counts as 0 or pi. Raises `InputError` if the values have fewer frequencies
    in (0, pi) than ``count``, in double precision.
    """
    try:
        prediction = linear_predictor(autocorrelation, 2 * count)
    except InputError:
        raise InputError(f"count: the values have fewer than {count} sinusoids in double precision.") from None
    angles = np.abs(np.angle(np.roots(np.concatenate(([1.0], -prediction.coefficients)))))
    return np.sort(angles)[::2]
