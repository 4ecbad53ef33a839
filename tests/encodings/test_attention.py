"""Attention with an encoding: chunks, gradients, widths, memory; what is formed once, and what is not formed at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.encodings.samples import SIZES
from tests.encodings.samples import build as samples_build
from torch import Tensor

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attend, attention_logits, attention_weights
from toeplens.encodings.attention import AT_ONCE
from toeplens.ground import InputError

B, N = 2, 12
KINDS = ("nope", "rope", "alibi", "t5", "mla", "fox", "shaw", "cope", "urpe", "dape-v2", "path", "carope")

build = partial(samples_build, std=1.0)


def inputs(encoding: PositionalEncoding, length: int = N) -> dict[str, Any]:
    torch.manual_seed(1)
    q, k = (torch.randn(B, 3, length, encoding.query_dim, dtype=torch.float64) for _ in range(2))
    x = torch.randn(B, length, 24, dtype=torch.float64)
    positions = torch.arange(length)
    common = {"encoding": encoding, "q_positions": positions, "k_positions": positions, "scale": 0.4}
    return {"q": q, "k": k, "notes": encoding.note(x), **common}


def values(length: int = N) -> Tensor:
    return torch.randn(B, 3, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_the_softmax_of_the_logits_and_carry_the_values(name: str) -> None:
    given = inputs(build(name))
    logits, weights = attention_logits(**given), attention_weights(**given)
    assert logits.isneginf().equal(torch.ones(N, N, dtype=torch.bool).triu(1).expand_as(logits))
    encoding = given["encoding"]
    if not encoding.overrides("transform_weights"):
        assert torch.allclose(weights, logits.softmax(-1), rtol=0, atol=1e-14)
    if not encoding.overrides("add_values"):
        for fused in (True, False):
            assert torch.allclose(attend(v=values(), fused=fused, **given), weights @ values(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_chunks_of_queries_have_the_same_gradients(name: str) -> None:
    """Chunks are recomputed in the backward pass, so that memory is linear there too: nothing is lost by it."""
    encoding = build(name)
    gradients = []
    for at_once in (AT_ONCE, B * 3 * N * 5):
        given = inputs(encoding)
        leaves = [given["q"].requires_grad_(), given["k"].requires_grad_(), values().requires_grad_()]
        encoding.zero_grad()
        out = attend(v=leaves[-1], at_once=at_once, **{**given, "notes": inputs(encoding)["notes"]})
        (out * torch.arange(out.numel()).view_as(out).sin()).sum().backward()
        gradients.append([leaf.grad for leaf in (*leaves, *encoding.parameters()) if leaf.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    for whole, parts in zip(*gradients, strict=True):
        assert torch.allclose(whole, parts, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["rope", "alibi", "fox"])
@pytest.mark.parametrize("width", [4, 20])
def test_values_may_have_another_width_than_queries(name: str, width: int) -> None:
    given = inputs(build(name))
    v = torch.randn(B, 3, N, width, dtype=torch.float64)
    assert torch.allclose(attend(v=v, **given), attention_weights(**given) @ v, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", [partial(attend, v=values()), attention_logits, attention_weights])
def test_causal_queries_are_tokens_of_the_keys(form: Callable[..., Tensor]) -> None:
    given = inputs(build("alibi"))
    fewer = {"k": given.pop("k")[:, :, :4], "k_positions": given.pop("k_positions")[:4], "notes": given.pop("notes")}
    if "v" in getattr(form, "keywords", {}):
        fewer["v"] = values(4)
    with pytest.raises(
        InputError,
        match=r"^q must have at most as many queries as there are keys \(4\) in causal attention, .*, got 12\.$",
    ):
        form(**given, **fewer)
    assert form(**given, **fewer, rows=torch.arange(N) % 4).shape[:3] == (B, 3, N)
    assert form(**given, **fewer, causal=False).shape[:3] == (B, 3, N)


@pytest.mark.parametrize("name", KINDS)
def test_dropout_falls_on_the_weights(name: str) -> None:
    given = inputs(build(name))
    torch.manual_seed(3)
    ones = torch.ones(B, 3, N, 8, dtype=torch.float64)
    if name == "shaw":
        return  # it adds to the values too
    out = attend(v=ones, dropout=0.5, **given)
    assert not torch.allclose(out, attend(v=ones, **given))
    assert torch.allclose(out, out[..., :1].expand_as(out), rtol=0, atol=1e-14)


class Counting(encodings.OffsetBias):
    """Counts how often its bias is formed."""

    citation = "this test"
    formed = 0

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        type(self).formed += 1
        return super().bias(q_positions, k_positions)

    def kernel(self, offsets: Tensor) -> Tensor:
        return -0.1 * offsets.abs().float().expand(self.num_heads, -1)


def test_layers_that_share_a_bias_form_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from toeplens.encodings import registry
    from toeplens.model import Decoder, decoder_config

    monkeypatch.setitem(registry._all(), "counting", Counting)
    sizes = {"vocab_size": 11, "d_model": 24, "num_heads": 3, "d_ff": 8, "max_len": 16, "num_layers": 5}
    tokens = torch.randint(11, (2, 9))
    for readout, times in (("mean", 1), ("last", 2)):  # the last layer asks for one row alone
        model = Decoder(decoder_config(encoding="counting", readout=readout, **sizes)).eval()
        Counting.formed = 0
        fused = model(tokens)
        assert Counting.formed == times
        assert torch.allclose(fused, model(tokens, fused=False), rtol=0, atol=1e-6)


def test_a_bias_looks_up_each_distance_once() -> None:
    seen = []

    class Looking(Counting):
        """Remembers how many offsets it was asked for."""

        def kernel(self, offsets: Tensor) -> Tensor:
            seen.append(offsets.numel())
            return super().kernel(offsets)

    near, scattered = torch.arange(100) + 7, torch.arange(4) ** 9
    bias = Looking(**SIZES)
    got = bias.bias(near, near)
    assert seen == [199]
    assert torch.allclose(got, -0.1 * (near[:, None] - near).abs().float().expand(3, -1, -1))
    bias.bias(scattered, scattered)
    assert seen[1] == 16


@pytest.mark.parametrize("name", ["fox", "cable"])
def test_a_bias_in_factors_is_as_exact_far_out_as_near(name: str) -> None:
    """Running sums of thousands leave float32 three digits; relative to each chunk's start they keep five."""
    torch.manual_seed(0)
    encoding = encodings.build(name, **{**SIZES, "num_heads": 2})
    length = 3000
    q, k, v = torch.randn(3, 1, 2, length, 8).unbind(0)
    x, positions = 3 * torch.randn(1, length, 24), torch.arange(length)
    notes = encoding.note(x).detach()
    notes = torch.cat((notes[..., :1] * 5, notes[..., 1:]), dim=-1)
    assert float(notes[..., 0].max()) > 1e3
    common = {"encoding": encoding, "q_positions": positions, "k_positions": positions, "scale": 0.35, "notes": notes}
    exact = attend(q.double(), k.double(), v.double(), fused=False, **common)
    assert torch.allclose(attend(q, k, v, **common).double(), exact, rtol=0, atol=3e-4)
    half = attend(*(y.to(torch.bfloat16) for y in (q, k, v)), **common).double()
    assert torch.allclose(half, exact, rtol=0, atol=6e-2)


def test_the_fused_alibi_is_as_exact_far_out_as_near() -> None:
    """Its factors are places relative to the first query: a million times a slope leaves float32 no hundredth."""
    encoding, p = encodings.build("alibi", **SIZES), torch.arange(20) + 1_048_000
    q, k, v = torch.randn(3, B, 3, 20, 8, generator=torch.Generator().manual_seed(4)).unbind(0)
    common = {"encoding": encoding, "q_positions": p, "k_positions": p, "scale": 0.35}
    exact = attend(q.double(), k.double(), v.double(), fused=False, **common)
    assert torch.allclose(attend(q, k, v, **common).double(), exact, rtol=0, atol=1e-5)


def test_the_fused_alibi_penalises_keys_out_of_their_order_by_their_distance() -> None:
    """A key that comes before the query and stands behind it is as far as |i - j|, which no product of places is."""
    encoding, p = encodings.build("alibi", **SIZES), torch.tensor([5, 0, 9, 2, 7, 1])
    q, k, v = torch.randn(3, B, 3, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).unbind(0)
    common = {"encoding": encoding, "q_positions": p, "k_positions": p, "scale": 0.35}
    assert torch.allclose(attend(q, k, v, **common), attend(q, k, v, fused=False, **common), rtol=0, atol=1e-12)
