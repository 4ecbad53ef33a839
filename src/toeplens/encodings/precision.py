"""The precision that encodings work in: no less than float32, whatever the model's dtype."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


def widened(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: bfloat16 holds no integer over 256 exactly."""
    return torch.promote_types(dtype, torch.float32)


def linear(layer: nn.Module, x: Float[Tensor, "*B i"]) -> Float[Tensor, "*B o"]:
    """A linear layer in the precision of ``x``."""
    assert isinstance(layer, nn.Linear)
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))
