"""Helpers for writing encodings: offsets, frequencies, precision, and argument checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.shapes import Positions
from toeplens.utils import invalid
from toeplens.utils.options import Positive, PositiveInt, Range, check_value

TensorKind = Literal["bool", "integer", "real", "float"]
FULL_PRECISION = (torch.float32, torch.float64)  # dtypes in which a bias may be part of a product of queries and keys


def offsets_between(q_positions: Positions, k_positions: Positions) -> Int[Tensor, "*B Nq Nk"]:
    """Signed offsets i - j, query minus key: [Nq, Nk], or [B, Nq, Nk] if either has one row per sequence."""
    return q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)


def rotary_frequencies(rotary_dim: int, base: float) -> Float[Tensor, "n"]:
    """theta_t = base^(-2t/rotary_dim), t = 0..rotary_dim/2 - 1, in float64 (Su et al. 2021, eq. 15)."""
    check_value("base", base, Positive)
    return base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def evaluate_distinct(
    function: Callable[..., Float[Tensor, "H *D"]], *offsets: Int[Tensor, "*D"]
) -> Float[Tensor, "H *D"]:
    """A function of integer offsets, evaluated once per distinct offset where finding those is cheap."""
    first = offsets[0]
    if first.device.type != "cpu" or torch.compiler.is_compiling() or first.is_floating_point() or not first.numel():
        return function(*offsets)
    lows = [int(offset.min()) for offset in offsets]
    ranges = [torch.arange(low, int(offset.max()) + 1) for low, offset in zip(lows, offsets, strict=True)]
    if 2 * math.prod(map(len, ranges)) > first.numel():
        return function(*offsets)
    table = function(*torch.meshgrid(*ranges, indexing="ij"))
    return table[:, *(offset - low for low, offset in zip(lows, offsets, strict=True))]


def short_convolution(
    x: Float[Tensor, "B H N c"],
    taps: Float[Tensor, "_H _c size"],
    document_ids: Int[Tensor, "B N"] | None,
    padding: Bool[Tensor, "B N"] | None = None,
) -> Float[Tensor, "B H N c"]:
    """A causal depthwise convolution over tokens; the last tap is the token itself.

    Packed documents are convolved separately. Padding is skipped, and convolved at the end.
    """
    if padding is not None:
        order = padding.to(torch.uint8).argsort(dim=-1, stable=True)
        x = x.take_along_dim(order[:, None, :, None], dim=2)
        out = short_convolution(x, taps, None if document_ids is None else document_ids.gather(-1, order))
        return out.take_along_dim(order.argsort(dim=-1)[:, None, :, None], dim=2)
    out = x * taps[:, None, :, -1]
    for lag in range(1, min(taps.shape[-1], x.shape[2])):
        shifted = x[:, :, :-lag] * taps[:, None, :, -1 - lag]
        if document_ids is not None:
            shifted = shifted * (document_ids[:, lag:] == document_ids[:, :-lag])[:, None, :, None]
        out = out + F.pad(shifted, (0, 0, lag, 0))
    return out


def is_in_transform() -> bool:
    """Whether this runs inside `torch.func.vmap` or another of its transforms."""
    return torch._C._are_functorch_transforms_active()


def is_readable(x: Tensor) -> bool:
    """Whether values can be read: not in a compiler, a transform of `torch.func`, or the capture of a CUDA graph."""
    if torch.compiler.is_compiling() or is_in_transform():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def phases_of(positions: Positions, frequencies: Float[Tensor, "*_H n"]) -> Float[Tensor, "*B H N n"]:
    """The angles i theta_t in float64: [H or 1, N, n], or [B, H or 1, N, n] if either has one row per sequence."""
    return positions.to(torch.float64)[..., None, :, None] * frequencies.unsqueeze(-2)


def reverse_cumsum(x: Float[Tensor, "*B n"]) -> Float[Tensor, "*B n"]:
    """The reversed cumulative sum: each entry plus those after it."""
    return x.flip(-1).cumsum(-1).flip(-1)


def complex_exp(phases: Float[Tensor, "*H n D"], magnitude: float = 1.0) -> Complex[Tensor, "*H n D"]:
    """Complex numbers e^(i phase)."""
    return torch.polar(torch.full_like(phases, magnitude), phases)


def normal_init(std: float, mean: float = 0.0) -> Callable[[Tensor], Tensor]:
    """An initialiser with normally distributed values."""
    return partial(nn.init.normal_, mean=mean, std=std)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, otherwise float32: bfloat16 cannot represent all integers over 256."""
    return torch.promote_types(dtype, torch.float32)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a product of ``x`` is computed: autocast's if it is on, otherwise that of ``x``."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context with autocast, which would round positions, off on the device of ``x``."""
    device = x.device.type
    is_enabled = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_enabled else nullcontext()


def linear(layer: nn.Module, x: Float[Tensor, "*B i"]) -> Float[Tensor, "*B o"]:
    """A linear layer in the precision of ``x``, also under autocast."""
    assert isinstance(layer, nn.Linear)
    with without_autocast(x):
        return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def require_integers(owner: str, positions: Tensor) -> None:
    """Raise `InputError` for positions or offsets that are not integers. Checks only the dtype, at no cost."""
    if positions.is_floating_point():
        raise invalid("positions", f"be integers for {owner}", positions.dtype)


def require_between(must: str, positions: Tensor, limit: int) -> None:
    """Raise `InputError` for values that are not from 0 to ``limit``, where they can be read."""
    if positions.numel() and is_readable(positions):
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high > limit:
            raise invalid("positions", must, high if high > limit else low)


def require_even(field: str, value: int, reason: str = "a rotation takes dimensions in pairs") -> None:
    """Raise `InputError` for an odd size."""
    check_value(field, value, int)
    if value % 2 or value < 2:
        raise invalid(field, f"be even and at least 2, as {reason}", value)


def require_train_length(length: int | None, max_len: int) -> int:
    """The training length (default: ``max_len``); raises `InputError` if no frequency has a full period in it."""
    field, length = ("max_len", max_len) if length is None else ("train_length", length)
    if length < 7:
        raise invalid(field, "be at least 7, for one frequency to remain", length)
    return length


def require_count(**values: Any) -> None:
    """Raise `InputError` unless the values are integers of at least 1."""
    for field, value in values.items():
        check_value(field, value, PositiveInt)


def require_number(field: str, value: Any, **limits: float) -> float:
    """Raise `InputError` unless the value is a finite number within its `Range`."""
    check_value(field, value, Annotated[float, Range(**limits)])
    return value


def require_tensor(field: str, x: Any, kind: TensorKind, shape: Sequence[int | str] | None = None) -> None:
    """Raise `InputError` unless ``x`` is a tensor of this kind and shape; a word in ``shape`` means any size."""
    fits = False
    if isinstance(x, Tensor):
        float_, bool_ = x.is_floating_point(), x.dtype == torch.bool
        integer = not (float_ or bool_ or x.is_complex())
        fits = {"bool": bool_, "integer": integer, "real": integer or float_, "float": float_}[kind]
    if shape is not None and fits:
        fits = len(shape) == x.ndim and all(isinstance(n, str) or n == x.shape[i] for i, n in enumerate(shape))
    if not fits:
        shape_text = "" if shape is None else f" of shape [{', '.join(map(str, shape))}]"
        got = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        article = "an" if kind == "integer" else "a"
        raise invalid(field, f"be {article} {kind} tensor{shape_text}", got=got)


def require_indices(field: str, indices: Any, count: int) -> None:
    """Raise `InputError` unless the list has distinct indices below ``count``."""
    check_value(field, indices, Sequence[int])
    fits = not isinstance(indices, Tensor) and all(isinstance(index, int) and 0 <= index < count for index in indices)
    if not fits or len(set(indices)) != len(indices):
        raise invalid(field, f"be different indices from 0 to {count - 1}", indices)
