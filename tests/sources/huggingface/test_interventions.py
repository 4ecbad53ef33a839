"""Changes of attention are the same thing done by hand to the model's own angles, tables, outputs and logits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sources.huggingface import ways
from tests.sources.huggingface.models import (
    BLOOM,
    GPT,
    INPUTS,
    MIXED,
    NARROW,
    SIZES,
    T5,
    TOKENS,
    XLNET,
    calls_in,
    state,
    tiny,
)
from torch import Tensor

from toeplens.encodings import BandControl
from toeplens.encodings.rotary import swapped
from toeplens.ground import InputError
from toeplens.sources.huggingface import Change, intervened
from toeplens.sources.huggingface.interventions import NotThere, changed_outputs

PLACE = ways.ROTARY["LlamaForCausalLM"][1]
SEVERAL = [
    Change(layer=0, heads=(1,), output="zero"),
    Change(layer=0, heads=(2, 3), speed=0.0),
    Change(layer=1, bands=BandControl(silent=(3,))),
]
WIDE = {"StableLmForCausalLM", "GPTNeoXForCausalLM"}  # whose rotation, of a quarter of the width, has else one pair


@pytest.mark.parametrize("kind", ways.ALL)
def test_a_silent_head_is_one_whose_place_before_the_projection_is_empty(kind: str) -> None:
    """With nothing changed the pass is the plain one; nothing is left behind."""
    sizes, place = ways.ALL[kind]
    model = tiny(kind, **sizes)
    plain, before = ways.logits(model), state(model)
    with ways.put_out(model, place, 1, 4, ways.emptied(2)):
        wanted = ways.logits(model)
    assert ways.apart(wanted, plain)
    with intervened(model, []):
        assert ways.near(ways.logits(model), plain)
    with intervened(model, Change(layer=1, heads=(2,), output="zero")):
        assert ways.near(ways.logits(model), wanted)
    assert state(model) == before
    assert torch.equal(ways.logits(model), plain)


@pytest.mark.parametrize("kind", ["GPTJForCausalLM", *ways.ROTARY])
def test_tokens_twice_as_far_apart_are_those_of_twice_the_position(kind: str) -> None:
    model = tiny(kind, **ways.ALL[kind][0])
    wanted = ways.logits(model, INPUTS | {"position_ids": 2 * torch.arange(TOKENS).unsqueeze(0)})
    assert ways.apart(wanted, ways.logits(model))
    with intervened(model, [Change(layer=layer, speed=2.0) for layer in range(2)]):
        assert ways.near(ways.logits(model), wanted)


@pytest.mark.parametrize("kind", ways.ROTARY)
def test_bands_are_columns_of_the_model_s_own_table_of_angles(kind: str) -> None:
    """Still, silent and exchanged pairs, of which the models have 2 or 4; and all of them stopped."""
    model = tiny(kind, **ways.ROTARY[kind][0] | ({"hidden_size": 64} if kind in WIDE else {}))
    plain, (_, call) = ways.logits(model), calls_in(model)
    pairs = len(call.rotation.frequencies) if call.rotation else 0
    for change, edited in (
        ({"speed": 0.0}, ways.stopped),
        ({"bands": BandControl(still=(0,))}, ways.of_pairs([0], ways.stopped)),
        ({"bands": BandControl(silent=(1,))}, ways.of_pairs([1], ways.silenced)),
        ({"bands": BandControl(order=swapped(pairs, [0], [1]))}, ways.exchanged(0, 1)),
    ):
        with ways.angles(model, 1, edited):
            wanted = ways.logits(model)
        assert ways.apart(wanted, plain), change
        with intervened(model, Change(layer=1, **change)):
            assert ways.near(ways.logits(model), wanted), change


def test_one_head_of_a_group_and_a_whole_group() -> None:
    """Outputs before the projection: of a head that is changed as where all are, of others as they were."""
    model = tiny("LlamaForCausalLM", **ways.LLAMA)
    plain = ways.heads_in(model, PLACE, 1)
    with ways.angles(model, 1, ways.stopped):
        still = ways.heads_in(model, PLACE, 1)
    for change, heads in (
        (Change(layer=1, heads=(3,), speed=0.0), {3}),
        (Change(layer=1, groups=(0,), speed=0.0), {0, 1}),
    ):
        with intervened(model, change):
            found = ways.heads_in(model, PLACE, 1)
        for head in range(4):
            wanted = (still if head in heads else plain)[:, :, head]
            torch.testing.assert_close(found[:, :, head], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_one_in_another_is_one_with_the_changes_of_both(order: list[int]) -> None:
    """To the last bit, and on the way out as on the way in; an empty one is as none."""
    model = tiny("LlamaForCausalLM", **ways.LLAMA)
    before, changes = state(model), [SEVERAL[each] for each in order]
    together = []
    for count in range(4):
        with intervened(model, changes[:count]):
            together.append(ways.logits(model))
    assert all(ways.apart(x, y) for x, y in pairwise(together))
    with intervened(model, ()):
        assert torch.equal(ways.logits(model), together[0])
        with intervened(model, changes[0]):
            assert torch.equal(ways.logits(model), together[1])
            with intervened(model, []), intervened(model, changes[1:]):
                assert torch.equal(ways.logits(model), together[3])
            with intervened(model, changes[1]):
                assert torch.equal(ways.logits(model), together[2])
            assert torch.equal(ways.logits(model), together[1])
        assert torch.equal(ways.logits(model), together[0])
    assert state(model) == before


def test_a_pass_that_is_taken_apart_is_not_changed_in_silence() -> None:
    """Neither where another takes it apart, nor where the model is a part of one that is changed."""
    model = tiny("LlamaForCausalLM", **ways.LLAMA)
    before = state(model)
    with intervened(model, SEVERAL), pytest.raises(InputError, match=r"^model: LlamaForCausalLM must not run with"):
        calls_in(model)
    inside = r"^model: LlamaModel must not run with `intervened` inside another pass that is analyzed or changed"
    for first, second in ((model, model.model), (model.model, model)):
        with intervened(first, SEVERAL[0]), intervened(second, SEVERAL[1]), pytest.raises(InputError, match=inside):
            ways.logits(model)
    assert state(model) == before


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", ways.LLAMA),
    "window": ("MistralForCausalLM", NARROW),
    "cap": ("Gemma2ForCausalLM", NARROW),
    "sinks": ("GptOssForCausalLM", NARROW | MIXED),
    "partial": ("GPTNeoXForCausalLM", SIZES),
    "alibi": ("BloomForCausalLM", BLOOM),
    "encoder": ("EsmForMaskedLM", SIZES | {"position_embedding_type": "rotary", "mask_token_id": 3}),
}


@pytest.mark.parametrize("part", ["positional", "symbolic"])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_the_logits_are_the_means_of_each_query_s_table(name: str, part: Any) -> None:
    kind, sizes = PARTS[name]
    call = calls_in(tiny(kind, **sizes))[0]
    found = changed_outputs(call, Change(layer=0, heads=(3,), attention=part))
    wanted = ways.brute_force(call, 3, part, range(TOKENS))
    torch.testing.assert_close(found[:, :, 3].double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(found[:, :, :3], call.heads[:, :, :3].to(found.dtype))


WAYS = ["mean", "resample"]
LENGTHS = [12, 7, 12, 9]


def text(rows: int, seed: int = 5) -> Tensor:
    return torch.randint(4, 31, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def otherwise_padded(tokens: Tensor, mask: Tensor, seed: int) -> Tensor:
    """The same with other tokens in the place of the padding."""
    return torch.where(mask.bool(), tokens, text(len(tokens), seed))


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "MistralForCausalLM", "BertForMaskedLM"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("way", WAYS)
def test_in_a_padded_batch_they_are_those_of_the_tokens_alone(way: Any, side: str, kind: str) -> None:
    place = "bert.encoder.layer.{}.attention.output.dense" if kind == "BertForMaskedLM" else PLACE
    model, mask = tiny(kind, **NARROW), ways.mask_of(LENGTHS, side)
    inputs, there = {"input_ids": text(4), "attention_mask": mask}, mask.bool()
    with ways.put_out(model, place, 0, 4, ways.by_loops(way, there, [0, 3])):
        wanted = ways.logits(model, inputs)[there]
    assert ways.apart(wanted, ways.logits(model, inputs)[there])
    with intervened(model, Change(layer=0, heads=(0, 3), output=way, seed=2)):
        assert ways.near(ways.logits(model, inputs)[there], wanted)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, TOKENS), min_size=1, max_size=2), seed=st.integers(0, 999))
def test_other_tokens_in_the_padding_s_place_change_nothing(way: Any, side: str, lengths: list[int], seed: int) -> None:
    model, mask = tiny("LlamaForCausalLM", **ways.LLAMA), ways.mask_of([TOKENS, *lengths, TOKENS], side)
    with intervened(model, [Change(layer=layer, output=way) for layer in range(2)]):
        found, again = (
            ways.logits(model, {"input_ids": tokens, "attention_mask": mask})[mask.bool()]
            for tokens in (text(len(mask)), otherwise_padded(text(len(mask)), mask, seed))
        )
    assert ways.near(found, again, 1e-6)


def test_the_longest_sequence_has_another_to_draw_from_or_is_refused() -> None:
    model = tiny("LlamaForCausalLM", **ways.LLAMA)
    inputs = {"input_ids": text(2), "attention_mask": ways.mask_of([TOKENS, 5])}
    refused = r"^output must not be 'resample' if the batch has no other sequence"
    with intervened(model, Change(layer=0, output="resample")), pytest.raises(InputError, match=refused):
        ways.logits(model, inputs)
    with intervened(model, Change(layer=1, output="mean")):  # where it is alone, its own are the mean
        assert ways.near(
            ways.logits(model, inputs)[0, 5:], ways.logits(tiny("LlamaForCausalLM", **ways.LLAMA), inputs)[0, 5:]
        )


@pytest.mark.parametrize("way", WAYS)
def test_where_padding_is_not_known_it_is_refused(way: Any) -> None:
    """Of a cross attention by itself; of XLNet, where what is padding sees itself; not of its sequences without any."""
    inputs = {"input_ids": text(3), "decoder_input_ids": text(3)}
    calls = calls_in(tiny("T5ForConditionalGeneration", **T5), inputs)
    cross = next(call for call in calls if call.kind == "cross")
    with pytest.raises(InputError, match=r"^output: padding among the queries of decoder.* is unknown"):
        changed_outputs(cross, Change(layer=0, kind="cross", output=way))
    model = tiny("XLNetLMHeadModel", **XLNET)
    with intervened(model, Change(layer=0, output=way)):
        assert ways.logits(model, {"input_ids": text(3)}).isfinite().all()
        with pytest.raises(InputError, match=r"^output: a token of transformer.* may be padding"):
            ways.logits(model, {"input_ids": text(3), "attention_mask": ways.mask_of([12, 12, 9])})


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        (
            "LlamaForCausalLM",
            Change(layer=0, groups=(2,), output="zero"),
            r"groups must be different numbers from 0 to 1 in .*, got \[2\]",
        ),
        ("LlamaForCausalLM", Change(layer=0, bias=False), r"bias: model.* adds no bias to its logits\."),
        (
            "LlamaForCausalLM",
            Change(layer=0, bands=BandControl(order=(1, 0))),
            r"order must name each of 0 to 3 once, got \[1, 0\] \(model.* has 4 pairs\)",
        ),
        ("GPT2LMHeadModel", Change(layer=0, bands=BandControl(order=(0,))), "order: .* has no rotation"),
    ],
)
def test_what_is_not_there_is_one_sentence(kind: str, change: Change, sentence: str) -> None:
    model = tiny(kind, **ways.ALL[kind][0])
    before = state(model)
    with intervened(model, change), pytest.raises(InputError, match=f"^{sentence}"):
        ways.logits(model)
    assert state(model) == before


def test_a_head_is_changed_once_and_a_side_is_named_where_there_are_two() -> None:
    model = tiny("LlamaForCausalLM", **ways.LLAMA)
    twice = [Change(layer=0, heads=(1, 2), output="zero"), Change(layer=0, heads=(2,), speed=0.0)]
    with intervened(model, twice), pytest.raises(InputError, match=r"^changes must not change head 2 of model.* twice"):
        ways.logits(model)
    model = tiny("T5ForConditionalGeneration", **T5)
    inputs = INPUTS | {"decoder_input_ids": INPUTS["input_ids"]}
    with intervened(model, Change(layer=0, output="zero")), pytest.raises(InputError, match=r"^side must be set"):
        ways.logits(model, inputs)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "bands, speed, bias, attention or output must be set"),
        ({"speed": 0.0, "output": "zero"}, "speed and output must not both be set"),
        ({"heads": (0,), "groups": (0,), "speed": 0.0}, "heads and groups must not both be set"),
        ({"bands": BandControl(heads=(0,))}, "bands must not have heads"),
        ({"speed": float("nan")}, "speed must be from .*, got nan"),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{sentence}"):
        Change(layer=0, **fields)


def test_a_cache_of_keys_is_refused_and_another_model_is_left_alone() -> None:
    model, other = (tiny("LlamaForCausalLM", **ways.LLAMA) for _ in range(2))
    with torch.no_grad():
        cache = model(**INPUTS, use_cache=True).past_key_values
    with intervened(model, Change(layer=0, speed=0.0)):
        with pytest.raises(InputError, match=r"^inputs must contain all tokens of a pass and not past_key_values"):
            model(**INPUTS, past_key_values=cache)
        assert ways.apart(ways.logits(model), ways.logits(other))
    assert torch.equal(ways.logits(model), ways.logits(other))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (Change(layer=2, output="zero"), "layers must be from 1 to 2 in self attention, got 3."),
        (Change(layer=0, heads=(1, 4), output="zero"), "heads must be different numbers from 1 to 4 in {}, got 2, 5."),
        (
            Change(layer=0, bands=BandControl(silent=(0, 0))),
            "silent must be different numbers from 1 to 4 in {}, got 1, 1.",
        ),
    ],
)
def test_people_count_from_1(change: Change, sentence: str) -> None:
    model = tiny("LlamaForCausalLM", **ways.LLAMA)
    with intervened(model, change), pytest.raises(NotThere) as caught:
        ways.logits(model)
    told = caught.value.for_people("layers" if "layers" in sentence else None)
    assert str(told) == sentence.format("model.layers.0.self_attn (LlamaAttention)")
    assert str(told.for_people()) == str(told)


@pytest.mark.parametrize(
    ("kind", "sizes"), [("GPT2LMHeadModel", GPT), ("OPTForCausalLM", ways.ALL["OPTForCausalLM"][0])]
)
def test_more_tokens_than_a_table_of_positions_has_are_one_sentence(kind: str, sizes: dict[str, Any]) -> None:
    model = tiny(kind, **sizes)
    before = state(model)
    with intervened(model, Change(layer=0, heads=(1,), output="zero")):
        with pytest.raises(
            InputError, match=r"^inputs must have at most 64 tokens, the positions of the model, got 65\.$"
        ):
            ways.logits(model, {"input_ids": torch.full((1, 65), 5)})
        assert ways.logits(model, {"input_ids": torch.full((1, 64), 5)}).isfinite().all()
    assert state(model) == before
