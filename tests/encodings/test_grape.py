"""GRAPE: rotations against the exponential of their generators, biases against loops, ALiBi, FoX and RoPE."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from tests.encodings.samples import SIZES, agree, draw
from tests.encodings.samples import build as samples_build
from torch import Tensor

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attention_logits

B, H, D, N, W = 2, 3, 8, 6, 24
PLACES = torch.tensor([-5, 0, 1, 9, 30, 12])
SCALE = D**-0.5

build = partial(samples_build, std=0.5, grad=False)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def added(encoding: PositionalEncoding, q: Tensor, k: Tensor, x: Tensor, places: Tensor) -> Tensor:
    """The bias: what the logits have more than the scaled products."""
    told = {"encoding": encoding, "q_positions": places, "k_positions": places, "scale": SCALE, "causal": False}
    return attention_logits(q, k, notes=encoding.note(x), **told) - q @ k.mT * SCALE


# ---- rotations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_free_planes_are_the_exponential_of_the_sum_of_their_generators(count: int, per_head: bool) -> None:
    encoding = build("grape", planes="free", count=count, per_head=per_head)
    x = draw(B, H, N, D)
    ours = encoding.rotate(x, x, PLACES, PLACES)[0]
    for h in range(H):
        row = h if per_head else 0
        generator = torch.zeros(D, D, dtype=torch.float64)
        for r in range(count):
            a, b = encoding.vectors[row, :, 2 * r], encoding.vectors[row, :, 2 * r + 1]
            theta = 10000.0 ** (-2 * r / D) * math.exp(float(encoding.log_frequency[row, r]))
            generator += theta * (torch.outer(a, b) - torch.outer(b, a))
        for n, i in enumerate(PLACES.tolist()):
            wanted = x[:, h, n] @ torch.linalg.matrix_exp(i * generator).T
            assert float((ours[:, h, n] - wanted).abs().max()) < 1e-10


def test_a_plane_that_is_a_line_does_not_turn() -> None:
    encoding = build("grape", planes="free", count=1)
    encoding.vectors[..., 1] = 3 * encoding.vectors[..., 0]
    x = draw(B, H, N, D)
    agree(encoding.rotate(x, x, PLACES, PLACES)[0], x, 1e-6)


def test_orthogonal_planes_are_canonical_ones_in_a_learned_basis() -> None:
    encoding = build("grape", planes="orthogonal", per_head=True)
    x = draw(B, H, N, D)
    ours = encoding.rotate(x, x, PLACES, PLACES)[0]
    for h in range(H):
        weight = encoding.basis[h]
        basis = torch.linalg.matrix_exp(weight - weight.T)
        for n, i in enumerate(PLACES.tolist()):
            generator = torch.zeros(D, D, dtype=torch.float64)
            for t in range(D // 2):
                theta = 10000.0 ** (-2 * t / D) * math.exp(float(encoding.log_frequency[h, t]))
                generator[2 * t + 1, 2 * t], generator[2 * t, 2 * t + 1] = theta, -theta
            wanted = x[:, h, n] @ torch.linalg.matrix_exp(i * basis @ generator @ basis.T).T
            assert float((ours[:, h, n] - wanted).abs().max()) < 1e-10


@pytest.mark.parametrize("planes", ["canonical", "orthogonal"])
def test_it_starts_as_rope(planes: str) -> None:
    q, k = draw(B, H, N, D), draw(B, H, N, D, seed=2)
    ours, rope = (
        encodings.build(name, **SIZES, **more) for name, more in (("grape", {"planes": planes}), ("rope", {}))
    )
    for a, b in zip(ours.rotate(q, k, PLACES, PLACES), rope.rotate(q, k, PLACES, PLACES), strict=True):
        agree(a, b, 1e-12)


def test_free_planes_start_orthonormal_with_ropes_angles() -> None:
    torch.manual_seed(0)
    encoding = encodings.build("grape", **SIZES, planes="free").double()
    vectors = encoding.vectors[0].detach()
    agree(vectors.T @ vectors, torch.eye(D, dtype=torch.float64), 1e-5)
    angles = encoding.kernel(torch.tensor([1])).detach()[0, :, 0].angle().sort().values
    wanted = torch.tensor([0.0, 0.001, 0.01, 0.1, 1.0], dtype=torch.float64)
    torch.testing.assert_close(angles, wanted, rtol=1e-4, atol=1e-6)


# ---- biases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", ["query-key", "query", "key", "constant"])
def test_the_rate_is_what_query_and_key_say(rate: str) -> None:
    encoding = build("grape-additive", rate=rate)
    q, k = draw(B, H, N, D), draw(B, H, N, D, seed=2)
    ours = added(encoding, q, k, draw(B, N, W), PLACES)
    slopes = [2.0**-4, 2.0**-8, 2.0**-2]
    for h in range(H):
        omega = slopes[h] * softplus(float(encoding.omega[h]))
        v = None if encoding.v is None else encoding.v[h] / encoding.v[h].norm()
        u = None if encoding.u is None else encoding.u[h] / encoding.u[h].norm()
        for row, i in enumerate(PLACES.tolist()):
            for column, j in enumerate(PLACES.tolist()):
                total = 1.0 if rate == "constant" else 0.0
                total += 0.0 if v is None else softplus(float(v @ q[1, h, row]) / math.sqrt(D))
                total += 0.0 if u is None else softplus(float(u @ k[1, h, column]) / math.sqrt(D))
                assert abs(float(ours[1, h, row, column]) + abs(i - j) * omega * total) < 1e-10


def test_a_constant_rate_starts_as_alibi() -> None:
    ours = encodings.build("grape-additive", **SIZES, rate="constant").double().requires_grad_(False)
    alibi = encodings.build("alibi", **SIZES)
    q, k, x = draw(B, H, N, D), draw(B, H, N, D, seed=2), draw(B, N, W)
    agree(added(ours, q, k, x, PLACES), added(alibi, q, k, x, PLACES), 1e-6)  # the start of omega is in float32


def test_every_token_between_takes_its_share() -> None:
    encoding = build("grape-path", width=4)
    x = draw(B, N, W)
    ours = added(encoding, draw(B, H, N, D), draw(B, H, N, D, seed=2), x, PLACES)
    probes = (x @ encoding.probe.weight.T).unflatten(-1, (H, 4)).transpose(1, 2)
    slopes = [2.0**-4, 2.0**-8, 2.0**-2]
    for h in range(H):
        for i in range(N):
            for j in range(N):
                total = 0.0
                for m in range(j + 1, i + 1):
                    p, own = probes[1, h, m], probes[1, h, i]
                    p = p / math.sqrt(float((p * p).mean()) + torch.finfo(torch.float64).eps)
                    c, s = math.cos(PLACES[m]), math.sin(PLACES[m])
                    turned = [p[0] * c - p[2] * s, p[1] * c - p[3] * s, p[0] * s + p[2] * c, p[1] * s + p[3] * c]
                    product = sum(float(own[w] * turned[w]) for w in range(4)) / 4
                    total -= slopes[h] * softplus(-product)
                assert abs(float(ours[1, h, i, j]) - total) < 1e-10


def test_edges_of_tokens_are_the_forgetting_transformer() -> None:
    ours, fox = build("grape-path", edges="token"), build("fox")
    fox.gate.load_state_dict(ours.probe.state_dict())
    q, k, x = draw(B, H, N, D), draw(B, H, N, D, seed=2), draw(B, N, W)
    agree(added(ours, q, k, x, PLACES).tril(), added(fox, q, k, x, PLACES).tril(), 1e-12)
