"""Counting marks in a stated region or modulo two, and brackets of bounded depth: balanced, and how deep at the end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

from toeplens.tasks.base import Examples, Shares, SizedTask, Tokens, Vector, at_most, pad_examples, random_columns
from toeplens.utils import invalid
from toeplens.utils.options import PositiveInt


@dataclass(frozen=True, kw_only=True)
class ContextualCount(SizedTask):
    """How many marks are there in the stated region? (after contextual counting, arXiv 2406.02585)

    Regions are enclosed by delimiters, with other words before, between and after them. The last token states a
    region, and the label is the number of marks in it. In the sequence 1 [ 0 1 ] 0 1 [ 1 1 0 ] <2>,
    with 1 the mark, it is 2. The count is uniform and no region is narrower than ``max_count``, so the positions of
    the delimiters carry no information. Outside the regions half of the words are marks.

    Arguments
        length, min_length  maximum and minimum number of tokens, with the query (default: the same)
        regions             number of regions
        max_count           maximum count
        marks, words        number of distinct marks, and of distinct other words

    Longer sequences have wider regions, with the same counts, and more words between them.
    """

    name = "contextual-count"
    answer = "both"

    regions: PositiveInt = 3
    max_count: PositiveInt = 8
    marks: PositiveInt = 1
    words: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_lengths(self.regions * (self.max_count + 2) + 1)

    def vocab_and_labels(self) -> tuple[int, range]:
        return max(1 + self.marks + self.words + 2 + self.regions, self.max_count + 1), range(self.max_count + 1)

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        rows, column = np.arange(count), np.arange(self.length)
        lengths = self.draw_lengths(rng, count)
        opens, closes = self._delimiters(rng, lengths - 1)
        counts = rng.integers(0, self.max_count + 1, size=(count, self.regions))

        region = np.full((count, self.length), self.regions)  # of each column; the last index is outside
        for i in range(self.regions):
            region[(column > opens[:, i, None]) & (column < closes[:, i, None])] = i
        rank = np.empty_like(region)  # random rank of each column within its region
        np.put_along_axis(rank, np.argsort(region + rng.random(region.shape), axis=1), column[None, :], axis=1)
        marked = np.cumsum(np.pad(closes - opens - 1, ((0, 0), (1, 0))), axis=1)  # the first rank of each region ...
        marked[:, :-1] += counts  # ... and the first that is not a mark
        is_mark = rank < np.take_along_axis(marked, region, axis=1)
        outside = region == self.regions
        is_mark[outside] = rng.random(int(outside.sum())) < 0.5

        mark, word = (rng.integers(0, kinds, size=region.shape) for kinds in (self.marks, self.words))
        tokens = np.where(is_mark, 1 + mark, 1 + self.marks + word)
        bracket = 1 + self.marks + self.words
        np.put_along_axis(tokens, opens, bracket, axis=1)
        np.put_along_axis(tokens, closes, bracket + 1, axis=1)
        queried = rng.integers(0, self.regions, size=count)
        tokens[rows, lengths - 1] = bracket + 2 + queried
        return pad_examples(tokens, counts[rows, queried], lengths)

    def _delimiters(self, rng: np.random.Generator, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Columns [count, regions] of the opening and the closing delimiters, uniform over all placements."""
        spare = sizes - self.regions * (self.max_count + 2)
        bars = 2 * self.regions  # they divide the spare columns among regions and gaps
        cuts = np.sort(random_columns(rng, spare + bars, int(spare.max()) + bars, bars), axis=1)
        parts = np.diff(cuts, axis=1, prepend=-1) - 1
        widths = self.max_count + parts[:, 1::2]
        closes = np.cumsum(parts[:, 0::2] + widths + 2, axis=1) - 1
        return closes - widths - 1, closes


@dataclass(frozen=True, kw_only=True)
class Parity(SizedTask):
    """Is the number of marks odd? (parity, as in arXiv 1906.06755 and 2207.02098)

    Each word is a mark with probability 1/2; the label is the number of marks modulo 2. For the sequence
    1 0 0 1 1, with 1 the mark, it is 1.

    Arguments
        length, min_length  maximum and minimum number of tokens (default of min_length: ``length``)
        marks, words        number of distinct marks, and of distinct other words

    Longer sequences have more of both.
    """

    name = "parity"
    answer = "content"

    marks: PositiveInt = 1
    words: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_lengths(1)

    def vocab_and_labels(self) -> tuple[int, range]:
        return 1 + self.marks + self.words, range(2)

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        lengths = self.draw_lengths(rng, count)
        shape = (count, self.length)
        is_mark = rng.random(shape) < 0.5
        mark, word = (rng.integers(0, kinds, size=shape) for kinds in (self.marks, self.words))
        labels = (is_mark & (np.arange(self.length) < lengths[:, None])).sum(axis=1) % 2
        return pad_examples(np.where(is_mark, 1 + mark, 1 + self.marks + word), labels, lengths)


# ---- brackets --------------------------------------------------------------------------------------------------------

DyckQuestion = Literal["member", "depth"]
_MAX_TRIES = 40  # with one kind, about one exchange in eight works


@dataclass(frozen=True, kw_only=True)
class Dyck(SizedTask):
    """Is the bracket sequence balanced, or how many are open at its end? (Dyck-k: arXiv 1906.06755, bounded 2105.11115)

    ``member``  the label is 1 for a balanced sequence, such as ( [ ] ), and 0 for an unbalanced one, such as ( [ ) ].
                Half are balanced. The others are balanced sequences with two different brackets exchanged, excluding
                the first and last bracket if possible. Each kind still opens as often as it closes, so counts carry no
                information.
    ``depth``   sequences are prefixes of balanced ones; the label is the number of open brackets at the end, 2 for
                ( ( ) [. It is uniform on the depths that are possible at that length, which are odd for odd lengths and
                even otherwise.

    All paths through the depths 0..``max_depth`` with the same length and end are equally likely, and so are all kinds.

    Arguments
        length, min_length  maximum and minimum number of brackets, uniformly distributed (for ``member``, even
                            numbers). By default all sequences have ``length``, or for ``depth`` possibly one less, so
                            that every depth occurs
        kinds               number of bracket kinds, k
        max_depth           maximum nesting depth (before the exchange of brackets)
        ask                 ``member`` or ``depth``

    Longer sequences have more brackets within the same depth.
    """

    name = "dyck"
    answer = "both"

    kinds: PositiveInt = 2
    max_depth: PositiveInt = 8
    ask: DyckQuestion = "member"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_lengths(2)
        if self.ask == "member" and self.length % 2:
            raise invalid("length", "be even", self.length)
        if self.ask == "depth":
            at_most(self.length, "length ({})", max_depth=self.max_depth)
        if self.ask == "depth" and self.shortest_length == self.length:
            must = f"be less than length ({self.length}), so that every depth occurs"
            raise invalid("min_length", must, self.min_length)

    @property
    def shortest_length(self) -> int:
        return self.length - (self.ask == "depth") if self.min_length is None else self.min_length

    @property
    def depth_limit(self) -> int:
        """The maximum depth at this length."""
        return min(self.max_depth, self.length)

    def vocab_and_labels(self) -> tuple[int, range]:
        labels = range(2) if self.ask == "member" else range(self.max_depth + 1)
        return max(1 + 2 * self.kinds, len(labels)), labels

    def shares(self) -> Shares | None:
        if self.ask == "member":
            return None
        lengths = np.arange(self.shortest_length, self.length + 1)[:, None]
        depths = np.arange(self.max_depth + 1)
        reached = (depths <= lengths) & ((lengths - depths) % 2 == 0)
        return reached / reached.sum(axis=1, keepdims=True) / len(lengths)

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        if self.ask == "depth":
            lengths = self.draw_lengths(rng, count)
            odd = lengths % 2
            depths = odd + 2 * rng.integers(0, (np.minimum(lengths, self.max_depth) - odd) // 2 + 1)
            return pad_examples(self._random_walk(rng, lengths, depths), depths, lengths)
        lengths = 2 * rng.integers((self.shortest_length + 1) // 2, self.length // 2 + 1, size=count)
        labels = rng.integers(0, 2, size=count)
        tokens = self._random_walk(rng, lengths, np.zeros(count, dtype=np.int64))
        self._unbalance(rng, tokens, lengths, np.flatnonzero(labels == 0))
        return pad_examples(tokens, labels, lengths)

    def _random_walk(self, rng: np.random.Generator, lengths: Vector, ends: Vector) -> Tokens:
        """Sequences that end at the depths ``ends``; entries after their ``lengths`` are arbitrary."""
        rows = np.arange(len(lengths))
        open_shares = _open_shares(self.length, self.depth_limit)
        chances = rng.random((self.length, len(rows)))
        kinds = rng.integers(0, self.kinds, size=(self.length, len(rows)))
        tokens = np.zeros((self.length, len(rows)), dtype=np.int64)
        stack = np.zeros((self.depth_limit + 2, len(rows)), dtype=np.int64)
        depth = np.zeros(len(rows), dtype=np.int64)
        for step in range(self.length):
            remaining = np.maximum(lengths - step, 0)
            opens = chances[step] < open_shares[remaining, depth, ends]
            stack[depth[opens], rows[opens]] = kinds[step, opens]
            depth = np.where(opens, depth + 1, np.maximum(depth - 1, 0))
            tokens[step] = np.where(opens, 1 + kinds[step], 1 + self.kinds + stack[depth, rows])
        return np.ascontiguousarray(tokens.T)

    def _unbalance(self, rng: np.random.Generator, tokens: Tokens, lengths: Vector, rows: Vector) -> None:
        """Exchange two brackets of each of ``rows``, in place, to make the sequence unbalanced."""
        for _ in range(_MAX_TRIES):
            if not len(rows):
                return
            last = np.maximum(lengths[rows] - 2, 1)
            first, second = (rng.integers(1, last + 1) for _ in range(2))
            _swap_brackets(tokens, rows, first, second)
            balanced = self._is_balanced(tokens[rows], lengths[rows])
            rows, first, second = rows[balanced], first[balanced], second[balanced]
            _swap_brackets(tokens, rows, first, second)
        _swap_brackets(tokens, rows, np.zeros_like(rows), lengths[rows] - 1)

    def _is_balanced(self, tokens: Tokens, lengths: Vector) -> Bool[np.ndarray, "n"]:
        valid = np.arange(self.length) < lengths[:, None]
        opens = valid & (tokens <= self.kinds)
        depth = np.cumsum(np.where(opens, 1, -1) * valid, axis=1)
        level = np.where(valid, np.where(opens, depth, depth + 1), self.length + 1)  # equal for a pair of brackets
        paired = np.take_along_axis(tokens, np.argsort(level, axis=1, kind="stable"), axis=1)
        matches = (paired[:, 1::2] == paired[:, 0::2] + self.kinds) | ~valid[:, 1::2]
        return (depth >= 0).all(axis=1) & (depth[:, -1] == 0) & matches.all(axis=1)


def _swap_brackets(tokens: Tokens, rows: Vector, first: Vector, second: Vector) -> None:
    tokens[rows, first], tokens[rows, second] = tokens[rows, second], tokens[rows, first]


@lru_cache(maxsize=16)
def _open_shares(steps: int, deepest: int) -> Float[np.ndarray, "left depth end"]:
    """Probability that the next bracket opens, by remaining brackets, current depth and final depth.

    It is the share of paths that begin so, among all paths that stay within 0..``deepest``.
    """
    shares = np.zeros((steps + 1, deepest + 1, deepest + 1))
    paths = np.eye(deepest + 1)
    for remaining in range(1, steps + 1):
        up, down = np.zeros_like(paths), np.zeros_like(paths)
        up[:-1], down[1:] = paths[1:], paths[:-1]
        paths = up + down
        np.divide(up, paths, out=shares[remaining], where=paths > 0)
        paths /= paths.max(axis=0)  # only ratios matter; counts of paths overflow
    return shares
