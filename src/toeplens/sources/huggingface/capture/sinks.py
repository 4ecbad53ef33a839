"""Sinks that a model hands to its eager attention: one more logit of each head, or of each query of a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def sinks_of(options: Mapping[str, Any], query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Sinks as `Attention` has them; and, where each query has its own, as a table [B, H, Nq, Nk], each key's alike."""
    sinks = options.get("sinks")
    if not isinstance(sinks, Tensor) or sinks.shape != (*query.shape[:3], 1):
        return options.get("s_aux"), None
    return sinks[..., 0].transpose(0, 1), sinks.expand(-1, -1, -1, key.shape[2])


def with_sinks(eager: Callable[..., Any]) -> Callable[..., Any]:
    """Eager attention that is given sinks as a table, which goes with the queries, and reads one column of it."""

    def attend(*args: Any, sinks: Tensor, **kwargs: Any) -> Any:
        return eager(*args, sinks=sinks[..., :1], **kwargs)

    return attend
