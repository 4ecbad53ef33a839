"""A corpus: concatenated tokenised documents, split by document, in memory-mapped files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from jaxtyping import Int, Shaped

from toeplens.ground import choose
from toeplens.tasks.base import Split

SPLITS: tuple[Split, ...] = get_args(Split)
SHARES: dict[Split, float] = {"test": 0.1, "validation": 0.05}  # minimum shares of all bytes; the rest is for training
FEWEST = 64  # minimum number of documents
LONGEST = 0.1  # maximum share of all bytes in one document
_LETTERS = np.frombuffer(bytes(byte for byte in range(128) if chr(byte).isalpha()), dtype=np.uint8)


@dataclass(frozen=True, eq=False)
class Part:
    """The documents of a split.

    tokens  [T] all documents concatenated, with a separator after each
    starts  [D + 1] start of each document, and the end of the stream
    bytes   [D] size of each document
    """

    tokens: Shaped[np.ndarray, "T"]
    starts: Int[np.ndarray, "D1"]
    bytes: Int[np.ndarray, "D"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised documents in three disjoint splits.

    sha256      hash of the documents, in order, and of the tokenizer
    vocab_size  all ids are below it
    separator   the id after each document
    raw         whether tokens are bytes
    about       origin and size, for JSON
    parts       the splits
    counts      [vocab_size] frequency of each token in the training split, including separators
    """

    sha256: str
    vocab_size: int
    separator: int
    raw: bool
    about: dict[str, Any]
    parts: Mapping[Split, Part]
    counts: Int[np.ndarray, "vocab_size"]

    def stream(self, split: Split) -> Shaped[np.ndarray, "T"]:
        """All documents of a split, concatenated, with a separator after each; unsigned or int32."""
        return self.parts[choose("split", split, SPLITS)].tokens

    def starts(self, split: Split) -> Int[np.ndarray, "D1"]:
        """Start of each document in the stream, and the end of the stream."""
        return self.parts[choose("split", split, SPLITS)].starts

    def bytes_of(self, split: Split) -> Int[np.ndarray, "D"]:
        """Size of each document in bytes."""
        return self.parts[choose("split", split, SPLITS)].bytes

    def frequent(self, count: int) -> Int[np.ndarray, "m"]:
        """The most frequent tokens of the training split, at most ``most``, without the separator.

        For byte tokens only letters count (a-z, A-Z), unless fewer than two of them occur. Ties are
        ordered by id; tokens that do not occur are left out.
        """
        counts = self.counts.copy()
        counts[self.separator] = 0
        if self.raw and np.count_nonzero(counts[_LETTERS]) > 1:
            counts[np.setdiff1d(np.arange(len(counts)), _LETTERS)] = 0
        return np.argsort(-counts, kind="stable")[: min(max(count, 0), np.count_nonzero(counts))]


def dtype_of(vocab_size: int) -> np.dtype[Any]:
    """The smallest integer type for the tokens."""
    if vocab_size <= 2**8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16) if vocab_size <= 2**16 else np.dtype(np.int32)


def assign(digests: Sequence[bytes], sizes: Sequence[int]) -> Int[np.ndarray, "D"]:
    """The split of each document, as its index in `SPLITS`.

    In the order of their hashes, documents go to the test split until it has a tenth of all bytes, then to the
    validation split until it has a twentieth, and then to the training split. With at least three documents no split is
    empty. Of two documents the second is for testing; a single document is for training.

    Arguments
        digests  a hash of each document, all different
        sizes    size of each document in bytes
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
    """Maximum bytes of a document, if long documents must be cut; otherwise None.

    If there are fewer than 64 documents, or one has more than a tenth of all bytes, documents with more than a
    64th of all bytes are cut at line ends (`pieces`).
    """
    total = sum(sizes)
    if len(sizes) >= FEWEST and max(sizes) <= LONGEST * total:
        return None
    return max(1, total // FEWEST)


def pieces(document: bytes, most: int | None) -> Iterator[bytes]:
    """Cut a document at line ends into parts of about equal size, of at most ``most`` bytes if the lines allow it.

    It uses the minimum number of parts, or fewer if lines are longer than a part. No part is empty.
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
