"""Models that count, against a version with dictionaries; their shares add up to one."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.ground import InputError
from toeplens.tasks import build
from toeplens.tasks.language import Language
from toeplens.tasks.language.ngrams import MOST, _some, bits_of

WORDS = 5
streams = st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=60).map(np.array)
texts = st.integers(2, 7).flatmap(
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


@given(streams, texts)
def test_bits_are_those_of_dictionaries(train: np.ndarray, texts: np.ndarray):
    found, slow = bits_of(train, texts, WORDS), Dictionaries(train.tolist())
    assert list(found) == [0, 1, 2, 3]
    for order, bits in found.items():
        assert bits == pytest.approx(slow.bits(texts.tolist(), order), rel=1e-12)


@given(streams, st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=5), st.integers(0, 3))
def test_shares_of_what_may_follow_add_up_to_one(train: np.ndarray, before: list[int], order: int):
    def chance(text: list[int]) -> float:
        bits = bits_of(train, np.array([text]), WORDS, orders=[order])[order]
        return 2 ** (-bits * (len(text) - 1))

    total = sum(chance([*before, word]) for word in range(WORDS))
    assert total == pytest.approx(chance(before) if len(before) > 1 else 1, rel=1e-9)


def test_many_texts_are_as_their_parts(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.Generator(np.random.Philox(0))
    train, texts = rng.integers(0, WORDS, 500), rng.integers(0, WORDS, (23, 6))
    whole = bits_of(train, texts, WORDS)
    monkeypatch.setattr("toeplens.tasks.language.ngrams._ROWS", 13)
    assert bits_of(train, texts, WORDS) == pytest.approx(whole, rel=1e-12)


def test_a_large_vocabulary_has_no_number_too_large():
    rng, many = np.random.Generator(np.random.Philox(1)), 2**31 - 1
    train = np.tile(rng.integers(0, many, 50), 40).astype(np.int32)
    found = bits_of(train, train[None, :400].astype(np.int64), many)
    assert found[3] < found[2] < found[1] < 1 < found[0] < 6


def test_of_a_long_text_stretches_from_all_over_are_counted():
    train = np.arange(100_000)
    assert len(_some(train, MOST)) == 100_000
    some = _some(train, 6_400)
    assert len(some) == len(np.unique(some)) == 6_400
    assert (some[0], some[-1]) == (0, 99_999)
    assert np.count_nonzero(np.diff(some) != 1) == 63
    assert len(_some(train, 7)) == 7
    assert bits_of(train % 2, np.array([[0, 1, 0, 1]]), 2, most=6_400)[1] < 0.01


def test_more_context_costs_fewer_bits_of_code_and_never_more_than_a_byte():
    task = build("language", length=64)
    assert isinstance(task, Language)
    corpus, examples = task.corpus(), task.dataset("test", 50, seed=0)
    texts = np.concatenate((examples.tokens[:, :1], examples.labels), axis=1)
    found = bits_of(corpus.stream("train"), texts, corpus.vocab_size, most=2**18)
    assert 1 < found[3] < found[2] < found[1] < found[0] < 8


@pytest.mark.parametrize(
    ("train", "texts", "options", "message"),
    [
        ([], [[1, 2]], {}, "train must have at least one token"),
        ([1], [[1]], {}, "texts must be at least 1 text of at least 2 tokens, got (1, 1)."),
        ([1], [[1, 2]], {"orders": [-1]}, "orders must be a whole number of at least 0, got -1."),
    ],
)
def test_nothing_to_count_or_to_foretell_is_refused(train: object, texts: object, options: dict, message: str):
    with pytest.raises(InputError) as caught:
        bits_of(np.array(train), np.array(texts), WORDS, **options)
    assert str(caught.value).startswith(message)
