"""Rules that need no model, against rules written out text by text; n-gram models, against dictionaries."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tasks.readers import texts

from toeplens.tasks import Examples, Task, build, trivial_baselines
from toeplens.tasks.baselines import MAX_TOKENS, _segments, ngram_bits
from toeplens.utils import InputError

FEATURES: dict[str, Callable[[list[int]], int]] = {
    "constant": lambda text: 0,
    "length": len,
    "first": lambda text: text[0],
    "last": lambda text: text[-1],
    "last but one": lambda text: text[-2] if len(text) > 1 else 0,
    "most frequent": lambda text: min(text, key=lambda word: (-text.count(word), word)),
}


def draw(task: Task, count: int, seed: int) -> Examples:
    """Examples of one data set, whatever the seed: its special words are the same."""
    return task.draw(np.random.Generator(np.random.Philox(seed)), count, 0)


def commonest(labels: list[int]) -> int:
    counts = Counter(labels)
    return min(counts, key=lambda label: (-counts[label], label))


def accuracy_by_feature(train: list[tuple[Any, int]], test: list[tuple[Any, int]]) -> float:
    """Accuracy of the most frequent label of each fact; pairs of facts and labels."""
    labels_by_feature: dict[Any, list[int]] = {}
    for fact, label in train:
        labels_by_feature.setdefault(fact, []).append(label)
    usual = commonest([label for _, label in train])
    return sum(
        (commonest(labels_by_feature[fact]) if fact in labels_by_feature else usual) == label for fact, label in test
    ) / len(test)


def accuracy_by_bag(train: Examples, test: Examples) -> float:
    vocab_size = 1 + max(int(train.tokens.max()), int(test.tokens.max()))
    bags: dict[int, Counter[int]] = {}
    seen = Counter(train.labels.tolist())
    for text, label in texts(train):
        bags.setdefault(label, Counter()).update(text)
    hits = 0
    for text, label in texts(test):
        score = {
            each: math.log(seen[each] / len(train))
            + sum(math.log((bag[word] + 1) / (bag.total() + vocab_size)) for word in text)
            for each, bag in bags.items()
        }
        hits += max(sorted(score), key=score.__getitem__) == label
    return hits / len(test)


CASES = {
    "sort": build("sort", length=12, words=5),
    "recall": build("recall", length=14, keys=4, values=3, pairs=3, queries=2, distractors=2),
    "depth": build("dyck", ask="depth", length=9, min_length=2, max_depth=3),
    "distance": build("trigger-distance", form="released", length=20, vocab_size=40, max_between=6, max_side=4),
}


@pytest.mark.parametrize("which", CASES)
def test_rule_baselines_match_scoring_each_sequence(which: str):
    train, test = draw(CASES[which], 300, 0), draw(CASES[which], 200, 1)
    actual = trivial_baselines(train, test)
    assert list(actual) == [*FEATURES, "bag"]
    for name, fact in FEATURES.items():
        known = ([(fact(text), label) for text, label in texts(examples)] for examples in (train, test))
        assert actual[name] == pytest.approx(accuracy_by_feature(*known), abs=1e-12), name
    assert actual["bag"] == pytest.approx(accuracy_by_bag(train, test), abs=1e-12)


def test_per_token_baselines_match_scoring_each_token():
    task = build("markov-language", length=24, words=9, branches=3, documents=90, document=70, span=8)
    train, test = task.dataset("train", 40, seed=0), task.dataset("test", 20, seed=0)
    actual = trivial_baselines(train, test)
    before = {
        "constant": lambda row, at: 0,
        "last": lambda row, at: row[at],
        "last but one": lambda row, at: row[at - 1] if at else None,
    }
    assert actual.keys() == before.keys()
    for name, fact in before.items():
        known = (
            [
                (fact(row, at), label)
                for row, labels in zip(examples.tokens.tolist(), examples.labels.tolist(), strict=True)
                for at, label in enumerate(labels)
            ]
            for examples in (train, test)
        )
        assert actual[name] == pytest.approx(accuracy_by_feature(*known), abs=1e-12), name


@pytest.mark.parametrize("field", ["train", "test"])
def test_an_empty_set_is_refused(field: str):
    sets = {name: draw(build("parity"), 3, 0) for name in ("train", "test")}
    sets[field] = sets[field][:0]
    with pytest.raises(InputError, match=f"^{field} must have at least one example, got none"):
        trivial_baselines(**sets)


# ---- n-gram models ---------------------------------------------------------------------------------------------------

WORDS = 5
streams = st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=60).map(np.array)
windows = st.integers(2, 7).flatmap(
    lambda length: st.lists(
        st.lists(st.integers(0, WORDS - 1), min_size=length, max_size=length), min_size=1, max_size=4
    ).map(np.array)
)


class DictionaryNgrams:
    """The rule, a token at a time."""

    def __init__(self, train: list[int]) -> None:
        self.follows: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for order in range(4):
            for at in range(order, len(train)):
                self.follows[tuple(train[at - order : at])][train[at]] += 1

    def share(self, word: int, before: tuple[int, ...]) -> float:
        shorter = self.share(word, before[1:]) if before else 1 / WORDS
        counts = self.follows[before]
        return (counts[word] + len(counts) * shorter) / (counts.total() + len(counts)) if counts else shorter

    def bits(self, texts: list[list[int]], order: int) -> float:
        result = [
            -math.log2(self.share(text[at], tuple(text[max(0, at - order) : at])))
            for text in texts
            for at in range(1, len(text))
        ]
        return sum(result) / len(result)


@given(streams, windows)
def test_ngram_bits_match_dictionaries(train: np.ndarray, texts: np.ndarray):
    actual, slow = ngram_bits(train, texts, WORDS), DictionaryNgrams(train.tolist())
    assert list(actual) == [0, 1, 2, 3]
    for order, bits in actual.items():
        assert bits == pytest.approx(slow.bits(texts.tolist(), order), rel=1e-12)


def test_a_large_vocabulary_does_not_overflow():
    rng, many = np.random.Generator(np.random.Philox(1)), 2**31 - 1
    train = np.tile(rng.integers(0, many, 50), 40).astype(np.int32)
    actual = ngram_bits(train, train[None, :400].astype(np.int64), many)
    assert actual[3] < actual[2] < actual[1] < 1 < actual[0] < 6


def test_a_long_text_is_sampled_over_its_whole_length():
    train = np.arange(100_000)
    assert len(_segments(train, MAX_TOKENS)) == 100_000
    some = _segments(train, 6_400)
    assert len(some) == len(np.unique(some)) == 6_400
    assert (some[0], some[-1]) == (0, 99_999)
    assert np.count_nonzero(np.diff(some) != 1) == 63
    assert len(_segments(train, 7)) == 7
    assert ngram_bits(train % 2, np.array([[0, 1, 0, 1]]), 2, max_tokens=6_400)[1] < 0.01
