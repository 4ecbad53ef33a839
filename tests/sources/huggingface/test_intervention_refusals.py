"""What cannot be changed is refused in one sentence, and the model is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sources.huggingface.models import GPT, INPUTS, T5, state, tiny
from tests.sources.huggingface.ways import ALL, LLAMA, apart, logits

from toeplens.encodings import BandControl
from toeplens.ground import InputError
from toeplens.sources.huggingface import Change, intervened
from toeplens.sources.huggingface.interventions import NotThere


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
    sizes = LLAMA if kind == "LlamaForCausalLM" else ALL[kind][0]
    model = tiny(kind, **sizes)
    before = state(model)
    with intervened(model, change), pytest.raises(InputError, match=f"^{sentence}"):
        logits(model)
    assert state(model) == before


def test_a_head_is_changed_once_and_a_side_is_named_where_there_are_two() -> None:
    model = tiny("LlamaForCausalLM", **LLAMA)
    twice = [Change(layer=0, heads=(1, 2), output="zero"), Change(layer=0, heads=(2,), speed=0.0)]
    with intervened(model, twice), pytest.raises(InputError, match=r"^changes must not change head 2 of model.* twice"):
        logits(model)
    model = tiny("T5ForConditionalGeneration", **T5)
    inputs = INPUTS | {"decoder_input_ids": INPUTS["input_ids"]}
    with intervened(model, Change(layer=0, output="zero")), pytest.raises(InputError, match=r"^side must be set"):
        logits(model, inputs)


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
    model, other = (tiny("LlamaForCausalLM", **LLAMA) for _ in range(2))
    with torch.no_grad():
        cache = model(**INPUTS, use_cache=True).past_key_values
    with intervened(model, Change(layer=0, speed=0.0)):
        with pytest.raises(InputError, match=r"^inputs must contain all tokens of a pass and not past_key_values"):
            model(**INPUTS, past_key_values=cache)
        assert apart(logits(model), logits(other))
    assert torch.equal(logits(model), logits(other))


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
    model = tiny("LlamaForCausalLM", **LLAMA)
    with intervened(model, change), pytest.raises(NotThere) as caught:
        logits(model)
    told = caught.value.for_people("layers" if "layers" in sentence else None)
    assert str(told) == sentence.format("model.layers.0.self_attn (LlamaAttention)")
    assert str(told.for_people()) == str(told)


@pytest.mark.parametrize(("kind", "sizes"), [("GPT2LMHeadModel", GPT), ("OPTForCausalLM", ALL["OPTForCausalLM"][0])])
def test_more_tokens_than_a_table_of_positions_has_are_one_sentence(kind: str, sizes: dict[str, Any]) -> None:
    model = tiny(kind, **sizes)
    before = state(model)
    with intervened(model, Change(layer=0, heads=(1,), output="zero")):
        with pytest.raises(
            InputError, match=r"^inputs must have at most 64 tokens, the positions of the model, got 65\.$"
        ):
            logits(model, {"input_ids": torch.full((1, 65), 5)})
        assert logits(model, {"input_ids": torch.full((1, 64), 5)}).isfinite().all()
    assert state(model) == before
