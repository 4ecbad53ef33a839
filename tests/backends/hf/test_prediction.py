"""Predictions in blocks with a cache of keys are those of one pass, and under changes those of the changed pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.backends.hf.models import GROUPED, tiny
from tests.hosts.families import FAMILIES
from torch import Tensor

from toeplens.backends.hf import Change, intervene, prediction
from toeplens.utils import InputError

LONG = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
ORIGINAL_LENGTH = {"original_max_position_embeddings": 20}
JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "use_mamba_kernels": False,
    "mamba_dt_rank": 4,
    "num_experts": 2,
}
FAMILY = ("Llama", "GPT-2", "Gemma 3", "OPT", "Mistral", "BLOOM")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {name: FAMILIES[name] for name in FAMILY} | {
    "Mamba": ("MambaForCausalLM", {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 2}),
    # whose frequencies depend on the number of tokens, and whose cache holds a recurrence's state as well
    "Phi-3": ("Phi3ForCausalLM", GROUPED | ORIGINAL_LENGTH | {"rope_parameters": LONG | ORIGINAL_LENGTH}),
    "Jamba": ("JambaForCausalLM", GROUPED | JAMBA),
}
PLACES = (1, 2, 5, 9, 16, 23, 39)


def make_model(name: str) -> Any:
    kind, sizes = MODELS[name]
    return tiny(kind, **sizes)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(3, 31, (2, 40), generator=torch.Generator().manual_seed(1))


def reference_losses(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    nats, right = torch.zeros(2, len(tokens), len(PLACES))
    for b in range(len(tokens)):
        for n, place in enumerate(PLACES):
            row, answer = logits[b, place - 1], tokens[b, place]
            nats[b, n] = -(row.exp() / row.exp().sum())[answer].log()
            right[b, n] = row[answer] == row.max()
    return nats, right.bool()


@pytest.mark.parametrize("block", [1, 7, 1024])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_match_one_pass(name: str, block: int, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(name)
    monkeypatch.setattr(prediction, "_MIN_BLOCK", block)
    monkeypatch.setattr(prediction, "_MAX_BLOCK", block)
    actual = prediction.predict_tokens(model, tokens, PLACES)
    with torch.no_grad():
        nats, right = reference_losses(model(tokens).logits, tokens)
    torch.testing.assert_close(actual.nats.float(), nats, atol=2e-5, rtol=1e-5)
    assert bool((actual.correct == right).all())


def test_predicted_choices_match_the_logits(tokens: Tensor) -> None:
    model = make_model("Llama")
    choices = torch.stack((tokens[:, 9], (tokens[:, 9] + 1) % 31, (tokens[:, 9] + 2) % 31), 1)
    actual = prediction.predict_tokens(model, tokens, [9], choices=choices)
    with torch.no_grad():
        among = model(tokens).logits[:, 8].gather(-1, choices)
    torch.testing.assert_close(actual.nats[:, 0].float(), -among.log_softmax(-1)[:, 0], atol=1e-6, rtol=1e-5)
    assert actual.correct[:, 0].tolist() == (among.argmax(-1) == 0).tolist()
    with pytest.raises(InputError, match="choices must contain the token"):
        prediction.predict_tokens(model, tokens, [10], choices=torch.full((2, 1), 30))


def test_predictions_under_changes_match_the_changed_pass(tokens: Tensor) -> None:
    model, changes = make_model("Llama"), [Change(layer=0, speed=0.0), Change(layer=1, heads=(2,), output="zero")]
    actual = prediction.predict_tokens(model, tokens, PLACES, changes=changes)
    with torch.no_grad(), intervene(model, changes):
        nats, right = reference_losses(model(tokens).logits, tokens)
    torch.testing.assert_close(actual.nats.float(), nats, atol=2e-5, rtol=1e-5)
    assert bool((actual.correct == right).all())


def test_invalid_positions_and_models_without_logits_are_refused(tokens: Tensor) -> None:
    for positions in ([], [0], [40], [3, 2], [3, 3]):
        with pytest.raises(InputError, match=r"positions must be of 1 to 39 and ascend"):
            prediction.predict_tokens(make_model("Llama"), tokens, positions)
    with pytest.raises(InputError, match="model: LlamaModel returns no logits"):
        prediction.predict_tokens(tiny("LlamaModel", **GROUPED), tokens, [3])
