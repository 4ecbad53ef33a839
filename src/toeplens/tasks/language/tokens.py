"""Tokenizers: bytes, or a local Hugging Face tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from jaxtyping import Shaped

from toeplens.ground import EnvironmentFailure, InputError, invalid
from toeplens.ground.errors import first_line
from toeplens.ground.files import read_bytes
from toeplens.tasks.language.corpus import pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = "bytes"
AT_ONCE = 2**22  # bytes per tokenizer call
_ROLES = ("eos_token", "bos_token", "sep_token")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_KNOWN = (  # common names of special tokens, if their roles are not declared
    *("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "<|im_end|>"),
    *("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|startoftext|>"),
    *("[SEP]", "<sep>"),
)


class Tokens(Protocol):
    """Converts documents to tokens.

    vocab_size  all ids are below it
    separator   the id between documents
    identity    equal for tokenizers that give the same tokens for the same bytes
    raw         whether a token is a byte
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def separator(self) -> int: ...
    @property
    def identity(self) -> str: ...
    @property
    def raw(self) -> bool: ...

    def encode(self, documents: Sequence[bytes]) -> list[Shaped[np.ndarray, "n"]]:
        """Each document's tokens, without special tokens."""
        ...


@dataclass(frozen=True)
class Bytes:
    """One token per byte; 0, which text does not contain, separates documents."""

    vocab_size: int = 256
    separator: int = 0
    identity: str = BYTES
    raw: bool = True

    def encode(self, documents: Sequence[bytes]) -> list[Shaped[np.ndarray, "n"]]:
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]


@dataclass(frozen=True, eq=False)
class Words:
    """The tokens of a Hugging Face tokenizer.

    Invalid UTF-8 is replaced by U+FFFD. Special tokens that occur in the text are encoded as plain text. Documents
    of more than 4 MiB are tokenised in parts that end at line ends.
    """

    tokenizer: Tokenizer
    vocab_size: int
    separator: int
    identity: str
    raw: bool = False

    def encode(self, documents: Sequence[bytes]) -> list[Shaped[np.ndarray, "n"]]:
        parts = [list(pieces(document, AT_ONCE)) for document in documents]
        texts = [part.decode("utf-8", "replace") for each in parts for part in each]
        encoded = iter(self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [np.concatenate([np.array(next(encoded).ids, dtype=np.int64) for _ in each]) for each in parts]


def tokens_of(name: str) -> Tokens:
    """The tokenizer with this name: ``bytes``, or a Hugging Face tokenizer.

    ``name`` is a folder with a tokenizer.json, such a file, or a tokenizer in the local cache of
    huggingface_hub. Nothing is downloaded, and no code of a tokenizer is executed. Raises `InputError` if there is
    none, and `EnvironmentFailure` if tokenizers is not installed.
    """
    if name == BYTES:
        return Bytes()
    file = _file_of(name)
    try:
        facts = file.stat()
    except OSError:
        raise _missing(name) from None
    return _words(name, file, facts.st_mtime_ns, facts.st_size)


def _file_of(name: str) -> Path:
    path = Path(name)
    try:
        if path.is_dir():
            path = path / "tokenizer.json"
        if path.exists():
            return Path(os.path.abspath(path))
    except (OSError, ValueError):
        raise _missing(name) from None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise _missing(name) from None
    try:
        found = try_to_load_from_cache(name, "tokenizer.json")
    except Exception:  # invalid name
        found = None
    if not isinstance(found, str):
        raise _missing(name)
    return Path(found)


def _missing(name: str) -> InputError:
    return invalid(
        "tokenizer",
        "be 'bytes', a tokenizer.json or its folder, or a downloaded tokenizer (run: hf download NAME tokenizer.json "
        "tokenizer_config.json)",
        name,
    )


@lru_cache(maxsize=8)
def _words(name: str, file: Path, changed: int, size: int) -> Words:
    """The tokenizer in a file; the last two arguments invalidate the cache when it changes."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise EnvironmentFailure("tokenizers is not installed. Run: pip install 'toeplens[hf]'.") from error
    try:
        content = read_bytes(file)
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # any invalid file
        why = first_line(error, "damaged")
        raise InputError(f"tokenizer: {file} is not a valid tokenizer ({why}).") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    ids = tokenizer.get_vocab(with_added_tokens=True)
    separator = next((ids[token] for token in _between(file, tokenizer) if token in ids), None)
    if separator is None:
        raise invalid("tokenizer", "have an end, beginning or separator token", name)
    identity = sha256(content).hexdigest()
    return Words(tokenizer, 1 + max(ids.values()), separator, f"{identity}, {separator}")


def _between(file: Path, tokenizer: Tokenizer) -> Iterable[str]:
    """Candidates for the separator, the best first."""
    told: dict[str, Any] = {}
    for settings in (file.parent / each for each in _SETTINGS):
        try:
            content = json.loads(read_bytes(settings))
        except (OSError, ValueError, RecursionError):
            continue
        told = {**(content if isinstance(content, dict) else {}), **told}
    for role in _ROLES:
        token = told.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            yield token
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    yield from (token for token in _KNOWN if token in special)
