"""Position vectors as a subspace and as a curve: loops, planted spans, and sums taken apart again (float64)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toeplens.ground import InputError
from toeplens.lens.kit.position import position_means
from toeplens.lens.stream.subspace import curve_dimension, linear_error, neighbour_error, position_subspace


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(seed)).normal(size=shape)


def in_plane(seed: int, count: int, basis: np.ndarray) -> np.ndarray:
    """``count`` vectors in the span of the rows of ``basis``, shifted off the origin."""
    return drawn(seed, count, len(basis)) @ basis + drawn(seed + 1, basis.shape[1])


# ---- the mean estimator ----------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 99), batch=st.integers(1, 4), size=st.integers(1, 6), padded=st.booleans())
def test_means_are_those_of_loops(seed: int, batch: int, size: int, padded: bool) -> None:
    x = drawn(seed, batch, size, 3)
    lengths = np.random.Generator(np.random.Philox(seed)).integers(1, size + 1, batch) if padded else [size] * batch
    counted = [(b, i) for b in range(batch) for i in range(lengths[b])]
    wanted = np.full((size, 3), np.nan)
    for i in range(size):
        rows = [x[b, i] for b, j in counted if j == i]
        if rows:
            wanted[i] = sum(rows) / len(rows) - sum(x[b, j] for b, j in counted) / len(counted)
    given = torch.tensor(lengths) if padded else None
    c, p = position_means(torch.from_numpy(x), given)
    np.testing.assert_allclose(p.numpy(), wanted, atol=1e-12)
    np.testing.assert_allclose(c.numpy(), x - wanted, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parts_keep_the_dtype_and_padding_is_not_counted(dtype: torch.dtype) -> None:
    x = torch.from_numpy(drawn(2, 3, 5, 2)).to(dtype)
    lengths = torch.tensor([3, 2, 3])
    beyond = x.clone()
    beyond[:, 3:] = torch.nan
    c, p = position_means(x, lengths)
    assert c.dtype == p.dtype == dtype
    assert p[3:].isnan().all()
    assert torch.equal(c[:, :3], x[:, :3] - p[:3])
    assert torch.equal(position_means(beyond, lengths)[1][:3], p[:3])


def test_a_length_beyond_the_positions_is_refused() -> None:
    with pytest.raises(InputError, match=r"lengths must be from 0 to 5, got \[3, 6\]"):
        position_means(torch.zeros(2, 5, 1), torch.tensor([3, 6]))


# ---- the subspace ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [3.0, 40.0, 90.0])
def test_a_planted_angle_is_found_and_sums_are_taken_apart(degrees: float) -> None:
    """Planes along axes 0, 1 and along 2, 3, the latter's second direction tilted towards axis 1."""
    axes = np.eye(6)
    tilt = math.cos(math.radians(degrees)) * axes[1] + math.sin(math.radians(degrees)) * axes[3]
    p, words = in_plane(0, 12, axes[:2]), in_plane(2, 20, np.stack((axes[2], tilt)))
    found = position_subspace(p, words, energy=1)
    assert (found.rank, found.word_rank, found.separable) == (2, 2, True)
    np.testing.assert_allclose(found.angles, [degrees, 90], atol=1e-6)
    np.testing.assert_allclose(found.amplification, 1 / math.sin(math.radians(degrees)), rtol=1e-9)
    position, word = found.separate(p[:, None] + words)
    np.testing.assert_allclose(position, np.broadcast_to(p[:, None], (12, 20, 6)), atol=1e-11)
    np.testing.assert_allclose(word, np.broadcast_to(words, (12, 20, 6)), atol=1e-11)
    parts = found.separate(p[:, None] + words + axes[5])  # what lies in neither span is in neither part
    np.testing.assert_allclose(parts[0], position, atol=1e-11)


def test_numbers_are_those_of_the_covariance() -> None:
    p, words = drawn(9, 30, 5) * np.array([5.0, 3, 1, 0.2, 0.1]), drawn(10, 40, 5)
    found = position_subspace(torch.from_numpy(p), torch.from_numpy(words), energy=0.9)
    values, vectors = np.linalg.eigh(np.cov(p.T))
    shares = values[::-1] / values.sum()
    np.testing.assert_allclose(found.spectrum, shares, atol=1e-12)
    rank = next(r for r in range(1, 6) if shares[:r].sum() >= 0.9)
    assert found.rank == rank
    np.testing.assert_allclose(found.participation, values.sum() ** 2 / (values**2).sum(), rtol=1e-12)
    leading = vectors[:, ::-1][:, :rank]
    total = np.cov(words.T)
    np.testing.assert_allclose(found.overlap, np.trace(leading.T @ total @ leading) / np.trace(total), rtol=1e-10)
    assert found.chance == rank / 5


@pytest.mark.parametrize("shared", [True, False])
def test_spans_that_meet_are_not_separable(shared: bool) -> None:
    """One common direction among few, or more directions than the space has."""
    p, words = (drawn(13, 9, 2), drawn(14, 9, 2)) if shared else (drawn(13, 9, 5), drawn(14, 9, 5))
    if shared:
        p, words = p @ np.eye(5)[[0, 1]], words @ np.eye(5)[[1, 2]]
    found = position_subspace(p, words, energy=1)
    assert not found.separable
    assert found.angles[0] < 1e-6
    with pytest.raises(InputError, match="x cannot be separated"):
        found.separate(p)


@given(seed=st.integers(0, 99), count=st.integers(2, 5), words=st.integers(2, 7))
def test_the_best_linear_map_is_that_of_all_pairs(seed: int, count: int, words: int) -> None:
    """Ordinary least squares on every sum w_v + p_i; no error just where the spans share 0 alone."""
    p, w = drawn(seed, count, 6), drawn(seed + 1, words, 6)
    centred, others = p - p.mean(0), w - w.mean(0)
    design = np.array([c + o for c in centred for o in others])
    wanted = np.array([c for c in centred for _ in others])
    rest = design @ np.linalg.pinv(design, rcond=1e-12) @ wanted - wanted
    found = linear_error(p, w)
    np.testing.assert_allclose(found, np.linalg.norm(rest) / np.linalg.norm(wanted), atol=1e-9)
    assert (found < 1e-9) == position_subspace(p, w, energy=1).separable


def test_one_vector_spans_nothing() -> None:
    found = position_subspace(np.full((5, 3), 0.1), drawn(17, 4, 3))
    assert found.rank == 0
    assert found.separable
    assert np.isnan(found.participation)
    assert np.isnan(found.spectrum).all()
    np.testing.assert_allclose(found.separate(np.full((1, 3), 0.1) + found.word_mean)[0], 0.1)


def test_wrong_input_is_one_sentence() -> None:
    p = drawn(18, 4, 3)
    with pytest.raises(InputError, match=r"p(:| must) "):
        position_subspace(p * np.nan, p)
    with pytest.raises(InputError, match="words must have the width of p, 3, got 2"):
        position_subspace(p, p[:, :2])
    with pytest.raises(InputError, match=r"energy must be over 0 and at most 1, got 1\.5"):
        position_subspace(p, p, energy=1.5)
    with pytest.raises(InputError, match="window must be from 3 to the 4 positions, got 5"):
        curve_dimension(p, window=5)


# ---- the curve -------------------------------------------------------------------------------------------------------


def test_arc_and_chord_are_those_of_a_loop() -> None:
    p = drawn(21, 9, 3)
    ratios = [
        sum(np.linalg.norm(p[i + 1] - p[i]) for i in range(s, s + 3)) / np.linalg.norm(p[s + 3] - p[s])
        for s in range(6)
    ]
    ranks = []
    for s in range(6):
        values = np.sort(np.linalg.eigvalsh(np.cov(p[s : s + 4].T)))[::-1]
        ranks.append(next(r for r in range(1, 4) if values[:r].sum() >= 0.9 * values.sum()))
    found = curve_dimension(p, window=4, energy=0.9)
    assert found.arc_chord == pytest.approx(float(np.median(ratios)), rel=1e-12)
    assert found.local_rank == pytest.approx(float(np.mean(ranks)))


def test_the_neighbours_error_is_that_of_a_loop() -> None:
    p = drawn(30, 9, 4)
    mean = [sum(row[d] for row in p) / 9 for d in range(4)]
    rest = sum((p[i][d] - (p[i - 1][d] + p[i + 1][d]) / 2) ** 2 for i in range(1, 8) for d in range(4))
    whole = sum((p[i][d] - mean[d]) ** 2 for i in range(1, 8) for d in range(4))
    assert neighbour_error(p) == pytest.approx((rest / whole) ** 0.5, rel=1e-12)
    assert neighbour_error(torch.from_numpy(p)) == neighbour_error(p)
