"""CPU attention for short sequences: weights are formed in blocks that fit the cache, and kept for the backward pass.

torch's fused attention processes one head of one sequence at a time and recomputes the weights for the backward pass.
Up to a few hundred tokens, batched products over cache-sized blocks are faster, most for narrow heads: 1.1 to 3 times
in training (docs/how-to/scale.md). On Intel processors with AVX-512 torch's version is 1.1 to 1.9 times faster, except
with dropout or learned biases, for which it has no kernel. On AMD processors it is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from toeplens.encodings.kit import PRECISE, is_mapped, product_dtype
from toeplens.encodings.shapes import Keys, Queries

LEARNING, READING = 512, 64  # maximum number of tokens where it is faster, with and without gradients
_BLOCK = 1 << 20  # weights per block
_MOST = 1 << 27  # maximum weights that a layer keeps: half a gigabyte
_ROWS = 64  # queries per block; sequences of up to three quarters of that are one block


def _is_wide() -> bool:
    """Whether this is an Intel processor with AVX-512; an unknown vendor with AVX-512 counts as Intel."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "AuthenticAMD" not in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True


_WIDE = _is_wide()


def is_faster(q: Queries, k: Keys, bias: Tensor | None = None, dropout: float = 0.0) -> bool:
    """Whether square attention of this shape is faster this way on this machine."""
    learning = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    if _WIDE and not dropout and not (torch.is_grad_enabled() and bias is not None and bias.requires_grad):
        return False
    return (
        q.device.type == "cpu"
        and product_dtype(q) in PRECISE
        and q.numel() > 0
        and q.shape[-2] == k.shape[-2] <= (LEARNING if learning else READING)
        and q.shape[:-1].numel() * k.shape[-2] <= _MOST
        and not torch.compiler.is_compiling()
        and not is_mapped()
    )


def attend_blocked(
    q: Queries,
    k: Keys,
    v: Float[Tensor, "B H Nk dv"],
    bias: Float[Tensor, "_B _H N N"] | None,
    dropout: float,
    scale: float,
    *,
    causal: bool,
) -> Float[Tensor, "B H Nq dv"]:
    """softmax(scale q . k + bias) v, each query seeing the keys up to its own if ``causal``; differentiable once.

    Arguments
        bias     per sequence and head, or with size 1 in their place; None for none
        dropout  rate, on the weights
        causal   mask later keys; the bias need not contain this mask
    """
    found: Tensor = _Blocked.apply(q, k, v, bias, dropout, scale, causal)  # type: ignore[assignment]
    return found


def _blocks(q: Tensor, causal: bool) -> list[tuple[slice, slice, int]]:
    """Sequences and queries of each block, and the number of keys these see; each sequence's full block comes first."""
    texts, heads, length, _ = q.shape
    rows = length if not causal or length <= 3 * _ROWS // 4 else -(-length // -(-length // _ROWS))
    size = max(1, round(_BLOCK / (heads * rows * length)))
    return [
        (slice(text, min(text + size, texts)), slice(start, stop), stop if causal else length)
        for text in range(0, texts, size)
        for start in reversed(range(0, length, rows))
        for stop in (min(start + rows, length),)
    ]


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q, k, v, bias, dropout, scale, causal = inputs
        texts, heads, length, _ = q.shape
        keeps = any(ctx.needs_input_grad)
        blocks = _blocks(q, causal)
        out = None
        if len(blocks) > 1:
            out = q.new_empty(texts, length, heads, v.shape[-1]).transpose(1, 2)  # the layout that merges heads
        hidden = q.new_full((length, length), float("-inf")).triu_(1) if causal else None
        kept: list[Tensor] = []
        for some, rows, keys in blocks:
            unseen = None if hidden is None else hidden[rows, :keys]
            logits = _product(q[some, :, rows], k[some, :, :keys].transpose(-1, -2), scale, unseen)
            if bias is not None:
                logits.add_(bias[some if len(bias) > 1 else slice(None), :, rows, :keys])
            weights = logits.softmax(-1)
            if keeps:
                kept.append(weights)
            if dropout:
                weights, mask = torch.native_dropout(weights, dropout, True)
                if keeps:
                    kept.append(mask)
            found = _product(weights, v[some, :, :keys])
            if out is None:
                out = found
            else:
                out[some, :, rows] = found
        assert out is not None
        if keeps:
            ctx.save_for_backward(q, k, v, bias, *kept)
        ctx.dropout, ctx.scale, ctx.causal = dropout, scale, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, *kept = ctx.saved_tensors
        kept.reverse()
        blocks = _blocks(q, ctx.causal)
        of_each = [torch.empty_like(x) for x in (q, k, v)] if len(blocks) > 1 else []
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        for some, rows, keys in blocks:
            weights = kept.pop()
            grad = grads[0][some, :, rows]
            of_weights = _product(grad, v[some, :, :keys].transpose(-1, -2))
            used = weights
            if ctx.dropout:
                mask, rest = kept.pop(), 1 / (1 - ctx.dropout)
                used = weights * mask * rest
                of_weights.mul_(mask).mul_(rest)
            of_v = _product(used.transpose(-1, -2), grad)
            of_logits = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            if of_bias is not None:
                own = of_bias[some if len(of_bias) > 1 else slice(None), :, rows, :keys]
                own += of_logits.sum_to_size(own.shape)
            of_q = _product(of_logits, k[some, :, :keys], ctx.scale)
            of_k = _product(of_logits.transpose(-1, -2), q[some, :, rows], ctx.scale)
            if not of_each:
                return of_q, of_k, of_v, of_bias, None, None, None
            of_each[0][some, :, rows] = of_q
            for whole, part in zip(of_each[1:], (of_k, of_v), strict=True):
                if keys == k.shape[-2]:  # the first block of these sequences
                    whole[some] = part
                else:
                    whole[some, :, :keys] += part
        return *of_each, of_bias, None, None, None


def _product(a: Tensor, b: Tensor, scale: float = 1.0, added: Tensor | None = None) -> Tensor:
    """Batched matrix product times a factor, plus an optional addend."""
    left, right = a.flatten(0, 1), b.flatten(0, 1)
    if added is None and scale == 1.0:
        found = torch.bmm(left, right)
    elif added is None:
        found = torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0, alpha=scale)
    else:
        found = torch.baddbmm(added, left, right, alpha=scale)
    return found.unflatten(0, a.shape[:2])
