"""Which documents are for training, for validation and for the test; and long documents cut into shorter ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np
from jaxtyping import Int

from toeplens.tasks.base import Split

SPLITS: tuple[Split, ...] = get_args(Split)
SHARES: dict[Split, float] = {"test": 0.1, "validation": 0.05}  # of all bytes, at least; the rest is for training
FEWEST = 64  # documents
LONGEST = 0.1  # of all bytes that one document may hold


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
