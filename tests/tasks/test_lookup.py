"""Index, retrieval and mix against readers that go through a text word by word."""

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

SAFE = 1e-4


def draw(task: Task, count: int, seed: int = 0) -> Examples:
    return task.draw(np.random.Generator(np.random.Philox(seed)), count, seed)


def texts(examples: Examples) -> list[tuple[list[int], int]]:
    """Each text without its padding, and its label."""
    found = zip(examples.tokens.tolist(), examples.lengths.tolist(), examples.labels.tolist(), strict=True)
    return [(row[:length], label) for row, length, label in found]


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
    for each in (task, task.at_length(length + 5)):
        for text, label in texts(draw(each, 60)):
            assert len(text) >= shortest
            assert read_index(text, words, positions, from_end) == label


def test_the_reader_of_indices_tells_one_end_from_the_other():
    examples = texts(draw(build("index", length=12), 300))
    assert sum(read_index(text, 32, 11, True) == label for text, label in examples) < 60


def test_index_asks_for_each_of_its_places_as_often_at_any_length():
    task = build("index", length=9, words=4)
    for each in (task, task.at_length(30)):
        examples = draw(each, 4000)
        stated = Counter(examples.tokens[np.arange(4000), examples.lengths - 1].tolist())
        assert sorted(stated) == list(range(5, 13))
        assert stats.chisquare(list(stated.values())).pvalue > SAFE


@given(data=st.data())
def test_retrieval_reads_as_labelled(data: st.DataObject):
    keys, values = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 5))
    pairs, distractors = data.draw(st.integers(1, keys)), data.draw(st.integers(0, 3))
    shortest = pairs + 1 + data.draw(st.integers(0, 3))
    sizes: dict[str, Any] = {"length": shortest + data.draw(st.integers(0, 3))}
    if distractors:
        sizes["min_length"] = shortest
    task = build("retrieval", keys=keys, values=values, pairs=pairs, distractors=distractors, **sizes)
    for each in (task, task.at_length(task.length + 5)) if distractors else (task,):
        for text, label in texts(draw(each, 60)):
            assert len(text) >= shortest if distractors else len(text) == pairs + 1
            assert read_retrieval(text, keys, values, pairs, distractors) == label


def test_every_pair_of_a_text_is_asked_for_as_often():
    task = build("retrieval", length=5, keys=4, values=3, pairs=4, distractors=0)
    asked: Counter[int] = Counter()
    for text, _ in texts(draw(task, 4000)):
        asked[[(word - 1) // 3 for word in text[:-1]].index(text[-1] - 13)] += 1
    assert sorted(asked) == [0, 1, 2, 3]
    assert stats.chisquare(list(asked.values())).pvalue > SAFE


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
    for each in (task, task.at_length(length + 5)):
        for text, label in texts(draw(each, 60)):
            assert len(text) >= shortest
            assert read_mix(text, words, keys, placed, offsets) == label


def test_mix_asks_for_every_key_offset_and_place_as_often():
    task = build("mix", length=7, words=3, keys=3, placed=2, min_offset=-1, max_offset=1)
    keys, offsets, at = Counter(), Counter(), Counter()
    for text, _ in texts(draw(task, 6000)):
        *body, key, offset = text
        keys[key] += 1
        offsets[offset] += 1
        at[offset, body.index(key)] += 1
    assert (sorted(keys), sorted(offsets)) == ([4, 5, 6], [7, 8])
    assert sorted(at) == [(7, 1), (7, 2), (7, 3), (7, 4), (8, 0), (8, 1), (8, 2), (8, 3)]
    for counts in (keys, offsets, at):
        assert stats.chisquare(list(counts.values())).pvalue > SAFE


REFUSED = [
    ("index", {"length": 1}, "length: 1 was given; it must be a whole number of at least 2."),
    ("index", {"length": 8, "min_length": 9}, "min_length: 9 was given; it must be at most length (8)."),
    ("index", {"min_length": 1}, "min_length: 1 was given; it must be a whole number of at least 2."),
    ("index", {"length": 8, "positions": 8}, "positions: 8 was given; the shortest text has 7 words to ask for."),
    ("index", {"words": 1}, "words: 1 was given"),
    ("index", {"words": 4.0}, "words: 4.0 was given; it must be a whole number."),
    ("index", {"from_end": "yes"}, "from_end: 'yes' was given; it must be true or false."),
    ("index", {"from_ends": True}, "there is no 'from_ends'; did you mean 'from_end'"),
    ("retrieval", {"keys": 4}, "pairs: 8 was given; there are only 4 different keys."),
    ("retrieval", {"values": 1}, "values: 1 was given"),
    ("retrieval", {"distractors": -1}, "distractors: -1 was given"),
    ("retrieval", {"length": 8}, "length: 8 was given; it must be a whole number of at least 9."),
    ("retrieval", {"distractors": 0, "min_length": 9}, "min_length: 9 was given; without distractors all texts have 9"),
    ("mix", {"placed": 9}, "placed: 9 was given; there are only 8 different keys."),
    ("mix", {"min_offset": 5}, "min_offset: 5 was given; it must be at most max_offset (4)."),
    ("mix", {"min_offset": 0, "max_offset": 0}, "max_offset: 0 was given as the only offset; that is the key itself."),
    ("mix", {"max_offset": 2.5}, "max_offset: 2.5 was given; it must be a whole number."),
    ("mix", {"max_offset": 63}, "length: 64 was given; it must be a whole number of at least 66."),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_options_that_do_not_fit_are_refused_in_one_sentence(
    assert_refused: Refused, name: str, options: dict[str, Any], message: str
):
    assert_refused(name, options, message)
