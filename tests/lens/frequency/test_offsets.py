"""Rotary offsets are what a loop over tokens finds; planted angles are found, and what has none has none."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from toeplens.ground import InputError
from toeplens.lens import rotary_offsets


def drawn(seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 4, 7, 6, generator=random), torch.randn(2, 2, 7, 6, generator=random)
    return q + torch.randn(6, generator=random), k + torch.randn(6, generator=random)


def by_hand(q: Tensor, k: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    strength, angle = torch.zeros(2, 4, 3, dtype=torch.float64)
    for h in range(4):
        for t in range(3):
            found = []
            for x, head in ((q, h), (k, h // 2)):
                values = [
                    complex(*x[b, head, i, 2 * t : 2 * t + 2].tolist()) for b in range(2) for i in range(lengths[b])
                ]
                found.append((sum(values) / len(values), sum(map(abs, values)) / len(values)))
            (mq, sq), (mk, sk) = found
            strength[h, t] = abs(mq) * abs(mk) / (sq * sk)
            angle[h, t] = cmath.phase(mq * mk.conjugate())
    return strength, angle


@given(st.integers(0, 10_000), st.integers(1, 7))
def test_they_are_what_a_loop_finds(seed: int, length: int) -> None:
    q, k = drawn(seed)
    found = rotary_offsets(q, k, 3, torch.tensor([length, 7]), pairing="interleaved")
    strength, angle = by_hand(q, k, [length, 7])
    torch.testing.assert_close(found.strength, strength, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.angle, angle, rtol=1e-5, atol=1e-6)
    assert ((found.strength >= 0) & (found.strength <= 1 + 1e-12)).all()


def test_a_planted_angle_is_found_and_what_points_anywhere_has_none() -> None:
    size = torch.rand(3, 1, 500, 1) + 0.5
    q = torch.cat((size * math.cos(0.7), size * math.sin(0.7)), -1)
    k = torch.cat((size, 0 * size), -1)
    found = rotary_offsets(q, k, 1, pairing="interleaved")
    assert float(found.strength) == pytest.approx(1)
    assert float(found.angle) == pytest.approx(0.7)
    assert float(rotary_offsets(torch.randn_like(q), k, 1, pairing="interleaved").strength) < 0.1
    assert torch.isnan(rotary_offsets(0 * q, k, 1, pairing="interleaved").strength).all()


def test_more_pairs_than_there_are_dimensions() -> None:
    q, k = drawn(0)
    with pytest.raises(InputError, match=r"pairs must fit the dimensions .*, got 4"):
        rotary_offsets(q, k, 4, pairing="interleaved")
