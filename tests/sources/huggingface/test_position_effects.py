"""Effects of taking a head's position, or a band of its frequencies, are those of whole passes without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.sources.huggingface.models import BLOOM, GPT, GROUPED, INPUTS, NARROW, SIZES, T5, calls_in, tiny
from torch.nn import functional as F

from toeplens.encodings import BandControl
from toeplens.ground import InputError
from toeplens.sources.huggingface import AttentionCall, Change, NoPosition, band_effects, head_effects, intervened
from toeplens.studies import audit

MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": GROUPED,
    "Gemma3ForCausalLM": NARROW,
    "GPTNeoXForCausalLM": SIZES,
    "BloomForCausalLM": BLOOM,
    "GPTJForCausalLM": GPT | {"rotary_dim": 4},
    "T5ForConditionalGeneration": T5,
    "SmolLM3ForCausalLM": GROUPED | {"no_rope_layers": [0, 1]},
}


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    if not model.config.is_encoder_decoder:
        return INPUTS
    shifted = torch.cat((torch.zeros(2, 1, dtype=torch.long), INPUTS["input_ids"][:, :-1]), 1)
    return INPUTS | {"decoder_input_ids": shifted}


def named(call: AttentionCall) -> tuple[str, str, str, int, int]:
    return call.module, call.side, call.kind, call.layer, call.q.shape[1]


def loss(model: Any, inputs: dict[str, torch.Tensor]) -> np.ndarray:
    """Of each sequence, nats a predicted token."""
    with torch.no_grad():
        logits = model(**inputs).logits.double()
    read = inputs.get("decoder_input_ids", inputs["input_ids"])
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1), read[:, 1:].flatten(), reduction="none")
    return each.view(2, -1).mean(1).numpy()


def same(model: Any, inputs: dict[str, torch.Tensor], change: Change, effects: np.ndarray) -> float:
    """The largest effect of a change, after checking that these are its effects."""
    intact = loss(model, inputs)
    with intervened(model, change):
        wanted = loss(model, inputs) - intact
    np.testing.assert_allclose(effects, wanted, atol=2e-6)
    return float(np.abs(wanted).max())


@pytest.mark.parametrize("kind", MODELS)
def test_the_effects_are_those_of_passes_in_which_one_head_is_without_position(kind: str) -> None:
    model = tiny(kind, **MODELS[kind])
    inputs = inputs_of(model)
    calls = [call for call in calls_in(model, inputs) if call.kind == "self"]
    found = head_effects(model, inputs, [named(call) for call in calls], method="position")
    assert found.method == "position"
    largest = 0.0
    for call, effects in zip(calls, found.effects, strict=True):
        if call.rotation is None and call.bias is None:
            assert np.isnan(effects).all()
            continue
        for head in range(call.q.shape[1]):
            how = {"speed": 1.0 if call.rotation is None else 0.0, "bias": call.bias is None}
            change = Change(layer=call.layer, side=call.side, heads=(head,), **how)
            largest = max(largest, same(model, inputs, change, effects[:, head]))
    assert largest > 1e-4, "none of them does anything"


def test_heads_without_any_are_refused_all_together() -> None:
    model = tiny("GPT2LMHeadModel", **GPT)
    calls = [named(call) for call in calls_in(model)]
    with pytest.raises(NoPosition, match=r"^effects: 'position' needs a rotation or a bias"):
        head_effects(model, INPUTS, calls, method="position")
    with pytest.raises(InputError, match=r"^effects: 'position' needs"):
        audit(model, INPUTS["input_ids"], effects="position")


TURNING = ["LlamaForCausalLM", "Gemma3ForCausalLM", "GPTNeoXForCausalLM", "GPTJForCausalLM", "SmolLM3ForCausalLM"]


@pytest.mark.parametrize("off", ["rotation", "pair"])
@pytest.mark.parametrize("kind", TURNING)
def test_the_effects_are_those_of_passes_without_the_band(kind: str, off: Any) -> None:
    model = tiny(kind, **MODELS[kind])
    inputs = inputs_of(model)
    calls = calls_in(model, inputs)
    found = band_effects(model, inputs, [named(call) for call in calls], bands=2, off=off)
    np.testing.assert_allclose(found.baseline, loss(model, inputs), atol=1e-6)
    largest = 0.0
    for call, effects, bands, frequencies in zip(calls, found.effects, found.bands, found.frequencies, strict=True):
        if call.rotation is None:
            assert (effects.shape[1], bands, len(frequencies)) == (0, (), 0)
            continue
        np.testing.assert_array_equal(frequencies, call.rotation.frequencies)
        assert [each for band in bands for each in band] == list(range(len(frequencies)))
        for number, band in enumerate(bands):
            control = BandControl(**{"still" if off == "rotation" else "silent": band})
            largest = max(largest, same(model, inputs, Change(layer=call.layer, bands=control), effects[:, number]))
    assert largest > 1e-4, "none of them does anything"


def test_what_has_no_bands_is_refused() -> None:
    model = tiny("BloomForCausalLM", **BLOOM)
    calls = [named(call) for call in calls_in(model)]
    with pytest.raises(NoPosition, match=r"^effects: 'bands' needs a known rotation"):
        band_effects(model, INPUTS, calls)
    with pytest.raises(InputError, match=r"^bands must be at least 1, got 0"):
        band_effects(model, INPUTS, calls, bands=0)
