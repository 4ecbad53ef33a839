"""Selective RoPE, RePo and TAPA, against plain loops."""

from __future__ import annotations

import cmath
import math
from functools import partial
from typing import Any

import pytest
import torch
from tests.encodings.samples import SIZES, agree, draw, pair_by_pair, vectors
from tests.encodings.samples import build as samples_build
from torch import Tensor

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, Seen, attention_logits

B, H, D, N, W = 2, 3, 8, 6, 24
PLACES = torch.tensor([-5, 0, 1, 9, 300, 12])
SCALE = D**-0.5

build = partial(samples_build, std=0.5, grad=False)


def content() -> tuple[Tensor, Tensor, Tensor]:
    return *vectors(), draw(B, N, W, seed=3)


def logits(encoding: PositionalEncoding, q: Tensor, k: Tensor, x: Tensor, places: Tensor = PLACES) -> Tensor:
    told = {"encoding": encoding, "q_positions": places, "k_positions": places, "scale": SCALE, "causal": False}
    return attention_logits(q, k, notes=encoding.note(x), **told)


def by_angles(q: Tensor, k: Tensor, angles: Any, pairing: str) -> Tensor:
    """RoPE's products at the angles [sequence][head][token][pair]."""

    def factor(b: int, h: int, i: int, j: int, t: int) -> complex:
        return cmath.exp(1j * (angles[b][h][i][t] - angles[b][h][j][t]))

    return pair_by_pair(q, k, factor, pairing).real * SCALE


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# ---- Selective RoPE -------------------------------------------------------------------------------------------------


def angles_by_loops(encoding: Any, x: Tensor, base: float) -> list[list[list[float]]]:
    """[head][token][pair] of one sequence [N, W], a step after the other."""
    width = W // H
    rows = []
    for token in x:
        parts = [token[h * width : (h + 1) * width] for h in range(H)]
        rows.append(torch.cat([part / math.sqrt(float(part @ part) + 1e-6) for part in parts]))
    phi = [encoding.up.weight @ (encoding.down.weight @ row) for row in rows]
    angles: list[list[list[float]]] = [[] for _ in range(H)]
    for h in range(H):
        sums = [0.0] * (D // 2)
        for n in range(N):
            for t in range(D // 2):
                channel = h * (D // 2) + t
                if encoding.conv is None:
                    step = float(phi[n][channel]) - (float(phi[n - 1][channel]) if n else 0.0)
                else:
                    kernel = encoding.conv[h, t]
                    last = len(kernel) - 1
                    step = sum(float(kernel[last - m] * phi[n - m][channel]) for m in range(min(n, last) + 1))
                    step = step * sigmoid(step) if encoding.activation == "silu" else step
                if encoding.constant is not None:
                    step += math.exp(float(encoding.constant[h, 0, t]))
                if encoding.gate is not None:
                    step *= sigmoid(float(encoding.gate.weight[h] @ rows[n] + encoding.gate.bias[h]))
                sums[t] += step
            angles[h].append([s * base ** (-2 * t / D) for t, s in enumerate(sums)])
    return angles


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"conv_size": 1, "activation": "none", "gate": False},
        {"conv_size": 3, "bias": True, "base": 100.0, "pairing": "interleaved"},
        {"conv_size": None, "rank": 2},
        {"conv_size": None, "gate": False, "bias": True},
    ],
)
def test_selective_rope_turns_by_the_sum_of_the_tokens_steps(options: dict[str, Any]) -> None:
    encoding = build("selective-rope", **options)
    q, k, x = content()
    angles = [angles_by_loops(encoding, x[b], options.get("base", 500000.0)) for b in range(B)]
    agree(logits(encoding, q, k, x), by_angles(q, k, angles, encoding.pairing), 1e-10)


@pytest.mark.parametrize("options", [{}, {"conv_size": None}])
def test_a_convolution_keeps_to_its_text(options: dict[str, Any]) -> None:
    encoding = build("selective-rope", **options)
    q, k, x = content()
    texts = torch.tensor([[4, 4, 4, 1, 1, 7]] * B)
    seen = Seen.of(q, k, notes=encoding.note(x), texts=texts)
    packed = encoding.rotate(q, k, PLACES, PLACES, seen=seen)
    for part in (slice(0, 3), slice(3, 5), slice(5, 6)):
        q_part, k_part = packed[0][:, :, part], packed[1][:, :, part]
        apart = logits(encoding, q[:, :, part], k[:, :, part], x[:, part], PLACES[part])
        agree(q_part @ k_part.mT * SCALE, apart, 1e-12)


# ---- RePo -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"width": 5, "base": 100.0, "pairing": "interleaved"}])
def test_repo_turns_each_token_by_the_place_that_it_takes(options: dict[str, Any]) -> None:
    encoding = build("repo", **options)
    q, k, x = content()
    base, angles = options.get("base", 500000.0), []
    for b in range(B):
        angles.append([])
        for h in range(H):
            angles[b].append([])
            for token in x[b]:
                gate, told = encoding.gate.weight @ token, encoding.content.weight @ token
                hidden = [float(g) * sigmoid(float(g)) * float(c) for g, c in zip(gate, told, strict=True)]
                place = sum(float(w) * y for w, y in zip(encoding.place_of.weight[h], hidden, strict=True))
                angles[b][h].append([place * base ** (-2 * t / D) for t in range(D // 2)])
    agree(logits(encoding, q, k, x), by_angles(q, k, angles, encoding.pairing), 1e-10)


def test_repo_is_an_eighth_as_wide_as_the_model() -> None:
    assert encodings.build("repo", **SIZES).gate.weight.shape == (3, W)
    assert encodings.build("repo", **SIZES | {"d_model": 6}).gate.weight.shape == (1, 6)


# ---- TAPA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "share"), [(0.1, 0.5), (0.7, 0.25), (1.0, 0.75)])
@pytest.mark.parametrize("phase", ["quadratic", "linear"])
def test_tapas_logits_are_the_formulas(alpha: float, share: float, phase: str) -> None:
    encoding = build("tapa", alpha=alpha, share=share, phase=phase)
    q, k, x = content()
    ours, first = logits(encoding, q, k, x), round(share * D)
    for h in range(H):
        for row, i in enumerate(PLACES.tolist()):
            for column, j in enumerate(PLACES.tolist()):
                a, b = q[1, h, row], k[1, h, column]
                if phase == "quadratic":
                    angle = float(a[first:] @ b[first:])
                else:
                    angle = float(a[first:].sum() + b[first:].sum())
                angle *= 2 * math.pi * abs(i - j) ** alpha / math.sqrt(D - first)
                wanted = float(a[:first] @ b[:first]) / math.sqrt(first) * math.cos(angle)
                assert abs(float(ours[1, h, row, column]) - wanted) < 1e-10
