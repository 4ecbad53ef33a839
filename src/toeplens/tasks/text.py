"""Text for language tasks: documents from files or from Python's standard library, and their tokens."""

from __future__ import annotations

import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Shaped

from toeplens.utils import EnvironmentFailure, InputError, invalid, repr_of
from toeplens.utils.errors import first_line
from toeplens.utils.files import read_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

_SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__", "lib2to3", "idlelib", "turtledemo")
_TEST_FOLDERS = ("test", "tests", "idle_test")
_MACHINE_FILES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")  # differ between builds
_BATCH_ROWS = 256  # rows of a Parquet file per read


@dataclass(frozen=True)
class TextSource:
    """The source of the text.

    text    files and folders, as absolute paths; empty for the standard library of the running Python
    column  the text column of JSON lines and Parquet files
    """

    text: tuple[str, ...]
    column: str

    def __str__(self) -> str:
        if not self.text:
            return f"the standard library of Python {platform.python_version()}"
        return self.text[0] if len(self.text) == 1 else f"{self.text[0]} and {len(self.text) - 1} more"

    @property
    def metadata(self) -> dict[str, Any]:
        """The description of the source in a corpus record."""
        if self.text:
            return {"source": list(self.text)}
        return {"source": "the standard library of Python", "python": platform.python_version()}

    def files(self) -> list[Path]:
        """All files, sorted by name within a folder, without hidden ones. Raises `InputError` if there are none."""
        try:
            if self.text:
                found = [file for path in self.text for file in _files_of(Path(path))]
            else:
                library = Path(sysconfig.get_path("stdlib"))
                found = [file for file in _walk_files(library, _is_skipped) if file.suffix == ".py"]
        except OSError as error:
            raise _unreadable_error(error) from None
        if not found:
            raise InputError(f"text: {self} contains no files.")
        return found

    def state(self) -> tuple[str, int]:
        """A fingerprint of the files' names, sizes and times, and the time of the last change.

        The time is in nanoseconds since 1970. A file that changes during the check may keep its fingerprint, so
        anything cached under a fingerprint must be created some time later.
        """
        hasher, latest = sha256(), 0
        for file in self.files():
            try:
                stat = file.stat()
            except OSError as error:
                raise _unreadable_error(error) from None
            line = (os.fsencode(file).hex(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            hasher.update(f"{line}\n".encode())
            latest = max(latest, stat.st_mtime_ns, stat.st_ctime_ns)
        return hasher.hexdigest(), latest

    def documents(self) -> Iterator[bytes]:
        """All documents in turn: a file, or a row of JSON lines or Parquet; empty ones are skipped."""
        for file in self.files():
            try:
                yield from filter(None, documents_in(file, self.column))
            except OSError as error:
                raise _unreadable_error(error, file) from None


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        path.stat()  # raises if it does not exist
        raise invalid("text", "be a file or a folder", path)
    return _walk_files(path, lambda name: name.startswith("."))


def _is_skipped(name: str) -> bool:
    return name in _SKIPPED_FOLDERS or name in _TEST_FOLDERS or name.startswith(_MACHINE_FILES)


def _walk_files(folder: Path, is_skipped: Callable[[str], bool]) -> list[Path]:
    def fail(error: OSError) -> None:
        raise error

    files: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not is_skipped(name)]
        files += [Path(root, name) for name in names if not is_skipped(name)]
    return sorted((file for file in files if file.is_file()), key=lambda file: file.parts)


def _unreadable_error(error: OSError, path: Path | None = None) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"text: {error.filename} does not exist.")
    return InputError(f"text: {error.filename or path} cannot be read: {(error.strerror or str(error)).lower()}.")


def documents_in(file: Path, column: str) -> Iterator[bytes]:
    """The documents of a file: rows of ``column`` for JSON lines and Parquet (empty rows included), otherwise the whole
    file. Raises `InputError` for unreadable rows and rows without the column.
    """
    if file.suffix == ".jsonl":
        return _jsonl_documents(file, column)
    if file.suffix == ".parquet":
        return _parquet_documents(file, column)
    return iter((file.read_bytes(),))


def _jsonl_documents(file: Path, column: str) -> Iterator[bytes]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"text: {file}, line {number}, is not JSON ({error}).") from None
            if not isinstance(row, dict) or column not in row:
                problem = f"it has {', '.join(sorted(row))}" if isinstance(row, dict) else "it is not an object"
                raise InputError(f"column: {file}, line {number}, has no {column!r}; {problem}.")
            yield _encode_text(row[column], f"{file}, line {number},", column)


def _parquet_documents(file: Path, column: str) -> Iterator[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise InputError(f"column: {file} has no {column!r}; it has {', '.join(names)}.")
            values = (value for batch in table.iter_batches(_BATCH_ROWS, columns=[column]) for value in batch.column(0))
            for number, value in enumerate(values, 1):
                yield _encode_text(value.as_py(), f"{file}, row {number},", column)
    except pa.ArrowException as error:
        raise InputError(f"text: {file} is not a valid Parquet file ({first_line(error, 'damaged')}).") from None


def _encode_text(value: object, where: str, column: str) -> bytes:
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InputError(f"column: {where} must have text in {column!r}, got {repr_of(value)}.")
    return value.encode("utf-8", "surrogatepass")


def cut_text(document: bytes, max_bytes: int | None) -> Iterator[bytes]:
    """Cut a document at line ends into parts of about equal size, of at most ``max_bytes`` if the lines allow it.

    It uses the minimum number of parts, or fewer if lines are longer than a part. No part is empty.
    """
    count = 1 if max_bytes is None else -(-len(document) // max_bytes)
    begin = 0
    for part in range(1, count):
        end = document.rfind(b"\n", begin, part * len(document) // count) + 1
        if end > begin:
            yield document[begin:end]
            begin = end
    if begin < len(document):
        yield document[begin:]


# ---- tokens ----------------------------------------------------------------------------------------------------------

BYTES = "bytes"
BYTES_PER_CALL = 2**22  # bytes per tokenizer call
_TOKEN_ROLES = ("eos_token", "bos_token", "sep_token")
_SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_KNOWN_SEPARATORS = (  # common names of special tokens, if their roles are not declared
    *("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "<|im_end|>"),
    *("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|startoftext|>"),
    *("[SEP]", "<sep>"),
)


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Converts documents to tokens: bytes, or those of a Hugging Face tokenizer.

    Invalid UTF-8 is replaced by U+FFFD. Special tokens that occur in the text are encoded as plain text. Documents
    of more than 4 MiB are tokenised in parts that end at line ends.

    vocab_size    all ids are below it
    separator     the id between documents; 0 for bytes, which text does not contain
    identity      equal for tokenizers that give the same tokens for the same bytes
    hf_tokenizer  the Hugging Face tokenizer; None for bytes
    """

    vocab_size: int = 256
    separator: int = 0
    identity: str = BYTES
    hf_tokenizer: HuggingFaceTokenizer | None = None

    def encode(self, documents: Sequence[bytes]) -> list[Shaped[np.ndarray, "n"]]:
        """Each document's tokens, without special tokens."""
        if self.hf_tokenizer is None:
            return [np.frombuffer(document, dtype=np.uint8) for document in documents]
        parts = [list(cut_text(document, BYTES_PER_CALL)) for document in documents]
        texts = [part.decode("utf-8", "replace") for chunks in parts for part in chunks]
        encoded = iter(self.hf_tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [np.concatenate([np.array(next(encoded).ids, dtype=np.int64) for _ in chunks]) for chunks in parts]


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer with this name: ``bytes``, or a Hugging Face tokenizer.

    ``name`` is a folder with a tokenizer.json, such a file, or a tokenizer in the local cache of
    huggingface_hub. Nothing is downloaded, and no code of a tokenizer is executed. Raises `InputError` if there is
    none, and `EnvironmentFailure` if tokenizers is not installed.
    """
    if name == BYTES:
        return Tokenizer()
    file = Path(name)
    try:
        if file.is_dir():
            file /= "tokenizer.json"
        if not file.exists():
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(name, "tokenizer.json")
            file = Path(cached) if isinstance(cached, str) else file
        stat = file.stat()
    except Exception:  # an invalid name can raise anything
        requirement = (
            "be 'bytes', a tokenizer.json or its folder, or a downloaded tokenizer (run: hf download NAME "
            "tokenizer.json tokenizer_config.json)"
        )
        raise invalid("tokenizer", requirement, name) from None
    return _read_tokenizer(name, Path(os.path.abspath(file)), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _read_tokenizer(name: str, file: Path, changed: int, size: int) -> Tokenizer:
    """The tokenizer in a file; the last two arguments invalidate the cache when it changes."""
    try:
        import tokenizers
    except ImportError as error:
        raise EnvironmentFailure("tokenizers is not installed. Run: pip install 'toeplens[hf]'.") from error
    try:
        content = read_bytes(file)
        hf_tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # any invalid file
        reason = first_line(error, "damaged")
        raise InputError(f"tokenizer: {file} is not a valid tokenizer ({reason}).") from None
    hf_tokenizer.no_truncation()
    hf_tokenizer.no_padding()
    hf_tokenizer.encode_special_tokens = True
    ids = hf_tokenizer.get_vocab(with_added_tokens=True)
    separator = next((ids[token] for token in _separator_candidates(file, hf_tokenizer) if token in ids), None)
    if separator is None:
        raise invalid("tokenizer", "have an end, beginning or separator token", name)
    return Tokenizer(1 + max(ids.values()), separator, f"{sha256(content).hexdigest()}, {separator}", hf_tokenizer)


def _separator_candidates(file: Path, hf_tokenizer: HuggingFaceTokenizer) -> Iterable[str]:
    """Candidates for the separator, the best first."""
    declared: dict[str, Any] = {}
    for settings in (file.parent / name for name in _SETTINGS_FILES):
        try:
            content = json.loads(read_bytes(settings))
        except (OSError, ValueError, RecursionError):
            continue
        declared = {**(content if isinstance(content, dict) else {}), **declared}
    for role in _TOKEN_ROLES:
        token = declared.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            yield token
    special = {token.content for token in hf_tokenizer.get_added_tokens_decoder().values()}
    yield from (token for token in _KNOWN_SEPARATORS if token in special)
