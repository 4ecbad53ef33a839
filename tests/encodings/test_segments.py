"""BiPE: how texts are cut, what enters for places and for segments, and decoding one token after another."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.encodings.samples import SIZES, agree, draw
from tests.encodings.samples import build as samples_build
from torch import Tensor

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attention_logits
from toeplens.encodings.lengths import following_position, segment_positions

H, D, N = SIZES["num_heads"], SIZES["head_dim"], 12
SEPARATORS = [3, 7]
ACROSS = pytest.mark.parametrize("across", ["rope", "alibi"])
INSIDE = pytest.mark.parametrize("inside", ["learned", "sinusoidal"])

build = partial(samples_build, "bipe", std=1.0)


def counted(tokens: list[int], segment: int = 0, place: int = 0) -> list[list[int]]:
    positions = []
    for token in tokens:
        positions.append([segment, place])
        segment, place = (segment + 1, 0) if token in SEPARATORS else (segment, place + 1)
    return positions


def told(encoding: PositionalEncoding, places: Tensor, **more: Any) -> Any:
    return {"encoding": encoding, "q_positions": places, "k_positions": places, "scale": encoding.scale, **more}


# ---- positions ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 50), st.integers(0, 50))
def test_a_separator_ends_its_segment(tokens: list[int], segment: int, place: int) -> None:
    ids = torch.tensor(tokens, dtype=torch.long)
    assert segment_positions(ids, SEPARATORS).tolist() == counted(tokens)
    first = torch.tensor([segment, place])
    assert segment_positions(ids, SEPARATORS, first=first).tolist() == counted(tokens, segment, place)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=20), st.data())
def test_decoding_goes_on_where_the_text_was(tokens: list[int], data: st.DataObject) -> None:
    ids = torch.tensor([tokens, tokens[::-1]])
    whole = segment_positions(ids, SEPARATORS)
    cut = data.draw(st.integers(1, len(tokens) - 1))
    following = following_position(whole[:, cut - 1], ids[:, cut - 1], SEPARATORS)
    assert torch.equal(following, whole[:, cut])
    assert torch.equal(segment_positions(ids[:, cut:], SEPARATORS, first=following), whole[:, cut:])


def test_running_numbers_are_segments_of_one_length() -> None:
    assert build(segment=3).place(torch.arange(7)).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0]]
    assert build().segment == 8


# ---- what enters ----------------------------------------------------------------------------------------------------


@ACROSS
@INSIDE
def test_places_enter_as_vectors_and_segments_as_rope_or_alibi(across: str, inside: str) -> None:
    encoding = build(across=across, inside=inside, places_max=4, slope_factor=2.5)
    positions = segment_positions(torch.tensor([1, 2, 7, 1, 1, 1, 1, 1, 3, 3, 1, 1]), SEPARATORS)
    segments, places = positions.unbind(-1)
    x = draw(2, N, SIZES["d_model"])
    if inside == "learned":
        wanted = x + encoding.get_parameter("weight")[places.clamp(max=3)]
    else:
        wanted = encodings.build("sinusoidal", **SIZES).embed(x, places)
    agree(encoding.embed(x, positions), wanted, 1e-15)
    q, k = draw(2, H, N, D), draw(2, H, N, D, seed=2)
    relative = encodings.build(across, **SIZES)
    if across == "rope":
        wanted = attention_logits(q, k, **told(relative, segments))
    else:
        slopes = relative.get_buffer("slopes")[:, None, None]
        wanted = q @ k.mT * D**-0.5 - 2.5 * slopes * (segments[:, None] - segments).abs()
        wanted = wanted.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), float("-inf"))
    ours = attention_logits(q, k, **told(encoding, positions))
    agree(ours.tril(), wanted.tril(), 1e-12)
