"""Attention of families that do not ask transformers' attention interface: their forward, with ours in the middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.sources.huggingface.hosts.passes import PASS
from toeplens.sources.huggingface.interface import table
from toeplens.sources.huggingface.model import NAME


def _bloom(module: Any, hidden_states: Tensor, residual: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
    """BLOOM's, whose linear biases are left out."""
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    if (past := given.get("layer_past")) is not None:
        k, v = past.update(k, v, module.layer_idx)
    mask = given.get("attention_mask")
    rate = module.attention_dropout.p if module.training else 0.0
    how = {"scaling": module.inv_norm_factor, "dropout": rate, "is_causal": True, PASS: given[PASS]}
    z, weights = table()[NAME](module, q, k, v, mask, **how)
    out = module.dense(z.flatten(-2))
    return residual + F.dropout(out, p=module.hidden_dropout, training=module.training), weights


_FORWARDS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {"BloomAttention": _bloom}


def forward_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """The forward of a family that needs one of ours; None for all others."""
    return _FORWARDS.get(type(module).__name__)
