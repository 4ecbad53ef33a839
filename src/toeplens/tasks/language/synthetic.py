"""What languages that are made up share: documents from their options alone, kept in memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from hashlib import sha256

import numpy as np
from jaxtyping import Float, Int

from toeplens.ground import InputError
from toeplens.ground.machine import must_fit
from toeplens.tasks.base import Split, Texts, at_least, whole
from toeplens.tasks.language.corpus import SPLITS, Corpus, Part, assign, dtype_of
from toeplens.tasks.language.task import LanguageTask

SEPARATOR = 0
_AT_ONCE, _TOKENS = 2**10, 2**24  # documents that are made at once, and their tokens
_MOST_WORDS = 2**13


@dataclass(frozen=True, kw_only=True)
class SyntheticLanguage(LanguageTask):
    """A language whose documents come from its options: so many, of so many tokens each, with a known entropy.

    Token 0 stands between documents. They are split as those of any text, see `toeplens.tasks.language.Language`; a
    token counts as a byte. More documents begin with those of fewer.
    """

    documents: int = 2048
    document: int = 1024
    text_seed: int = 0

    def corpus(self) -> Corpus:
        return _made(replace(self, length=1))

    @abstractmethod
    def write(self) -> Callable[[np.random.Generator, int], Texts]:
        """What writes documents, a row each, of ids from 1 on; what is the same for all is drawn before."""

    @abstractmethod
    def entropy(self) -> float:
        """Nats a token of a document: what a model that knows the language loses, or less."""

    def rng(self, *place: int) -> np.random.Generator:
        """Chance for one of the things that are drawn from the text's seed."""
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(self.text_seed, spawn_key=place)))

    def check_documents(self, least: int) -> None:
        """Raise an `InputError` unless the documents can be made, of at least so many tokens each."""
        at_least(1, length=self.length, documents=self.documents)
        at_least(least, document=self.document)
        at_least(0, text_seed=self.text_seed)
        must_fit("documents: they need", 2 * dtype_of(self.vocab_size).itemsize * self.documents * (self.document + 1))


def zipf(words: int) -> Float[np.ndarray, "words"]:
    """Shares that fall with the rank, by Zipf's law."""
    shares = 1 / np.arange(1, words + 1)
    return shares / shares.sum()


def entropy_of(shares: Float[np.ndarray, "n"]) -> float:
    """Of a distribution, in nats."""
    kept = shares[shares > 0]
    return float(-(kept * np.log(kept)).sum())


def drawn(shares: Float[np.ndarray, "n"], chances: Float[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
    """Places in a distribution, from numbers that are uniform in 0..1."""
    return np.minimum(np.searchsorted(np.cumsum(shares), chances, side="right"), len(shares) - 1)


def rates(most: float = 1.0, **values: float) -> None:
    """Raise an `InputError` for the first field that is not from 0 to ``most``."""
    for field, value in values.items():
        if isinstance(value, bool) or not 0 <= value <= most:
            raise InputError(f"{field}: {value!r} was given; it must be from 0 to {most:g}.")


def words_within(**values: int) -> None:
    """Raise an `InputError` for the first field that is no number of words that a language may have."""
    for field, value in values.items():
        whole(**{field: value})
        if not 2 <= value <= _MOST_WORDS:
            raise InputError(f"{field}: {value} was given; it must be from 2 to {_MOST_WORDS}.")


@lru_cache(maxsize=4)
def _made(task: SyntheticLanguage) -> Corpus:
    kept = dtype_of(task.vocab_size)
    rows = np.full((task.documents, task.document + 1), SEPARATOR, dtype=kept)
    write = task.write()
    size = min(_AT_ONCE, max(1, _TOKENS // task.document))
    for block, start in enumerate(range(0, task.documents, size)):
        rows[start : start + size, :-1] = write(task.rng(1, block), size)[: task.documents - start]
    first = {sha256(row.tobytes()).digest(): place for place, row in reversed(list(enumerate(rows)))}
    digests = sorted(first, key=first.__getitem__)
    rows = rows[[first[digest] for digest in digests]]
    splits = assign(digests, [task.document] * len(digests))
    parts: dict[Split, Part] = {split: _part(rows[splits == place]) for place, split in enumerate(SPLITS)}
    mark = sha256(task.name.encode())
    for digest in digests:
        mark.update(digest)
    options = {each.name: getattr(task, each.name) for each in fields(task) if each.name != "length"}
    about = {
        "source": task.name,
        "options": options,
        "documents": {split: len(part.bytes) for split, part in parts.items()},
        "bytes": {split: int(part.bytes.sum()) for split, part in parts.items()},
        "tokens": {split: len(part.tokens) for split, part in parts.items()},
    }
    counts = np.bincount(parts["train"].tokens, minlength=task.vocab_size)
    return Corpus(mark.hexdigest(), task.vocab_size, SEPARATOR, False, about, parts, counts)


def _part(rows: Int[np.ndarray, "D n1"]) -> Part:
    many, size = rows.shape
    return Part(rows.ravel(), size * np.arange(many + 1), np.full(many, size - 1))
