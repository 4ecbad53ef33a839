"""A corpus: tokens of documents one after another, split by document, in files that are mapped and not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from jaxtyping import Int, Shaped

from toeplens.ground import choose
from toeplens.tasks.base import Split

SPLITS: tuple[Split, ...] = get_args(Split)
SHARES: dict[Split, float] = {"test": 0.1, "validation": 0.05}  # of all bytes, at least; the rest is for training
FEWEST = 64  # documents
LONGEST = 0.1  # of all bytes that one document may hold
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


def assign(digests: Sequence[bytes], sizes: Sequence[int]) -> Int[np.ndarray, "D"]:
    """The split of each document, as its place in `SPLITS`.

    In the order of their hashes, documents go to the test split until it has a tenth of all bytes, then to the
    validation split until it has a twentieth, and then to the training split. None of the three is left empty where
    there are three documents; of two the second is for the test, a single one is for training.

    Arguments
        digests  a hash of each document, all different
        sizes    bytes of each document
    """
    order, total, count = sorted(range(len(digests)), key=digests.__getitem__), sum(sizes), len(digests)
    found = np.full(count, SPLITS.index("train"))
    taken = 0
    turns: tuple[tuple[Split, int], ...] = (("test", max(count - 2, min(count - 1, 1))), ("validation", count - 1))
    for split, last in turns:
        have = 0
        while taken < last and have < SHARES[split] * total:
            found[order[taken]] = SPLITS.index(split)
            have += sizes[order[taken]]
            taken += 1
    return found


def piece_size(sizes: Sequence[int]) -> int | None:
    """Most bytes of a document, if long ones are to be cut; else None.

    Where there are fewer than 64 documents, or one holds more than a tenth of all bytes, those that hold more than a
    64th of them are cut at ends of lines (`pieces`).
    """
    total = sum(sizes)
    if len(sizes) >= FEWEST and max(sizes) <= LONGEST * total:
        return None
    return max(1, total // FEWEST)


def pieces(document: bytes, most: int | None) -> Iterator[bytes]:
    """The document in parts of about the same size that end where lines do, each of ``most`` bytes if lines allow.

    The parts are as many as are needed for that, fewer where lines are longer than a part. None is empty.
    """
    count = 1 if most is None else -(-len(document) // most)
    begin = 0
    for part in range(1, count):
        end = document.rfind(b"\n", begin, part * len(document) // count) + 1
        if end > begin:
            yield document[begin:end]
            begin = end
    if begin < len(document):
        yield document[begin:]
