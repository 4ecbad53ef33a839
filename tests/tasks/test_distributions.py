"""What is random in lookups, counts and brackets is as likely as stated; shares of sequences against all cases."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats
from tests.tasks.readers import (
    P_VALUE,
    assert_even,
    balanced,
    depths,
    draw_examples,
    parts_of_recall,
    read_regions,
    spelt,
    texts,
)

from toeplens.tasks import build


def test_index_queries_positions_uniformly_at_any_length():
    task = build("index", length=9, words=4)
    for each in (task, task.at_length(30)):
        examples = draw_examples(each, 4000)
        assert_even(Counter(examples.tokens[np.arange(4000), examples.lengths - 1].tolist()), range(5, 13))


def test_recall_queries_pairs_uniformly():
    task = build("retrieval", length=5, keys=4, values=3, pairs=4, distractors=0)
    asked = (([(word - 1) // 3 for word in text[:-1]], text[-1] - 13) for text, _ in texts(draw_examples(task, 4000)))
    assert_even(Counter(keys.index(query) for keys, query in asked), range(4))


def test_mix_queries_keys_offsets_and_positions_uniformly():
    task = build("mix", length=7, words=3, keys=3, placed=2, min_offset=-1, max_offset=1)
    actual = [text for text, _ in texts(draw_examples(task, 6000))]
    assert_even(Counter(text[-2] for text in actual), (4, 5, 6))
    assert_even(Counter(text[-1] for text in actual), (7, 8))
    places = [*((7, at) for at in (1, 2, 3, 4)), *((8, at) for at in (0, 1, 2, 3))]
    assert_even(Counter((text[-1], text.index(text[-2])) for text in actual), places)


def test_query_counts_pairs_and_positions_are_uniform():
    task = build("recall", length=12, keys=4, values=2, pairs=3, queries=2, distractors=2)
    many, which, places = Counter(), Counter(), Counter()
    for text, _ in texts(draw_examples(task, 6000)):
        book, queries, _ = parts_of_recall(text, 4, 2)
        many[len(queries)] += 1
        which[list(book).index(queries[-1])] += 1
        places[tuple(text.index(key) for key in book)] += 1
    assert_even(many, (1, 2))
    assert_even(which, range(3))
    assert len(places) == 20  # 3 pairs among 3 distractors
    assert_even(places, places)


def test_region_boundaries_are_uniform():
    task = build("contextual-count", length=9, regions=1, max_count=2)  # 4 words to divide among 3 parts: 15 ways
    shapes = Counter((text.index(3), text.index(4)) for text, _ in texts(draw_examples(task, 6000)))
    assert len(shapes) == 15
    assert_even(shapes, shapes)


def test_counts_and_mark_positions_are_independent():
    task = build("contextual-count", length=26, regions=2, max_count=3)
    tables = {"width": np.zeros((4, 2)), "asked": np.zeros((4, 2)), "other": np.zeros((4, 4))}
    first = np.zeros(2)
    for text, label in texts(draw_examples(task, 6000)):
        actual, queried = read_regions(task, text)
        tables["width"][label, int(len(actual[queried]) > 6)] += 1
        tables["asked"][label, queried] += 1
        tables["other"][label, sum(actual[1 - queried])] += 1
        first += actual[0][0], actual[0][-1]
    for table in tables.values():
        assert stats.chi2_contingency(table).pvalue > P_VALUE
    assert stats.chisquare(first).pvalue > P_VALUE


def test_half_of_the_words_outside_the_regions_are_marks():
    task = build("contextual-count", length=30, regions=2, max_count=2)
    marks = total = 0
    for text, _ in texts(draw_examples(task, 1000)):
        inside = False
        for word in text[:-1]:
            if word >= 3:
                inside = word == 3
            elif not inside:
                marks, total = marks + (word == 1), total + 1
    assert stats.binomtest(marks, total, 0.5).pvalue > P_VALUE


# ---- brackets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [1, 2, 4])
def test_both_bracket_errors_occur_and_ends_rarely_reveal_them(kinds: int):
    """Wrong order (too many closed) and wrong kind; a text that begins by closing is known by its first bracket."""
    wrong_order = wrong_kind = given_away = total = 0
    for text, label in texts(draw_examples(build("dyck", length=32, kinds=kinds), 1500)):
        if not label:
            total += 1
            heights = np.cumsum([1 if bracket <= kinds else -1 for bracket in text])
            wrong_order += heights.min() < 0
            wrong_kind += heights.min() >= 0
            given_away += text[0] > kinds or text[-1] <= kinds
    assert wrong_order > 0.15 * total
    assert wrong_kind > 0.2 * total if kinds > 1 else wrong_kind == 0
    assert given_away < (0.15 if kinds == 1 else 0.01) * total  # of one kind, many texts break at their ends alone


@pytest.mark.parametrize(("kinds", "max_depth"), [(1, 1), (1, 2), (1, 5), (2, 2)])
def test_balanced_sequences_are_uniform(kinds: int, max_depth: int):
    every = {
        text for text in itertools.product(range(1, 2 * kinds + 1), repeat=6) if balanced(list(text), kinds, max_depth)
    }
    task = build("dyck", length=6, kinds=kinds, max_depth=max_depth)
    counts = Counter(tuple(text) for text, label in texts(draw_examples(task, 6000)) if label)
    assert counts.keys() == every
    if len(every) > 1:
        assert_even(counts, every)


def test_prefixes_of_equal_length_and_depth_are_uniform():
    task = build("dyck", ask="depth", length=6, kinds=1, max_depth=3)
    by_end: dict[tuple[int, int], Counter[tuple[int, ...]]] = {}
    for text, label in texts(draw_examples(task, 8000)):
        by_end.setdefault((len(text), label), Counter())[tuple(text)] += 1
    assert sorted(by_end) == [(5, 1), (5, 3), (6, 0), (6, 2)]
    for (length, _), counts in by_end.items():
        every = [depths(list(text), 1) for text in itertools.product((1, 2), repeat=length)]
        end = depths(list(next(iter(counts))), 1)
        assert end is not None
        assert len(counts) == sum(actual is not None and max(actual) <= 3 and actual[-1] == end[-1] for actual in every)
        assert_even(counts, counts)


def test_very_long_sequences_do_not_overflow():
    for text, label in texts(draw_examples(build("dyck", max_depth=12).at_length(1200), 6)):
        assert len(text) == 1200
        assert balanced(text, 2) == bool(label)


# ---- shares ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeats", [True, False])
def test_sorting_shares_match_enumeration(repeats: bool):
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


def test_sorting_shares_are_finite_at_any_size():
    for options in ({"length": 600, "words": 4}, {"length": 600, "words": 1200, "repeats": False}):
        task = build("sort", min_items=300, **options)
        shares = task.shares()
        assert shares is not None
        assert shares.sum() == pytest.approx(1, abs=1e-9)
        assert task.chance() == pytest.approx(1 / options["words"], rel=1e-6)


@pytest.mark.parametrize("order", ["most-first", "least-first"])
@pytest.mark.parametrize(("padded", "least", "base"), [(False, 1, 3), (False, 2, 4), (True, 1, 3), (True, 2, 2)])
def test_addition_shares_match_enumeration(order: str, padded: bool, least: int, base: int):
    digits = 3 if base == 2 else 2
    length = 3 * digits + (2 if padded else 3)
    task = build("addition", length=length, base=base, order=order, padded=padded, min_digits=least)
    numbers = []  # with their chance
    for size in range(least, digits + 1):
        every = range(base ** (size - 1) if size > 1 else 0, base**size)
        numbers += [(number, size, Fraction(1, len(every) * (digits - least + 1))) for number in every]
    counted: defaultdict[tuple[int, int], Fraction] = defaultdict(Fraction)
    for (one, first, chance), (other, second, also) in itertools.product(numbers, repeat=2):
        answer = spelt(one + other, base, order, digits + 1 if padded else 1) + ([] if padded else [base + 1])
        start = 2 + (2 * digits if padded else first + second)
        for step, label in enumerate(answer):
            counted[start + step, label] += chance * also / len(answer)
    shares = task.shares()
    assert shares is not None
    assert shares.shape == (length + 1, len(task.labels))
    for (size, label), share in np.ndenumerate(shares):
        assert share == pytest.approx(float(counted[size, label + 1]), abs=1e-13)
