"""Multi-query associative recall against a reader that goes through a text word by word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from toeplens.tasks import Examples, Task, build

Refused = Callable[[str, dict[str, Any], str], None]


def draw(task: Task, count: int, seed: int = 0) -> Examples:
    return task.draw(np.random.Generator(np.random.Philox(seed)), count, seed)


def texts(examples: Examples) -> list[tuple[list[int], int]]:
    found = zip(examples.tokens.tolist(), examples.lengths.tolist(), examples.labels.tolist(), strict=True)
    return [(row[:length], label) for row, length, label in found]


def read(text: list[int], keys: int, values: int) -> tuple[dict[int, int], list[int], int, int]:
    """The pairs, the keys that are asked for, the tokens before them, and the value of the last one."""
    book: dict[int, int] = {}
    asked: list[int] = []
    told = at = 0
    while at < len(text):
        word = text[at]
        if word > keys + values:
            assert not asked  # distractors stand before the queries alone
            at += 1
            continue
        assert 1 <= word <= keys
        if word not in book:
            assert not asked
            assert keys < text[at + 1] <= keys + values
            book[word] = text[at + 1]
            told = at + 2
        else:
            told = told if asked else at
            asked.append(word)
            assert at + 1 == len(text) or text[at + 1] == book[word]
        at += 2
    return book, asked, told, book[asked[-1]]


@given(data=st.data())
def test_recall_reads_as_labelled(data: st.DataObject):
    keys, values = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 5))
    pairs, distractors = data.draw(st.integers(1, keys)), data.draw(st.integers(0, 3))
    queries = data.draw(st.integers(1, pairs))
    length = 2 * pairs + 2 * queries - 1 + data.draw(st.integers(0, 4))
    options = {"keys": keys, "values": values, "pairs": pairs, "queries": queries, "distractors": distractors}
    task = build("recall", length=length, **options)
    for each in (task, task.at_length(length + 6)) if distractors else (task,):
        for text, label in texts(draw(each, 60)):
            book, asked, told, answer = read(text, keys, values)
            assert len(book) == pairs
            assert 1 <= len(asked) == len(set(asked)) <= queries
            assert told == (each.length - 2 * queries + 1 if distractors else 2 * pairs)
            assert answer == label


def test_every_number_of_queries_every_pair_and_every_place_is_as_likely():
    task = build("recall", length=12, keys=4, values=2, pairs=3, queries=2, distractors=2)
    many, which, places = Counter(), Counter(), Counter()
    for text, _ in texts(draw(task, 6000)):
        book, asked, _, _ = read(text, 4, 2)
        many[len(asked)] += 1
        which[list(book).index(asked[-1])] += 1
        places[tuple(text.index(key) for key in book)] += 1
    assert sorted(many) == [1, 2]
    assert sorted(which) == [0, 1, 2]
    assert len(places) == 20  # 3 pairs among 3 distractors
    for counts in (many, which, places):
        assert stats.chisquare(list(counts.values())).pvalue > 1e-4


REFUSED = [
    ({"pairs": 33, "length": 99}, "pairs: 33 was given; there are only 32 different keys."),
    ({"queries": 9}, "queries: 9 was given; there are only 8 pairs to ask for."),
    ({"queries": 0}, "queries: 0 was given"),
    ({"values": 1}, "values: 1 was given"),
    ({"distractors": -1}, "distractors: -1 was given"),
    ({"length": 22}, "length: 22 was given; it must be a whole number of at least 23."),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_do_not_fit_are_refused_in_one_sentence(
    assert_refused: Refused, options: dict[str, Any], message: str
):
    assert_refused("recall", options, message)
