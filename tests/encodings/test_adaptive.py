"""Learned frequencies, learned maps, chosen steps: against plain loops, and that each starts as RoPE."""

from __future__ import annotations

import cmath
import math
from typing import Any

import pytest
import scipy.linalg
import torch
from rotary_embedding_torch import RotaryEmbedding
from tests.encodings.samples import build, draw, pair_by_pair, vectors
from torch import Tensor

from toeplens.encodings import PositionalEncoding, attention_logits

H, D, N = 3, 8, 6
PLACES = torch.tensor([-5, 0, 1, 9, 300, 12345])
PAIRINGS = pytest.mark.parametrize("pairing", ["interleaved", "half"])


def inputs(dtype: torch.dtype = torch.float64, length: int = N) -> tuple[Tensor, Tensor, Tensor]:
    return *vectors(length, dtype=dtype), draw(2, length, 24, seed=3, dtype=dtype)


def logits(encoding: PositionalEncoding, q: Tensor, k: Tensor, x: Tensor, places: Tensor = PLACES) -> Tensor:
    notes = encoding.note(x)
    every = attention_logits(
        q, k, encoding=encoding, q_positions=places, k_positions=places, scale=1.0, notes=notes, causal=False
    )
    return every.detach()


def by_hand(q: Tensor, k: Tensor, angle: Any, pairing: str) -> Tensor:
    """Re sum_t q_t conj(k_t) e^(i angle(b, h, row, column, t))."""
    return pair_by_pair(q, k, lambda *at: cmath.exp(1j * angle(*at)), pairing).real


@PAIRINGS
@pytest.mark.parametrize("per_head", [False, True])
def test_learned_frequencies_turn_by_themselves(per_head: bool, pairing: str) -> None:
    encoding = build("rope-learned", std=0.5, per_head=per_head, pairing=pairing)
    offsets, places = encoding.offset.tolist(), PLACES.tolist()

    def angle(b: int, h: int, row: int, column: int, t: int) -> float:
        return (places[row] - places[column]) * (10000.0 ** (-2 * t / D) + offsets[h if per_head else 0][t])

    q, k, x = inputs()
    assert float((logits(encoding, q, k, x) - by_hand(q, k, angle, pairing)).abs().max()) < 1e-10


def test_learned_frequencies_are_rotary_embedding_torchs_and_receive_its_gradient() -> None:
    ours, theirs = build("rope-learned", std=0.5).float(), RotaryEmbedding(D, learned_freq=True)
    with torch.no_grad():
        theirs.freqs.copy_((ours.frequencies + ours.offset)[0])
    q, k, _ = inputs(torch.float32, 64)
    places = torch.arange(64)
    turned_q, turned_k = ours.rotate(q, k, places, places)
    their_q, their_k = theirs.rotate_queries_or_keys(q), theirs.rotate_queries_or_keys(k)
    assert float((turned_q - their_q).detach().abs().max()) < 5e-5
    weights = torch.randn(64, 64).tril()
    (gradient,) = torch.autograd.grad((turned_q @ turned_k.mT * weights).sum(), ours.offset)
    (wanted,) = torch.autograd.grad((their_q @ their_k.mT * weights).sum(), theirs.freqs)
    torch.testing.assert_close(gradient[0], wanted, rtol=1e-4, atol=1e-2)


@PAIRINGS
@pytest.mark.parametrize("name", ["rope-learned", "harope", "carope"])
def test_it_starts_as_rope(name: str, pairing: str) -> None:
    q, k, x = inputs()
    places = torch.arange(N) + 3
    ours = logits(build(name, pairing=pairing), q, k, x, places)
    assert float((ours - logits(build("rope", pairing=pairing), q, k, x, places)).abs().max()) < 1e-9


@PAIRINGS
@pytest.mark.parametrize("kind", ["inverse", "shared"])
def test_haropes_logits_are_the_formulas(kind: str, pairing: str) -> None:
    encoding = build("harope", std=0.5, map=kind, pairing=pairing)
    encoding = encoding.double()
    q, k, x = inputs()
    mapped_q, mapped_k = torch.empty_like(q), torch.empty_like(k)
    for h in range(H):
        u, v = (
            torch.from_numpy(scipy.linalg.expm(0.5 * (a - a.T)))
            for a in (encoding.left[h].detach().numpy(), encoding.right[h].detach().numpy())
        )
        s = torch.tensor([math.log1p(math.exp(value)) + 1e-6 for value in encoding.sigma[h].tolist()], dtype=u.dtype)
        on_q = u @ torch.diag(s) @ v.T
        on_k = torch.linalg.inv(on_q).T if kind == "inverse" else on_q
        mapped_q[:, h], mapped_k[:, h] = q[:, h] @ on_q.T, k[:, h] @ on_k.T
    places = PLACES.tolist()

    def angle(b: int, h: int, row: int, column: int, t: int) -> float:
        return (places[row] - places[column]) * 10000.0 ** (-2 * t / D)

    ours = logits(encoding, q, k, x)
    assert float((ours - by_hand(mapped_q, mapped_k, angle, pairing)).abs().max()) < 1e-10
    plain = (q * k).sum(-1)
    same = ours.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(same, plain, rtol=0, atol=1e-10) == (kind == "inverse")


@PAIRINGS
@pytest.mark.parametrize("start", ["rope", "printed"])
def test_caropes_logits_are_the_formulas(start: str, pairing: str) -> None:
    encoding = build("carope", std=0.5, start=start, pairing=pairing).double()
    q, k, x = inputs()
    weight = encoding.weight.detach()
    constant = math.log(math.expm1(10000.0 ** (2 / D) - 1)) if start == "rope" else 0.0

    def angle(b: int, h: int, row: int, column: int, t: int) -> float:
        low, high = sorted((row, column))
        total = 0.0
        for m in range(low + 1, high + 1):
            z = sum(float(x[b, m, c]) * float(weight[h, c]) for c in range(24)) + constant
            total += (1 / (math.log1p(math.exp(z)) + 1)) ** t
        return total if row > column else -total

    ours = logits(encoding, q, k, x)
    assert float((ours - by_hand(q, k, angle, pairing)).abs().max()) < 1e-10


def test_carope_takes_no_notice_of_the_numbers_of_positions() -> None:
    encoding = build("carope", std=0.5)
    q, k, x = inputs()
    assert torch.equal(logits(encoding, q, k, x), logits(encoding, q, k, x, PLACES * 2 + 7))
