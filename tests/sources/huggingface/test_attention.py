"""Masks are told from biases by what they do, in every dtype; what is read some queries at a time is what all say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sources.huggingface.models import GPT, NARROW, PADDED, SIZES, TOKENS, calls_in, padded_inputs, tiny
from torch import Tensor

from toeplens.sources.huggingface import attention as masks
from toeplens.sources.huggingface import calls as calls_module
from toeplens.sources.huggingface.attention import bias_and_mask, hides_from, low

PLACES = torch.arange(TOKENS)
CAUSAL, NEAR = PLACES[:, None] >= PLACES, (PLACES[:, None] - PLACES).abs() < 4
TURNED = GPT | {"n_layer": 1, "rotary_dim": 4}
NEO = {"vocab_size": 31, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
NEO |= {"attention_types": [[["global", "local"], 1]], "window_size": 4}
MODELS: dict[str, tuple[dict[str, Any], list[int | None]]] = {  # sizes, windows
    "GPTJForCausalLM": (TURNED, [None]),
    "CodeGenForCausalLM": (TURNED, [None]),
    "GPTNeoForCausalLM": (NEO, [None, 4]),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_mask_of_half_precision_added_to_single_is_a_mask(name: str, dtype: torch.dtype) -> None:
    """These form their logits in float32 and add a mask that was made in the model's dtype."""
    sizes, windows = MODELS[name]
    calls = calls_in(tiny(name, **sizes).to(dtype), padded_inputs())
    assert [call.window for call in calls] == windows
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
    logits = PLACES.expand(1, 1, TOKENS, -1)

    def weights(scale: float) -> Tensor:
        return (scale * logits + term).softmax(-1)

    bias, visible = bias_and_mask([term], [], TOKENS, PLACES, lambda bias, visible: weights(1.0))
    assert bias is None
    assert visible is not None
    assert torch.equal(visible[0, 0], PLACES[:, None] >= PLACES)
    bias, visible = bias_and_mask([term], [], TOKENS, PLACES, lambda bias, visible: weights(1000.0))
    assert visible is None
    assert bias is not None
    assert torch.equal(bias, term)
    hides = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    hides[..., 3:, :] = True  # these queries see no key, so that their weights are whatever comes of it
    scaled = weights(1.0)
    scaled[..., 3:, :] = 1 / TOKENS
    bias, visible = bias_and_mask([term], [hides], TOKENS, PLACES, lambda bias, visible: scaled)
    assert bias is None


@pytest.fixture(params=[2 * TOKENS, masks.AT_ONCE])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Two queries at a time, or all."""
    monkeypatch.setattr(masks, "AT_ONCE", request.param)
    return request.param


@pytest.mark.parametrize(
    ("mask", "causal", "reach"),
    [
        (CAUSAL, True, (None, None)),
        (CAUSAL & NEAR, True, (4, None)),
        (NEAR, False, (4, None)),
        (CAUSAL & (PLACES[:, None] // 5 == PLACES // 5), True, (None, 5)),
    ],
)
def test_masks_are_read_in_blocks(
    mask: Tensor, causal: bool, reach: tuple[int | None, int | None], at_once: int
) -> None:
    """Queries after the end of their sequence see whatever comes of it: nothing, or everything that is there."""
    visible = mask.expand(2, 1, TOKENS, TOKENS)
    assert masks.one_way(visible) == causal
    assert masks.just_causal(visible) == (reach == (None, None))
    assert masks.reach_of(visible, causal) == reach
    assert masks.padded_lengths(visible, causal, *reach) is None
    padded = visible & (torch.tensor([TOKENS, 9])[:, None, None, None] > PLACES)
    assert masks.reach_of(padded, causal) == reach
    for seen in (padded[1, 0, 8], torch.zeros(TOKENS, dtype=torch.bool), (PLACES > 2) & (PLACES < 9)):
        padded[1, 0, 9:] = seen
        ends = masks.padded_lengths(padded, causal, *reach)
        assert isinstance(ends, Tensor)
        assert ends.tolist() == [TOKENS, 9]
    for whole in (visible, padded):
        hidden = whole.clone()
        hidden[..., 8, 7] = False
        assert masks.padded_lengths(hidden, causal, *reach) == "some of the keys"
    for row in (1, 4, 9):  # one key after its query, in each block of queries
        later = visible.clone()
        later[..., row, row + 1] = True
        assert not causal or not masks.one_way(later)
        assert not masks.just_causal(later)


def test_tables_by_offset_are_as_exact_as_their_largest_number(at_once: int) -> None:
    """An error of 1e-4 of the largest is let pass, and of the smallest bias no more than that."""
    table = torch.randn(2 * TOKENS - 1, generator=torch.Generator().manual_seed(3))
    table = table / table.abs().max()
    bias = table[PLACES[:, None] - PLACES + TOKENS - 1][None]
    for size in (1e-3, 1.0, 1e3):
        for error, passes in ((0.5e-4, True), (4e-4, False)):
            planted = size * bias
            planted[0, 9, 2] += error * size
            found = masks.by_offset(planted, None, False, False, 1e-4)
            assert (found is not None) == passes
            if found is not None:
                torch.testing.assert_close(found, size * table.double(), atol=1e-4 * size, rtol=0)


@pytest.mark.parametrize("kind", ["Gemma3TextModel", "LlamaModel", "BertModel"])
def test_blocks_of_a_call_are_its_logits_and_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of windows, of all keys before without a mask that says so, and both ways: in their own places."""
    model = tiny(kind, **SIZES if kind == "BertModel" else NARROW)
    whole = calls_in(model)
    monkeypatch.setattr(masks, "AT_ONCE", 3 * 2 * 4 * TOKENS)
    monkeypatch.setattr(calls_module, "_BLOCK", 3 * 2 * 4 * TOKENS)
    calls = calls_in(model)
    assert len(calls) == len(whole) == 2
    for call, own in zip(calls, whole, strict=True):
        assert call.weights is None
        assert own.weights is not None
        made, weights = torch.full(own.weights.shape, -torch.inf), torch.zeros(own.weights.shape)
        blocks = list(call.blocks())
        assert len(blocks) == 4
        for rows, first, some, shares in blocks:
            keys = slice(first, first + some.shape[-1])
            made[:, :, rows, keys], weights[:, :, rows, keys] = some.float(), shares.float()
            assert torch.equal(call.seen(rows, keys).expand_as(some), some.isfinite())
        torch.testing.assert_close(made.double(), own.logits(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(weights, own.weights, atol=1e-6, rtol=0)
