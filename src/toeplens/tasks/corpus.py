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

from toeplens.tasks.base import Split
from toeplens.tasks.text import BYTES_PER_CALL, TextSource, Tokenizer, cut_text, load_tokenizer
from toeplens.utils import EnvironmentFailure, InputError, choose, read_json, validate_as, write_json
from toeplens.utils.files import cache_directory, environment_failure
from toeplens.utils.outputs import LOCK, lock_directory
from toeplens.utils.records import NonNegativeInt, StrictBool, StrictStr

SPLITS: tuple[Split, ...] = get_args(Split)
SHARES: dict[Split, float] = {"test": 0.1, "validation": 0.05}  # minimum shares of all bytes; the rest is for training
MIN_DOCUMENTS = 64  # minimum number of documents
MAX_DOCUMENT_SHARE = 0.1  # maximum share of all bytes in one document
_LETTERS = np.frombuffer(bytes(byte for byte in range(128) if chr(byte).isalpha()), dtype=np.uint8)


@dataclass(frozen=True, eq=False)
class CorpusSplit:
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
    is_bytes    whether tokens are bytes
    metadata    origin and size, for JSON
    splits      the splits
    counts      [vocab_size] frequency of each token in the training split, including separators
    """

    sha256: str
    vocab_size: int
    separator: int
    is_bytes: bool
    metadata: dict[str, Any]
    splits: Mapping[Split, CorpusSplit]
    counts: Int[np.ndarray, "vocab_size"]

    def stream(self, split: Split) -> Shaped[np.ndarray, "T"]:
        """All documents of a split, concatenated, with a separator after each; unsigned or int32."""
        return self.splits[choose("split", split, SPLITS)].tokens

    def frequent_tokens(self, count: int) -> Int[np.ndarray, "m"]:
        """The most frequent tokens of the training split, at most ``count``, without the separator.

        For byte tokens only letters count (a-z, A-Z), unless fewer than two of them occur. Ties are
        ordered by id; tokens that do not occur are left out.
        """
        counts = self.counts.copy()
        counts[self.separator] = 0
        if self.is_bytes and np.count_nonzero(counts[_LETTERS]) > 1:
            counts[np.setdiff1d(np.arange(len(counts)), _LETTERS)] = 0
        return np.argsort(-counts, kind="stable")[: min(max(count, 0), np.count_nonzero(counts))]


def dtype_of(vocab_size: int) -> np.dtype[Any]:
    """The smallest integer type for the tokens."""
    if vocab_size <= 2**8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16) if vocab_size <= 2**16 else np.dtype(np.int32)


def split_sizes(splits: Mapping[Split, CorpusSplit]) -> dict[str, dict[Split, int]]:
    """The numbers of documents, bytes and tokens of each split."""
    return {
        "documents": {split: len(part.bytes) for split, part in splits.items()},
        "bytes": {split: int(part.bytes.sum()) for split, part in splits.items()},
        "tokens": {split: int(part.starts[-1]) for split, part in splits.items()},
    }


def assign_splits(digests: Sequence[bytes], sizes: Sequence[int]) -> Int[np.ndarray, "D"]:
    """The split of each document, as its index in `SPLITS`.

    In the order of their hashes, documents go to the test split until it has a tenth of all bytes, then to the
    validation split until it has a twentieth, and then to the training split. With at least three documents no split is
    empty. Of two documents the second is for testing; a single document is for training.

    Arguments
        digests  a hash of each document, all different
        sizes    size of each document in bytes
    """
    order, total, count = sorted(range(len(digests)), key=digests.__getitem__), sum(sizes), len(digests)
    assigned = np.full(count, SPLITS.index("train"))
    position = 0
    targets: tuple[tuple[Split, int], ...] = (("test", max(count - 2, min(count - 1, 1))), ("validation", count - 1))
    for split, last in targets:
        size = 0
        while position < last and size < SHARES[split] * total:
            assigned[order[position]] = SPLITS.index(split)
            size += sizes[order[position]]
            position += 1
    return assigned


def max_document_bytes(sizes: Sequence[int]) -> int | None:
    """Maximum bytes of a document, if long documents must be cut; otherwise None.

    If there are fewer than 64 documents, or one has more than a tenth of all bytes, documents with more than a
    64th of all bytes are cut at line ends (`toeplens.tasks.text.cut_text`).
    """
    total = sum(sizes)
    if len(sizes) >= MIN_DOCUMENTS and max(sizes) <= MAX_DOCUMENT_SHARE * total:
        return None
    return max(1, total // MIN_DOCUMENTS)


# ---- making a corpus -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorpusScan:
    """The result of the first pass.

    sha256  hash of the hashes of all different documents, in order, and of the tokenizer
    splits  the split of each document, by its hash, as an index in `SPLITS`; of its parts if documents are cut
    limit   bytes above which documents are cut; None if none is
    """

    sha256: str
    splits: dict[bytes, int]
    limit: int | None


def scan_documents(source: TextSource, tokenizer: Tokenizer) -> CorpusScan:
    """First pass: hashes and sizes of all documents. Duplicates of a document count once."""
    sizes = {_digest(document): len(document) for document in source.documents()}
    if not sizes:
        raise InputError(f"text: {source} contains no text.")
    hasher = sha256(tokenizer.identity.encode())
    for digest in sizes:
        hasher.update(digest)
    limit = max_document_bytes(list(sizes.values()))
    if limit is not None:
        sizes = {_digest(piece): len(piece) for document in source.documents() for piece in cut_text(document, limit)}
    splits = assign_splits(list(sizes), list(sizes.values())).tolist()
    return CorpusScan(hasher.hexdigest(), dict(zip(sizes, splits, strict=True)), limit)


def write_corpus(source: TextSource, tokenizer: Tokenizer, scan: CorpusScan, directory: Path) -> None:
    """Second pass: tokenise all documents and write them: tokens of each split as a plain array, numbers as npz.

    Raises `InputError` if the documents have changed since the first pass.
    """
    dtype = dtype_of(tokenizer.vocab_size)
    end = np.array([tokenizer.separator], dtype=dtype).tobytes()
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    tokens, sizes = ([array("q") for _ in SPLITS] for _ in range(2))  # of each document
    with ExitStack() as stack:
        streams = [stack.enter_context((directory / f"{split}.bin").open("wb")) for split in SPLITS]
        for splits, documents in _batches(source, scan):
            for split, document, encoded in zip(splits, documents, tokenizer.encode(documents), strict=True):
                streams[split].write(encoded.astype(dtype).tobytes() + end)
                tokens[split].append(len(encoded))
                sizes[split].append(len(document))
                if SPLITS[split] == "train":
                    np.add.at(counts, encoded, 1)
                    counts[tokenizer.separator] += 1
    numbers: dict[str, Any] = {}
    for split, lengths, byte_sizes in zip(SPLITS, tokens, sizes, strict=True):
        numbers[f"{split}-bytes"] = np.array(byte_sizes, np.int64)
        numbers[f"{split}-starts"] = np.concatenate(([0], np.cumsum(np.array(lengths, np.int64) + 1)))
    np.savez(directory / _NUMBERS, counts=counts, **numbers)
    for path in directory.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


def _batches(source: TextSource, scan: CorpusScan) -> Iterator[tuple[list[int], list[bytes]]]:
    """All distinct documents, or parts of them, with their splits, in batches of some megabytes."""
    remaining = dict(scan.splits)
    splits, documents, size = [], [], 0
    for document in source.documents():
        for piece in cut_text(document, scan.limit):
            digest = _digest(piece)
            if digest in remaining:
                splits.append(remaining.pop(digest))
                documents.append(piece)
                size += len(piece)
            elif digest not in scan.splits:
                raise InputError(f"text: {source} changed during reading.")
            if size >= BYTES_PER_CALL:
                yield splits, documents
                splits, documents, size = [], [], 0
    if remaining:
        raise InputError(f"text: {source} changed during reading.")
    yield splits, documents


def _digest(document: bytes) -> bytes:
    return sha256(document).digest()


# ---- the cache -------------------------------------------------------------------------------------------------------

_VERSION = 2  # version of the files and of the rules that cut and split; increase it on every change
_RECORD, _NUMBERS = "corpus.json", "numbers.npz"
_SETTLE_TIME = 2 * 10**9  # nanoseconds after which a file change certainly changes its time


class _CorpusMissing(Exception):
    """The corpus is missing or incomplete."""


@dataclass(frozen=True)
class _CorpusRecord:
    sha256: StrictStr
    vocab_size: NonNegativeInt
    separator: NonNegativeInt
    raw: StrictBool
    cut: StrictBool


def load_corpus(source: TextSource, tokenizer: str) -> Corpus:
    """The corpus of these documents and tokens; created if it is not cached.

    Safe for concurrent processes. Raises `InputError` for unreadable text.
    """
    tokens, started = load_tokenizer(tokenizer), time.time_ns()
    state, last_change = source.state()
    link = sha256(json.dumps([_VERSION, source.text, source.column, tokens.identity, state]).encode()).hexdigest()
    directory = _cached_directory(link)
    if directory is None:
        corpus_scan = scan_documents(source, tokens)
        directory = _cached_directory(f"{corpus_scan.sha256}-{_VERSION}") or _create_corpus(source, tokens, corpus_scan)
        if last_change + _SETTLE_TIME < started:
            with suppress(OSError):
                (directory.parent / link).symlink_to(directory.name)
    corpus = _open_corpus(directory)
    return replace(corpus, metadata={**source.metadata, "tokenizer": tokenizer, **corpus.metadata})


def _cache_directories() -> Iterator[Path]:
    """Cache directories: the cache, and a temporary one if it is not writable."""
    with suppress(RuntimeError):  # no home directory
        yield cache_directory("corpora")
    if _temporary_cache.cache_info().currsize:
        yield Path(_temporary_cache().name)


@lru_cache(maxsize=1)
def _temporary_cache() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="toeplens-corpora-")


def _cached_directory(name: str) -> Path | None:
    """The directory of a complete corpus with this name or link."""
    for parent in _cache_directories():
        directory = (parent / name).resolve()
        with suppress(_CorpusMissing):
            _open_corpus(directory)
            return directory
    return None


def _create_corpus(source: TextSource, tokens: Tokenizer, scan: CorpusScan) -> Path:
    """The directory of a new corpus, in the first place that is writable."""

    def make(directory: Path) -> Path:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with lock_directory(directory, "text", until=lambda: False):
                with suppress(_CorpusMissing):  # another process was faster
                    _open_corpus(directory)
                    return directory
                try:
                    _clear(directory)
                    write_corpus(source, tokens, scan, directory)
                    record = {"sha256": scan.sha256, "cut": scan.limit is not None, "raw": tokens.hf_tokenizer is None}
                    record |= {"vocab_size": tokens.vocab_size, "separator": tokens.separator}
                    write_json(directory / _RECORD, record)
                except BaseException:
                    _clear(directory)
                    raise
        except OSError as error:
            raise environment_failure(error, directory) from None
        return directory

    name = f"{scan.sha256}-{_VERSION}"
    for parent in _cache_directories():
        with suppress(EnvironmentFailure):
            return make(parent / name)
    return make(Path(_temporary_cache().name) / name)


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name != LOCK:
            path.unlink()


@lru_cache(maxsize=16)
def _open_corpus(directory: Path) -> Corpus:
    """The corpus in a directory, with memory-mapped tokens."""
    try:
        record = validate_as(_CorpusRecord, read_json(directory / _RECORD), directory / _RECORD)
        splits: dict[Split, CorpusSplit] = {}
        with (directory / _NUMBERS).open("rb") as stream, np.load(stream) as numbers:
            counts = numbers["counts"]
            for split in SPLITS:
                file, starts = directory / f"{split}.bin", numbers[f"{split}-starts"]
                dtype = dtype_of(record.vocab_size)
                tokens = np.memmap(file, dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)
                if len(tokens) != starts[-1]:
                    raise _CorpusMissing
                splits[split] = CorpusSplit(tokens, starts, numbers[f"{split}-bytes"])
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):  # an InputError is a ValueError
        raise _CorpusMissing from None
    metadata = split_sizes(splits) | {"cut": record.cut}
    return Corpus(record.sha256, record.vocab_size, record.separator, record.raw, metadata, splits, counts)
