"""On long inputs fused attention, chosen queries, chosen tokens and the first sequence stand for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sources.huggingface import models
from torch import Tensor

from toeplens.ground import InputError
from toeplens.lens import NoForm
from toeplens.sources.huggingface import calls, capture, compared, rotation, trace
from toeplens.sources.huggingface.model import NOBODY, OBSERVER, table
from toeplens.sources.huggingface.rotation import find_rotation

KINDS = {
    "LlamaModel": models.SIZES,
    "Gemma3TextModel": models.NARROW,
    "GPT2Model": models.GPT,
    "BertModel": models.SIZES,
    "Qwen2Model": models.GROUPED,
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_attention_is_the_eager_one(kind: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs go on and are proved, with the eager weights of some queries."""
    model, inputs = models.tiny(kind, **KINDS[kind]), models.padded_inputs() if padded else models.INPUTS
    whole = models.calls_in(model, inputs)
    monkeypatch.setattr(trace, "_LONG", 1)
    monkeypatch.setattr(calls, "_AT_ONCE", 1)
    found = models.calls_in(model, inputs)
    assert len(found) == len(whole) == 2
    for call, own in zip(found, whole, strict=True):
        assert own.weights is not None
        assert (call.weights, call.proof.queries, own.proof.queries) == (None, 8, models.TOKENS)
        assert call.proof.weights is not None
        assert max(call.proof.weights, call.proof.outputs) < 1e-5
        torch.testing.assert_close(call.heads, own.heads, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(call.logits(), own.logits(), atol=1e-4, rtol=1e-4)
        assert (call.causal, call.window, call.unknown) == (own.causal, own.window, own.unknown)


@pytest.mark.parametrize("way", ["another", "refused"])
def test_fused_attention_that_is_another_is_not_gone_on_with(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that knows nothing of a cap, or says so."""
    model, own = models.tiny("LlamaModel", **models.SIZES), table()["sdpa"]
    whole = models.calls_in(model)

    def other(*args: Any, **more: Any) -> Any:
        if way == "refused":
            raise ValueError("softcap")
        return 1.01 * own(*args, **more)[0], None

    monkeypatch.setattr(trace, "_LONG", 1)
    monkeypatch.setitem(table(), "sdpa", other)
    for call, before in zip(models.calls_in(model), whole, strict=True):
        assert call.weights is not None
        torch.testing.assert_close(call.heads, before.heads, atol=1e-6, rtol=1e-6)


def rotated(
    tokens: int, rounding: torch.dtype = torch.float32
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Queries and keys before and after three pairs are turned, the third of nothing; and the positions."""
    made, positions = torch.Generator().manual_seed(2), 5 + torch.arange(tokens)
    angles = positions[:, None] * torch.tensor([1.0, 0.1, 0.003], dtype=torch.float64)
    cos, sin = (x.to(rounding).float() for x in (angles.cos(), angles.sin()))
    both = []
    for heads in (4, 2):
        x = torch.randn(2, heads, tokens, 6, generator=made)
        x[..., 2::3] = 0
        a, b = x.chunk(2, -1)
        both.append((x, torch.cat((a * cos - b * sin, a * sin + b * cos), -1)))
    return both[0], both[1], positions.unsqueeze(0)


@pytest.mark.parametrize("rounding", [torch.float32, torch.bfloat16])
def test_frequencies_of_long_inputs_are_read_from_near_to_far(rounding: torch.dtype) -> None:
    """Neighbours alone would leave the slope off by turns at the end."""
    tokens = 30_000
    found = find_rotation(*rotated(tokens, rounding), rounding=rounding)
    assert len(found.frequencies) == 2
    wrong = (found.frequencies - torch.tensor([1.0, 0.1], dtype=torch.float64)).abs()
    assert float(wrong.max()) * tokens < 0.02


@pytest.mark.parametrize("token", [0, 20, 33, 59])
def test_a_token_that_is_turned_otherwise_is_noticed(token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is read or not."""
    monkeypatch.setattr(rotation, "_READ", 10)
    q, k, positions = rotated(60)
    k[1][:, :, token] *= -1
    with pytest.raises(NoForm, match="rotation: it"):
        find_rotation(q, k, positions)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertModel", "LlamaModel", "T5Model"])
def test_the_plain_pass_of_a_long_sequence_is_of_its_first_tokens_unless_later_ones_matter_to_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve tokens, of which six are the first."""
    monkeypatch.setattr(capture, "_FIRST", 6)
    monkeypatch.setattr(capture, "_LAST", 4)
    sizes = {"GPT2LMHeadModel": models.GPT, "T5Model": models.T5}.get(name, models.SIZES)
    model, lengths = models.tiny(name, **sizes), list[int]()
    inputs = {"input_ids": models.INPUTS["input_ids"][:1]}
    if name == "T5Model":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    embedding = model.encoder.embed_tokens if name == "T5Model" else model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda module, args, out: lengths.append(args[0].shape[1]))
    assert compared(model, inputs, lambda call: None) < 1e-5
    handle.remove()
    assert lengths == {"BertModel": [6, 12, 12], "T5Model": [12, 12]}.get(name, [6, 12])


@pytest.mark.parametrize("place", [2, 9])
def test_a_pass_that_is_otherwise_at_the_first_or_the_last_tokens_is_noticed(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all outputs are compared, as later tokens matter to the first ones; and of the first ones anyway."""
    monkeypatch.setattr(capture, "_FIRST", 6)
    model = models.tiny("BertModel" if place == 9 else "LlamaModel", **models.SIZES)
    inputs = {"input_ids": models.INPUTS["input_ids"][:1]}
    last = model.encoder.layer[-1] if place == 9 else model.layers[-1]
    own = last.forward

    def otherwise(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        states = found[0] if isinstance(found, tuple) else found
        if OBSERVER.get() is not NOBODY:
            states[:, place] += 1
        return found

    monkeypatch.setattr(last, "forward", otherwise)
    with pytest.raises(InputError, match="its reproduced outputs differ"):
        compared(model, inputs, lambda call: None)


def test_attention_by_hand_that_goes_by_the_length_is_not_changed_by_a_short_pass() -> None:
    """BigBird attends to everything from then on where it once read few tokens."""
    sizes = {"sep_token_id": 2, "num_hidden_layers": 1, "max_position_embeddings": 1024}
    model = models.tiny("BigBirdModel", **models.SIZES | sizes | {"attention_type": "block_sparse"})
    tokens = torch.randint(4, 31, (1, 768), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="was not understood"):
        compared(model, {"input_ids": tokens}, lambda call: None)
    assert model.attention_type == "block_sparse"
