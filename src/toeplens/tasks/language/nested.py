"""A language of brackets in brackets, with words by the innermost one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from toeplens.ground import InputError
from toeplens.tasks.base import Texts, at_least
from toeplens.tasks.language.synthetic import SyntheticLanguage, drawn, entropy_of, rates, words_within, zipf

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
            raise InputError(f"closes: {self.closes} was given; with opens ({self.opens:g}) it must be at most 1.")
        if self.kinds > _KINDS:
            raise InputError(f"kinds: {self.kinds} was given; it must be from 1 to {_KINDS}.")
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
