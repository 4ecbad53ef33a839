"""The task interface: examples generated from a seed in blocks, with train and test disjoint by construction.

Also helpers for tasks: sequences of different lengths, random positions, limits of options.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64

from toeplens.ground import InputError, choose, invalid
from toeplens.ground.options import Count, Limits, check_fields, must_be

Split = Literal["train", "validation", "test"]  # part of a task's data
TEST_SHARE = 0.3  # share of all possible sequences that is reserved for the test
PAD = 0  # padding token
_BLOCK = 4096
_WORD = 2**32

Texts = Int[np.ndarray, "n length"]
Each = Int[np.ndarray, "n"]  # one number per sequence
Labels = Int[np.ndarray, "n *length"]  # one number per sequence, or one per token
Shares = Float[np.ndarray, "lengths labels"]


@dataclass(frozen=True)
class Examples:
    """A set of examples.

    tokens   [n, length] token ids, padded on the right with 0
    labels   [n] class of each sequence; or [n, length] one per token, for tasks with `each`
    lengths  [n] number of tokens before the padding; the whole length for per-token labels
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
        """Concatenate all examples of ``parts``."""
        return Examples(*(np.concatenate([getattr(p, each.name) for p in parts]) for each in fields(Examples)))


class Task(ABC):
    """A classification task with one label per sequence, or one per token.

    For synthetic tasks, a hash of an example's tokens (`split_key`) decides whether it belongs to train or to test. The
    two are therefore disjoint for all sizes, and any number of examples can be streamed without storing a split. If a
    task's answer has several tokens, each example asks for one of them: the input ends with a random number of the
    answer's first tokens and the label is the next one. Accuracy is then that of an answer's tokens given the
    previous ones. For natural-language data see `toeplens.tasks.language`.

    Class attributes
        name     as in `toeplens.tasks.names`
        answer   what the label depends on: ``position``, ``content`` or ``both``
        each     whether there is one label per token, instead of one per sequence
        watched  the evaluation split during training
    """

    name: ClassVar[str]
    answer: ClassVar[Literal["position", "content", "both"]]
    each: ClassVar[bool] = False
    watched: ClassVar[Split] = "test"
    length: int

    @abstractmethod
    def sizes(self) -> tuple[int, range]:
        """The number of token ids, and the labels that occur."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.sizes()[0]

    @property
    def labels(self) -> range:
        """The labels that occur."""
        return self.sizes()[1]

    @abstractmethod
    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        """``count`` examples from ``rng``; properties of the whole data set are derived from ``seed``."""

    def marked_words(self, seed: int) -> Each:
        """The words that determine the answer in the data set with this seed; empty for tasks without such words."""
        return np.empty(0, dtype=int)

    def pinned(self) -> dict[str, Any]:
        """Options that identify external data, so that a rebuilt task has the same data or fails; or none."""
        return {}

    def options_at(self, length: int) -> dict[str, Any]:
        """The options, except ``length``, that `at_length` changes."""
        return {}

    def __post_init__(self) -> None:
        """Check the options; raises `InputError`."""
        check_fields(self)

    def at_length(self, length: int) -> Task:
        """The same task with sequences of ``length`` tokens, including padding, to test length extrapolation.

        Words, their roles and the labels stay the same; each task documents what grows. If sequence lengths vary by an
        option of the task, here all have the length that ``length`` allows. Raises `InputError` if the labels cannot
        stay the same.
        """
        must_be("length", length, Count)
        try:
            return type(self)(**{**vars(self), "length": length, **self.options_at(length)})
        except InputError as error:
            raise InputError(f"length: {self.name} cannot be built with length {length}: {error}") from None

    def shares(self) -> Shares | None:
        """Joint probabilities of the sequence length (row) and the label (column), as the examples are drawn.

        Duplicate sequences are removed afterwards (`stream`), so if there are few short sequences, the data contain
        fewer of them. None if all labels are equally likely at all lengths.
        """
        return None

    def chance(self, ignore_label: int | None = None) -> float:
        """Accuracy of the best constant prediction, over the labels that count."""
        shares, counted = self._joint(ignore_label)
        each = shares.sum(axis=0)[counted]
        return float(each.max() / each.sum())

    def length_chance(self, ignore_label: int | None = None) -> float:
        """Accuracy of the length-only baseline, over the labels that count."""
        shares, counted = self._joint(ignore_label)
        each = shares[:, counted]
        return float(each.max(axis=1).sum() / each.sum())

    def _joint(self, ignore_label: int | None) -> tuple[Shares, list[bool]]:
        """The joint probabilities, up to a factor, and which labels count."""
        shares = self.shares()
        counted = [label != ignore_label for label in self.labels]
        return np.ones((1, len(counted))) if shares is None else shares, counted

    def split_key(self, examples: Examples) -> Texts:
        """The tokens whose hash decides between train and test (default: all).

        Sequences that show different parts of the same answer must get the same key, so that they are in the same
        split.
        """
        return examples.tokens

    def stream(self, split: Split, seed: int) -> Iterator[Examples]:
        """Distinct examples of ``split`` in endless blocks, reproducible by the seed."""
        choose("split", split, ("test", "train"))
        seen = np.empty(0, dtype=np.uint64)
        block = barren = 0
        while barren < 50:
            words = (seed, block) if seed < _WORD else (seed, block, 1)  # larger seeds take two words
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
        """The first ``size`` examples of ``split``; raises `InputError` if there are fewer distinct ones."""
        return self._first(self.stream(split, seed), split, size)

    def unseen(self, trained: Task, size: int, seed: int) -> Examples:
        """The first ``size`` test examples that are not training examples of ``trained``, this task at another length.

        The hash of a sequence includes its padding, so a short one can be in test at one length and in train at
        another. Raises `InputError` if there are fewer distinct ones.
        """
        if trained.length == self.length:
            return self.dataset("test", size, seed)

        def new(part: Examples) -> Bool[np.ndarray, "n"]:
            short, more = part.tokens[:, : trained.length], max(0, trained.length - self.length)
            there = replace(part, tokens=np.pad(short, ((0, 0), (0, more)), constant_values=PAD))
            return (part.lengths > trained.length) | in_test(fingerprint(trained.split_key(there)))

        return self._first((part[new(part)] for part in self.stream("test", seed)), "test", size)

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
    """A task with sequences of ``min_length`` (default: ``length``) to ``length`` tokens, uniformly distributed."""

    length: int = 64
    min_length: int | None = None

    @property
    def shortest(self) -> int:
        """Minimum number of tokens of a sequence."""
        return self.length if self.min_length is None else self.min_length

    def options_at(self, length: int) -> dict[str, Any]:
        return {"min_length": None}

    def check_lengths(self, low: int) -> None:
        """Raise `InputError` unless every sequence has at least ``low`` tokens."""
        at_least(low, length=self.length)
        if self.min_length is not None:
            at_least(low, min_length=self.min_length)
            at_most(self.length, "length ({})", min_length=self.min_length)

    def draw_lengths(self, rng: np.random.Generator, count: int) -> Each:
        """Number of tokens of each sequence."""
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
    """Whether each fingerprint belongs to the test share of all possible sequences."""
    return marks < np.uint64(TEST_SHARE * 2.0**64)


def at_least(low: int, **values: int) -> None:
    """Raise `InputError` for the first field that is less than ``low``."""
    for field, value in values.items():
        Limits(low).check(field, value)


def at_most(high: int, words: str, **values: int) -> None:
    """Raise `InputError` for the first field that is more than ``high``; ``words`` names the limit, as {}."""
    for field, value in values.items():
        if value > high:
            raise invalid(field, f"be at most {words.format(high)}", value)


def places(
    rng: np.random.Generator, sizes: Each, width: int, many: int, barred: Int[np.ndarray, "n barred"] | None = None
) -> Int[np.ndarray, "n many"]:
    """``many`` distinct columns for each row, in random order, below the row's size and not in ``barred``.

    ``width`` is at least the largest size; every row needs enough columns.
    """
    scores = rng.random((len(sizes), width))
    scores[np.arange(width) >= sizes[:, None]] = np.inf
    if barred is not None:
        np.put_along_axis(scores, barred, np.inf, axis=1)
    return np.argsort(scores, axis=1)[:, :many]


def finish(tokens: Texts, labels: Each, lengths: Each) -> Examples:
    """The examples, padded after each sequence's length."""
    return Examples(np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, PAD), labels, lengths)


def insert(tokens: Texts, starts: Each, values: Texts, sizes: Each) -> None:
    """Write the first ``sizes`` columns of each row of ``values`` into ``tokens``, from column ``starts`` on."""
    step = np.arange(tokens.shape[1]) - starts[:, None]
    inside = (step >= 0) & (step < sizes[:, None])
    tokens[inside] = values[np.nonzero(inside)[0], step[inside]]
