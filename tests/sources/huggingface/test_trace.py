"""Attention written out in a module's own code, in several products, or with a sink a query, is followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.architectures.models import small_inputs, small_model
from tests.sources.huggingface.models import TOKENS, WIDTH, Hand, SoftAttention, calls_in
from torch import Tensor, nn

from toeplens.ground import InputError
from toeplens.sources.huggingface.attention import low
from toeplens.sources.huggingface.trace import Products


def summed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[N, B, H, d], as XLNet has it."""
    logits = torch.einsum("ibnd,jbnd->bnij", q, k) * 0.5 - 1e30 * torch.einsum("ij->ij", mask)
    return torch.einsum("bnij,jbnd->ibnd", logits.softmax(3), v).permute(1, 2, 0, 3)


def emptied(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, value: float = 0.0) -> Tensor:
    """Weights of hidden keys set to 0 after the softmax too, as CPM-Ant has it."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    logits = (q @ k.transpose(-1, -2) * 0.5).masked_fill(mask > 0, -torch.inf)
    return logits.softmax(-1).masked_fill(mask > 0, value) @ v


def zeroed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Logits of hidden keys multiplied by 0 and put low, as GPT-1 has it."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    logits = torch.matmul(q, k.transpose(-1, -2)) * 0.5
    return (logits * (1 - mask) + -1e4 * mask).softmax(-1) @ v


@pytest.mark.parametrize("form", [summed, emptied, zeroed])
def test_other_ways_to_write_attention_are_followed(form: Any) -> None:
    """float64, loops: what is handed over says which keys were hidden, and gives the outputs."""
    q, k, v = torch.randn(3, 5, 2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.ones(5, 5, dtype=torch.float64).triu(1)
    found: list[tuple[Any, Tensor, Tensor]] = []
    with Products(lambda: True, lambda *made: found.append(made)):
        wanted = form(q, k, v, mask)
    ((made, values, out),) = found
    assert made.scale == 0.5
    hidden = [table for table, _ in made.hidden] + [table <= low(table.dtype) for table, _ in made.terms]
    covered = torch.stack([torch.broadcast_to(table, (5, 5)) for table in hidden]).any(0)
    assert torch.equal(covered, mask > 0)
    for batch in range(2):
        for head in range(3):
            for row in range(5):
                logits = [0.5 * float(q[row, batch, head] @ k[key, batch, head]) for key in range(row + 1)]
                weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
                torch.testing.assert_close(made.weights[batch, head, row, : row + 1], weights, atol=1e-12, rtol=0)
                mean = sum(weights[key] * v[key, batch, head] for key in range(row + 1))
                torch.testing.assert_close(out[batch, head, row], mean, atol=1e-12, rtol=0)
    assert torch.equal(out, wanted)
    torch.testing.assert_close(values, v.permute(1, 2, 0, 3), atol=0, rtol=0)


def test_other_sums_and_other_masks_of_weights_are_not_followed() -> None:
    q, k, v = torch.randn(3, 5, 2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found: list[Any] = []
    with Products(lambda: True, lambda *made: found.append(made)):
        emptied(q, k, v, torch.ones(5, 5).triu(1), value=0.1)
        for form in ("ibnd,jbnd->nij", "ibnd,jbnd->bnji", "ibnd,jbnd->bnidj", "...d,...d->..."):
            torch.einsum(form, q, k).softmax(-1)
        half = (torch.einsum("ibnd,jbnd->bnij", q, k) * torch.full((5, 5), 0.5)).softmax(-1) @ v.permute(1, 2, 0, 3)
    assert half.shape == (2, 3, 5, 4)
    assert found == []


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
