"""A function of the distance is fitted with both sides together, and its spectrum is that of the matrix written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.studies.kit.kernels import KernelDecay, SpectrumRange, decays_of, spectrum_range


def decay_of(offsets: np.ndarray, means: np.ndarray, counts: np.ndarray) -> KernelDecay | None:
    """Of one head."""
    return decays_of(offsets, means[None], counts[None])[0]


def test_a_planted_decay_is_recovered_from_both_sides() -> None:
    """Mean logits of keys before and after a query weigh by how many there are; nan and no count say nothing."""
    offsets = np.arange(-40, 41)
    true = 3 * np.exp(-np.abs(offsets) / 7) - 1
    push = np.where(offsets == 0, 0, np.sign(offsets))  # up after, down before: gone where they weigh the same
    counts = 41.0 - np.abs(offsets)
    actual = decay_of(offsets, true + push, counts)
    assert actual.form == "exponential"
    assert actual.parameters == pytest.approx({"a": 3, "tau": 7, "c": -1}, rel=1e-6)
    assert actual.r2 == pytest.approx(1)
    assert actual.half_distance == pytest.approx(7 * np.log(2))
    assert actual.is_good_fit
    beyond = np.where(np.abs(offsets) > 30, np.nan, true), np.where(np.abs(offsets) > 30, 0, counts)
    shorter = decay_of(offsets, *beyond)
    assert shorter.parameters == pytest.approx(actual.parameters, rel=1e-4)
    lopsided = decay_of(offsets, true + push, np.where(offsets < 0, 0, counts))
    assert lopsided.parameters["c"] == pytest.approx(0, abs=0.2)


def test_fitting_heads_together_matches_fitting_each_alone() -> None:
    """Whether they see the same keys or not."""
    offsets = np.arange(-30, 31)
    means = np.random.Generator(np.random.Philox(3)).normal(size=(5, 61)).cumsum(-1)
    same = np.broadcast_to(31.0 - np.abs(offsets), means.shape)
    for counts in (same, np.where((np.arange(5) % 2 == 0)[:, None] & (offsets > 20), 0, same)):
        for actual, *rows in zip(decays_of(offsets, means, counts), means, counts, strict=True):
            alone = decay_of(offsets, *rows)
            assert actual.form == alone.form
            assert actual.r2 == pytest.approx(alone.r2, abs=1e-9)
            assert actual.parameters == pytest.approx(alone.parameters, rel=1e-5, abs=1e-6)


def test_too_few_distances_have_no_fit() -> None:
    assert decay_of(np.arange(3), np.ones(3), np.ones(3)) is None
    assert decay_of(np.arange(9), np.ones(9), (np.arange(9) < 3).astype(float)) is None
    same = decay_of(np.arange(4), np.ones(4), np.ones(4))
    assert (same.form, same.r2, same.half_distance, same.is_good_fit) == ("constant", None, None, False)
    assert KernelDecay.from_dict(same.to_dict()) == same


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9))
def test_spectrum_ends_match_the_hermitian_part(values: list[float]) -> None:
    """float64, 1e-9; the series at 5,000 angles, 1e-3."""
    size = len(values)
    kernel = np.array(values + values[1:][::-1]) if size > 1 else np.array(values)
    matrix = np.array([[kernel[size - 1 + i - j] for j in range(size)] for i in range(size)])
    eigenvalues = np.linalg.eigvalsh((matrix + matrix.T) / 2)
    actual = spectrum_range(kernel)
    assert actual.size == size
    assert (actual.lowest, actual.highest) == pytest.approx((eigenvalues[0], eigenvalues[-1]), abs=1e-9)
    angles = np.linspace(0, np.pi, 5_000)[:, None]
    series = (kernel * np.cos(angles * np.arange(1 - size, size))).sum(1)
    assert (actual.symbol_low, actual.symbol_high) == pytest.approx((series.min(), series.max()), abs=1e-3)
    assert SpectrumRange.from_dict(actual.to_dict()) == actual
