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
from toeplens.ground import invalid
from toeplens.ground.options import Count, Limits, must_be

Kind = Literal["bool", "integer", "real", "float"]
PRECISE = (torch.float32, torch.float64)  # dtypes in which a bias may be part of a product of queries and keys


def offsets_between(q_positions: Positions, k_positions: Positions) -> Int[Tensor, "*B Nq Nk"]:
    """Signed offsets i - j, query minus key: [Nq, Nk], or [B, Nq, Nk] if either has one row per sequence."""
    return q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)


def rotary_frequencies(rotary_dim: int, base: float) -> Float[Tensor, "n"]:
    """theta_t = base^(-2t/rotary_dim), t = 0..rotary_dim/2 - 1, in float64 (Su et al. 2021, eq. 15)."""
    if not 0 < base < math.inf:
        raise invalid("base", "be positive and finite", base)
    return base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def on_distinct(function: Callable[..., Float[Tensor, "H *D"]], *offsets: Int[Tensor, "*D"]) -> Float[Tensor, "H *D"]:
    """A function of integer offsets, evaluated once per distinct offset where finding those is cheap."""
    first = offsets[0]
    if first.device.type != "cpu" or torch.compiler.is_compiling() or first.is_floating_point() or not first.numel():
        return function(*offsets)
    lows = [int(each.min()) for each in offsets]
    every = [torch.arange(low, int(each.max()) + 1) for low, each in zip(lows, offsets, strict=True)]
    if 2 * math.prod(map(len, every)) > first.numel():
        return function(*offsets)
    table = function(*torch.meshgrid(*every, indexing="ij"))
    return table[:, *(each - low for low, each in zip(lows, offsets, strict=True))]


def short_convolution(
    x: Float[Tensor, "B H N c"],
    taps: Float[Tensor, "_H _c size"],
    texts: Int[Tensor, "B N"] | None,
    padding: Bool[Tensor, "B N"] | None = None,
) -> Float[Tensor, "B H N c"]:
    """A causal depthwise convolution over tokens; the last tap is the token itself.

    Packed documents are convolved separately. Padding is skipped, and convolved at the end.
    """
    if padding is not None:
        order = padding.to(torch.uint8).argsort(dim=-1, stable=True)
        x = x.take_along_dim(order[:, None, :, None], dim=2)
        mixed = short_convolution(x, taps, None if texts is None else texts.gather(-1, order))
        return mixed.take_along_dim(order.argsort(dim=-1)[:, None, :, None], dim=2)
    mixed = x * taps[:, None, :, -1]
    for back in range(1, min(taps.shape[-1], x.shape[2])):
        earlier = x[:, :, :-back] * taps[:, None, :, -1 - back]
        if texts is not None:
            earlier = earlier * (texts[:, back:] == texts[:, :-back])[:, None, :, None]
        mixed = mixed + F.pad(earlier, (0, 0, back, 0))
    return mixed


def is_mapped() -> bool:
    """Whether this runs inside `torch.func.vmap` or another of its transforms."""
    return torch._C._are_functorch_transforms_active()


def is_readable(x: Tensor) -> bool:
    """Whether values can be read: not in a compiler, a transform of `torch.func`, or the capture of a CUDA graph."""
    if torch.compiler.is_compiling() or is_mapped():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def phases_of(positions: Positions, frequencies: Float[Tensor, "*_H n"]) -> Float[Tensor, "*B H N n"]:
    """The angles i theta_t in float64: [H or 1, N, n], or [B, H or 1, N, n] if either has one row per sequence."""
    return positions.to(torch.float64)[..., None, :, None] * frequencies.unsqueeze(-2)


def sum_from(x: Float[Tensor, "*B n"]) -> Float[Tensor, "*B n"]:
    """The reversed cumulative sum: each entry plus those after it."""
    return x.flip(-1).cumsum(-1).flip(-1)


def turns(phases: Float[Tensor, "*H n D"], magnitude: float = 1.0) -> Complex[Tensor, "*H n D"]:
    """Complex numbers e^(i phase)."""
    return torch.polar(torch.full_like(phases, magnitude), phases)


def normal(std: float, mean: float = 0.0) -> Callable[[Tensor], Tensor]:
    """An initialiser with normally distributed values."""
    return partial(nn.init.normal_, mean=mean, std=std)


def widened(dtype: torch.dtype) -> torch.dtype:
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
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def linear(layer: nn.Module, x: Float[Tensor, "*B i"]) -> Float[Tensor, "*B o"]:
    """A linear layer in the precision of ``x``, also under autocast."""
    assert isinstance(layer, nn.Linear)
    with without_autocast(x):
        return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def require_whole(who: str, positions: Tensor) -> None:
    """Raise `InputError` for positions or offsets that are not integers. Checks only the dtype, at no cost."""
    if positions.is_floating_point():
        raise invalid("positions", f"be integers for {who}", positions.dtype)


def require_between(must: str, positions: Tensor, most: int) -> None:
    """Raise `InputError` for values that are not from 0 to ``most``, where they can be read."""
    if positions.numel() and is_readable(positions):
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high > most:
            raise invalid("positions", must, high if high > most else low)


def require_even(field: str, value: int, why: str = "a rotation takes dimensions in pairs") -> None:
    """Raise `InputError` for an odd size."""
    must_be(field, value, int)
    if value % 2 or value < 2:
        raise invalid(field, f"be even and at least 2, as {why}", value)


def require_train_length(length: int | None, max_len: int) -> int:
    """The training length (default: ``max_len``); raises `InputError` if no frequency has a full period in it."""
    field, length = ("max_len", max_len) if length is None else ("train_length", length)
    if length < 7:
        raise invalid(field, "be at least 7, for one frequency to remain", length)
    return length


def require_count(**values: Any) -> None:
    """Raise `InputError` unless the values are integers of at least 1."""
    for field, value in values.items():
        must_be(field, value, Count)


def require_number(field: str, value: Any, **limits: float) -> float:
    """Raise `InputError` unless the value is a finite number within its `Limits`."""
    must_be(field, value, Annotated[float, Limits(**limits)])
    return value


def require_tensor(field: str, x: Any, kind: Kind, shape: Sequence[int | str] | None = None) -> None:
    """Raise `InputError` unless ``x`` is a tensor of this kind and shape; a word in ``shape`` means any size."""
    fits = False
    if isinstance(x, Tensor):
        float_, bool_ = x.is_floating_point(), x.dtype == torch.bool
        integer = not (float_ or bool_ or x.is_complex())
        fits = {"bool": bool_, "integer": integer, "real": integer or float_, "float": float_}[kind]
    if shape is not None and fits:
        fits = len(shape) == x.ndim and all(isinstance(n, str) or n == x.shape[i] for i, n in enumerate(shape))
    if not fits:
        of = "" if shape is None else f" of shape [{', '.join(map(str, shape))}]"
        got = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        article = "an" if kind == "integer" else "a"
        raise invalid(field, f"be {article} {kind} tensor{of}", got=got)


def require_indices(field: str, given: Any, count: int) -> None:
    """Raise `InputError` unless the list has distinct indices below ``count``."""
    must_be(field, given, Sequence[int])
    fits = not isinstance(given, Tensor) and all(isinstance(index, int) and 0 <= index < count for index in given)
    if not fits or len(set(given)) != len(given):
        raise invalid(field, f"be different indices from 0 to {count - 1}", given)
