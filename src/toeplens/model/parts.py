"""A projection's output taken apart into queries, keys and values, whose gradients come back as one tensor."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.encodings.kit import is_mapped


def in_parts(
    x: Float[Tensor, "B N width"], heads: int
) -> tuple[Float[Tensor, "B H N d"], Float[Tensor, "B H N d"], Float[Tensor, "B H N d"]]:
    """``x``, whose last dimension is queries, keys and values after one another, each head after head.

    torch's own `split` brings the three gradients back in three steps (each into the order of ``x``, side by side, and
    in one piece); here each is written once, where it belongs.
    """
    if torch.compiler.is_compiling() or is_mapped():
        return _views(x, heads)
    found: Any = _Parts.apply(x, heads)
    return found


def _views(x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    parts = x.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return parts[0], parts[1], parts[2]


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.shape, ctx.heads = x.shape, heads
        return _views(x, heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # the gradients are to have gradients
            return torch.stack([grad.transpose(1, 2) for grad in grads], dim=2).flatten(2), None
        whole = grads[0].new_empty(ctx.shape)
        for place, grad in zip(_views(whole, ctx.heads), grads, strict=True):
            place.copy_(grad)
        return whole, None
