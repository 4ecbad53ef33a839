"""What a model is asked beforehand: room for the tokens, the next token, and what changes are of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sources.huggingface.models import GPT, GROUPED, INPUTS, SIZES, T5, tiny

from toeplens.encodings import BandControl
from toeplens.ground import InputError
from toeplens.sources.huggingface import Change
from toeplens.sources.huggingface.beforehand import calls_of, check_decoder, check_length, check_predicts, longest
from toeplens.sources.huggingface.loading import Loaded

pytestmark = pytest.mark.usefixtures("unchecked")

ROPE = {"rope_theta": 10000.0}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": ROPE | {"rope_type": kind} | more}


@pytest.mark.parametrize(
    ("kind", "sizes", "limit"),
    [
        ("LlamaForCausalLM", GROUPED, 64),
        ("LlamaForCausalLM", GROUPED | rope("linear", factor=4.0), 64),  # which says how long it is with them
        ("LlamaForCausalLM", GROUPED | rope("dynamic", factor=4.0), 256),
        ("LlamaForCausalLM", GROUPED | rope("yarn", factor=4.0, original_max_position_embeddings=64), 256),
        ("LlamaForCausalLM", GROUPED | rope("yarn", factor=4.0, original_max_position_embeddings=8), 64),
        ("GPT2LMHeadModel", GPT, 64),
        ("BertModel", SIZES, 64),
        ("OPTForCausalLM", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32}, 64),
        ("RobertaModel", SIZES | {"pad_token_id": 1}, 62),  # the places up to the padding's are no token's
        ("FalconForCausalLM", SIZES | {"alibi": True}, None),
        ("FalconForCausalLM", SIZES | {"alibi": False}, 64),
        ("BloomForCausalLM", {"vocab_size": 31, "hidden_size": 32, "n_layer": 1, "n_head": 4}, None),
        ("T5ForConditionalGeneration", T5, None),
    ],
)
def test_how_long_a_model_is_made_for(kind: str, sizes: dict[str, Any], limit: int | None) -> None:
    loaded = Loaded(tiny(kind, **sizes))
    assert longest(loaded) == limit
    check_length(loaded, "tokens", limit or 10_000)
    if limit is not None:
        with pytest.raises(
            InputError, match=rf"^tokens: sequences of {limit + 1} tokens were given; the model .* {limit}"
        ):
            check_length(loaded, "tokens", limit + 1)


def test_layers_of_each_kind_of_attention_keep_their_own_scaling() -> None:
    ropes = {"sliding_attention": ROPE | {"rope_type": "default"}} | {
        "full_attention": ROPE | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    }
    assert longest(Loaded(tiny("Gemma3ForCausalLM", **GROUPED | {"head_dim": 8, "rope_parameters": ropes}))) == 512


def test_models_that_do_not_predict_the_next_token_are_refused() -> None:
    t5, bert, llama = (
        Loaded(tiny(kind, **sizes))
        for kind, sizes in (("T5ForConditionalGeneration", T5), ("BertModel", SIZES), ("LlamaForCausalLM", GROUPED))
    )
    with pytest.raises(InputError, match=r"^model: T5ForConditionalGeneration has an encoder; a probe needs"):
        check_decoder(t5, "a probe")
    for loaded in (bert, llama):
        check_decoder(loaded, "a probe")
    with pytest.raises(InputError, match=r"^model: BertModel sees the tokens after each one; a probe needs"):
        check_predicts(bert, calls_of(bert.model, INPUTS), "a probe")
    check_predicts(llama, calls_of(llama.model, INPUTS), "a probe")


def test_calls_are_those_of_a_pass() -> None:
    t5 = tiny("T5ForConditionalGeneration", **T5)
    found = calls_of(t5, INPUTS | {"decoder_input_ids": INPUTS["input_ids"]})
    assert [(call.side, call.kind, call.layer) for call in found] == [
        ("encoder", "self", 0),
        ("encoder", "self", 1),
        ("decoder", "self", 0),
        ("decoder", "cross", 0),
        ("decoder", "self", 1),
        ("decoder", "cross", 1),
    ]
    assert {call.heads for call in found} == {4}
    assert calls_of(t5, INPUTS) == ()  # a pass that breaks off tells nothing


def test_few_tokens_are_read() -> None:
    model, seen = tiny("LlamaForCausalLM", **GROUPED), []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True)
    calls_of(model, {"input_ids": torch.ones(9, 60, dtype=torch.long)})
    assert seen == [(2, 16)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Change(layer=2, output="zero"), "^layer: 2 was given"),
        (Change(layer=0, heads=(4,), output="zero"), r"^heads: .*4.* given"),
        (Change(layer=0, groups=(2,), output="zero"), r"^groups: .*2.* given"),
        (Change(layer=0, bands=BandControl(still=(9,))), "turns 4 pairs"),
        (Change(layer=0, bias=False), "^bias: .* adds nothing"),
    ],
)
def test_changes_of_what_is_not_there_are_refused(change: Change, said: str) -> None:
    model = tiny("LlamaForCausalLM", **GROUPED)
    with pytest.raises(InputError, match=said):
        calls_of(model, INPUTS, [change])
    assert calls_of(model, INPUTS, [Change(layer=1, heads=(3,), output="zero")])
