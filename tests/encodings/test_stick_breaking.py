"""Stick-breaking attention: against sticks broken one key at a time, and what hidden keys and lone queries get."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.encodings.samples import SIZES, agree, draw
from torch import Tensor

from toeplens import encodings
from toeplens.encodings import attend, attention_weights

H, D, N = SIZES["num_heads"], SIZES["head_dim"], 9
EVERY = [{"own": own, "remainder": remainder} for own in (False, True) for remainder in ("dropped", "own")]
OPTIONS = pytest.mark.parametrize("options", EVERY, ids=lambda o: f"own-{o['own']}-{o['remainder']}")


def weights_of(q: Tensor, k: Tensor, options: dict[str, Any], **more: Any) -> Tensor:
    return attention_weights(q, k, **told(options, q.shape[2], k.shape[2]), **more)


def told(options: dict[str, Any], queries: int, keys: int) -> dict[str, Any]:
    encoding, places = encodings.build("stick-breaking", **SIZES, **options), torch.arange(keys)
    return {
        "encoding": encoding,
        "q_positions": places[keys - queries :],
        "k_positions": places,
        "scale": encoding.scale,
    }


def broken(q: Tensor, k: Tensor, options: dict[str, Any], visible: Tensor) -> Tensor:
    """A stick of length 1 for each query: keys, from the nearest on, take their share of what is left of it."""
    weights = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(H):
            for i in range(q.shape[2]):
                stick = 1.0
                for j in range(i if options["own"] else i - 1, -1, -1):
                    if visible[b, i, j]:
                        beta = 1 / (1 + math.exp(-float(q[b, h, i] @ k[b, h, j]) / math.sqrt(D)))
                        weights[b, h, i, j] = beta * stick
                        stick *= 1 - beta
                if options["remainder"] == "own" and visible[b, i, i]:
                    weights[b, h, i, i] += stick
    return weights


@OPTIONS
def test_weights_are_the_pieces_of_a_stick(options: dict[str, Any]) -> None:
    q, k = draw(2, H, N, D) * 2, draw(2, H, N, D, seed=2) * 2
    wanted = broken(q, k, options, torch.ones(2, N, N, dtype=torch.bool))
    agree(weights_of(q, k, options), wanted, 1e-14)
    agree(weights_of(q, k, options, causal=False), wanted, 1e-14)
    if options["remainder"] == "own":
        agree(wanted.sum(-1), torch.ones(2, H, N).double(), 1e-14)
    elif not options["own"]:
        assert not wanted[:, :, 0].any()


@OPTIONS
@given(data=st.data())
def test_hidden_keys_take_nothing_of_the_stick(options: dict[str, Any], data: st.DataObject) -> None:
    bits = st.lists(st.booleans(), min_size=2 * 25, max_size=2 * 25)
    mask = torch.tensor(data.draw(bits)).view(2, 1, 5, 5)
    q, k, v = (draw(2, H, 5, D, seed=seed) for seed in range(3))
    wanted = broken(q, k, options, mask[:, 0])
    agree(weights_of(q, k, options, mask=mask), wanted, 1e-13)
    agree(attend(q, k, v, mask=mask, **told(options, 5, 5)), wanted @ v, 1e-12)


@OPTIONS
def test_logits_far_out_lose_no_weight(options: dict[str, Any]) -> None:
    """Logits of some hundreds: sigmoids round to 0 and 1, and weights and gradients stay what they are."""
    q = (draw(1, H, N, D) * 20).requires_grad_()
    k = (draw(1, H, N, D, seed=2) * 10).requires_grad_()
    weights = weights_of(q, k, options)
    wanted = broken(q.detach(), k.detach(), options, torch.ones(1, N, N, dtype=torch.bool))
    agree(weights.detach(), wanted, 1e-12)
    (weights * draw(1, H, N, N, seed=5)).sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k))


@OPTIONS
def test_gradients_are_those_of_the_pieces(options: dict[str, Any]) -> None:
    q, k = draw(1, H, 4, D).requires_grad_(), draw(1, H, 4, D, seed=2).requires_grad_()
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2, 1] = mask[3, 3] = False
    assert torch.autograd.gradcheck(lambda q, k: weights_of(q, k, options, mask=mask[None, None]), (q, k))
