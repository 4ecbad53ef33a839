"""A corpus: tokens of documents one after another, split by document, in files that are mapped and not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from toeplens.ground import choose
from toeplens.tasks.base import Split
from toeplens.tasks.language.splits import SPLITS

_LETTERS = np.frombuffer(bytes(byte for byte in range(128) if chr(byte).isalpha()), dtype=np.uint8)


@dataclass(frozen=True, eq=False)
class Part:
    """The documents of a split.

    tokens  [T] of all documents one after another, a separator after each
    starts  [D + 1] where each document begins, and where a next one would
    bytes   [D] of each document
    """

    tokens: Shaped[np.ndarray, "T"]
    starts: Int[np.ndarray, "D1"]
    bytes: Int[np.ndarray, "D"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents as tokens, in three splits that share none.

    sha256      of the documents, in order, and of what made tokens of them
    vocab_size  ids are below it
    separator   the id that stands after each document
    raw         whether tokens are bytes
    about       where it comes from and how much it is, for JSON
    parts       its splits
    counts      [vocab_size] how often each token is in the training split, separators included
    """

    sha256: str
    vocab_size: int
    separator: int
    raw: bool
    about: dict[str, Any]
    parts: Mapping[Split, Part]
    counts: Int[np.ndarray, "vocab_size"]

    def stream(self, split: Split) -> Shaped[np.ndarray, "T"]:
        """All documents of a split, one after another, each followed by the separator; unsigned or int32."""
        return self.parts[choose("split", split, SPLITS)].tokens

    def starts(self, split: Split) -> Int[np.ndarray, "D1"]:
        """Where in the stream each document begins, and at last where the stream ends."""
        return self.parts[choose("split", split, SPLITS)].starts

    def bytes_of(self, split: Split) -> Int[np.ndarray, "D"]:
        """Bytes of each document."""
        return self.parts[choose("split", split, SPLITS)].bytes

    def frequent(self, count: int) -> Int[np.ndarray, "m"]:
        """The most frequent tokens of the training split, at most so many; the separator is none of them.

        Of bytes letters are taken alone (a-z, A-Z), unless fewer than two kinds of them occur. Those that are as
        frequent come by their ids; what does not occur is left out.
        """
        counts = self.counts.copy()
        counts[self.separator] = 0
        if self.raw and np.count_nonzero(counts[_LETTERS]) > 1:
            counts[np.setdiff1d(np.arange(len(counts)), _LETTERS)] = 0
        return np.argsort(-counts, kind="stable")[: min(max(count, 0), np.count_nonzero(counts))]


def dtype_of(vocab_size: int) -> np.dtype[Any]:
    """The smallest type that tokens are kept in."""
    if vocab_size <= 2**8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16) if vocab_size <= 2**16 else np.dtype(np.int32)
