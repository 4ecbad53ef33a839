"""PaTH and PaTH-FoX against explicit products of matrices, against decoding by updated keys, and x-transformers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.encodings.samples import build as samples_build
from tests.encodings.samples import draw
from torch import Tensor

from toeplens.encodings import Seen, attend, attention_logits
from toeplens.encodings.contextual import BLOCK, PaTH, PaTHFoX, accumulate

B, H, D = 2, 3, 8
CASES: list[tuple[str, dict[str, Any]]] = [
    ("path", {}),
    ("path", {"rank": None, "conv_size": 1, "activation": "none"}),
    ("path", {"rank": 5, "conv_size": 4}),
    ("path-fox", {}),
]
every_case = pytest.mark.parametrize(("name", "options"), CASES)

build = partial(samples_build, std=0.5)


def inputs(length: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, w = draw(3, B, H, length, D, seed=seed)
    return q, k, w / w.norm(dim=-1, keepdim=True), 2 * draw(B, H, length, seed=seed + 1).sigmoid()


def by_products(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, rows: Tensor) -> Tensor:
    """q_i^T H_i ... H_{j+1} k_j with every matrix written out; for keys after the query, q . k."""
    rows = rows.expand(B, -1)
    out = q @ k.transpose(-1, -2)
    for b in range(B):
        for h in range(H):
            for a, row in enumerate(rows[b].tolist()):
                for j in range(row + 1):
                    product = torch.eye(D, dtype=torch.float64)
                    for m in range(j + 1, row + 1):
                        one = torch.eye(D, dtype=torch.float64) - beta[b, h, m] * torch.outer(w[b, h, m], w[b, h, m])
                        product = one @ product
                    out[b, h, a, j] = q[b, h, a] @ product @ k[b, h, j]
    return out


# ---- the products ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 3, 4, 64])
def test_the_sweep_is_the_product_of_the_matrices(block: int) -> None:
    q, k, w, beta = inputs(13)
    rows = torch.arange(13)
    ours = accumulate(q, k, w, beta, rows, block=block)
    assert float((ours - by_products(q, k, w, beta, rows)).abs().max()) < 1e-12


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_rows_in_any_order_and_by_sequence(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 9), label="length")
    count = data.draw(st.integers(1, 4), label="queries")
    by_sequence = data.draw(st.booleans(), label="by sequence")
    shape = (B, count) if by_sequence else (count,)
    numbers = data.draw(st.lists(st.integers(0, length - 1), min_size=B * count, max_size=B * count), label="rows")
    rows = torch.tensor(numbers[: math.prod(shape)]).view(shape)
    _, k, w, beta = inputs(length, seed=5)
    q = draw(B, H, count, D, seed=9)
    ours = accumulate(q, k, w, beta, rows, block=data.draw(st.integers(1, 10), label="block"))
    assert float((ours - by_products(q, k, w, beta, rows)).abs().max()) < 1e-12


def test_it_is_the_published_decoding_in_which_each_token_updates_all_cached_keys() -> None:
    length = BLOCK + 7
    q, k, w, beta = inputs(length)
    ours = accumulate(q, k, w, beta, torch.arange(length))
    cached = k[:, :, :0]
    for t in range(length):
        step, strength = w[:, :, t, :, None], beta[:, :, t, None, None]
        cached = cached - strength * (cached @ step) @ step.transpose(-1, -2)
        cached = torch.cat((cached, k[:, :, t : t + 1]), dim=2)
        wanted = (cached @ q[:, :, t, :, None]).squeeze(-1)
        assert float((ours[:, :, t, : t + 1] - wanted).abs().max()) < 1e-12


def test_without_strength_it_is_the_plain_product_and_a_full_reflection_keeps_norms() -> None:
    q, k, w, beta = inputs(11)
    rows = torch.arange(11)
    assert torch.equal(accumulate(q, k, w, 0 * beta, rows, block=4), accumulate(q, k, 0 * w, beta, rows, block=4))
    assert float((accumulate(q, k, w, 0 * beta, rows) - q @ k.transpose(-1, -2)).abs().max()) < 1e-14
    basis = torch.eye(D, dtype=torch.float64).expand(B, H, D, D)
    last = torch.full((D,), 10)
    carried = accumulate(basis, k, w, torch.full_like(beta, 2.0), last, block=4)  # column j: the carried key j
    assert float((carried.norm(dim=-2) - k.norm(dim=-1)).abs().max()) < 1e-12


def test_it_has_the_right_gradients() -> None:
    q, k, w = (x.requires_grad_() for x in draw(3, 1, 2, 5, 3))
    beta = draw(1, 2, 5, seed=4).requires_grad_()
    rows = torch.tensor([0, 4, 2, 3, 1])
    assert torch.autograd.gradcheck(lambda *x: accumulate(*x, rows, block=2), (q, k, w, beta))
    own, x = build("path-fox", rank=1), draw(1, 4, 24).requires_grad_()
    q, k = (y.requires_grad_() for y in draw(2, 1, 3, 4, 8, seed=6))

    def logits(q: Tensor, k: Tensor, x: Tensor, *_: Tensor) -> Tensor:
        p = torch.arange(4)
        made = attention_logits(q, k, encoding=own, q_positions=p, k_positions=p, scale=0.3, notes=own.note(x))
        return made.masked_fill(made == float("-inf"), 0.0)

    assert torch.autograd.gradcheck(logits, (q, k, x, *own.parameters()), fast_mode=True)


# ---- from content to logits -----------------------------------------------------------------------------------------


def from_content(encoding: PaTH, x: Tensor, size: int, silu: bool) -> tuple[Tensor, Tensor]:
    """w and beta of each token, as the paper and the program define them, a number at a time."""
    length = x.shape[1]
    full = encoding.up.weight if encoding.down is None else encoding.up.weight @ encoding.down.weight
    before, strength = x @ full.T, x @ encoding.strength.weight.T + encoding.strength.bias
    w = torch.zeros(B, H, length, D, dtype=torch.float64)
    for n in range(length):
        for tap in range(size):
            source = n - (size - 1) + tap
            if source >= 0:
                weight = encoding.conv.weight[:, 0, tap]
                w[:, :, n] += (before[:, source] * weight).view(B, H, D)
    if silu:
        w = w / (1 + torch.exp(-w))
    return w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt(), 2 / (1 + torch.exp(-strength.transpose(1, 2)))


@every_case
def test_logits_are_the_formula(name: str, options: dict[str, Any]) -> None:
    encoding, length = build(name, **options), 9
    x, (q, k, _, _) = draw(B, length, 24, seed=3), inputs(length)
    p = torch.arange(length) + 100
    with torch.no_grad():
        w, beta = from_content(encoding, x, options.get("conv_size", 3), options.get("activation", "silu") == "silu")
        wanted = by_products(q, k, w, beta, torch.arange(length)) * 0.3
        if isinstance(encoding, PaTHFoX):
            gate = torch.sigmoid(x @ encoding.gate.weight.T + encoding.gate.bias)
            for i in range(length):
                for j in range(i + 1):
                    wanted[:, :, i, j] += gate[:, j + 1 : i + 1].log().sum(1)
        ours = attention_logits(
            q, k, encoding=encoding, q_positions=p, k_positions=p, scale=0.3, notes=encoding.note(x)
        )
    past = torch.ones(length, length, dtype=torch.bool).tril()
    assert float((ours - wanted)[..., past].abs().max()) < 1e-11


@every_case
def test_decoding_with_a_cache_crosses_blocks(name: str, options: dict[str, Any]) -> None:
    encoding, length = build(name, **options), BLOCK + 3
    x, (q, k, _, _) = draw(B, length, 24, seed=3), inputs(length)
    p = torch.arange(length)
    v = draw(B, H, length, 4, seed=8)
    more: dict[str, Any] = {"encoding": encoding, "scale": 0.3}
    with torch.no_grad():
        full = attend(q, k, v, q_positions=p, k_positions=p, notes=encoding.note(x), **more)
        notes = encoding.note(x[:, :60])
        for n in range(60, length):
            new = encoding.note(x[:, n : n + 1], notes)
            notes, upto = torch.cat((notes, new), dim=2), slice(0, n + 1)
            places = {"q_positions": p[n : n + 1], "k_positions": p[upto], "notes": notes}
            out = attend(q[:, :, n : n + 1], k[:, :, upto], v[:, :, upto], **places, **more)
            assert float((out[:, :, 0] - full[:, :, n]).abs().max()) < 1e-12


def test_keys_after_the_query_are_compared_as_they_stand_and_not_forgotten() -> None:
    encoding, length = build("path-fox"), 6
    x, (q, k, _, _) = draw(B, length, 24, seed=3), inputs(length)
    p = torch.arange(length)
    seen = Seen(q, k, p, encoding.note(x), causal=False)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    assert torch.allclose(encoding.score(q, k, p, p, seen=seen)[..., future], (q @ k.transpose(-1, -2))[..., future])
    bias = encoding.bias(p, p, seen=seen)
    assert not bias[..., future].any()
    assert bool((bias[..., ~future.T & ~torch.eye(length, dtype=torch.bool)] <= 0).all())


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_worked_in_float32(autocast: bool) -> None:
    encoding, length = build("path").bfloat16(), 40
    q, k, _, _ = (y.bfloat16() for y in inputs(length))
    notes = encoding.note(draw(B, length, 24).bfloat16())
    assert notes.dtype == torch.bfloat16
    p = torch.arange(length)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = encoding.score(q, k, p, p, seen=Seen(q, k, p, notes))
    w, beta = encoding.transformations(notes.float())
    assert torch.equal(ours, accumulate(q.float(), k.float(), w, beta, p).bfloat16())


def test_far_sums_of_gates_lose_nothing() -> None:
    """A difference of sums near 10,000 keeps float32's relative precision: the sums are float64."""
    encoding, length = build("path-fox").float(), 20_000
    with torch.no_grad():
        encoding.gate.weight.zero_()
        encoding.gate.bias.fill_(0.3)
    rows, keys = torch.tensor([length - 1]), torch.zeros(1, H, length, D)
    seen = Seen(keys[:, :, :1], keys, rows, encoding.note(torch.zeros(1, length, 24)))
    steps = torch.arange(length - 1, -1, -1, dtype=torch.float64)
    wanted = steps * torch.nn.functional.logsigmoid(torch.tensor(0.3).double())
    bias = encoding.bias(rows, torch.arange(length), seen=seen)
    assert torch.allclose(bias[0, 0, 0].double(), wanted, rtol=1e-6, atol=0)
