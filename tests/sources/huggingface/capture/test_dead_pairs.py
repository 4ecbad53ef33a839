"""Pairs in which no query and no key has anything: no frequency is read off them, and the others stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sources.huggingface.models import GROUPED, calls_in, tiny
from torch import Tensor

from toeplens.lens import behaviour
from toeplens.sources.huggingface import AttentionCall
from toeplens.sources.huggingface.capture.rotation import find_rotation, tables_of

LENGTH, PAIRS = 20, 4
TURNS = torch.tensor([1.0, 0.3, 0.1, 0.01], dtype=torch.float64)
ANGLES = torch.arange(LENGTH)[:, None] * TURNS
PLACES = torch.arange(LENGTH).unsqueeze(0)
CASES = [[0], [3], [1, 2], [0, 1, 2]]
SIZES = GROUPED | {"num_hidden_layers": 1}
INPUTS = {"input_ids": torch.randint(4, 31, (2, LENGTH), generator=torch.Generator().manual_seed(3))}


def dimensions(pairing: str, start: int) -> tuple[Tensor, Tensor]:
    """Of each pair, before and after; ``sorted`` is next to each other before, and half apart after."""
    half = start + torch.arange(2 * PAIRS).view(2, PAIRS).T
    beside = start + torch.arange(2 * PAIRS).view(PAIRS, 2)
    return half if pairing == "half" else beside, beside if pairing == "interleaved" else half


def turned(x: Tensor, pairing: str, start: int) -> Tensor:
    (pairs, out), made = dimensions(pairing, start), x.clone()
    a, b = x[..., pairs[:, 0]], x[..., pairs[:, 1]]
    made[..., out[:, 0]] = a * ANGLES.cos() - b * ANGLES.sin()
    made[..., out[:, 1]] = a * ANGLES.sin() + b * ANGLES.cos()
    return made


def queries_and_keys(dead: list[int], pairing: str, start: int, still: int) -> list[tuple[Tensor, Tensor]]:
    """Before and after; the rotated part begins at ``start``, and ``still`` dimensions follow it."""
    generator = torch.Generator().manual_seed(still)
    found = []
    for heads in (4, 2):
        x = torch.randn(2, heads, LENGTH, start + 2 * PAIRS + still, generator=generator, dtype=torch.float64)
        x[..., dimensions(pairing, start)[0][dead].flatten()] = 0
        found.append((x, turned(x, pairing, start)))
    return found


@pytest.mark.parametrize("pairing", ["half", "interleaved", "sorted"])
@pytest.mark.parametrize(("start", "still"), [(0, 0), (0, 3), (4, 0)])
def test_dead_pairs_are_told_apart(pairing: str, start: int, still: int) -> None:
    """First, last and middle ones, with rotations of all dimensions, of the first, and of the last."""
    pairs, out = dimensions(pairing, start)
    for dead in CASES:
        q, k = queries_and_keys(dead, pairing, start, still)
        alive = [pair for pair in range(PAIRS) if pair not in dead]
        found = find_rotation(q, k, PLACES)
        assert found.error < 1e-12
        assert torch.equal(found.pairs, pairs[alive])
        assert torch.equal(found.after, out[alive])
        torch.testing.assert_close(found.frequencies, TURNS[alive], atol=1e-9, rtol=0)
        assert not found.dead.any()
        assert not found.tabled.any()

        tables = tables_of([ANGLES.cos().float(), ANGLES.sin().float()], LENGTH)
        found = find_rotation(q, k, PLACES, tables=tables)
        assert torch.equal(found.pairs, pairs)
        assert found.pairing == ("half" if pairing == "half" else "interleaved")
        torch.testing.assert_close(found.frequencies, TURNS, atol=1e-6, rtol=0)
        torch.testing.assert_close(found.magnitudes, torch.ones_like(TURNS), atol=1e-6, rtol=0)
        assert found.dead.nonzero().flatten().tolist() == dead
        assert found.tabled.nonzero().flatten().tolist() == dead


def call_of(model: Any) -> AttentionCall:
    (call,) = calls_in(model, INPUTS)
    return call


def test_norms_that_switch_pairs_off() -> None:
    """Gemma 3 norms queries and keys by 1 + w, then turns them: w = -1 in both halves of pairs 0, 2 and 3."""
    sizes = SIZES | {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 64}
    model = tiny("Gemma3ForCausalLM", gain=0.3, **sizes)
    norms = model.model.layers[0].self_attn.q_norm, model.model.layers[0].self_attn.k_norm
    before = call_of(model)
    assert before.rotation is not None
    with torch.no_grad():
        for norm in norms:
            norm.weight[[0, 2, 3, 6, 8, 9]] = -1
    call = call_of(model)
    assert call.unknown is None
    assert call.rotation is not None
    assert call.rotation.dead.tolist() == [True, False, True, True, False, False]
    assert call.rotation.tabled.tolist() == call.rotation.dead.tolist()
    torch.testing.assert_close(call.rotation.frequencies, before.rotation.frequencies, atol=1e-6, rtol=0)
    shares = behaviour(**call.placed())
    assert not shares.flat.any()
    assert float(shares.interaction.min()) > 0


def test_pairs_too_slow_for_a_low_precision_are_the_tables() -> None:
    """In bfloat16 a turn of 0.001 a position does not move what it turns: it is not read as none."""
    model = tiny("LlamaForCausalLM", gain=0.3, **SIZES).to(torch.bfloat16)
    call = call_of(model)
    assert call.rotation is not None
    assert not call.rotation.dead.any()
    assert bool(call.rotation.tabled[-1]) == bool(call.rotation.tabled.any())
    wanted = torch.tensor([1, 0.1, 0.01, 0.001], dtype=torch.float64)
    torch.testing.assert_close(call.rotation.frequencies, wanted, atol=1e-3, rtol=0)
