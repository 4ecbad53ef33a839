"""Languages that are made up: documents from their options alone, kept in memory; by chains, and nested."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from hashlib import sha256

import numpy as np
from jaxtyping import Float, Int

from toeplens.ground import invalid
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
            raise invalid(field, f"be from 0 to {most:g}", value)


def words_within(**values: int) -> None:
    """Raise an `InputError` for the first field that is no number of words that a language may have."""
    for field, value in values.items():
        whole(**{field: value})
        if not 2 <= value <= _MOST_WORDS:
            raise invalid(field, f"be from 2 to {_MOST_WORDS}", value)


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


_TABLE = 2**26  # pairs of a context and a word that may follow
_CHOSEN_AT_ONCE = 2**22


@dataclass(frozen=True, kw_only=True)
class MarkovLanguage(SyntheticLanguage):
    """Which word comes next? Text by a Markov chain, in which spans come again that stood there before.

    After each ``order`` words one of ``branches`` others follows, the likeliest as often as 1, the next as 1/2, 1/3 and
    so on; which these are was drawn for every context, word number r as often as 1/r. At each place outside a copy, one
    begins with chance ``copy_rate``: ``span`` tokens from a place of the document that is drawn among all from which
    as many were there; after it the chain goes on from the copy's last words. A document begins with ``order`` words
    of which all are as likely, and may end in a copy.

    Arguments
        words      how many there are
        order      words by which the next is drawn
        branches   words that may follow
        copy_rate  chance of a copy at each place
        span       tokens of a copy
        documents, document  how many there are, and tokens of each
        text_seed  of the text; the seed of a data set chooses its windows
        length     tokens of a window
    """

    name = "markov-language"

    words: int = 64
    order: int = 2
    branches: int = 6
    copy_rate: float = 0.01
    span: int = 24

    def __post_init__(self) -> None:
        words_within(words=self.words)
        at_least(1, order=self.order, branches=self.branches, span=self.span)
        rates(copy_rate=self.copy_rate)
        if self.branches > self.words:
            raise invalid("branches", f"be at most words ({self.words})", self.branches)
        highest = math.floor(math.log(_TABLE, self.words) + 1e-9) - 1
        if self.order > highest:
            raise invalid("order", f"be at most {highest} with {self.words} words", self.order)
        self.check_documents(max(self.order, self.span if self.copy_rate else 0) + 1)

    @property
    def vocab_size(self) -> int:
        return 1 + self.words

    def write(self) -> Callable[[np.random.Generator, int], Texts]:
        table, shares, contexts = self._followers(), zipf(self.branches), self.words**self.order

        def write(rng: np.random.Generator, count: int) -> Texts:
            text = np.zeros((self.document, count), dtype=np.int64)
            rows, context = np.arange(count), np.zeros(count, dtype=np.int64)
            left, source = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
            for step in range(self.document):
                chances = rng.random((3, count))
                if step < self.order:
                    text[step] = (self.words * chances[0]).astype(np.int64)
                else:
                    if step >= self._first_copy:
                        begins = (left == 0) & (chances[1] < self.copy_rate)
                        left[begins] = self.span
                        source[begins] = (chances[2, begins] * (step - self.span + 1)).astype(np.int64)
                    said = table[context, drawn(shares, chances[0])]
                    text[step] = np.where(left > 0, text[source, rows], said)
                    source += left > 0
                    left -= left > 0
                context = (context * self.words + text[step]) % contexts
            return 1 + text.T

        return write

    @property
    def _first_copy(self) -> int:
        """The first place at which a copy may begin."""
        return max(self.order, self.span)

    def _followers(self) -> Int[np.ndarray, "contexts branches"]:
        """The words that may follow each context, the likeliest first."""
        rng, contexts = self.rng(0), self.words**self.order
        found, size = [], max(1, _CHOSEN_AT_ONCE // self.words)
        for start in range(0, contexts, size):
            scores = rng.gumbel(size=(min(size, contexts - start), self.words)) + np.log(zipf(self.words))
            found.append(np.argsort(-scores, axis=1)[:, : self.branches])  # as drawn one by one without putting back
        return np.concatenate(found)

    def entropy(self) -> float:
        """Nats a token of a document for who is told where copies begin and of what: exact where nothing is copied.

        With copies the entropy is higher by `copies` at most.
        """
        said = sum(share * (1 - self._rate(step)) for step, share in enumerate(self._undecided()))
        return (self.order * math.log(self.words) + said * entropy_of(zipf(self.branches))) / self.document

    def copies(self) -> float:
        """Nats a token that are in where copies begin and what they repeat."""
        total = 0.0
        for step, share in enumerate(self._undecided()):
            rate = self._rate(step)
            if rate:
                total += share * (entropy_of(np.array([rate, 1 - rate])) + rate * math.log(step - self.span + 1))
        return total / self.document

    def _rate(self, step: int) -> float:
        return self.copy_rate if step >= self._first_copy else 0.0

    def _undecided(self) -> list[float]:
        """How likely each place is none within a copy that began before it, nor one of the first words."""
        found = [0.0] * (self.document + self.span)
        found[self.order] = 1.0
        for step in range(self.order, self.document):
            rate = self._rate(step)
            found[step + 1] += found[step] * (1 - rate)
            found[step + self.span] += found[step] * rate
        return found[: self.document]


_KINDS = 2**10


@dataclass(frozen=True, kw_only=True)
class NestedLanguage(SyntheticLanguage):
    """Which token comes next? Brackets of several kinds in one another, and words that tell the innermost kind.

    At each place a bracket opens with chance ``opens``, its kind any of ``kinds``, unless ``max_depth`` are open; the
    innermost closes with chance ``closes``, if one is open; else there is a word. How often each word occurs falls by
    Zipf's law, in an order of its own for each innermost kind, and outside of brackets. A document begins outside and
    ends anywhere.

    Arguments
        kinds      kinds of brackets
        max_depth  deepest nesting
        words      how many there are, the same ones for all kinds
        opens, closes  chances at each place
        documents, document  how many there are, and tokens of each
        text_seed  of the text; the seed of a data set chooses its windows
        length     tokens of a window
    """

    name = "nested-language"

    kinds: int = 4
    max_depth: int = 8
    words: int = 48
    opens: float = 0.12
    closes: float = 0.12

    def __post_init__(self) -> None:
        at_least(1, kinds=self.kinds, max_depth=self.max_depth)
        words_within(words=self.words)
        rates(opens=self.opens, closes=self.closes)
        if self.opens + self.closes > 1:
            raise invalid(
                "closes", f"be at most {1 - self.opens:g}, as opens and closes add up to 1 at most", self.closes
            )
        if self.kinds > _KINDS:
            raise invalid("kinds", f"be from 1 to {_KINDS}", self.kinds)
        self.check_documents(1)

    @property
    def vocab_size(self) -> int:
        return 1 + 2 * self.kinds + self.words

    def write(self) -> Callable[[np.random.Generator, int], Texts]:
        fixed, shares, deepest = self.rng(0), zipf(self.words), min(self.max_depth, self.document)
        orders = np.stack([fixed.permutation(self.words) for _ in range(self.kinds + 1)])

        def write(rng: np.random.Generator, count: int) -> Texts:
            text = np.zeros((self.document, count), dtype=np.int64)
            rows, depth = np.arange(count), np.zeros(count, dtype=np.int64)
            stack = np.full((deepest + 1, count), self.kinds)  # the kind outside of brackets comes after the others
            for step in range(self.document):
                chances = rng.random((2, count))
                inner = stack[depth, rows]
                up = (chances[0] < self.opens) & (depth < self.max_depth)
                down = (chances[0] >= 1 - self.closes) & (depth > 0)
                kind = (self.kinds * chances[1]).astype(np.int64)
                word = 1 + 2 * self.kinds + orders[inner, drawn(shares, chances[1])]
                text[step] = np.where(up, 1 + kind, np.where(down, 1 + self.kinds + inner, word))
                depth += up
                depth -= down
                stack[depth[up], rows[up]] = kind[up]
            return text.T

        return write

    def entropy(self) -> float:
        """Nats a token of a document, exact: what came before tells which brackets are open."""
        deepest = min(self.max_depth, self.document)
        up, down = np.full(deepest + 1, self.opens), np.full(deepest + 1, self.closes)
        up[self.max_depth :], down[0] = 0.0, 0.0
        each = np.array([self._entropy(a, b) for a, b in zip(up, down, strict=True)])
        at: Float[np.ndarray, "depths"] = np.zeros(deepest + 1)
        at[0], total = 1.0, 0.0
        for _ in range(self.document):
            total += float(at @ each)
            moved = at * (1 - up - down)
            moved[1:] += (at * up)[:-1]
            moved[:-1] += (at * down)[1:]
            at = moved
        return total / self.document

    def _entropy(self, up: float, down: float) -> float:
        """Nats of the next token where brackets open and close with these chances."""
        word = 1 - up - down
        split = entropy_of(np.array([up, down, word]))
        return split + up * math.log(self.kinds) + word * entropy_of(zipf(self.words))
