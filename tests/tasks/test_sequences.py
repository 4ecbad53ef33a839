"""Copy, reverse and sort against programs that write the whole answer down."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.tasks.reading import SAFE, draw, texts

from toeplens.tasks import build

NAMES = ("copy", "reverse", "sort")


def written(name: str, items: list[int]) -> list[int]:
    """The whole answer."""
    left, answer = list(items), []
    while left:
        if name == "copy":
            answer.append(left.pop(0))
        elif name == "reverse":
            answer.append(left.pop())
        else:
            answer.append(left.pop(min(range(len(left)), key=left.__getitem__)))
    return answer


def divided(text: list[int], words: int) -> tuple[list[int], list[int]]:
    """The words to rewrite, and what is given of the answer."""
    assert text.count(words + 1) == 1
    at = text.index(words + 1)
    assert all(1 <= word <= words for word in (*text[:at], *text[at + 1 :]))
    return text[:at], text[at + 1 :]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_the_answer_goes_on_as_labelled(name: str, data: st.DataObject):
    length, repeats = data.draw(st.integers(2, 13)), data.draw(st.booleans())
    words = data.draw(st.integers(2 if repeats else max(2, (length + 6) // 2), 10))
    least = data.draw(st.integers(1, length // 2))
    task = build(name, length=length, min_items=least, words=words, repeats=repeats)
    longer = task.at_length(length + 6)
    for each, fewest, most in ((task, least, length // 2), (longer, (length + 6) // 2, (length + 6) // 2)):
        for text, label in texts(draw(each, 50)):
            items, given_ = divided(text, words)
            assert fewest <= len(items) <= most
            assert repeats or len(set(items)) == len(items)
            answer = written(name, items)
            assert answer[: len(given_)] == given_
            assert answer[len(given_)] == label


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_items_and_every_step_is_as_likely(name: str):
    sizes, steps = Counter(), Counter()
    for text, _ in texts(draw(build(name, length=10, min_items=3, words=4), 6000)):
        items, given_ = divided(text, 4)
        sizes[len(items)] += 1
        steps[len(items), len(given_)] += 1
    assert sorted(sizes) == [3, 4, 5]
    assert stats.chisquare(list(sizes.values())).pvalue > SAFE
    for size in sizes:
        assert stats.chisquare([steps[size, step] for step in range(size)]).pvalue > SAFE


@pytest.mark.parametrize("repeats", [True, False])
def test_the_shares_of_sorting_are_counted_over_all_texts(repeats: bool):
    words, least, most = 4, 2, 4
    counted: defaultdict[tuple[int, int], Fraction] = defaultdict(Fraction)
    for size in range(least, most + 1):
        rows = list(
            itertools.product(range(1, words + 1), repeat=size)
            if repeats
            else itertools.permutations(range(1, words + 1), size)
        )
        for row in rows:
            for step, label in enumerate(sorted(row)):
                counted[size + 1 + step, label] += Fraction(1, len(rows) * size * (most - least + 1))
    shares = build("sort", length=2 * most + 1, min_items=least, words=words, repeats=repeats).shares()
    assert shares is not None
    for (length, label), share in np.ndenumerate(shares):
        assert share == pytest.approx(float(counted[length, label + 1]), abs=1e-13)


def test_the_shares_of_sorting_are_finite_at_any_size():
    for options in ({"length": 600, "words": 4}, {"length": 600, "words": 1200, "repeats": False}):
        task = build("sort", min_items=300, **options)
        shares = task.shares()
        assert shares is not None
        assert shares.sum() == pytest.approx(1, abs=1e-9)
        assert task.chance() == pytest.approx(1 / options["words"], rel=1e-6)
