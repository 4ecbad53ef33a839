"""Remark 3.2 and section 3.2: solutions counted by hand, made by hand, and drawn; sinusoids entry by entry."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.papers.mathematics.distance import beyond, commuting, functions_of_distance, sinusoid, without_coupling
from toeplens.papers.mathematics.normalising import toeplitz_gap


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
