"""In each family: without position it is the model with its own stopped, with its own put in again it is the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.hosts.families import FAMILIES, ROTATING, TABLES
from tests.sources.huggingface.models import GPT, INPUTS, calls_in, padded_inputs, tiny
from tests.sources.huggingface.test_frames import FRAMES, WIDTH, conformer, waves
from torch import Tensor

from toeplens import hosts
from toeplens.ground import InputError
from toeplens.sources.huggingface import Change, installed, intervened

TOLERANCE = 2e-6  # of the largest logit, in float32


def inputs_of(model: Any, kind: str = "whole") -> dict[str, Tensor]:
    """Two texts of 12 tokens, one of them with padding on a side; an encoder-decoder is given the decoder's too."""
    given = {"whole": INPUTS, "right": padded_inputs()}.get(kind) or {
        **INPUTS,
        "attention_mask": padded_inputs()["attention_mask"].flip(1),
    }
    if model.config.is_encoder_decoder:
        given = given | {"decoder_input_ids": INPUTS["input_ids"][:, :7]}
    return given


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Of the tokens that are no padding."""
    with torch.no_grad():
        out = model(**inputs)[0]
    mask = inputs.get("attention_mask")
    return out if mask is None or model.config.is_encoder_decoder else out[mask.bool()]


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def stopped(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The model's logits with its own position stopped, each in another way than a host's."""
    names = TABLES.get(type(model).__name__, ())
    if names:
        tables = [model.get_submodule(name).weight for name in names]
        before = [table.detach().clone() for table in tables]
        with torch.no_grad():
            for table in tables:
                table.zero_()
            wanted = logits(model, inputs)
            for table, kept in zip(tables, before, strict=True):
                table.copy_(kept)
        return wanted
    changes = [
        Change(layer=call.layer, side=call.side, speed=0.0)
        if call.rotation is not None
        else Change(layer=call.layer, side=call.side, bias=False)
        for call in calls_in(model, inputs)
        if call.kind == "self"
    ]
    with intervened(model, changes):
        return logits(model, inputs)


@pytest.mark.parametrize("name", FAMILIES)
def test_without_position_it_is_the_model_with_its_own_stopped(name: str) -> None:
    model = tiny(FAMILIES[name][0], **FAMILIES[name][1])
    for kind in ("whole", "right"):
        inputs = inputs_of(model, kind)
        plain, wanted = logits(model, inputs), stopped(model, inputs)
        hosts.install(model, "nope")
        assert apart(logits(model, inputs), wanted) <= TOLERANCE
        assert apart(plain, wanted) > 1e-3
        hosts.uninstall(model)
        assert logits(model, inputs).equal(plain)


def own_again(model: Any) -> bool:
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
    elif kind in {FAMILIES[name][0] for name in ROTATING}:
        options = dict(model.config.rope_parameters)
        if any(isinstance(value, dict) for value in options.values()):
            options["layer_types"] = model.config.layer_types
        hosts.install(model, "scaled-rope", **options)
    else:
        return False
    return True


@pytest.mark.parametrize("kind", ["whole", "right", "left"])
@pytest.mark.parametrize("name", [*ROTATING, "BLOOM", "T5", "GPT-2", "OPT", "BERT"])
def test_its_own_position_put_in_again_is_the_model(name: str, kind: str) -> None:
    if kind == "left" and name in ("GPT-2", "BERT", "T5"):
        pytest.skip("it counts places from the padding on; ours from the first token")
    model = tiny(FAMILIES[name][0], **FAMILIES[name][1])
    inputs = inputs_of(model, kind)
    plain = logits(model, inputs)
    assert own_again(model)
    assert apart(logits(model, inputs), plain) <= TOLERANCE


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
    ],
)
def test_a_model_that_does_not_ask_the_interface_is_refused_and_left_as_it_was(
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


def test_a_model_whose_position_cannot_be_taken_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 whose table goes by another name than those known: it still tells positions apart."""
    monkeypatch.setattr("toeplens.sources.huggingface.install._TABLES", ())
    model = tiny("GPT2LMHeadModel", **GPT)
    plain = logits(model, INPUTS)
    with pytest.raises(InputError, match="GPT2LMHeadModel still depends on positions without its own encoding"):
        hosts.install(model, "alibi")
    assert logits(model, INPUTS).equal(plain)


def test_attention_that_does_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(FAMILIES["Llama"][0], **FAMILIES["Llama"][1])
    plain = installed.plain_attention
    monkeypatch.setattr(
        "toeplens.sources.huggingface.install.plain_attention", lambda *a, **k: (1.01 * plain(*a, **k)[0], None)
    )
    with pytest.raises(InputError, match="does more than queries, keys and mask say"):
        hosts.install(model, "alibi")


@pytest.mark.parametrize("kind", ["rotary", "relative"])
def test_on_waveforms_too_it_is_the_model_with_its_own_stopped(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        wanted = logits(model, inputs)
    hosts.install(model, "nope")
    assert apart(logits(model, inputs), wanted) <= TOLERANCE
    assert apart(plain, wanted) > 1e-4
    hosts.uninstall(model)
    assert logits(model, inputs).equal(plain)


def test_other_models_without_tokens_are_refused() -> None:
    model = tiny("ViTModel", image_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(InputError, match=r"^model: ViTModel takes pixel_values .* only Wav2Vec2-Conformer"):
        hosts.install(model, "rope")
