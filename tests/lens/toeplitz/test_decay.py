"""Planted forms of decay come back, the right one first, whatever the unit and however many offsets there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from toeplens.ground import InputError
from toeplens.lens.toeplitz import decay
from toeplens.lens.toeplitz.decay import FORMS, DecayFit, Form, fit_decay

PLANTED: dict[Form, dict[str, float]] = {
    "constant": {"a": 0.7},
    "linear": {"a": 1.0, "b": 0.05},
    "exponential": {"a": 2.0, "tau": 15.0, "c": -1.0},
    "power": {"a": 3.0, "p": 0.8, "c": 0.5},
    "logarithmic": {"a": 1.0, "b": 0.4},
}
each_form = pytest.mark.parametrize("form", list(PLANTED))


def planted(form: Form, offsets: np.ndarray, given: Mapping[str, float] | None = None) -> np.ndarray:
    """The forms as `FORMS` writes them, offset by offset."""
    g = given or PLANTED[form]
    formulas: dict[Form, Callable[[float], float]] = {
        "constant": lambda delta: g["a"],
        "linear": lambda delta: g["a"] - g["b"] * delta,
        "exponential": lambda delta: g["a"] * math.exp(-delta / g["tau"]) + g["c"],
        "power": lambda delta: g["a"] * (1 + delta) ** -g["p"] + g["c"],
        "logarithmic": lambda delta: g["a"] - g["b"] * math.log(1 + delta),
    }
    return np.array([formulas[form](delta) for delta in offsets.tolist()])


def causal(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and the entries on each diagonal of a causal matrix."""
    return np.arange(size), np.arange(size, 0, -1)


def noise(counts: np.ndarray, level: float, seed: int = 0) -> np.ndarray:
    """As means of ``counts`` entries have it."""
    rng = np.random.Generator(np.random.Philox(seed))
    return level * rng.normal(size=len(counts)) * np.sqrt(counts[0] / counts)


def named(fits: list[DecayFit], form: Form) -> DecayFit:
    return next(fit for fit in fits if fit.form == form)


@each_form
@pytest.mark.parametrize("size", [20, 300, 1_048_576])
def test_a_planted_form_is_recovered(form: Form, size: int) -> None:
    """Without noise: first in rank, parameters to 1e-3 (relative), with blocks and without."""
    offsets, counts = causal(size)
    means = planted(form, offsets)
    fits = fit_decay(offsets, means, counts=counts)
    assert {fit.form for fit in fits} == set(FORMS)
    assert np.all(np.diff([fit.bic for fit in fits]) >= 0)
    assert fits[0].form == form
    assert fits[0].parameters == pytest.approx(PLANTED[form], rel=1e-3)
    wanted = np.nan if form == "constant" else 1
    assert fits[0].r2 == pytest.approx(wanted, abs=1e-9, nan_ok=True)
    np.testing.assert_allclose(fits[0].at(offsets), means, rtol=1e-3, atol=1e-3)


@each_form
def test_no_parameters_nearby_are_better(form: Form) -> None:
    """The weighted squares, written out, grow whichever parameter moves."""
    offsets, counts = causal(200)
    means = planted(form, offsets) + noise(counts, 0.01)
    for fit in fit_decay(offsets, means, counts=counts):
        if fit.form == "exponential" and form == "linear":  # its tau is at the end of the search
            continue
        if fit.form == "power" and form in ("logarithmic", "linear", "constant"):  # and so may be p
            continue
        squares = sum(n * (m - v) ** 2 for n, m, v in zip(counts, means, fit.at(offsets), strict=True))
        for name, value in fit.parameters.items():
            for factor in (1 - 1e-3, 1 + 1e-3):
                moved = planted(fit.form, offsets, {**fit.parameters, name: value * factor})
                assert (counts * (means - moved) ** 2).sum() > squares


def test_r2_and_bic_are_their_definitions() -> None:
    offsets, counts = causal(50)
    means = planted("power", offsets) + noise(counts, 0.05)
    level = (counts * means).sum() / counts.sum()
    total = (counts * (means - level) ** 2).sum()
    for fit in fit_decay(offsets, means, counts=counts):
        residual = (counts * (means - fit.at(offsets)) ** 2).sum()
        assert fit.r2 == pytest.approx(1 - residual / total, abs=1e-12)
        bic = 50 * np.log(residual / counts.sum()) + len(PLANTED[fit.form]) * np.log(50)
        assert fit.bic == pytest.approx(bic, abs=1e-9)


def test_half_distances_are_where_half_is_left() -> None:
    offsets = np.arange(400)
    limits: dict[Form, float] = {"exponential": -1.0, "power": 0.5}
    for form, limit in limits.items():
        fit = fit_decay(offsets, planted(form, offsets))[0]
        assert fit.form == form
        here, half = fit.at(np.array([0.0, fit.half_distance]))
        assert half - limit == pytest.approx((here - limit) / 2, rel=1e-5)
    for fit in fit_decay(offsets, planted("power", offsets)):
        assert np.isnan(fit.half_distance) == (fit.form not in limits)


def test_what_has_no_mean_or_no_count_is_left_out() -> None:
    offsets, counts = causal(100)
    means = planted("power", offsets) + noise(counts, 0.05)
    kept = offsets % 3 > 0
    wanted = fit_decay(offsets[kept], means[kept], counts=counts[kept])
    assert fit_decay(offsets, np.where(kept, means, np.nan), counts=counts) == wanted
    assert fit_decay(offsets, np.where(kept, means, 1e9), counts=np.where(kept, counts, 0)) == wanted


@pytest.mark.parametrize("form", ["linear", "power"])
def test_blocks_change_little(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets, counts = causal(20_000)
    means = planted(form, offsets) + noise(counts, 0.01)
    thinned = named(fit_decay(offsets, means, counts=counts), form)
    monkeypatch.setattr(decay, "_BLOCKS", 20_000)
    whole = named(fit_decay(offsets, means, counts=counts), form)
    assert thinned.parameters == pytest.approx(dict(whole.parameters), rel=1e-4)
    assert thinned.r2 == pytest.approx(whole.r2, abs=1e-6)


ONES = np.ones(5)


@pytest.mark.parametrize(
    ("offsets", "means", "counts", "message"),
    [
        (np.arange(-1, 4), ONES, None, "offsets must be finite and at least 0"),
        (np.array([0, 1, 1, 2, 3]), ONES, None, "offsets must be unique, got 1 more than once"),
        (np.arange(5), np.array([1, 2, np.nan, np.nan, 3]), None, "means must have at least 4 .*, got 3"),
        (np.arange(5), np.array([1, 2, 3, 4, np.inf]), None, "means must be finite"),
        (np.arange(5), ONES, np.array([1, 1, 1, 1, -1]), "counts must be finite and at least 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    offsets: np.ndarray, means: np.ndarray, counts: np.ndarray | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        fit_decay(offsets, means, counts=counts)
