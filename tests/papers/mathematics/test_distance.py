"""Remarks 3.1, 3.2 and Theorem 3.1: what is Toeplitz, what softmax leaves of it, and the holes between eigenvalues."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.papers.mathematics.distance import beyond, commuting, functions_of_distance, sinusoid, without_coupling
from toeplens.papers.mathematics.filling import DEGREES, SIZES, eigenvalues_of, filling, kernel_of, longest_hole
from toeplens.papers.mathematics.normalising import causal, softmax, toeplitz_gap


def inside(g: np.ndarray, space: np.ndarray) -> float:
    """How much of a g lies outside a space, as a share of its norm."""
    return beyond((g / np.linalg.norm(g))[..., None], space)


def test_a_sinusoid_entry_by_entry() -> None:
    table = sinusoid("sinusoidal", 4)
    for i in (0, 1, 31):
        wanted = [math.sin(i), math.cos(i), math.sin(i / 100), math.cos(i / 100)]
        np.testing.assert_allclose(table[i], wanted, atol=1e-12)


@given(seed=st.integers(0, 999), pairs=st.integers(1, 4))
def test_what_commutes_commutes_with_every_rotation_of_the_pairs(seed: int, pairs: int) -> None:
    rng = np.random.default_rng(seed)
    head, rotation = commuting(rng, 2 * pairs), np.zeros((2 * pairs, 2 * pairs))
    for pair, angle in enumerate(rng.uniform(0, 6, size=pairs)):
        cos, sin = math.cos(angle), math.sin(angle)
        rotation[2 * pair : 2 * pair + 2, 2 * pair : 2 * pair + 2] = [[cos, -sin], [sin, cos]]
    np.testing.assert_allclose(head @ rotation, rotation @ head, atol=1e-12)


@pytest.mark.parametrize("entry", [(0, 0), (0, 1), (0, 2), (3, 1)])
def test_one_entry_more_is_no_longer_a_function_of_the_distance(entry: tuple[int, int]) -> None:
    table, head = sinusoid("sinusoidal", 4), commuting(np.random.default_rng(1), 4)
    assert toeplitz_gap(table @ head @ table.T) < 1e-12
    head[entry] += 0.1
    assert toeplitz_gap(table @ head @ table.T) > 1e-3


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("contents", "length"), [(2, 3), (2, 5), (3, 4)])
def test_the_spaces_have_the_dimensions_counted_by_hand(contents: int, length: int, causal: bool) -> None:
    """m: C²; t: one an offset, less the constant that m has; a slope for each content, less the one that t has."""
    offsets = length if causal else 2 * length - 1
    exact = functions_of_distance(contents, length, causal=causal, rows=False)
    softened = functions_of_distance(contents, length, causal=causal, rows=True)
    assert exact.shape[:3] == softened.shape[:3] == (contents, contents, offsets)
    assert exact.shape[3] == contents**2 + offsets - 1
    assert softened.shape[3] == contents**2 + offsets - 1 + contents - 1


@given(seed=st.integers(0, 999), causal=st.booleans())
def test_logits_made_by_hand_are_found_and_others_are_not(seed: int, causal: bool) -> None:
    rng, contents, length = np.random.default_rng(seed), 2, 4
    least = 0 if causal else 1 - length
    offsets = range(least, length)
    m, t, slope = rng.normal(size=(2, 2)), rng.normal(size=len(offsets)), rng.normal(size=2)
    plain, sloped, keyed = np.zeros((3, contents, contents, len(offsets)))
    for c, d, (at, delta) in itertools.product(range(2), range(2), enumerate(offsets)):
        plain[c, d, at] = m[c, d] + t[at]
        sloped[c, d, at] = plain[c, d, at] + (1 + abs(slope[c]) * c) * delta
        keyed[c, d, at] = plain[c, d, at] + (1 + d) * delta
    exact = functions_of_distance(contents, length, causal=causal, rows=False)
    softened = functions_of_distance(contents, length, causal=causal, rows=True)
    assert inside(plain, exact) < 1e-9
    assert inside(sloped, softened) < 1e-9
    for space in (exact, softened):
        assert inside(keyed, space) > 1e-3
    if abs(slope[1]) > 0.1:
        assert inside(sloped, exact) > 1e-3


def test_the_slope_is_real_softmax_and_all() -> None:
    """Query and key content with positions, additive: weights that are a function of contents and distance, coupled."""
    length, slopes, of_words = 6, np.array([0.3, -0.8]), np.array([0.2, 1.1])
    text = np.array([0, 1, 1, 0, 1, 0])
    weights = np.zeros((length, length))
    for i, j in itertools.product(range(length), repeat=2):
        weights[i, j] = -slopes[text[i]] * j + of_words[text[j]] if j <= i else -np.inf  # cross terms, and content
    softened = np.exp(weights) / np.exp(weights).sum(1, keepdims=True)
    for i in range(length):
        by_distance = [slopes[text[i]] * (i - j) + of_words[text[j]] for j in range(i + 1)]
        wanted = np.exp(by_distance) / np.exp(by_distance).sum()
        np.testing.assert_allclose(softened[i, : i + 1], wanted, atol=1e-12)


def test_without_coupling_two_contents_differ_by_one_number() -> None:
    space = without_coupling(2, 5)
    for g in np.moveaxis(space, -1, 0):
        apart = g[1, 0] - g[0, 1]
        np.testing.assert_allclose(apart, apart[0], atol=1e-12)


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
