"""In each family: without position it is the model with its own stopped, with its own put in again it is the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.hosts.families import FAMILIES, ROTATING, TABLES
from tests.sources.huggingface.models import BLOOM, GPT, INPUTS, T5, calls_in, padded_inputs, tiny
from torch import Tensor

from toeplens import hosts
from toeplens.ground import InputError
from toeplens.sources.huggingface import Change, intervened

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


@pytest.mark.parametrize("kind", ["whole", "right", "left"])
@pytest.mark.parametrize("name", ROTATING)
def test_its_own_rotation_put_in_again_is_the_model(name: str, kind: str) -> None:
    model = tiny(FAMILIES[name][0], **FAMILIES[name][1])
    inputs, options = inputs_of(model, kind), dict(model.config.rope_parameters)
    if any(isinstance(value, dict) for value in options.values()):
        options["layer_types"] = model.config.layer_types
    plain = logits(model, inputs)
    hosts.install(model, "scaled-rope", **options)
    assert apart(logits(model, inputs), plain) <= TOLERANCE


@pytest.mark.parametrize("kind", ["whole", "right", "left"])
def test_bloom_with_alibi_is_bloom(kind: str) -> None:
    model = tiny("BloomForCausalLM", **BLOOM)
    inputs = inputs_of(model, kind)
    plain = logits(model, inputs)
    hosts.install(model, "alibi")
    assert apart(logits(model, inputs), plain) <= TOLERANCE


def test_t5_with_t5_s_bias_is_t5() -> None:
    model = tiny("T5ForConditionalGeneration", **T5)
    inputs = inputs_of(model, "right")
    plain = logits(model, inputs)
    host = hosts.install(model, "t5")
    with torch.no_grad():
        for stack, ours in zip((model.encoder, model.decoder), host.encodings.parameters(), strict=True):
            ours.copy_(stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight)
    assert apart(logits(model, inputs), plain) <= TOLERANCE


@pytest.mark.parametrize("name", ["GPT-2", "OPT", "BERT"])
def test_a_table_of_its_own_put_in_again_is_the_model(name: str) -> None:
    model = tiny(FAMILIES[name][0], **FAMILIES[name][1])
    inputs = inputs_of(model)
    plain, table = logits(model, inputs), model.get_submodule(TABLES[FAMILIES[name][0]][0]).weight
    host = hosts.install(model, "learned")
    with torch.no_grad():
        next(host.encodings.parameters()).copy_(table[-64:])  # OPT's has two rows before the first position's
    assert apart(logits(model, inputs), plain) <= TOLERANCE


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BLOOM"])
def test_padding_on_the_left_changes_nothing(name: str) -> None:
    """Places are counted from the first token, which GPT-2 by itself does not do."""
    model = tiny(FAMILIES[name][0], **FAMILIES[name][1])
    hosts.install(model, "learned")
    inputs = inputs_of(model, "left")
    tokens = inputs["input_ids"][1:, inputs["attention_mask"][1].bool()]
    padded = model(**inputs)[0][1, inputs["attention_mask"][1].bool()].detach()
    assert apart(padded, model(input_ids=tokens)[0][0].detach()) <= TOLERANCE


def test_some_layers_alone() -> None:
    model = tiny(FAMILIES["Llama"][0], **FAMILIES["Llama"][1])
    plain, inputs = logits(model, INPUTS), INPUTS
    host = hosts.install(model, "rope", layers=[1], base=float(model.config.rope_parameters["rope_theta"]))
    assert apart(logits(model, inputs), plain) <= TOLERANCE
    assert len(host.encodings) == 1
    hosts.uninstall(model)
    hosts.install(model, "nope", layers=[0])
    with intervened_one(model) as wanted:
        assert apart(logits(model, inputs), wanted) <= TOLERANCE


class intervened_one:  # noqa: N801
    """The logits of a model whose first layer's rotation is stopped, its host out of the way."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> Tensor:
        hosts.uninstall(self.model)
        with intervened(self.model, Change(layer=0, speed=0.0)):
            wanted = logits(self.model, INPUTS)
        hosts.install(self.model, "nope", layers=[0])
        return wanted

    def __exit__(self, *_: object) -> None:
        hosts.uninstall(self.model)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("GPTJForCausalLM", GPT | {"rotary_dim": 4}), ("FalconForCausalLM", FAMILIES["Llama"][1])],
)
def test_a_model_that_does_not_ask_the_interface_is_refused_and_left_as_it_was(kind: str, sizes: dict) -> None:
    model = tiny(kind, **sizes)
    plain, names = logits(model, INPUTS), list(model.state_dict())
    with pytest.raises(InputError, match="does not ask transformers' attention interface once a layer"):
        hosts.install(model, "alibi")
    assert logits(model, INPUTS).equal(plain)
    assert list(model.state_dict()) == names


def test_a_model_whose_position_cannot_be_taken_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 whose table goes by another name than those known: it still tells positions apart."""
    monkeypatch.setattr("toeplens.hosts.anatomy._TABLES", ())
    model = tiny("GPT2LMHeadModel", **GPT)
    plain = logits(model, INPUTS)
    with pytest.raises(InputError, match="GPT2LMHeadModel still tells positions apart with its own out of the way"):
        hosts.install(model, "alibi")
    assert logits(model, INPUTS).equal(plain)


def test_attention_that_does_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(FAMILIES["Llama"][0], **FAMILIES["Llama"][1])
    scale = "toeplens.hosts.proof.plain"
    from toeplens.hosts import interface

    monkeypatch.setattr(scale, lambda *a, **k: (1.01 * interface.plain(*a, **k)[0], None))
    with pytest.raises(InputError, match="does more than its queries, keys and mask say"):
        hosts.install(model, "alibi")
