"""CPU attention for short sequences: weights are formed in blocks that fit the cache, and kept for the backward pass.

torch's fused attention processes one head of one sequence at a time and recomputes the weights for the backward pass.
Up to a few hundred tokens, batched products over cache-sized blocks are faster, most for narrow heads: 1.1 to 3 times
in training (docs/how-to/speed.md). On Intel processors with AVX-512 torch's version is 1.1 to 1.9 times faster, except
with dropout or learned biases, for which it has no kernel. On AMD processors it is not.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from toeplens.encodings.cpu_products import is_amd
from toeplens.encodings.kit import FULL_PRECISION, is_in_transform, product_dtype
from toeplens.encodings.shapes import Keys, Queries

MAX_TRAIN_TOKENS, MAX_EVAL_TOKENS = 512, 64  # maximum number of tokens where it is faster, with and without gradients
_BLOCK_WEIGHTS = 1 << 20  # weights per block
_MAX_SAVED_WEIGHTS = 1 << 27  # maximum weights that a layer keeps: half a gigabyte
_BLOCK_QUERIES = 64  # queries per block; sequences of up to three quarters of that are one block


def _is_intel_avx512() -> bool:
    """Whether this is an Intel processor with AVX-512; an unknown vendor with AVX-512 counts as Intel."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not is_amd()


_INTEL_AVX512 = _is_intel_avx512()


def blocked_is_faster(q: Queries, k: Keys, bias: Tensor | None = None, dropout: float = 0.0) -> bool:
    """Whether square attention of this shape is faster this way on this machine."""
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    if _INTEL_AVX512 and not dropout and not (torch.is_grad_enabled() and bias is not None and bias.requires_grad):
        return False
    return (
        q.device.type == "cpu"
        and product_dtype(q) in FULL_PRECISION
        and q.numel() > 0
        and q.shape[-2] == k.shape[-2] <= (MAX_TRAIN_TOKENS if needs_grad else MAX_EVAL_TOKENS)
        and q.shape[:-1].numel() * k.shape[-2] <= _MAX_SAVED_WEIGHTS
        and not torch.compiler.is_compiling()
        and not is_in_transform()
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
    out: Tensor = _BlockedAttention.apply(q, k, v, bias, dropout, scale, causal)  # type: ignore[assignment]
    return out


def _blocks(q: Tensor, causal: bool) -> list[tuple[slice, slice, int]]:
    """Sequences and queries of each block, and the number of keys these see; each sequence's full block comes first."""
    batch, heads, length, _ = q.shape
    rows = length if not causal or length <= 3 * _BLOCK_QUERIES // 4 else -(-length // -(-length // _BLOCK_QUERIES))
    size = max(1, round(_BLOCK_WEIGHTS / (heads * rows * length)))
    return [
        (slice(sequence, min(sequence + size, batch)), slice(start, stop), stop if causal else length)
        for sequence in range(0, batch, size)
        for start in reversed(range(0, length, rows))
        for stop in (min(start + rows, length),)
    ]


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q, k, v, bias, dropout, scale, causal = inputs
        batch, heads, length, _ = q.shape
        needs_grad = any(ctx.needs_input_grad)
        blocks = _blocks(q, causal)
        out = None
        if len(blocks) > 1:
            out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)  # the layout that merges heads
        future_bias = q.new_full((length, length), float("-inf")).triu_(1) if causal else None
        saved: list[Tensor] = []
        for sequences, rows, keys in blocks:
            mask_bias = None if future_bias is None else future_bias[rows, :keys]
            logits = _batched_matmul(q[sequences, :, rows], k[sequences, :, :keys].transpose(-1, -2), scale, mask_bias)
            if bias is not None:
                logits.add_(bias[sequences if len(bias) > 1 else slice(None), :, rows, :keys])
            weights = logits.softmax(-1)
            if needs_grad:
                saved.append(weights)
            if dropout:
                weights, mask = torch.native_dropout(weights, dropout, True)
                if needs_grad:
                    saved.append(mask)
            block_out = _batched_matmul(weights, v[sequences, :, :keys])
            if out is None:
                out = block_out
            else:
                out[sequences, :, rows] = block_out
        assert out is not None
        if needs_grad:
            ctx.save_for_backward(q, k, v, bias, *saved)
        ctx.dropout, ctx.scale, ctx.causal = dropout, scale, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, *saved = ctx.saved_tensors
        saved.reverse()
        blocks = _blocks(q, ctx.causal)
        qkv_grads = [torch.empty_like(x) for x in (q, k, v)] if len(blocks) > 1 else []
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        for sequences, rows, keys in blocks:
            weights = saved.pop()
            grad = grads[0][sequences, :, rows]
            grad_weights = _batched_matmul(grad, v[sequences, :, :keys].transpose(-1, -2))
            dropped_weights = weights
            if ctx.dropout:
                mask, keep_scale = saved.pop(), 1 / (1 - ctx.dropout)
                dropped_weights = weights * mask * keep_scale
                grad_weights.mul_(mask).mul_(keep_scale)
            grad_v = _batched_matmul(dropped_weights.transpose(-1, -2), grad)
            grad_logits = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            if grad_bias is not None:
                block_grad = grad_bias[sequences if len(grad_bias) > 1 else slice(None), :, rows, :keys]
                block_grad += grad_logits.sum_to_size(block_grad.shape)
            grad_q = _batched_matmul(grad_logits, k[sequences, :, :keys], ctx.scale)
            grad_k = _batched_matmul(grad_logits.transpose(-1, -2), q[sequences, :, rows], ctx.scale)
            if not qkv_grads:
                return grad_q, grad_k, grad_v, grad_bias, None, None, None
            qkv_grads[0][sequences, :, rows] = grad_q
            for total, block_part in zip(qkv_grads[1:], (grad_k, grad_v), strict=True):
                if keys == k.shape[-2]:  # the first block of these sequences
                    total[sequences] = block_part
                else:
                    total[sequences, :, :keys] += block_part
        return *qkv_grads, grad_bias, None, None, None


def _batched_matmul(a: Tensor, b: Tensor, scale: float = 1.0, addend: Tensor | None = None) -> Tensor:
    """Batched matrix product times a factor, plus an optional addend."""
    left, right = a.flatten(0, 1), b.flatten(0, 1)
    if addend is None and scale == 1.0:
        out = torch.bmm(left, right)
    elif addend is None:
        out = torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0, alpha=scale)
    else:
        out = torch.baddbmm(addend, left, right, alpha=scale)
    return out.unflatten(0, a.shape[:2])
