"""Resonance RoPE, HoPE and RoPE++, against plain loops and what their authors' programs compute."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from tests.encodings.samples import agree, build, pair_by_pair, rope, turned_logits, vectors
from torch import Tensor

from toeplens.encodings import BandControl, PositionalEncoding, controlled

B, H, D, N = 2, 3, 8, 6
PLACES = torch.tensor([-5, 0, 1, 9, 300, 12345])


def logits(encoding: PositionalEncoding, q: Tensor, k: Tensor) -> Tensor:
    return turned_logits(encoding, q, k, PLACES)


def check_logits(encoding: PositionalEncoding, frequencies: list[float], pairing: str) -> None:
    q, k = vectors()

    def factor(b: int, h: int, row: int, column: int, t: int) -> complex:
        return cmath.exp(1j * int(PLACES[row] - PLACES[column]) * frequencies[t])

    agree(logits(encoding, q, k), pair_by_pair(q, k, factor, pairing).real, 1e-9)


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_resonance_ropes_wavelengths_are_whole_numbers(pairing: str, factor: float) -> None:
    encoding = build("resonance-rope", pairing=pairing, factor=factor)
    wavelengths = [round(2 * math.pi * factor * 10000.0 ** (2 * t / D)) for t in range(D // 2)]
    assert encoding.wavelengths.tolist() == [wavelengths]
    assert wavelengths == ([6, 63, 628, 6283] if factor == 1 else [25, 251, 2513, 25133])
    check_logits(encoding, [2 * math.pi / length for length in wavelengths], pairing)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize(("length", "kept"), [(7, 1), (62, 1), (63, 2), (628, 2), (629, 3), (6284, 4)])
def test_hope_keeps_what_turns_once_within_the_length(length: int, kept: int, pairing: str) -> None:
    frequencies = [10000.0 ** (-2 * t / D) if t < kept else 0.0 for t in range(D // 2)]
    check_logits(build("hope", train_length=length, pairing=pairing), frequencies, pairing)


def test_hope_is_a_p_rope_whose_share_the_length_decides() -> None:
    q, k = vectors()
    assert torch.equal(logits(build("hope"), q, k), logits(build("p-rope", p=0.5), q, k))
    assert torch.equal(logits(build("hope", train_length=100_000), q, k), logits(build("rope"), q, k))


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("heads", ["shared", "own"])
def test_every_second_head_has_the_imaginary_part(heads: str, pairing: str) -> None:
    encoding = build("rope-plus-plus", heads=heads, pairing=pairing)
    q, k = vectors()
    source = [0, 0, 2] if heads == "shared" else [0, 1, 2]
    z = pair_by_pair(q[:, source], k[:, source], lambda b, h, i, j, t: rope(int(PLACES[i] - PLACES[j]), t), pairing)
    agree(logits(encoding, q, k), torch.stack((z[:, 0].real, z[:, 1].imag, z[:, 2].real), 1), 1e-9)


def test_the_imaginary_head_is_the_programs() -> None:
    """Its queries are q sin - rotate_half(q) cos; its real ones q cos + rotate_half(q) sin."""
    q, k = vectors()
    ours = build("rope-plus-plus").rotate(q, k, PLACES, PLACES)
    angles = PLACES.double().unsqueeze(-1) * 10000.0 ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    cos, sin = (table.repeat(1, 2) for table in (angles.cos(), angles.sin()))
    for h in range(H):
        x, y = q[:, h // 2 * 2], k[:, h // 2 * 2]
        half, key_half = (torch.cat((-z[..., D // 2 :], z[..., : D // 2]), dim=-1) for z in (x, y))
        agree(ours[0][:, h], x * sin - half * cos if h == 1 else x * cos + half * sin, 1e-9)
        agree(ours[1][:, h], y * cos + key_half * sin, 1e-9)


def test_bands_under_control_stop_in_imaginary_heads_too() -> None:
    q, k = vectors()
    stopped = controlled(build("rope-plus-plus", heads="own"), BandControl(still=(0, 1, 2, 3)))
    ours = logits(stopped, q, k)
    a, b = (x[:, 1].unflatten(-1, (2, -1)) for x in (q, k))
    imaginary = torch.complex(a[..., 0, :], a[..., 1, :]) @ torch.complex(b[..., 0, :], b[..., 1, :]).mH
    agree(ours[:, 1], imaginary.imag, 1e-12)
    agree(ours[:, 0], (q @ k.mT)[:, 0], 1e-12)
