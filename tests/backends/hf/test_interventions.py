"""Changes of attention are the same thing done by hand to the model's own angles, tables, outputs and logits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backends.hf import manual_changes
from tests.backends.hf.models import (
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
    full_state,
    tiny,
)
from torch import Tensor

from toeplens.backends.hf import Change, intervene
from toeplens.backends.hf.interventions import InvalidTarget, changed_outputs
from toeplens.encodings import FrequencyMask
from toeplens.encodings.rotary import swap_bands
from toeplens.utils import InputError

OUT_PROJECTION = manual_changes.ROTARY["LlamaForCausalLM"][1]
SEVERAL = [
    Change(layer=0, heads=(1,), output="zero"),
    Change(layer=0, heads=(2, 3), speed=0.0),
    Change(layer=1, bands=FrequencyMask(drop=(3,))),
]
WIDE = {"StableLmForCausalLM", "GPTNeoXForCausalLM"}  # whose rotation, of a quarter of the width, has else one pair


@pytest.mark.parametrize("kind", manual_changes.ALL)
def test_zeroing_a_head_zeroes_its_projection_input(kind: str) -> None:
    """With nothing changed the pass is the plain one; nothing is left behind."""
    sizes, place = manual_changes.ALL[kind]
    model = tiny(kind, **sizes)
    plain, before = manual_changes.logits(model), full_state(model)
    with manual_changes.edit_outputs(model, place, 1, 4, manual_changes.zero_heads(2)):
        expected = manual_changes.logits(model)
    assert manual_changes.is_different(expected, plain)
    with intervene(model, []):
        assert manual_changes.is_close(manual_changes.logits(model), plain)
    with intervene(model, Change(layer=1, heads=(2,), output="zero")):
        assert manual_changes.is_close(manual_changes.logits(model), expected)
    assert full_state(model) == before
    assert torch.equal(manual_changes.logits(model), plain)


@pytest.mark.parametrize("kind", ["GPTJForCausalLM", *manual_changes.ROTARY])
def test_doubling_the_speed_doubles_the_positions(kind: str) -> None:
    model = tiny(kind, **manual_changes.ALL[kind][0])
    expected = manual_changes.logits(model, INPUTS | {"position_ids": 2 * torch.arange(TOKENS).unsqueeze(0)})
    assert manual_changes.is_different(expected, manual_changes.logits(model))
    with intervene(model, [Change(layer=layer, speed=2.0) for layer in range(2)]):
        assert manual_changes.is_close(manual_changes.logits(model), expected)


@pytest.mark.parametrize("kind", manual_changes.ROTARY)
def test_frequency_changes_match_editing_the_angle_table(kind: str) -> None:
    """Still, silent and exchanged pairs, of which the models have 2 or 4; and all of them stopped."""
    model = tiny(kind, **manual_changes.ROTARY[kind][0] | ({"hidden_size": 64} if kind in WIDE else {}))
    plain, (_, call) = manual_changes.logits(model), calls_in(model)
    pairs = len(call.rotation.frequencies) if call.rotation else 0
    for change, edited in (
        ({"speed": 0.0}, manual_changes.freeze),
        ({"bands": FrequencyMask(freeze=(0,))}, manual_changes.edit_pairs([0], manual_changes.freeze)),
        ({"bands": FrequencyMask(drop=(1,))}, manual_changes.edit_pairs([1], manual_changes.drop)),
        ({"bands": FrequencyMask(permute=swap_bands(pairs, [0], [1]))}, manual_changes.swap(0, 1)),
    ):
        with manual_changes.edit_angles(model, 1, edited):
            expected = manual_changes.logits(model)
        assert manual_changes.is_different(expected, plain), change
        with intervene(model, Change(layer=1, **change)):
            assert manual_changes.is_close(manual_changes.logits(model), expected), change


def test_changing_one_head_of_a_group_or_the_whole_group() -> None:
    """Outputs before the projection: of a head that is changed as where all are, of others as they were."""
    model = tiny("LlamaForCausalLM", **manual_changes.LLAMA)
    plain = manual_changes.head_outputs(model, OUT_PROJECTION, 1)
    with manual_changes.edit_angles(model, 1, manual_changes.freeze):
        still = manual_changes.head_outputs(model, OUT_PROJECTION, 1)
    for change, heads in (
        (Change(layer=1, heads=(3,), speed=0.0), {3}),
        (Change(layer=1, groups=(0,), speed=0.0), {0, 1}),
    ):
        with intervene(model, change):
            actual = manual_changes.head_outputs(model, OUT_PROJECTION, 1)
        for head in range(4):
            expected = (still if head in heads else plain)[:, :, head]
            torch.testing.assert_close(actual[:, :, head], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_nested_changes_combine(order: list[int]) -> None:
    """To the last bit, and on the way out as on the way in; an empty one is as none."""
    model = tiny("LlamaForCausalLM", **manual_changes.LLAMA)
    before, changes = full_state(model), [SEVERAL[each] for each in order]
    together = []
    for count in range(4):
        with intervene(model, changes[:count]):
            together.append(manual_changes.logits(model))
    assert all(manual_changes.is_different(x, y) for x, y in pairwise(together))
    with intervene(model, ()):
        assert torch.equal(manual_changes.logits(model), together[0])
        with intervene(model, changes[0]):
            assert torch.equal(manual_changes.logits(model), together[1])
            with intervene(model, []), intervene(model, changes[1:]):
                assert torch.equal(manual_changes.logits(model), together[3])
            with intervene(model, changes[1]):
                assert torch.equal(manual_changes.logits(model), together[2])
            assert torch.equal(manual_changes.logits(model), together[1])
        assert torch.equal(manual_changes.logits(model), together[0])
    assert full_state(model) == before


def test_a_captured_pass_refuses_untracked_changes() -> None:
    """Neither where another takes it apart, nor where the model is a part of one that is changed."""
    model = tiny("LlamaForCausalLM", **manual_changes.LLAMA)
    before = full_state(model)
    with intervene(model, SEVERAL), pytest.raises(InputError, match=r"^model: LlamaForCausalLM must not run with"):
        calls_in(model)
    inside = r"^model: LlamaModel must not run with `intervene` inside another pass that is analyzed or changed"
    for first, second in ((model, model.model), (model.model, model)):
        with intervene(first, SEVERAL[0]), intervene(second, SEVERAL[1]), pytest.raises(InputError, match=inside):
            manual_changes.logits(model)
    assert full_state(model) == before


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", manual_changes.LLAMA),
    "window": ("MistralForCausalLM", NARROW),
    "cap": ("Gemma2ForCausalLM", NARROW),
    "sinks": ("GptOssForCausalLM", NARROW | MIXED),
    "partial": ("GPTNeoXForCausalLM", SIZES),
    "alibi": ("BloomForCausalLM", BLOOM),
    "encoder": ("EsmForMaskedLM", SIZES | {"position_embedding_type": "rotary", "mask_token_id": 3}),
}


@pytest.mark.parametrize("part", ["positional", "symbolic"])
@pytest.mark.parametrize("name", PARTS)
def test_logit_components_are_the_means_of_each_querys_table(name: str, part: Any) -> None:
    kind, sizes = PARTS[name]
    call = calls_in(tiny(kind, **sizes))[0]
    actual = changed_outputs(call, Change(layer=0, heads=(3,), attention=part))
    expected = manual_changes.reference_component(call, 3, part, range(TOKENS))
    torch.testing.assert_close(actual[:, :, 3].double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(actual[:, :, :3], call.heads[:, :, :3].to(actual.dtype))


WAYS = ["mean", "resample"]
LENGTHS = [12, 7, 12, 9]


def text(rows: int, seed: int = 5) -> Tensor:
    return torch.randint(4, 31, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def with_other_padding(tokens: Tensor, mask: Tensor, seed: int) -> Tensor:
    """The same with other tokens in the place of the padding."""
    return torch.where(mask.bool(), tokens, text(len(tokens), seed))


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "MistralForCausalLM", "BertForMaskedLM"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("way", WAYS)
def test_mean_and_resample_ignore_padding(way: Any, side: str, kind: str) -> None:
    place = "bert.encoder.layer.{}.attention.output.dense" if kind == "BertForMaskedLM" else OUT_PROJECTION
    model, mask = tiny(kind, **NARROW), manual_changes.mask_of(LENGTHS, side)
    inputs, is_token = {"input_ids": text(4), "attention_mask": mask}, mask.bool()
    with manual_changes.edit_outputs(model, place, 0, 4, manual_changes.reference_outputs(way, is_token, [0, 3])):
        expected = manual_changes.logits(model, inputs)[is_token]
    assert manual_changes.is_different(expected, manual_changes.logits(model, inputs)[is_token])
    with intervene(model, Change(layer=0, heads=(0, 3), output=way, seed=2)):
        assert manual_changes.is_close(manual_changes.logits(model, inputs)[is_token], expected)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, TOKENS), min_size=1, max_size=2), seed=st.integers(0, 999))
def test_padding_token_values_are_ignored(way: Any, side: str, lengths: list[int], seed: int) -> None:
    model = tiny("LlamaForCausalLM", **manual_changes.LLAMA)
    mask = manual_changes.mask_of([TOKENS, *lengths, TOKENS], side)
    with intervene(model, [Change(layer=layer, output=way) for layer in range(2)]):
        actual, again = (
            manual_changes.logits(model, {"input_ids": tokens, "attention_mask": mask})[mask.bool()]
            for tokens in (text(len(mask)), with_other_padding(text(len(mask)), mask, seed))
        )
    assert manual_changes.is_close(actual, again, 1e-6)


def test_resampling_needs_a_second_sequence_of_full_length() -> None:
    model = tiny("LlamaForCausalLM", **manual_changes.LLAMA)
    inputs = {"input_ids": text(2), "attention_mask": manual_changes.mask_of([TOKENS, 5])}
    refused = r"^output must not be 'resample' if the batch has no other sequence"
    with intervene(model, Change(layer=0, output="resample")), pytest.raises(InputError, match=refused):
        manual_changes.logits(model, inputs)
    with intervene(model, Change(layer=1, output="mean")):  # where it is alone, its own are the mean
        assert manual_changes.is_close(
            manual_changes.logits(model, inputs)[0, 5:],
            manual_changes.logits(tiny("LlamaForCausalLM", **manual_changes.LLAMA), inputs)[0, 5:],
        )


@pytest.mark.parametrize("way", WAYS)
def test_unknown_padding_is_refused(way: Any) -> None:
    """Of a cross attention by itself; of XLNet, where what is padding sees itself; not of its sequences without any."""
    inputs = {"input_ids": text(3), "decoder_input_ids": text(3)}
    calls = calls_in(tiny("T5ForConditionalGeneration", **T5), inputs)
    cross = next(call for call in calls if call.kind == "cross")
    with pytest.raises(InputError, match=r"^output: padding among the queries of decoder.* is unknown"):
        changed_outputs(cross, Change(layer=0, kind="cross", output=way))
    model = tiny("XLNetLMHeadModel", **XLNET)
    with intervene(model, Change(layer=0, output=way)):
        assert manual_changes.logits(model, {"input_ids": text(3)}).isfinite().all()
        with pytest.raises(InputError, match=r"^output: a token of transformer.* may be padding"):
            manual_changes.logits(model, {"input_ids": text(3), "attention_mask": manual_changes.mask_of([12, 12, 9])})


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
            Change(layer=0, bands=FrequencyMask(permute=(1, 0))),
            r"permute must name each of 0 to 3 once, got \[1, 0\] \(model.* has 4 pairs\)",
        ),
        ("GPT2LMHeadModel", Change(layer=0, bands=FrequencyMask(permute=(0,))), "permute: .* has no rotation"),
    ],
)
def test_invalid_targets_are_refused_in_one_sentence(kind: str, change: Change, sentence: str) -> None:
    model = tiny(kind, **manual_changes.ALL[kind][0])
    before = full_state(model)
    with intervene(model, change), pytest.raises(InputError, match=f"^{sentence}"):
        manual_changes.logits(model)
    assert full_state(model) == before


def test_a_head_is_changed_once_and_encoder_decoders_need_a_stack_name() -> None:
    model = tiny("LlamaForCausalLM", **manual_changes.LLAMA)
    twice = [Change(layer=0, heads=(1, 2), output="zero"), Change(layer=0, heads=(2,), speed=0.0)]
    with intervene(model, twice), pytest.raises(InputError, match=r"^changes must not change head 2 of model.* twice"):
        manual_changes.logits(model)
    model = tiny("T5ForConditionalGeneration", **T5)
    inputs = INPUTS | {"decoder_input_ids": INPUTS["input_ids"]}
    with intervene(model, Change(layer=0, output="zero")), pytest.raises(InputError, match=r"^side must be set"):
        manual_changes.logits(model, inputs)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "bands, speed, bias, attention or output must be set"),
        ({"speed": 0.0, "output": "zero"}, "speed and output must not both be set"),
        ({"heads": (0,), "groups": (0,), "speed": 0.0}, "heads and groups must not both be set"),
        ({"heads": 3, "speed": 0.0}, "heads must be whole numbers in a tuple, got 3"),
        ({"bands": FrequencyMask(heads=(0,))}, "bands must not have heads"),
        ({"speed": float("nan")}, "speed must be from .*, got nan"),
    ],
)
def test_incompatible_changes_are_refused_immediately(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{sentence}"):
        Change(layer=0, **fields)


def test_attention_weights_are_refused() -> None:
    """Those of a configuration are left out."""
    model = tiny("LlamaForCausalLM", **manual_changes.LLAMA, attn_implementation="eager", output_attentions=True)
    with intervene(model, Change(layer=0, speed=0.0)):
        with pytest.raises(InputError, match=r"^output_attentions must not be set inside `intervene`"):
            model(**INPUTS, output_attentions=True)
        assert model(**INPUTS).attentions is None
    assert len(model(**INPUTS).attentions) == 2


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_runs_uncompiled(in_place: bool) -> None:
    from torch._dynamo import eval_frame

    model, change = tiny("LlamaForCausalLM", **manual_changes.LLAMA), Change(layer=0, heads=(1,), speed=0.0)
    with intervene(model, change):
        expected = manual_changes.logits(model)
    if in_place:
        model.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    before = full_state(model)
    assert len(calls_in(model)) == 2
    with intervene(model, change):
        assert torch.equal(manual_changes.logits(model), expected)
    assert full_state(model) == before
    assert eval_frame._stance.stance == "default"


def test_a_key_cache_is_refused_and_other_models_are_unaffected() -> None:
    model, other = (tiny("LlamaForCausalLM", **manual_changes.LLAMA) for _ in range(2))
    with torch.no_grad():
        cache = model(**INPUTS, use_cache=True).past_key_values
    with intervene(model, Change(layer=0, speed=0.0)):
        with pytest.raises(InputError, match=r"^inputs must contain all tokens of a pass and not past_key_values"):
            model(**INPUTS, past_key_values=cache)
        assert manual_changes.is_different(manual_changes.logits(model), manual_changes.logits(other))
    assert torch.equal(manual_changes.logits(model), manual_changes.logits(other))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (Change(layer=2, output="zero"), "layers must be from 1 to 2 in self attention, got 3."),
        (Change(layer=0, heads=(1, 4), output="zero"), "heads must be different numbers from 1 to 4 in {}, got 2, 5."),
        (
            Change(layer=0, bands=FrequencyMask(drop=(0, 0))),
            "drop must be different numbers from 1 to 4 in {}, got 1, 1.",
        ),
    ],
)
def test_messages_count_from_1(change: Change, sentence: str) -> None:
    model = tiny("LlamaForCausalLM", **manual_changes.LLAMA)
    with intervene(model, change), pytest.raises(InvalidTarget) as caught:
        manual_changes.logits(model)
    message = caught.value.counted_from_one("layers" if "layers" in sentence else None)
    assert str(message) == sentence.format("model.layers.0.self_attn (LlamaAttention)")
    assert str(message.counted_from_one()) == str(message)


@pytest.mark.parametrize(
    ("kind", "sizes"), [("GPT2LMHeadModel", GPT), ("OPTForCausalLM", manual_changes.ALL["OPTForCausalLM"][0])]
)
def test_sequences_beyond_the_position_table_are_one_sentence(kind: str, sizes: dict[str, Any]) -> None:
    model = tiny(kind, **sizes)
    before = full_state(model)
    with intervene(model, Change(layer=0, heads=(1,), output="zero")):
        with pytest.raises(
            InputError, match=r"^inputs must have at most 64 tokens, the positions of the model, got 65\.$"
        ):
            manual_changes.logits(model, {"input_ids": torch.full((1, 65), 5)})
        assert manual_changes.logits(model, {"input_ids": torch.full((1, 64), 5)}).isfinite().all()
    assert full_state(model) == before
