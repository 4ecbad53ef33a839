"""Sums over visible pairs equal those of the written-out N x N matrices, to 1e-10 of their size in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.lens.models import largest
from torch import Tensor

from toeplens.ground import InputError
from toeplens.lens.kit import sums as moments

SIZES = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 31])


@contextmanager
def small_chunks(chunk: int = 4, block: int = 64) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "CHUNK", chunk)
        patch.setattr(moments, "BLOCK", block)
        yield


def draw(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(*shape, generator=generator, dtype=torch.float64) + 0.3).to(dtype) for shape in shapes]


def pairs(size: int, causal: bool) -> np.ndarray:
    return np.tril(np.ones((size, size))) if causal else np.ones((size, size))


def products(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """q_ie k_je for every pair: [..., N, N, d]."""
    return q[..., :, None, :] * k[..., None, :, :]


def close(found: Tensor, expected: np.ndarray, terms: np.ndarray, tolerance: float = 1e-10) -> None:
    """Equal to a part of the sum of absolute terms."""
    assert found.dtype == torch.float64
    assert found.shape == expected.shape
    assert np.abs(found.numpy() - expected).max() <= tolerance * np.abs(terms).sum() + 1e-300


@given(
    size=SIZES,
    d=st.integers(1, 5),
    d2=st.integers(1, 5),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    causal=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_they_are_the_sums_over_pairs(
    size: int, d: int, d2: int, heads: tuple[int, int], causal: bool, dtype: torch.dtype, seed: int
) -> None:
    """With grouped queries, and other queries that are the same for all heads."""
    groups, repeats = heads
    shapes = (groups, repeats, size, d), (groups, 1, size, d), (size, d2), (groups, 1, size, d2)
    q, k, q2, k2 = draw(seed, *shapes, dtype=dtype)
    a, b, a2, b2 = (x.double().numpy() for x in (q, k, q2, k2))
    seen = pairs(size, causal)
    first = products(a, b) * seen[..., None]
    second = np.einsum("...ie,...je->...ij", a2, b2) * seen
    with small_chunks():
        found = moments.inner(q, k, q2, k2, causal=causal)
    terms = first * second[..., None]
    close(found, terms.sum((-3, -2)), terms)


@pytest.mark.parametrize("size", [63, 64, 65, 127, 128, 129, 64 * 5 + 1])
def test_borders_of_chunks(size: int) -> None:
    """As they come, and with pieces of one chunk: float64, 1e-10."""
    q, k, q2, k2 = draw(size, (size, 3), (size, 3), (size, 2), (size, 2))
    terms = products(q.numpy(), k.numpy()) * (np.tril((q2 @ k2.T).numpy()))[..., None]
    close(moments.inner(q, k, q2, k2), terms.sum((0, 1)), terms)
    with small_chunks(64, 1):
        close(moments.inner(q, k, q2, k2), terms.sum((0, 1)), terms)


@pytest.mark.parametrize("causal", [True, False])
def test_nothing_of_n_by_n_is_formed(causal: bool) -> None:
    size = 20_000
    with largest() as made:
        q, k = draw(0, (size, 2), (size, 2), dtype=torch.float32)
        moments.inner(q, k, q, k, causal=causal)
    assert 2 * size <= made.numel <= max(2 * size, 4 * moments.BLOCK) < size**2 / 300


@pytest.mark.parametrize("name", ["q", "k", "q2", "k2"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 9])
def test_what_is_not_finite_is_named(name: str, value: float, place: int) -> None:
    given: dict[str, Tensor] = dict(
        zip(("q", "k", "q2", "k2"), draw(0, (10, 2), (10, 2), (10, 3), (10, 3)), strict=True)
    )
    given[name][place, 1] = value
    for causal in (True, False):
        with small_chunks(), pytest.raises(InputError, match=f"^{name} must be finite"):
            moments.inner(**given, causal=causal)


def test_what_is_beyond_float64_is_said() -> None:
    large = torch.full((2, 1), 1e200, dtype=torch.float64)
    with pytest.raises(InputError, match=r"^q and k and q2 and k2 must have products within the range of float64"):
        moments.inner(large, large, large, large)
