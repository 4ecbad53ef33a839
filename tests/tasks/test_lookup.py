"""Index, retrieval, mix and recall against readers that go through a text word by word."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.tasks.reading import assert_even, assert_reads, draw, texts

from toeplens.tasks import build


def read_index(text: list[int], words: int, positions: int, from_end: bool) -> int:
    *body, query = text
    stated = query - words - 1
    assert 0 <= stated < positions
    assert all(1 <= word <= words for word in body)
    if from_end:
        body.reverse()
    for place, word in enumerate(body):
        if place == stated:
            return word
    raise AssertionError("the text has no such place")


def read_retrieval(text: list[int], keys: int, values: int, pairs: int, distractors: int) -> int:
    book: dict[int, int] = {}
    *body, query = text
    for word in body:
        if word <= keys * values:
            key, value = (word - 1) // values, (word - 1) % values
            assert key not in book
            book[key] = value
        else:
            assert keys * values + keys < word <= keys * values + keys + distractors
    assert len(book) == pairs
    return book[query - keys * values - 1]


def read_mix(text: list[int], words: int, keys: int, placed: int, offsets: list[int]) -> int:
    if len(offsets) > 1:
        *text, stated = text
        offset = offsets[stated - words - keys - 1]
    else:
        (offset,) = offsets
    *body, query = text
    present = [word for word in body if word > words]
    assert len(present) == len(set(present)) == placed
    assert all(words < key <= words + keys for key in present)
    found = [body[at + offset] for at, word in enumerate(body) if word == query and 0 <= at + offset < len(body)]
    assert len(found) == 1
    return found[0]


@given(data=st.data())
def test_index_reads_as_labelled(data: st.DataObject):
    shortest = data.draw(st.integers(2, 9))
    length, words = data.draw(st.integers(shortest, 12)), data.draw(st.integers(2, 6))
    positions, from_end = data.draw(st.integers(1, shortest - 1)), data.draw(st.booleans())
    options: dict[str, Any] = {"min_length": shortest, "words": words, "positions": positions, "from_end": from_end}
    task = build("index", length=length, **options)
    assert_reads(task, lambda text: read_index(text, words, positions, from_end))


def test_index_asks_for_each_of_its_places_as_often_at_any_length():
    task = build("index", length=9, words=4)
    for each in (task, task.at_length(30)):
        examples = draw(each, 4000)
        assert_even(Counter(examples.tokens[np.arange(4000), examples.lengths - 1].tolist()), range(5, 13))


@given(data=st.data())
def test_retrieval_reads_as_labelled(data: st.DataObject):
    keys, values = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 5))
    pairs, distractors = data.draw(st.integers(1, keys)), data.draw(st.integers(0, 3))
    shortest = pairs + 1 + data.draw(st.integers(0, 3))
    sizes: dict[str, Any] = {"length": shortest + data.draw(st.integers(0, 3))}
    if distractors:
        sizes["min_length"] = shortest
    task = build("retrieval", keys=keys, values=values, pairs=pairs, distractors=distractors, **sizes)

    def read(text: list[int]) -> int:
        assert len(text) >= shortest if distractors else len(text) == pairs + 1
        return read_retrieval(text, keys, values, pairs, distractors)

    assert_reads(task, read, more=5 if distractors else 0)


def test_every_pair_of_a_text_is_asked_for_as_often():
    task = build("retrieval", length=5, keys=4, values=3, pairs=4, distractors=0)
    asked = (([(word - 1) // 3 for word in text[:-1]], text[-1] - 13) for text, _ in texts(draw(task, 4000)))
    assert_even(Counter(keys.index(query) for keys, query in asked), range(4))


@given(data=st.data())
def test_mix_reads_as_labelled(data: st.DataObject):
    low = data.draw(st.integers(-3, 2))
    high = data.draw(st.integers(max(low, -2), 3).filter(lambda high: (low, high) != (0, 0)))
    offsets = [offset for offset in range(low, high + 1) if offset]
    words, keys = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 4))
    placed = data.draw(st.integers(1, keys))
    shortest = max(placed, *map(abs, offsets)) + 2 + (len(offsets) > 1) + data.draw(st.integers(0, 3))
    length = shortest + data.draw(st.integers(0, 3))
    options = {"words": words, "keys": keys, "placed": placed, "min_offset": low, "max_offset": high}
    task = build("mix", length=length, min_length=shortest, **options)
    assert_reads(task, lambda text: read_mix(text, words, keys, placed, offsets))


def test_mix_asks_for_every_key_offset_and_place_as_often():
    task = build("mix", length=7, words=3, keys=3, placed=2, min_offset=-1, max_offset=1)
    found = [text for text, _ in texts(draw(task, 6000))]
    assert_even(Counter(text[-2] for text in found), (4, 5, 6))
    assert_even(Counter(text[-1] for text in found), (7, 8))
    places = [*((7, at) for at in (1, 2, 3, 4)), *((8, at) for at in (0, 1, 2, 3))]
    assert_even(Counter((text[-1], text.index(text[-2])) for text in found), places)


def read_recall(text: list[int], keys: int, values: int) -> tuple[dict[int, int], list[int], int, int]:
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
    queries, spare = data.draw(st.integers(1, pairs)), data.draw(st.integers(0, 4))
    length = 2 * pairs + 2 * queries - 1 + spare
    options = {"keys": keys, "values": values, "pairs": pairs, "queries": queries, "distractors": distractors}

    def read(text: list[int]) -> int:
        book, asked, told, answer = read_recall(text, keys, values)
        assert len(book) == pairs
        assert 1 <= len(asked) == len(set(asked)) <= queries
        assert told in ((2 * pairs + spare, 2 * pairs + spare + 6) if distractors else (2 * pairs,))
        return answer

    assert_reads(build("recall", length=length, **options), read, more=6 if distractors else 0)


def test_every_number_of_queries_every_pair_and_every_place_is_as_likely():
    task = build("recall", length=12, keys=4, values=2, pairs=3, queries=2, distractors=2)
    many, which, places = Counter(), Counter(), Counter()
    for text, _ in texts(draw(task, 6000)):
        book, asked, _, _ = read_recall(text, 4, 2)
        many[len(asked)] += 1
        which[list(book).index(asked[-1])] += 1
        places[tuple(text.index(key) for key in book)] += 1
    assert_even(many, (1, 2))
    assert_even(which, range(3))
    assert len(places) == 20  # 3 pairs among 3 distractors
    assert_even(places, places)
