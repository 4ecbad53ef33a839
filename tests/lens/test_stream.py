"""Position in the residual stream: loops, planted directions, and what must not change a number (float64)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from torch import Tensor

from toeplens import encodings
from toeplens.lens import AttentionTrace, LayerTrace
from toeplens.lens.stream import (
    PENALTIES,
    Representation,
    curve_dimension,
    neighbour_error,
    position_subspace,
    representation,
)
from toeplens.utils import InputError

BATCH, SIZE, WIDTH = 40, 6, 8
ARRAYS = [name for name, kind in Representation.__annotations__.items() if "np.ndarray" in kind and "tuple" not in kind]
NOPE = encodings.build("nope", d_model=8, num_heads=4, head_dim=2, max_len=64)


class PlantedSource:
    """A source whose residual streams are given; nothing else of a layer matters here."""

    def __init__(self, streams: Sequence[np.ndarray], vectors: np.ndarray | None) -> None:
        self.streams = [torch.from_numpy(x) for x in streams]
        self.vectors = None if vectors is None else torch.from_numpy(vectors)
        self.num_layers = len(streams)

    def attention(
        self, tokens: Tensor, lengths: Tensor | None, *, layers: Sequence[int], positions: Tensor | None, **_: Any
    ) -> Iterator[LayerTrace]:
        rows = torch.arange(tokens.shape[1]) if positions is None else positions
        nothing = torch.zeros(len(tokens), 1, len(rows), 2)
        for layer in layers:
            x = self.streams[layer][:, rows]
            yield LayerTrace(
                layer=layer,
                inputs=x,
                key_inputs=x,
                position_vectors=None if self.vectors is None else self.vectors[..., rows, :],
                q=nothing,
                k=nothing,
                v=nothing,
                encoding=NOPE,
                positions=rows,
                rows=rows,
                scale=1.0,
                causal=True,
                lengths=None,  # as where the model does not hide its padding
                project_part=lambda q, k: (q, k),
            )


def trace_of(
    *streams: np.ndarray,
    vectors: np.ndarray | None = None,
    lengths: Sequence[int] | None = None,
    **options: Any,
) -> AttentionTrace:
    tokens = torch.zeros(streams[0].shape[:2], dtype=torch.long)
    given = None if lengths is None else torch.tensor(lengths)
    return AttentionTrace(PlantedSource(streams, vectors), tokens, given, **options)


def random_vectors(seed: int, *shape: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(seed)).normal(size=shape)


def rotation(seed: int, width: int = WIDTH) -> np.ndarray:
    return np.linalg.qr(random_vectors(seed, width, width))[0]


def random_lengths(seed: int, batch: int, size: int) -> list[int]:
    return np.random.Generator(np.random.Philox(seed)).integers(1, size + 1, batch).tolist()


def position_curve(size: int, width: int, rank: int) -> np.ndarray:
    """Position vectors that are curved in the first ``rank`` dimensions, centred."""
    p = np.zeros((size, width))
    p[:, :rank] = random_vectors(99, size, rank)
    return p - p.mean(0)


# ---- written out in loops --------------------------------------------------------------------------------------------


def leave_one_out_reference(x: np.ndarray, lengths: Sequence[int], least: int) -> dict[str, Any]:
    """Leave each sequence out in turn, position by position."""
    reach = [sum(length > i for length in lengths) for i in range(x.shape[1])]
    size = sum(count >= least for count in reach)
    tokens = [(b, i) for b in range(len(x)) for i in range(min(lengths[b], size))]
    weights = [reach[i] / len(tokens) for i in range(size)]
    x = x - sum(x[b, i] for b, i in tokens) / len(tokens)
    covariance, variance, total = np.zeros((x.shape[2],) * 2), 0.0, 0.0
    for b, i in tokens:
        means = [np.mean([x[a, j] for a in range(len(x)) if a != b and lengths[a] > j], axis=0) for j in range(size)]
        mean = sum(w * m for w, m in zip(weights, means, strict=True))
        covariance += np.outer(x[b, i], means[i] - mean) / len(tokens)
        variance += x[b, i] @ (means[i] - mean) / len(tokens)
        total += x[b, i] @ (x[b, i] - mean) / len(tokens)
    p = np.stack([np.mean([x[b, i] for b in range(len(x)) if lengths[b] > i], axis=0) for i in range(size)])
    return {
        "covariance": (covariance + covariance.T) / 2,
        "variance": variance,
        "total": total,
        "p": p,
        "weights": np.array(weights),
    }


def leading(covariance: np.ndarray, energy: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(covariance)
    order = np.argsort(-values)
    rank = next(r for r in range(1, len(values) + 1) if values[order[:r]].sum() >= energy * values.sum() * (1 - 1e-12))
    return vectors[:, order[:rank]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("energy", [0.7, 0.99])
def test_statistics_match_loops(padded: bool, energy: float) -> None:
    p0 = position_curve(SIZE, WIDTH, 3)
    x = p0 @ rotation(1) + random_vectors(2, BATCH, SIZE, WIDTH) + random_vectors(3, WIDTH)
    lengths = random_lengths(4, BATCH, SIZE) if padded else [SIZE] * BATCH
    actual = representation(trace_of(x, vectors=p0, lengths=lengths), energy=energy, min_sequences=12)
    want = leave_one_out_reference(x, lengths, 12)
    size = len(want["p"])
    assert actual.positions.tolist() == list(range(size))
    assert (size < SIZE) == padded
    np.testing.assert_allclose(actual.variance, want["variance"], rtol=1e-11)
    np.testing.assert_allclose(actual.variance, np.trace(want["covariance"]), rtol=1e-11)
    np.testing.assert_allclose(actual.variance_share, want["variance"] / want["total"], rtol=1e-11)

    root = np.sqrt(want["weights"])[:, None]
    original = root * (p0[:size] - want["weights"] @ p0[:size])
    span = leading(original.T @ original, energy)
    assert actual.reference_rank == span.shape[1]
    assert actual.chance == span.shape[1] / WIDTH
    within = np.trace(span.T @ want["covariance"] @ span)
    np.testing.assert_allclose(actual.alignment, within / want["variance"], rtol=1e-10)
    directions = leading(want["covariance"], energy)
    angles = np.degrees(subspace_angles(directions, span))
    assert actual.rank == directions.shape[1]
    np.testing.assert_allclose(actual.angles[0], angles[::-1], atol=1e-6)
    np.testing.assert_allclose(actual.mean_cosine, np.mean(np.cos(np.radians(angles)) ** 2), rtol=1e-9)

    p = root * want["p"]  # already centred: the mean over tokens is 0
    slope = np.linalg.lstsq(original.reshape(-1, 1), p.reshape(-1), rcond=None)[0]
    np.testing.assert_allclose(actual.coefficient, slope, rtol=1e-10)
    cosine = (p * original).sum() / np.sqrt(want["variance"] * (original**2).sum())
    np.testing.assert_allclose(actual.cosine, cosine, rtol=1e-10)


def test_the_probe_is_ridge_regression_by_normal_equations() -> None:
    """Three fifths of the sequences fit it, the fourth chooses its penalty, the fifth tests it."""
    x = position_curve(SIZE, WIDTH, 3) + random_vectors(6, BATCH, SIZE, WIDTH)
    lengths = random_lengths(7, BATCH, SIZE)
    parts = np.array_split(np.random.Generator(np.random.Philox(3)).permutation(BATCH), 5)
    size = len(leave_one_out_reference(x, lengths, 5)["p"])

    def rows(chosen: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        pairs = [(b, i) for part in chosen for b in part for i in range(min(lengths[b], size))]
        return np.array([x[pair] for pair in pairs]), np.array([float(i) for _, i in pairs])

    def fitted(chosen: Sequence[np.ndarray], penalty: float, elsewhere: np.ndarray) -> np.ndarray:
        a, y = rows(chosen)
        gram = (a - a.mean(0)).T @ (a - a.mean(0))
        ridge = penalty * np.trace(gram) / WIDTH * np.eye(WIDTH)
        return (elsewhere - a.mean(0)) @ np.linalg.solve(gram + ridge, (a - a.mean(0)).T @ (y - y.mean())) + y.mean()

    (choice, expected), (test, last) = rows(parts[3:4]), rows(parts[4:])
    errors = [np.sum((fitted(parts[:3], penalty, choice) - expected) ** 2) for penalty in PENALTIES]
    best = PENALTIES[int(np.argmin(errors))]
    rest = np.sum((fitted(parts[:4], best, test) - last) ** 2)
    actual = representation(trace_of(x, lengths=lengths), min_sequences=5, bootstrap=2, seed=3)
    assert 0 < np.argmin(errors) < len(PENALTIES) - 1
    np.testing.assert_allclose(actual.decodability, 1 - rest / np.sum((last - last.mean()) ** 2), rtol=1e-8)


def test_rotated_position_vectors_are_displaced() -> None:
    p0 = position_curve(SIZE, WIDTH, 2)
    moved = np.roll(p0, 4, axis=1)
    noise = 0.1 * random_vectors(9, 300, SIZE, WIDTH)
    actual = representation(trace_of(noise + p0, noise + moved, noise + p0 + moved, vectors=p0), bootstrap=200)
    np.testing.assert_allclose(actual.alignment, [1, 0, 0.5], atol=0.002)
    np.testing.assert_allclose(actual.displaced, [0, 1, 0.5], atol=0.002)
    np.testing.assert_allclose(actual.coefficient, [1, 0, 1], atol=0.01)  # other directions joined; nothing is gone
    np.testing.assert_allclose(actual.cosine, [1, 0, np.sqrt(0.5)], atol=0.01)
    assert actual.angles[1].min() > 88
    elsewhere = representation(trace_of(noise + moved, noise + p0, vectors=p0), bootstrap=20)
    assert np.isnan(elsewhere.displaced).all()  # what was not there at the input
    assert (actual.low <= actual.variance_share).all()
    assert (actual.alignment_low <= actual.alignment).all()
    assert (actual.alignment <= actual.alignment_high).all()


def test_intervals_match_the_jackknife() -> None:
    p0 = position_curve(SIZE, WIDTH, 2)
    x = p0 + 0.5 * np.roll(p0, 3, axis=1) + random_vectors(16, BATCH, SIZE, WIDTH)
    actual = representation(trace_of(x, vectors=p0))
    left = [representation(trace_of(np.delete(x, b, axis=0), vectors=p0), bootstrap=2) for b in range(BATCH)]
    for value, low, high in (
        ("variance_share", actual.low, actual.high),
        ("alignment", actual.alignment_low, actual.alignment_high),
    ):
        jackknife = np.std([getattr(one, value)[0] for one in left]) * np.sqrt(BATCH - 1)
        np.testing.assert_allclose((high[0] - low[0]) / (2 * 1.96), jackknife, rtol=0.1)


# ---- what must not change a number -----------------------------------------------------------------------------------

P0 = position_curve(SIZE, WIDTH, 3)
X = P0 + 0.5 * np.roll(P0, 2, axis=1) + 0.7 * random_vectors(17, BATCH, SIZE, WIDTH)
LENGTHS = [max(2, length) for length in random_lengths(18, BATCH, SIZE)]


def assert_same(first: Representation, second: Representation, *, but: Sequence[str] = ()) -> None:
    for name in ARRAYS:
        if name not in but:
            np.testing.assert_allclose(getattr(first, name), getattr(second, name), atol=1e-8, err_msg=name)
    for one, other in zip(first.angles, second.angles, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert (first.reference_rank, first.chance) == (second.reference_rank, second.chance)


@cache
def base() -> Representation:
    return representation(trace_of(X, 2 * X, vectors=P0, lengths=LENGTHS), min_sequences=8, bootstrap=50)


def test_padding_values_are_ignored() -> None:
    beyond = np.arange(SIZE) >= np.array(LENGTHS)[:, None]
    x = np.where(beyond[..., None], np.nan, X)
    assert_same(representation(trace_of(x, 2 * x, vectors=P0, lengths=LENGTHS), min_sequences=8, bootstrap=50), base())


def test_positions_with_few_sequences_are_omitted() -> None:
    lengths = [SIZE] * 7 + [4] * (BATCH - 7)
    actual = representation(trace_of(X, vectors=P0, lengths=lengths), min_sequences=8, bootstrap=50)
    assert actual.positions.tolist() == [0, 1, 2, 3]
    assert_same(actual, representation(trace_of(X[:, :4], vectors=P0[:4]), min_sequences=8, bootstrap=50))
    assert len(representation(trace_of(X, lengths=lengths), min_sequences=7, bootstrap=2).positions) == SIZE


def test_positions_and_layers_can_be_selected() -> None:
    positions = [1, 2, 4]
    some = representation(trace_of(X, vectors=P0, positions=positions), bootstrap=50)
    assert some.positions.tolist() == positions
    whole = representation(trace_of(X[:, positions], vectors=P0[positions]), bootstrap=50)
    assert_same(some, whole, but=("positions", "decodability"))
    later = representation(trace_of(X, 2 * X, vectors=P0, layers=[1]), reference=P0, bootstrap=50)
    assert later.layers.tolist() == [1]
    np.testing.assert_allclose(later.coefficient, representation(trace_of(2 * X, vectors=P0), bootstrap=2).coefficient)
    assert np.isnan(later.displaced).all()  # the input was not looked at


@pytest.mark.parametrize("vectors", [None, np.zeros((SIZE, WIDTH)), np.ones((SIZE, WIDTH))])
def test_without_a_reference_only_directions_are_missing(vectors: np.ndarray | None) -> None:
    actual, want = (
        representation(trace_of(X, vectors=vectors), bootstrap=50),
        representation(trace_of(X, vectors=P0), bootstrap=50),
    )
    for name in ("variance", "variance_share", "low", "high", "rank", "decodability"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(want, name))
    for name in ("alignment", "alignment_low", "displaced", "mean_cosine", "coefficient", "cosine"):
        assert np.isnan(getattr(actual, name)).all()
    assert actual.reference_rank == 0
    assert np.isnan(actual.chance)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"energy": 1.5}, "energy must be over 0 and at most 1, got 1.5"),
        ({"min_sequences": 4}, "min_sequences must be at least 5, got 4"),
        ({"min_sequences": BATCH + 1}, "min_sequences must be small enough for at least 2 positions, got 41"),
        ({"reference": P0[:3]}, r"reference must be finite and have shape \[6, 8\], got shape \[3, 8\]"),
    ],
)
def test_invalid_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        representation(trace_of(X), **options)


def in_plane(seed: int, count: int, basis: np.ndarray) -> np.ndarray:
    """``count`` vectors in the span of the rows of ``basis``, shifted off the origin."""
    return random_vectors(seed, count, len(basis)) @ basis + random_vectors(seed + 1, basis.shape[1])


# ---- the subspace ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [3.0, 40.0, 90.0])
def test_a_planted_angle_is_recovered_and_sums_are_separated(degrees: float) -> None:
    """Planes along axes 0, 1 and along 2, 3, the latter's second direction tilted towards axis 1."""
    axes = np.eye(6)
    tilt = math.cos(math.radians(degrees)) * axes[1] + math.sin(math.radians(degrees)) * axes[3]
    p, words = in_plane(0, 12, axes[:2]), in_plane(2, 20, np.stack((axes[2], tilt)))
    actual = position_subspace(p, words, energy=1)
    assert (actual.rank, actual.word_rank, actual.separable) == (2, 2, True)
    np.testing.assert_allclose(actual.angles, [degrees, 90], atol=1e-6)
    np.testing.assert_allclose(actual.amplification, 1 / math.sin(math.radians(degrees)), rtol=1e-9)
    position, word = actual.separate(p[:, None] + words)
    np.testing.assert_allclose(position, np.broadcast_to(p[:, None], (12, 20, 6)), atol=1e-11)
    np.testing.assert_allclose(word, np.broadcast_to(words, (12, 20, 6)), atol=1e-11)
    parts = actual.separate(p[:, None] + words + axes[5])  # what lies in neither span is in neither part
    np.testing.assert_allclose(parts[0], position, atol=1e-11)


def test_subspace_statistics_match_the_covariance() -> None:
    p, words = random_vectors(9, 30, 5) * np.array([5.0, 3, 1, 0.2, 0.1]), random_vectors(10, 40, 5)
    actual = position_subspace(torch.from_numpy(p), torch.from_numpy(words), energy=0.9)
    values = np.linalg.eigvalsh(np.cov(p.T))
    np.testing.assert_allclose(actual.spectrum, values[::-1] / values.sum(), atol=1e-12)
    span = leading(np.cov(p.T), 0.9)
    assert actual.rank == span.shape[1]
    np.testing.assert_allclose(actual.participation, values.sum() ** 2 / (values**2).sum(), rtol=1e-12)
    total = np.cov(words.T)
    np.testing.assert_allclose(actual.overlap, np.trace(span.T @ total @ span) / np.trace(total), rtol=1e-10)
    assert actual.chance == actual.rank / 5


@pytest.mark.parametrize("shared", [True, False])
def test_intersecting_subspaces_are_not_separable(shared: bool) -> None:
    """One common direction among few, or more directions than the space has."""
    p, words = (random_vectors(seed, 9, 2 if shared else 5) for seed in (13, 14))
    if shared:
        p, words = p @ np.eye(5)[[0, 1]], words @ np.eye(5)[[1, 2]]
    actual = position_subspace(p, words, energy=1)
    assert not actual.separable
    assert actual.angles[0] < 1e-6
    with pytest.raises(InputError, match="x cannot be separated"):
        actual.separate(p)


def test_one_vector_has_no_subspace() -> None:
    actual = position_subspace(np.full((5, 3), 0.1), random_vectors(17, 4, 3))
    assert actual.rank == 0
    assert actual.separable
    assert np.isnan(actual.participation)
    assert np.isnan(actual.spectrum).all()
    np.testing.assert_allclose(actual.separate(np.full((1, 3), 0.1) + actual.word_mean)[0], 0.1)


def test_invalid_vectors_are_refused() -> None:
    p = random_vectors(18, 4, 3)
    with pytest.raises(InputError, match=r"p(:| must) "):
        position_subspace(p * np.nan, p)
    with pytest.raises(InputError, match="words must have the width of p, 3, got 2"):
        position_subspace(p, p[:, :2])
    with pytest.raises(InputError, match="window must be from 3 to the 4 positions, got 5"):
        curve_dimension(p, window=5)


def test_arc_and_chord_match_a_loop() -> None:
    p = random_vectors(21, 9, 3)
    ratios = [
        sum(np.linalg.norm(p[i + 1] - p[i]) for i in range(s, s + 3)) / np.linalg.norm(p[s + 3] - p[s])
        for s in range(6)
    ]
    ranks = [leading(np.cov(p[s : s + 4].T), 0.9).shape[1] for s in range(6)]
    actual = curve_dimension(p, window=4, energy=0.9)
    assert actual.arc_chord == pytest.approx(float(np.median(ratios)), rel=1e-12)
    assert actual.local_rank == pytest.approx(float(np.mean(ranks)))


def test_the_neighbour_error_matches_a_loop() -> None:
    p = random_vectors(30, 9, 4)
    mean = [sum(row[d] for row in p) / 9 for d in range(4)]
    rest = sum((p[i][d] - (p[i - 1][d] + p[i + 1][d]) / 2) ** 2 for i in range(1, 8) for d in range(4))
    whole = sum((p[i][d] - mean[d]) ** 2 for i in range(1, 8) for d in range(4))
    assert neighbour_error(p) == pytest.approx((rest / whole) ** 0.5, rel=1e-12)
    assert neighbour_error(torch.from_numpy(p)) == neighbour_error(p)
