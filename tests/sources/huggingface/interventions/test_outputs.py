"""Means and other sequences' outputs, and padding, which neither gives nor gets any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sources.huggingface.interventions.ways import LLAMA, ROTARY, apart, by_loops, logits, mask_of, near, put_out
from tests.sources.huggingface.models import NARROW, T5, TOKENS, XLNET, calls_in, tiny
from torch import Tensor

from toeplens.ground import InputError
from toeplens.sources.huggingface import Change, intervened
from toeplens.sources.huggingface.interventions.change import changed_outputs

PLACE = ROTARY["LlamaForCausalLM"][1]
WAYS = ["mean", "resample"]
LENGTHS = [12, 7, 12, 9]


def text(rows: int, seed: int = 5) -> Tensor:
    return torch.randint(4, 31, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def otherwise_padded(tokens: Tensor, mask: Tensor, seed: int) -> Tensor:
    """The same with other tokens in the place of the padding."""
    return torch.where(mask.bool(), tokens, text(len(tokens), seed))


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "MistralForCausalLM", "BertForMaskedLM"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("way", WAYS)
def test_in_a_padded_batch_they_are_those_of_the_tokens_alone(way: Any, side: str, kind: str) -> None:
    place = "bert.encoder.layer.{}.attention.output.dense" if kind == "BertForMaskedLM" else PLACE
    model, mask = tiny(kind, **NARROW), mask_of(LENGTHS, side)
    inputs, there = {"input_ids": text(4), "attention_mask": mask}, mask.bool()
    with put_out(model, place, 0, 4, by_loops(way, there, [0, 3])):
        wanted = logits(model, inputs)[there]
    assert apart(wanted, logits(model, inputs)[there])
    with intervened(model, Change(layer=0, heads=(0, 3), output=way, seed=2)):
        assert near(logits(model, inputs)[there], wanted)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, TOKENS), min_size=1, max_size=2), seed=st.integers(0, 999))
def test_other_tokens_in_the_padding_s_place_change_nothing(way: Any, side: str, lengths: list[int], seed: int) -> None:
    model, mask = tiny("LlamaForCausalLM", **LLAMA), mask_of([TOKENS, *lengths, TOKENS], side)
    with intervened(model, [Change(layer=layer, output=way) for layer in range(2)]):
        found, again = (
            logits(model, {"input_ids": tokens, "attention_mask": mask})[mask.bool()]
            for tokens in (text(len(mask)), otherwise_padded(text(len(mask)), mask, seed))
        )
    assert near(found, again, 1e-6)


def test_the_longest_sequence_has_another_to_draw_from_or_is_refused() -> None:
    model = tiny("LlamaForCausalLM", **LLAMA)
    inputs = {"input_ids": text(2), "attention_mask": mask_of([TOKENS, 5])}
    refused = r"^output must not be 'resample' if the batch has no other sequence"
    with intervened(model, Change(layer=0, output="resample")), pytest.raises(InputError, match=refused):
        logits(model, inputs)
    with intervened(model, Change(layer=1, output="mean")):  # where it is alone, its own are the mean
        assert near(logits(model, inputs)[0, 5:], logits(tiny("LlamaForCausalLM", **LLAMA), inputs)[0, 5:])


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
        assert logits(model, {"input_ids": text(3)}).isfinite().all()
        with pytest.raises(InputError, match=r"^output: a token of transformer.* may be padding"):
            logits(model, {"input_ids": text(3), "attention_mask": mask_of([12, 12, 9])})
