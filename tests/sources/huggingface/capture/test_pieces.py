"""Attention whose weights go into several products, or that has a sink a query; and softmaxes among no tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.architectures.models import small_inputs, small_model
from tests.sources.huggingface.models import INPUTS, SIZES, TOKENS, WIDTH, Hand, SoftAttention, calls_in, tiny
from torch import Tensor, nn

from toeplens.ground import InputError
from toeplens.sources.huggingface import compared

DIFFERENTIAL = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
LAYOUT = SIZES | {"hidden_size": 48, "channel_shrink_ratio": 2}


class TwiceAttention(SoftAttention):
    """The same as `SoftAttention`, with half of each head's values at a time."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([(q @ k.transpose(-1, -2) * 0.5).softmax(-1) @ part for part in v.chunk(2, -1)], -1)


class TwoAttention(SoftAttention):
    """Other weights for the second half of the values, which are next to nothing, or nothing."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (one, two), logits = v.chunk(2, -1), q @ k.transpose(-1, -2)
        return torch.cat([(logits * 0.5).softmax(-1) @ one, (logits * 0.4).softmax(-1) @ (self.size * two)], -1)


class DepthAttention(nn.Module):
    """Every token asks by the same query what it takes of its own states, as of layers before."""

    def __init__(self, softmax: bool = False) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.ones(WIDTH))
        self.softmax = softmax

    def forward(self, x: Tensor) -> Tensor:
        own = torch.stack((x, x.sin(), x.cos()), -2)
        query = self.query.view(1, WIDTH).expand(*x.shape[:2], -1, -1)
        made = nn.functional.scaled_dot_product_attention(query, own, own).squeeze(-2)
        return made.cumsum(1).softmax(1) * made if self.softmax else made


def test_products_of_the_same_weights_are_one_call() -> None:
    """With the values of all, as if they had been multiplied at once."""
    own, twice = (calls_in(Hand(kind(), kind())) for kind in (SoftAttention, TwiceAttention))
    assert [(call.layer, call.pieces) for call in own] == [(0, 1), (1, 1)]
    assert [(call.layer, call.pieces) for call in twice] == [(0, 2), (1, 2)]
    for one, other in zip(own, twice, strict=True):
        assert other.weights is not None
        for name in ("q", "k", "v", "heads", "weights"):
            torch.testing.assert_close(getattr(other, name), getattr(one, name), atol=1e-5, rtol=1e-5)
        assert other.proof.weights is not None
        assert max(other.proof.weights, other.proof.outputs) < 1e-5


@pytest.mark.parametrize("size", [1.0, 1e-9, 0.0])
def test_pieces_with_weights_of_their_own_are_refused(size: float) -> None:
    with pytest.raises(InputError, match=r"parts.0 \(TwoAttention\) was not understood: it has several pieces, each"):
        calls_in(Hand(TwoAttention(size)))


@pytest.mark.parametrize(
    ("kind", "sizes", "values"), [("DiffLlamaForCausalLM", DIFFERENTIAL, 16), ("LiltModel", LAYOUT, 18)]
)
def test_models_that_take_several_products(kind: str, sizes: dict[str, Any], values: int) -> None:
    """Differential attention and that of LiLT: heads put out the values of both, and are the model's own."""
    model = tiny(kind, **sizes)
    calls = calls_in(model)
    assert [(call.layer, call.pieces, call.heads.shape[-1]) for call in calls] == [(0, 2, values), (1, 2, values)]
    for call in calls:
        weights = call.logits().softmax(-1)
        v = call.v.double().repeat_interleave(call.q.shape[1] // call.v.shape[1], 1)
        torch.testing.assert_close((weights @ v).transpose(1, 2), call.heads.double(), atol=1e-5, rtol=1e-5)
    assert compared(model, INPUTS, lambda call: None) < 1e-5


def test_a_sink_a_query_is_read() -> None:
    """Loops, float64: a logit of each query's own takes weight and gives no value, also where queries go in blocks."""
    model = small_model("inkling2_text")
    inputs = small_inputs(model, padded=False)
    calls = calls_in(model, inputs)
    for call in calls:
        assert call.sinks is not None
        assert call.weights is not None
        assert call.sinks.shape == (4, 2, TOKENS)
        assert float((call.sinks - call.sinks[..., :1]).abs().max()) > 0.1
        logits = call.logits()
        for batch in range(2):
            for head in range(4):
                for row in range(TOKENS):
                    each = logits[batch, head, row].exp()
                    weights = each / (each.sum() + call.sinks[head, batch, row].double().exp())
                    torch.testing.assert_close(weights, call.weights[batch, head, row].double(), atol=1e-6, rtol=0)
        with pytest.raises(InputError, match="each of 12 queries has its own, so the weights of 3"):
            call.softmax(logits[:, :, :3])
        some = torch.tensor([2, 5])
        torch.testing.assert_close(call.softmax(logits[:, :, some], some), call.softmax(logits)[:, :, some])


def test_a_softmax_at_each_token_alone_is_no_attention() -> None:
    calls = calls_in(Hand(DepthAttention(), SoftAttention()))
    assert [(call.module, call.layer) for call in calls] == [("parts.1 (SoftAttention)", 0)]
    with pytest.raises(InputError, match=r"parts.0 \(DepthAttention\) was not understood: its '_softmax'"):
        calls_in(Hand(DepthAttention(softmax=True), SoftAttention()))
