"""Faults that users of other tools reported, on models of transformers: each kind with several of its members."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.sources.huggingface.models import NARROW, SIZES, T5, calls_in, state, tiny
from tests.sources.huggingface.test_effects import SHARED

from toeplens.lens import NoForm
from toeplens.sources.huggingface import Change, compared_changed
from toeplens.studies import audit

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
