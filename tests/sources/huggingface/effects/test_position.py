"""What position in a head is worth, against whole passes in which it alone is without; audits and pages say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.sources.huggingface.models import BLOOM, GPT, GROUPED, INPUTS, NARROW, SIZES, T5, calls_in, tiny
from torch.nn import functional as F

from toeplens.ground import InputError
from toeplens.sources.huggingface import AttentionCall, Change, NoPosition, head_effects, intervened
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


@pytest.mark.parametrize("kind", MODELS)
def test_the_effects_are_those_of_passes_in_which_one_head_is_without_position(kind: str) -> None:
    model = tiny(kind, **MODELS[kind])
    inputs = inputs_of(model)
    calls = [call for call in calls_in(model, inputs) if call.kind == "self"]
    found = head_effects(model, inputs, [named(call) for call in calls], method="position")
    intact, moved = loss(model, inputs), False
    assert found.method == "position"
    for call, effects in zip(calls, found.effects, strict=True):
        for head in range(call.q.shape[1]):
            if call.rotation is None and call.bias is None:
                assert np.isnan(effects[:, head]).all()
                continue
            change = Change(
                layer=call.layer,
                side=call.side,
                heads=(head,),
                speed=1.0 if call.rotation is None else 0.0,
                bias=call.bias is None,
            )
            with intervened(model, change):
                wanted = loss(model, inputs) - intact
            np.testing.assert_allclose(effects[:, head], wanted, atol=2e-6)
            moved = moved or bool(np.abs(wanted).max() > 1e-4)
    assert moved, "none of them does anything"


def test_heads_without_any_are_refused_all_together() -> None:
    model = tiny("GPT2LMHeadModel", **GPT)
    calls = [named(call) for call in calls_in(model)]
    with pytest.raises(NoPosition, match=r"^effects: 'position' needs a rotation or a bias"):
        head_effects(model, INPUTS, calls, method="position")
    with pytest.raises(InputError, match=r"^effects: 'position' needs"):
        audit(model, INPUTS["input_ids"], effects="position")
