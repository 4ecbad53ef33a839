"""A model's own eager attention, some queries at a time, so that no weights of all queries by all keys are held.

On long inputs its fused attention, where the eager one gives the same at some queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.capture.attention import blocks
from toeplens.sources.huggingface.capture.proof import proved_rows
from toeplens.sources.huggingface.model import tolerance

_LONG = 1 << 22  # weights, over batch and heads: from here on fused attention is tried


@dataclass(frozen=True)
class Eager:
    """What eager attention gave.

    heads    [B, Nq, H, dv] outputs
    weights  [B, H, Nq, Nk], where all queries were formed at once; else None
    rows     [R] queries whose weights were kept
    own      [B, H, R, Nk] those; None where the function gives no weights
    """

    heads: Float[Tensor, "B Nq H dv"]
    weights: Float[Tensor, "B H Nq Nk"] | None
    rows: Int[Tensor, "R"]
    own: Float[Tensor, "B H R Nk"] | None


def run_eager(
    eager: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    query: Float[Tensor, "B H Nq d"],
    key: Float[Tensor, "B G Nk d"],
    value: Float[Tensor, "B G Nk dv"],
    mask: Tensor | None,
    causal: bool,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    fused: Callable[[], Tensor] | None = None,
) -> Eager:
    """The eager function of ``module`` on all queries: at once if they are few, else in blocks.

    On long inputs on some queries alone; all outputs are then those of ``fused``, if they are the same there.

    Arguments
        mask          as the function takes it, or of truth values: True where a key is seen
        causal        whether it hides the keys after the query too, without a mask that says so
        args, kwargs  what else the function takes; tables of queries by keys among it are cut as the mask is
        fused         gives all outputs, [B, Nq, H, dv], in the model's fused attention; None where it has none
    """
    size, keys = (query.shape[2], key.shape[2]), key.shape[2]
    rows, many = proved_rows(query, key), query.shape[0] * query.shape[1] * key.shape[2]

    def run(part: slice | Tensor, seen: int) -> tuple[Tensor, Tensor | None]:
        cut = (part, slice(0, seen))
        rest = [_cut(each, size, cut) for each in args], {name: _cut(each, size, cut) for name, each in kwargs.items()}
        made = _mask(mask, causal, size, cut, query)
        return eager(module, query[:, :, part], key[:, :, :seen], value[:, :, :seen], made, *rest[0], **rest[1])

    if fused is not None and many * query.shape[2] >= _LONG:
        all_heads, (some, weights) = _tried(fused), run(rows, keys)
        if all_heads is not None and weights is not None and _same(all_heads.index_select(1, rows), some):
            return Eager(all_heads, None, rows, weights)
    heads, own, whole = [], [], None
    for part in blocks(query.shape[2], many):
        seen = min(part.stop, keys) if causal else keys
        out, weights = run(part, seen)
        heads.append(out)
        if weights is not None:
            weights = torch.nn.functional.pad(weights, (0, keys - seen)) if seen < keys else weights
            whole = weights if part == slice(0, size[0]) else None
            asked = rows[(rows >= part.start) & (rows < part.stop)] - part.start
            own.append(weights.index_select(2, asked))
    joined = torch.cat(own, dim=2) if own else None
    return Eager(torch.cat(heads, dim=1) if len(heads) > 1 else heads[0], whole, rows, joined)


def _tried(fused: Callable[[], Tensor]) -> Tensor | None:
    """What fused attention gives; None where it cannot be had, as with a cap."""
    try:
        return fused()
    except (ValueError, TypeError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        return None


def _same(x: Tensor, y: Tensor) -> bool:
    return bool((x - y).abs().max() <= tolerance(x.dtype) * y.abs().max())


def _cut(x: Any, size: tuple[int, int], cut: tuple[slice | Tensor, slice]) -> Any:
    """The rows and keys of a table of queries by keys; anything else as it is."""
    table = isinstance(x, Tensor) and x.ndim >= 3 and tuple(x.shape[-2:]) == size
    return x[..., cut[0], cut[1]] if table else x


def _mask(
    mask: Tensor | None, causal: bool, size: tuple[int, int], cut: tuple[slice | Tensor, slice], like: Tensor
) -> Tensor | None:
    """What is added to the logits of these queries and keys."""
    rows, keys = cut
    if mask is not None:
        mask = mask[..., rows, keys] if mask.shape[-2] == size[0] else mask[..., keys]
    elif causal:
        places = torch.arange(rows.start, rows.stop, device=like.device) if isinstance(rows, slice) else rows
        mask = (torch.arange(keys.stop, device=like.device) <= places.unsqueeze(-1))[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=like.dtype, device=like.device), torch.finfo(like.dtype).min)
