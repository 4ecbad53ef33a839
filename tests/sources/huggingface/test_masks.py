"""Masks are told from biases by what they do, in every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from toeplens.sources.huggingface import AttentionCall, captured, compared
from toeplens.sources.huggingface.capture.masks import bias_and_mask, hides_from, low
from toeplens.sources.huggingface.model import precision

transformers = pytest.importorskip("transformers")

TOKENS, PADDED = 12, 9
GPT = {"vocab_size": 31, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
NEO = {"vocab_size": 31, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
NEO |= {"attention_types": [[["global", "local"], 1]], "window_size": 4}
MODELS: dict[str, tuple[dict[str, Any], list[int | None]]] = {  # sizes, windows
    "GPTJ": (GPT, [None]),
    "CodeGen": (GPT, [None]),
    "GPTNeo": (NEO, [None, 4]),
}
PLACES = torch.arange(TOKENS)


def model_of(name: str, dtype: torch.dtype) -> Any:
    sizes, _ = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**sizes, bos_token_id=1, eos_token_id=2)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(0.2 * noise if weight.ndim > 1 else weight + 0.1 * noise)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_mask_of_half_precision_added_to_single_is_a_mask(name: str, dtype: torch.dtype) -> None:
    """These form their logits in float32 and add a mask that was made in the model's dtype."""
    tokens = torch.randint(4, 31, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    there = torch.ones_like(tokens)
    there[1, PADDED:] = 0
    calls: list[AttentionCall] = []
    captured(model_of(name, dtype), {"input_ids": tokens, "attention_mask": there}, calls.append)
    assert [call.window for call in calls] == MODELS[name][1]
    for call in calls:
        assert call.q.dtype == torch.float32
        assert (call.side, call.causal, call.bias, call.unknown) == ("decoder", True, None, None)
        lengths = call.lengths
        assert lengths is not None
        assert lengths.tolist() == [TOKENS, PADDED]


def test_large_biases_are_no_masks() -> None:
    """ALiBi's reach -16384 step by step; a mask is far below what is nearer to 0, in whatever dtype it was made."""
    away = torch.arange(0.0, 32768.0)
    alibi = -0.5 * away.view(1, 1, 1, -1) * torch.tensor([1.0, 0.25]).view(1, 2, 1, 1)
    assert hides_from(alibi) == low(torch.float32)
    for value in (-1e4, -65504.0, -131008.0):
        term = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(PLACES[:, None] < PLACES, value)
        assert torch.equal(term <= hides_from(term), term == value)
    both = alibi[..., :2048] + torch.where(away[:2048] > 2000, -65504.0, 0.0)
    assert torch.equal(both <= hides_from(both), (away[:2048] > 2000).expand_as(both))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        term = torch.zeros(1, 1, 4, 4, dtype=dtype).masked_fill(torch.ones(4, 4).triu(1) > 0, torch.finfo(dtype).min)
        assert torch.equal(term <= hides_from(term), term < 0)


def test_what_leaves_a_weight_hides_nothing() -> None:
    """The same term, beside logits that it outweighs and beside logits that outweigh it."""
    term = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(PLACES[:, None] < PLACES, -2000.0)
    rows = torch.arange(TOKENS)
    logits = PLACES.expand(1, 1, TOKENS, -1)

    def weights(scale: float) -> Tensor:
        return (scale * logits + term).softmax(-1)

    bias, visible = bias_and_mask([term], [], TOKENS, rows, lambda bias, visible: weights(1.0))
    assert bias is None
    assert visible is not None
    assert torch.equal(visible[0, 0], PLACES[:, None] >= PLACES)
    bias, visible = bias_and_mask([term], [], TOKENS, rows, lambda bias, visible: weights(1000.0))
    assert visible is None
    assert bias is not None
    assert torch.equal(bias, term)
    hides = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    hides[..., 3:, :] = True  # these queries see no key, so that their weights are whatever comes of it
    scaled = weights(1.0)
    scaled[..., 3:, :] = 1 / TOKENS
    bias, visible = bias_and_mask([term], [hides], TOKENS, rows, lambda bias, visible: scaled)
    assert bias is None


def test_rounding_is_that_of_the_models_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that gives logits in float32 has the rounding of what it was given all the same."""
    model = model_of("GPTNeo", torch.bfloat16)
    assert precision(model) == torch.bfloat16
    own, passes = model.lm_head.forward, []

    def wide(x: Tensor) -> Tensor:
        passes.append(1)
        return own(x).float() * (1 + 0.01 * (len(passes) > 1))

    monkeypatch.setattr(model.lm_head, "forward", wide)
    inputs = {"input_ids": torch.randint(4, 31, (2, TOKENS), generator=torch.Generator().manual_seed(3))}
    assert compared(model, inputs, lambda call: None) == pytest.approx(0.01, rel=1e-3)
    model.lm_head.weight.data = model.lm_head.weight.data.double()
    assert precision(model) == torch.bfloat16
    assert precision(model.lm_head) == torch.float64
    assert precision(torch.nn.Identity()) == torch.float32
