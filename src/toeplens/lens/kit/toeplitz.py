"""Sums over all visible pairs of positions, and by offset (the Toeplitz part), without N x N matrices.

Running sums over the keys take O(N d^2). With a window of w keys, positions are cut into blocks of w. A query sees the
keys of its own block up to itself, and the end of the previous block, which is a causal sum too if both blocks are
reversed. So sums over a window are added from two sums, and nothing is subtracted.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
import torch
from jaxtyping import Float, Int, Real
from scipy.fft import next_fast_len
from torch import Tensor
from torch.nn import functional as F

from toeplens.lens.kit.rotation import RotaryPairs, as_rotation
from toeplens.utils import InputError, choose, invalid
from toeplens.utils.records import Record

CHUNK = 64  # positions whose mutual pairs are formed; the work is 4 (d d2 + CHUNK d) per position and head
BLOCK = 2**18  # numbers in one working array (float64), up to whole chunks: what fits in the cache


@torch.no_grad()
def inner_product(
    q: Float[Tensor, "*_Bq _N _d"],
    k: Float[Tensor, "*_Bk _N _d"],
    q2: Float[Tensor, "*_Bq2 _N _d2"],
    k2: Float[Tensor, "*_Bk2 _N _d2"],
    *,
    causal: bool = True,
) -> Float[Tensor, "*_B _d"]:
    """For each dimension e, the sum over visible pairs (i, j) of q_ie k_je (q2_i . k2_j) (theory, section 4; float64).

    Summed over e this is the inner product of the logit matrices Q K^T and Q2 K2^T over the visible pairs; with q2 = q
    and k2 = k it is the energy of Q K^T, split by dimension. The leading dimensions of all four broadcast; sums over
    keys are computed once for all queries that share them. Raises `InputError` for numbers that are not finite.
    """
    length, d, d2 = *q.shape[-2:], q2.shape[-1]
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, q2, k2))).numel()
    # whole chunks with at most BLOCK numbers, but at least one chunk; then the rest
    step = CHUNK * max(1, BLOCK // (batch * max(CHUNK, d, d2, d * d2 // CHUNK) * CHUNK))
    full_length = length - length % CHUNK
    keys = queries = total = torch.zeros((), dtype=torch.float64, device=q.device)
    for start in (*range(0, full_length, step), *range(full_length, length, CHUNK)):
        stop = min(start + step, full_length) if start < full_length else length
        a, b, a2, b2 = (
            x[..., start:stop, :].double().unflatten(-2, (-1, min(CHUNK, stop - start))) for x in (q, k, q2, k2)
        )
        outer = b.mT @ b2  # [..., chunks, d, d2]
        if causal:
            first = keys.expand_as(outer[..., :1, :, :])
            running = torch.cat((first, outer), -3).cumsum(-3)
            keys = running[..., -1:, :, :]
            key_sums = a2 @ running[..., :-1, :, :].mT + (a2 @ b2.mT).tril_() @ b
            total = total + (a * key_sums).sum((-3, -2))
        else:
            keys = keys + outer.sum(-3)
            queries = queries + (a.mT @ a2).sum(-3)
    return check_finite(total if causal else (queries * keys).sum(-1), q=q, k=k, q2=q2, k2=k2)


def windowed_inner_product(
    window: int | None, q: Tensor, k: Tensor, q2: Tensor, k2: Tensor, *, causal: bool = True
) -> Float[Tensor, "*B e"]:
    """`inner_product` over the pairs in a window, or over all pairs without one."""
    if window is None:
        return inner_product(q, k, q2, k2, causal=causal)
    parts = [_blocks(x, window) for x in (q, k, q2, k2)]
    total = inner_product(*parts).sum(-2)
    if window > 1 and parts[0].shape[-3] > 1:
        q, q2 = (x[..., 1:, :-1, :].flip(-2) for x in parts[::2])
        k, k2 = (x[..., :-1, 1:, :].flip(-2) for x in parts[1::2])
        total = total + inner_product(q, k, q2, k2).sum(-2)
    return total


def sum_over_keys(x: Float[Tensor, "*B N e"], causal: bool, window: int | None = None) -> Float[Tensor, "*B _N e"]:
    """Sums over the keys that each query sees; one for all queries if all see all keys."""
    if not causal:
        return x.sum(-2, keepdim=True)
    if window is None:
        return x.cumsum(-2)
    blocks = _blocks(x, window)
    sums = blocks.cumsum(-2)
    sums[..., 1:, :-1, :] += blocks[..., :-1, 1:, :].flip(-2).cumsum(-2).flip(-2)
    return sums.flatten(-3, -2)[..., : x.shape[-2], :]


def _blocks(x: Float[Tensor, "*B N e"], window: int) -> Float[Tensor, "*B b w e"]:
    """Cut positions into blocks, the last one padded with 0."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % window)).unflatten(-2, (-1, window))


def check_finite(result: Tensor, **inputs: Tensor) -> Tensor:
    """Check that the result is finite; it is not if any input number is not, as each is in some visible pair."""
    if not result.isfinite().all():
        for name, x in inputs.items():
            if not x.isfinite().all():
                raise InputError(f"{name} must be finite, got infinite numbers or nan.")
        raise InputError(f"{' and '.join(inputs)} must have products within the range of float64.")
    return result


Layout = Literal["bhnd", "bnhd"]  # of queries and keys: [B, H, N, d], or [B, N, H, d]
MAX_ELEMENTS = 2**22  # maximum numbers in a working array (float64) of the transforms and of rows of a full bias
ROUNDING = 1e-12  # parts of the summed energies below this are rounding errors


@dataclass(frozen=True)
class ToeplitzShares(Record):
    """The saved part of the profiles of a model's heads; see `ToeplitzProfile`."""

    share: Float[np.ndarray, "L H"]
    variance_explained: Float[np.ndarray, "L H"]


@dataclass(frozen=True)
class ToeplitzProfile:
    """Logits by offset: their orthogonal projection on Toeplitz matrices, over the visible pairs (theory, section 4).

    offsets             [D] query minus key, int64: 0 .. N-1 if causal, otherwise -(N-1) .. N-1
    counts              [*B D] number of visible pairs of each offset, int64
    diagonal_means      [*B H D] a: mean logit of each offset; nan without visible pairs. The error is about
                        1e-16 |Q| |K| / counts (Frobenius norms), so it is largest at the longest offsets
    total_energy        [*B H] sum of squared logits over the visible pairs
    mean                [*B H] mean logit over the visible pairs
    variance            [*B H] mean squared distance from that mean
    share               [*B H] sum of counts a^2 / total energy; nan unless the energy is above `rounding`. For
                        unstructured content it is near offsets / pairs, 2 / (N + 1) if causal, not near 0
    variance_explained  [*B H] the same after subtracting the mean from a and the logits: the share of the variance
                        explained by the offset; nan unless pairs * variance is above `rounding`
    rounding            [*B H] energy that rounding errors can produce: 1e-12 of the energies of Q K^T and of the bias
    """

    offsets: Int[Tensor, "D"]
    counts: Int[Tensor, "*B D"]
    diagonal_means: Float[Tensor, "*BH D"]
    total_energy: Float[Tensor, "*BH"]
    mean: Float[Tensor, "*BH"]
    variance: Float[Tensor, "*BH"]
    share: Float[Tensor, "*BH"]
    variance_explained: Float[Tensor, "*BH"]
    rounding: Float[Tensor, "*BH"]

    @property
    def residual(self) -> Float[Tensor, "*BH"]:
        """Relative Frobenius distance to the nearest Toeplitz matrix, sqrt(1 - share); inexact below about 1e-7."""
        return (1 - self.share).clamp(min=0).sqrt()

    def pool(self, dim: int = 0) -> ToeplitzProfile:
        """Pool the sequences along a batch dimension into one profile, with diagonal means over all their pairs.

        Differences between the sequences lower the shares. Raises `InputError` if there is no such dimension.
        """
        batch = self.counts.ndim - 1
        if not -batch <= dim < batch:
            raise invalid("dim", f"be one of {batch} batch dimensions", dim)
        dim %= batch
        return profile_of(
            self.offsets,
            self.counts.sum(dim),
            (self.diagonal_means.nan_to_num() * self.counts.unsqueeze(-2)).sum(dim),
            self.total_energy.sum(dim),
            self.rounding.sum(dim),
        )


@torch.no_grad()
def toeplitz_profile(
    q: Float[Tensor, "*_Bq _N _d"],
    k: Float[Tensor, "*_Bk _N _d"],
    *,
    bias: Float[Tensor, "*_Bb _D"] | None = None,
    causal: bool = True,
    scale: float = 1.0,
    lengths: Int[Tensor, "_B"] | None = None,
    rotation: RotaryPairs | None = None,
    rotated: bool = False,
    layout: Layout | None = None,
) -> ToeplitzProfile:
    """The Toeplitz part of the logits scale * Q K^T + bias, in O(N d (d + log N)) time and O(N) memory, in float64.

    The diagonal sums of Q K^T are cross-correlations, summed over dimensions in the frequency domain; its energy is
    `inner_product`; a bias by offset adds to both in closed form.

    Arguments
        q         [..., H, N, d] queries, or [N, d], as they enter the product; before the rotation with ``rotation``
        k         [..., G, N, d] keys, likewise; head h reads key head h // (H / G). Or [N, d]
        bias      by offset [..., D], for the offsets 0 .. N-1 if causal, otherwise -(N-1) .. N-1; or a full matrix
                  [..., N, N], of which only visible pairs are read, in O(N^2 d) time. Leading dimensions broadcast to
                  q's. Shapes that fit both are read as by offset: [N, N] for N heads has one row per head
        causal    query i sees key j if j <= i; otherwise every key
        scale     of the products, usually 1 / sqrt(d); not applied to the bias
        lengths   [B] for q [B, H, N, d]: positions from lengths[b] on are padding. A sequence of length 0 has no pairs:
                  its means and shares are nan, and pooling ignores it
        rotation  from `rope` or `rotation_of`: q and k are rotated first, so that they can be those of `behaviour`
        rotated   with ``rotation``: q and k are after it, as there, so nothing is rotated (default: False)
        layout    ``bhnd`` for q and k as above (default), or ``bnhd`` for [..., N, H, d], as in TransformerLens.
                  Without it, more heads than tokens cause a warning

    Raises `InputError` for shapes that do not fit, no positions, and numbers that are not finite.
    """
    q, k = to_bhnd(q, k, layout, required=rotation is not None, num_heads=getattr(rotation, "num_heads", None))
    is_matrix = q.ndim == 2
    if rotation is not None:
        if not isinstance(rotation, RotaryPairs):
            raise invalid("rotation", "come from lens.rope or lens.rotation_of", rotation)
        rotation = as_rotation(rotation, None, q)
        q, k = (q, k) if rotated else (rotation.rotate(q), rotation.rotate(k))
    if is_matrix:
        q, k = q[None], k[None]
    lead, size = q.shape[:-2], q.shape[-2]
    offsets = torch.arange(0 if causal else 1 - size, size, device=q.device)
    full = False
    if bias is not None:
        bias = torch.as_tensor(bias, device=q.device)
        full = not (bias.ndim >= 1 and bias.shape[-1] == len(offsets) and is_broadcastable(bias.shape[:-1], lead))
        if not full:
            check_finite(bias.double().sum(), bias=bias)
        elif bias.ndim < 2 or bias.shape[-2:] != (size, size) or not is_broadcastable(bias.shape[:-2], lead):
            shapes = f"have shape [..., {len(offsets)}] or [..., {size}, {size}]"
            got = f"shape {list(bias.shape)}"
            raise invalid("bias", f"{shapes}, with leading dimensions that broadcast to {list(lead)}", got=got)
        bias = bias.expand(*lead, *bias.shape[-1 - full :])
    ends = sequence_ends(lengths, q)
    counts = (ends[:, None] - offsets.abs()).clamp(min=0)
    sums = torch.zeros(len(ends), lead[-1], len(offsets), dtype=torch.float64, device=q.device)
    energies, sizes = torch.zeros(2, len(ends), lead[-1], dtype=torch.float64, device=q.device)
    for row, index in enumerate(np.ndindex(lead[:-1])):
        end, has_pairs = int(ends[row]), counts[row] > 0
        if end == 0:
            continue
        queries, keys = q[index][:, :end].unflatten(0, (k.shape[-3], -1)), k[index][:, None, :end]
        if bias is not None and full:
            logits = _full_bias_sums(queries, keys, bias[index][:, :end, :end], causal, scale)
        else:
            table = None if bias is None else bias[index][:, has_pairs]
            logits = _offset_bias_sums(queries, keys, table, causal, scale)
        sums[row][:, has_pairs], energies[row], sizes[row] = logits
    shape = () if is_matrix else lead
    return profile_of(
        offsets,
        counts.reshape(*lead[:-1], -1),
        sums.reshape(*shape, -1),
        energies.reshape(shape),
        ROUNDING * sizes.reshape(shape),
    )


def toeplitz_part(matrix: Real[Tensor, "*_B _N _N"], *, causal: bool = True) -> Float[Tensor, "*_B _N _N"]:
    """The nearest Toeplitz matrix over the visible pairs, zero elsewhere: each diagonal is replaced by its mean.

    Masked entries are not read. A matrix of integers gives float64. Raises `InputError` for matrices that are not
    square or not finite.
    """
    size = matrix.shape[-1]
    if matrix.ndim < 2 or matrix.shape[-2] != size or size == 0:
        raise invalid("matrix", "have shape [..., N, N] with N at least 1", got=f"shape {list(matrix.shape)}")
    visible = check_finite(matrix.double().tril() if causal else matrix.double(), matrix=matrix)
    positions = torch.arange(size, device=matrix.device)
    offsets = positions[:, None] - positions
    means = diagonal_sums(visible) / (size - torch.arange(1 - size, size, device=matrix.device).abs())
    part = means[..., offsets + size - 1]
    return (part.tril() if causal else part).to(matrix.dtype if matrix.is_floating_point() else part.dtype)


def profile_of(offsets: Tensor, counts: Tensor, sums: Tensor, energy: Tensor, rounding: Tensor) -> ToeplitzProfile:
    """The profile from the diagonal sums [*B H D], their counts [*B D], and the energies [*B H]."""
    weights = (counts if counts.ndim == sums.ndim else counts.unsqueeze(-2)).double()
    pairs = weights.sum(-1)
    means = sums / weights
    mean = sums.sum(-1) / pairs
    spread = energy - pairs * mean**2
    toeplitz_energy = (weights * means.nan_to_num() ** 2).sum(-1)
    explained = (weights * (means - mean.unsqueeze(-1)).nan_to_num() ** 2).sum(-1)
    return ToeplitzProfile(
        offsets=offsets,
        counts=counts,
        diagonal_means=means,
        total_energy=energy,
        mean=mean,
        variance=(spread / pairs).clamp(min=0),
        share=torch.where(energy > rounding, toeplitz_energy / energy, torch.nan),
        variance_explained=torch.where(spread > rounding, explained / spread, torch.nan),
        rounding=rounding,
    )


def _offset_bias_sums(
    q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Diagonal sums [H, D], energy [H], and the energies of content and bias [H] for a bias by offset [H, D]."""
    content = scale**2 * inner_product(q, k, q, k, causal=causal).sum(-1).flatten()
    sums = scale * _correlations(q, k, causal)
    if bias is None:
        return sums, content, content
    bias = bias.double()
    size = q.shape[-2]
    counts = size - torch.arange(0 if causal else 1 - size, size, device=q.device).abs()
    bias_energy = (counts * bias**2).sum(-1)
    return sums + counts * bias, content + 2 * (bias * sums).sum(-1) + bias_energy, content + bias_energy


def _full_bias_sums(q: Tensor, k: Tensor, bias: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same for a full bias [H, N, N], some rows of logits at a time."""
    heads, size, _ = bias.shape
    keys = k.double().mT
    sums = torch.zeros(heads, 2 * size - 1, dtype=torch.float64, device=q.device)
    energy, energies = torch.zeros(2, heads, dtype=torch.float64, device=q.device)
    step = max(1, MAX_ELEMENTS // (2 * heads * size))
    for start in range(0, size, step):
        content = scale * (q[..., start : start + step, :].double() @ keys).flatten(0, 1)
        bias_rows = bias[:, start : start + step].double()
        if causal:
            content, bias_rows = content.tril(start), bias_rows.tril(start)
        check_finite(bias_rows.sum(), bias=bias_rows)
        logits = content + bias_rows
        sums[:, start : start + size - 1 + logits.shape[-2]] += diagonal_sums(logits)
        energy += logits.square().sum((-2, -1))
        energies += content.square().sum((-2, -1)) + bias_rows.square().sum((-2, -1))
    return check_finite(sums[:, size - 1 if causal else 0 :], q=q, k=k), energy, energies


def _correlations(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Diagonal sums [H, D] of q_i . k_j for q [G, R, N, d] and k [G, 1, N, d]: by FFT, some dimensions at a time."""
    groups, repeats, size, width = q.shape
    points = cast(int, next_fast_len(2 * size - 1, real=True))
    groups_per_step = min(groups, max(1, MAX_ELEMENTS // ((repeats + 1) * points * width)))
    tile = min(width, max(1, MAX_ELEMENTS // ((repeats + 1) * points * groups_per_step)))
    results = []
    for queries, keys in zip(q.split(groups_per_step), k.split(groups_per_step), strict=True):
        padded = torch.zeros(tile, len(keys), repeats + 1, points, dtype=torch.float64, device=q.device)
        spectra = torch.empty(*padded.shape[:-1], points // 2 + 1, dtype=torch.complex128, device=q.device)
        total = torch.zeros_like(spectra[0, :, 1:])
        for start in range(0, width, tile):
            dims = slice(start, min(start + tile, width))
            num_dims = dims.stop - start
            padded[:num_dims, :, :repeats, :size] = queries[..., dims].movedim(-1, 0)
            padded[:num_dims, :, repeats:, :size] = keys[..., dims].movedim(-1, 0)
            torch.fft.rfft(padded[:num_dims], out=spectra[:num_dims])
            for spectrum in spectra[:num_dims]:
                total.addcmul_(spectrum[:, :repeats], spectrum[:, repeats:].conj_physical_())
        sums = torch.fft.irfft(total, n=points).flatten(0, 1)
        results.append(sums[:, :size] if causal else torch.cat((sums[:, points - size + 1 :], sums[:, :size]), -1))
    return torch.cat(results)


def diagonal_sums(rows: Tensor) -> Tensor:
    """The sums by i - j = first row - (N-1), ..., last row of some rows [..., n, N], by skewing the rows."""
    count, size = rows.shape[-2:]
    width = count + size - 1
    padded = F.pad(rows.flip(-1), (0, count)).flatten(-2)
    return padded[..., : count * width].unflatten(-1, (count, width)).sum(-2)


def to_bhnd(
    q: Tensor, k: Tensor | None, layout: Layout | None, *, required: bool = False, num_heads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Queries and keys as [..., H, N, d] and [..., G, N, d], from either layout; by default this one.

    That is doubtful for more heads than tokens, and for as many tokens as the model has heads (``num_heads``, if
    known): it causes a warning, or an `InputError` if a layout is ``required``. Raises `InputError` for tensors that do
    not fit.
    """
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor):
            raise invalid(name, "be a torch.Tensor", x)
    assert k is not None
    if layout is not None:
        choose("layout", layout, get_args(Layout))
    elif q.ndim > 2 and q.shape[-3] != num_heads and (q.shape[-3] > q.shape[-2] > 0 or q.shape[-2] == num_heads):
        heads, tokens = q.shape[-3:-1]
        message = (
            f"layout must be 'bhnd' for {heads} heads and {tokens} tokens, or 'bnhd' for {tokens} heads and {heads} "
            "tokens, as in TransformerLens."
        )
        if required:
            raise InputError(message)
        warnings.warn(message, stacklevel=4)
    shapes = f"{list(q.shape)} and {list(k.shape)}"
    other = (q.transpose(-3, -2), k.transpose(-3, -2)) if min(q.ndim, k.ndim) > 2 else (q, k)
    (q, k), other = (other, (q, k)) if layout == "bnhd" else ((q, k), other)
    if not _have_same_tokens(q, k):
        must, name = "[..., H, N, d] and [..., G, N, d]", "bnhd"
        if layout == "bnhd":
            must, name = "[..., N, H, d] and [..., N, G, d]", "bhnd"
        shapes += f", which layout={name!r} fits" if _have_same_tokens(*other) else ""
        raise invalid("q and k", f"have shapes {must}, or [N, d] both, with no dimension 0", got=shapes)
    if q.ndim > 2 and q.shape[-3] % k.shape[-3]:
        raise invalid("q", f"have a number of heads divisible by {k.shape[-3]}, the number of heads of k", q.shape[-3])
    return q, k


def _have_same_tokens(q: Tensor, k: Tensor) -> bool:
    """Whether shapes [..., H, N, d] and [..., G, N, d], or [N, d] both, are equal except for the heads."""
    sizes = {(x.ndim, x.shape[:-3], x.shape[-2:]) for x in (q, k)}
    return len(sizes) == 1 and q.ndim > 1 and 0 not in (*q.shape, *k.shape)


def is_broadcastable(shape: Sequence[int], lead: Sequence[int]) -> bool:
    """Whether the shape broadcasts to ``lead``."""
    return len(shape) <= len(lead) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(lead), strict=False))


def sequence_ends(lengths: Tensor | None, q: Tensor) -> Tensor:
    """Number of positions of each sequence, flattened over the batch dimensions."""
    size = q.shape[-2]
    if lengths is None:
        return torch.full((int(np.prod(q.shape[:-3])),), size, device=q.device)
    lengths = torch.as_tensor(lengths, device=q.device)
    if q.ndim != 4 or lengths.shape != q.shape[:1]:
        raise invalid("lengths", "have shape [B] for q of shape [B, H, N, d]", got=f"shape {list(lengths.shape)}")
    if lengths.min() < 0 or lengths.max() > size:
        raise invalid("lengths", f"be from 0 to {size}", lengths.tolist())
    return lengths.long()
