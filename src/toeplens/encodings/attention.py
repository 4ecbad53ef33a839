"""Attention with any encoding: fused wherever the encoding allows, by chunks of queries for the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.flexible import flex_attend
from toeplens.encodings.kit import Positions
from toeplens.encodings.seen import Seen

AT_ONCE = 1 << 22  # query-key pairs, over batch and heads, that are worked at once where logits must be formed
KEPT = 4 * AT_ONCE  # numbers of a bias that a pass keeps for all layers that share it
FACTORED = 512  # queries at once where the bias is a product: its factors are taken relative to the first of them
PRECISE = (torch.float32, torch.float64)  # dtypes in which such a product is as good as the bias itself


def attend(
    q: Float[Tensor, "B H Nq d"],
    k: Float[Tensor, "B H Nk d"],
    v: Float[Tensor, "B H Nk dv"],
    *,
    encoding: PositionalEncoding,
    q_positions: Positions,
    k_positions: Positions,
    scale: float,
    rows: Int[Tensor, "*B Nq"] | None = None,
    notes: Float[Tensor, "B H Nk c"] | None = None,
    mask: Bool[Tensor, "*_B _H _Nq Nk"] | None = None,
    causal: bool = True,
    added: Float[Tensor, "*_B H Nq Nk"] | None = None,
    dropout: float = 0.0,
    fused: bool = True,
    at_once: int = AT_ONCE,
) -> Float[Tensor, "B H Nq dv"]:
    """Each head's output, for queries and keys as they were projected: the encoding does all of its work in here.

    A query that sees no key (padding before a text) has an output of 0, whatever the encoding and the path.

    Arguments
        scale     factor of q . k
        rows      which key is each query's own token; the last Nq keys unless given (so, decoding with a key cache)
        notes     the encoding's notes of the keys' tokens (see `PositionalEncoding.note`)
        mask      True where a key may be seen; all unless given
        causal    hide the keys after each query's own
        added     the encoding's fixed bias with the mask in it, from `fixed_bias`, where layers share it
        dropout   rate, on the attention weights
        fused     use torch's fused attention (on a GPU, flex attention for biases that depend on content) where the
                  encoding leaves logits and weights alone; else form the weights. Both give the same numbers.
        at_once   query-key pairs worked at once where they must be formed: memory is linear in the number of keys
    """
    in_order = rows is None  # then the queries are the last tokens of the keys
    seen = _rotated(encoding, q_positions, k_positions, q, k, rows, notes, mask, causal, scale)
    q, k = seen.q, seen.k
    fused = fused and encoding.fusable
    square = in_order and mask is None and q.shape[-2] == k.shape[-2]
    if fused and added is None and not encoding.overrides("bias"):
        if square or (mask is None and not causal):
            return _fused(q, k, v, None, dropout, scale, is_causal=causal)
        return _fused(q, k, v, seen.visible(), dropout, scale)
    if fused and added is None and square and not dropout and q.is_cuda:
        flexed = flex_attend(v, encoding, q_positions, k_positions, seen)
        if flexed is not None:
            return flexed
    factored = fused and added is None and encoding.factorable and causal and q.dtype in PRECISE
    factored = factored and in_order and encoding.factors_at(q_positions, k_positions)
    once = fused and added is None and square and encoding.fixed_bias and not factored
    once = once and q_positions is k_positions and not encoding.by_sequence(k_positions)
    if once and encoding.pair_width * k.shape[1] * k.shape[2] ** 2 <= 4 * at_once:
        added = fixed_bias(encoding, k_positions, dtype=q.dtype, mask=None, causal=causal)
    numbers = (encoding.pair_width if added is None else 1) * k.shape[0] * k.shape[1] * k.shape[2]  # for each query
    size = FACTORED if factored else max(1, at_once // max(1, numbers))
    starts = range(0, q.shape[-2], size)
    parts = []
    for start in starts:
        stop = min(start + size, q.shape[-2])
        keys = stop + k.shape[-2] - q.shape[-2] if in_order and causal else k.shape[-2]
        work = _Queries(
            encoding=encoding,
            q_positions=_between(encoding, q_positions, start, stop),
            k_positions=_between(encoding, k_positions, 0, keys),
            seen=seen.part(start, stop, keys),
            v=v[..., :keys, :],
            added=None if added is None else added[..., start:stop, :keys],
            dropout=dropout,
            fused=fused,
            factored=factored,
            triangle=square and causal and start == 0,
        )
        if len(starts) > 1 and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            parts.append(checkpoint(work.attend, use_reentrant=False))
        else:
            parts.append(work.attend())
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def attention_logits(
    q: Float[Tensor, "B H Nq d"],
    k: Float[Tensor, "B H Nk d"],
    *,
    encoding: PositionalEncoding,
    q_positions: Positions,
    k_positions: Positions,
    scale: float,
    rows: Int[Tensor, "*B Nq"] | None = None,
    notes: Float[Tensor, "B H Nk c"] | None = None,
    mask: Bool[Tensor, "*_B _H _Nq Nk"] | None = None,
    causal: bool = True,
) -> Float[Tensor, "B H Nq Nk"]:
    """The logits before the softmax, formed explicitly; minus infinity where a key is not visible. As `attend`."""
    seen = _rotated(encoding, q_positions, k_positions, q, k, rows, notes, mask, causal, scale)
    return _logits(encoding, q_positions, k_positions, seen, None)


def attention_weights(
    q: Float[Tensor, "B H Nq d"],
    k: Float[Tensor, "B H Nk d"],
    *,
    encoding: PositionalEncoding,
    q_positions: Positions,
    k_positions: Positions,
    scale: float,
    rows: Int[Tensor, "*B Nq"] | None = None,
    notes: Float[Tensor, "B H Nk c"] | None = None,
    mask: Bool[Tensor, "*_B _H _Nq Nk"] | None = None,
    causal: bool = True,
) -> Float[Tensor, "B H Nq Nk"]:
    """The attention weights, formed explicitly: what `attend` weighs values with, 0 where a query sees no key."""
    seen = _rotated(encoding, q_positions, k_positions, q, k, rows, notes, mask, causal, scale)
    weights = _shared_out(_logits(encoding, q_positions, k_positions, seen, None), masked=mask is not None)
    return encoding.hook("transform_weights", weights, q_positions, k_positions, seen=seen)


def fixed_bias(
    encoding: PositionalEncoding,
    positions: Positions,
    *,
    dtype: torch.dtype,
    mask: Bool[Tensor, "*_B _H _N N"] | None,
    causal: bool,
) -> Float[Tensor, "_ H N N"]:
    """The bias of an encoding with a `fixed_bias` among all ``positions``, with the mask in it, for `attend`."""
    bias = encoding.bias(positions, positions)
    assert bias is not None
    added = _four(bias.to(dtype))
    if causal:
        length = added.shape[-1]
        future = torch.ones(length, length, dtype=torch.bool, device=added.device).triu(1)
        added = added.masked_fill(future, float("-inf"))
    return added if mask is None else added.masked_fill(~mask, float("-inf"))


def _rotated(
    encoding: PositionalEncoding,
    q_positions: Positions,
    k_positions: Positions,
    q: Tensor,
    k: Tensor,
    rows: Tensor | None,
    notes: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Seen:
    """What the hooks after `rotate` see."""
    if rows is None:
        rows = torch.arange(k.shape[-2] - q.shape[-2], k.shape[-2], device=q.device)
    seen = Seen(q, k, rows, notes, mask, causal, scale)
    q, k = encoding.hook("rotate", q, k, q_positions, k_positions, seen=seen)
    return replace(seen, q=q, k=k)


def _logits(
    encoding: PositionalEncoding, q_positions: Positions, k_positions: Positions, seen: Seen, added: Tensor | None
) -> Tensor:
    logits = encoding.hook("score", seen.q, seen.k, q_positions, k_positions, seen=seen) * seen.scale
    if added is not None:
        return logits + added
    bias = encoding.hook("bias", q_positions, k_positions, seen=seen)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    logits = encoding.hook("transform_logits", logits, q_positions, k_positions, seen=seen)
    visible = seen.visible()
    return logits if visible is None else logits.masked_fill(~visible, float("-inf"))


def _shared_out(logits: Float[Tensor, "B H Nq Nk"], *, masked: bool) -> Float[Tensor, "B H Nq Nk"]:
    """The softmax over keys. A softmax of minus infinities alone is NaN, and so is its gradient: such a row gets 0.

    Only a mask can make one, so nothing is looked for without.
    """
    if not masked:
        return logits.softmax(-1)
    blind = logits.isneginf().all(-1, keepdim=True)
    return logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


@dataclass(frozen=True)
class _Queries:
    """Some of the queries, with the keys that any of them sees."""

    encoding: PositionalEncoding
    q_positions: Positions
    k_positions: Positions
    seen: Seen
    v: Tensor
    added: Tensor | None
    dropout: float
    fused: bool
    factored: bool
    triangle: bool  # as many queries as keys, each seeing those up to its own

    def attend(self) -> Tensor:
        """Each head's output for these queries."""
        if self.factored:
            return self._with_factors()
        return self._with_bias() if self.fused else self._with_weights()

    def _with_factors(self) -> Tensor:
        """The bias as one or two more dimensions of queries and keys: nothing of queries by keys is formed."""
        seen = self.seen
        a, b = self.encoding.hook("bias_product", self.q_positions, self.k_positions, seen=seen)
        q = torch.cat((seen.q, (a / seen.scale).to(seen.q.dtype).expand(*seen.q.shape[:-1], -1)), dim=-1)
        k = torch.cat((seen.k, b.to(seen.k.dtype).expand(*seen.k.shape[:-1], -1)), dim=-1)
        mask = None if self.triangle else seen.visible()
        return _fused(q, k, self.v, mask, self.dropout, seen.scale, is_causal=self.triangle)

    def _with_bias(self) -> Tensor:
        seen, added = self.seen, self.added
        if added is None:
            bias = self.encoding.hook("bias", self.q_positions, self.k_positions, seen=seen)
            visible, added = seen.visible(), bias.to(seen.q.dtype)
            if visible is not None:
                added = added.masked_fill(~visible, float("-inf"))
        return _fused(seen.q, seen.k, self.v, added, self.dropout, seen.scale)

    def _with_weights(self) -> Tensor:
        encoding, seen, places = self.encoding, self.seen, (self.q_positions, self.k_positions)
        masked = seen.mask is not None or self.added is not None
        weights = _shared_out(_logits(encoding, *places, seen, self.added), masked=masked)
        weights = encoding.hook("transform_weights", weights, *places, seen=seen)
        weights = F.dropout(weights, self.dropout)
        out = weights @ self.v
        more = encoding.hook("add_values", weights, *places, seen=seen)
        return out if more is None else out + more


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float, *, is_causal: bool = False
) -> Tensor:
    """Fused attention; its kernels want one width for queries, keys and values, so the narrower ones get zeros."""
    mask = None if mask is None else _four(mask)
    width = v.shape[-1]
    missing = q.shape[-1] - width
    if missing > 0:
        v = F.pad(v, (0, missing))
    elif missing < 0:
        q, k = F.pad(q, (0, -missing)), F.pad(k, (0, -missing))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale)
    return out[..., :width]


def _between(encoding: PositionalEncoding, positions: Positions, start: int, stop: int) -> Positions:
    dim = positions.ndim - 1 - (encoding.axes > 1)
    return positions.narrow(dim, start, stop - start)


def _four(x: Tensor) -> Tensor:
    """With leading dimensions of 1, without which fused kernels do not take a mask."""
    return x[(None,) * (4 - x.ndim)]
