"""In each family: without position it is the model with its own stopped, with its own put in again it is the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.backends.hf.models import GPT, INPUTS, calls_in, padded_inputs, tiny
from tests.backends.hf.test_frame_inputs import FRAMES, WIDTH, conformer, waves
from tests.hosts.families import FAMILIES, ROTARY, TABLES
from torch import Tensor

from toeplens import hosts
from toeplens.backends.hf import Change, intervene, patches
from toeplens.utils import InputError

TOLERANCE = 2e-6  # of the largest logit, in float32


def inputs_of(model: Any, kind: str = "whole") -> dict[str, Tensor]:
    """Two texts of 12 tokens, one of them with padding on a side; an encoder-decoder is given the decoder's too."""
    inputs = {"whole": INPUTS, "right": padded_inputs()}.get(kind) or {
        **INPUTS,
        "attention_mask": padded_inputs()["attention_mask"].flip(1),
    }
    if model.config.is_encoder_decoder:
        inputs = inputs | {"decoder_input_ids": INPUTS["input_ids"][:, :7]}
    return inputs


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Of the tokens that are no padding."""
    with torch.no_grad():
        out = model(**inputs)[0]
    mask = inputs.get("attention_mask")
    return out if mask is None or model.config.is_encoder_decoder else out[mask.bool()]


def max_difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def logits_without_position(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The model's logits with its own position stopped, each in another way than a host's."""
    names = TABLES.get(type(model).__name__, ())
    if names:
        tables = [model.get_submodule(name).weight for name in names]
        before = [table.detach().clone() for table in tables]
        with torch.no_grad():
            for table in tables:
                table.zero_()
            expected = logits(model, inputs)
            for table, kept in zip(tables, before, strict=True):
                table.copy_(kept)
        return expected
    changes = [
        Change(layer=call.layer, side=call.side, speed=0.0)
        if call.rotation is not None
        else Change(layer=call.layer, side=call.side, bias=False)
        for call in calls_in(model, inputs)
        if call.kind == "self"
    ]
    with intervene(model, changes):
        return logits(model, inputs)


@pytest.mark.parametrize("name", FAMILIES)
def test_installing_nope_removes_the_models_position(name: str) -> None:
    model = tiny(FAMILIES[name][0], **FAMILIES[name][1])
    for kind in ("whole", "right"):
        inputs = inputs_of(model, kind)
        plain, expected = logits(model, inputs), logits_without_position(model, inputs)
        hosts.install(model, "nope")
        assert max_difference(logits(model, inputs), expected) <= TOLERANCE
        assert max_difference(plain, expected) > 1e-3
        hosts.uninstall(model)
        assert logits(model, inputs).equal(plain)


def reinstall_own_position(model: Any) -> bool:
    """Install the encoding that is the model's own position, with its weights; False where none of ours is."""
    kind = type(model).__name__
    if kind == "BloomForCausalLM":
        hosts.install(model, "alibi")
    elif kind == "T5ForConditionalGeneration":
        host = hosts.install(model, "t5")
        for stack, ours in zip((model.encoder, model.decoder), host.encodings.parameters(), strict=True):
            ours.data.copy_(stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight)
    elif kind in TABLES:
        if len(TABLES[kind]) > 1 or kind == "RobertaForMaskedLM":  # BART's two rows, RoBERTa's padding's
            return False
        host = hosts.install(model, "learned")
        rows = model.get_submodule(TABLES[kind][0]).weight[-64:]  # OPT's has two rows before the first position's
        next(host.encodings.parameters()).data.copy_(rows)
    elif kind in {FAMILIES[name][0] for name in ROTARY}:
        options = dict(model.config.rope_parameters)
        if any(isinstance(value, dict) for value in options.values()):
            options["layer_types"] = model.config.layer_types
        hosts.install(model, "scaled-rope", **options)
    else:
        return False
    return True


@pytest.mark.parametrize("kind", ["whole", "right", "left"])
@pytest.mark.parametrize("name", [*ROTARY, "BLOOM", "T5", "GPT-2", "OPT", "BERT"])
def test_reinstalling_the_models_own_position_restores_its_output(name: str, kind: str) -> None:
    if kind == "left" and name in ("GPT-2", "BERT", "T5"):
        pytest.skip("it counts places from the padding on; ours from the first token")
    model = tiny(FAMILIES[name][0], **FAMILIES[name][1])
    inputs = inputs_of(model, kind)
    plain = logits(model, inputs)
    assert reinstall_own_position(model)
    assert max_difference(logits(model, inputs), plain) <= TOLERANCE


@pytest.mark.parametrize(
    ("kind", "sizes", "sentence"),
    [
        ("GPTJForCausalLM", GPT | {"rotary_dim": 4}, "does not call transformers' attention interface once per layer"),
        ("FalconForCausalLM", FAMILIES["Llama"][1], "does not call transformers' attention interface once per layer"),
        (
            "MptForCausalLM",
            {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
            r"MptForCausalLM does not run with another attention function \(AttributeError: .*\), so no",
        ),
        (
            "DogeForCausalLM",
            FAMILIES["Llama"][1],
            "the attention mask that DogeForCausalLM forms has values other than",
        ),
    ],
)
def test_a_model_without_the_attention_interface_is_refused_unchanged(
    kind: str, sizes: dict[str, Any], sentence: str
) -> None:
    model = tiny(kind, **sizes)
    plain, names = logits(model, INPUTS), list(model.state_dict())
    settings = copy.deepcopy(vars(model.config))
    with pytest.raises(InputError, match=sentence):
        hosts.install(model, "alibi")
    assert logits(model, INPUTS).equal(plain)
    assert list(model.state_dict()) == names
    assert vars(model.config) == settings


def test_a_model_whose_position_cannot_be_removed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 whose table goes by another name than those known: it still tells positions apart."""
    monkeypatch.setattr("toeplens.backends.hf.install._POSITION_TABLES", ())
    model = tiny("GPT2LMHeadModel", **GPT)
    plain = logits(model, INPUTS)
    with pytest.raises(InputError, match="GPT2LMHeadModel still depends on positions without its own encoding"):
        hosts.install(model, "alibi")
    assert logits(model, INPUTS).equal(plain)


def test_attention_with_unknown_extras_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(FAMILIES["Llama"][0], **FAMILIES["Llama"][1])
    plain = patches.plain_attention
    monkeypatch.setattr(
        "toeplens.backends.hf.install.plain_attention", lambda *a, **k: (1.01 * plain(*a, **k)[0], None)
    )
    with pytest.raises(InputError, match="does more than queries, keys and mask say"):
        hosts.install(model, "alibi")


@pytest.mark.parametrize("kind", ["rotary", "relative"])
def test_installing_nope_removes_position_in_waveform_models(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wav2Vec2-Conformer's rotation, or its relative positions, stopped by their own means."""
    model, inputs = conformer(kind, "Wav2Vec2ConformerForCTC"), waves(2)
    plain, encoder = logits(model, inputs), model.wav2vec2_conformer.encoder
    with monkeypatch.context() as patch:
        if kind == "rotary":
            cos, sin = encoder.embed_positions(torch.zeros(2, FRAMES, WIDTH))
            still = torch.stack((torch.ones_like(cos), torch.zeros_like(sin)))
            patch.setattr(encoder.embed_positions, "forward", lambda x: still)
        else:
            for layer in encoder.layers:
                patch.setattr(layer.self_attn.linear_pos.weight, "data", torch.zeros(WIDTH, WIDTH))
        expected = logits(model, inputs)
    hosts.install(model, "nope")
    assert max_difference(logits(model, inputs), expected) <= TOLERANCE
    assert max_difference(plain, expected) > 1e-4
    hosts.uninstall(model)
    assert logits(model, inputs).equal(plain)


def test_other_non_text_models_are_refused() -> None:
    model = tiny("ViTModel", image_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(InputError, match=r"^model: ViTModel takes pixel_values .* only Wav2Vec2-Conformer"):
        hosts.install(model, "rope")
