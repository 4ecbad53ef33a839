"""Rotations with learned generators, against matrix exponentials written out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import circulant, expm
from tests.encodings.samples import SIZES, assert_close, random_tensor, randomised, softplus
from tests.encodings.samples import build as samples_build
from torch import Tensor

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attention_logits


@pytest.mark.parametrize(
    ("name", "options"), [("liere", {}), ("comrope", {}), ("string", {}), ("grape", {"planes": "free"})]
)
def test_queries_and_keys_share_their_matrices(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed once at the same positions, also for positions per sequence; grouped keys have their own heads."""
    encoding, calls = build(name, **options), []
    exponential = torch.matrix_exp
    monkeypatch.setattr(torch, "matrix_exp", lambda x: calls.append(1) or exponential(x))
    q, k = random_tensor(2, H, N, D), random_tensor(2, H, N, D, seed=2)
    for tokens in (torch.arange(N), torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 20, 21]])):
        places = encoding.to_positions(tokens)
        calls.clear()
        both = encoding.rotate(q, k, places, places)
        assert len(calls) == (name != "string")
        for actual, expected in zip(both, encoding.rotate(q, k, places, places.clone()), strict=True):
            assert_close(actual, expected, 1e-14)
    if name == "grape":  # all heads alike
        assert_close(encoding.rotate(q, k[:, :1], places, places)[1], both[1][:, :1], 1e-14)


# ---- LieRE, ComRoPE, STRING -----------------------------------------------------------------------------------------

H, D, N = 3, 8, 5
PLANE = torch.tensor([[0, 0], [1, 0], [2, 5], [7, 3], [-4, 60]])
LINE = torch.tensor([0, 1, 9, 300, -7])

build = partial(samples_build, std=0.5, grad=False)


def rotate(encoding: PositionalEncoding, x: Tensor, places: Tensor) -> Tensor:
    return encoding.rotate(x, x, places, places)[0].detach()


def apply(matrix: Callable[[int, int], np.ndarray], x: Tensor) -> Tensor:
    """Each head's and token's matrix times its vector."""
    rows = [[x[:, h, n].numpy() @ matrix(h, n).T for n in range(N)] for h in range(H)]
    return torch.from_numpy(np.array(rows)).permute(2, 0, 1, 3)


def unit_positions(places: Tensor, extents: list[float]) -> np.ndarray:
    return places.reshape(N, -1).double().numpy() / np.array(extents)


@pytest.mark.parametrize("block", [None, 2, 4])
@pytest.mark.parametrize(("axes", "places"), [(1, LINE), (2, PLANE)])
def test_liere_rotates_by_the_exponential_of_its_generators(axes: int, places: Tensor, block: int | None) -> None:
    encoding = build("liere", axes=axes, block=block)
    raw, size = encoding.weight.numpy(), block or D
    coordinates = unit_positions(places, [63.0] * axes)

    def matrix(h: int, n: int) -> np.ndarray:
        generator = np.zeros((D, D))
        for a, m, i in itertools.product(range(axes), range(D // size), range(size)):
            for j in range(i + 1, size):
                generator[m * size + i, m * size + j] += coordinates[n, a] * raw[h, a, m, i, j]
                generator[m * size + j, m * size + i] -= coordinates[n, a] * raw[h, a, m, i, j]
        return expm(generator)

    x = random_tensor(2, H, N, D)
    assert_close(rotate(encoding, x, places), apply(matrix, x), 1e-11)


@pytest.mark.parametrize("variant", ["ld", "ap"])
@pytest.mark.parametrize("block", [2, 4])
def test_comrope_rotates_by_exponentials_of_commuting_matrices(variant: str, block: int) -> None:
    encoding = build("comrope", variant=variant, block=block)
    weight = encoding.weight.numpy()
    at = unit_positions(PLANE, [64.0, 64.0])

    def matrix(h: int, n: int) -> np.ndarray:
        generator = np.zeros((D, D))
        for m, a in itertools.product(range(D // block), range(2)):
            part = slice(m * block, (m + 1) * block)
            own = float(m % 2 == a) if variant == "ap" else float(encoding.factors[a, m])
            generator[part, part] += at[n, a] * own * (weight[h, m] - weight[h, m].T)
        return expm(generator)

    x = random_tensor(2, H, N, D)
    assert_close(rotate(encoding, x, PLANE), apply(matrix, x), 1e-11)


@pytest.mark.parametrize(("axes", "places"), [(1, LINE), (2, PLANE)])
def test_cayley_string_is_rope_after_an_orthogonal_map(axes: int, places: Tensor) -> None:
    encoding = build("string", axes=axes)
    at, omega, weight = unit_positions(places, [1.0] * axes), encoding.weight.numpy(), encoding.skew.numpy()

    def matrix(h: int, n: int) -> np.ndarray:
        skew = np.triu(weight[h], 1) - np.triu(weight[h], 1).T
        basis = (np.eye(D) - skew) @ np.linalg.inv(np.eye(D) + skew)
        assert np.abs(basis @ basis.T - np.eye(D)).max() < 1e-12
        rope = np.zeros((D, D))
        for t, angle in enumerate(at[n] @ omega[h]):
            c, s = math.cos(angle), math.sin(angle)
            rope[2 * t : 2 * t + 2, 2 * t : 2 * t + 2] = [[c, -s], [s, c]]
        return rope @ basis

    x = random_tensor(2, H, N, D)
    assert_close(rotate(encoding, x, places), apply(matrix, x), 1e-11)


@pytest.mark.parametrize("head_dim", [7, 8])
@pytest.mark.parametrize(("axes", "places"), [(1, LINE), (2, PLANE)])
def test_circulant_string_is_the_exponential_of_circulant_matrices(axes: int, places: Tensor, head_dim: int) -> None:
    sizes = SIZES | {"head_dim": head_dim}
    encoding = randomised(
        encodings.build("string", **sizes, form="circulant", axes=axes).double().requires_grad_(False), std=0.5
    )
    at, column = unit_positions(places, [1.0] * axes), encoding.weight.numpy()

    def matrix(h: int, n: int) -> np.ndarray:
        matrices = (circulant(column[h, a]) for a in range(axes))
        return expm(sum(at[n, a] * (each - each.T) for a, each in enumerate(matrices)))

    x = random_tensor(2, H, N, head_dim)
    assert_close(rotate(encoding, x, places), apply(matrix, x), 1e-9)


@pytest.mark.parametrize("form", ["cayley", "circulant"])
def test_string_starts_from_ropes_frequencies_along_some_direction(form: str) -> None:
    torch.manual_seed(0)
    for axes in (1, 2, 3):
        encoding = encodings.build("string", **SIZES, form=form, axes=axes).double()
        lengths = encoding.spectrum().detach().norm(dim=1)
        expected = 10000.0 ** (-2 * torch.arange(lengths.shape[-1], dtype=torch.float64) / D)
        torch.testing.assert_close(lengths, expected.expand_as(lengths), rtol=1e-5, atol=1e-7)


COMMUTING: list[tuple[str, dict[str, Any]]] = [
    ("comrope", {"variant": "ld", "block": 4}),
    ("comrope", {"variant": "ap", "block": 2}),
    ("string", {"form": "cayley"}),
    ("string", {"form": "circulant"}),
    ("liere", {"block": 2}),
]


@pytest.mark.parametrize(("name", "options"), [*COMMUTING, ("liere", {"axes": 1}), ("comrope", {"axes": 1})])
def test_the_kernel_has_the_angles_of_the_rotation(name: str, options: dict[str, Any]) -> None:
    """The trace of a rotation is the sum of 2 cos of its planes' angles, and 1 for what stays."""
    encoding = build(name, **options)
    places = LINE if encoding.axes == 1 else PLANE
    kernel = encoding.kernel(places)
    unit_vectors = torch.eye(D, dtype=torch.float64).expand(N, H, D, D).transpose(0, 2)  # [D, H, N, D]
    moved, still = encoding.rotate(unit_vectors, unit_vectors, places, torch.zeros_like(places))
    traces = (moved * still).sum(-1).sum(0)
    assert_close(traces, 2 * kernel.real.sum(1), 1e-9)  # the circulant form's 1 stands for two components


# ---- GRAPE ----------------------------------------------------------------------------------------------------------

B, N_GRAPE, W = 2, 6, 24
PLACES = torch.tensor([-5, 0, 1, 9, 30, 12])
SCALE = D**-0.5


def bias_of(encoding: PositionalEncoding, q: Tensor, k: Tensor, x: Tensor, places: Tensor) -> Tensor:
    """The bias: what the logits have more than the scaled products."""
    told = {"encoding": encoding, "q_positions": places, "k_positions": places, "scale": SCALE, "causal": False}
    return attention_logits(q, k, key_features=encoding.key_features(x), **told) - q @ k.mT * SCALE


# ---- rotations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_free_planes_are_the_exponential_of_the_sum_of_their_generators(count: int, per_head: bool) -> None:
    encoding = build("grape", planes="free", count=count, per_head=per_head)
    x = random_tensor(B, H, N_GRAPE, D)
    ours = encoding.rotate(x, x, PLACES, PLACES)[0]
    for h in range(H):
        row = h if per_head else 0
        generator = torch.zeros(D, D, dtype=torch.float64)
        for r in range(count):
            a, b = encoding.vectors[row, :, 2 * r], encoding.vectors[row, :, 2 * r + 1]
            theta = 10000.0 ** (-2 * r / D) * math.exp(float(encoding.log_frequency[row, r]))
            generator += theta * (torch.outer(a, b) - torch.outer(b, a))
        for n, i in enumerate(PLACES.tolist()):
            expected = x[:, h, n] @ torch.linalg.matrix_exp(i * generator).T
            assert float((ours[:, h, n] - expected).abs().max()) < 1e-10


def test_a_degenerate_plane_does_not_rotate() -> None:
    encoding = build("grape", planes="free", count=1)
    encoding.vectors[..., 1] = 3 * encoding.vectors[..., 0]
    x = random_tensor(B, H, N_GRAPE, D)
    assert_close(encoding.rotate(x, x, PLACES, PLACES)[0], x, 1e-6)


def test_orthogonal_planes_are_canonical_planes_in_a_learned_basis() -> None:
    encoding = build("grape", planes="orthogonal", per_head=True)
    x = random_tensor(B, H, N_GRAPE, D)
    ours = encoding.rotate(x, x, PLACES, PLACES)[0]
    for h in range(H):
        weight = encoding.basis[h]
        basis = torch.linalg.matrix_exp(weight - weight.T)
        for n, i in enumerate(PLACES.tolist()):
            generator = torch.zeros(D, D, dtype=torch.float64)
            for t in range(D // 2):
                theta = 10000.0 ** (-2 * t / D) * math.exp(float(encoding.log_frequency[h, t]))
                generator[2 * t + 1, 2 * t], generator[2 * t, 2 * t + 1] = theta, -theta
            expected = x[:, h, n] @ torch.linalg.matrix_exp(i * basis @ generator @ basis.T).T
            assert float((ours[:, h, n] - expected).abs().max()) < 1e-10


@pytest.mark.parametrize("planes", ["canonical", "orthogonal"])
def test_grape_starts_as_rope(planes: str) -> None:
    q, k = random_tensor(B, H, N_GRAPE, D), random_tensor(B, H, N_GRAPE, D, seed=2)
    ours, rope = (
        encodings.build(name, **SIZES, **more) for name, more in (("grape", {"planes": planes}), ("rope", {}))
    )
    for a, b in zip(ours.rotate(q, k, PLACES, PLACES), rope.rotate(q, k, PLACES, PLACES), strict=True):
        assert_close(a, b, 1e-12)


def test_free_planes_start_orthonormal_with_ropes_angles() -> None:
    torch.manual_seed(0)
    encoding = encodings.build("grape", **SIZES, planes="free").double()
    vectors = encoding.vectors[0].detach()
    assert_close(vectors.T @ vectors, torch.eye(D, dtype=torch.float64), 1e-5)
    angles = encoding.kernel(torch.tensor([1])).detach()[0, :, 0].angle().sort().values
    expected = torch.tensor([0.0, 0.001, 0.01, 0.1, 1.0], dtype=torch.float64)
    torch.testing.assert_close(angles, expected, rtol=1e-4, atol=1e-6)


# ---- biases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", ["query-key", "query", "key", "constant"])
def test_the_rate_depends_on_query_and_key(rate: str) -> None:
    encoding = build("grape-additive", rate=rate)
    q, k = random_tensor(B, H, N_GRAPE, D), random_tensor(B, H, N_GRAPE, D, seed=2)
    ours = bias_of(encoding, q, k, random_tensor(B, N_GRAPE, W), PLACES)
    slopes = [2.0**-4, 2.0**-8, 2.0**-2]
    for h in range(H):
        omega = slopes[h] * softplus(float(encoding.omega[h]))
        v = None if encoding.v is None else encoding.v[h] / encoding.v[h].norm()
        u = None if encoding.u is None else encoding.u[h] / encoding.u[h].norm()
        for (row, i), (column, j) in itertools.product(enumerate(PLACES.tolist()), enumerate(PLACES.tolist())):
            total = 1.0 if rate == "constant" else 0.0
            total += 0.0 if v is None else softplus(float(v @ q[1, h, row]) / math.sqrt(D))
            total += 0.0 if u is None else softplus(float(u @ k[1, h, column]) / math.sqrt(D))
            assert abs(float(ours[1, h, row, column]) + abs(i - j) * omega * total) < 1e-10


def test_a_constant_rate_starts_as_alibi() -> None:
    ours = encodings.build("grape-additive", **SIZES, rate="constant").double().requires_grad_(False)
    alibi = encodings.build("alibi", **SIZES)
    q, k, x = random_tensor(B, H, N_GRAPE, D), random_tensor(B, H, N_GRAPE, D, seed=2), random_tensor(B, N_GRAPE, W)
    assert_close(
        bias_of(ours, q, k, x, PLACES), bias_of(alibi, q, k, x, PLACES), 1e-6
    )  # the start of omega is in float32


def test_every_token_between_contributes() -> None:
    encoding = build("grape-path", width=4)
    x = random_tensor(B, N_GRAPE, W)
    ours = bias_of(encoding, random_tensor(B, H, N_GRAPE, D), random_tensor(B, H, N_GRAPE, D, seed=2), x, PLACES)
    probes = (x @ encoding.probe.weight.T).unflatten(-1, (H, 4)).transpose(1, 2)
    slopes = [2.0**-4, 2.0**-8, 2.0**-2]
    for h, i, j in itertools.product(range(H), range(N_GRAPE), range(N_GRAPE)):
        total = 0.0
        for m in range(j + 1, i + 1):
            p, own = probes[1, h, m], probes[1, h, i]
            p = p / math.sqrt(float((p * p).mean()) + torch.finfo(torch.float64).eps)
            c, s = math.cos(PLACES[m]), math.sin(PLACES[m])
            turned = [p[0] * c - p[2] * s, p[1] * c - p[3] * s, p[0] * s + p[2] * c, p[1] * s + p[3] * c]
            product = sum(float(own[w] * turned[w]) for w in range(4)) / 4
            total -= slopes[h] * softplus(-product)
        assert abs(float(ours[1, h, i, j]) - total) < 1e-10


def test_path_edges_match_the_forgetting_transformer() -> None:
    ours, fox = build("grape-path", edges="token"), build("fox")
    fox.gate.load_state_dict(ours.probe.state_dict())
    q, k, x = random_tensor(B, H, N_GRAPE, D), random_tensor(B, H, N_GRAPE, D, seed=2), random_tensor(B, N_GRAPE, W)
    assert_close(bias_of(ours, q, k, x, PLACES).tril(), bias_of(fox, q, k, x, PLACES).tril(), 1e-12)
