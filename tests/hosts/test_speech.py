"""Wav2Vec2-Conformer takes an encoding too: on waveforms, its own rotation or relative positions out of the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sources.huggingface.models import tiny
from tests.sources.huggingface.test_frames import conformer
from torch import Tensor

from toeplens import hosts
from toeplens.ground import InputError


def speech(kind: str) -> Any:
    return conformer(kind, "Wav2Vec2ConformerForCTC")


def waves() -> Tensor:
    """Two tones with noise, of half a second at 16 kHz."""
    time = torch.arange(4000) / 16000
    tones = torch.stack([(2 * torch.pi * pitch * time).sin() for pitch in (220.0, 523.0)])
    return tones + 0.1 * torch.randn(tones.shape, generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(waves()).logits


def stopped(model: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The logits of the model with its own position stopped by its own means."""
    encoder = model.wav2vec2_conformer.encoder
    with monkeypatch.context() as patch:
        if kind == "rotary":
            plain = encoder.embed_positions.forward

            def still(x: Tensor) -> Tensor:
                made = plain(x)
                return torch.stack((torch.ones_like(made[0]), torch.zeros_like(made[1])))

            patch.setattr(encoder.embed_positions, "forward", still)
        else:
            for layer in encoder.layers:
                patch.setattr(layer.self_attn.linear_pos.weight, "data", torch.zeros(32, 32))
        return logits(model)


@pytest.mark.parametrize("kind", ["rotary", "relative"])
def test_without_position_it_is_the_model_with_its_own_stopped(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = speech(kind)
    plain, wanted = logits(model), stopped(model, kind, monkeypatch)
    hosts.install(model, "nope")
    size = float(wanted.abs().max())
    assert float((logits(model) - wanted).abs().max()) <= 2e-6 * size
    assert float((plain - wanted).abs().max()) > 1e-4 * size
    hosts.uninstall(model)
    assert logits(model).equal(plain)


def test_other_models_without_tokens_are_refused() -> None:
    model = tiny("ViTModel", image_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(InputError, match=r"^model: ViTModel takes pixel_values .* only Wav2Vec2-Conformer"):
        hosts.install(model, "rope")
