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

from toeplens.lens import retrieval, toeplitz_profile
from toeplens.lens.head_types import patterns
from toeplens.lens.head_types.patterns import Patterns, PatternSums
from toeplens.utils import InputError

NUMBERS = (
    *("toeplitz", "toeplitz_variance", "distance", "entropy", "first", "sink", "previous", "current", "next"),
    *("induction", "duplicate", "profile", "eligible"),
)


def reference_scores(logits: Tensor, weights: Tensor, tokens: Tensor | None, cross: bool) -> dict[str, np.ndarray]:
    """Every number of every head, query by query and key by key."""
    heads, keys = logits.shape[1], logits.shape[3]
    totals: dict[str, list[Any]] = {name: [] for name in NUMBERS}

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    for h in range(heads):
        logits_by_offset: dict[int, list[float]] = {}
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
                visible = [j for j in range(keys) if scores[j] > -math.inf]
                if not visible:
                    continue
                visible_weights = sum(row[j] for j in visible)
                sink.append(1 - visible_weights)
                if cross or i != 0:
                    first.append(row[0] if 0 in visible else 0.0)
                if len(visible) > 1 and visible_weights > 0:
                    p = [row[j] / visible_weights for j in visible if row[j] > 0]
                    entropy.append(-sum(q * math.log(q) for q in p) / math.log(len(visible)))
                for j in visible:
                    logits_by_offset.setdefault(i - j, []).append(scores[j])
                    moved, whole = moved + abs(i - j) * row[j], whole + row[j]
                    if not cross:
                        profile[0 if i == j else 1 + int(math.log2(abs(i - j)))] += row[j]
                for offset, result in near.items():
                    if i - offset in visible:
                        result.append(row[i - offset])
                if words is not None:
                    follow = [j for j in visible if j >= 1 and j - 1 != i and words[j - 1] == words[i]]
                    induction += [sum(row[j] for j in follow)] if follow else []
                    copies = [j for j in visible if j != i and words[j] == words[i]]
                    duplicate += [sum(row[j] for j in copies)] if copies else []
        every = np.array([x for result in logits_by_offset.values() for x in result])
        held = np.array([np.mean(result) for result in logits_by_offset.values() for _ in result])
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
            totals[name].append(value)
        totals["profile"].append([] if cross else [x / len(sink) for x in profile])
    return {name: np.array(values) for name, values in totals.items()}


def random_attention(seed: int, shape: tuple[int, int, int, int], mask: Tensor, sink: bool) -> tuple[Tensor, Tensor]:
    """Logits and weights of any kind under a mask that broadcasts; a query that sees nothing has NaN weights."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64) + 1
    logits = logits.masked_fill(~mask, -math.inf)
    rest = torch.randn(shape[1], 1, 1, generator=generator, dtype=torch.float64).expand(*shape[:3], 1)
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


def assert_scores_equal(found: Patterns, expected: dict[str, np.ndarray]) -> None:
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
def test_any_blocking_matches_plain_loops(
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
    with patch.object(patterns, "_MAX_LOGITS", at_once):
        for some in data.draw(st.sampled_from([[slice(0, 3)], [slice(0, 1), slice(1, 3)]])):
            for rows in order.tensor_split(cuts):
                block = logits[some][:, :, rows], weights[some][:, :, rows]
                visible_keys = block[0].isfinite().flatten(0, 2).any(0).nonzero()[:, 0].tolist() if len(rows) else []
                # without keys that none sees
                first, last = (visible_keys[0], visible_keys[-1] + 1) if visible_keys and cut else (0, length)
                visible_keys = (mask[some] if len(mask) > 1 else mask)[:, :, rows, first:last]
                visible = None if told == "no" else visible_keys
                sums.add(rows, block[0][..., first:last], block[1][..., first:last], some, first, visible)
    assert_scores_equal(sums.result(), reference_scores(logits, weights, tokens, cross))


@pytest.mark.parametrize("causal", [True, False])
def test_a_known_profile_replaces_the_logits(causal: bool) -> None:
    """float64, 1e-9; several sequences, whose logits are then not read."""
    q, k = torch.randn(2, 3, 2, 13, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64).unbind(0)
    mask = masks("causal" if causal else "all", (3, 2, 13, 13))
    logits = (q @ k.mT).masked_fill(~mask, -math.inf)
    weights, tokens = logits.softmax(-1), torch.randint(0, 3, (3, 13), generator=torch.Generator().manual_seed(5))
    profile = toeplitz_profile(q, k, causal=causal).pool()
    sizes = {"heads": 2, "queries": 13, "keys": 13, "tokens": tokens}
    plain, sums = PatternSums(**sizes), PatternSums(**sizes, profile=profile)
    plain.add(torch.arange(13), logits, weights)
    for rows in torch.arange(13).split(5):
        sums.add(rows, torch.zeros_like(logits[:, :, rows]), weights[:, :, rows], visible=mask[:1, :1, rows])
    assert_scores_equal(sums.result(), reference_scores(logits, weights, tokens, False))
    for actual, expected in zip(sums.logits_by_offset(), plain.logits_by_offset(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)


def test_sums_in_float32_are_those_in_float64() -> None:
    """4096 tokens, two sequences, logits of ten thousand. Weights are summed by offset in float32, over the sequences
    and queries of a block: 66 numbers, so with relative errors below 66 units of 2^-24; logits in float64."""
    length, draw = 4096, torch.Generator().manual_seed(0)
    sums = [PatternSums(heads=1, queries=length, keys=length) for _ in range(2)]
    for rows in torch.arange(length).split(64):
        visible = torch.arange(length) <= rows.unsqueeze(-1)
        logits = 1e4 * torch.randn(2, 1, 64, length, generator=draw).masked_fill(~visible, -math.inf)
        weights = (logits / 1e4).softmax(-1)
        sums[0].add(rows, logits, weights, visible=visible[None, None])
        sums[1].add(rows, logits.double(), weights.double(), visible=visible[None, None])
    narrow, wide = (each.result() for each in sums)
    for name in ("toeplitz", "toeplitz_variance"):
        np.testing.assert_allclose(getattr(narrow, name), getattr(wide, name), rtol=1e-12)
    for name in ("distance", "previous", "current", "profile", "entropy", "first"):
        np.testing.assert_allclose(getattr(narrow, name), getattr(wide, name), rtol=66 * 2.0**-24, err_msg=name)


@given(
    seed=st.integers(0, 999),
    kind=st.sampled_from(["all", "causal", "window", "padded"]),
    sink=st.booleans(),
    words=st.sampled_from([0, 3]),
    length=st.integers(2, 9),
    told=st.booleans(),
)
def test_patterns_of_weights_match_plain_loops(
    *, seed: int, kind: str, sink: bool, words: int, length: int, told: bool
) -> None:
    """float64, 1e-9; which keys a query sees is said or, but for windows and padding, found."""
    mask = masks(kind, (3, 2, length, length))
    logits, weights = random_attention(seed, (3, 2, length, length), mask, sink)
    tokens = torch.randint(0, words, (3, length), generator=torch.Generator().manual_seed(seed)) if words else None
    options: dict[str, Any] = {"sink": sink, "causal": kind != "all" if told else None}
    options |= {"window": {"window": 3}, "padded": {"lengths": torch.tensor([length, max(1, length // 2), 0])}}.get(
        kind, {}
    )
    weights = weights.masked_fill(~mask, 0)
    if kind == "padded":  # whatever padding attends to
        logits = logits.masked_fill(torch.arange(length)[:, None] >= options["lengths"][:, None, None, None], -math.inf)
    found = patterns.patterns(weights, tokens, **options)
    expected = reference_scores(logits, weights.masked_fill(~logits.isfinite(), 0), tokens, False)
    assert_scores_equal(found, expected | dict.fromkeys(("toeplitz", "toeplitz_variance"), np.full(2, math.nan)))
    if kind != "padded":
        one = patterns.patterns(weights[0], None if tokens is None else tokens[0], **options)
        assert_scores_equal(
            one, vars(patterns.patterns(weights[:1], None if tokens is None else tokens[:1], **options))
        )


W = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)).softmax(-1)
CAUSAL = W.tril() / W.tril().sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_may_be_rounded_to_their_dtype_or_to_one_that_they_had_before(dtype: torch.dtype) -> None:
    """Of 4000 keys, 64 queries at a time; but no more than that."""
    logits = 3 * torch.randn(1, 2, 4000, 4000, generator=torch.Generator().manual_seed(0))
    weights = logits.softmax(-1).to(dtype)
    for x in (weights, weights.float()) if dtype.itemsize < 4 else (weights,):
        assert np.isfinite(patterns.patterns(x).entropy).all()
    with pytest.raises(InputError, match=r"^weights must sum to 1 over the keys"):
        patterns.patterns(weights.double() * (1 + 4 * torch.finfo(dtype).eps + 2e-5))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"weights": 0.9 * W}, r"weights must sum to 1 over the keys of each query, .*, got 0.9 to 0.9\.$"),
        ({"weights": W.transpose(1, 2)}, r"weights must be a torch.Tensor of shape \[B, H, N, N\] or \[H, N, N\], got"),
        ({"weights": W.mT}, "weights must sum to 1 over the keys"),
        ({"weights": 1.1 * W, "sink": True}, "weights must sum to 1 .*or less with sink"),
        ({"weights": 2 * W - 1 / 6}, "weights must be finite and at least 0"),
        ({"weights": W / 0}, "weights must be finite and at least 0"),
        ({"causal": True}, "weights must be 0 on keys that a query does not see"),
        ({"weights": CAUSAL, "window": 3}, "weights must be 0 on keys that a query does not see"),
        ({"lengths": torch.tensor([6, 4])}, "weights must be 0 on keys that a query does not see"),
        ({"lengths": torch.tensor([6])}, "lengths must have shape"),
        ({"window": 0}, "window must be at least 1"),
        ({"window": 2.5}, "window must be a whole number or None, got 2.5"),
        (
            {"tokens": torch.zeros(2, 5, dtype=torch.long)},
            r"tokens must have shape \[2, 6\], got int64 of shape \[2, 5\]",
        ),
        ({"weights": W.log()}, "weights must be finite and at least 0"),
    ],
)
@wrong_types
def test_what_is_no_attention_is_refused_in_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{sentence}"):
        patterns.patterns(**{"weights": W} | change)


def test_a_token_is_not_its_own_copy() -> None:
    """Key i + 1, seen where attention goes both ways, follows token i, but no other copy of it."""
    sums = PatternSums(heads=1, queries=4, keys=4, tokens=torch.tensor([[0, 1, 2, 3], [0, 1, 0, 3]]))
    sums.add(torch.arange(4), torch.zeros(2, 1, 4, 4), torch.full((2, 1, 4, 4), 0.25))
    actual = sums.result()
    assert (actual.eligible[0], actual.induction[0]) == (2, 0.25)  # queries 0 and 2 of the second


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
def test_invalid_input_is_refused_in_one_sentence(made: dict[str, Any], added: dict[str, Any], field: str) -> None:
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


def retrieval_case(seed: int, batch: int, heads: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
def test_retrieval_scores_match_a_loop(seed: int, batch: int, heads: int, count: int) -> None:
    actual, expected = retrieval(*(case := retrieval_case(seed, batch, heads, count))), retrieval_by_hand(*case)
    torch.testing.assert_close(actual.score, expected[0])
    torch.testing.assert_close(actual.mass, expected[1], rtol=1e-6, atol=1e-6)


@wrong_types
def test_invalid_retrieval_input_is_refused_in_one_sentence() -> None:
    weights, tokens, places, needle = retrieval_case(0, 2, 1, 3)
    with pytest.raises(InputError, match="weights and needle must have shapes"):
        retrieval(weights[:1], tokens, places, needle)
    with pytest.raises(InputError, match="needle must contain all tokens of the answer"):
        retrieval(weights, tokens, places, torch.zeros_like(needle))
