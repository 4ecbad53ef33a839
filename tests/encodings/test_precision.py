"""Attention in 16 bits, under autocast or not: an encoding adds no more rounding than plain attention has."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.encodings.samples import randomised
from torch import Tensor

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attend, cpu_attention, fixed_bias
from toeplens.ground import InputError

SIZES = {"d_model": 64, "num_heads": 4, "head_dim": 16, "max_len": 512}
N = 400  # positions over 256 are not whole in bfloat16
NAMES = [
    *("rope", "t5", "alibi", "sandwich", "fire", "dynamic-bias", "fox", "cable", "path", "path-fox"),
    *("grape-path", "carope", "repo", "shaw", "urpe", "liere", "rope+fox", "alibi+path"),
]
Run = Callable[[PositionalEncoding, list[Tensor]], Tensor]


def build(name: str) -> PositionalEncoding:
    torch.manual_seed(0)
    parts = name.split("+")
    return randomised(encodings.build(parts if len(parts) > 1 else name, **SIZES), std=0.1)


def as_given(encoding: PositionalEncoding, inputs: list[Tensor]) -> Tensor:
    q, k, v, x = inputs
    places = torch.arange(N)
    told = {"encoding": encoding, "q_positions": places, "k_positions": places, "scale": 0.25}
    return attend(q, k, v, notes=encoding.note(x), **told)


def under_autocast(encoding: PositionalEncoding, inputs: list[Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return as_given(encoding, inputs)


def in_bfloat16(encoding: PositionalEncoding, inputs: list[Tensor]) -> Tensor:
    return as_given(copy.deepcopy(encoding).bfloat16(), [x.bfloat16() for x in inputs])


def error(name: str, run: Run) -> Tensor:
    """Relative errors of the output, and of the gradients to queries, keys and values."""
    encoding = build(name)
    if run is in_bfloat16:  # whose rounded parameters are not what is measured
        with torch.no_grad():
            for parameter in encoding.parameters():
                parameter.copy_(parameter.bfloat16())
    torch.manual_seed(1)
    inputs = [torch.randn(1, 4, N, 16) for _ in range(3)] + [torch.randn(1, N, 64)]
    weights = torch.randn(1, 4, N, 16).double()
    found = []
    for way, dtype in ((run, torch.float32), (as_given, torch.float64)):
        module = copy.deepcopy(encoding).to(dtype)
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = way(module, leaves)
        (out.double() * weights).sum().backward()
        grads = [x.grad for x in leaves[:3] if x.grad is not None]
        found.append([x.detach().double() for x in (out, *grads)])
    return torch.stack([(a - b).norm() / b.norm() for a, b in zip(*found, strict=True)])


@pytest.mark.parametrize(
    ("name", "wide"), [*((name, True) for name in NAMES), *((name, False) for name in ("rope", "alibi", "fox"))]
)
def test_under_autocast_queries_of_float32_are_rounded_once(
    name: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On either path of a CPU. Products of q and k carry errors of eps |q| |k|; a bias b below a row's largest carries
    one of eps |b| at a weight of about e^b: at most eps / e. Some encodings form another product or two. Positions
    folded into q and k would be off by one part in 2^8: 100 times as much."""
    monkeypatch.setattr(cpu_attention, "_WIDE", wide)
    plain = error("nope", under_autocast)
    scale = 4 if name == "t5" else 1  # of the logits, which it publishes
    assert (error(name, under_autocast) <= 3 * scale * plain).all()


@pytest.mark.parametrize("name", ["alibi", "sandwich", "urpe", "fox", "dynamic-bias"])
def test_biases_of_bfloat16_are_rounded_relative_to_their_largest(name: str) -> None:
    """A number added to a whole row, which a softmax does not see, costs no precision: Sandwich has 32 at 0."""
    plain = error("nope", in_bfloat16)
    assert (error(name, in_bfloat16) <= 2 * plain).all()


def test_a_fixed_bias_of_bfloat16_is_not_rounded_before_it_is_used() -> None:
    encoding, places = build("sandwich"), torch.arange(N)
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 4, N, 16).bfloat16() for _ in range(3))
    told = {"encoding": encoding, "q_positions": places, "k_positions": places, "scale": 0.25}
    added = fixed_bias(encoding, places, dtype=q.dtype, mask=None, causal=True)
    assert attend(q, k, v, added=added, **told).equal(attend(q, k, v, **told))


def test_xpos_checks_the_range_of_the_dtype_that_products_are_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16, as autocast has on a GPU, its factors fit shorter texts than in float32."""
    encoding = encodings.build("xpos", **SIZES, scale_base=16.0)
    q = k = torch.ones(1, 4, 100, 16)
    places = torch.arange(100)
    encoding.rotate(q, k, places, places)
    monkeypatch.setattr("toeplens.encodings.kit.product_dtype", lambda x: torch.float16)
    with pytest.raises(InputError, match=r"for torch.float16"):
        encoding.rotate(q, k, places, places)
