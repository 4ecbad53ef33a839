"""What the tests of encodings are built from."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from toeplens import encodings

SIZES = {"d_model": 24, "num_heads": 3, "head_dim": 8, "max_len": 64}
Made = TypeVar("Made", bound=nn.Module)


def randomised(module: Made, std: float = 1.0) -> Made:
    """With parameters of a normal distribution, where nothing is zero by its start."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)
    return module


def build(name: str, std: float | None = None, *, grad: bool = True, **options: Any) -> Any:
    """An encoding, of the sizes above unless others are given; with ``std`` in float64 and with drawn parameters."""
    torch.manual_seed(0)
    sizes = {size: options.pop(size, usual) for size, usual in SIZES.items()}
    encoding = encodings.build(name, **sizes, **options)
    return encoding if std is None else randomised(encoding.double().requires_grad_(grad), std)


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agree(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).detach().abs().max()) <= tolerance
