"""Addition against Python's whole numbers, and its shares against the list of all sums."""

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


def test_an_example_of_its_docstring():
    """5 7 + 6 = 6 asks for 3, and 5 7 + 6 = 6 3 for the end."""
    examples = draw(build("addition", length=9), 60_000)
    for text, label in (([6, 8, 12, 7, 13, 7, 0, 0, 0], 4), ([6, 8, 12, 7, 13, 7, 4, 0, 0], 11)):
        assert set(examples.labels[(examples.tokens == text).all(axis=1)]) == {label}


def test_every_number_of_digits_and_every_step_is_as_likely():
    sizes, steps = Counter(), Counter()
    for text, _ in texts(draw(build("addition", length=9, base=4), 6000)):
        plus, equals = text.index(6), text.index(7)
        sizes[plus, equals - plus - 1] += 1
        total = value(text[:plus], 4, "most-first") + value(text[plus + 1 : equals], 4, "most-first")
        steps[len(spelt(total, 4, "most-first", 1)), len(text) - equals - 1] += 1
    assert sorted(sizes) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert stats.chisquare(list(sizes.values())).pvalue > SAFE
    for many in (1, 2, 3):
        assert stats.chisquare([steps[many, step] for step in range(many + 1)]).pvalue > SAFE


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
