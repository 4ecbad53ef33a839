"""Each call of a model with an encoder and a decoder is on the side that its tokens are on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from toeplens.sources.huggingface import AttentionCall, captured, head_effects
from toeplens.studies.auditing.survey.models import DECODED, TOKENS, small_inputs, small_model

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["encoder-decoder", "seamless_m4t"])
def test_sides_are_told_by_the_outermost_name(name: str) -> None:
    """A decoder's layers may lie in a list that is called its encoder, and an encoder be one of text."""
    model, calls = small_model(name), list[AttentionCall]()
    captured(model, small_inputs(model), calls.append)
    assert [(call.side, call.kind, call.layer, call.causal, call.q.shape[2]) for call in calls] == [
        *(("encoder", "self", layer, False, TOKENS) for layer in range(2)),
        *(("decoder", kind, layer, kind == "self", DECODED) for layer in range(2) for kind in ("self", "cross")),
    ]


@pytest.mark.parametrize(
    ("name", "projections"),
    [
        ("encoder-decoder", ("encoder.encoder.layer.1.attention", "decoder.bert.encoder.layer.0.crossattention")),
        ("seamless_m4t", ("text_encoder.layers.1.self_attn", "text_decoder.layers.0.cross_attention")),
    ],
)
def test_effects_are_of_the_loss_of_what_is_decoded(name: str, projections: tuple[str, str]) -> None:
    """Whatever the class is called, and wherever in it the head is; against plain passes with a head's columns 0."""
    model, calls = small_model(name), list[tuple[str, str, str, int, int]]()
    inputs = small_inputs(model)
    captured(model, inputs, lambda call: calls.append((call.module, call.side, call.kind, call.layer, 4)))
    found = head_effects(model, inputs, calls)
    assert found.outcome == "loss"

    @torch.no_grad()
    def losses() -> np.ndarray:
        words = inputs["decoder_input_ids"]
        logits = model(**inputs).logits[:, :-1].double()
        return F.cross_entropy(logits.transpose(1, 2), words[:, 1:], reduction="none").mean(1).numpy()

    intact = losses()
    assert found.baseline is not None
    np.testing.assert_allclose(found.baseline, intact, rtol=1e-5)
    for prefix in projections:
        at = next(place for place, call in enumerate(calls) if call[0].startswith(prefix))
        part = model.get_submodule(prefix)
        weight = (part.output.dense if name == "encoder-decoder" else part.out_proj).weight
        own = weight.detach().clone()
        for head in range(4):
            with torch.no_grad():
                weight[:, 16 * head : 16 * (head + 1)] = 0
            effect = losses() - intact
            with torch.no_grad():
                weight.copy_(own)
            assert np.abs(effect).max() > 1e-4
            np.testing.assert_allclose(found.effects[at][:, head], effect, rtol=1e-4, atol=1e-5)
