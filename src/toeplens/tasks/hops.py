"""Following several links: numbers that state positions (number-hops), or letters that are keys (letter-hops)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from toeplens.tasks.base import Examples, SizedTask, Tokens, Vector, at_most, pad_examples, random_columns
from toeplens.utils.options import AtLeast2, PositiveInt


@dataclass(frozen=True, kw_only=True)
class _Hops(SizedTask):
    """The links of each sequence form one cycle, so that all labels are equally likely after any number of hops."""

    length: int = 16
    links: AtLeast2 = 8
    hops: PositiveInt = 4
    min_hops: PositiveInt | None = None
    distractors: PositiveInt = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most(self.links - 1, "{}, less than the number of links", hops=self.hops)
        at_most(self.hops, "hops ({})", min_hops=self.fewest_hops)
        self.check_lengths(self.links + self.query_tokens)

    @property
    def fewest_hops(self) -> int:
        """Minimum number of hops."""
        return self.hops if self.min_hops is None else self.min_hops

    @property
    def query_tokens(self) -> int:
        """Tokens of the query: the number of hops, unless it is always the same, and where to start."""
        return 1 + (self.fewest_hops < self.hops)

    @property
    def link_tokens(self) -> int:
        """Number of ids of links and of starts, from 1 on."""
        raise NotImplementedError

    def vocab_and_labels(self) -> tuple[int, range]:
        hop_tokens = self.hops + 1 - self.fewest_hops if self.query_tokens > 1 else 0
        return self._hop_token + hop_tokens, range(self.links)

    @property
    def _hop_token(self) -> int:
        """The id that states the minimum number of hops; the next ids state more."""
        return 1 + self.link_tokens + self.distractors

    def groups(self, examples: Examples) -> dict[str, Bool[np.ndarray, "n"]]:
        """The examples of each number of hops."""
        if self.query_tokens == 1:
            return {}
        stated = examples.tokens[np.arange(len(examples)), examples.lengths - 2] - self._hop_token
        return {
            f"{hops} hop{'s' * (hops > 1)}": stated == hops - self.fewest_hops
            for hops in range(self.fewest_hops, self.hops + 1)
        }

    def place_links(self, rng: np.random.Generator, tokens: Tokens, following: Tokens, sizes: Vector) -> int:
        """Write the links, of which each leads to its ``following``, into columns below ``sizes``.

        Returns the id of start 0.
        """
        raise NotImplementedError

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        rows = np.arange(count)
        lengths = self.draw_lengths(rng, count)
        tokens = rng.integers(1 + self.link_tokens, self._hop_token, size=(count, self.length))
        cycle = random_columns(rng, np.full(count, self.links), self.links, self.links)
        following = np.empty_like(cycle)
        np.put_along_axis(following, cycle, np.roll(cycle, -1, axis=1), axis=1)
        start = self.place_links(rng, tokens, following, lengths - self.query_tokens)
        hops = rng.integers(self.fewest_hops, self.hops + 1, size=count)
        if self.query_tokens > 1:
            tokens[rows, lengths - 2] = self._hop_token + hops - self.fewest_hops
        tokens[rows, lengths - 1] = start + cycle[:, 0]
        return pad_examples(tokens, cycle[rows, hops], lengths)


@dataclass(frozen=True, kw_only=True)
class NumberHops(_Hops):
    """Which number is reached after some hops between positions? (after the number task of arXiv 2605.31558)

    The last words before the query are numbers, each of which states the position of another: 0 is the last one, and 1
    the one before it. The query states the number of hops and a position to start from. After x 0 2 1, with x a
    distractor, two hops from 0 lead to 1 (the last word) and to 2 (the word before it).

    Arguments
        length, min_length  maximum and minimum number of tokens, with the query (default: the same)
        links               numbers per sequence; the label is one of them, 0..``links`` - 1
        hops, min_hops      maximum and minimum number of hops (default: the same, and the query states only the start)
        distractors         number of distinct words before the numbers

    Longer sequences have more words before the numbers.
    """

    name = "number-hops"
    answer = "position"

    @property
    def link_tokens(self) -> int:
        return self.links

    def place_links(self, rng: np.random.Generator, tokens: Tokens, following: Tokens, sizes: Vector) -> int:
        columns = sizes[:, None] - 1 - np.arange(self.links)
        np.put_along_axis(tokens, columns, 1 + following, axis=1)
        return 1


@dataclass(frozen=True, kw_only=True)
class LetterHops(_Hops):
    """Which letter is reached after some hops between pairs of letters? (after the letter task of arXiv 2605.31558)

    Pairs of letters, a key and its value, stand among distractors in random order; each pair is one word. The query
    states the number of hops and a letter to start from. After (b, c) x (c, a) (a, b), with x a distractor, two hops
    from b lead to c and to a. The structure is that of `number-hops`, without positions.

    Arguments
        length, min_length  maximum and minimum number of tokens, with the query (default: the same)
        links               number of letters, each of which is one pair's key; the label is one, 0..``links`` - 1
        hops, min_hops      maximum and minimum number of hops (default: the same, and the query states only the start)
        distractors         number of distinct distractors

    Longer sequences have more distractors.
    """

    name = "letter-hops"
    answer = "content"

    @property
    def link_tokens(self) -> int:
        return self.links * (self.links + 1)

    def place_links(self, rng: np.random.Generator, tokens: Tokens, following: Tokens, sizes: Vector) -> int:
        columns = random_columns(rng, sizes, self.length, self.links)
        np.put_along_axis(tokens, columns, 1 + np.arange(self.links) * self.links + following, axis=1)
        return 1 + self.links**2
