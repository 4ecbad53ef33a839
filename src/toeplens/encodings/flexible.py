"""Flex attention: on a GPU, biases that depend on content are formed inside the kernel and never stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import Positions
from toeplens.encodings.seen import Seen

SMALLEST_HEAD = 16  # dimensions that flex attention's kernels take


def flex_attend(
    v: Float[Tensor, "B H N dv"],
    encoding: PositionalEncoding,
    q_positions: Positions,
    k_positions: Positions,
    seen: Seen,
) -> Float[Tensor, "B H N dv"] | None:
    """Attention with the encoding's `score_mod`, for square, unmasked attention; None if it has none."""
    if min(seen.q.shape[-1], v.shape[-1]) < SMALLEST_HEAD:
        return None
    score_mod = encoding.score_mod(q_positions, k_positions, seen)
    if score_mod is None:
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # a second's import

    block_mask = None
    if seen.causal:
        length = seen.q.shape[-2]
        block_mask = create_block_mask(_past, None, None, length, length, device=str(seen.q.device))
    run = flex_attention if torch.compiler.is_compiling() else _kernel(seen.q.device.type)
    return run(seen.q, seen.k, v, score_mod=score_mod, block_mask=block_mask, scale=seen.scale)


def _past(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@cache
def _kernel(device: str) -> Callable[..., Any]:
    """Flex attention compiled where there is a kernel for it; its plain form elsewhere."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
