"""Captured attention is the model's own: formed again from its parts, by a plain program, and by our own encodings."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.backends.hf import models
from tests.backends.hf.models import NARROW, SIZES, T5, calls_in, full_state, tiny
from tests.backends.hf.test_effects import SHARED
from torch import Tensor, nn

from toeplens.backends.hf import (
    AttentionCall,
    Change,
    calls,
    capture,
    capture_and_compare,
    capture_attention,
    capture_changed,
    trace,
)
from toeplens.backends.hf.model import NO_OBSERVER, OBSERVER, interface_table
from toeplens.lens import NotSeparable
from toeplens.studies import audit
from toeplens.utils import InputError

FALCON = {name: size for name, size in models.SIZES.items() if name != "intermediate_size"}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", models.GROUPED),
    "Llama-yarn": ("LlamaForCausalLM", models.GROUPED | {"rope_parameters": YARN}),
    "Mistral": ("MistralForCausalLM", models.GROUPED | {"sliding_window": 4}),
    "Llama4": (
        "Llama4ForCausalLM",
        models.NARROW
        | {"attention_chunk_size": 5, "intermediate_size_mlp": 48, "moe_layers": [], "num_local_experts": 2},
    ),
    "ModernBert": ("ModernBertForMaskedLM", models.SIZES | {"local_attention": 6, "global_attn_every_n_layers": 2}),
    "Gemma2": ("Gemma2ForCausalLM", models.NARROW | {"attn_logit_softcapping": 0.5}),
    "GPTNeoX": (
        "GPTNeoXForCausalLM",
        models.SIZES
        | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}},
    ),
    "GPTJ": ("GPTJForCausalLM", models.GPT | {"rotary_dim": 4}),
    "Falcon-alibi": ("FalconForCausalLM", FALCON | {"alibi": True}),
    "Bloom": ("BloomForCausalLM", models.BLOOM),
    "T5": ("T5ForConditionalGeneration", models.T5),
    "Bert": ("BertModel", models.SIZES),
    "GptOss": ("GptOssForCausalLM", models.NARROW | models.MIXED | {"rope_parameters": YARN}),
    "DeepseekV2": ("DeepseekV2ForCausalLM", models.LATENT),
    "DebertaV2": (
        "DebertaV2Model",
        models.SIZES | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16},
    ),
}
# why a layer has no such form
NOT_BY_OFFSET = {"DebertaV2": "not a function of the offset", "T5": "different sequences"}


@cache
def model_of(name: str) -> Any:
    kind, sizes = MODELS[name]
    return models.tiny(kind, **sizes)


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    inputs = models.padded_inputs()
    return inputs | ({"decoder_input_ids": inputs["input_ids"][:, :7]} if model.config.is_encoder_decoder else {})


@cache
def pass_of(name: str) -> tuple[list[AttentionCall], Tensor]:
    calls: list[AttentionCall] = []
    out = capture_attention(model_of(name), inputs_of(model_of(name)), calls.append)
    return calls, out[0]


def calls_of(name: str) -> list[AttentionCall]:
    return pass_of(name)[0]


def eager_attentions(model: Any) -> Any:
    """What the model returns under ``output_attentions``."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = "eager"
    with torch.no_grad():
        out = model(**inputs_of(model), output_attentions=True)
    for config, implementation in zip(configs, before, strict=True):
        config._attn_implementation = implementation
    return out


@pytest.mark.parametrize("name", MODELS)
def test_captured_calls_match_the_model(name: str) -> None:
    """The pass is the model's own in its own setting; weights are those it returns, and the softmax of the logits."""
    model = model_of(name)
    calls, out = pass_of(name)
    assert len(calls) == (6 if name == "T5" else 2)
    with torch.no_grad():
        plain = model(**inputs_of(model))[0]
    if name == "Llama4":  # in a chunk of padding alone no key is seen
        plain, out = (x[inputs_of(model)["attention_mask"].bool()] for x in (plain, out))
    torch.testing.assert_close(out, plain, atol=1e-4, rtol=1e-4)
    returned = None if name.startswith("Falcon") else eager_attentions(model)  # Falcon's are not of its fused attention
    lists = {"se": "encoder_attentions", "sd": "decoder_attentions", "cd": "cross_attentions"}
    for call in calls:
        logits = call.logits()
        has_keys = logits.isfinite().any(-1, keepdim=True)
        if call.sinks is not None:
            logits = torch.cat((logits, call.sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)), -1)
        weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
        weights = torch.where(has_keys, weights[..., : call.k.shape[2]], 0)
        if returned is None:
            assert call.weights is None
            assert call.proof.weights is None
        else:
            returned_list = lists[call.kind[0] + call.side[0]] if name == "T5" else "attentions"
            returned_weights = returned[returned_list][call.layer]
            assert call.weights is not None
            assert torch.equal(call.weights, returned_weights)
            torch.testing.assert_close(weights, returned_weights.double() * has_keys, atol=1e-5, rtol=0)
            assert call.proof.weights is not None
            assert call.proof.weights < 1e-5
        values = call.v.repeat_interleave(weights.shape[1] // call.v.shape[1], 1).double()
        heads = call.heads.double() * has_keys.transpose(1, 2)
        torch.testing.assert_close(heads, (weights @ values).transpose(1, 2), atol=1e-4, rtol=1e-4)
        assert call.proof.outputs < 1e-5
        assert call.proof.queries == call.q.shape[2]


@pytest.mark.parametrize("name", MODELS)
def test_separable_layers_reproduce_the_models_logits(name: str) -> None:
    """Where a layer has the form that `behaviour` takes, the parts give its logits, up to one number a query."""
    placed = 0
    for call in calls_of(name):
        if call.kind == "cross" or name == "DebertaV2":
            with pytest.raises(NotSeparable, match=NOT_BY_OFFSET[name]):
                call.behaviour_arguments()
            continue
        parts = call.behaviour_arguments()
        placed += 1
        lengths, window, chunk = (parts.pop(name) for name in ("lengths", "window", "chunk"))
        assert (parts.pop("pairing"), parts.pop("layout")) == ("interleaved", "bhnd")
        padded = name != "T5" or call.side == "encoder"
        assert (lengths is not None) == padded
        assert lengths is None or lengths.tolist() == [models.TOKENS, models.PADDED]
        ours, call_logits = models.reference_logits(**parts), call.logits()
        if call.softcap is not None:
            ours = call.softcap * (ours / call.softcap).tanh()
        for sequence in range(2):
            end = call_logits.shape[-1] if lengths is None else int(lengths[sequence])
            a, b = (x[sequence, :, :end, :end] for x in (ours, call_logits))
            a, b = (x - x.diagonal(dim1=1, dim2=2).unsqueeze(-1) for x in (a, b))
            has_bias, is_visible = b.isfinite(), torch.ones_like(b, dtype=torch.bool)
            is_visible = is_visible.tril() if parts["causal"] else is_visible
            is_visible = is_visible if window is None else is_visible.triu(1 - window).tril(window - 1)
            places = torch.arange(end)
            is_visible = is_visible if chunk is None else is_visible & (places[:, None] // chunk == places // chunk)
            assert torch.equal(has_bias, is_visible)
            largest = float(call_logits[call_logits.isfinite()].abs().max())
            torch.testing.assert_close(a[has_bias], b[has_bias], atol=2e-5 * largest, rtol=0)
    assert placed == {"DebertaV2": 0, "T5": 4}.get(name, 2)


@pytest.mark.parametrize("name", ["Llama", "GPTJ", "T5"])
def test_model_and_tables_are_left_unchanged(name: str) -> None:
    model = model_of(name)
    model.train()
    first = next(module for module in model.modules() if isinstance(module, nn.Dropout | nn.Linear))
    first.eval()  # not all modules need be in the same mode
    before = models.full_state(model)
    out = capture_attention(model, inputs_of(model), lambda call: None)
    assert models.full_state(model) == before
    with pytest.raises(ZeroDivisionError):
        capture_attention(model, inputs_of(model), lambda call: call.layer / 0)  # type: ignore[arg-type, return-value]
    assert models.full_state(model) == before
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(out.logits, model(**inputs_of(model)).logits, atol=1e-4, rtol=1e-4)


def test_one_layer_is_kept_in_memory_at_a_time() -> None:
    for name in ("Llama", "Bloom", "Bert"):
        held: list[weakref.ref[Tensor]] = []

        def look(call: AttentionCall, held: list[weakref.ref[Tensor]] = held) -> None:
            assert all(ref() is None for ref in held)
            held.extend(weakref.ref(x) for x in (call.weights, call.q, call.heads))

        capture_attention(model_of(name), inputs_of(model_of(name)), look)
        assert len(held) == 6


def test_passes_in_other_threads_are_not_captured() -> None:
    """A pass of the same model in another thread, or in ``on_layer``, and what ``on_layer`` computes."""
    for name in ("Llama", "Bert", "Bloom"):
        model, calls, others = model_of(name), [], []
        inputs = inputs_of(model)
        with torch.no_grad():
            own = model(**inputs)[0]

        def run(others: list[Tensor] = others, model: Any = model, inputs: Any = inputs) -> None:
            with torch.no_grad():
                others.append(model(**inputs)[0])

        def look(call: AttentionCall, calls: list[AttentionCall] = calls, run: Callable[[], None] = run) -> None:
            calls.append(call)
            (call.q @ call.q.transpose(-1, -2)).softmax(-1) @ call.q
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            run()

        capture_attention(model, inputs, look)
        assert len(calls) == 2
        assert len(others) == 4
        for other in others:
            torch.testing.assert_close(other, own, atol=1e-4, rtol=1e-4)


# ---- faults that users of other tools reported -----------------------------------------------------------------------


TEXT = torch.randint(4, 31, (2, 12), generator=torch.Generator().manual_seed(3))
GEMMA4 = {name: SHARED[name] for name in SHARED if not name.startswith(("laurel", "altup", "activation"))} | {
    "intermediate_size": 48,
    "global_head_dim": 8,
}


@pytest.mark.parametrize("zeros", [[0], [0, 6, 11], list(range(12))], ids=str)
@pytest.mark.parametrize(("kind", "sizes"), [("LlamaModel", SIZES), ("Gemma3TextModel", NARROW)])
def test_zero_embeddings_do_not_hide_a_rotation(kind: str, sizes: dict[str, Any], zeros: list[int]) -> None:
    """Their queries and keys are 0, before the rotation and after, and say nothing of its angles."""
    model = tiny(kind, **sizes)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
    tokens = TEXT.clone()
    tokens[0, zeros] = 0
    calls, full_calls = (calls_in(model, {"input_ids": x}) for x in (tokens, TEXT))
    for call, full_call in zip(calls, full_calls, strict=True):
        assert call.unknown is None
        assert call.rotation is not None
        assert full_call.rotation is not None
        torch.testing.assert_close(call.rotation.frequencies, full_call.rotation.frequencies, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(call.rotation.magnitudes, full_call.rotation.magnitudes, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "sizes"), [("Gemma3nForCausalLM", SHARED), ("Gemma4ForCausalLM", GEMMA4)], ids=["gemma3n", "gemma4"]
)
def test_layers_with_shared_keys_are_captured_and_changed(kind: str, sizes: dict[str, Any]) -> None:
    model = tiny(kind, **sizes)
    calls = calls_in(model, {"input_ids": TEXT})
    for call, source in zip(calls[2:], calls[:2], strict=True):
        assert call.unknown is None
        assert call.unrotated is not None
        assert source.unrotated is not None
        assert torch.equal(call.unrotated[1], source.unrotated[1])
        assert call.behaviour_arguments()["rotation"] is not None
    change = Change(layer=2, heads=(0,), speed=0.0)
    assert capture_changed(model, {"input_ids": TEXT}, lambda call: None, [change]) < 1e-4


@pytest.mark.parametrize(("kind", "sizes"), [("LlamaForCausalLM", SIZES), ("T5ForConditionalGeneration", T5)])
def test_under_autocast_the_tolerance_is_that_of_its_dtype(kind: str, sizes: dict[str, Any]) -> None:
    model = tiny(kind, **sizes)
    exact = audit(model, TEXT, effects="none")
    with torch.autocast("cpu", torch.bfloat16):
        actual = audit(model, TEXT, effects="none")
    assert actual.max_difference > 100 * exact.max_difference
    for layer, plain in zip(actual.layers, exact.layers, strict=True):
        assert layer.unknown == plain.unknown
        assert layer.tolerance > 1000 * plain.tolerance


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LAYERED = {"full_attention": DYNAMIC, "sliding_attention": DYNAMIC}


@pytest.mark.parametrize(
    ("kind", "sizes", "rope"),
    [("LlamaForCausalLM", SIZES, DYNAMIC), ("Gemma3ForCausalLM", NARROW, LAYERED)],
    ids=["one rotation", "one for each type of layer"],
)
def test_earlier_passes_do_not_change_a_capture(kind: str, sizes: dict[str, Any], rope: dict[str, Any]) -> None:
    """Dynamic scaling keeps the frequencies of the longest text: each is read as by a new model."""
    model = tiny(kind, **sizes | {"max_position_embeddings": 16, "rope_parameters": rope})
    long = torch.randint(4, 31, (1, 60), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        own = model(long[:, :20]).logits
    before = full_state(model)
    actual = [audit(model, long[:, :length], effects="none") for length in (20, 60, 20)]
    assert full_state(model) == before
    assert [layer.frequencies for layer in actual[0].layers] == [layer.frequencies for layer in actual[2].layers]
    assert [head.positional for head in actual[0].heads] == [head.positional for head in actual[2].heads]
    assert actual[0].layers[1].frequencies != actual[1].layers[1].frequencies
    with torch.no_grad():
        assert torch.equal(model(long[:, :20]).logits, own)


@pytest.mark.parametrize(("heads", "tokens"), [(4, 300), (32, 16)])
def test_a_16_bit_bias_is_toeplitz_within_rounding(heads: int, tokens: int) -> None:
    """Falcon makes ALiBi's bias in bfloat16, whatever the model's own dtype."""
    sizes = {"vocab_size": 31, "hidden_size": 8 * heads, "num_hidden_layers": 1, "num_attention_heads": heads}
    model = tiny("FalconModel", **sizes, alibi=True, multi_query=False, new_decoder_architecture=False)
    text = torch.randint(4, 31, (1, tokens), generator=torch.Generator().manual_seed(5))
    (call,) = calls_in(model, {"input_ids": text})
    table = call.behaviour_arguments()["bias"]
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
    expected = -slopes.unsqueeze(1) * torch.arange(tokens) / 8**0.5
    assert float((table - expected).abs().max()) < 0.02 * float(expected.abs().max())
    assert call.bias is not None
    other = call.bias.expand(-1, -1, tokens, -1).clone()
    other[..., -1, tokens // 2] *= 1.25
    with pytest.raises(NotSeparable, match="not a function of the offset"):
        replace(call, bias=other).bias_by_offset()


# ---- long inputs: fused attention, chosen queries and tokens stand for all -------------------------------------------


KINDS = {
    "LlamaModel": models.SIZES,
    "Gemma3TextModel": models.NARROW,
    "GPT2Model": models.GPT,
    "BertModel": models.SIZES,
    "Qwen2Model": models.GROUPED,
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_attention_matches_eager(kind: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs go on and are proved, with the eager weights of some queries."""
    model, inputs = models.tiny(kind, **KINDS[kind]), models.padded_inputs() if padded else models.INPUTS
    full_calls = models.calls_in(model, inputs)
    monkeypatch.setattr(trace, "_FUSED_FROM", 1)
    monkeypatch.setattr(calls, "_AT_ONCE", 1)
    actual = models.calls_in(model, inputs)
    assert len(actual) == len(full_calls) == 2
    for call, full_call in zip(actual, full_calls, strict=True):
        assert full_call.weights is not None
        assert (call.weights, call.proof.queries, full_call.proof.queries) == (None, 8, models.TOKENS)
        assert call.proof.weights is not None
        assert max(call.proof.weights, call.proof.outputs) < 1e-5
        torch.testing.assert_close(call.heads, full_call.heads, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(call.logits(), full_call.logits(), atol=1e-4, rtol=1e-4)
        assert (call.causal, call.window, call.unknown) == (full_call.causal, full_call.window, full_call.unknown)


@pytest.mark.parametrize("way", ["another", "refused"])
def test_fused_attention_that_differs_is_not_used(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that knows nothing of a cap, or says so."""
    model, own = models.tiny("LlamaModel", **models.SIZES), interface_table()["sdpa"]
    whole = models.calls_in(model)

    def other(*args: Any, **more: Any) -> Any:
        if way == "refused":
            raise ValueError("softcap")
        return 1.01 * own(*args, **more)[0], None

    monkeypatch.setattr(trace, "_FUSED_FROM", 1)
    monkeypatch.setitem(interface_table(), "sdpa", other)
    for call, before in zip(models.calls_in(model), whole, strict=True):
        assert call.weights is not None
        torch.testing.assert_close(call.heads, before.heads, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertModel", "LlamaModel", "T5Model"])
def test_the_plain_pass_of_a_long_sequence_uses_its_first_tokens_if_causal(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve tokens, of which six are the first."""
    monkeypatch.setattr(capture, "_FIRST_TOKENS", 6)
    monkeypatch.setattr(capture, "_LAST_LOGITS", 4)
    sizes = {"GPT2LMHeadModel": models.GPT, "T5Model": models.T5}.get(name, models.SIZES)
    model, lengths = models.tiny(name, **sizes), list[int]()
    inputs = {"input_ids": models.INPUTS["input_ids"][:1]}
    if name == "T5Model":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    embedding = model.encoder.embed_tokens if name == "T5Model" else model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda module, args, out: lengths.append(args[0].shape[1]))
    assert capture_and_compare(model, inputs, lambda call: None) < 1e-5
    handle.remove()
    assert lengths == {"BertModel": [6, 12, 12], "T5Model": [12, 12]}.get(name, [6, 12])


@pytest.mark.parametrize("place", [2, 9])
def test_a_pass_that_differs_at_the_first_or_last_tokens_is_detected(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all outputs are compared, as later tokens matter to the first ones; and of the first ones anyway."""
    monkeypatch.setattr(capture, "_FIRST_TOKENS", 6)
    model = models.tiny("BertModel" if place == 9 else "LlamaModel", **models.SIZES)
    inputs = {"input_ids": models.INPUTS["input_ids"][:1]}
    last = model.encoder.layer[-1] if place == 9 else model.layers[-1]
    own = last.forward

    def otherwise(*args: Any, **kwargs: Any) -> Any:
        actual = own(*args, **kwargs)
        states = actual[0] if isinstance(actual, tuple) else actual
        if OBSERVER.get() is not NO_OBSERVER:
            states[:, place] += 1
        return actual

    monkeypatch.setattr(last, "forward", otherwise)
    with pytest.raises(InputError, match="its reproduced outputs differ"):
        capture_and_compare(model, inputs, lambda call: None)


def test_a_short_pass_does_not_change_length_dependent_attention() -> None:
    """BigBird attends to everything from then on where it once read few tokens."""
    sizes = {"sep_token_id": 2, "num_hidden_layers": 1, "max_position_embeddings": 1024}
    model = models.tiny("BigBirdModel", **models.SIZES | sizes | {"attention_type": "block_sparse"})
    tokens = torch.randint(4, 31, (1, 768), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="was not understood"):
        capture_and_compare(model, {"input_ids": tokens}, lambda call: None)
    assert model.attention_type == "block_sparse"
