"""Norms held at their value: with its statistics fixed a norm is linear, and parts of its input have an output each."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


def frozen(
    norm: nn.Module, part: Float[Tensor, "*B N width"], at: Float[Tensor, "*B N width"]
) -> Float[Tensor, "*B N width"]:
    """What ``part`` of the input ``at`` contributes to the norm's output, its scale held at its value on ``at``.

    Linear in ``part``; the norm's shift is left out. So, for parts that sum to ``at``, these sum to ``norm(at)`` less
    the shift (theory, section 1).
    """
    if isinstance(norm, nn.Identity):
        return part
    if isinstance(norm, nn.LayerNorm):
        spread = (at.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        scaled = (part - part.mean(-1, keepdim=True)) / spread
    elif isinstance(norm, nn.RMSNorm):
        eps = torch.finfo(at.dtype).eps if norm.eps is None else norm.eps  # torch's own default
        scaled = part / (at.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    else:
        raise TypeError(f"{type(norm).__name__} is not a norm that is known to be linear once its statistics are held")
    return scaled if norm.weight is None else scaled * norm.weight
