"""The sums over blocks are what loops over queries and keys find, and planted patterns are found as such."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import wrong_types
from torch import Tensor

from toeplens.ground import InputError
from toeplens.lens import retrieval, toeplitz_profile
from toeplens.lens.head_types import patterns
from toeplens.lens.head_types.patterns import Patterns, PatternSums

NUMBERS = (
    *("toeplitz", "toeplitz_variance", "distance", "entropy", "first", "sink", "previous", "current", "next"),
    *("induction", "duplicate", "profile", "eligible"),
)


def by_hand(logits: Tensor, weights: Tensor, tokens: Tensor | None, cross: bool) -> dict[str, np.ndarray]:
    """Every number of every head, query by query and key by key."""
    heads, keys = logits.shape[1], logits.shape[3]
    made: dict[str, list[Any]] = {name: [] for name in NUMBERS}

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    for h in range(heads):
        at: dict[int, list[float]] = {}
        entropy, first, sink, induction, duplicate = [], [], [], [], []
        near: dict[int, list[float]] = {1: [], 0: [], -1: []}
        profile = [0.0] * (1 + (keys - 1).bit_length())
        moved = whole = 0.0
        for x, w, words in zip(
            logits[:, h].tolist(),
            weights[:, h].tolist(),
            [None] * len(logits) if tokens is None else tokens.tolist(),
            strict=True,
        ):
            for i, (scores, row) in enumerate(zip(x, w, strict=True)):
                seen = [j for j in range(keys) if scores[j] > -math.inf]
                if not seen:
                    continue
                kept = sum(row[j] for j in seen)
                sink.append(1 - kept)
                if cross or i != 0:
                    first.append(row[0] if 0 in seen else 0.0)
                if len(seen) > 1 and kept > 0:
                    p = [row[j] / kept for j in seen if row[j] > 0]
                    entropy.append(-sum(q * math.log(q) for q in p) / math.log(len(seen)))
                for j in seen:
                    at.setdefault(i - j, []).append(scores[j])
                    moved, whole = moved + abs(i - j) * row[j], whole + row[j]
                    if not cross:
                        profile[0 if i == j else 1 + int(math.log2(abs(i - j)))] += row[j]
                for offset, found in near.items():
                    if i - offset in seen:
                        found.append(row[i - offset])
                if words is not None:
                    follow = [j for j in seen if j >= 1 and j - 1 != i and words[j - 1] == words[i]]
                    induction += [sum(row[j] for j in follow)] if follow else []
                    copies = [j for j in seen if j != i and words[j] == words[i]]
                    duplicate += [sum(row[j] for j in copies)] if copies else []
        every = np.array([x for found in at.values() for x in found])
        held = np.array([np.mean(found) for found in at.values() for _ in found])
        numbers = {
            "toeplitz": (held**2).sum() / (every**2).sum(),
            "toeplitz_variance": ((held - every.mean()) ** 2).sum() / ((every - every.mean()) ** 2).sum(),
            "distance": moved / whole,
            **{name: mean(near[offset]) for name, offset in (("previous", 1), ("current", 0), ("next", -1))},
            "induction": mean(induction),
            "duplicate": mean(duplicate),
        }
        numbers = dict.fromkeys(numbers, math.nan) if cross else numbers
        numbers |= {"entropy": mean(entropy), "first": mean(first), "sink": mean(sink), "eligible": len(induction)}
        for name, value in numbers.items():
            made[name].append(value)
        made["profile"].append([] if cross else [x / len(sink) for x in profile])
    return {name: np.array(values) for name, values in made.items()}


def random_attention(seed: int, shape: tuple[int, int, int, int], mask: Tensor, sink: bool) -> tuple[Tensor, Tensor]:
    """Logits and weights of any kind under a mask that broadcasts; a query that sees nothing has NaN weights."""
    made = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(shape, generator=made, dtype=torch.float64) + 1
    logits = logits.masked_fill(~mask, -math.inf)
    rest = torch.randn(shape[1], 1, 1, generator=made, dtype=torch.float64).expand(*shape[:3], 1)
    weights = torch.cat((logits, rest), -1).softmax(-1)[..., :-1] if sink else logits.softmax(-1)
    weights = weights.masked_fill(~mask, 0.5)  # nobody's business
    return logits, weights.masked_fill(~mask.any(-1, keepdim=True), math.nan)


def masks(kind: str, shape: tuple[int, int, int, int]) -> Tensor:
    batch, heads, queries, keys = shape
    away = torch.arange(queries).unsqueeze(1) - torch.arange(keys)
    every = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    padded = torch.arange(keys) < torch.tensor([keys, max(1, keys // 2), 0])[:batch, None, None, None]
    return {
        "all": every,
        "causal": every & (away >= 0),
        "window": every & (away >= 0) & (away < 3),
        "padded": every & (away >= 0) & padded,
        "left": every & (away >= 0) & ~padded,
        "by head": every & (away >= torch.arange(heads)[:, None, None]),
    }[kind]


def agree(found: Patterns, expected: dict[str, np.ndarray]) -> None:
    for name in NUMBERS:
        np.testing.assert_allclose(getattr(found, name), expected[name], rtol=0, atol=1e-9, err_msg=name)


KINDS = ("all", "causal", "window", "padded", "left", "by head")


@pytest.mark.parametrize("told", ["no", "alike", "each"])
@given(
    seed=st.integers(0, 999),
    kind=st.sampled_from(KINDS),
    cross=st.booleans(),
    sink=st.booleans(),
    words=st.sampled_from([0, 2, 5]),
    cut=st.booleans(),
    length=st.integers(2, 9),
    at_once=st.sampled_from([7, 60, 2**18]),
    data=st.data(),
)
def test_any_blocks_are_the_loops_over_all(
    *,
    seed: int,
    kind: str,
    cross: bool,
    sink: bool,
    words: int,
    cut: bool,
    told: str,
    length: int,
    at_once: int,
    data: Any,
) -> None:
    """float64, 1e-9; blocks of any rows in any order, sequences one after the other or together; what is visible may be
    said, once for all sequences and heads where it is the same, or of each."""
    shape = (3, 2, length + 2 if cross else length, length)
    mask = masks(kind, shape)
    logits, weights = random_attention(seed, shape, mask, sink)
    weights = weights if told == "no" else weights.masked_fill(~mask, 0)
    if told == "alike" and kind not in ("padded", "left"):
        mask = mask[:1] if kind == "by head" else mask[:1, :1]
    tokens = None
    if words and not cross:
        tokens = torch.randint(0, words, (3, length), generator=torch.Generator().manual_seed(seed))
    sums = PatternSums(heads=2, queries=shape[2], keys=length, tokens=tokens, cross=cross)
    order = torch.tensor(data.draw(st.one_of(st.permutations(range(shape[2])), st.just(range(shape[2])))))
    cuts = sorted(data.draw(st.lists(st.integers(0, shape[2]), max_size=3)))
    with patch.object(patterns, "_AT_ONCE", at_once):
        for some in data.draw(st.sampled_from([[slice(0, 3)], [slice(0, 1), slice(1, 3)]])):
            for rows in order.tensor_split(cuts):
                block = logits[some][:, :, rows], weights[some][:, :, rows]
                seen = block[0].isfinite().flatten(0, 2).any(0).nonzero()[:, 0].tolist() if len(rows) else []
                first, last = (seen[0], seen[-1] + 1) if seen and cut else (0, length)  # keys that none sees left out
                seen = (mask[some] if len(mask) > 1 else mask)[:, :, rows, first:last]
                visible = None if told == "no" else seen
                sums.add(rows, block[0][..., first:last], block[1][..., first:last], some, first, visible)
    agree(sums.result(), by_hand(logits, weights, tokens, cross))


@pytest.mark.parametrize("causal", [True, False])
def test_a_profile_that_is_known_stands_for_the_logits(causal: bool) -> None:
    """float64, 1e-9; several sequences, whose logits are then not read."""
    q, k = torch.randn(2, 3, 2, 13, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64).unbind(0)
    mask = masks("causal" if causal else "all", (3, 2, 13, 13))
    logits = (q @ k.mT).masked_fill(~mask, -math.inf)
    weights, tokens = logits.softmax(-1), torch.randint(0, 3, (3, 13), generator=torch.Generator().manual_seed(5))
    profile = toeplitz_profile(q, k, causal=causal).pooled()
    own, sums = (PatternSums(heads=2, queries=13, keys=13, tokens=tokens, profile=known) for known in (None, profile))
    own.add(torch.arange(13), logits, weights)
    for rows in torch.arange(13).split(5):
        sums.add(rows, torch.zeros_like(logits[:, :, rows]), weights[:, :, rows], visible=mask[:1, :1, rows])
    agree(sums.result(), by_hand(logits, weights, tokens, False))
    for found, expected in zip(sums.by_offset(), own.by_offset(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def test_a_token_is_no_copy_of_itself() -> None:
    """Key i + 1, seen where attention goes both ways, follows token i, but no other copy of it."""
    sums = PatternSums(heads=1, queries=4, keys=4, tokens=torch.tensor([[0, 1, 2, 3], [0, 1, 0, 3]]))
    sums.add(torch.arange(4), torch.zeros(2, 1, 4, 4), torch.full((2, 1, 4, 4), 0.25))
    found = sums.result()
    assert (found.eligible[0], found.induction[0]) == (2, 0.25)  # queries 0 and 2 of the second


@wrong_types
@pytest.mark.parametrize(
    ("made", "added", "field"),
    [
        ({"heads": 0}, {}, "heads, queries and keys"),
        ({"tokens": torch.zeros(1, 4, dtype=torch.long)}, {}, "tokens"),
        ({"tokens": torch.zeros(1, 3, dtype=torch.long), "cross": True}, {}, "tokens"),
        ({}, {"logits": torch.zeros(1, 2, 3, 2)}, "logits and weights"),
        ({}, {"rows": torch.tensor([1, 2, 3])}, "rows"),
        ({}, {"weights": torch.full((1, 2, 3, 3), math.nan)}, "logits and weights"),
    ],
)
def test_wrong_input_is_one_sentence(made: dict[str, Any], added: dict[str, Any], field: str) -> None:
    sizes: dict[str, Any] = {"heads": 2, "queries": 3, "keys": 3}
    block: dict[str, Any] = {"rows": torch.arange(3), **dict.fromkeys(("logits", "weights"), torch.zeros(1, 2, 3, 3))}
    with pytest.raises(InputError, match=f"^{field}(:| must) "):
        PatternSums(**sizes | made).add(**block | added)


def retrieval_by_hand(weights: Tensor, tokens: Tensor, places: Tensor, needle: Tensor) -> tuple[Tensor, Tensor]:
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


def needles(seed: int, batch: int, heads: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
def test_retrieval_is_what_a_loop_finds(seed: int, batch: int, heads: int, count: int) -> None:
    found, wanted = retrieval(*(given := needles(seed, batch, heads, count))), retrieval_by_hand(*given)
    torch.testing.assert_close(found.score, wanted[0])
    torch.testing.assert_close(found.mass, wanted[1], rtol=1e-6, atol=1e-6)


@wrong_types
def test_what_does_not_fit_is_one_sentence() -> None:
    weights, tokens, places, needle = needles(0, 2, 1, 3)
    with pytest.raises(InputError, match="weights and needle must have shapes"):
        retrieval(weights[:1], tokens, places, needle)
    with pytest.raises(InputError, match="needle must contain all tokens of the answer"):
        retrieval(weights, tokens, places, torch.zeros_like(needle))
