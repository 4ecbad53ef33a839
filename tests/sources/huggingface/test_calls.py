"""What rounding explains of weights and outputs: right models pass at any size of logits, wrong ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from toeplens.ground import InputError
from toeplens.sources.huggingface.attention import Attention
from toeplens.sources.huggingface.calls import Proof, prove

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 96, 64
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
SIZES = (1.0, 100.0, 1e4)
FLOAT32, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


def drawn(size: float, dtype: torch.dtype, *, offset: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose largest logits are about ``size``.

    Queries have norms of all sizes, as in trained layers. With ``offset`` the keys have a large bias in common, as
    those of Qwen2, so that all logits of a query are large, and near each other.
    """
    draw = torch.Generator().manual_seed(7)
    q, k, v = torch.randn(3, BATCH, HEADS, TOKENS, WIDTH, generator=draw, dtype=torch.float64)
    if offset:
        direction = torch.nn.functional.normalize(torch.randn(WIDTH, generator=draw, dtype=torch.float64), dim=0)
        k, q = k + size * direction, q + WIDTH**0.5 * direction
    else:
        q = q * size ** torch.rand(BATCH, HEADS, TOKENS, 1, generator=draw, dtype=torch.float64) / 3
    return q.to(dtype), k.to(dtype), v.to(dtype)


def model(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float = WIDTH**-0.5,
    cap: Any = None,
    sink: Any = None,
    mask: Any = CAUSAL,
) -> tuple[Tensor, Tensor]:
    """Weights [B, H, N, N] and outputs [B, N, H, d], as transformers' models make them in the dtype of the queries."""
    logits = (q @ k.transpose(-1, -2)) * scale
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    logits = logits.masked_fill(~mask, torch.finfo(q.dtype).min)
    if sink is not None:
        logits = torch.cat((logits, sink.view(1, -1, 1, 1).expand(BATCH, -1, TOKENS, 1)), -1)
    weights = logits.softmax(-1, dtype=torch.float32).to(q.dtype)[..., :TOKENS]
    return weights, (weights @ v).transpose(1, 2)


def proved(
    q: Tensor, k: Tensor, v: Tensor, made: tuple[Tensor, Tensor], *, weights: bool = True, **parts: Any
) -> Proof:
    found = Attention(q=q, k=k, v=v, scale=WIDTH**-0.5, causal=True, **parts)
    return prove("x", found, torch.arange(TOKENS), made[0] if weights else None, made[1])


@pytest.mark.parametrize("weights", [True, False], ids=["weights", "outputs"])
@pytest.mark.parametrize("offset", [False, True], ids=["plain", "offset"])
@pytest.mark.parametrize("size", SIZES)
def test_in_float32_a_right_model_passes_and_wrong_ones_are_refused(size: float, offset: bool, weights: bool) -> None:
    q, k, v = drawn(size, FLOAT32, offset=offset)
    found = proved(q, k, v, model(q, k, v), weights=weights)
    assert found.used < 0.5, "rounding is well within what is allowed"
    assert found.logit > size / 4
    assert found.undecided == 0
    cap, sink = max(2.0, size / 3), torch.linspace(-1, 1, HEADS) + (size if offset else 0)
    proved(q, k, v, model(q, k, v, cap=cap), weights=weights, softcap=cap)
    proved(q, k, v, model(q, k, v, sink=sink), weights=weights, sinks=sink)
    fewer, more = CAUSAL.clone(), CAUSAL.clone()
    fewer[50, 50], more[50, 51] = False, True
    wrong = {
        "scale": model(q, k, v, scale=WIDTH**-0.5 * 1.001),
        "cap": model(q, k, v, cap=cap),
        "sink": model(q, k, v, sink=sink),
        "fewer keys": model(q, k, v, mask=fewer),
        "more keys": model(q, k, v, mask=more),
    }
    for what, made in wrong.items():
        with pytest.raises(InputError, match="the attention of x was not understood"):
            print(what, proved(q, k, v, made, weights=weights))


@pytest.mark.parametrize(("dtype", "size"), [(HALF, 1.0), (HALF, 100.0), (BRAIN, 1.0), (BRAIN, 30.0)], ids=str)
def test_in_16_bits_a_right_model_passes_and_wrong_parts_are_refused(dtype: torch.dtype, size: float) -> None:
    q, k, v = drawn(size, dtype)
    assert proved(q, k, v, model(q, k, v)).used < 0.8
    fewer, more = CAUSAL.clone(), CAUSAL.clone()
    fewer[50, 50], more[50, 51] = False, True
    sink = torch.ones(HEADS, dtype=dtype) * 4
    wrong = {
        "cap": model(q, k, v, cap=size / 4),
        "sink": model(q, k, v, sink=sink),
        "fewer keys": model(q, k, v, mask=fewer),
        "more keys": model(q, k, v, mask=more),
    }
    for what, made in wrong.items():
        with pytest.raises(InputError, match=r"was not understood.*--dtype float32"):
            print(what, proved(q, k, v, made))


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_a_dtype_that_is_too_coarse_says_so(dtype: torch.dtype) -> None:
    """Logits of ten thousand near each other: rounding alone makes any weights of them."""
    q, k, v = drawn(1e4 if dtype == BRAIN else 3e3, dtype, offset=True)
    with pytest.raises(InputError, match=rf"{str(dtype)[6:]} is too coarse for the attention of x.*--dtype float32"):
        proved(q, k, v, model(q, k, v))
