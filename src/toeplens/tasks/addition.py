"""Adding two numbers, digit by digit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from toeplens.ground import choose, invalid
from toeplens.tasks.base import PAD, Examples, Shares, Task, Texts, at_least, yes_or_no

Order = Literal["most-first", "least-first"]


@dataclass(frozen=True, kw_only=True)
class Addition(Task):
    """What is the next digit of the sum? (as in arXiv 2307.03381 and 2310.16028)

    The input is a number, a plus, a number, an equals sign, and zero or more of the first digits of the sum. The label
    is the sum's next digit, or the end label after its last digit. For 5 7 + 6 = 6 it is 3, and for 5 7 + 6 = 6 3 the
    end label. Numbers have no leading zeros. If they are ``padded`` with zeros to the maximum number of digits, and the
    sum to one more, the end label does not occur.

    Arguments
        length      maximum number of tokens of a sequence; it sets the maximum number of digits. Numbers of digits are
                    uniformly distributed
        base        of the numbers; digit d has token id and label d + 1, the end has the label ``base`` + 1
        min_digits  minimum number of digits
        order       most or least significant digit first, for all three numbers
        padded      pad numbers with zeros

    Longer sequences have numbers with as many digits as fit. Sequences with the same two numbers are all in train or
    all in test.
    """

    name = "addition"
    answer = "both"

    length: int = 18
    base: int = 10
    min_digits: int = 1
    order: Order = "most-first"
    padded: bool = False

    def __post_init__(self) -> None:
        at_least(2, base=self.base)
        yes_or_no(padded=self.padded)
        choose("order", self.order, ("most-first", "least-first"))
        at_least(5 if self.padded else 6, length=self.length)
        at_least(1, min_digits=self.min_digits)
        if self.min_digits > self.digits:
            raise invalid(
                "min_digits", f"be at most {self.digits}, which {self.length} tokens can hold", self.min_digits
            )

    @property
    def digits(self) -> int:
        """Maximum number of digits; a sequence has two numbers, two signs, and the shown digits of the sum."""
        return self._digits_in(self.length)

    def _digits_in(self, length: int) -> int:
        return (length - (2 if self.padded else 3)) // 3

    @property
    def vocab_size(self) -> int:
        return self.base + 4

    @property
    def labels(self) -> range:
        return range(1, self.base + (1 if self.padded else 2))

    def options_at(self, length: int) -> dict[str, Any]:
        return {**vars(self), "length": length, "min_digits": max(1, self._digits_in(length))}

    def split_key(self, examples: Examples) -> Texts:
        equals = (examples.tokens == self.base + 3).argmax(axis=1)
        return np.where(np.arange(self.length) < equals[:, None], examples.tokens, PAD)

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        rows, place = np.arange(count), np.arange(self.digits + 1)
        total = np.zeros((count, self.digits + 1), dtype=np.int64)  # column i is the digit of base ** i
        numbers, sizes = [], []
        for _ in range(2):
            size = rng.integers(self.min_digits, self.digits + 1, size=count)
            number = np.where(place < size[:, None], rng.integers(0, self.base, size=total.shape), 0)
            leading = rng.integers(1, self.base, size=count)
            number[rows, size - 1] = np.where(size > 1, leading, number[:, 0])
            numbers.append(number)
            sizes.append(size)
            total += number
        for each in range(self.digits):
            total[:, each + 1] += total[:, each] // self.base
            total[:, each] %= self.base
        answer = np.maximum(*sizes)
        answer += total[rows, answer] > 0
        if self.padded:
            sizes, answer = [np.full(count, self.digits)] * 2, np.full(count, self.digits + 1)
        given = rng.integers(0, answer + (not self.padded))

        plus, equals = sizes[0], sizes[0] + 1 + sizes[1]
        tokens = np.full((count, self.length), PAD)
        for number, start, size, shown in (
            (numbers[0], np.zeros(count, dtype=np.int64), sizes[0], sizes[0]),
            (numbers[1], plus + 1, sizes[1], sizes[1]),
            (total, equals + 1, answer, given),
        ):
            step = np.arange(self.length) - start[:, None]
            inside = (step >= 0) & (step < shown[:, None])
            tokens[inside] = 1 + number[np.nonzero(inside)[0], self._place(step, size[:, None])[inside]]
        tokens[rows, plus], tokens[rows, equals] = self.base + 2, self.base + 3
        ended = given == answer
        label = 1 + total[rows, np.where(ended, 0, self._place(given, answer))]
        return Examples(tokens, np.where(ended, self.base + 1, label), equals + 1 + given)

    def _place(self, step: Any, size: Any) -> Any:
        """The power of the base at digit ``step`` of a number of ``size`` digits."""
        return step if self.order == "least-first" else size - 1 - step

    def shares(self) -> Shares:
        found = np.zeros((self.length + 1, self.base + 1))  # the last column is the end label
        sizes = range(self.min_digits, self.digits + 1)
        columns = _columns(self.base)
        for one in sizes:
            for other in sizes:
                top = self.digits if self.padded else max(one, other)
                shown = 2 * self.digits if self.padded else one + other
                steps = [columns[_kind(place, one), _kind(place, other)] for place in range(top)]
                digit, carried = _digits(steps)
                for last in (0, 1):  # a carry out of the top is the sum's first digit
                    size = top + (1 if self.padded else last)
                    share = 1 / (size + (not self.padded))
                    for step in range(size):
                        place = self._place(step, size)
                        if place == top:
                            found[shown + 2 + step, last] += share * carried[last]
                        else:
                            found[shown + 2 + step, :-1] += share * digit[place, :, last]
                    if not self.padded:
                        found[shown + 2 + size, -1] += share * carried[last]
        return found[:, : len(self.labels)] / len(sizes) ** 2


def _kind(place: int, size: int) -> str:
    """Possible digits at a place of a number of ``size`` digits: any, only 0, or all but 0."""
    if place >= size:
        return "zero"
    return "leading" if place == size - 1 > 0 else "any"


def _columns(base: int) -> dict[tuple[str, str], Float[np.ndarray, "2 base 2"]]:
    """For two kinds of digits: probabilities of each sum digit and next carry, given each carry."""
    draws = {"any": np.full(base, 1 / base), "zero": np.eye(base)[0], "leading": np.full(base, 1 / (base - 1))}
    draws["leading"][0] = 0
    found = {}
    for one, first in draws.items():
        for other, second in draws.items():
            column = np.zeros((2, base, 2))
            for total, share in enumerate(np.convolve(first, second)):
                for carry in (0, 1):
                    column[carry, (total + carry) % base, (total + carry) // base] += share
            found[one, other] = column
    return found


def _digits(
    columns: list[Float[np.ndarray, "2 base 2"]],
) -> tuple[Float[np.ndarray, "top base 2"], Float[np.ndarray, "2"]]:
    """Joint probabilities of the digit at each place and the final carry, and of the final carry."""
    after = [np.eye(2)]  # from the carry into a place to the final carry
    for column in reversed(columns):
        after.append(column.sum(axis=1) @ after[-1])
    carry = np.array([1.0, 0.0])
    digits = []
    for column, rest in zip(columns, reversed(after[:-1]), strict=True):
        digits.append(np.einsum("c,cxd,df->xf", carry, column, rest))
        carry = carry @ column.sum(axis=1)
    return np.array(digits), carry
