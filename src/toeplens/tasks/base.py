"""The contract of a synthetic task: examples from a seed, block by block, train and test disjoint by construction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float, Int, UInt64

from toeplens.ground import InputError

Split = Literal["train", "test"]
TEST_SHARE = 0.3
PAD = 0
_BLOCK = 4096


@dataclass(frozen=True)
class Examples:
    """A set of examples.

    tokens   [n, length] token ids, padded on the right with 0
    labels   [n] class of each sequence
    lengths  [n] tokens before the padding
    """

    tokens: Int[np.ndarray, "n length"]
    labels: Int[np.ndarray, "n"]
    lengths: Int[np.ndarray, "n"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice | np.ndarray) -> Examples:
        return Examples(self.tokens[rows], self.labels[rows], self.lengths[rows])

    @staticmethod
    def join(parts: list[Examples]) -> Examples:
        """All examples of ``parts``, in order."""
        return Examples(
            np.concatenate([p.tokens for p in parts]),
            np.concatenate([p.labels for p in parts]),
            np.concatenate([p.lengths for p in parts]),
        )


class Task(ABC):
    """A synthetic classification task.

    Whether an example belongs to train or to test is decided by a hash of its tokens (`split_key`), so the two are
    disjoint whatever the sizes, and any number of examples can be streamed without keeping a split anywhere. A task
    whose answer is a sequence asks for one step of it: the text ends in the answer's first tokens, as many as chance
    has it, and the label is the next one, so that accuracy is that of an answer's tokens given those before them.

    Class facts
        name     as in `toeplens.tasks.names`
        answer   what the label depends on: ``position``, ``content`` or ``both``
    """

    name: ClassVar[str]
    answer: ClassVar[Literal["position", "content", "both"]]
    length: int
    vocab_size: int

    @property
    @abstractmethod
    def labels(self) -> range:
        """The labels that occur."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        """``count`` examples from ``rng``; what is fixed for a whole data set comes from ``seed``."""

    @abstractmethod
    def options_at(self, length: int) -> dict[str, Any]:
        """The options that `at_length` builds the task with."""

    def at_length(self, length: int) -> Task:
        """The same task with texts of ``length`` tokens, padding included, to test how it extrapolates.

        Words, their roles and the labels stay what they are; each task says what grows. Where a task's texts vary in
        length by an option of their own, these are all as long as ``length`` allows. Raises `InputError` where the
        labels cannot be kept.
        """
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise InputError(f"length: {length!r} was given; it must be a whole number of at least 1.")
        try:
            return type(self)(**self.options_at(length))
        except InputError as error:
            raise InputError(f"length: {length} was given; {self.name} cannot be the same there: {error}") from None

    def shares(self) -> Float[np.ndarray, "lengths labels"] | None:
        """How likely each label (column) is together with each text length (row), as the examples are drawn.

        None where all labels are equally likely whatever the length.
        """
        return None

    def chance(self, ignore_label: int | None = None) -> float:
        """Accuracy of the best constant guess over the labels that count."""
        counted = [label != ignore_label for label in self.labels]
        shares = self.shares()
        if shares is None:
            return 1 / sum(counted)
        each = shares.sum(axis=0)[counted]
        return float(each.max() / each.sum())

    def length_chance(self, ignore_label: int | None = None) -> float:
        """Accuracy of the best guess from the sequence's length alone, over the labels that count."""
        shares = self.shares()
        if shares is None:
            return self.chance(ignore_label)
        counted = shares[:, [label != ignore_label for label in self.labels]]
        return float(counted.max(axis=1).sum() / counted.sum())

    def split_key(self, examples: Examples) -> Int[np.ndarray, "n length"]:
        """The tokens whose hash decides between train and test: all, unless several texts share one question.

        Texts that show different parts of the same answer must not be divided between train and test.
        """
        return examples.tokens

    def stream(self, split: Split, seed: int) -> Iterator[Examples]:
        """Different examples of ``split``, without end, in blocks; the same for the same seed."""
        seen = np.empty(0, dtype=np.uint64)
        block = barren = 0
        while barren < 50:
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, block))))
            examples = self.draw(rng, _BLOCK, seed)
            block += 1
            marks = fingerprint(examples.tokens)
            _, first = np.unique(marks, return_index=True)
            fresh = np.zeros(len(marks), dtype=bool)
            fresh[first] = True
            fresh &= ~np.isin(marks, seen)
            key = self.split_key(examples)
            fresh &= in_test(marks if key is examples.tokens else fingerprint(key)) == (split == "test")
            barren = 0 if fresh.any() else barren + 1
            seen = np.concatenate((seen, marks[fresh]))
            if fresh.any():
                yield examples[fresh]

    def dataset(self, split: Split, size: int, seed: int) -> Examples:
        """The first ``size`` examples of ``split``; raises `InputError` if there are not so many different ones."""
        if size < 1:
            raise InputError(f"{split}_examples: {size} was given; it must be at least 1.")
        parts: list[Examples] = []
        have = 0
        for part in self.stream(split, seed):
            parts.append(part)
            have += len(part)
            if have >= size:
                return Examples.join(parts)[:size]
        raise InputError(
            f"{split}_examples: {size} was given, but {self.name} at this size has only about {have} different ones."
        )


def fingerprint(tokens: Int[np.ndarray, "n length"]) -> UInt64[np.ndarray, "n"]:
    """A 64-bit hash of each row (a random linear form modulo 2^64, then splitmix64's finaliser)."""
    weights = np.random.Generator(np.random.Philox(20250513)).integers(2**63, size=tokens.shape[1], dtype=np.uint64)
    with np.errstate(over="ignore"):
        marks = ((tokens.astype(np.uint64) + np.uint64(1)) * (2 * weights + np.uint64(1))).sum(axis=1, dtype=np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            marks = (marks ^ (marks >> np.uint64(shift))) * np.uint64(factor)
        return marks ^ (marks >> np.uint64(31))


def in_test(marks: UInt64[np.ndarray, "n"]) -> np.ndarray:
    """Whether each fingerprint falls in the test share of all possible sequences."""
    return marks < np.uint64(TEST_SHARE * 2.0**64)
