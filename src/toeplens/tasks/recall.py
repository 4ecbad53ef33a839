"""Multi-query associative recall: several keys are asked for in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Int

from toeplens.ground import InputError
from toeplens.tasks.base import PAD, Examples, Task
from toeplens.tasks.texts import at_least, finish, places


@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """Which value followed the last key before? (multi-query associative recall, arXiv 2312.04927)

    Keys, each followed by its value, with distractors between these pairs; then some of the keys again, all but the
    last with their values; the label is the last one's value. For a 3 b 1 x c 3, with x a distractor, and the queries
    c 3 a, it is 3.

    Arguments
        length       most tokens of a text
        keys, values different keys and values; the label is the value's token id
        pairs        pairs in a text, all of different keys
        queries      most keys that are asked for, all different; 1 to that many, every number as likely
        distractors  different distractor words; with 0 a text is its pairs and the queries, the rest padding

    Longer texts have more distractors, or, if there are none, more pairs. Texts with the same pairs and distractors are
    never divided between train and test.
    """

    name: ClassVar[str] = "recall"
    answer: ClassVar[Literal["position", "content", "both"]] = "both"

    length: int = 64
    keys: int = 32
    values: int = 32
    pairs: int = 8
    queries: int = 4
    distractors: int = 32

    def __post_init__(self) -> None:
        at_least(0, distractors=self.distractors)
        at_least(2, values=self.values)
        at_least(1, keys=self.keys, pairs=self.pairs, queries=self.queries)
        if self.pairs > self.keys:
            raise InputError(f"pairs: {self.pairs} was given; there are only {self.keys} different keys.")
        if self.queries > self.pairs:
            raise InputError(f"queries: {self.queries} was given; there are only {self.pairs} pairs to ask for.")
        at_least(2 * self.pairs + self._asking, length=self.length)

    @property
    def _asking(self) -> int:
        """Most tokens from the first query on."""
        return 2 * self.queries - 1

    @property
    def told(self) -> int:
        """Tokens before the first query."""
        return self.length - self._asking if self.distractors else 2 * self.pairs

    @property
    def vocab_size(self) -> int:
        return 1 + self.keys + self.values + self.distractors

    @property
    def labels(self) -> range:
        return range(1 + self.keys, 1 + self.keys + self.values)

    def options_at(self, length: int) -> dict[str, Any]:
        pairs = self.pairs if self.distractors else max(1, (length - self._asking) // 2)
        return {**vars(self), "length": length, "pairs": pairs}

    def split_key(self, examples: Examples) -> Int[np.ndarray, "n length"]:
        return np.where(np.arange(self.length) < self.told, examples.tokens, PAD)

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        rows = np.arange(count)
        keys = 1 + places(rng, np.full(count, self.keys), self.keys, self.pairs)
        values = 1 + self.keys + rng.integers(0, self.values, size=keys.shape)
        tokens = np.full((count, self.length), PAD)
        if self.distractors:
            low = 1 + self.keys + self.values
            tokens[:, : self.told] = rng.integers(low, low + self.distractors, size=(count, self.told))
        units = self.told - self.pairs  # a pair takes one place among the distractors, and then one column more
        at = np.sort(places(rng, np.full(count, units), units, self.pairs), axis=1) + np.arange(self.pairs)
        np.put_along_axis(tokens, at, keys, axis=1)
        np.put_along_axis(tokens, at + 1, values, axis=1)
        asked = places(rng, np.full(count, self.pairs), self.pairs, self.queries)
        tokens[:, self.told :: 2][:, : self.queries] = np.take_along_axis(keys, asked, axis=1)
        tokens[:, self.told + 1 :: 2][:, : self.queries - 1] = np.take_along_axis(values, asked[:, :-1], axis=1)
        last = rng.integers(0, self.queries, size=count)
        return finish(tokens, values[rows, asked[rows, last]], self.told + 2 * last + 1)
