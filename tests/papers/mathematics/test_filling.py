"""Theorem 3.1: the longest hole in a loop, and a matrix whose eigenvalues are known."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.papers.mathematics.filling import DEGREES, SIZES, eigenvalues_of, filling, kernel_of, longest_hole


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=9), st.floats(-3, -1), st.floats(2, 4))
def test_the_longest_hole_is_that_of_a_loop(values: list[float], low: float, high: float) -> None:
    ends = [low, *sorted(values), high]
    wanted = max(b - a for a, b in pairwise(ends)) / (high - low)
    assert longest_hole(np.array(values), low, high) == pytest.approx(wanted, abs=1e-12)


def test_a_hole_ends_where_the_range_does() -> None:
    assert longest_hole(np.array([5.0, 0.5]), 0.0, 1.0) == 0.5
    assert longest_hole(np.array([0.9]), 0.0, 1.0) == pytest.approx(0.9)


def test_neighbours_alone_have_known_eigenvalues() -> None:
    """T(0, 1, 0, ..) has 2 cos(kπ/(N + 1)) in [-2, 2]; its longest hole is sin²-shaped, in the middle."""
    values = 2 * np.cos(np.arange(1, 101) * np.pi / 101)
    np.testing.assert_allclose(np.linalg.eigvalsh(np.eye(100, k=1) + np.eye(100, k=-1)), values[::-1], atol=1e-12)
    assert longest_hole(values, -2, 2) == pytest.approx(np.sin(np.pi / 202), rel=1e-9)


@pytest.mark.parametrize("degree", DEGREES)
def test_eigenvalues_of_the_diagonals_are_those_of_the_matrix(degree: int) -> None:
    kernel = kernel_of(np.random.default_rng(degree), degree)
    table = [[kernel[degree + i - j] if abs(i - j) <= degree else 0 for j in range(40)] for i in range(40)]
    np.testing.assert_allclose(eigenvalues_of(kernel, 40), np.linalg.eigvalsh(np.array(table)), atol=1e-12)


def test_holes_shrink_as_the_matrix_grows() -> None:
    lengths = np.array(filling(1)["holes"]["lengths"])
    assert lengths.shape == (len(DEGREES), len(SIZES))
    assert (np.diff(lengths, axis=1) < 0).all()
