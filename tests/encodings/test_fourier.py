"""FoPE: against plain loops; what its matrices start from; that it is not a function of the offset."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.encodings.samples import draw
from torch import nn

from toeplens import encodings
from toeplens.encodings import PositionalEncoding

H, D, N = 3, 16, 6
SIZES = {"d_model": 48, "num_heads": H, "head_dim": D, "max_len": 512}
PLACES = torch.tensor([0, 1, 9, 40, 300, 12345])


def build(seed: int = 0, **options: Any) -> PositionalEncoding:
    torch.manual_seed(seed)
    return encodings.build("fope", **SIZES, **options)


@pytest.mark.parametrize("padding", ["identity", "ones"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_what_it_turns_by_is_the_formula(pairing: str, padding: str) -> None:
    encoding = build(pairing=pairing, padding=padding)
    kept = [10000.0 ** (-2 * t / D) for t in range(D // 2) if 10000.0 ** (-2 * t / D) >= 2 * math.pi / 512]
    assert len(kept) == 4
    x = draw(2, H, N, D)
    ours = encoding.rotate(x, x, PLACES, PLACES)[0]
    for h in range(H):
        for row, i in enumerate(PLACES.tolist()):
            for t in range(D // 2):
                cosine, sine = 1.0, 1.0 if padding == "ones" else 0.0
                if t < min(len(kept), D // 4):
                    cosine = sum(float(encoding.cosines[h, f, t]) * math.cos(i * kept[f]) for f in range(len(kept)))
                    sine = sum(float(encoding.sines[h, f, t]) * math.sin(i * kept[f]) for f in range(len(kept)))
                a, b = (t, t + D // 2) if pairing == "half" else (2 * t, 2 * t + 1)
                real, imaginary = float(x[1, h, row, a]), float(x[1, h, row, b])
                assert abs(float(ours[1, h, row, a]) - (real * cosine - imaginary * sine)) < 1e-10
                assert abs(float(ours[1, h, row, b]) - (imaginary * cosine + real * sine)) < 1e-10


def test_without_noise_it_is_rope_on_the_frequencies_that_are_kept() -> None:
    encoding = build(gain=0.0)
    x = draw(2, H, N, D)
    ours = encoding.rotate(x, x, PLACES, PLACES)[0]
    bands = encodings.build("rope-bands", keep=[0, 1, 2, 3], pairing="half", **SIZES)
    torch.testing.assert_close(ours, bands.rotate(x, x, PLACES, PLACES)[0], rtol=1e-12, atol=1e-12)


def test_with_more_frequencies_than_series_they_start_evenly_apart() -> None:
    encoding = build(gain=0.0, base=100.0)
    assert len(encoding.frequencies) == 8
    for matrix in (encoding.cosines, encoding.sines):
        assert matrix.shape == (H, 8, 4)
        assert matrix[1].nonzero().tolist() == [[0, 0], [2, 1], [4, 2], [6, 3]]


def test_the_noise_is_xaviers() -> None:
    torch.manual_seed(0)
    encoding = encodings.build("fope", d_model=128 * 16, num_heads=16, head_dim=128, max_len=4096, gain=0.3)
    heads, kept, series = encoding.sines.shape
    noise = encoding.sines - encoding.sines.round()
    wanted = 0.3 * math.sqrt(2 / (kept * series + heads * series))  # torch's fans of a three-dimensional tensor
    assert float(noise.std()) == pytest.approx(wanted, rel=0.02)
    assert not torch.equal(encoding.sines, encoding.cosines)


def test_matrices_are_fixed_unless_learnable_and_saved_either_way() -> None:
    fixed, learned = build(), build(learnable=True)
    assert not list(fixed.parameters())
    assert {name for name, _ in learned.named_parameters()} == {"cosines", "sines"}
    assert set(fixed.state_dict()) == set(learned.state_dict()) == {"cosines", "sines"}
    assert isinstance(learned.sines, nn.Parameter)
    other = build(seed=1)
    assert not torch.equal(other.sines, fixed.sines)
    other.load_state_dict(fixed.state_dict())
    assert torch.equal(other.sines, fixed.sines)
    assert not torch.equal(fixed.for_layer(1).sines, fixed.sines)
