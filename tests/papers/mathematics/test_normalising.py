"""Remark 3.1: how far a matrix is from Toeplitz, and softmax, in loops; matrices that keep it and that lose it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.papers.mathematics.normalising import causal, softmax, toeplitz_gap


def matrix(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@given(seed=st.integers(0, 999), rows=st.integers(1, 6), columns=st.integers(1, 6))
def test_the_gap_is_the_spread_along_diagonals(seed: int, rows: int, columns: int) -> None:
    x = matrix(seed, rows, columns)
    diagonals: dict[int, list[float]] = {}
    for i in range(rows):
        for j in range(columns):
            diagonals.setdefault(i - j, []).append(x[i, j])
    rest = sum((value - sum(each) / len(each)) ** 2 for each in diagonals.values() for value in each)
    assert toeplitz_gap(x) == pytest.approx(math.sqrt(rest / (x**2).sum()), rel=1e-9, abs=1e-12)


def test_softmax_and_the_mask_entry_by_entry() -> None:
    logits = matrix(0, 5, 5)
    for window in (None, 2):
        found = softmax(causal(logits, window))
        for i in range(5):
            seen = [j for j in range(i + 1) if window is None or i - j < window]
            total = sum(math.exp(logits[i, j]) for j in seen)
            for j in range(5):
                wanted = math.exp(logits[i, j]) / total if j in seen else 0.0
                assert found[i, j] == pytest.approx(wanted, abs=1e-14)


def test_two_positions_by_hand() -> None:
    """T(0, 1; 2, 0) over all keys: rows (1, e)/(1 + e) and (e², 1)/(1 + e²), whose diagonal entries differ."""
    toeplitz = np.array([[0.0, 1.0], [2.0, 0.0]])
    weights = softmax(toeplitz)
    assert weights[0, 0] == pytest.approx(1 / (1 + math.e))
    assert weights[1, 1] == pytest.approx(1 / (1 + math.e**2))
    assert toeplitz_gap(toeplitz) == 0
    assert toeplitz_gap(weights) > 0.05
    assert toeplitz_gap(softmax(np.array([[0.0, 1.0], [1.0, 0.0]]))) < 1e-15
