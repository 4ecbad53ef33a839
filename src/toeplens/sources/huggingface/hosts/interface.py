"""Our function in transformers' attention interface, which modules with an encoding go through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from toeplens.ground import InputError
from toeplens.sources.huggingface.hosts.passes import PASS, Pass
from toeplens.sources.huggingface.hosts.seat import Here, Seat
from toeplens.sources.huggingface.interface import eager_function
from toeplens.sources.huggingface.model import NAME, SEAT, library

BEFORE = "toeplens_before"  # where an attention module carries the name of what its attention went by


@dataclass(frozen=True)
class Call:
    """A module asked for attention."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    kwargs: dict[str, Any]
    out: Tensor


_CALLS: ContextVar[list[Call] | None] = ContextVar("toeplens_calls", default=None)


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Every call of our function, as it comes, for a while."""
    calls: list[Call] = []
    token = _CALLS.set(calls)
    try:
        yield calls
    finally:
        _CALLS.reset(token)


def register() -> None:
    """Make our functions known to transformers, under the name ``toeplens``; masks are those of fused attention."""
    transformers = library()
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    transformers.AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of a module: by its encoding, where it has one that is not done by now, else as it was."""
    seat: Seat | None = module.__dict__.get(SEAT)
    told: Here | Pass | None = kwargs.pop(PASS, None)
    if seat is not None and not isinstance(told, Here):
        raise InputError(f"model: {type(module).__name__} does not hand on what its attention is told.")
    if seat is not None and isinstance(told, Here) and not told.turned:
        made = seat.attend(module, query, key, value, attention_mask, told, **kwargs)
    else:
        now = told.now if isinstance(told, Here) else told
        weights = now is not None and now.weights
        made = plain(module, query, key, value, attention_mask, weights=weights, **kwargs)
    calls = None if torch.compiler.is_compiling() else _CALLS.get()
    if calls is not None and (seat is None or BEFORE in vars(module)):  # none that a family's own forward asks
        calls.append(Call(module, query, key, value, attention_mask, kwargs, made[0]))
    return made


def plain(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    weights: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The module's attention as it was: torch's fused one, or, also for its weights, its own eager one by a mask of
    numbers."""
    if module.__dict__.get(BEFORE) == "sdpa" and not weights:
        return library().AttentionInterface._global_mapping["sdpa"](module, query, key, value, mask, **kwargs)
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", False) if kwargs.get("is_causal") is None else kwargs["is_causal"]
    if mask is None and causal and queries > 1:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return eager_function(module)(module, query, key, value, mask, **kwargs)
