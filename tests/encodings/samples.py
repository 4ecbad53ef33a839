"""What the tests of encodings are built from."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

SIZES = {"d_model": 24, "num_heads": 3, "head_dim": 8, "max_len": 64}
Made = TypeVar("Made", bound=nn.Module)


def randomised(module: Made, std: float = 1.0) -> Made:
    """With parameters of a normal distribution, where nothing is zero by its start."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)
    return module


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agree(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).detach().abs().max()) <= tolerance
