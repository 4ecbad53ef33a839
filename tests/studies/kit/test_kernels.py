"""A function of the distance is fitted with both sides together, and its spectrum is that of the matrix written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.studies.kit.kernels import Decay, KernelEnds, decays_of, kernel_ends


def decay_of(offsets: np.ndarray, means: np.ndarray, counts: np.ndarray) -> Decay | None:
    """Of one head."""
    return decays_of(offsets, means[None], counts[None])[0]


def test_a_planted_decay_is_found_from_both_sides() -> None:
    """Mean logits of keys before and after a query weigh by how many there are; nan and no count say nothing."""
    offsets = np.arange(-40, 41)
    true = 3 * np.exp(-np.abs(offsets) / 7) - 1
    push = np.where(offsets == 0, 0, np.sign(offsets))  # up after, down before: gone where they weigh the same
    counts = 41.0 - np.abs(offsets)
    found = decay_of(offsets, true + push, counts)
    assert found.form == "exponential"
    assert found.parameters == pytest.approx({"a": 3, "tau": 7, "c": -1}, rel=1e-6)
    assert found.r2 == pytest.approx(1)
    assert found.half_distance == pytest.approx(7 * np.log(2))
    assert found.explains
    beyond = np.where(np.abs(offsets) > 30, np.nan, true), np.where(np.abs(offsets) > 30, 0, counts)
    shorter = decay_of(offsets, *beyond)
    assert shorter.parameters == pytest.approx(found.parameters, rel=1e-4)
    lopsided = decay_of(offsets, true + push, np.where(offsets < 0, 0, counts))
    assert lopsided.parameters["c"] == pytest.approx(0, abs=0.2)


def test_heads_together_are_as_each_alone() -> None:
    """Whether they see the same keys or not."""
    offsets = np.arange(-30, 31)
    means = np.random.Generator(np.random.Philox(3)).normal(size=(5, 61)).cumsum(-1)
    same = np.broadcast_to(31.0 - np.abs(offsets), means.shape)
    for counts in (same, np.where((np.arange(5) % 2 == 0)[:, None] & (offsets > 20), 0, same)):
        for found, *rows in zip(decays_of(offsets, means, counts), means, counts, strict=True):
            alone = decay_of(offsets, *rows)
            assert found.form == alone.form
            assert found.r2 == pytest.approx(alone.r2, abs=1e-9)
            assert found.parameters == pytest.approx(alone.parameters, rel=1e-5, abs=1e-6)


def test_too_few_distances_have_no_form() -> None:
    assert decay_of(np.arange(3), np.ones(3), np.ones(3)) is None
    assert decay_of(np.arange(9), np.ones(9), (np.arange(9) < 3).astype(float)) is None
    same = decay_of(np.arange(4), np.ones(4), np.ones(4))
    assert (same.form, same.r2, same.half_distance, same.explains) == ("constant", None, None, False)
    assert Decay.from_dict(same.to_dict()) == same


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9))
def test_ends_are_those_of_the_hermitian_part_written_out(values: list[float]) -> None:
    """float64, 1e-9; the series at 5,000 angles, 1e-3."""
    size = len(values)
    kernel = np.array(values + values[1:][::-1]) if size > 1 else np.array(values)
    matrix = np.array([[kernel[size - 1 + i - j] for j in range(size)] for i in range(size)])
    eigenvalues = np.linalg.eigvalsh((matrix + matrix.T) / 2)
    found = kernel_ends(kernel)
    assert found.size == size
    assert (found.lowest, found.highest) == pytest.approx((eigenvalues[0], eigenvalues[-1]), abs=1e-9)
    angles = np.linspace(0, np.pi, 5_000)[:, None]
    series = (kernel * np.cos(angles * np.arange(1 - size, size))).sum(1)
    assert (found.symbol_low, found.symbol_high) == pytest.approx((series.min(), series.max()), abs=1e-3)
    assert KernelEnds.from_dict(found.to_dict()) == found
