"""RollPE is torch.roll, and a RoPE in the Fourier basis; DRoPE is a turn by the heading."""

from __future__ import annotations

import cmath
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.encodings.samples import agree, pair_by_pair, turned_logits, vectors

from toeplens import encodings
from toeplens.encodings import PositionalEncoding

H, N = 2, 6
PLACES = torch.tensor([-7, 0, 1, 9, 300, 1_048_576])


def build(name: str, head_dim: int = 8, **options: Any) -> PositionalEncoding:
    return encodings.build(name, d_model=2 * head_dim, num_heads=H, head_dim=head_dim, max_len=64, **options)


@pytest.mark.parametrize("head_dim", [3, 4, 7, 8, 64])
@pytest.mark.parametrize("speed", [1.0, 2.0, 3.0])
def test_a_whole_speed_is_torch_roll(speed: float, head_dim: int) -> None:
    q, k = vectors(N, H, head_dim)
    ours = build("rollpe", head_dim, speed=speed).rotate(q, k, PLACES, PLACES)
    for a, x in zip(ours, (q, k), strict=True):
        for n, i in enumerate(PLACES.tolist()):
            assert float((a[:, :, n] - torch.roll(x[:, :, n], int(speed) * i, -1)).abs().max()) < 1e-7


@pytest.mark.parametrize("head_dim", [7, 8])
@pytest.mark.parametrize("speed", [0.25, 0.7, 1.6])
def test_a_fraction_is_a_phase_in_the_fourier_transform(speed: float, head_dim: int) -> None:
    q, k = vectors(N, H, head_dim)
    ours = build("rollpe", head_dim, speed=speed).rotate(q, k, PLACES, PLACES)[0]
    for n, i in enumerate(PLACES.tolist()):
        spectrum = np.fft.rfft(q[:, :, n].numpy(), axis=-1)
        component = np.arange(spectrum.shape[-1])
        phases = np.exp(-2j * np.pi * component * speed * i / head_dim)
        if head_dim % 2 == 0:
            phases[-1] = (-1) ** (i * round(speed) % 2)
        wanted = np.fft.irfft(spectrum * phases, n=head_dim, axis=-1)
        assert float((ours[:, :, n] - torch.from_numpy(wanted)).abs().max()) < 1e-8


@pytest.mark.parametrize("head_dim", [7, 8])
def test_it_is_rope_with_linear_frequencies_in_the_fourier_basis(head_dim: int) -> None:
    """q.k of rolled vectors is q.k of their sines and cosines, turned; mean and alternating sum are no pairs."""
    speed = 0.3
    q, k = vectors(N, H, head_dim)
    rolled_q, rolled_k = build("rollpe", head_dim, speed=speed).rotate(q, k, PLACES, PLACES)
    total = torch.zeros(2, H, N, N, dtype=torch.float64)
    for f in range(head_dim // 2 + 1):
        paired = 0 < 2 * f < head_dim
        x, y = (torch.fft.rfft(z, norm="ortho")[..., f].conj() for z in (q, k))
        if paired:  # each has a cosine and a sine, which RoPE turns
            phases = PLACES.double() * (2 * math.pi * f * speed / head_dim)
            x, y = (z * torch.polar(torch.ones_like(phases), phases) for z in (x, y))
        total += (2 if paired else 1) * (x.unsqueeze(-1) * y.conj().unsqueeze(-2)).real
    assert float((rolled_q @ rolled_k.mT - total).abs().max()) < 1e-9


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_headings_turn_every_pair_alike(pairing: str) -> None:
    q, k = vectors(N, H)
    ours = turned_logits(build("drope", step=0.1, pairing=pairing), q, k, PLACES)
    wanted = pair_by_pair(q, k, lambda b, h, i, j, t: cmath.exp(0.1j * int(PLACES[i] - PLACES[j])), pairing)
    agree(ours, wanted.real, 1e-9)
