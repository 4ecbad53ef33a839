"""A corpus: tokenised documents in three splits, and its cache.

Documents are read twice: once to hash and split them, once to write their tokens. A cached corpus is a folder named by
its hash, in ``toeplens/corpora`` of ``$TOEPLENS_CACHE``, or else of ``$XDG_CACHE_HOME``, or else of ``~/.cache``. It is
complete if it has a record, which is written last. A link named by the names, sizes and times of the text's files leads
to it, so unchanged text is not read again. If the cache is not writable, corpora live as long as the process.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Int, Shaped

from toeplens.ground import EnvironmentFailure, InputError, checked, choose, read_json, write_json
from toeplens.ground.files import environment_failure
from toeplens.ground.outputs import LOCK, locked
from toeplens.ground.records import Count, Text, Truth
from toeplens.tasks.base import Split
from toeplens.tasks.text import AT_ONCE, Source, Tokenizer, pieces, tokenizer_of

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
        return self.parts[split].starts

    def bytes_of(self, split: Split) -> Int[np.ndarray, "D"]:
        """Size of each document in bytes."""
        return self.parts[split].bytes

    def frequent(self, count: int) -> Int[np.ndarray, "m"]:
        """The most frequent tokens of the training split, at most ``count``, without the separator.

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


def amounts(parts: Mapping[Split, Part]) -> dict[str, dict[Split, int]]:
    """The numbers of documents, bytes and tokens of each split."""
    return {
        "documents": {split: len(part.bytes) for split, part in parts.items()},
        "bytes": {split: int(part.bytes.sum()) for split, part in parts.items()},
        "tokens": {split: int(part.starts[-1]) for split, part in parts.items()},
    }


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
    64th of all bytes are cut at line ends (`toeplens.tasks.text.pieces`).
    """
    total = sum(sizes)
    if len(sizes) >= FEWEST and max(sizes) <= LONGEST * total:
        return None
    return max(1, total // FEWEST)


# ---- making a corpus -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scan:
    """The result of the first pass.

    sha256  hash of the hashes of all different documents, in order, and of the tokenizer
    splits  the split of each document, by its hash, as an index in `SPLITS`; of its parts if documents are cut
    most    bytes above which documents are cut; None if none is
    """

    sha256: str
    splits: dict[bytes, int]
    most: int | None


def scan(source: Source, tokenizer: Tokenizer) -> Scan:
    """First pass: hashes and sizes of all documents. Duplicates of a document count once."""
    sizes = {_digest(document): len(document) for document in source.documents()}
    if not sizes:
        raise InputError(f"text: {source} contains no text.")
    mark = sha256(tokenizer.identity.encode())
    for digest in sizes:
        mark.update(digest)
    most = piece_size(list(sizes.values()))
    if most is not None:
        sizes = {_digest(piece): len(piece) for document in source.documents() for piece in pieces(document, most)}
    splits = assign(list(sizes), list(sizes.values())).tolist()
    return Scan(mark.hexdigest(), dict(zip(sizes, splits, strict=True)), most)


def write(source: Source, tokenizer: Tokenizer, found: Scan, directory: Path) -> None:
    """Second pass: tokenise all documents and write them: tokens of each split as a plain array, numbers as npz.

    Raises `InputError` if the documents have changed since the first pass.
    """
    kept = dtype_of(tokenizer.vocab_size)
    end = np.array([tokenizer.separator], dtype=kept).tobytes()
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    tokens, sizes = ([array("q") for _ in SPLITS] for _ in range(2))  # of each document
    with ExitStack() as stack:
        streams = [stack.enter_context((directory / f"{split}.bin").open("wb")) for split in SPLITS]
        for splits, documents in _batches(source, found):
            for split, document, encoded in zip(splits, documents, tokenizer.encode(documents), strict=True):
                streams[split].write(encoded.astype(kept).tobytes() + end)
                tokens[split].append(len(encoded))
                sizes[split].append(len(document))
                if SPLITS[split] == "train":
                    np.add.at(counts, encoded, 1)
                    counts[tokenizer.separator] += 1
    numbers: dict[str, Any] = {}
    for split, lengths, each in zip(SPLITS, tokens, sizes, strict=True):
        numbers[f"{split}-bytes"] = np.array(each, np.int64)
        numbers[f"{split}-starts"] = np.concatenate(([0], np.cumsum(np.array(lengths, np.int64) + 1)))
    np.savez(directory / _NUMBERS, counts=counts, **numbers)
    for path in directory.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


def _batches(source: Source, found: Scan) -> Iterator[tuple[list[int], list[bytes]]]:
    """All distinct documents, or parts of them, with their splits, in batches of some megabytes."""
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
                raise InputError(f"text: {source} changed during reading.")
            if size >= AT_ONCE:
                yield splits, documents
                splits, documents, size = [], [], 0
    if left:
        raise InputError(f"text: {source} changed during reading.")
    yield splits, documents


def _digest(document: bytes) -> bytes:
    return sha256(document).digest()


# ---- the cache -------------------------------------------------------------------------------------------------------

_FORM = 2  # version of the files and of the rules that cut and split; increase it on every change
_RECORD, _NUMBERS = "corpus.json", "numbers.npz"
_SETTLED = 2 * 10**9  # nanoseconds after which a file change certainly changes its time


class _Absent(Exception):
    """The corpus is missing or incomplete."""


@dataclass(frozen=True)
class _Record:
    sha256: Text
    vocab_size: Count
    separator: Count
    raw: Truth
    cut: Truth


def corpus_of(source: Source, tokenizer: str) -> Corpus:
    """The corpus of these documents and tokens; created if it is not cached.

    Safe for concurrent processes. Raises `InputError` for unreadable text.
    """
    tokens, started = tokenizer_of(tokenizer), time.time_ns()
    state, changed = source.state()
    link = sha256(json.dumps([_FORM, source.text, source.column, tokens.identity, state]).encode()).hexdigest()
    directory = _cached(link)
    if directory is None:
        found = scan(source, tokens)
        directory = _cached(f"{found.sha256}-{_FORM}") or _made(source, tokens, found)
        if changed + _SETTLED < started:
            with suppress(OSError):
                (directory.parent / link).symlink_to(directory.name)
    corpus = _opened(directory)
    return replace(corpus, about={**source.about, "tokenizer": tokenizer, **corpus.about})


def _places() -> Iterator[Path]:
    """Cache directories: the cache, and a temporary one if it is not writable."""
    given = os.environ.get("TOEPLENS_CACHE") or os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # no home directory
        yield (Path(given) if given else Path.home() / ".cache") / "toeplens" / "corpora"
    if _temporary.cache_info().currsize:
        yield Path(_temporary().name)


@lru_cache(maxsize=1)
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="toeplens-corpora-")


def _cached(name: str) -> Path | None:
    """The directory of a complete corpus with this name or link."""
    for place in _places():
        directory = (place / name).resolve()
        with suppress(_Absent):
            _opened(directory)
            return directory
    return None


def _made(source: Source, tokens: Tokenizer, found: Scan) -> Path:
    """The directory of a new corpus, in the first place that is writable."""

    def make(directory: Path) -> Path:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with locked(directory, "text", until=lambda: False):
                with suppress(_Absent):  # another process was faster
                    _opened(directory)
                    return directory
                try:
                    _clear(directory)
                    write(source, tokens, found, directory)
                    facts = {"sha256": found.sha256, "cut": found.most is not None, "raw": tokens.words is None}
                    facts |= {"vocab_size": tokens.vocab_size, "separator": tokens.separator}
                    write_json(directory / _RECORD, facts)
                except BaseException:
                    _clear(directory)
                    raise
        except OSError as error:
            raise environment_failure(error, directory) from None
        return directory

    name = f"{found.sha256}-{_FORM}"
    for place in _places():
        with suppress(EnvironmentFailure):
            return make(place / name)
    return make(Path(_temporary().name) / name)


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name != LOCK:
            path.unlink()


@lru_cache(maxsize=16)
def _opened(directory: Path) -> Corpus:
    """The corpus in a directory, with memory-mapped tokens."""
    try:
        record = checked(_Record, read_json(directory / _RECORD), directory / _RECORD)
        parts: dict[Split, Part] = {}
        with (directory / _NUMBERS).open("rb") as stream, np.load(stream) as numbers:
            counts = numbers["counts"]
            for split in SPLITS:
                file, starts = directory / f"{split}.bin", numbers[f"{split}-starts"]
                dtype = dtype_of(record.vocab_size)
                tokens = np.memmap(file, dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)
                if len(tokens) != starts[-1]:
                    raise _Absent
                parts[split] = Part(tokens, starts, numbers[f"{split}-bytes"])
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):  # an InputError is a ValueError
        raise _Absent from None
    about = amounts(parts) | {"cut": record.cut}
    return Corpus(record.sha256, record.vocab_size, record.separator, record.raw, about, parts, counts)
