"""Contextual counting and parity against readers that go through a text word by word."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.tasks.reading import SAFE, draw, texts

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
    for each in (task, task.at_length(length + 9)):
        for text, label in texts(draw(each, 60)):
            assert len(text) >= shortest
            found, asked = read_regions(text, marks, words, regions)
            assert sum(found[asked]) == label
            assert all(len(region) >= max_count >= sum(region) for region in found)


def test_every_division_into_regions_is_as_likely():
    task = build("contextual-count", length=9, regions=1, max_count=2)  # 4 words to divide among 3 parts: 15 ways
    shapes = Counter((text.index(3), text.index(4)) for text, _ in texts(draw(task, 6000)))
    assert len(shapes) == 15
    assert stats.chisquare(list(shapes.values())).pvalue > SAFE


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
    for each in (task, task.at_length(length + 9)):
        for text, label in texts(draw(each, 60)):
            assert len(text) >= shortest
            odd = 0
            for word in text:
                assert 1 <= word <= marks + words
                odd = 1 - odd if word <= marks else odd
            assert odd == label
