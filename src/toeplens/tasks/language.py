"""Language modelling as a task: the next token, at every token of a window of a corpus."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int

from toeplens.tasks.base import Examples, Shares, Split, Task, Vector
from toeplens.tasks.corpus import SPLITS, Corpus, load_corpus
from toeplens.tasks.text import BYTES, TextSource, load_tokenizer
from toeplens.utils import InputError, invalid
from toeplens.utils.options import PositiveInt

_BLOCK = 4096


@dataclass(frozen=True, kw_only=True)
class LanguageTask(Task):
    """Which token comes next? One label per token; sequences are windows of a corpus that is split by document.

    The documents of a split are concatenated, with a separator after each, and cut into windows of ``length``
    tokens plus the next one. Each window begins with the last token of the previous one, so every
    token but the first is a label once. An incomplete window at the end is dropped. A window may span
    several documents, and attention is not limited to one document.

    A data set of ``size`` windows is the first ones in an order given by the seed and the split, so a smaller one
    is a prefix of a larger one.
    """

    answer = "both"
    per_token = True
    eval_split = "validation"

    length: PositiveInt = 256

    @abstractmethod
    def corpus(self) -> Corpus:
        """The tokenised and split documents."""

    def shares(self) -> Shares:
        """Token frequencies of the training split; all windows have one length."""
        counts = self.corpus().counts
        return (counts / counts.sum())[None]

    def windows(self, split: Split) -> int:
        """Number of windows of a split."""
        return max(0, len(self.corpus().stream(split)) - 1) // self.length

    def check_size(self, split: Split, size: int) -> None:
        """Raise `InputError` unless a split has this many windows."""
        field = "test_examples" if split == self.eval_split else f"{split}_examples"  # the name in a run's spec
        if size < 1:
            raise invalid(field, "be at least 1", size)
        available = self.windows(split) or len(self._order(self.corpus(), split, 0))  # which raises if there are none
        if size > available:
            must = f"be at most {available}, the windows of {self.length} tokens in the {split} split"
            raise invalid(field, must, size)

    def dataset(self, split: Split, size: int, seed: int) -> Examples:
        self.check_size(split, size)
        corpus = self.corpus()
        return self._cut_windows(corpus, split, self._order(corpus, split, seed)[:size])

    def stream(self, split: Split, seed: int) -> Iterator[Examples]:
        """All windows of ``split`` in blocks, in the order of the seed; finite."""
        corpus = self.corpus()
        order = self._order(corpus, split, seed)
        for start in range(0, len(order), _BLOCK):
            yield self._cut_windows(corpus, split, order[start : start + _BLOCK])

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        """Random windows of the training split, drawn with replacement."""
        corpus = self.corpus()
        return self._cut_windows(corpus, "train", rng.choice(self._order(corpus, "train", seed), size=count))

    def _order(self, corpus: Corpus, split: Split, seed: int) -> Vector:
        """The indices of all windows of a split in the order of the seed; raises `InputError` if there are none."""
        size = len(corpus.stream(split))
        if size <= self.length:
            raise invalid("length", f"be less than the {size} tokens of the {split} split", self.length)
        entropy = np.random.SeedSequence((seed, SPLITS.index(split)))
        return np.random.Generator(np.random.Philox(entropy)).permutation((size - 1) // self.length)

    def _cut_windows(self, corpus: Corpus, split: Split, indices: Int[np.ndarray, "n"]) -> Examples:
        columns = self.length * indices[:, None] + np.arange(self.length + 1)
        windows = np.asarray(corpus.stream(split)[columns], dtype=np.int64)
        lengths = np.full(len(indices), self.length, dtype=np.int64)
        return Examples(np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:]), lengths)


@dataclass(frozen=True, kw_only=True)
class Language(LanguageTask):
    """Which token of a text comes next? Text from files, one label per token, split by document.

    A document is a file, or a row of a JSON lines or Parquet file. Duplicates count once, empty documents not at
    all. In the order of their hashes documents go to the test split until it has a tenth of all bytes, then to the
    validation split until it has a twentieth, and then to the training split. If there are fewer than 64 documents,
    or one has more than a tenth of all bytes, documents with more than a 64th of all bytes are first cut at line ends
    into smaller documents.

    Arguments
        text       files and folders: plain files of any kind, ``.jsonl`` and ``.parquet``; folders are read completely,
                   sorted by name, without hidden files. None: the standard library of this Python, without its tests
        column     the text column of ``.jsonl`` and ``.parquet``
        tokenizer  ``bytes`` (with 0 as separator), or a local Hugging Face tokenizer: a folder, a
                   tokenizer.json, or the name of a downloaded one
        length     tokens of a window
        sha256     hash of documents and tokenizer; other text raises an error. A run's spec sets it automatically

    Longer sequences are longer windows of the same documents. Text is read on first use, and its tokens are
    cached (`toeplens.tasks.corpus`). With ``sha256`` it is checked once per process.
    """

    name = "language"

    text: Sequence[str] = ()
    column: str = "text"
    tokenizer: str = BYTES
    sha256: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "text", tuple(self.text))  # settings files have lists
        if not all(path and "\0" not in path for path in self.text):
            raise invalid("text", "be names of files or folders", list(self.text))
        if self.sha256 is not None and re.fullmatch("[0-9a-f]{64}", self.sha256) is None:
            raise invalid("sha256", "be 64 digits of 0-9 and a-f", self.sha256)

    def vocab_and_labels(self) -> tuple[int, range]:
        vocab_size = load_tokenizer(self.tokenizer).vocab_size
        return vocab_size, range(vocab_size)

    def corpus(self) -> Corpus:
        source = TextSource(tuple(map(os.path.abspath, self.text)), self.column)
        if self.sha256 is None:
            return load_corpus(source, self.tokenizer)
        return _verified_corpus(source, self.tokenizer, load_tokenizer(self.tokenizer).identity, self.sha256)

    def pinned_options(self) -> dict[str, Any]:
        """The hash of the text, so that other text is rejected, and its absolute location."""
        location = {"text": [os.path.realpath(path) for path in self.text]} if self.text else {}
        return {"sha256": self.sha256 or self.corpus().sha256, **location}

    @property
    def source_key(self) -> tuple[Any, ...]:
        """The source of the text, in its current state."""
        return tuple(map(os.path.realpath, self.text)), self.column, self.tokenizer


@lru_cache(maxsize=16)
def _verified_corpus(source: TextSource, tokenizer: str, identity: str, recorded: str) -> Corpus:
    corpus = load_corpus(source, tokenizer)
    if corpus.sha256 != recorded:
        verb = "has" if tokenizer == BYTES else "or its tokenizer has"
        raise InputError(
            f"text: {source} {verb} changed: the recorded sha256 is {recorded}, it is now {corpus.sha256}."
        )
    return corpus
