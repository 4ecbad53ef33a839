"""Models of sound and other inputs that are no tokens: Conformers with both kinds of position, audited on waveforms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.backends.hf.models import SIZES, T5, calls_in, full_state, tiny
from torch import Tensor

from toeplens import audit
from toeplens.backends.hf import NoPosition, as_tokens, capture_and_compare, capture_attention
from toeplens.backends.hf.capture import describe_early_rotation, offset_share
from toeplens.lens import NotSeparable
from toeplens.utils import InputError

WIDTH, RATE, SAMPLES, FRAMES = 32, 16000, 640, 30
CONFORMER = {name: SIZES[name] for name in SIZES if name != "max_position_embeddings"} | {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 8),
    "conv_stride": (5, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 4,
    "conv_depthwise_kernel_size": 5,
}
KINDS = ("rotary", "relative")
CLASSES = ("Wav2Vec2ConformerModel", "Wav2Vec2ConformerForCTC")


def conformer(kind: str, cls: str = CLASSES[0]) -> Any:
    return tiny(cls, position_embeddings_type=kind, **CONFORMER)


def waves(count: int = 9) -> dict[str, Tensor]:
    """Sines of different pitches, with noise."""
    times, pitches = torch.arange(SAMPLES) / RATE, 200 + 60 * torch.arange(count)
    noise = torch.randn(count, SAMPLES, generator=torch.Generator().manual_seed(0))
    return {"input_values": (2 * math.pi * pitches[:, None] * times).sin() + 0.1 * noise}


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_call_is_proved_on_its_own_waveforms(kind: str, cls: str) -> None:
    model, calls = conformer(kind, cls), []
    before = full_state(model)
    assert capture_and_compare(model, waves(), calls.append) < 1e-5
    assert [(call.side, call.kind, call.layer, call.q.shape[2]) for call in calls] == [
        ("encoder", "self", layer, FRAMES) for layer in range(2)
    ]
    for call in calls:
        assert call.proof.weights is not None
        assert call.proof.weights < 1e-4
        assert call.proof.outputs < 1e-4
        assert call.proof.queries == FRAMES
        assert call.weights is not None
        assert (call.softmax(call.logits()) - call.weights).abs().max() < 1e-4
        refused = (
            r"rotation is applied to the hidden states, .* at most \d\d?% of"
            if kind == "rotary"
            else "by offset|offset only"
        )
        with pytest.raises(NotSeparable, match=refused):
            call.behaviour_arguments()
        assert (call.rotation, call.bias is None) == (None, kind == "rotary")
    assert full_state(model) == before


def test_the_offset_explains_all_position_when_rotation_precedes_projection() -> None:
    model, inputs = conformer("rotary"), waves()
    with torch.no_grad():
        for layer in model.encoder.layers:
            for of in (layer.self_attn.linear_q, layer.self_attn.linear_k):
                of.weight.copy_(torch.eye(WIDTH))
                of.bias.zero_()
    said = calls_in(model, inputs)[0].unknown
    assert (
        said == "its rotation is applied to the hidden states, before their projection to queries and keys."
    )  # and no share is reported
    random = torch.randn(1, 2, 12, 2, generator=torch.Generator().manual_seed(1))
    share = offset_share(random, random.flip(2))
    assert 0 < share < 0.9
    assert f"at most {100 * share:.0f}% of" in describe_early_rotation((random, random.flip(2)))
    assert "%" not in describe_early_rotation(None)


def test_position_can_be_removed_only_from_the_relative_form() -> None:
    actual = audit(conformer("relative"), waves(), effects="position")
    assert all(head.effect is not None and head.effect > 0 for head in actual.heads)
    with pytest.raises(NoPosition):
        audit(conformer("rotary"), waves(), effects="position")


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (
            {"input_values": torch.zeros(4)},
            r"inputs must have a tensor with the sequences first as input_values, got \[4\]",
        ),
        (
            {**waves(2), "attention_mask": torch.ones(3, SAMPLES)},
            "inputs must have the same number of sequences, got 2 of input_values, 3 of attention_mask",
        ),
        (
            {**waves(2), "attention_mask": torch.ones(2, SAMPLES).tril(600)},
            "^inputs must be of one length, without masked parts",
        ),
        ({"input_values": torch.zeros(2, 45)}, "^inputs must give at least 2 frames, got 1"),
    ],
)
def test_unreadable_inputs_are_refused(inputs: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        as_tokens(conformer("rotary"), inputs)


def test_encoder_decoders_and_partial_sequences_are_refused() -> None:
    with pytest.raises(InputError, match="T5Model has an encoder and a decoder"):
        as_tokens(tiny("T5Model", **T5), {"inputs_embeds": torch.zeros(2, 12, 32)})
    with pytest.raises(InputError, match=f"must be whole sequences of {FRAMES} frames"):
        audit(conformer("rotary"), waves(), max_tokens=10, effects="none")
    loaded, numbers_of = as_tokens(conformer("rotary"), waves())
    with pytest.raises(InputError, match="must be whole sequences"):
        capture_attention(loaded.model, {"input_ids": numbers_of + 9 * FRAMES}, lambda call: None)
