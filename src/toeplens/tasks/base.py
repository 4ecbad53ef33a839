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

from toeplens.utils import InputError, choose, invalid
from toeplens.utils.options import PositiveInt, Range, check_fields, check_value
from toeplens.utils.renamed import rename_overrides, renamed

Split = Literal["train", "validation", "test"]  # part of a task's data
TEST_SHARE = 0.3  # share of all possible sequences that is reserved for the test
PAD = 0  # padding token
_BLOCK = 4096
_WORD = 2**32

Tokens = Int[np.ndarray, "n length"]
Vector = Int[np.ndarray, "n"]  # one number per sequence
Labels = Int[np.ndarray, "n *length"]  # one number per sequence, or one per token
Shares = Float[np.ndarray, "lengths labels"]


@dataclass(frozen=True)
class Examples:
    """A set of examples.

    tokens   [n, length] token ids, padded on the right with 0
    labels   [n] class of each sequence; or [n, length] one per token, for tasks with `per_token`
    lengths  [n] number of tokens before the padding; the whole length for per-token labels
    """

    tokens: Tokens
    labels: Labels
    lengths: Vector

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice | np.ndarray) -> Examples:
        return Examples(self.tokens[rows], self.labels[rows], self.lengths[rows])

    @staticmethod
    def join(parts: list[Examples]) -> Examples:
        """Concatenate all examples of ``parts``."""
        return Examples(*(np.concatenate([getattr(p, field.name) for p in parts]) for field in fields(Examples)))


@renamed
class Task(ABC):
    """A classification task with one label per sequence, or one per token.

    For synthetic tasks, a hash of an example's tokens (`split_key`) decides whether it belongs to train or to test. The
    two are therefore disjoint for all sizes, and any number of examples can be streamed without storing a split. If a
    task's answer has several tokens, each example asks for one of them: the input ends with a random number of the
    answer's first tokens and the label is the next one. Accuracy is then that of an answer's tokens given the
    previous ones. For natural-language data see `toeplens.tasks.language`.

    Class attributes
        name        as in `toeplens.tasks.names`
        answer      what the label depends on: ``position``, ``content`` or ``both``
        per_token   whether there is one label per token, instead of one per sequence
        eval_split  the evaluation split during training
    """

    name: ClassVar[str]
    answer: ClassVar[Literal["position", "content", "both"]]
    per_token: ClassVar[bool] = False
    eval_split: ClassVar[Split] = "test"
    length: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rename_overrides(cls, "Task")

    @abstractmethod
    def vocab_and_labels(self) -> tuple[int, range]:
        """The number of token ids, and the labels that occur."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.vocab_and_labels()[0]

    @property
    def labels(self) -> range:
        """The labels that occur."""
        return self.vocab_and_labels()[1]

    @abstractmethod
    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        """``count`` examples from ``rng``; properties of the whole data set are derived from ``seed``."""

    def marked_words(self, seed: int) -> Vector:
        """The words that determine the answer in the data set with this seed; empty for tasks without such words."""
        return np.empty(0, dtype=int)

    def pinned_options(self) -> dict[str, Any]:
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
        check_value("length", length, PositiveInt)
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

    def groups(self, examples: Examples) -> dict[str, Bool[np.ndarray, "n"]]:
        """Named groups of examples whose accuracy is reported separately; none by default."""
        return {}

    def chance(self, ignore_label: int | None = None) -> float:
        """Accuracy of the best constant prediction, over the labels that count."""
        shares, counted = self._joint(ignore_label)
        totals = shares.sum(axis=0)[counted]
        return float(totals.max() / totals.sum())

    def length_chance(self, ignore_label: int | None = None) -> float:
        """Accuracy of the length-only baseline, over the labels that count."""
        shares, counted = self._joint(ignore_label)
        joint = shares[:, counted]
        return float(joint.max(axis=1).sum() / joint.sum())

    def _joint(self, ignore_label: int | None) -> tuple[Shares, list[bool]]:
        """The joint probabilities, up to a factor, and which labels count."""
        shares = self.shares()
        counted = [label != ignore_label for label in self.labels]
        return np.ones((1, len(counted))) if shares is None else shares, counted

    def split_key(self, examples: Examples) -> Tokens:
        """The tokens whose hash decides between train and test (default: all).

        Sequences that show different parts of the same answer must get the same key, so that they are in the same
        split.
        """
        return examples.tokens

    def stream(self, split: Split, seed: int) -> Iterator[Examples]:
        """Distinct examples of ``split`` in endless blocks, reproducible by the seed."""
        choose("split", split, ("test", "train"))
        known = np.empty(0, dtype=np.uint64)  # hashes, sorted
        block = empty_blocks = 0
        while empty_blocks < 50:
            entropy = (seed, block) if seed < _WORD else (seed, block, 1)  # larger seeds take two words
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
            examples = self.draw(rng, _BLOCK, seed)
            block += 1
            hashes = fingerprint(examples.tokens)
            _, first_rows = np.unique(hashes, return_index=True)
            is_new = np.zeros(len(hashes), dtype=bool)
            is_new[first_rows] = True
            ends = np.searchsorted(known, hashes), np.searchsorted(known, hashes, side="right")
            is_new &= ends[0] == ends[1]
            key = self.split_key(examples)
            is_new &= in_test(hashes if key is examples.tokens else fingerprint(key)) == (split == "test")
            empty_blocks = 0 if is_new.any() else empty_blocks + 1
            new = np.sort(hashes[is_new])
            known = np.insert(known, np.searchsorted(known, new), new)
            if is_new.any():
                yield examples[is_new]

    def dataset(self, split: Split, size: int, seed: int) -> Examples:
        """The first ``size`` examples of ``split``; raises `InputError` if there are fewer distinct ones."""
        return self._take_first(self.stream(split, seed), split, size)

    def unseen_dataset(self, trained_task: Task, size: int, seed: int) -> Examples:
        """The first ``size`` test examples not in the training data of ``trained_task``, this task at another length.

        The hash of a sequence includes its padding, so a short one can be in test at one length and in train at
        another. Raises `InputError` if there are fewer distinct ones.
        """
        if trained_task.length == self.length:
            return self.dataset("test", size, seed)

        def is_new(block: Examples) -> Bool[np.ndarray, "n"]:
            short, more = block.tokens[:, : trained_task.length], max(0, trained_task.length - self.length)
            padded = replace(block, tokens=np.pad(short, ((0, 0), (0, more)), constant_values=PAD))
            return (block.lengths > trained_task.length) | in_test(fingerprint(trained_task.split_key(padded)))

        return self._take_first((block[is_new(block)] for block in self.stream("test", seed)), "test", size)

    def _take_first(self, blocks: Iterator[Examples], split: Split, size: int) -> Examples:
        if size < 1:
            raise invalid(f"{split}_examples", "be at least 1", size)
        parts: list[Examples] = []
        count = 0
        for block in blocks:
            parts.append(block)
            count += len(block)
            if count >= size:
                return Examples.join(parts)[:size]
        raise InputError(
            f"{split}_examples: {self.name} has only about {count} different examples at this size, got {size}."
        )


@dataclass(frozen=True, kw_only=True)
class SizedTask(Task):
    """A task with sequences of ``min_length`` (default: ``length``) to ``length`` tokens, uniformly distributed."""

    length: int = 64
    min_length: int | None = None

    @property
    def shortest_length(self) -> int:
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

    def draw_lengths(self, rng: np.random.Generator, count: int) -> Vector:
        """Number of tokens of each sequence."""
        return rng.integers(self.shortest_length, self.length + 1, size=count)


def fingerprint(tokens: Tokens) -> UInt64[np.ndarray, "n"]:
    """A 64-bit hash of each row (a random linear form modulo 2^64, then splitmix64's finaliser)."""
    weights = np.random.Generator(np.random.Philox(20250513)).integers(2**63, size=tokens.shape[1], dtype=np.uint64)
    with np.errstate(over="ignore"):
        hashes = ((tokens.astype(np.uint64) + np.uint64(1)) * (2 * weights + np.uint64(1))).sum(axis=1, dtype=np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            hashes = (hashes ^ (hashes >> np.uint64(shift))) * np.uint64(factor)
        return hashes ^ (hashes >> np.uint64(31))


@renamed
def in_test(hashes: UInt64[np.ndarray, "n"]) -> np.ndarray:
    """Whether each fingerprint belongs to the test share of all possible sequences."""
    return hashes < np.uint64(TEST_SHARE * 2.0**64)


def at_least(low: int, **values: int) -> None:
    """Raise `InputError` for the first field that is less than ``low``."""
    for field, value in values.items():
        Range(low).check(field, value)


def at_most(high: int, limit_text: str, **values: int) -> None:
    """Raise `InputError` for the first field that is more than ``high``; ``limit_text`` names it, as {}."""
    for field, value in values.items():
        if value > high:
            raise invalid(field, f"be at most {limit_text.format(high)}", value)


def random_columns(
    rng: np.random.Generator, sizes: Vector, width: int, count: int, excluded: Int[np.ndarray, "n m"] | None = None
) -> Int[np.ndarray, "n count"]:
    """``count`` distinct columns for each row, in random order, below the row's size and not in ``excluded``.

    ``width`` is at least the largest size; every row needs enough columns.
    """
    scores = rng.random((len(sizes), width))
    scores[np.arange(width) >= sizes[:, None]] = np.inf
    if excluded is not None:
        np.put_along_axis(scores, excluded, np.inf, axis=1)
    return np.argsort(scores, axis=1)[:, :count]


def pad_examples(tokens: Tokens, labels: Vector, lengths: Vector) -> Examples:
    """The examples, padded after each sequence's length."""
    return Examples(np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, PAD), labels, lengths)


def insert(tokens: Tokens, starts: Vector, values: Tokens, sizes: Vector) -> None:
    """Write the first ``sizes`` columns of each row of ``values`` into ``tokens``, from column ``starts`` on."""
    step = np.arange(tokens.shape[1]) - starts[:, None]
    inside = (step >= 0) & (step < sizes[:, None])
    tokens[inside] = values[np.nonzero(inside)[0], step[inside]]
