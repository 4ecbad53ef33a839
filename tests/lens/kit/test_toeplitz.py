"""Sums over visible pairs and the Toeplitz part of logits equal those of the written-out N x N matrix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from toeplens.encodings.conformance import _LargestTensor
from toeplens.lens.kit import toeplitz
from toeplens.lens.kit.toeplitz import ToeplitzProfile, toeplitz_part, toeplitz_profile
from toeplens.utils import InputError

SIZES = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31])
KINDS = st.sampled_from(["none", "offset", "head offset", "matrix", "head matrix"])

pytestmark = pytest.mark.filterwarnings("ignore:layout")


@contextmanager
def small_chunks(work: int = 300, chunk: int = 4, block: int = 64) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("CHUNK", chunk), ("BLOCK", block), ("MAX_ELEMENTS", work)):
            patch.setattr(toeplitz, name, value)
        yield


def random_tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float64, mean: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) + mean).to(dtype)


def offsets_of(size: int, causal: bool) -> range:
    return range(0 if causal else 1 - size, size)


def toeplitz_matrix(by_offset: np.ndarray, size: int, causal: bool) -> np.ndarray:
    """The Toeplitz matrix with these values by offset."""
    matrix = np.zeros((*by_offset.shape[:-1], size, size))
    for place, offset in enumerate(offsets_of(size, causal)):
        for i in range(max(0, offset), min(size, size + offset)):
            matrix[..., i, i - offset] = by_offset[..., place]
    return matrix


def reference_profile(matrices: list[np.ndarray], size: int, causal: bool) -> dict[str, Any]:
    """One profile of all the square matrices, diagonal by diagonal."""
    values = []
    for offset in offsets_of(size, causal):
        parts = [np.diagonal(m, -offset) for m in matrices if abs(offset) < len(m)]
        values.append(np.concatenate(parts) if parts else np.empty(0))
    together = np.concatenate(values)
    means = np.array([v.mean() if len(v) else np.nan for v in values])
    counts = np.array([len(v) for v in values])
    energy, mean = (together**2).sum(), together.mean()
    spread = ((together - mean) ** 2).sum()
    return {
        "counts": counts,
        "diagonal_means": means,
        "total_energy": energy,
        "mean": mean,
        "variance": spread / len(together),
        "share": np.nansum(counts * means**2) / energy if energy > 0 else np.nan,
        "variance_explained": np.nansum(counts * (means - mean) ** 2) / spread if len(together) > 1 else np.nan,
    }


def logits_of(q: Tensor, k: Tensor, scale: float, bias: np.ndarray | float) -> np.ndarray:
    """[H, N, N], each head with the key head of its group."""
    queries, keys = q.double().numpy(), k.double().numpy()
    groups = len(queries) // len(keys)
    return np.stack([scale * query @ keys[h // groups].T for h, query in enumerate(queries)]) + bias


def assert_profiles_equal(
    profile: ToeplitzProfile, expected: dict[str, Any], *place: int, tolerance: float = 1e-10
) -> None:
    size = np.sqrt(expected["total_energy"] / expected["counts"].sum()) if expected["total_energy"] else 1.0
    counts = profile.counts[place[:-1]] if profile.counts.ndim > 1 else profile.counts
    np.testing.assert_array_equal(counts, expected["counts"])
    for name in ("diagonal_means", "mean", "variance", "total_energy", "share", "variance_explained"):
        unit = {"diagonal_means": size, "mean": size, "variance": size**2, "total_energy": expected["total_energy"]}
        result = getattr(profile, name)[place].numpy()
        assert result.dtype == np.float64
        away = tolerance * unit.get(name, 1)
        np.testing.assert_allclose(result, expected[name], rtol=tolerance, atol=away, err_msg=name)


@given(
    size=SIZES,
    d=st.integers(1, 5),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    causal=st.booleans(),
    kind=KINDS,
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_the_profile_matches_the_full_matrix(
    size: int, d: int, heads: tuple[int, int], causal: bool, kind: str, dtype: torch.dtype, seed: int
) -> None:
    """Batches, grouped queries, every kind of bias: 1e-10 in float64, 1e-9 for values that were float32 or bfloat16."""
    groups, repeats = heads
    count = groups * repeats
    q = random_tensor(seed, 2, size, count, d, dtype=dtype).transpose(1, 2)
    k = random_tensor(seed + 100, 2, groups, size, d, dtype=dtype)
    lead = (count,) if kind.startswith("head") else ()
    ends = (len(offsets_of(size, causal)),) if kind.endswith("offset") else (size, size)
    bias = None if kind == "none" else random_tensor(seed + 200, *lead, *ends, dtype=dtype)
    if kind == "matrix" and size == count:
        assert bias is not None
        bias = bias.expand(count, size, size)
    added: np.ndarray | float = 0.0
    if bias is not None:
        added = bias.double().numpy()
        added = toeplitz_matrix(added, size, causal) if kind.endswith("offset") else added
    with small_chunks():
        profile = toeplitz_profile(q, k, bias=bias, causal=causal, scale=0.7)
    assert profile.diagonal_means.shape == (2, count, len(offsets_of(size, causal)))
    assert profile.offsets.tolist() == list(offsets_of(size, causal))
    for b in range(2):
        for h, logits in enumerate(logits_of(q[b], k[b], 0.7, added)):
            tolerance = 1e-10 if dtype == torch.float64 else 1e-9
            assert_profiles_equal(profile, reference_profile([logits], size, causal), b, h, tolerance=tolerance)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["none", "offset", "matrix"])
def test_positions_past_a_sequences_end_are_ignored(causal: bool, kind: str) -> None:
    """Each sequence is as if cut; nan past the ends does not show; all together are one profile of all pairs."""
    size, ends = 11, [11, 1, 6]
    q, k = random_tensor(0, 3, 4, size, 3), random_tensor(1, 3, 2, size, 3)
    width = len(offsets_of(size, causal))
    bias = {"none": None, "offset": random_tensor(2, 4, width), "matrix": random_tensor(2, 3, 1, size, size)}[kind]
    for b, end in enumerate(ends):
        q[b, :, end:], k[b, :, end:] = torch.nan, torch.nan
        if kind == "matrix":
            assert bias is not None
            bias[b, :, end:] = bias[b, :, :, end:] = torch.nan
    profile = toeplitz_profile(q, k, bias=bias, causal=causal, lengths=torch.tensor(ends))
    pooled = profile.pool()
    for h in range(4):
        cut = []
        for b, end in enumerate(ends):
            added: np.ndarray | float = 0.0
            if kind == "offset":
                added = toeplitz_matrix(bias[h].numpy(), size, causal)[:end, :end]
            elif kind == "matrix":
                added = bias[b, 0, :end, :end].numpy()
            logits = q[b, h, :end].numpy() @ k[b, h // 2, :end].numpy().T + added
            cut.append(logits)
            assert_profiles_equal(profile, reference_profile([logits], size, causal), b, h)
        assert_profiles_equal(pooled, reference_profile(cut, size, causal), h)
    assert profile.diagonal_means[2, 0].isnan().sum() == width - len(offsets_of(6, causal))


def test_pooling_dimensions_in_any_order() -> None:
    q, k = random_tensor(0, 2, 3, 1, 7, 2), random_tensor(1, 2, 3, 1, 7, 2)
    profile = toeplitz_profile(q, k)
    expected = reference_profile(
        [q[a, b, 0].numpy() @ k[a, b, 0].numpy().T for a in range(2) for b in range(3)], 7, True
    )
    for pooled in (profile.pool().pool(), profile.pool(-1).pool(), profile.pool(1).pool(0)):
        assert_profiles_equal(pooled, expected, 0)
    with pytest.raises(InputError, match="dim must be one of 2 batch dimensions, got 2"):
        profile.pool(2)
    with pytest.raises(InputError, match="dim must be one of 0 batch dimensions, got 0"):
        profile.pool().pool().pool()


def test_undefined_values_are_nan() -> None:
    nothing = toeplitz_profile(torch.zeros(5, 2), torch.zeros(5, 2))
    assert torch.stack((nothing.share, nothing.residual, nothing.variance_explained)).isnan().all()
    same = toeplitz_profile(torch.ones(50, 1), torch.full((50, 1), 0.1))
    assert abs(same.share - 1) < 1e-12
    assert same.variance_explained.isnan()
    x = random_tensor(0, 6, 3)
    gone = toeplitz_profile(x, x, bias=-(x @ x.T))
    assert gone.share.isnan()
    assert gone.total_energy <= gone.rounding


@given(size=SIZES, causal=st.booleans(), seed=st.integers(0, 99), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_the_toeplitz_part_is_an_orthogonal_projection(size: int, causal: bool, seed: int, dtype: torch.dtype) -> None:
    """Means of diagonals; again changes nothing; the rest is orthogonal to it; its energy is the profile's share."""
    matrix = random_tensor(seed, 2, size, size, dtype=dtype)
    part = toeplitz_part(matrix, causal=causal)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert part.dtype == dtype
    means = np.stack([reference_profile([m], size, causal)["diagonal_means"] for m in matrix.double().numpy()])
    np.testing.assert_allclose(part, toeplitz_matrix(means, size, causal), atol=tolerance)
    np.testing.assert_allclose(toeplitz_part(part, causal=causal), part, atol=tolerance)
    visible = matrix.tril() if causal else matrix
    assert abs(((visible - part) * part).sum()) < 100 * size**2 * tolerance
    if dtype == torch.float64:
        zero = torch.zeros(2, 1, size, 1, dtype=dtype)
        share = toeplitz_profile(zero, zero, bias=matrix[:, None], causal=causal).share.flatten()
        torch.testing.assert_close((part**2).sum((-2, -1)) / (visible**2).sum((-2, -1)), share, rtol=1e-10, atol=0)


def test_masked_entries_are_not_read() -> None:
    """A bias that holds the causal mask itself, and a matrix of masked logits."""
    bias = random_tensor(0, 7, 7)
    masked = bias.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    q = random_tensor(1, 3, 7, 2)
    torch.testing.assert_close(toeplitz_profile(q, q, bias=masked).share, toeplitz_profile(q, q, bias=bias).share)
    torch.testing.assert_close(toeplitz_part(masked), toeplitz_part(bias))
    torch.testing.assert_close(toeplitz_part(torch.tensor([[1, 0], [3, 2]]))[1, 1], torch.tensor(1.5).double())
    with pytest.raises(InputError, match=r"^bias must be finite"):
        toeplitz_profile(q, q, bias=masked, causal=False)
    with pytest.raises(InputError, match=r"^matrix must be finite"):
        toeplitz_part(masked, causal=False)


@pytest.mark.parametrize("causal", [True, False])
def test_no_n_by_n_matrix_is_allocated(causal: bool) -> None:
    size = 50_000
    q, k = random_tensor(0, size, 2, dtype=torch.float32), random_tensor(1, size, 2, dtype=torch.float32)
    with _LargestTensor() as made:
        profile = toeplitz_profile(q, k, causal=causal)
    assert made.elements < 20 * size
    for offset in (0, 1, size // 2, size - 1):
        direct = (q[offset:].double() * k[: size - offset].double()).sum() / (size - offset)
        at = profile.diagonal_means[offset + (0 if causal else size - 1)]
        torch.testing.assert_close(at, direct, rtol=0, atol=1e-16 * 4 * size)


Q = torch.zeros(2, 4, 5, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": Q[:, :3]}, "^q must have a number of heads divisible by 3, .*, got 4"),
        ({"k": Q[:, :, :4]}, r"^q and k must have shapes .*, got \[2, 4, 5, 3\] and \[2, 4, 4, 3\]"),
        ({"q": Q.log()}, "^q must be finite"),
        ({"bias": torch.zeros(6)}, r"^bias must have shape \[..., 5\] or \[..., 5, 5\], .*, got shape \[6\]"),
        ({"bias": torch.full((5,), torch.nan)}, "^bias must be finite"),
        ({"lengths": torch.tensor([1, 6])}, r"lengths must be from 0 to 5, got \[1, 6\]"),
        ({"q": Q[0], "k": Q[0], "lengths": torch.tensor([5, 5, 5, 5])}, r"\[B\] for q of shape \[B, H, N, d\]"),
    ],
)
def test_invalid_input_is_refused_in_one_sentence(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"q": Q, "k": Q} | change
    with pytest.raises(InputError, match=words) as raised:
        toeplitz_profile(**given)
    assert str(raised.value).endswith(".")


def test_token_major_layout_is_accepted_and_swapped_axes_warn() -> None:
    given_q, given_k = torch.randn(2, 4, 5, 3, generator=torch.Generator().manual_seed(0))
    q, k = given_q.transpose(0, 1), given_k.transpose(0, 1)  # 5 tokens, 4 heads
    expected = toeplitz_profile(given_q, given_k)
    assert torch.equal(toeplitz_profile(q, k, layout="bnhd").share, expected.share)
    with pytest.warns(UserWarning, match="layout must be 'bhnd' for 5 heads and 4 tokens"):
        toeplitz_profile(q, k)


@pytest.mark.parametrize("shape", [(3, 4), (0, 0)])
def test_a_matrix_must_be_square(shape: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="matrix must have shape"):
        toeplitz_part(torch.zeros(shape))


def test_overflow_of_float64_is_reported() -> None:
    large = torch.full((2, 1), 1e200, dtype=torch.float64)
    with pytest.raises(InputError, match=r"^q and k and q2 and k2 must have products within the range of float64"):
        toeplitz.inner_product(large, large, large, large)
