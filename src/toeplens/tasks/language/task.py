"""Language as a task: which token comes next, at every token of a window of a corpus."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from toeplens.ground import InputError
from toeplens.tasks.base import Each, Examples, Shares, Split, Task
from toeplens.tasks.language.corpus import SPLITS, Corpus

_BLOCK = 4096


@dataclass(frozen=True, kw_only=True)
class LanguageTask(Task):
    """Which token comes next? A label at every token; texts are windows of a corpus that is split by document.

    The documents of a split stand one after another, a separator after each, and are cut into windows of ``length``
    tokens and the one that follows: each window begins with the token that the one before it ended in, so that every
    token but the first is a label once, and what is left at the end is less than a window. A window may hold the ends
    of several documents, and attention reaches over them.

    A data set of ``size`` windows is the first ones in an order that the seed and the split give, so that a smaller one
    is the beginning of a larger one.
    """

    answer = "both"
    each = True
    watched = "validation"

    length: int = 256

    @abstractmethod
    def corpus(self) -> Corpus:
        """The documents, split and as tokens."""

    @property
    def labels(self) -> range:
        return range(self.vocab_size)

    def shares(self) -> Shares:
        """How frequent each token is in the training split; of one length, as all windows are."""
        counts = self.corpus().counts
        return (counts / counts.sum())[None]

    def options_at(self, length: int) -> dict[str, Any]:
        return {**vars(self), "length": length}

    def windows(self, split: Split) -> int:
        """How many windows a split has."""
        return self._count(self.corpus(), split)

    def must_have(self, split: Split, size: int) -> None:
        """Raise an `InputError` unless a split has so many windows."""
        field = "test_examples" if split == self.watched else f"{split}_examples"  # as a run's spec calls it
        if size < 1:
            raise InputError(f"{field}: {size} was given; it must be at least 1.")
        have = self.windows(split)
        if not have:
            self._order(self.corpus(), split, 0)  # says why
        if size > have:
            raise InputError(
                f"{field}: {size} was given; the {split} split of the text has {have} windows of {self.length} tokens."
            )

    def dataset(self, split: Split, size: int, seed: int) -> Examples:
        self.must_have(split, size)
        corpus = self.corpus()
        return self._cut(corpus, split, self._order(corpus, split, seed)[:size])

    def stream(self, split: Split, seed: int) -> Iterator[Examples]:
        """All windows of ``split``, in blocks, in the order of the seed: there is an end to them."""
        corpus = self.corpus()
        order = self._order(corpus, split, seed)
        for start in range(0, len(order), _BLOCK):
            yield self._cut(corpus, split, order[start : start + _BLOCK])

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        """Windows of the training split, each as likely each time."""
        corpus = self.corpus()
        return self._cut(corpus, "train", rng.choice(self._order(corpus, "train", seed), size=count))

    def _count(self, corpus: Corpus, split: Split) -> int:
        return max(0, len(corpus.stream(split)) - 1) // self.length

    def _order(self, corpus: Corpus, split: Split, seed: int) -> Each:
        """The numbers of all windows of a split in the order of the seed; an `InputError` if there is none."""
        if not (have := self._count(corpus, split)):
            raise InputError(
                f"length: {self.length} was given; the {split} split of the text has {len(corpus.stream(split))} "
                f"tokens in all, and a window takes {self.length + 1}."
            )
        mixed = np.random.SeedSequence((seed, SPLITS.index(split)))
        return np.random.Generator(np.random.Philox(mixed)).permutation(have)

    def _cut(self, corpus: Corpus, split: Split, which: Int[np.ndarray, "n"]) -> Examples:
        places = self.length * which[:, None] + np.arange(self.length + 1)
        windows = np.asarray(corpus.stream(split)[places], dtype=np.int64)
        lengths = np.full(len(which), self.length, dtype=np.int64)
        return Examples(np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:]), lengths)
