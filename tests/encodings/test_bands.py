"""RoPE with gains, and p-RoPE: against plain loops, against RoPE itself, and against transformers."""

from __future__ import annotations

import cmath
import json
from typing import Any

import pytest
import torch
from tests.encodings.samples import SIZES, agree, pair_by_pair, rope, turned_logits, vectors
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from toeplens import encodings
from toeplens.encodings import PositionalEncoding

H, D, N = 3, 8, 6
PAIRS = D // 2
PLACES = torch.tensor([3, 4, 9, 40, 1000, 12345])
BY_HEAD = [[1.0, 0.5, 0.0, 0.25], [0.0, 0.0, 1.0, 1.0], [1.0, 0.9, 0.1, 0.0]]
PAIRINGS = pytest.mark.parametrize("pairing", ["interleaved", "half"])


def build(name: str, **options: Any) -> PositionalEncoding:
    return encodings.build(name, **SIZES, **json.loads(json.dumps(options)))


def logits(encoding: PositionalEncoding, q: Tensor, k: Tensor) -> Tensor:
    return turned_logits(encoding, q, k, PLACES)


def by_hand(q: Tensor, k: Tensor, gains: list[list[float]], off: str, pairing: str) -> Tensor:
    def factor(b: int, h: int, row: int, column: int, t: int) -> complex:
        g, turn = gains[h][t], rope(int(PLACES[row] - PLACES[column]), t)
        return g * turn if off == "pair" else 1 - g + g * turn

    return pair_by_pair(q, k, factor, pairing).real


@PAIRINGS
@pytest.mark.parametrize("off", ["rotation", "pair"])
@pytest.mark.parametrize("gains", [BY_HEAD, [1.0, 0.5, 0.0, 0.25]])
def test_logits_are_the_formulas(gains: list, off: str, pairing: str) -> None:
    q, k = vectors()
    ours = logits(build("rope-bands", gains=gains, off=off, pairing=pairing), q, k)
    wanted = by_hand(q, k, gains if isinstance(gains[0], list) else [gains] * H, off, pairing)
    assert float((ours - wanted).abs().max()) < 1e-10


def test_frequencies_of_ones_own() -> None:
    """One for all pairs turns the whole vector by one angle; a list is RoPE where it is RoPE's; bands still act."""
    q, k = vectors()
    one = logits(build("rope-bands", frequencies=0.7), q, k)
    wanted = pair_by_pair(q, k, lambda b, h, row, column, t: cmath.exp(0.7j * int(PLACES[row] - PLACES[column])))
    agree(one, wanted.real, 1e-10)
    given = build("rope").frequencies[0].tolist()
    same = build("rope-bands", frequencies=given).rotate(q, k, PLACES, PLACES)
    assert all(torch.equal(a, b) for a, b in zip(same, build("rope").rotate(q, k, PLACES, PLACES), strict=True))
    kept = build("rope-bands", frequencies=0.7, keep=[1]).frequencies[0]
    assert kept.tolist() == [0.0, 0.7, 0.0, 0.0]


def test_gains_over_one_raise_a_pair() -> None:
    q, k = vectors()
    ours = logits(build("rope-bands", gains=[3.0, 1.0, 0.0, 1.5], off="pair"), q, k)
    assert float((ours - by_hand(q, k, [[3.0, 1.0, 0.0, 1.5]] * H, "pair", "interleaved")).abs().max()) < 1e-10


def test_the_published_ramp_scales_the_keys_of_each_pair() -> None:
    high, low, beta = 0.4, 1.3, 2.0
    q, k = vectors()
    scales = torch.tensor([high + (low - high) * (t / (PAIRS - 1)) ** beta for t in range(PAIRS)], dtype=torch.float64)
    ours = logits(build("rope-bands", ramp=[high, low, beta], off="pair"), q, k)
    wanted = logits(build("rope"), q, k * scales.repeat_interleave(2))
    assert float((ours - wanted).abs().max()) < 1e-12


@PAIRINGS
def test_all_on_is_rope_bit_for_bit_and_all_off_is_nothing(pairing: str) -> None:
    q, k = vectors()
    rope = build("rope", pairing=pairing).rotate(q, k, PLACES, PLACES)
    for options in ({}, {"gains": [1] * PAIRS}, {"keep": [3, 0, 1, 2]}, {"off": "pair"}, {"ramp": [1, 1, 1]}):
        ours = build("rope-bands", pairing=pairing, **options).rotate(q, k, PLACES, PLACES)
        assert all(torch.equal(a, b) for a, b in zip(ours, rope, strict=True)), options
    still = build("rope-bands", keep=[], pairing=pairing).rotate(q, k, PLACES, PLACES)
    assert torch.equal(still[0], q)
    assert torch.equal(still[1], k)
    assert not logits(build("rope-bands", keep=[], off="pair", pairing=pairing), q, k).any()


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 0.75, 0.9, 1.0])
def test_p_rope_is_the_proportional_rope_of_transformers(p: float) -> None:
    config = LlamaConfig(
        hidden_size=H * D,
        num_attention_heads=H,
        rope_parameters={"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": p},
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["proportional"](config, torch.device("cpu"))
    ours = build("p-rope", p=p).frequencies[0]
    assert float((ours - theirs).abs().max()) < 1e-7
    assert torch.equal(ours == 0, theirs == 0)
