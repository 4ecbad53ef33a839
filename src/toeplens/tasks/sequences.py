"""Tasks whose answer is a sequence, one token at a time: copy, reverse, sort, addition."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int
from scipy.special import bdtrc

from toeplens.tasks.base import PAD, Examples, Shares, Task, Tokens, Vector, at_least, at_most, insert
from toeplens.utils import invalid
from toeplens.utils.options import AtLeast2, PositiveInt


class AnswerTask(Task):
    """A question, a separator, and the first tokens of the answer; the label is the answer's next token."""

    @property
    @abstractmethod
    def separator(self) -> int:
        """The token id between question and answer, which does not occur elsewhere."""

    def split_key(self, examples: Examples) -> Tokens:
        ends = (examples.tokens == self.separator).argmax(axis=1)
        return np.where(np.arange(self.length) < ends[:, None], examples.tokens, PAD)

    def build_examples(self, tokens: Tokens, ends: Vector, answer: Tokens, num_shown: Vector) -> Examples:
        """The examples: questions in ``tokens`` that end at ``ends``, with ``num_shown`` tokens of the answer."""
        rows = np.arange(len(tokens))
        tokens[rows, ends] = self.separator
        insert(tokens, ends + 1, answer, num_shown)
        return Examples(tokens, answer[rows, num_shown], ends + 1 + num_shown)


@dataclass(frozen=True, kw_only=True)
class RewriteTask(AnswerTask):
    """Words, a separator, and the answer's first words (0 to all but one); the label is the answer's next word.

    Arguments
        length     maximum number of tokens: words, separator, and all but one word of the answer
        min_items  minimum number of words to rewrite; the maximum is ``length`` / 2, uniformly distributed
        words      number of distinct words; the label is the word's token id, 1..``words``
        repeats    whether a word may occur several times

    Longer sequences have as many words to rewrite as fit. Sequences with the same words to rewrite are all in train or
    all in test.
    """

    answer = "both"

    length: AtLeast2 = 64
    min_items: PositiveInt = 1
    words: AtLeast2 = 32
    repeats: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most(self.max_items, f"{{}}, which {self.length} tokens can hold", min_items=self.min_items)
        if not self.repeats and self.words < self.max_items:
            raise invalid("words", f"be at least {self.max_items}, the number of items, without repeats", self.words)

    @property
    def max_items(self) -> int:
        """Maximum number of words to rewrite."""
        return self.length // 2

    @property
    def separator(self) -> int:
        return self.words + 1

    def vocab_and_labels(self) -> tuple[int, range]:
        return self.words + 2, range(1, self.words + 1)

    def options_at(self, length: int) -> dict[str, Any]:
        return {"min_items": max(1, length // 2)}

    @abstractmethod
    def rewrite(self, items: Int[np.ndarray, "n m"], sizes: Vector) -> Int[np.ndarray, "n m"]:
        """The answer; the first ``sizes`` columns of each row of the answer and of ``items`` are valid."""

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        shape = (count, self.max_items)
        sizes = rng.integers(self.min_items, self.max_items + 1, size=count)
        if self.repeats:
            items = rng.integers(1, self.words + 1, size=shape)
        else:
            items = 1 + np.argsort(rng.random((count, self.words)), axis=1)[:, : self.max_items]
        tokens = np.full((count, self.length), PAD)
        tokens[:, : self.max_items] = np.where(np.arange(self.max_items) < sizes[:, None], items, PAD)
        return self.build_examples(tokens, sizes, self.rewrite(items, sizes), rng.integers(0, sizes))


class Copy(RewriteTask):
    """What is the next word of the copy? (as in arXiv 2402.01032 and 2310.16028)

    After the words a b c, the separator and a, it is b. Arguments: those of `RewriteTask`.
    """

    name = "copy"

    def rewrite(self, items: Int[np.ndarray, "n m"], sizes: Vector) -> Int[np.ndarray, "n m"]:
        return items


class Reverse(RewriteTask):
    """What is the next word of the reversed sequence? (as in arXiv 2207.02098)

    After the words a b c, the separator and c, it is b. Arguments: those of `RewriteTask`.
    """

    name = "reverse"

    def rewrite(self, items: Int[np.ndarray, "n m"], sizes: Vector) -> Int[np.ndarray, "n m"]:
        return np.take_along_axis(items, np.maximum(sizes[:, None] - 1 - np.arange(items.shape[1]), 0), axis=1)


class Sort(RewriteTask):
    """What is the next word of the sequence sorted by token id? (as in arXiv 2207.02098 and 2310.16028)

    After the words c a b, the separator and a, it is b. Arguments: those of `RewriteTask`.
    """

    name = "sort"
    answer = "content"

    def rewrite(self, items: Int[np.ndarray, "n m"], sizes: Vector) -> Int[np.ndarray, "n m"]:
        return np.sort(np.where(np.arange(items.shape[1]) < sizes[:, None], items, self.words + 1), axis=1)

    def shares(self) -> Shares:
        """The label at a step is an order statistic of the words, and the length is informative about the step."""
        from scipy.stats import hypergeom

        joint = np.zeros((self.length + 1, self.words))
        word = np.arange(1, self.words + 1)
        for size in range(self.min_items, self.max_items + 1):
            step = np.arange(size)[:, None]
            if self.repeats:  # at least step + 1 of the words are word or less
                probabilities = np.diff(bdtrc(step, size, word / self.words), axis=1, prepend=0.0)
            else:  # step words are less and the rest are more
                logs = hypergeom.logpmf(step, self.words - 1, word - 1, size - 1)
                probabilities = np.exp(logs) * size / self.words
            joint[size + 1 : 2 * size + 1] += probabilities / size
        return joint / (self.max_items - self.min_items + 1)


# ---- addition --------------------------------------------------------------------------------------------------------

Order = Literal["most-first", "least-first"]


@dataclass(frozen=True, kw_only=True)
class Addition(AnswerTask):
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
    base: AtLeast2 = 10
    min_digits: PositiveInt = 1
    order: Order = "most-first"
    padded: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(5 if self.padded else 6, length=self.length)
        at_most(self.digits, f"{{}}, which {self.length} tokens can hold", min_digits=self.min_digits)

    @property
    def digits(self) -> int:
        """Maximum number of digits; a sequence has two numbers, two signs, and the shown digits of the sum."""
        return self._digits_in(self.length)

    def _digits_in(self, length: int) -> int:
        return (length - (2 if self.padded else 3)) // 3

    @property
    def separator(self) -> int:
        return self.base + 3

    def vocab_and_labels(self) -> tuple[int, range]:
        return self.base + 4, range(1, self.base + (1 if self.padded else 2))

    def options_at(self, length: int) -> dict[str, Any]:
        return {"min_digits": max(1, self._digits_in(length))}

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        rows, columns = np.arange(count), np.arange(self.digits + 1)
        total = np.zeros((count, self.digits + 1), dtype=np.int64)  # column i is the digit of base ** i
        numbers, sizes = [], []
        for _ in range(2):
            size = rng.integers(self.min_digits, self.digits + 1, size=count)
            number = np.where(columns < size[:, None], rng.integers(0, self.base, size=total.shape), 0)
            leading = rng.integers(1, self.base, size=count)
            number[rows, size - 1] = np.where(size > 1, leading, number[:, 0])
            numbers.append(number)
            sizes.append(size)
            total += number
        for i in range(self.digits):
            total[:, i + 1] += total[:, i] // self.base
            total[:, i] %= self.base
        answer = np.maximum(*sizes)
        answer += total[rows, answer] > 0
        if self.padded:
            sizes, answer = [np.full(count, self.digits)] * 2, np.full(count, self.digits + 1)
        num_shown = rng.integers(0, answer + (not self.padded))

        plus, equals = sizes[0], sizes[0] + 1 + sizes[1]
        tokens = np.full((count, self.length), PAD)
        insert(tokens, np.zeros_like(plus), self._spell_number(numbers[0], sizes[0]), sizes[0])
        tokens[rows, plus] = self.base + 2
        insert(tokens, plus + 1, self._spell_number(numbers[1], sizes[1]), sizes[1])
        spelled = np.pad(self._spell_number(total, answer), ((0, 0), (0, 1)))
        spelled[rows, answer] = self.base + 1
        return self.build_examples(tokens, equals, spelled, num_shown)

    def _spell_number(self, number: Tokens, size: Vector) -> Tokens:
        """The tokens of a number of ``size`` digits, of which column i has the digit of base ** i."""
        powers = self._digit_power(np.arange(self.digits + 1), size[:, None])
        return 1 + np.take_along_axis(number, np.broadcast_to(powers % (self.digits + 1), number.shape), axis=1)

    def _digit_power(self, step: Any, size: Any) -> Any:
        """The power of the base at digit ``step`` of a number of ``size`` digits."""
        return step if self.order == "least-first" else size - 1 - step

    def shares(self) -> Shares:
        joint = np.zeros((self.length + 1, self.base + 1))  # the last column is the end label
        sizes = range(self.min_digits, self.digits + 1)
        columns = _column_tables(self.base)
        for first in sizes:
            for second in sizes:
                top = self.digits if self.padded else max(first, second)
                shown = 2 * self.digits if self.padded else first + second
                steps = [columns[_digit_kind(power, first), _digit_kind(power, second)] for power in range(top)]
                digit, carry_shares = _digit_shares(steps)
                for final_carry in (0, 1):  # a carry out of the top is the sum's first digit
                    size = top + (1 if self.padded else final_carry)
                    share = 1 / (size + (not self.padded))
                    for step in range(size):
                        power = self._digit_power(step, size)
                        if power == top:
                            joint[shown + 2 + step, final_carry] += share * carry_shares[final_carry]
                        else:
                            joint[shown + 2 + step, :-1] += share * digit[power, :, final_carry]
                    if not self.padded:
                        joint[shown + 2 + size, -1] += share * carry_shares[final_carry]
        return joint[:, : len(self.labels)] / len(sizes) ** 2


def _digit_kind(power: int, size: int) -> str:
    """Possible digits at a place of a number of ``size`` digits: any, only 0, or all but 0."""
    if power >= size:
        return "zero"
    return "leading" if power == size - 1 > 0 else "any"


def _column_tables(base: int) -> dict[tuple[str, str], Float[np.ndarray, "2 base 2"]]:
    """For two kinds of digits: probabilities of each sum digit and next carry, given each carry."""
    draws = {"any": np.full(base, 1 / base), "zero": np.eye(base)[0], "leading": np.full(base, 1 / (base - 1))}
    draws["leading"][0] = 0
    tables = {}
    for kind, first in draws.items():
        for other_kind, second in draws.items():
            column = np.zeros((2, base, 2))
            for total, share in enumerate(np.convolve(first, second)):
                for carry in (0, 1):
                    column[carry, (total + carry) % base, (total + carry) // base] += share
            tables[kind, other_kind] = column
    return tables


def _digit_shares(
    columns: list[Float[np.ndarray, "2 base 2"]],
) -> tuple[Float[np.ndarray, "top base 2"], Float[np.ndarray, "2"]]:
    """Joint probabilities of the digit at each place and the final carry, and of the final carry."""
    after = [np.eye(2)]  # from the carry into a place to the final carry
    for column in reversed(columns):
        after.append(column.sum(axis=1) @ after[-1])
    carry = np.array([1.0, 0.0])
    digits = []
    for column, suffix in zip(columns, reversed(after[:-1]), strict=True):
        digits.append(np.einsum("c,cxd,df->xf", carry, column, suffix))
        carry = carry @ column.sum(axis=1)
    return np.array(digits), carry
