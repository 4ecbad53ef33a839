"""Linear layers without gradients on AMD processors with AVX-512, computed by oneDNN.

torch computes them by MKL, which uses only AVX2 on these processors: large products take 2.2 times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.kit import is_in_transform

_MIN_PRODUCT = 1 << 21  # multiplications from which oneDNN is faster


@cache
def is_amd() -> bool:
    """Whether this is an AMD processor; False if its vendor is not known."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


@cache
def _mkl_is_slow() -> bool:
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_avx512 and has_both and is_amd() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(
    x: Float[Tensor, "*B n"],
    weight: Float[Tensor, "m n"],
    bias: Float[Tensor, "m"] | None = None,
    otherwise: Callable[..., Float[Tensor, "*B m"]] = F.linear,
) -> Float[Tensor, "*B m"]:
    """``x W^T + b``: by oneDNN if it is faster on this machine and no gradients are needed, else by ``otherwise``."""
    if not _onednn_is_faster(x, weight, bias):
        return otherwise(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _onednn_is_faster(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    tensors = [x, weight] if bias is None else [x, weight, bias]
    return (
        _mkl_is_slow()
        and weight.ndim == 2
        and x.numel() * len(weight) >= _MIN_PRODUCT
        and all(
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.dtype == torch.float32
            and tensor.device.type == "cpu"
            and not (tensor.requires_grad and torch.is_grad_enabled())
            for tensor in tensors
        )
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not is_in_transform()
    )
