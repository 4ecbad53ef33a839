"""BiPE: how texts are cut, what enters for places and for segments, and decoding one token after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.encodings.samples import SIZES, agree, draw, randomised
from torch import Tensor

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attend, attention_logits
from toeplens.encodings.conformance import check
from toeplens.encodings.segments import BiPE, following_position, segment_positions
from toeplens.ground import InputError

H, D, N = SIZES["num_heads"], SIZES["head_dim"], 12
SEPARATORS = [3, 7]
ACROSS = pytest.mark.parametrize("across", ["rope", "alibi"])
INSIDE = pytest.mark.parametrize("inside", ["learned", "sinusoidal"])


def build(**options: Any) -> BiPE:
    encoding = randomised(encodings.build("bipe", **SIZES, **options)).double()
    assert isinstance(encoding, BiPE)
    return encoding


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


def test_it_is_what_the_released_program_counts() -> None:
    """Its example of separators 869 and 13, worked on paper."""
    tokens = torch.tensor([[5, 6, 869, 7, 13, 13, 8], [13, 1, 1, 1, 1, 1, 1]])
    positions = segment_positions(tokens, [869, 13])
    assert positions[..., 0].tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert positions[..., 1].tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5]]


@given(st.lists(st.integers(0, 9), min_size=2, max_size=20), st.data())
def test_decoding_goes_on_where_the_text_was(tokens: list[int], data: st.DataObject) -> None:
    ids = torch.tensor([tokens, tokens[::-1]])
    whole = segment_positions(ids, SEPARATORS)
    cut = data.draw(st.integers(1, len(tokens) - 1))
    following = following_position(whole[:, cut - 1], ids[:, cut - 1], SEPARATORS)
    assert torch.equal(following, whole[:, cut])
    assert torch.equal(segment_positions(ids[:, cut:], SEPARATORS, first=following), whole[:, cut:])


def test_no_separator_is_refused() -> None:
    with pytest.raises(InputError, match=r"^separators: .*\.$"):
        segment_positions(torch.arange(3), [])


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


@ACROSS
def test_tokens_of_one_segment_are_told_apart_by_their_vectors_alone(across: str) -> None:
    encoding = build(across=across)
    positions = torch.tensor([[4, 0], [4, 1], [4, 2], [5, 0]])
    q, k = (draw(1, H, 1, D, seed=seed).expand(-1, -1, 4, -1) for seed in range(2))
    logits = attention_logits(q, k, **told(encoding, positions, causal=False))
    agree(logits[..., :3, :3], logits[..., :1, :1].expand(-1, -1, 3, 3), 1e-13)
    assert float((logits[..., 3, 0] - logits[..., 0, 0]).detach().abs().min()) > 1e-3


@ACROSS
@given(st.integers(-(10**6), 10**6))
def test_texts_may_begin_with_any_segment(across: str, moved: int) -> None:
    encoding = build(across=across)
    positions = encoding.place(torch.arange(N))
    q, k, v = (draw(1, H, N, D, seed=seed) for seed in range(3))
    there = positions + torch.tensor([moved, 0])
    agree(attend(q, k, v, **told(encoding, positions)), attend(q, k, v, **told(encoding, there)), 1e-9)


@ACROSS
def test_decoding_with_a_cache_gives_the_full_pass(across: str) -> None:
    encoding = build(across=across)
    tokens = torch.tensor([[1, 2, 7, 1, 1, 3, 3, 1, 1, 1, 7, 2], [7, 7, 1, 1, 1, 1, 1, 1, 3, 1, 1, 1]])
    positions = segment_positions(tokens, SEPARATORS)
    x = draw(2, N, SIZES["d_model"])
    project = draw(3, H, SIZES["d_model"], D, seed=9)

    def projected(content: Tensor, places: Tensor) -> list[Tensor]:
        embedded = encoding.embed(content, places).unsqueeze(1)
        return [embedded @ matrix for matrix in project]

    full = attend(*projected(x, positions), **told(encoding, positions))
    cached: list[list[Tensor]] = []
    here = torch.zeros(2, 2, dtype=torch.long)
    for n in range(N):
        cached.append(projected(x[:, n : n + 1], here.unsqueeze(1)))
        k, v = (torch.cat([each[m] for each in cached], dim=2) for m in (1, 2))
        known = {**told(encoding, positions[:, : n + 1]), "q_positions": here.unsqueeze(1)}
        out = attend(cached[-1][0], k, v, **known)
        agree(out, full[:, :, n : n + 1], 1e-12)
        here = following_position(here, tokens[:, n], SEPARATORS)


@pytest.mark.parametrize(
    "options",
    [
        {"across": "alibi", "segment": 3, "places_max": 2},
        {"inside": "sinusoidal", "pairing": "half"},
        {"across": "alibi", "inside": "sinusoidal", "slope_factor": 1.0},
    ],
    ids=str,
)
def test_variants_conform(options: dict[str, Any]) -> None:
    check("bipe", skip=["compile"], **options)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"across": "fire"}, "across"),
        ({"inside": "random"}, "inside"),
        ({"places_max": 0}, "places_max"),
        ({"segment": 0}, "segment"),
        ({"slope_factor": 0.0}, "slope_factor"),
        ({"init_std": -1.0}, "init_std"),
        ({"base": 0.0}, "base"),
        ({"pairing": "both"}, "pairing"),
        ({"head_dim": 7}, "head_dim"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=rf"^{field}: .*\.$"):
        encodings.build("bipe", **{**SIZES, **options})
