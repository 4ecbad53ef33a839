"""Positions that content decides, against plain loops and x-transformers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from tests.encodings.samples import build as samples_build
from torch import Tensor
from x_transformers import x_transformers

from toeplens.encodings import PositionalEncoding, Seen, attention_logits

B, H, D, N = 2, 3, 8, 9
SCALE = D**-0.5

build = partial(samples_build, std=1.0, grad=False)


def draw(length: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(B, H, length, D, generator=generator, dtype=torch.float64) for _ in range(2))
    return q, k


def logits(encoding: PositionalEncoding, q: Tensor, k: Tensor, **more: Any) -> Tensor:
    places = torch.arange(k.shape[-2])
    return attention_logits(
        q,
        k,
        encoding=encoding,
        q_positions=places[: q.shape[-2]],
        k_positions=places,
        scale=SCALE,
        **more,
    )


def agree(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    same = (ours == theirs) | (ours - theirs).abs().le(tolerance)  # where both are minus infinity too
    assert bool(same.all())


# ---- CoPE -----------------------------------------------------------------------------------------------------------


def cope_by_loops(encoding: PositionalEncoding, q: Tensor, k: Tensor, *, causal: bool, hidden: set[int]) -> Tensor:
    """The gates between query and key, one at a time; ``hidden`` keys have none."""
    last = encoding.positions_max - 1
    made = torch.full((B, H, q.shape[-2], k.shape[-2]), -math.inf, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for i in range(q.shape[-2]):
                content = [float(q[b, h, i] @ k[b, h, m]) * SCALE for m in range(k.shape[-2])]
                gates = [0.0 if m in hidden else 1 / (1 + math.exp(-content[m])) for m in range(k.shape[-2])]
                for j in range(k.shape[-2]):
                    if j in hidden or (causal and j > i):
                        continue
                    place = min(sum(gates[j : i + 1]) if j <= i else sum(gates[i + 1 : j + 1]), last)
                    low = math.floor(place)
                    high = math.ceil(place)
                    vector = (1 - place + low) * encoding.weight[low] + (place - low) * encoding.weight[high]
                    term = float(q[b, h, i] @ vector)
                    made[b, h, i, j] = content[j] + (term * SCALE if encoding.scaled else term)
    return made


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("hidden", [set(), {2, 5}])
@pytest.mark.parametrize("options", [{}, {"positions_max": 3}, {"positions_max": 1}, {"scaled": True}])
def test_cope_counts_the_gates_between_query_and_key(causal: bool, hidden: set[int], options: dict[str, Any]) -> None:
    encoding = build("cope", **options)
    q, k = draw()
    mask = torch.tensor([j not in hidden for j in range(N)])[None, None, None] if hidden else None
    ours = logits(encoding, q, k, causal=causal, mask=mask)
    agree(ours, cope_by_loops(encoding, q, k, causal=causal, hidden=hidden), 1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_cope_counts_for_queries_that_are_some_of_the_keys(causal: bool) -> None:
    encoding = build("cope")
    q, k = draw()
    whole = logits(encoding, q, k, causal=causal)
    rows = torch.tensor([[8, 0], [4, 5]])
    some = torch.stack([q[b][:, rows[b]] for b in range(B)])
    wanted = torch.stack([whole[b][:, rows[b]] for b in range(B)])
    agree(logits(encoding, some, k, causal=causal, rows=rows), wanted, 1e-12)


@pytest.mark.parametrize("positions_max", [4, 16])
def test_cope_is_x_transformers(positions_max: int) -> None:
    ours = build("cope", positions_max=positions_max)
    theirs = x_transformers.CoPE(D, H, positions_max).double()
    with torch.no_grad():
        theirs.pos_emb.copy_(ours.weight)
    q, k = draw(40)
    content = (q @ k.transpose(-2, -1) * SCALE).masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf)
    agree(logits(ours, q, k), content + theirs(q, content).detach(), 1e-12)


# ---- relative projection --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_distance", [4, 1024])
def test_the_relative_projection_is_x_transformers(max_distance: int) -> None:
    ours = build("relative-projection", max_distance=max_distance, basis=5)
    theirs = x_transformers.RelativeProjPositionalBias(24, H, num_distance_basis=5, max_dist=max_distance).double()
    theirs.to_distance_weights[0].load_state_dict(ours.mix.state_dict())
    with torch.no_grad():
        theirs.distance_bank.copy_(ours.bank)
    x, p = torch.randn(B, N, 24, dtype=torch.float64), torch.arange(N)
    keys = torch.zeros(B, H, N, D, dtype=torch.float64)
    seen = Seen(keys, keys, p, ours.note(x))
    agree(ours.bias(p, p, seen), theirs(x).detach(), 1e-12)
    last = Seen(keys[:, :, -2:], keys, p[-2:], ours.note(x))
    agree(ours.bias(p[-2:], p, last), theirs(x[:, -2:], N).detach(), 1e-12)


def test_the_relative_projection_is_a_product_with_the_bank() -> None:
    encoding = build("relative-projection")
    assert encoding.bank.shape == (16, 64)  # 1024 distances, but at most max_len
    x = torch.randn(B, 5, 24, dtype=torch.float64)
    queries, keys = torch.tensor([3, 70, 100, 5, 66]), torch.tensor([0, 3, 6, 40, 2])
    zeros = torch.zeros(B, H, 5, D, dtype=torch.float64)
    bias = encoding.bias(queries, keys, Seen(zeros, zeros, torch.arange(5), encoding.note(x)))
    for b in range(B):
        for h in range(H):
            for n, i in enumerate(queries.tolist()):
                mixed = encoding.mix.weight[16 * h : 16 * h + 16] @ x[b, n] + encoding.mix.bias[16 * h : 16 * h + 16]
                for m, j in enumerate(keys.tolist()):
                    wanted = float(mixed @ encoding.bank[:, i - j]) if 0 <= i - j < 64 else 0.0
                    assert abs(float(bias[b, h, n, m]) - wanted) < 1e-10
