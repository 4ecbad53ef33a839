"""Synthetic languages: documents generated from options and kept in memory; Markov chains and nested brackets."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from typing import Annotated

import numpy as np
from jaxtyping import Float, Int
from scipy.special import entr

from toeplens.tasks.base import Split, Tokens, at_least, at_most
from toeplens.tasks.corpus import SPLITS, Corpus, CorpusSplit, assign_splits, dtype_of, split_sizes
from toeplens.tasks.language import LanguageTask
from toeplens.utils import invalid
from toeplens.utils.machine import check_memory
from toeplens.utils.options import NonNegativeInt, PositiveInt, Range, Share

SEPARATOR = 0
_BATCH_DOCUMENTS, _BATCH_TOKENS = 2**10, 2**24  # documents and tokens per generated batch
_MAX_WORDS = 2**13


@dataclass(frozen=True, kw_only=True)
class SyntheticLanguage(LanguageTask):
    """A synthetic language with a given number of documents, tokens per document, and a known entropy.

    Token 0 separates documents. They are split like those of `toeplens.tasks.language.Language`; a
    token counts as a byte. A larger number of documents extends a smaller one.

    Arguments
        documents, document  number of documents, and tokens of each
        text_seed  seed of the text; the seed of a data set selects its windows
        length     tokens of a window
    """

    documents: PositiveInt = 2048
    document: int = 1024
    text_seed: NonNegativeInt = 0

    def corpus(self) -> Corpus:
        return _build_corpus(replace(self, length=1))

    @abstractmethod
    def build_writer(self) -> Callable[[np.random.Generator, int], Tokens]:
        """Draw what all documents share; return the function that writes documents, one per row, with ids from 1 on."""

    @abstractmethod
    def entropy(self) -> float:
        """Entropy in nats per token: the loss of a model that knows the language, or a lower bound of it."""

    def rng(self, *purpose: int) -> np.random.Generator:
        """Random generator for one purpose, derived from the text's seed."""
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(self.text_seed, spawn_key=purpose)))

    def check_documents(self, min_tokens: int) -> None:
        """Raise `InputError` unless the documents can be generated, with at least ``min_tokens`` tokens each."""
        at_least(min_tokens, document=self.document)
        tokens = self.documents * (self.document + 1)
        check_memory("documents: they need", 2 * dtype_of(self.vocab_size).itemsize * tokens)


def zipf(words: int) -> Float[np.ndarray, "words"]:
    """Zipf's law: probabilities that fall with the rank."""
    shares = 1 / np.arange(1, words + 1)
    return shares / shares.sum()


def sample(shares: Float[np.ndarray, "n"], chances: Float[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
    """Samples of a distribution, from uniform numbers in 0..1."""
    return np.minimum(np.searchsorted(np.cumsum(shares), chances, side="right"), len(shares) - 1)


@lru_cache(maxsize=4)
def _build_corpus(task: SyntheticLanguage) -> Corpus:
    dtype = dtype_of(task.vocab_size)
    rows = np.full((task.documents, task.document + 1), SEPARATOR, dtype=dtype)
    write = task.build_writer()
    size = min(_BATCH_DOCUMENTS, max(1, _BATCH_TOKENS // task.document))
    for block, start in enumerate(range(0, task.documents, size)):
        rows[start : start + size, :-1] = write(task.rng(1, block), size)[: task.documents - start]
    first = {sha256(row.tobytes()).digest(): index for index, row in reversed(list(enumerate(rows)))}
    digests = sorted(first, key=first.__getitem__)
    rows = rows[[first[digest] for digest in digests]]
    splits = assign_splits(digests, [task.document] * len(digests))
    parts: dict[Split, CorpusSplit] = {}
    for index, split in enumerate(SPLITS):
        count, size = rows[splits == index].shape
        parts[split] = CorpusSplit(rows[splits == index].ravel(), size * np.arange(count + 1), np.full(count, size - 1))
    hasher = sha256(task.name.encode())
    for digest in digests:
        hasher.update(digest)
    options = {name: value for name, value in asdict(task).items() if name != "length"}
    metadata = {"source": task.name, "options": options, **split_sizes(parts)}
    counts = np.bincount(parts["train"].tokens, minlength=task.vocab_size)
    return Corpus(hasher.hexdigest(), task.vocab_size, SEPARATOR, False, metadata, parts, counts)


_MAX_TABLE = 2**26  # maximum number of pairs of a context and a next word
_CHUNK_SCORES = 2**22


@dataclass(frozen=True, kw_only=True)
class MarkovLanguage(SyntheticLanguage):
    """Which word comes next? Text by a Markov chain with repeated spans.

    After each ``order`` words one of ``branches`` others follows, with probabilities proportional to 1, 1/2, 1/3 and
    so on. The candidates of each context are drawn at random, word number r with a weight of 1/r. At each position
    outside a copy, a copy begins with probability ``copy_rate``: ``span`` tokens from an earlier position of the
    document, uniform among those followed by enough tokens. Then the chain continues from the copy's last words. A
    document begins with ``order`` uniformly drawn words, and may end within a copy.

    Arguments
        words      vocabulary size
        order      number of words that determine the next
        branches   possible next words
        copy_rate  probability of a copy at each position
        span       tokens of a copy
        and those of `SyntheticLanguage`
    """

    name = "markov-language"

    words: Annotated[int, Range(2, _MAX_WORDS)] = 64
    order: PositiveInt = 2
    branches: PositiveInt = 6
    copy_rate: Share = 0.01
    span: PositiveInt = 24

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most(self.words, "words ({})", branches=self.branches)
        highest = math.floor(math.log(_MAX_TABLE, self.words) + 1e-9) - 1
        at_most(highest, f"{{}} with {self.words} words", order=self.order)
        self.check_documents(max(self.order, self.span if self.copy_rate else 0) + 1)

    def vocab_and_labels(self) -> tuple[int, range]:
        return 1 + self.words, range(1 + self.words)

    def build_writer(self) -> Callable[[np.random.Generator, int], Tokens]:
        table, shares, contexts = self._next_words(), zipf(self.branches), self.words**self.order

        def write(rng: np.random.Generator, count: int) -> Tokens:
            text = np.zeros((self.document, count), dtype=np.int64)
            rows, context = np.arange(count), np.zeros(count, dtype=np.int64)
            remaining, source = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
            for step in range(self.document):
                chances = rng.random((3, count))
                if step < self.order:
                    text[step] = (self.words * chances[0]).astype(np.int64)
                else:
                    if step >= self._first_copy:
                        begins = (remaining == 0) & (chances[1] < self.copy_rate)
                        remaining[begins] = self.span
                        source[begins] = (chances[2, begins] * (step - self.span + 1)).astype(np.int64)
                    sampled = table[context, sample(shares, chances[0])]
                    text[step] = np.where(remaining > 0, text[source, rows], sampled)
                    source += remaining > 0
                    remaining -= remaining > 0
                context = (context * self.words + text[step]) % contexts
            return 1 + text.T

        return write

    @property
    def _first_copy(self) -> int:
        return max(self.order, self.span)

    def _next_words(self) -> Int[np.ndarray, "contexts branches"]:
        """The possible next words of each context, the likeliest first."""
        rng, contexts = self.rng(0), self.words**self.order
        next_words, size = [], max(1, _CHUNK_SCORES // self.words)
        for start in range(0, contexts, size):
            scores = rng.gumbel(size=(min(size, contexts - start), self.words)) + np.log(zipf(self.words))
            next_words.append(np.argsort(-scores, axis=1)[:, : self.branches])  # equals sampling without replacement
        return np.concatenate(next_words)

    def entropy(self) -> float:
        """Nats per token of a document, given the start and source of each copy: exact without copies.

        With copies the entropy is higher, by at most `copy_entropy`.
        """
        chain_tokens = sum(share * (1 - rate) for share, rate, _ in self._copy_states())
        return (self.order * math.log(self.words) + chain_tokens * entr(zipf(self.branches)).sum()) / self.document

    def copy_entropy(self) -> float:
        """Nats per token in the start and source of copies."""
        return (
            sum(
                share * (entr([rate, 1 - rate]).sum() + rate * math.log(sources))
                for share, rate, sources in self._copy_states()
                if rate
            )
            / self.document
        )

    def _copy_states(self) -> list[tuple[float, float, int]]:
        """For each position: the probabilities that it is in no earlier copy and none of the first words, and of a copy
        there, and the number of its possible sources.
        """
        shares = [0.0] * (self.document + self.span)
        shares[self.order] = 1.0
        rates = [self.copy_rate if step >= self._first_copy else 0.0 for step in range(self.document)]
        for step in range(self.order, self.document):
            shares[step + 1] += shares[step] * (1 - rates[step])
            shares[step + self.span] += shares[step] * rates[step]
        return [(shares[step], rate, step - self.span + 1) for step, rate in enumerate(rates)]


_MAX_KINDS = 2**10


@dataclass(frozen=True, kw_only=True)
class NestedLanguage(SyntheticLanguage):
    """Which token comes next? Nested brackets of several kinds, and words whose frequencies reveal the innermost kind.

    At each position a bracket opens with probability ``opens``, unless ``max_depth`` are open; its kind is uniform. If
    one is open, the innermost closes with probability ``closes``. Otherwise there is a word. Word frequencies follow
    Zipf's law, in a different order for each innermost kind and outside brackets. A document begins outside and
    ends anywhere.

    Arguments
        kinds      number of bracket kinds
        max_depth  maximum nesting depth
        words      vocabulary size, the same words for all kinds
        opens, closes  probabilities at each position
        and those of `SyntheticLanguage`
    """

    name = "nested-language"

    kinds: Annotated[int, Range(1, _MAX_KINDS)] = 4
    max_depth: PositiveInt = 8
    words: Annotated[int, Range(2, _MAX_WORDS)] = 48
    opens: Share = 0.12
    closes: Share = 0.12

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.opens + self.closes > 1:
            must = f"be at most {1 - self.opens:g}, as opens and closes add up to 1 at most"
            raise invalid("closes", must, self.closes)
        self.check_documents(1)

    def vocab_and_labels(self) -> tuple[int, range]:
        vocab_size = 1 + 2 * self.kinds + self.words
        return vocab_size, range(vocab_size)

    def build_writer(self) -> Callable[[np.random.Generator, int], Tokens]:
        shared_rng, shares, deepest = self.rng(0), zipf(self.words), min(self.max_depth, self.document)
        orders = np.stack([shared_rng.permutation(self.words) for _ in range(self.kinds + 1)])

        def write(rng: np.random.Generator, count: int) -> Tokens:
            text = np.zeros((self.document, count), dtype=np.int64)
            rows, depth = np.arange(count), np.zeros(count, dtype=np.int64)
            stack = np.full((deepest + 1, count), self.kinds)  # the kind outside brackets is the last index
            for step in range(self.document):
                chances = rng.random((2, count))
                inner = stack[depth, rows]
                up = (chances[0] < self.opens) & (depth < self.max_depth)
                down = (chances[0] >= 1 - self.closes) & (depth > 0)
                kind = (self.kinds * chances[1]).astype(np.int64)
                word = 1 + 2 * self.kinds + orders[inner, sample(shares, chances[1])]
                text[step] = np.where(up, 1 + kind, np.where(down, 1 + self.kinds + inner, word))
                depth += up
                depth -= down
                stack[depth[up], rows[up]] = kind[up]
            return text.T

        return write

    def entropy(self) -> float:
        """Nats per token of a document, exact: the previous tokens determine which brackets are open."""
        deepest = min(self.max_depth, self.document)
        up, down = np.full(deepest + 1, self.opens), np.full(deepest + 1, self.closes)
        up[self.max_depth :], down[0] = 0.0, 0.0
        word = np.maximum(1 - up - down, 0.0)
        kinds = entr([up, down, word]).sum(0)
        per_depth = kinds + up * math.log(self.kinds) + word * entr(zipf(self.words)).sum()
        depth_shares: Float[np.ndarray, "depths"] = np.zeros(deepest + 1)
        depth_shares[0], total = 1.0, 0.0
        for _ in range(self.document):
            total += float(depth_shares @ per_depth)
            moved = depth_shares * word
            moved[1:] += (depth_shares * up)[:-1]
            moved[:-1] += (depth_shares * down)[1:]
            depth_shares = moved
        return total / self.document
