"""Contextual counting and parity against readers that go word by word; Dyck-k against one with a stack."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.tasks.reading import SAFE, assert_even, assert_reads, draw, texts

from toeplens.tasks import build


def read_regions(text: list[int], marks: int, words: int, regions: int) -> tuple[list[list[bool]], int]:
    """For each region, which of its words are marks; and the region that is asked for."""
    opening, closing = marks + words + 1, marks + words + 2
    found: list[list[bool]] = []
    *body, query = text
    inside = False
    for word in body:
        if word == opening:
            assert not inside
            inside = True
            found.append([])
        elif word == closing:
            assert inside
            inside = False
        else:
            assert 1 <= word <= marks + words
            if inside:
                found[-1].append(word <= marks)
    assert not inside
    assert len(found) == regions
    return found, query - closing - 1


@given(data=st.data())
def test_contextual_counting_reads_as_labelled(data: st.DataObject):
    marks, words = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    regions, max_count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    shortest = regions * (max_count + 2) + 1 + data.draw(st.integers(0, 3))
    length = shortest + data.draw(st.integers(0, 3))
    sizes = {"regions": regions, "max_count": max_count, "marks": marks, "words": words}
    task = build("contextual-count", length=length, min_length=shortest, **sizes)

    def read(text: list[int]) -> int:
        assert len(text) >= shortest
        found, asked = read_regions(text, marks, words, regions)
        assert all(len(region) >= max_count >= sum(region) for region in found)
        return sum(found[asked])

    assert_reads(task, read, more=9)


def test_every_division_into_regions_is_as_likely():
    task = build("contextual-count", length=9, regions=1, max_count=2)  # 4 words to divide among 3 parts: 15 ways
    shapes = Counter((text.index(3), text.index(4)) for text, _ in texts(draw(task, 6000)))
    assert len(shapes) == 15
    assert_even(shapes, shapes)


def test_counts_are_independent_of_widths_regions_and_one_another_and_marks_of_their_places():
    task = build("contextual-count", length=26, regions=2, max_count=3)
    tables = {"width": np.zeros((4, 2)), "asked": np.zeros((4, 2)), "other": np.zeros((4, 4))}
    first = np.zeros(2)
    for text, label in texts(draw(task, 6000)):
        found, asked = read_regions(text, 1, 1, 2)
        tables["width"][label, int(len(found[asked]) > 6)] += 1
        tables["asked"][label, asked] += 1
        tables["other"][label, sum(found[1 - asked])] += 1
        first += found[0][0], found[0][-1]
    for table in tables.values():
        assert stats.chi2_contingency(table).pvalue > SAFE
    assert stats.chisquare(first).pvalue > SAFE


def test_outside_the_regions_half_of_the_words_are_marks():
    task = build("contextual-count", length=30, regions=2, max_count=2)
    marks = total = 0
    for text, _ in texts(draw(task, 1000)):
        inside = False
        for word in text[:-1]:
            if word >= 3:
                inside = word == 3
            elif not inside:
                marks, total = marks + (word == 1), total + 1
    assert stats.binomtest(marks, total, 0.5).pvalue > SAFE


@given(data=st.data())
def test_parity_reads_as_labelled(data: st.DataObject):
    marks, words = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    shortest = data.draw(st.integers(1, 6))
    length = shortest + data.draw(st.integers(0, 5))
    task = build("parity", length=length, min_length=shortest, marks=marks, words=words)

    def read(text: list[int]) -> int:
        assert len(text) >= shortest
        assert all(1 <= word <= marks + words for word in text)
        return sum(word <= marks for word in text) % 2

    assert_reads(task, read, more=9)


# ---- brackets --------------------------------------------------------------------------------------------------------


def depths(text: list[int], kinds: int) -> list[int] | None:
    """How many brackets are open after each one; None if one closes what is not open."""
    stack: list[int] = []
    found = []
    for bracket in text:
        assert 1 <= bracket <= 2 * kinds
        if bracket <= kinds:
            stack.append(bracket)
        elif not stack or stack.pop() != bracket - kinds:
            return None
        found.append(len(stack))
    return found


def balanced(text: list[int], kinds: int) -> bool:
    found = depths(text, kinds)
    return found is not None and found[-1] == 0


def mended(text: list[int], kinds: int, max_depth: int) -> bool:
    """Whether exchanging two brackets makes the text balanced, no deeper than ``max_depth``."""
    for one, other in itertools.combinations(range(len(text)), 2):
        tried = list(text)
        tried[one], tried[other] = tried[other], tried[one]
        found = depths(tried, kinds)
        if found is not None and found[-1] == 0 and max(found) <= max_depth:
            return True
    return False


@given(data=st.data())
def test_membership_reads_as_labelled_and_the_others_are_near_misses(data: st.DataObject):
    kinds, max_depth = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    length = 2 * data.draw(st.integers(1, 6))
    shortest = data.draw(st.integers(2, length))
    task = build("dyck", length=length, min_length=shortest, kinds=kinds, max_depth=max_depth)

    def read(text: list[int]) -> int:
        assert len(text) >= shortest
        found = depths(text, kinds)
        if found is not None and found[-1] == 0:
            assert max(found) <= max_depth
            return 1
        assert mended(text, kinds, max_depth)
        assert all(text.count(kind) == text.count(kind + kinds) for kind in range(1, kinds + 1))
        return 0

    assert_reads(task, read, more=4, count=40)


@pytest.mark.parametrize("kinds", [1, 2, 4])
def test_both_ways_to_be_wrong_occur_and_the_ends_rarely_give_them_away(kinds: int):
    """Wrong order (too many closed) and wrong kind; a text that begins by closing is told by its first bracket."""
    wrong_order = wrong_kind = given_away = total = 0
    for text, label in texts(draw(build("dyck", length=32, kinds=kinds), 1500)):
        if not label:
            total += 1
            heights = np.cumsum([1 if bracket <= kinds else -1 for bracket in text])
            wrong_order += heights.min() < 0
            wrong_kind += heights.min() >= 0
            given_away += text[0] > kinds or text[-1] <= kinds
    assert wrong_order > 0.15 * total
    assert wrong_kind > 0.2 * total if kinds > 1 else wrong_kind == 0
    assert given_away < (0.15 if kinds == 1 else 0.01) * total  # of one kind, many texts break at their ends alone


@given(data=st.data())
def test_depth_reads_as_labelled(data: st.DataObject):
    kinds = data.draw(st.integers(1, 3))
    length = data.draw(st.integers(3, 12))
    max_depth, shortest = data.draw(st.integers(1, length)), data.draw(st.integers(2, length - 1))
    task = build("dyck", ask="depth", length=length, min_length=shortest, kinds=kinds, max_depth=max_depth)

    def read(text: list[int]) -> int:
        found = depths(text, kinds)
        assert len(text) >= shortest
        assert found is not None
        assert max(found) <= max_depth
        return found[-1]

    assert_reads(task, read)


@pytest.mark.parametrize(("kinds", "max_depth"), [(1, 1), (1, 2), (1, 5), (2, 2)])
def test_every_balanced_text_is_as_likely(kinds: int, max_depth: int):
    every = {
        text
        for text in itertools.product(range(1, 2 * kinds + 1), repeat=6)
        if balanced(list(text), kinds) and max(depths(list(text), kinds) or [99]) <= max_depth
    }
    task = build("dyck", length=6, kinds=kinds, max_depth=max_depth)
    counts = Counter(tuple(text) for text, label in texts(draw(task, 6000)) if label)
    assert counts.keys() == every
    if len(every) > 1:
        assert_even(counts, every)


def test_every_beginning_of_the_same_length_and_depth_is_as_likely():
    task = build("dyck", ask="depth", length=6, kinds=1, max_depth=3)
    by_end: dict[tuple[int, int], Counter[tuple[int, ...]]] = {}
    for text, label in texts(draw(task, 8000)):
        by_end.setdefault((len(text), label), Counter())[tuple(text)] += 1
    assert sorted(by_end) == [(5, 1), (5, 3), (6, 0), (6, 2)]
    for (length, _), counts in by_end.items():
        every = [depths(list(text), 1) for text in itertools.product((1, 2), repeat=length)]
        end = depths(list(next(iter(counts))), 1)
        assert end is not None
        assert len(counts) == sum(found is not None and max(found) <= 3 and found[-1] == end[-1] for found in every)
        assert_even(counts, counts)


def test_very_long_texts_do_not_overflow():
    for text, label in texts(draw(build("dyck", max_depth=12).at_length(1200), 6)):
        assert len(text) == 1200
        assert balanced(text, 2) == bool(label)
