"""PoPE and ComplexFormer: against plain loops, and PoPE against x-transformers."""

from __future__ import annotations

import cmath
import itertools
import math

import pytest
import torch
from tests.encodings.samples import build, pairs_of, turned_logits, vectors
from torch import Tensor
from x_transformers import x_transformers

from toeplens.encodings import PositionalEncoding

H, D, N = 3, 8, 6
PLACES = torch.tensor([-5, 0, 1, 9, 300, 12345])


def logits(encoding: PositionalEncoding, q: Tensor, k: Tensor, places: Tensor = PLACES) -> Tensor:
    return turned_logits(encoding, q, k, places)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_popes_logits_are_the_formulas() -> None:
    encoding = build("pope")
    with torch.no_grad():
        encoding.delta.normal_(std=5.0, generator=torch.Generator().manual_seed(1))
    q, k = vectors()
    ours = logits(encoding, q, k).detach()
    deltas = encoding.delta.tolist()
    assert ours.shape == (2, H, N, N)
    for b in range(2):
        for h in range(H):
            for row, i in enumerate(PLACES.tolist()):
                for column, j in enumerate(PLACES.tolist()):
                    total = 0.0
                    for c in range(D):
                        delta = min(0.0, max(-2 * math.pi, deltas[h][c]))
                        size = softplus(float(q[b, h, row, c])) * softplus(float(k[b, h, column, c]))
                        total += size * math.cos((j - i) * 10000.0 ** (-c / D) + delta)
                    assert abs(float(ours[b, h, row, column]) - total) < 1e-10


@pytest.mark.parametrize("uniform", [False, True])
def test_pope_is_x_transformers(uniform: bool) -> None:
    places = torch.arange(128)
    q, k = vectors(128, dtype=torch.float32)
    ours, theirs = build("pope", init="uniform" if uniform else "zero"), x_transformers.PolarEmbedding(D, H)
    with torch.no_grad():
        theirs.learned_bias.copy_(ours.delta.unsqueeze(1))
    freqs, bias = theirs(places)
    their_q = x_transformers.apply_polar_pos_emb(q, freqs)
    their_k = x_transformers.apply_polar_pos_emb(k, freqs + bias)
    for a, b in zip(ours.rotate(q, k, places, places), (their_q, their_k), strict=True):
        assert a.shape == b.shape == (2, H, 128, 2 * D)
        assert float((a - b).detach().abs().max()) < 5e-5  # its phases are formed in float32
    assert float((logits(ours, q, k, places) - their_q @ their_k.mT).detach().abs().max()) < 2e-4


def test_popes_delta_starts_at_zero_or_uniform_and_each_layer_has_its_own() -> None:
    torch.manual_seed(0)
    assert not build("pope").delta.any()
    drawn = build("pope", init="uniform")
    values = drawn.delta.detach()
    assert float(values.max()) <= 0
    assert float(values.min()) >= -2 * math.pi
    assert float(values.std()) > 1
    assert not torch.equal(drawn.for_layer(1).delta, drawn.delta)
    shared = build("pope", shared=True)
    assert shared.for_layer(1) is shared


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_complexformers_logits_are_the_formulas(pairing: str) -> None:
    encoding = build("complexformer", pairing=pairing)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    q, k = vectors()
    ours = logits(encoding, q, k)
    factors, offsets = encoding.factor.tolist(), encoding.offset.tolist()
    for b, h, row, column in itertools.product(range(2), range(H), range(N), range(N)):
        pairs, total = zip(pairs_of(q[b, h, row], pairing), pairs_of(k[b, h, column], pairing), strict=True), 0.0
        for t, (x, y) in enumerate(pairs):
            angle = factors[h][t] * (cmath.phase(x) - cmath.phase(y)) + offsets[h][t]
            offset = int(PLACES[row] - PLACES[column])
            total += abs(x) * abs(y) * math.cos(angle + offset * 10000.0 ** (-2 * t / D))
        assert abs(float(ours[b, h, row, column]) - total) < 1e-10


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_complexformer_starts_as_rope(pairing: str) -> None:
    q, k = vectors()
    ours = logits(build("complexformer", pairing=pairing), q, k).detach()
    assert float((ours - logits(build("rope", pairing=pairing), q, k)).abs().max()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-25, 1e-18])
def test_complexformers_gradients_are_finite_where_a_query_is_nothing(size: float, dtype: torch.dtype) -> None:
    encoding = build("complexformer")
    q, k = vectors(dtype=dtype)
    q = (q * size).requires_grad_()
    turned_q, turned_k = encoding.rotate(q, k, PLACES, PLACES)
    out = turned_q @ turned_k.mT
    assert bool(out.isfinite().all())
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum(), (q, *encoding.parameters())))
