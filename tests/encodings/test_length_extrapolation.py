"""Encodings for longer texts: wavelengths, remapped positions, temperatures and segments, against plain loops."""

from __future__ import annotations

import cmath
import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.encodings.samples import (
    SIZES,
    assert_close,
    build,
    pair_by_pair,
    random_tensor,
    randomised,
    rope,
    rotated_logits,
    vectors,
)
from tests.encodings.samples import build as samples_build
from torch import Tensor, nn
from transformers import Llama4TextConfig
from transformers.models.llama4 import modeling_llama4 as llama4

from toeplens import encodings
from toeplens.encodings import (
    FrequencyMask,
    PositionalEncoding,
    attend,
    attention_logits,
    attention_weights,
    with_frequency_mask,
)
from toeplens.encodings.length_extrapolation import next_position, segment_positions

# ---- wavelengths, imaginary heads -----------------------------------------------------------------------------------

H, D = 3, 8
PLACES = torch.tensor([-5, 0, 1, 9, 300, 12345])


def logits(encoding: PositionalEncoding, q: Tensor, k: Tensor) -> Tensor:
    return rotated_logits(encoding, q, k, PLACES)


def check_logits(encoding: PositionalEncoding, frequencies: list[float], pairing: str) -> None:
    q, k = vectors()

    def factor(b: int, h: int, row: int, column: int, t: int) -> complex:
        return cmath.exp(1j * int(PLACES[row] - PLACES[column]) * frequencies[t])

    assert_close(logits(encoding, q, k), pair_by_pair(q, k, factor, pairing).real, 1e-9)


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
def test_hope_keeps_pairs_that_complete_a_turn_within_the_length(length: int, kept: int, pairing: str) -> None:
    frequencies = [10000.0 ** (-2 * t / D) if t < kept else 0.0 for t in range(D // 2)]
    check_logits(build("hope", train_length=length, pairing=pairing), frequencies, pairing)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("heads", ["shared", "own"])
def test_every_second_head_has_the_imaginary_part(heads: str, pairing: str) -> None:
    encoding = build("rope-plus-plus", heads=heads, pairing=pairing)
    q, k = vectors()
    source = [0, 0, 2] if heads == "shared" else [0, 1, 2]
    z = pair_by_pair(q[:, source], k[:, source], lambda b, h, i, j, t: rope(int(PLACES[i] - PLACES[j]), t), pairing)
    assert_close(logits(encoding, q, k), torch.stack((z[:, 0].real, z[:, 1].imag, z[:, 2].real), 1), 1e-9)


def test_frequency_masks_freeze_imaginary_heads_too() -> None:
    q, k = vectors()
    frozen = with_frequency_mask(build("rope-plus-plus", heads="own"), FrequencyMask(freeze=(0, 1, 2, 3)))
    ours = logits(frozen, q, k)
    a, b = (x[:, 1].unflatten(-1, (2, -1)) for x in (q, k))
    imaginary = torch.complex(a[..., 0, :], a[..., 1, :]) @ torch.complex(b[..., 0, :], b[..., 1, :]).mH
    assert_close(ours[:, 1], imaginary.imag, 1e-12)
    assert_close(ours[:, 0], (q @ k.mT)[:, 0], 1e-12)


# ---- remapped positions ---------------------------------------------------------------------------------------------


PLACES_REMAPPED = torch.tensor([0, 1, 2, 5, 7, 8, 9, 20, 21, 63, 64, 1000, 100_003])
PAIRINGS = pytest.mark.parametrize("pairing", ["interleaved", "half"])
CASES: list[tuple[str, dict[str, Any]]] = [
    ("rerope", {}),
    ("rerope", {"window": 6, "leak": 0.25}),
    ("self-extend", {"window": 8, "group": 4}),
    ("self-extend", {"window": 7, "group": 3}),
    ("dual-chunk", {"chunk": 6, "window": 3}),
    ("dual-chunk", {"chunk": 6, "window": 3, "largest": "released"}),
]


def remapped(name: str, i: int, j: int, options: dict[str, Any]) -> float:
    """The papers' offsets of keys that are not after the query."""
    if name == "rerope":
        w, leak = options.get("window", 8), options.get("leak", 0.0)
        return i - j if i - j < w else w + (i - j - w) * leak
    if name == "self-extend":
        w, group = options["window"], options["group"]
        return i - j if i - j < w else i // group - j // group + w - w // group
    s, w = options["chunk"], options["window"]
    last = s + w - 1 if options.get("largest", "paper") == "paper" else s + w
    if i // s == j // s:
        return i % s - j % s
    return (min(s + i % s, last) if i // s == j // s + 1 else last) - j % s


@PAIRINGS
@pytest.mark.parametrize(("name", "options"), CASES)
def test_logits_match_the_formulas(name: str, options: dict[str, Any], pairing: str) -> None:
    encoding = build(name, pairing=pairing, base=500.0, **options)
    q, k = (
        random_tensor(2, H, len(PLACES_REMAPPED), D),
        random_tensor(2, H, len(PLACES_REMAPPED), D, seed=2),
    )

    def offset(row: int, column: int) -> float:
        return (
            remapped(name, int(PLACES_REMAPPED[row]), int(PLACES_REMAPPED[column]), options) if column <= row else 0.0
        )

    expected = pair_by_pair(q, k, lambda b, h, i, j, t: rope(offset(i, j), t, base=500.0), pairing).real.tril()
    assert_close(encoding.score(q, k, PLACES_REMAPPED, PLACES_REMAPPED).tril(), expected, 1e-9)
    each = torch.stack((PLACES_REMAPPED, PLACES_REMAPPED))
    assert_close(encoding.score(q, k, each, each).tril(), expected, 1e-9)
    for row in range(len(PLACES_REMAPPED)):
        for column in range(row + 1):
            assert float(encoding.offsets(PLACES_REMAPPED, PLACES_REMAPPED)[row, column]) == pytest.approx(
                offset(row, column)
            )


@PAIRINGS
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rerope", {"leak": 1.0}),
        ("rerope", {"window": 10**6}),
        ("self-extend", {"group": 1}),
        ("self-extend", {"window": 10**6}),
        ("dual-chunk", {"chunk": 10**6}),
    ],
)
def test_without_remapping_logits_are_ropes(name: str, options: dict[str, Any], pairing: str) -> None:
    q, k, v = (random_tensor(2, H, len(PLACES_REMAPPED), D, seed=seed) for seed in range(3))
    ours, rope = build(name, pairing=pairing, **options), encodings.build("rope", **SIZES, pairing=pairing)
    for causal in (True, False):
        arguments = {"q_positions": PLACES_REMAPPED, "k_positions": PLACES_REMAPPED, "scale": 0.3, "causal": causal}
        assert_close(attend(q, k, v, encoding=ours, **arguments), attend(q, k, v, encoding=rope, **arguments), 1e-9)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_offsets_stay_within_the_training_length(one: int, two: int) -> None:
    i, j = torch.tensor([max(one, two)]), torch.tensor([min(one, two)])
    assert float(build("rerope", window=9).offsets(i, j)) <= 9
    assert -5 <= float(build("dual-chunk", chunk=6, window=3).offsets(i, j)) <= 8
    assert float(build("self-extend", window=8, group=4).offsets(i, j)) <= int(i) // 4 + 6


@pytest.mark.parametrize("moved", [1, 8, 24])
def test_groups_and_chunks_are_shift_invariant_by_their_own_steps(moved: int) -> None:
    groups, chunks = build("self-extend", window=4, group=8), build("dual-chunk", chunk=12, window=3)
    p = torch.arange(40)
    assert torch.equal(groups.offsets(p, p), groups.offsets(p + moved, p + moved)) == (moved % 8 == 0)
    assert torch.equal(chunks.offsets(p, p), chunks.offsets(p + moved, p + moved)) == (moved % 12 == 0)


# ---- temperatures ---------------------------------------------------------------------------------------------------

N_TEMPERED = 9
PLACES_TEMPERED = torch.tensor([0, 1, 2, 7, 8, 63, 64, 8191, 1_048_576])

build_tempered = partial(samples_build, std=1.0)


def attention_options(encoding: encodings.PositionalEncoding, places: torch.Tensor, **more: Any) -> dict[str, Any]:
    return {"encoding": encoding, "q_positions": places, "k_positions": places, "scale": encoding.scale, **more}


@pytest.mark.parametrize("bias", [False, True])
def test_scalable_softmax_matches_the_formula(bias: bool) -> None:
    """n^(s z) over its sum, z = q . k / sqrt(d) and n the number of keys: as the paper writes it, without a bias."""
    encoding = build_tempered("scalable-softmax", bias=bias)
    q, k = random_tensor(2, H, N_TEMPERED, D), random_tensor(2, H, N_TEMPERED, D, seed=2)
    ours = attention_weights(q, k, **attention_options(encoding, torch.arange(N_TEMPERED)))
    state = {name: value.tolist() for name, value in encoding.named_parameters()}
    for b, h, row in itertools.product(range(2), range(H), range(N_TEMPERED)):
        z = [float(q[b, h, row] @ k[b, h, j]) / math.sqrt(D) for j in range(row + 1)]
        if bias:
            parts = [math.exp((state["slope"][h] * math.log(row + 1) + state["level"][h]) * x) for x in z]
        else:
            parts = [(row + 1) ** (state["slope"][h] * x) for x in z]
        expected = torch.tensor([x / sum(parts) for x in parts], dtype=torch.float64)
        assert_close(ours[b, h, row, : row + 1], expected, 1e-12)


def test_llama_4_factors_match_the_formula() -> None:
    encoding = build_tempered("llama4-temperature", floor_scale=64, attn_scale=0.3)
    expected = [1 + 0.3 * math.log(math.floor((i + 1) / 64) + 1) for i in PLACES_TEMPERED.tolist()]
    assert_close(encoding.factor(PLACES_TEMPERED)[0], torch.tensor(expected, dtype=torch.float64), 1e-15)


def test_a_layer_without_rope_matches_transformers_llama_4() -> None:
    """Theirs forms the factor in float32, so that 1e-6 is asked; all else is float64."""
    config = Llama4TextConfig(
        hidden_size=H * D,
        num_attention_heads=H,
        num_key_value_heads=H,
        head_dim=D,
        num_hidden_layers=1,
        no_rope_layers=[0],
        floor_scale=3,
        attn_scale=0.7,
        attn_temperature_tuning=True,
    )
    config._attn_implementation = "eager"
    theirs = randomised(llama4.Llama4TextAttention(config, 0), 0.5).double().eval()
    assert not theirs.use_rope
    x = random_tensor(2, 20, H * D)
    hidden = torch.full((20, 20), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    expected = theirs(x, (x, x), hidden)[0]

    def heads(layer: nn.Module) -> torch.Tensor:
        return layer(x).unflatten(-1, (H, D)).transpose(1, 2)

    encoding = build_tempered("llama4-temperature", floor_scale=3, attn_scale=0.7)
    q, k, v = heads(theirs.q_proj), heads(theirs.k_proj), heads(theirs.v_proj)
    out = attend(q, k, v, **attention_options(encoding, torch.arange(20)))
    assert_close(theirs.o_proj(out.transpose(1, 2).flatten(-2)), expected, 1e-6)
    plain = attend(q, k, v, **attention_options(encodings.build("nope", **SIZES), torch.arange(20)))
    assert float((plain - out).detach().abs().max()) > 0.01


# ---- segments -------------------------------------------------------------------------------------------------------

N_SEGMENTS = 12
SEPARATORS = [3, 7]
ACROSS = pytest.mark.parametrize("across", ["rope", "alibi"])
INSIDE = pytest.mark.parametrize("inside", ["learned", "sinusoidal"])

build_segments = partial(samples_build, "bipe", std=1.0)


def counted_positions(tokens: list[int], segment: int = 0, place: int = 0) -> list[list[int]]:
    positions = []
    for token in tokens:
        positions.append([segment, place])
        segment, place = (segment + 1, 0) if token in SEPARATORS else (segment, place + 1)
    return positions


# ---- positions ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 50), st.integers(0, 50))
def test_a_separator_ends_its_segment(tokens: list[int], segment: int, place: int) -> None:
    ids = torch.tensor(tokens, dtype=torch.long)
    assert segment_positions(ids, SEPARATORS).tolist() == counted_positions(tokens)
    first = torch.tensor([segment, place])
    assert segment_positions(ids, SEPARATORS, first=first).tolist() == counted_positions(tokens, segment, place)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=20), st.data())
def test_decoding_continues_the_segments_of_the_prompt(tokens: list[int], data: st.DataObject) -> None:
    ids = torch.tensor([tokens, tokens[::-1]])
    full = segment_positions(ids, SEPARATORS)
    cut = data.draw(st.integers(1, len(tokens) - 1))
    following = next_position(full[:, cut - 1], ids[:, cut - 1], SEPARATORS)
    assert torch.equal(following, full[:, cut])
    assert torch.equal(segment_positions(ids[:, cut:], SEPARATORS, first=following), full[:, cut:])


def test_one_dimensional_positions_are_segments_of_equal_length() -> None:
    numbers = torch.arange(7)
    assert torch.equal(build_segments(segment=3).to_positions(numbers), torch.stack((numbers // 3, numbers % 3), -1))


# ---- what enters ----------------------------------------------------------------------------------------------------


@ACROSS
@INSIDE
def test_inner_positions_are_vectors_and_segments_rope_or_alibi(across: str, inside: str) -> None:
    encoding = build_segments(across=across, inside=inside, places_max=4, slope_factor=2.5)
    positions = segment_positions(torch.tensor([1, 2, 7, 1, 1, 1, 1, 1, 3, 3, 1, 1]), SEPARATORS)
    segments, places = positions.unbind(-1)
    x = random_tensor(2, N_SEGMENTS, SIZES["d_model"])
    if inside == "learned":
        expected = x + encoding.get_parameter("weight")[places.clamp(max=3)]
    else:
        expected = encodings.build("sinusoidal", **SIZES).embed(x, places)
    assert_close(encoding.embed(x, positions), expected, 1e-15)
    q, k = random_tensor(2, H, N_SEGMENTS, D), random_tensor(2, H, N_SEGMENTS, D, seed=2)
    relative = encodings.build(across, **SIZES)
    if across == "rope":
        expected = attention_logits(q, k, **attention_options(relative, segments))
    else:
        slopes = relative.get_buffer("slopes")[:, None, None]
        expected = q @ k.mT * D**-0.5 - 2.5 * slopes * (segments[:, None] - segments).abs()
        expected = expected.masked_fill(torch.ones(N_SEGMENTS, N_SEGMENTS, dtype=torch.bool).triu(1), float("-inf"))
    ours = attention_logits(q, k, **attention_options(encoding, positions))
    assert_close(ours.tril(), expected.tril(), 1e-12)
