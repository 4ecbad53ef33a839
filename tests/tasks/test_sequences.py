"""Copy, reverse, sort and addition against programs that write the whole answer down; shares against all cases."""

from __future__ import annotations

import itertools
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tasks.reading import draw, texts

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


# ---- addition --------------------------------------------------------------------------------------------------------


def spelt(number: int, base: int, order: str, width: int) -> list[int]:
    """The tokens of a number, with zeros up to ``width`` digits."""
    digits = []
    while number or not digits:
        digits.append(number % base)
        number //= base
    digits += [0] * (width - len(digits))
    return [digit + 1 for digit in (digits if order == "least-first" else digits[::-1])]


def value(tokens: list[int], base: int, order: str) -> int:
    assert tokens
    assert all(1 <= token <= base for token in tokens)
    number = 0
    for token in tokens[::-1] if order == "least-first" else tokens:
        number = number * base + token - 1
    return number


@given(data=st.data())
def test_the_sum_goes_on_as_labelled(data: st.DataObject):
    base, order, padded = (
        data.draw(st.integers(2, 11)),
        data.draw(st.sampled_from(["most-first", "least-first"])),
        data.draw(st.booleans()),
    )
    length = data.draw(st.integers(6, 22))
    digits = (length - 2) // 3 if padded else (length - 3) // 3
    least = data.draw(st.integers(1, digits))
    task = build("addition", length=length, base=base, order=order, padded=padded, min_digits=least)
    for each, few, many in ((task, least, digits), (task.at_length(length + 30), digits + 10, digits + 10)):
        for text, label in texts(draw(each, 60)):
            plus, equals = text.index(base + 2), text.index(base + 3)
            parts = text[:plus], text[plus + 1 : equals]
            numbers = [value(part, base, order) for part in parts]
            for part, number in zip(parts, numbers, strict=True):
                assert part == spelt(number, base, order, many if padded else 1)  # so there are no leading zeros
                assert few == 1 or base ** (few - 1) <= number < base**many
            answer = spelt(sum(numbers), base, order, many + 1) if padded else spelt(sum(numbers), base, order, 1)
            if not padded:
                answer.append(base + 1)
            given_ = text[equals + 1 :]
            assert given_ == answer[: len(given_)]
            assert answer[len(given_)] == label


@pytest.mark.parametrize("order", ["most-first", "least-first"])
@pytest.mark.parametrize(("padded", "least", "base"), [(False, 1, 3), (False, 2, 4), (True, 1, 3), (True, 2, 2)])
def test_the_shares_are_counted_over_all_sums(order: str, padded: bool, least: int, base: int):
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
