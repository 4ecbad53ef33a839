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

from toeplens.ground import InputError
from toeplens.tasks import Examples, Task, build, trivial_baselines
from toeplens.tasks.baselines import MOST, _segments, ngram_bits

FACTS: dict[str, Callable[[list[int]], int]] = {
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


def by_fact(train: list[tuple[Any, int]], test: list[tuple[Any, int]]) -> float:
    """Accuracy of the most frequent label of each fact; pairs of facts and labels."""
    told: dict[Any, list[int]] = {}
    for fact, label in train:
        told.setdefault(fact, []).append(label)
    usual = commonest([label for _, label in train])
    return sum((commonest(told[fact]) if fact in told else usual) == label for fact, label in test) / len(test)


def by_bag(train: Examples, test: Examples) -> float:
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
def test_the_rules_score_what_they_score_text_by_text(which: str):
    train, test = draw(CASES[which], 300, 0), draw(CASES[which], 200, 1)
    found = trivial_baselines(train, test)
    assert list(found) == [*FACTS, "bag"]
    for name, fact in FACTS.items():
        known = ([(fact(text), label) for text, label in texts(examples)] for examples in (train, test))
        assert found[name] == pytest.approx(by_fact(*known), abs=1e-12), name
    assert found["bag"] == pytest.approx(by_bag(train, test), abs=1e-12)


def test_the_rules_of_tokens_score_what_they_score_token_by_token():
    task = build("markov-language", length=24, words=9, branches=3, documents=90, document=70, span=8)
    train, test = task.dataset("train", 40, seed=0), task.dataset("test", 20, seed=0)
    found = trivial_baselines(train, test)
    before = {
        "constant": lambda row, at: 0,
        "last": lambda row, at: row[at],
        "last but one": lambda row, at: row[at - 1] if at else None,
    }
    assert found.keys() == before.keys()
    for name, fact in before.items():
        known = (
            [
                (fact(row, at), label)
                for row, labels in zip(examples.tokens.tolist(), examples.labels.tolist(), strict=True)
                for at, label in enumerate(labels)
            ]
            for examples in (train, test)
        )
        assert found[name] == pytest.approx(by_fact(*known), abs=1e-12), name


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


class Dictionaries:
    """The rule, a token at a time."""

    def __init__(self, train: list[int]) -> None:
        self.follows: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for order in range(4):
            for at in range(order, len(train)):
                self.follows[tuple(train[at - order : at])][train[at]] += 1

    def share(self, word: int, before: tuple[int, ...]) -> float:
        shorter = self.share(word, before[1:]) if before else 1 / WORDS
        seen = self.follows[before]
        return (seen[word] + len(seen) * shorter) / (seen.total() + len(seen)) if seen else shorter

    def bits(self, texts: list[list[int]], order: int) -> float:
        found = [
            -math.log2(self.share(text[at], tuple(text[max(0, at - order) : at])))
            for text in texts
            for at in range(1, len(text))
        ]
        return sum(found) / len(found)


@given(streams, windows)
def test_bits_are_those_of_dictionaries(train: np.ndarray, texts: np.ndarray):
    found, slow = ngram_bits(train, texts, WORDS), Dictionaries(train.tolist())
    assert list(found) == [0, 1, 2, 3]
    for order, bits in found.items():
        assert bits == pytest.approx(slow.bits(texts.tolist(), order), rel=1e-12)


def test_a_large_vocabulary_has_no_number_too_large():
    rng, many = np.random.Generator(np.random.Philox(1)), 2**31 - 1
    train = np.tile(rng.integers(0, many, 50), 40).astype(np.int32)
    found = ngram_bits(train, train[None, :400].astype(np.int64), many)
    assert found[3] < found[2] < found[1] < 1 < found[0] < 6


def test_of_a_long_text_stretches_from_all_over_are_counted():
    train = np.arange(100_000)
    assert len(_segments(train, MOST)) == 100_000
    some = _segments(train, 6_400)
    assert len(some) == len(np.unique(some)) == 6_400
    assert (some[0], some[-1]) == (0, 99_999)
    assert np.count_nonzero(np.diff(some) != 1) == 63
    assert len(_segments(train, 7)) == 7
    assert ngram_bits(train % 2, np.array([[0, 1, 0, 1]]), 2, most=6_400)[1] < 0.01
