"""Real text as a task: files of any kind, in bytes or in a tokenizer's tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from toeplens.ground import InputError, shown
from toeplens.tasks.base import at_least
from toeplens.tasks.language.corpus import Corpus
from toeplens.tasks.language.documents import Source
from toeplens.tasks.language.store import corpus_of
from toeplens.tasks.language.task import LanguageTask
from toeplens.tasks.language.tokens import BYTES, tokens_of


@dataclass(frozen=True, kw_only=True)
class Language(LanguageTask):
    """Which token of a text comes next? Text from files, at every token of windows, documents split for good.

    A document is a file, or a row of a file of JSON lines or of Parquet; exact copies count once, empty ones not at
    all. In the order of their hashes documents go to the test split until it has a tenth of all bytes, then to the
    validation split until it has a twentieth, and then to the training split. Where there are fewer than 64 documents,
    or one holds more than a tenth of all bytes, those that hold more than a 64th of them are first cut at ends of lines
    into parts that are documents then.

    Arguments
        text       files and folders: plain files of any kind, ``.jsonl`` and ``.parquet``; of a folder all that is in
                   it by name, hidden files left out. None: the standard library of this Python, without its tests
        column     what holds the text in ``.jsonl`` and ``.parquet``
        tokenizer  ``bytes``, and 0 stands between documents; or a Hugging Face tokenizer on this machine: a folder, a
                   tokenizer.json, or the name of one that was downloaded
        length     tokens of a window
        sha256     hash of documents and tokenizer: text that has another is refused. A run's spec has it filled in

    Longer texts are longer windows of the same documents. Text is read when it is first asked for, and its tokens are
    kept (`toeplens.tasks.language.store`); with ``sha256`` it is looked at once a process.
    """

    name = "language"

    text: Sequence[str] = ()
    column: str = "text"
    tokenizer: str = BYTES
    sha256: str | None = None

    def __post_init__(self) -> None:
        at_least(1, length=self.length)
        object.__setattr__(self, "text", tuple(self.text))  # a list in files of settings
        if not all(each and "\0" not in each for each in self.text):
            raise InputError(f"text: {shown(list(self.text))} was given; each must be the name of a file or a folder.")
        if self.sha256 is not None and re.fullmatch("[0-9a-f]{64}", self.sha256) is None:
            raise InputError(f"sha256: {shown(self.sha256)} was given; it must be 64 digits of 0-9 and a-f.")

    @property
    def vocab_size(self) -> int:
        return tokens_of(self.tokenizer).vocab_size

    def corpus(self) -> Corpus:
        source = Source.of(self.text, self.column)
        if self.sha256 is None:
            return corpus_of(source, self.tokenizer)
        return _unchanged(source, self.tokenizer, tokens_of(self.tokenizer).identity, self.sha256)

    def pinned(self) -> dict[str, Any]:
        """The hash of the text, so that other text is refused, and where it lies, whatever folder is worked in."""
        places = {"text": [os.path.realpath(each) for each in self.text]} if self.text else {}
        return {"sha256": self.sha256 or self.corpus().sha256, **places}

    @property
    def read_from(self) -> tuple[Any, ...]:
        """Where the text comes from, whatever it is by now."""
        return tuple(map(os.path.realpath, self.text)), self.column, self.tokenizer


@lru_cache(maxsize=16)
def _unchanged(source: Source, tokenizer: str, identity: str, recorded: str) -> Corpus:
    found = corpus_of(source, tokenizer)
    if found.sha256 != recorded:
        what = "has" if tokenizer == BYTES else "or its tokenizer has"
        raise InputError(f"text: {source} {what} changed: sha256 {recorded} was recorded, it is now {found.sha256}.")
    return found
