"""A language of chance: each word by those before it, and now and then a span again that was there before."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from toeplens.ground import InputError
from toeplens.tasks.base import Texts, at_least
from toeplens.tasks.language.synthetic import SyntheticLanguage, drawn, entropy_of, rates, words_within, zipf

_TABLE = 2**26  # pairs of a context and a word that may follow
_AT_ONCE = 2**22


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
            raise InputError(f"branches: {self.branches} was given; there are only {self.words} words.")
        highest = math.floor(math.log(_TABLE, self.words) + 1e-9) - 1
        if self.order > highest:
            raise InputError(f"order: {self.order} was given; with {self.words} words it must be at most {highest}.")
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
        found, size = [], max(1, _AT_ONCE // self.words)
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
