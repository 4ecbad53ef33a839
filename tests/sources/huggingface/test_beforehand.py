"""What a model is asked beforehand: room for the tokens, the next token, and what changes are of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sources.huggingface.models import GPT, GROUPED, INPUTS, SIZES, T5, tiny, transformers

from toeplens.ground import InputError
from toeplens.sources.huggingface.beforehand import calls_of, check_decoder, check_length, check_predicts, longest
from toeplens.sources.huggingface.loading import Loaded
from toeplens.studies import audit

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
        ("RobertaModel", SIZES | {"pad_token_id": 1}, 62),  # the places up to the padding's are no token's
        ("FalconForCausalLM", SIZES | {"alibi": True}, None),
        ("T5ForConditionalGeneration", T5, None),
    ],
)
def test_how_long_a_model_is_made_for(kind: str, sizes: dict[str, Any], limit: int | None) -> None:
    loaded = Loaded(tiny(kind, **sizes))
    assert longest(loaded) == limit
    check_length(loaded, "tokens", limit or 10_000)
    if limit is not None:
        with pytest.raises(InputError, match=rf"^tokens must be at most {limit}, .*, got {limit + 1}"):
            check_length(loaded, "tokens", limit + 1)


_EYE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_EYE |= {"image_size": 28, "patch_size": 14}  # tables of 4 or 5 patches
_EAR = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 8}
_WORDS = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": 0}
_WORDS |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


_TOWERS = {"vision_config": _EYE | {"model_type": "clip_vision_model"}}, {"vision_config": _EYE}
_EARS = {"audio_config": _EAR | {"max_source_positions": 8}}


@pytest.mark.parametrize(
    ("kind", "words", "config"),
    [
        ("Gemma3", _WORDS | {"head_dim": 8}, _TOWERS[1] | {"mm_tokens_per_image": 4}),
        ("Llava", _WORDS | {"model_type": "llama"}, _TOWERS[0]),
        ("Qwen2Audio", _WORDS | {"model_type": "qwen2"}, _EARS),
    ],
)
def test_tables_of_images_and_sounds_are_none_of_the_tokens(
    kind: str, words: dict[str, Any], config: dict[str, Any]
) -> None:
    config = config | {"text_config": words}
    cls = getattr(transformers, f"{kind}ForConditionalGeneration")
    loaded = Loaded(cls(getattr(transformers, f"{kind}Config")(**config)).eval())
    assert (loaded.longest, longest(loaded)) == (None, 64)
    made = audit(loaded.model, torch.randint(3, 30, (2, 14)), effects="none")
    assert len(made.layers) == words["num_hidden_layers"]


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
    with pytest.raises(InputError, match=r"^model: a probe needs a decoder-only model, but T5ForConditionalGeneration"):
        check_decoder(t5, "a probe")
    for loaded in (bert, llama):
        check_decoder(loaded, "a probe")
    with pytest.raises(InputError, match=r"^model: a probe needs causal attention, but BertModel"):
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
