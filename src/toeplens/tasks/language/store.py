"""The corpus cache, addressed by content; a corpus is complete or absent.

A corpus is a folder named by its hash, in ``toeplens/corpora`` of ``$TOEPLENS_CACHE``, or else of
``$XDG_CACHE_HOME``, or else of ``~/.cache``. An index file maps the names, sizes and times of the text's files to
their corpus, so unchanged text is not read again. If the cache is not writable, corpora live as long as the process.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int, Shaped

from toeplens.ground import EnvironmentFailure, InputError, checked, read_json, write_json
from toeplens.ground.files import environment_failure, is_leftover, read_bytes
from toeplens.ground.reading import Count, Text, Truth
from toeplens.tasks.base import Split
from toeplens.tasks.language.corpus import SPLITS, Corpus, Part, assign, dtype_of, piece_size, pieces
from toeplens.tasks.language.documents import Source, looked_at
from toeplens.tasks.language.tokens import AT_ONCE, Tokens, tokens_of


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


def scan(source: Source, tokens: Tokens) -> Scan:
    """First pass: hashes and sizes of all documents. Duplicates of a document count once."""
    sizes = {_digest(document): len(document) for document in source.documents()}
    if not sizes:
        raise InputError(f"text: {source} contains no text.")
    mark = sha256(tokens.identity.encode())
    for digest in sizes:
        mark.update(digest)
    most = piece_size(list(sizes.values()))
    if most is not None:
        sizes = {_digest(piece): len(piece) for document in source.documents() for piece in pieces(document, most)}
    splits = assign(list(sizes), list(sizes.values())).tolist()
    return Scan(mark.hexdigest(), dict(zip(sizes, splits, strict=True)), most)


def write(source: Source, tokens: Tokens, found: Scan, directory: Path) -> dict[str, Any]:
    """Second pass: tokenise all documents and write them; returns the amounts by split.

    The directory then has, for each split, the tokens as a plain array, the document starts and sizes in
    bytes; and token counts of the training split. Raises `InputError` if the documents have changed since the first
    pass.
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


@dataclass
class _Writer:
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


_FORM = 1  # version of the files and of the rules that cut and split; increase it on every change
_RECORD = "corpus.json"
_SETTLED = 2 * 10**9  # nanoseconds after which a file change certainly changes its time
_LEFT = 7 * 86_400  # seconds after which leftovers of a killed process are removed


class _Absent(Exception):
    """The corpus is missing or incomplete."""


@dataclass(frozen=True)
class _Kept:
    sha256: Text
    vocab_size: Count
    separator: Count
    raw: Truth
    documents: dict[Split, Count]
    bytes: dict[Split, Count]
    tokens: dict[Split, Count]
    cut: Truth


@dataclass(frozen=True)
class _Remembered:
    """An index entry: the corpus of the files with this fingerprint."""

    mark: Text
    corpus: Text


def corpus_of(source: Source, tokenizer: str) -> Corpus:
    """The corpus of these documents and tokens; created if it is not cached.

    Safe for concurrent processes. Raises `InputError` for unreadable text.
    """
    tokens = tokens_of(tokenizer)
    started = time.time_ns()
    mark, changed = looked_at(source.files())
    memo = sha256(json.dumps([source.text, source.column, tokens.identity]).encode()).hexdigest() + ".json"
    about = {**source.about, "tokenizer": tokenizer}
    for place in _places():
        with suppress(_Absent):
            return _told(_opened(place / _recalled(place / memo, mark)), about)
    found = scan(source, tokens)
    name = f"{found.sha256}-{_FORM}"
    place = _made(name, tokens, found, lambda directory: write(source, tokens, found, directory))
    if changed + _SETTLED < started:
        with suppress(EnvironmentFailure):
            write_json(place / memo, {"mark": mark, "corpus": name})
    return _told(_opened(place / name), about)


def _told(corpus: Corpus, about: dict[str, Any]) -> Corpus:
    return replace(corpus, about={**about, **corpus.about})


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


def _recalled(memo: Path, mark: str) -> str:
    """The corpus that this file has cached for the fingerprint."""
    try:
        found = checked(_Remembered, read_json(memo), memo)
    except InputError:
        raise _Absent from None
    if found.mark != mark or Path(found.corpus).name != found.corpus:
        raise _Absent
    return found.corpus


def _made(name: str, tokens: Tokens, found: Scan, make: Callable[[Path], dict[str, Any]]) -> Path:
    """The directory of the corpus, which is created if it does not exist."""
    for place in _places():
        with suppress(_Absent):
            _opened(place / name)
            return place
    facts = {"sha256": found.sha256, "vocab_size": tokens.vocab_size, "separator": tokens.separator}

    def build(place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        _tidy(place)
        unfinished = place / f".{name}.{secrets.token_hex(4)}.tmp"
        try:
            unfinished.mkdir()
            write_json(unfinished / _RECORD, {**facts, "raw": tokens.raw, **make(unfinished)})
            _put(unfinished, place / name)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    place = next(_places(), None)
    if place is not None:
        try:
            build(place)
        except (OSError, EnvironmentFailure):
            place = None
    if place is None:
        place = Path(_temporary().name)
        try:
            build(place)
        except OSError as error:
            raise environment_failure(error, place) from None
    return place


def _put(unfinished: Path, place: Path) -> None:
    """Rename a finished corpus into place, unless another process was faster; an incomplete one is replaced."""
    try:
        unfinished.rename(place)
    except OSError:
        try:
            _opened(place)
        except _Absent:
            shutil.rmtree(place, ignore_errors=True)
            unfinished.rename(place)


def _tidy(place: Path) -> None:
    """Remove leftovers of killed processes that are over a week old."""
    for path in filter(is_leftover, place.iterdir()):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _LEFT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@lru_cache(maxsize=16)
def _opened(directory: Path) -> Corpus:
    """The corpus in a directory, with memory-mapped tokens."""
    try:
        kept = checked(_Kept, read_json(directory / _RECORD), directory / _RECORD)
        parts: dict[Split, Part] = {split: _part(directory, split, kept) for split in SPLITS}
        counts = _numbers(directory / "counts.npy", kept.vocab_size)
    except (OSError, ValueError, KeyError):  # an InputError is a ValueError
        raise _Absent from None
    about = {"documents": kept.documents, "bytes": kept.bytes, "tokens": kept.tokens, "cut": kept.cut}
    return Corpus(kept.sha256, kept.vocab_size, kept.separator, kept.raw, about, parts, counts)


def _part(directory: Path, split: Split, kept: _Kept) -> Part:
    many, size = kept.tokens[split], kept.documents[split]
    starts = _numbers(directory / f"{split}-starts.npy", size + 1)
    file, dtype = directory / f"{split}.bin", dtype_of(kept.vocab_size)
    if file.stat().st_size != many * dtype.itemsize or starts[-1] != many:
        raise _Absent
    tokens: Shaped[np.ndarray, "T"] = np.memmap(file, dtype=dtype, mode="r") if many else np.empty(0, dtype=dtype)
    return Part(tokens, starts, _numbers(directory / f"{split}-bytes.npy", size))


def _numbers(file: Path, many: int) -> Int[np.ndarray, "n"]:
    found = np.load(io.BytesIO(read_bytes(file)), allow_pickle=False)
    if found.shape != (many,) or found.dtype != np.int64:
        raise _Absent
    return found
