"""Sequence-to-sequence tasks, one answer token at a time: copy, reverse, sort."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int
from scipy.special import bdtrc, gammaln

from toeplens.ground import invalid
from toeplens.tasks.base import PAD, Each, Examples, Shares, Task, Texts, at_least, yes_or_no


@dataclass(frozen=True, kw_only=True)
class Rewriting(Task):
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

    length: int = 64
    min_items: int = 1
    words: int = 32
    repeats: bool = True

    def __post_init__(self) -> None:
        at_least(2, length=self.length, words=self.words)
        at_least(1, min_items=self.min_items)
        yes_or_no(repeats=self.repeats)
        if self.min_items > self.max_items:
            raise invalid(
                "min_items", f"be at most {self.max_items}, which {self.length} tokens can hold", self.min_items
            )
        if not self.repeats and self.words < self.max_items:
            raise invalid("words", f"be at least {self.max_items}, the number of items, without repeats", self.words)

    @property
    def max_items(self) -> int:
        """Maximum number of words to rewrite."""
        return self.length // 2

    @property
    def vocab_size(self) -> int:
        return self.words + 2

    @property
    def labels(self) -> range:
        return range(1, self.words + 1)

    def options_at(self, length: int) -> dict[str, Any]:
        return {**vars(self), "length": length, "min_items": max(1, length // 2)}

    def split_key(self, examples: Examples) -> Texts:
        separator = (examples.tokens == self.words + 1).argmax(axis=1)
        return np.where(np.arange(self.length) < separator[:, None], examples.tokens, PAD)

    @abstractmethod
    def rewrite(self, items: Int[np.ndarray, "n m"], sizes: Each) -> Int[np.ndarray, "n m"]:
        """The answer; the first ``sizes`` columns of each row of the answer and of ``items`` are valid."""

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        rows, column = np.arange(count), np.arange(self.length)
        shape = (count, self.max_items)
        sizes = rng.integers(self.min_items, self.max_items + 1, size=count)
        if self.repeats:
            items = rng.integers(1, self.words + 1, size=shape)
        else:
            items = 1 + np.argsort(rng.random((count, self.words)), axis=1)[:, : self.max_items]
        answer = self.rewrite(items, sizes)
        given = rng.integers(0, sizes)
        tokens = np.full((count, self.length), PAD)
        tokens[:, : self.max_items] = np.where(column[: self.max_items] < sizes[:, None], items, PAD)
        tokens[rows, sizes] = self.words + 1
        step = column - sizes[:, None] - 1
        shown = (step >= 0) & (step < given[:, None])
        tokens[shown] = answer[np.nonzero(shown)[0], step[shown]]
        return Examples(tokens, answer[rows, given], sizes + 1 + given)


class Copy(Rewriting):
    """What is the next word of the copy? (as in arXiv 2402.01032 and 2310.16028)

    After the words a b c, the separator and a, it is b. Arguments: those of `Rewriting`.
    """

    name = "copy"

    def rewrite(self, items: Int[np.ndarray, "n m"], sizes: Each) -> Int[np.ndarray, "n m"]:
        return items


class Reverse(Rewriting):
    """What is the next word of the reversed sequence? (as in arXiv 2207.02098)

    After the words a b c, the separator and c, it is b. Arguments: those of `Rewriting`.
    """

    name = "reverse"

    def rewrite(self, items: Int[np.ndarray, "n m"], sizes: Each) -> Int[np.ndarray, "n m"]:
        return np.take_along_axis(items, np.maximum(sizes[:, None] - 1 - np.arange(items.shape[1]), 0), axis=1)


class Sort(Rewriting):
    """What is the next word of the sequence sorted by token id? (as in arXiv 2207.02098 and 2310.16028)

    After the words c a b, the separator and a, it is b. Arguments: those of `Rewriting`.
    """

    name = "sort"
    answer = "content"

    def rewrite(self, items: Int[np.ndarray, "n m"], sizes: Each) -> Int[np.ndarray, "n m"]:
        return np.sort(np.where(np.arange(items.shape[1]) < sizes[:, None], items, self.words + 1), axis=1)

    def shares(self) -> Shares:
        """The label at a step is an order statistic of the words, and the length is informative about the step."""
        found = np.zeros((self.length + 1, self.words))
        word = np.arange(1, self.words + 1)
        for size in range(self.min_items, self.max_items + 1):
            step = np.arange(size)[:, None]
            if self.repeats:  # at least step + 1 of the words are word or less
                each = np.diff(bdtrc(step, size, word / self.words), axis=1, prepend=0.0)
            else:  # step words are less and the rest are more
                each = np.exp(
                    _log_choose(word - 1, step)
                    + _log_choose(self.words - word, size - 1 - step)
                    - _log_choose(np.array(self.words), np.array(size))
                )
            found[size + 1 : 2 * size + 1] += each / size
        return found / (self.max_items - self.min_items + 1)


def _log_choose(total: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The logarithm of the binomial coefficient, -inf if it is 0."""
    left = np.maximum(total - chosen, 0)
    return np.where(chosen <= total, gammaln(total + 1) - gammaln(chosen + 1) - gammaln(left + 1), -np.inf)
