"""Positions with several coordinates: against plain loops, rotary-embedding-torch, and transformers' Qwen-VL models."""

from __future__ import annotations

import cmath
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb
from tests.encodings.samples import build as samples_build
from tests.encodings.samples import pair_by_pair, turned_logits, vectors
from torch import Tensor
from transformers import Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from toeplens.encodings import PositionalEncoding
from toeplens.ground import InputError

H, D = 2, 12
build = partial(samples_build, num_heads=H, head_dim=D)
PAIRINGS = pytest.mark.parametrize("pairing", ["interleaved", "half"])


def by_hand(q: Tensor, k: Tensor, places: Tensor, turns: list, pairing: str) -> Tensor:
    """``turns[h][t]``: the frequency of each axis."""

    def factor(b: int, h: int, row: int, column: int, t: int) -> complex:
        offset = (places[row] - places[column]).tolist()
        return cmath.exp(1j * sum(o * w for o, w in zip(offset, turns[h][t], strict=True)))

    return pair_by_pair(q, k, factor, pairing).real


@PAIRINGS
@pytest.mark.parametrize("shares", [None, [1, 2, 3]])
def test_axial_logits_are_the_formulas(shares: list[int] | None, pairing: str) -> None:
    encoding = build("axial-rope", axes=3, axes_dims=shares, base=100.0, pairing=pairing)
    places = torch.tensor([[0, 0, 0], [1, 5, -3], [70, 2, 9], [4, 4, 100_000]])
    turns = []
    for axis, pairs in enumerate(shares or [2, 2, 2]):
        for j in range(pairs):
            turns.append([100.0 ** (-2 * j / (2 * pairs)) if a == axis else 0.0 for a in range(3)])
    q, k = vectors(4, H, D)
    wanted = by_hand(q, k, places, [turns] * H, pairing)
    assert float((turned_logits(encoding, q, k, places) - wanted).abs().max()) < 1e-10


@PAIRINGS
def test_mixed_logits_are_the_formulas(pairing: str) -> None:
    encoding = build("rope-mixed", pairing=pairing)
    with torch.no_grad():
        encoding.omega.normal_()
    places = torch.tensor([[0, 0], [1, -3], [70, 9], [4, 1000]])
    q, k = vectors(4, H, D)
    wanted = by_hand(q, k, places, encoding.omega.tolist(), pairing)
    assert float((turned_logits(encoding, q, k, places) - wanted).abs().max()) < 1e-10


def test_mixed_frequencies_start_at_right_angles_with_the_published_lengths() -> None:
    omega = build("rope-mixed").omega.detach()
    first, second = omega.chunk(2, dim=1)
    lengths = torch.tensor([10.0 ** (-4 * t / D) for t in range(D // 4)])
    for half in (first, second):
        torch.testing.assert_close(half.norm(dim=-1), lengths.expand(H, -1))
        unit = half / half.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(unit, unit[:, :1].expand_as(unit))  # one direction a head
    torch.testing.assert_close((first * second).sum(-1), torch.zeros(H, D // 4), rtol=0, atol=1e-6)
    assert not torch.allclose(first[0], first[1])
    assert not torch.equal(build("rope-mixed").for_layer(1).omega, omega)


@given(st.lists(st.integers(1, 7), min_size=2, max_size=4), st.data())
def test_running_numbers_are_raster_positions_of_the_grid(grid: list[int], data: st.DataObject) -> None:
    encoding = build("axial-rope", axes=len(grid), grid=grid)
    numbers = data.draw(st.lists(st.integers(0, math.prod(grid) - 1), min_size=1, max_size=9))
    placed = encoding.place(torch.tensor(numbers))
    assert np.array_equal(placed.T.numpy(), np.stack(np.unravel_index(numbers, grid)))
    beyond = encoding.place(torch.tensor(numbers) - math.prod(grid))
    assert torch.equal(beyond, placed - torch.tensor([grid[0], *[0] * (len(grid) - 1)]))


def test_the_kernel_is_the_rotation() -> None:
    offsets = torch.tensor([[0, 0], [3, -2], [7, 100]])
    axial = build("axial-rope", base=50.0)
    kernel = axial.kernel(offsets)
    assert kernel.shape == (1, D // 2, 3)
    for t in range(D // 2):
        axis, j = divmod(t, D // 4)
        for n, offset in enumerate(offsets.tolist()):
            assert abs(complex(kernel[0, t, n]) - cmath.exp(1j * offset[axis] * 50.0 ** (-j / (D // 4)))) < 1e-12
    assert torch.equal(axial.kernel(torch.tensor([4])), axial.kernel(torch.tensor([[4, 4]])))
    assert build("axial-rope", grid=[4, 4]).kernel(torch.tensor([4])) is None
    assert build("rope-mixed").kernel(offsets).shape == (H, D // 2, 3)


# ---- public implementations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lang", "pixel"])
@pytest.mark.parametrize("grid", [(5, 7), (3, 4, 5)])
def test_axial_is_rotary_embedding_torchs(grid: tuple[int, ...], kind: str) -> None:
    axes, length = len(grid), math.prod(grid)
    theirs = RotaryEmbedding(D // axes, freqs_for=kind)
    freqs = theirs.get_axial_freqs(*grid)
    ours = build("axial-rope", axes=axes, grid=list(grid), frequencies=kind)
    q, k = vectors(length, H, D, torch.float32)
    places = ours.place(torch.arange(length))
    turned = [apply_rotary_emb(freqs, x.unflatten(2, grid)).flatten(2, 1 + axes) for x in (q, k)]
    assert float((turned_logits(ours, q, k, places) - turned[0] @ turned[1].mT).abs().max()) < 5e-5


def qwen_tables(kind: str) -> tuple[PositionalEncoding, Any]:
    settings = {"hidden_size": H * 128, "num_attention_heads": H, "num_key_value_heads": H, "head_dim": 128}
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    if kind == "qwen2":
        config = Qwen2VLTextConfig(**settings, rope_parameters={**rope, "mrope_section": [16, 24, 24]})
        return build("mrope", head_dim=128), qwen2_vl.Qwen2VLRotaryEmbedding(config)
    config = Qwen3VLTextConfig(**settings, rope_parameters={**rope, "mrope_section": [24, 20, 20]})
    return build("mrope", head_dim=128, interleaved_sections=True), qwen3_vl.Qwen3VLTextRotaryEmbedding(config)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_m_rope_is_qwen_vls(kind: str) -> None:
    ours, theirs = qwen_tables(kind)
    generator = torch.Generator().manual_seed(3)
    places = torch.randint(0, 128, (2, 10, 3), generator=generator)
    q, k = vectors(10, H, 128, torch.float32)
    cos, sin = theirs(q, places.permute(2, 0, 1))
    for a, b in zip(ours.rotate(q, k, places, places), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert float((a - b).abs().max()) < 5e-5


def test_axial_is_the_qwen2_vl_vision_towers() -> None:
    config = Qwen2VLVisionConfig(embed_dim=H * 32, num_heads=H)
    theirs = qwen2_vl.Qwen2VLVisionRotaryEmbedding(config)
    ours = build("axial-rope", head_dim=32, pairing="half", grid=[6, 9])
    places = ours.place(torch.arange(54))
    q, k = vectors(54, H, 32, torch.float32)
    cos, sin = theirs(q, places)
    their_q, their_k = qwen2_vl.apply_rotary_pos_emb_vision(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    for a, b in zip(ours.rotate(q, k, places, places), (their_q, their_k), strict=True):
        assert float((a - b.transpose(1, 2)).abs().max()) < 2e-5


# ---- options --------------------------------------------------------------------------------------------------------


def test_shares_of_the_pairs_by_default() -> None:
    assert build("axial-rope", head_dim=14).axis_of.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert build("mrope", head_dim=128).axis_of.bincount().tolist() == [16, 24, 24]
    assert build("mrope", head_dim=128, interleaved_sections=True).axis_of.bincount().tolist() == [24, 20, 20]
    for head_dim in range(2, 40, 2):
        for interleaved in (False, True):
            assert len(build("mrope", head_dim=head_dim, interleaved_sections=interleaved).axis_of) == head_dim // 2
    with pytest.raises(InputError, match=r"^head_dim must .*, got 6\.$"):
        build("rope-mixed", head_dim=6)
