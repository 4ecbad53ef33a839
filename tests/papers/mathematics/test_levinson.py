"""What Levinson-Durbin gives back of planted processes, sinusoids and positions, and where it stops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.ground import InputError
from toeplens.papers.mathematics.levinson import frequencies, predictor

THETA = np.array([0.3, 1.1, 2.0, 2.9])
WEIGHTS = np.array([1.0, 0.5, 2.0, 0.7])


def cosines(theta: np.ndarray, weights: np.ndarray, length: int) -> np.ndarray:
    return np.array(
        [sum(w * np.cos(delta * t) for t, w in zip(theta, weights, strict=True)) for delta in range(length)]
    )


def of_process(poles: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients c of p_i = sum c_k p_(i-k) + e_i, |e| = 1, with these poles, and its autocorrelation.

    From the impulse response h, run long enough to end below rounding: r_delta = sum over i of h_i h_(i+delta).
    """
    coefficients = -np.real(np.poly(poles))[1:]
    response = [1.0]
    while len(response) < 4000:
        past = response[: -len(coefficients) - 1 : -1]
        response.append(sum(c * p for c, p in zip(coefficients, past, strict=False)))
    h = np.array(response)
    return coefficients, np.array([h[: len(h) - delta] @ h[delta:] for delta in range(length)])


@given(seed=st.integers(0, 999), real=st.integers(0, 2), pairs=st.integers(0, 2))
def test_a_planted_process_is_recovered(seed: int, real: int, pairs: int) -> None:
    """Exact autocorrelation, float64: coefficients and error variance to 1e-10."""
    rng = np.random.default_rng(seed)
    turning = rng.uniform(0.2, 0.8, pairs) * np.exp(1j * rng.uniform(0.3, 2.8, pairs))
    poles = np.concatenate((rng.uniform(-0.8, 0.8, real), turning, turning.conj()))
    if not len(poles):
        return
    coefficients, r = of_process(poles, len(poles) + 3)
    found = predictor(r, len(poles))
    np.testing.assert_allclose(found.coefficients, coefficients, atol=1e-10)
    assert found.variance == pytest.approx(1, abs=1e-10)
    longer = predictor(r, len(poles) + 2)
    np.testing.assert_allclose(longer.coefficients, np.concatenate((coefficients, [0, 0])), atol=1e-10)


def test_the_predictor_is_the_best_one() -> None:
    """Its normal equations, dense; any other predictor misses more."""
    rng = np.random.default_rng(0)
    r = of_process(np.array([0.9, -0.5, 0.3]), 3)[1]
    matrix = np.array([[r[abs(i - j)] for j in range(2)] for i in range(2)])
    found = predictor(r, 2)
    np.testing.assert_allclose(found.coefficients, np.linalg.solve(matrix, r[1:]), atol=1e-12)
    for _ in range(20):
        other = found.coefficients + rng.normal(size=2)
        assert r[0] - 2 * other @ r[1:] + other @ matrix @ other > found.variance


@pytest.mark.parametrize("count", [1, 2, 4])
def test_planted_frequencies_are_recovered(count: int) -> None:
    """Exact values, well separated: to 1e-6, with either sign of weight and whatever else is given."""
    for sign in (1, -1):
        r = cosines(THETA[:count], sign * WEIGHTS[:count], 2 * count + 5)
        np.testing.assert_allclose(frequencies(r, count), THETA[:count], atol=1e-6)
        assert predictor(r, 2 * count).variance == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: predictor(r, 9), "order: a predictor of lower order than 9 is already exact"),
        (lambda r: frequencies(r, 5), "count: the values have fewer than 5 sinusoids"),
    ],
)
def test_what_cannot_be_recovered_is_refused(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(cosines(THETA, WEIGHTS, 12))
