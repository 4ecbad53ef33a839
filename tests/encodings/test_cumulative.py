"""Biases that add up along the sequence, against plain loops, flex attention and x-transformers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from tests.encodings.samples import SIZES, agree
from tests.encodings.samples import build as samples_build
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from x_transformers import x_transformers

from toeplens import encodings
from toeplens.encodings import Seen, attend
from toeplens.encodings.contextual import CumulativeBias

B, H, N, D = 2, 3, 11, 8
CASES: list[tuple[str, dict[str, Any]]] = [
    ("fox", {}),
    ("cable", {}),
    ("cable", {"weighted": False}),
    ("cable", {"kernelised": True}),
    ("cable", {"step": "softplus", "weighted": False}),
]
every_case = pytest.mark.parametrize(("name", "options"), CASES)

build = partial(samples_build, std=0.5)


def content(length: int = N, seed: int = 1) -> Tensor:
    return torch.randn(B, length, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seeing(encoding: CumulativeBias, x: Tensor, *, rows: Tensor | None = None, causal: bool = True) -> Seen:
    keys = torch.zeros(B, H, x.shape[1], D, dtype=torch.float64)
    rows = torch.arange(x.shape[1]) if rows is None else rows
    return Seen(keys[:, :, : rows.shape[-1]], keys, rows, encoding.note(x), causal=causal)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def by_loops(name: str, options: dict[str, Any], encoding: CumulativeBias, x: Tensor) -> Tensor:
    """The published sums over the tokens between key and query, one at a time."""
    bias = torch.zeros(B, H, x.shape[1], x.shape[1], dtype=torch.float64)

    def linear(layer: Any, b: int, h: int, m: int) -> float:
        return float(layer.weight[h] @ x[b, m] + layer.bias[h])

    for b in range(B):
        for h in range(H):
            for i in range(x.shape[1]):
                for j in range(x.shape[1]):
                    between = range(j + 1, i + 1) if j <= i else range(i + 1, j + 1)
                    if name == "fox":
                        gates = (1 / (1 + math.exp(-linear(encoding.gate, b, h, m))) for m in between)
                        bias[b, h, i, j] = sum(math.log(gate) for gate in gates)
                        continue
                    step = softplus if options.get("step") == "softplus" else lambda z: max(0.0, z)
                    total = sum(step(linear(encoding.stride, b, h, m)) for m in between)
                    total = math.log(total**2 + 1) if options.get("kernelised") else total
                    weighted = options.get("weighted", True)
                    bias[b, h, i, j] = -total * (softplus(linear(encoding.weight, b, h, i)) if weighted else 1)
    return bias


@every_case
def test_the_bias_is_the_sum_over_the_tokens_between(name: str, options: dict[str, Any]) -> None:
    encoding, x = build(name, **options).requires_grad_(False), content(7)
    wanted = by_loops(name, options, encoding, x)
    p = torch.arange(7)
    agree(encoding.bias(p, p, seeing(encoding, x, causal=False)), wanted, 1e-10)
    some = torch.tensor([[2, 6], [0, 3]])
    picked = encoding.bias(p[:2], p, seeing(encoding, x, rows=some))
    agree(picked, torch.stack([wanted[b, :, some[b]] for b in range(B)]), 1e-10)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "options"), [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.heavy) for case in CASES[2:])]
)
def test_flex_attention_with_its_score_function_is_attention_with_its_bias(name: str, options: dict[str, Any]) -> None:
    encoding = build(name, **options)
    generator = torch.Generator().manual_seed(2)
    x = content().requires_grad_()
    q, k, v = (torch.randn(B, H, N, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    p, notes = torch.arange(N), encoding.note(x)
    past = create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device="cpu")
    still = Seen(q, k, p, notes.detach(), scale=0.3)
    flexed = flex_attention(q, k, v, score_mod=encoding.score_mod(p, p, still), block_mask=past, scale=0.3)
    explicit = attend(
        q, k, v, encoding=encoding, q_positions=p, k_positions=p, scale=0.3, notes=still.notes, fused=False
    )
    agree(flexed, explicit, 1e-6)  # the function's sums are in float32
    function = encoding.score_mod(p, p, Seen(q, k, p, notes))
    pairs = torch.meshgrid(torch.arange(B), torch.arange(H), p, p, indexing="ij")
    zero = torch.zeros((), dtype=torch.float64)
    mixed = torch.randn(B, H, N, N, dtype=torch.float64, generator=generator)
    by_function = torch.autograd.grad((function(zero, *pairs) * mixed).sum(), x, retain_graph=True)[0]
    by_bias = torch.autograd.grad((encoding.bias(p, p, Seen(q, k, p, notes)) * mixed).sum(), x)[0]
    agree(by_function, by_bias, 1e-4)


def test_what_is_near_stays_exact_far_out() -> None:
    """A running sum of 10^7 has steps of 1 in float32; the difference of neighbours must not."""
    encoding, x = build("fox"), content()
    seen = seeing(encoding, x)
    p, far = torch.arange(N), Seen(seen.q, seen.k, seen.rows, seen.notes + 1e7)
    near = encoding.bias(p, p, seen)
    agree(encoding.bias(p, p, far), near, 1e-8)
    i, j = torch.meshgrid(p, p, indexing="ij")
    score = encoding.score_mod(p, p, far)(torch.zeros(()), torch.tensor(0), torch.tensor(0), i, j)
    agree(score, near[0, 0], 1e-5)


def test_the_forgetting_gate_is_x_transformers() -> None:
    ours = build("fox", bias_init=5.0)
    theirs = x_transformers.DataDependentAlibi(24, H, causal=True).double()
    fresh = encodings.build("fox", **SIZES, bias_init=5.0)
    assert torch.equal(fresh.gate.bias.double(), theirs.to_forget_gates[0].bias)
    theirs.to_forget_gates[0].load_state_dict(ours.gate.state_dict())
    x, p = content(), torch.arange(N)
    agree(ours.bias(p, p, seeing(ours, x)).tril(), theirs(x).tril(), 1e-12)


def test_they_start_as_published_and_each_layer_on_its_own() -> None:
    fox, cable = (encodings.build(name, **{**SIZES, "d_model": 2000}) for name in ("fox", "cable"))
    for layer in (fox.gate, cable.stride, cable.weight):
        assert not layer.bias.any()
        assert float(layer.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(fox.for_layer(1).gate.weight, fox.gate.weight)
    later = encodings.build("fox", **SIZES, bias_init=2.0).for_layer(1)
    assert bool((later.gate.bias == 2).all())
