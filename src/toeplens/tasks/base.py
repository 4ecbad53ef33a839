"""What a task is: examples from a seed, block by block, train and test disjoint by construction.

And what tasks share: texts of different lengths, random places in them, checks of options.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64

from toeplens.ground import InputError, choose, invalid

Split = Literal["train", "validation", "test"]  # which of a task's texts
TEST_SHARE = 0.3  # share of all texts that is kept for the test
PAD = 0  # the token that fills shorter texts up
_BLOCK = 4096
_WORD = 2**32

Texts = Int[np.ndarray, "n length"]
Each = Int[np.ndarray, "n"]  # a number a text
Labels = Int[np.ndarray, "n *length"]  # a number a text, or a number a token
Shares = Float[np.ndarray, "lengths labels"]


@dataclass(frozen=True)
class Examples:
    """A set of examples.

    tokens   [n, length] token ids, padded on the right with 0
    labels   [n] class of each sequence; or [n, length] one of each token, of a task that has an answer at `each`
    lengths  [n] tokens before the padding; the whole length where there are labels of each token
    """

    tokens: Texts
    labels: Labels
    lengths: Each

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice | np.ndarray) -> Examples:
        return Examples(self.tokens[rows], self.labels[rows], self.lengths[rows])

    @staticmethod
    def join(parts: list[Examples]) -> Examples:
        """All examples of ``parts``, in order."""
        return Examples(*(np.concatenate([getattr(p, each.name) for p in parts]) for each in fields(Examples)))


class Task(ABC):
    """A classification task: of a text, or of each of its tokens.

    Whether an example of a synthetic task belongs to train or to test is decided by a hash of its tokens (`split_key`),
    so the two are disjoint whatever the sizes, and any number of examples can be streamed without keeping a split
    anywhere. A task whose answer is a sequence asks for one step of it: the text ends in the answer's first tokens, as
    many as chance has it, and the label is the next one, so that accuracy is that of an answer's tokens given those
    before them. Texts that were written by somebody are another kind (`toeplens.tasks.language`).

    Class facts
        name     as in `toeplens.tasks.names`
        answer   what the label depends on: ``position``, ``content`` or ``both``
        each     whether there is a label at every token, and not one a text
        watched  the split on which training is evaluated
    """

    name: ClassVar[str]
    answer: ClassVar[Literal["position", "content", "both"]]
    each: ClassVar[bool] = False
    watched: ClassVar[Split] = "test"
    length: int
    vocab_size: int

    @property
    @abstractmethod
    def labels(self) -> range:
        """The labels that occur."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        """``count`` examples from ``rng``; what is fixed for a whole data set comes from ``seed``."""

    def marked_words(self, seed: int) -> Each:
        """The words that the answer is about, of the data set with this seed; none unless a task has such words."""
        return np.empty(0, dtype=int)

    def pinned(self) -> dict[str, Any]:
        """Options that pin the data, so that a task built with them is this one or none; none where options say all."""
        return {}

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
            raise invalid("length", "be a whole number of at least 1", length)
        try:
            return type(self)(**self.options_at(length))
        except InputError as error:
            raise InputError(f"length: {self.name} cannot be built with length {length}: {error}") from None

    def shares(self) -> Shares | None:
        """How likely each label (column) is together with each text length (row), as the examples are drawn.

        Repeated texts are left out after that (`stream`), so that where there are few short texts the data hold less of
        them. None where all labels are equally likely whatever the length.
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

    def split_key(self, examples: Examples) -> Texts:
        """The tokens whose hash decides between train and test: all, unless several texts share one question.

        Texts that show different parts of the same answer must not be divided between train and test.
        """
        return examples.tokens

    def stream(self, split: Split, seed: int) -> Iterator[Examples]:
        """Different examples of ``split``, without end, in blocks; the same for the same seed."""
        if choose("split", split, get_args(Split)) == "validation":
            raise InputError("split must be one of test, train, got 'validation'.")
        seen = np.empty(0, dtype=np.uint64)
        block = barren = 0
        while barren < 50:
            words = (seed, block) if seed < _WORD else (seed, block, 1)  # a larger seed is two words
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
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
        return self._first(self.stream(split, seed), split, size)

    def unseen(self, trained: Task, size: int, seed: int) -> Examples:
        """The first ``size`` test examples that are no training examples of ``trained``, this task at another length.

        A text's hash is of its padding, too, so that a short one may be of the test at one length and not at another.
        Raises `InputError` if there are not so many different ones.
        """
        if trained.length == self.length:
            return self.dataset("test", size, seed)
        parts = (part[self._new_to(trained, part)] for part in self.stream("test", seed))
        return self._first(parts, "test", size)

    def _new_to(self, trained: Task, examples: Examples) -> Bool[np.ndarray, "n"]:
        short, more = examples.tokens[:, : trained.length], max(0, trained.length - self.length)
        there = replace(examples, tokens=np.pad(short, ((0, 0), (0, more)), constant_values=PAD))
        return (examples.lengths > trained.length) | in_test(fingerprint(trained.split_key(there)))

    def _first(self, blocks: Iterator[Examples], split: Split, size: int) -> Examples:
        if size < 1:
            raise invalid(f"{split}_examples", "be at least 1", size)
        parts: list[Examples] = []
        have = 0
        for part in blocks:
            parts.append(part)
            have += len(part)
            if have >= size:
                return Examples.join(parts)[:size]
        raise InputError(
            f"{split}_examples: {self.name} has only about {have} different examples at this size, got {size}."
        )


@dataclass(frozen=True, kw_only=True)
class SizedTask(Task):
    """A task whose texts have ``min_length`` to ``length`` tokens, each number as likely; ``length`` unless given."""

    length: int = 64
    min_length: int | None = None

    @property
    def shortest(self) -> int:
        """Fewest tokens of a text."""
        return self.length if self.min_length is None else self.min_length

    def options_at(self, length: int) -> dict[str, Any]:
        return {**vars(self), "length": length, "min_length": None}

    def check_lengths(self, low: int) -> None:
        """Raise an `InputError` unless every text has at least ``low`` tokens."""
        at_least(low, length=self.length)
        if self.min_length is not None:
            at_least(low, min_length=self.min_length)
            if self.min_length > self.length:
                raise invalid("min_length", f"be at most length ({self.length})", self.min_length)

    def draw_lengths(self, rng: np.random.Generator, count: int) -> Each:
        """Tokens of each text."""
        return rng.integers(self.shortest, self.length + 1, size=count)


def fingerprint(tokens: Texts) -> UInt64[np.ndarray, "n"]:
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


def at_least(low: int, **values: Any) -> None:
    """Raise an `InputError` for the first field that is not a whole number of at least ``low``."""
    for field, value in values.items():
        whole(**{field: value})
        if value < low:
            raise invalid(field, f"be a whole number of at least {low}", value)


def whole(**values: Any) -> None:
    """Raise an `InputError` for the first field that is not a whole number."""
    for field, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise invalid(field, "be a whole number", value)


def yes_or_no(**values: Any) -> None:
    """Raise an `InputError` for the first field that is neither true nor false."""
    for field, value in values.items():
        if not isinstance(value, bool):
            raise invalid(field, "be true or false", value)


def places(
    rng: np.random.Generator, sizes: Each, width: int, many: int, barred: Int[np.ndarray, "n barred"] | None = None
) -> Int[np.ndarray, "n many"]:
    """``many`` different columns for each row, in random order: below the row's size, none of the ``barred`` ones.

    ``width`` is at least the largest size; every row needs as many columns as are asked for.
    """
    scores = rng.random((len(sizes), width))
    scores[np.arange(width) >= sizes[:, None]] = np.inf
    if barred is not None:
        np.put_along_axis(scores, barred, np.inf, axis=1)
    return np.argsort(scores, axis=1)[:, :many]


def finish(tokens: Texts, labels: Each, lengths: Each) -> Examples:
    """The examples, with padding from each text's length on."""
    return Examples(np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, PAD), labels, lengths)
