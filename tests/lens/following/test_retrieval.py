"""Retrieval scores are what a loop over queries and keys finds, and a head that copies is found as one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import wrong_types
from torch import Tensor

from toeplens.ground import InputError
from toeplens.lens import retrieval


def by_hand(weights: Tensor, tokens: Tensor, places: Tensor, needle: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads = weights.shape[:2]
    score, mass = torch.zeros(2, batch, heads, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for n, place in enumerate(places.tolist()):
                row = weights[b, h, n].tolist()
                hits = [j for j in range(int(needle[b, 0]), int(needle[b, 1])) if tokens[b, j] == tokens[b, place]]
                score[b, h] += (row.index(max(row)) in hits) / len(places)
                mass[b, h] += sum(row[j] for j in hits) / len(places)
    return score, mass


def drawn(seed: int, batch: int, heads: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, tokens, places and needles in which each answer is."""
    random = torch.Generator().manual_seed(seed)
    length = 16 + count
    tokens = torch.randint(4, (batch, length), generator=random)
    start = torch.randint(0, 8, (batch,), generator=random)
    for row, first in zip(tokens, start.tolist(), strict=True):
        row[first : first + count] = row[-count:]
    weights = torch.rand(batch, heads, count, length, generator=random).softmax(-1)
    return weights, tokens, torch.arange(length - count, length), torch.stack((start, start + count + 1), 1)


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))
def test_it_is_what_a_loop_finds(seed: int, batch: int, heads: int, count: int) -> None:
    found, wanted = retrieval(*(given := drawn(seed, batch, heads, count))), by_hand(*given)
    torch.testing.assert_close(found.score, wanted[0])
    torch.testing.assert_close(found.mass, wanted[1], rtol=1e-6, atol=1e-6)


def test_a_head_that_copies_has_all_and_one_that_looks_at_the_place_before_has_none() -> None:
    tokens = torch.tensor([[9, 1, 2, 3, 9, 9, 1, 2, 3]])
    weights = torch.zeros(1, 2, 3, 9)
    for n in range(3):
        weights[0, 0, n, 1 + n] = 1
        weights[0, 1, n, n] = 1
    found = retrieval(weights, tokens, torch.tensor([6, 7, 8]), torch.tensor([[1, 4]]))
    assert found.score.tolist() == [[1.0, 0.0]]
    assert found.mass.tolist() == [[1.0, 0.0]]


@wrong_types
def test_what_does_not_fit_is_one_sentence() -> None:
    weights, tokens, places, needle = drawn(0, 2, 1, 3)
    with pytest.raises(InputError, match="weights and needle must have shapes"):
        retrieval(weights[:1], tokens, places, needle)
    with pytest.raises(InputError, match="needle must contain all tokens of the answer"):
        retrieval(weights, tokens, places, torch.zeros_like(needle))
