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
from tests.sources.huggingface import models
from tests.sources.huggingface.models import NARROW, SIZES, T5, calls_in, state, tiny
from tests.sources.huggingface.test_effects import SHARED
from torch import Tensor, nn

from toeplens.ground import InputError
from toeplens.lens import NoForm
from toeplens.sources.huggingface import (
    AttentionCall,
    Change,
    calls,
    capture,
    captured,
    compared,
    compared_changed,
    trace,
)
from toeplens.sources.huggingface.model import NOBODY, OBSERVER, table
from toeplens.studies import audit

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
UNPLACED = {"DebertaV2": "not a function of the offset", "T5": "different sequences"}  # why a layer has no such form


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
    out = captured(model_of(name), inputs_of(model_of(name)), calls.append)
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
def test_calls_are_the_models_own(name: str) -> None:
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
        seen = logits.isfinite().any(-1, keepdim=True)
        if call.sinks is not None:
            logits = torch.cat((logits, call.sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)), -1)
        weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
        weights = torch.where(seen, weights[..., : call.k.shape[2]], 0)
        if returned is None:
            assert call.weights is None
            assert call.proof.weights is None
        else:
            own = returned[lists[call.kind[0] + call.side[0]] if name == "T5" else "attentions"][call.layer]
            assert call.weights is not None
            assert torch.equal(call.weights, own)
            torch.testing.assert_close(weights, own.double() * seen, atol=1e-5, rtol=0)
            assert call.proof.weights is not None
            assert call.proof.weights < 1e-5
        values = call.v.repeat_interleave(weights.shape[1] // call.v.shape[1], 1).double()
        heads = call.heads.double() * seen.transpose(1, 2)
        torch.testing.assert_close(heads, (weights @ values).transpose(1, 2), atol=1e-4, rtol=1e-4)
        assert call.proof.outputs < 1e-5
        assert call.proof.queries == call.q.shape[2]


@pytest.mark.parametrize("name", MODELS)
def test_placed_layers_have_the_models_logits(name: str) -> None:
    """Where a layer has the form that `behaviour` takes, the parts give its logits, up to one number a query."""
    placed = 0
    for call in calls_of(name):
        if call.kind == "cross" or name == "DebertaV2":
            with pytest.raises(NoForm, match=UNPLACED[name]):
                call.placed()
            continue
        parts = call.placed()
        placed += 1
        lengths, window, chunk = (parts.pop(name) for name in ("lengths", "window", "chunk"))
        assert (parts.pop("pairing"), parts.pop("layout")) == ("interleaved", "bhnd")
        padded = name != "T5" or call.side == "encoder"
        assert (lengths is not None) == padded
        assert lengths is None or lengths.tolist() == [models.TOKENS, models.PADDED]
        ours, own = models.remade(**parts), call.logits()
        if call.softcap is not None:
            ours = call.softcap * (ours / call.softcap).tanh()
        for sequence in range(2):
            end = own.shape[-1] if lengths is None else int(lengths[sequence])
            a, b = (x[sequence, :, :end, :end] for x in (ours, own))
            a, b = (x - x.diagonal(dim1=1, dim2=2).unsqueeze(-1) for x in (a, b))
            seen, there = b.isfinite(), torch.ones_like(b, dtype=torch.bool)
            there = there.tril() if parts["causal"] else there
            there = there if window is None else there.triu(1 - window).tril(window - 1)
            places = torch.arange(end)
            there = there if chunk is None else there & (places[:, None] // chunk == places // chunk)
            assert torch.equal(seen, there)
            torch.testing.assert_close(a[seen], b[seen], atol=2e-5 * float(own[own.isfinite()].abs().max()), rtol=0)
    assert placed == {"DebertaV2": 0, "T5": 4}.get(name, 2)


@pytest.mark.parametrize("name", ["Llama", "GPTJ", "T5"])
def test_model_and_tables_stay_as_they_were(name: str) -> None:
    model = model_of(name)
    model.train()
    first = next(module for module in model.modules() if isinstance(module, nn.Dropout | nn.Linear))
    first.eval()  # not all modules need be in the same mode
    before = models.state(model)
    out = captured(model, inputs_of(model), lambda call: None)
    assert models.state(model) == before
    with pytest.raises(ZeroDivisionError):
        captured(model, inputs_of(model), lambda call: call.layer / 0)  # type: ignore[arg-type, return-value]
    assert models.state(model) == before
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(out.logits, model(**inputs_of(model)).logits, atol=1e-4, rtol=1e-4)


def test_one_layer_is_held_at_a_time() -> None:
    for name in ("Llama", "Bloom", "Bert"):
        held: list[weakref.ref[Tensor]] = []

        def look(call: AttentionCall, held: list[weakref.ref[Tensor]] = held) -> None:
            assert all(ref() is None for ref in held)
            held.extend(weakref.ref(x) for x in (call.weights, call.q, call.heads))

        captured(model_of(name), inputs_of(model_of(name)), look)
        assert len(held) == 6


def test_other_passes_are_not_observed() -> None:
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

        captured(model, inputs, look)
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
def test_tokens_without_a_vector_hide_no_rotation(kind: str, sizes: dict[str, Any], zeros: list[int]) -> None:
    """Their queries and keys are 0, before the rotation and after, and say nothing of its angles."""
    model = tiny(kind, **sizes)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
    tokens = TEXT.clone()
    tokens[0, zeros] = 0
    for call, whole in zip(calls_in(model, {"input_ids": tokens}), calls_in(model, {"input_ids": TEXT}), strict=True):
        assert call.unknown is None
        assert call.rotation is not None
        assert whole.rotation is not None
        torch.testing.assert_close(call.rotation.frequencies, whole.rotation.frequencies, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(call.rotation.magnitudes, whole.rotation.magnitudes, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "sizes"), [("Gemma3nForCausalLM", SHARED), ("Gemma4ForCausalLM", GEMMA4)], ids=["gemma3n", "gemma4"]
)
def test_layers_with_another_layers_keys_are_read_and_changed(kind: str, sizes: dict[str, Any]) -> None:
    model = tiny(kind, **sizes)
    calls = calls_in(model, {"input_ids": TEXT})
    for call, source in zip(calls[2:], calls[:2], strict=True):
        assert call.unknown is None
        assert call.unrotated is not None
        assert source.unrotated is not None
        assert torch.equal(call.unrotated[1], source.unrotated[1])
        assert call.placed()["rotation"] is not None
    change = Change(layer=2, heads=(0,), speed=0.0)
    assert compared_changed(model, {"input_ids": TEXT}, lambda call: None, [change]) < 1e-4


@pytest.mark.parametrize(("kind", "sizes"), [("LlamaForCausalLM", SIZES), ("T5ForConditionalGeneration", T5)])
def test_under_autocast_rounding_is_that_of_its_dtype(kind: str, sizes: dict[str, Any]) -> None:
    model = tiny(kind, **sizes)
    exact = audit(model, TEXT, effects="none")
    with torch.autocast("cpu", torch.bfloat16):
        found = audit(model, TEXT, effects="none")
    assert found.whole > 100 * exact.whole
    for layer, plain in zip(found.layers, exact.layers, strict=True):
        assert layer.unknown == plain.unknown
        assert layer.tolerance > 1000 * plain.tolerance


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LAYERED = {"full_attention": DYNAMIC, "sliding_attention": DYNAMIC}


@pytest.mark.parametrize(
    ("kind", "sizes", "rope"),
    [("LlamaForCausalLM", SIZES, DYNAMIC), ("Gemma3ForCausalLM", NARROW, LAYERED)],
    ids=["one rotation", "one for each type of layer"],
)
def test_what_was_read_before_changes_nothing(kind: str, sizes: dict[str, Any], rope: dict[str, Any]) -> None:
    """Dynamic scaling keeps the frequencies of the longest text: each is read as by a new model."""
    model = tiny(kind, **sizes | {"max_position_embeddings": 16, "rope_parameters": rope})
    long = torch.randint(4, 31, (1, 60), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        own = model(long[:, :20]).logits
    before = state(model)
    found = [audit(model, long[:, :length], effects="none") for length in (20, 60, 20)]
    assert state(model) == before
    assert [layer.frequencies for layer in found[0].layers] == [layer.frequencies for layer in found[2].layers]
    assert [head.positional for head in found[0].heads] == [head.positional for head in found[2].heads]
    assert found[0].layers[1].frequencies != found[1].layers[1].frequencies
    with torch.no_grad():
        assert torch.equal(model(long[:, :20]).logits, own)


@pytest.mark.parametrize(("heads", "tokens"), [(4, 300), (32, 16)])
def test_a_bias_made_in_16_bits_is_by_offset_to_their_rounding(heads: int, tokens: int) -> None:
    """Falcon makes ALiBi's bias in bfloat16, whatever the model's own dtype."""
    sizes = {"vocab_size": 31, "hidden_size": 8 * heads, "num_hidden_layers": 1, "num_attention_heads": heads}
    model = tiny("FalconModel", **sizes, alibi=True, multi_query=False, new_decoder_architecture=False)
    text = torch.randint(4, 31, (1, tokens), generator=torch.Generator().manual_seed(5))
    (call,) = calls_in(model, {"input_ids": text})
    table = call.placed()["bias"]
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
    wanted = -slopes.unsqueeze(1) * torch.arange(tokens) / 8**0.5
    assert float((table - wanted).abs().max()) < 0.02 * float(wanted.abs().max())
    assert call.bias is not None
    other = call.bias.expand(-1, -1, tokens, -1).clone()
    other[..., -1, tokens // 2] *= 1.25
    with pytest.raises(NoForm, match="not a function of the offset"):
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
def test_fused_attention_is_the_eager_one(kind: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs go on and are proved, with the eager weights of some queries."""
    model, inputs = models.tiny(kind, **KINDS[kind]), models.padded_inputs() if padded else models.INPUTS
    whole = models.calls_in(model, inputs)
    monkeypatch.setattr(trace, "_LONG", 1)
    monkeypatch.setattr(calls, "_AT_ONCE", 1)
    found = models.calls_in(model, inputs)
    assert len(found) == len(whole) == 2
    for call, own in zip(found, whole, strict=True):
        assert own.weights is not None
        assert (call.weights, call.proof.queries, own.proof.queries) == (None, 8, models.TOKENS)
        assert call.proof.weights is not None
        assert max(call.proof.weights, call.proof.outputs) < 1e-5
        torch.testing.assert_close(call.heads, own.heads, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(call.logits(), own.logits(), atol=1e-4, rtol=1e-4)
        assert (call.causal, call.window, call.unknown) == (own.causal, own.window, own.unknown)


@pytest.mark.parametrize("way", ["another", "refused"])
def test_fused_attention_that_is_another_is_not_gone_on_with(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that knows nothing of a cap, or says so."""
    model, own = models.tiny("LlamaModel", **models.SIZES), table()["sdpa"]
    whole = models.calls_in(model)

    def other(*args: Any, **more: Any) -> Any:
        if way == "refused":
            raise ValueError("softcap")
        return 1.01 * own(*args, **more)[0], None

    monkeypatch.setattr(trace, "_LONG", 1)
    monkeypatch.setitem(table(), "sdpa", other)
    for call, before in zip(models.calls_in(model), whole, strict=True):
        assert call.weights is not None
        torch.testing.assert_close(call.heads, before.heads, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertModel", "LlamaModel", "T5Model"])
def test_the_plain_pass_of_a_long_sequence_is_of_its_first_tokens_unless_later_ones_matter_to_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve tokens, of which six are the first."""
    monkeypatch.setattr(capture, "_FIRST", 6)
    monkeypatch.setattr(capture, "_LAST", 4)
    sizes = {"GPT2LMHeadModel": models.GPT, "T5Model": models.T5}.get(name, models.SIZES)
    model, lengths = models.tiny(name, **sizes), list[int]()
    inputs = {"input_ids": models.INPUTS["input_ids"][:1]}
    if name == "T5Model":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    embedding = model.encoder.embed_tokens if name == "T5Model" else model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda module, args, out: lengths.append(args[0].shape[1]))
    assert compared(model, inputs, lambda call: None) < 1e-5
    handle.remove()
    assert lengths == {"BertModel": [6, 12, 12], "T5Model": [12, 12]}.get(name, [6, 12])


@pytest.mark.parametrize("place", [2, 9])
def test_a_pass_that_is_otherwise_at_the_first_or_the_last_tokens_is_noticed(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all outputs are compared, as later tokens matter to the first ones; and of the first ones anyway."""
    monkeypatch.setattr(capture, "_FIRST", 6)
    model = models.tiny("BertModel" if place == 9 else "LlamaModel", **models.SIZES)
    inputs = {"input_ids": models.INPUTS["input_ids"][:1]}
    last = model.encoder.layer[-1] if place == 9 else model.layers[-1]
    own = last.forward

    def otherwise(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        states = found[0] if isinstance(found, tuple) else found
        if OBSERVER.get() is not NOBODY:
            states[:, place] += 1
        return found

    monkeypatch.setattr(last, "forward", otherwise)
    with pytest.raises(InputError, match="its reproduced outputs differ"):
        compared(model, inputs, lambda call: None)


def test_attention_by_hand_that_goes_by_the_length_is_not_changed_by_a_short_pass() -> None:
    """BigBird attends to everything from then on where it once read few tokens."""
    sizes = {"sep_token_id": 2, "num_hidden_layers": 1, "max_position_embeddings": 1024}
    model = models.tiny("BigBirdModel", **models.SIZES | sizes | {"attention_type": "block_sparse"})
    tokens = torch.randint(4, 31, (1, 768), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="was not understood"):
        compared(model, {"input_ids": tokens}, lambda call: None)
    assert model.attention_type == "block_sparse"
