"""Sums over all visible pairs of positions in O(N d^2): running sums over the keys, never an N x N matrix.

With a window of w keys, positions are cut into blocks of w. A query sees the keys of its own block up to itself, and
the end of the previous block, which is a causal sum too if both blocks are reversed. So sums over a window are added
from two sums, and nothing is subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from toeplens.ground import InputError

CHUNK = 64  # positions whose mutual pairs are formed; the work is 4 (d d2 + CHUNK d) per position and head
BLOCK = 2**18  # numbers in one working array (float64), up to whole chunks: what fits in the cache


@torch.no_grad()
def inner(
    q: Float[Tensor, "*_Bq _N _d"],
    k: Float[Tensor, "*_Bk _N _d"],
    q2: Float[Tensor, "*_Bq2 _N _d2"],
    k2: Float[Tensor, "*_Bk2 _N _d2"],
    *,
    causal: bool = True,
) -> Float[Tensor, "*_B _d"]:
    """For each dimension e, the sum over visible pairs (i, j) of q_ie k_je (q2_i . k2_j) (theory, section 4).

    Summed over e this is the inner product of the logit matrices Q K^T and Q2 K2^T over the visible pairs; with q2 = q
    and k2 = k it is the energy of Q K^T, split by dimension.

    Arguments
        q, k    [..., N, d] queries and keys
        q2, k2  [..., N, d2] other queries and keys, of any width; the leading dimensions of all four broadcast, and
                sums over keys are computed once for all queries that share them
        causal  query i sees key j if j <= i; otherwise every key

    Returns [..., d] in float64; pieces are converted and computed in float64, whatever the inputs' dtype. Raises
    `InputError` for numbers that are not finite.
    """
    length, d, d2 = *q.shape[-2:], q2.shape[-1]
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, q2, k2))).numel()
    keys = queries = total = torch.zeros((), dtype=torch.float64, device=q.device)
    for rows in _pieces(length, batch * max(CHUNK, d, d2, d * d2 // CHUNK)):
        a, b, a2, b2 = (_chunks(x, rows) for x in (q, k, q2, k2))
        outer = b.mT @ b2  # [..., chunks, d, d2]
        if causal:
            first = keys.expand_as(outer[..., :1, :, :])
            running = torch.cat((first, outer), -3).cumsum(-3)
            keys = running[..., -1:, :, :]
            seen = a2 @ running[..., :-1, :, :].mT + (a2 @ b2.mT).tril() @ b
            total = total + (a * seen).sum((-3, -2))
        else:
            keys = keys + outer.sum(-3)
            queries = queries + (a.mT @ a2).sum(-3)
    return finite(total if causal else (queries * keys).sum(-1), q=q, k=k, q2=q2, k2=k2)


def inner_within(
    window: int | None, q: Tensor, k: Tensor, q2: Tensor, k2: Tensor, *, causal: bool = True
) -> Float[Tensor, "*B e"]:
    """`inner` over the pairs in a window, or over all pairs without one."""
    if window is None:
        return inner(q, k, q2, k2, causal=causal)
    parts = [_blocks(x, window) for x in (q, k, q2, k2)]
    total = inner(*parts).sum(-2)
    if window > 1 and parts[0].shape[-3] > 1:
        q, q2 = (x[..., 1:, :-1, :].flip(-2) for x in parts[::2])
        k, k2 = (x[..., :-1, 1:, :].flip(-2) for x in parts[1::2])
        total = total + inner(q, k, q2, k2).sum(-2)
    return total


def over_keys(x: Float[Tensor, "*B N e"], causal: bool, window: int | None = None) -> Float[Tensor, "*B _N e"]:
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


def _pieces(length: int, size: int) -> Iterator[slice]:
    """Runs of whole chunks with at most `BLOCK` numbers, ``size`` per position (at least one chunk); then the rest."""
    step = CHUNK * max(1, BLOCK // (size * CHUNK))
    whole = length - length % CHUNK
    for start in range(0, whole, step):
        yield slice(start, min(start + step, whole))
    if whole < length:
        yield slice(whole, length)


def _chunks(x: Tensor, rows: slice) -> Tensor:
    """A piece in float64 as [..., chunks, CHUNK, d]; if shorter than a chunk, it is one chunk."""
    piece = x[..., rows, :].double()
    return piece.unflatten(-2, (-1, min(CHUNK, piece.shape[-2])))


def finite(result: Tensor, **inputs: Tensor) -> Tensor:
    """Check that the result is finite; it is not if any input number is not, as each is in some visible pair."""
    if not result.isfinite().all():
        for name, x in inputs.items():
            if not x.isfinite().all():
                raise InputError(f"{name} must be finite, got infinite numbers or nan.")
        raise InputError(f"{' and '.join(inputs)} must have products within the range of float64.")
    return result
