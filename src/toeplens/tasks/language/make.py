"""How a corpus is made, in two passes: which documents there are, then their tokens; some megabytes at a time."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from toeplens.ground import InputError
from toeplens.tasks.language.corpus import SPLITS, assign, dtype_of, piece_size, pieces
from toeplens.tasks.language.documents import Source
from toeplens.tasks.language.tokens import AT_ONCE, Tokens


@dataclass(frozen=True)
class Scan:
    """What the first pass finds.

    sha256  of the hashes of all different documents in order, and of what makes tokens of them
    splits  the split of each document, by its hash, as a place in `SPLITS`; of its parts if documents are cut
    most    bytes above which documents are cut; None if none is
    """

    sha256: str
    splits: dict[bytes, int]
    most: int | None


def scan(source: Source, tokens: Tokens) -> Scan:
    """Read all documents once: their hashes and sizes. Exact copies of a document count once."""
    sizes = {_digest(document): len(document) for document in source.documents()}
    if not sizes:
        raise InputError(f"text: {source} holds no text.")
    mark = sha256(tokens.identity.encode())
    for digest in sizes:
        mark.update(digest)
    most = piece_size(list(sizes.values()))
    if most is not None:
        sizes = {_digest(piece): len(piece) for document in source.documents() for piece in pieces(document, most)}
    splits = assign(list(sizes), list(sizes.values())).tolist()
    return Scan(mark.hexdigest(), dict(zip(sizes, splits, strict=True)), most)


def write(source: Source, tokens: Tokens, found: Scan, directory: Path) -> dict[str, Any]:
    """Read all documents again and write their tokens; returns how much there is, by split.

    In the directory are then, of each split, its tokens as a plain array, where each document begins and how many
    bytes it has; and how often each token is in the training split. Raises `InputError` if the documents are no longer
    those that were found.
    """
    kept = dtype_of(tokens.vocab_size)
    counts = np.zeros(tokens.vocab_size, dtype=np.int64)
    writers = [_Writer((directory / f"{split}.bin").open("wb")) for split in SPLITS]
    try:
        for splits, documents in _batches(source, found):
            for split, document, encoded in zip(splits, documents, tokens.encode(documents), strict=True):
                writers[split].add(encoded.astype(kept), tokens.separator, len(document))
                if SPLITS[split] == "train":
                    np.add.at(counts, encoded, 1)
                    counts[tokens.separator] += 1
    finally:
        for writer in writers:
            writer.close()
    for split, writer in zip(SPLITS, writers, strict=True):
        _save(directory / f"{split}-starts.npy", np.array(writer.starts, dtype=np.int64))
        _save(directory / f"{split}-bytes.npy", np.array(writer.bytes, dtype=np.int64))
    _save(directory / "counts.npy", counts)
    each = dict(zip(SPLITS, writers, strict=True))
    return {
        "documents": {split: len(writer.bytes) for split, writer in each.items()},
        "bytes": {split: sum(writer.bytes) for split, writer in each.items()},
        "tokens": {split: writer.starts[-1] for split, writer in each.items()},
        "cut": found.most is not None,
    }


def _batches(source: Source, found: Scan) -> Iterator[tuple[list[int], list[bytes]]]:
    """All documents, or parts of them, each where it first stands, with their splits; some megabytes at a time."""
    left = dict(found.splits)
    splits, documents, size = [], [], 0
    for document in source.documents():
        for piece in pieces(document, found.most):
            digest = _digest(piece)
            if digest in left:
                splits.append(left.pop(digest))
                documents.append(piece)
                size += len(piece)
            elif digest not in found.splits:
                raise InputError(f"text: {source} changed while it was read.")
            if size >= AT_ONCE:
                yield splits, documents
                splits, documents, size = [], [], 0
    if left:
        raise InputError(f"text: {source} changed while it was read.")
    yield splits, documents


def _digest(document: bytes) -> bytes:
    return sha256(document).digest()


@dataclass
class _Writer:
    """The file of a split's tokens as it grows."""

    stream: BinaryIO
    starts: array[int] = field(default_factory=lambda: array("q", [0]))
    bytes: array[int] = field(default_factory=lambda: array("q"))

    def add(self, tokens: np.ndarray, separator: int, size: int) -> None:
        self.stream.write(tokens.tobytes())
        self.stream.write(np.array([separator], dtype=tokens.dtype).tobytes())
        self.starts.append(self.starts[-1] + len(tokens) + 1)
        self.bytes.append(size)

    def close(self) -> None:
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()


def _save(path: Path, content: np.ndarray) -> None:
    with path.open("wb") as stream:
        np.save(stream, content, allow_pickle=False)
        stream.flush()
        os.fsync(stream.fileno())
