"""Bracket languages of bounded depth: is a sequence balanced, and how deep does it end?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

from toeplens.ground import choose, invalid
from toeplens.tasks.base import Each, Examples, Shares, SizedTask, Texts, at_least, finish

Ask = Literal["member", "depth"]
_TRIES = 40  # with one kind, about one exchange in eight works


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

    kinds: int = 2
    max_depth: int = 8
    ask: Ask = "member"

    def __post_init__(self) -> None:
        choose("ask", self.ask, ("member", "depth"))
        at_least(1, kinds=self.kinds, max_depth=self.max_depth)
        self.check_lengths(2)
        if self.ask == "member" and self.length % 2:
            raise invalid("length", "be even", self.length)
        if self.ask == "depth" and self.max_depth > self.length:
            raise invalid("max_depth", f"be at most length ({self.length})", self.max_depth)
        if self.ask == "depth" and self.shortest == self.length:
            raise invalid(
                "min_length", f"be less than length ({self.length}), so that every depth occurs", self.min_length
            )

    @property
    def shortest(self) -> int:
        return self.length - (self.ask == "depth") if self.min_length is None else self.min_length

    @property
    def deepest(self) -> int:
        """The maximum depth at this length."""
        return min(self.max_depth, self.length)

    @property
    def vocab_size(self) -> int:
        return max(1 + 2 * self.kinds, len(self.labels))

    @property
    def labels(self) -> range:
        return range(2) if self.ask == "member" else range(self.max_depth + 1)

    def shares(self) -> Shares | None:
        if self.ask == "member":
            return None
        lengths = np.arange(self.shortest, self.length + 1)[:, None]
        depths = np.arange(self.max_depth + 1)
        reached = (depths <= lengths) & ((lengths - depths) % 2 == 0)
        return reached / reached.sum(axis=1, keepdims=True) / len(lengths)

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        if self.ask == "depth":
            lengths = self.draw_lengths(rng, count)
            odd = lengths % 2
            depths = odd + 2 * rng.integers(0, (np.minimum(lengths, self.max_depth) - odd) // 2 + 1)
            return finish(self._walk(rng, lengths, depths), depths, lengths)
        lengths = 2 * rng.integers((self.shortest + 1) // 2, self.length // 2 + 1, size=count)
        labels = rng.integers(0, 2, size=count)
        tokens = self._walk(rng, lengths, np.zeros(count, dtype=np.int64))
        self._unbalance(rng, tokens, lengths, np.flatnonzero(labels == 0))
        return finish(tokens, labels, lengths)

    def _walk(self, rng: np.random.Generator, lengths: Each, ends: Each) -> Texts:
        """Sequences that end at the depths ``ends``; entries after their ``lengths`` are arbitrary."""
        rows = np.arange(len(lengths))
        climbs = _climbs(self.length, self.deepest)
        chances = rng.random((self.length, len(rows)))
        kinds = rng.integers(0, self.kinds, size=(self.length, len(rows)))
        tokens = np.zeros((self.length, len(rows)), dtype=np.int64)
        stack = np.zeros((self.deepest + 2, len(rows)), dtype=np.int64)
        depth = np.zeros(len(rows), dtype=np.int64)
        for step in range(self.length):
            left = np.maximum(lengths - step, 0)
            opens = chances[step] < climbs[left, depth, ends]
            stack[depth[opens], rows[opens]] = kinds[step, opens]
            depth = np.where(opens, depth + 1, np.maximum(depth - 1, 0))
            tokens[step] = np.where(opens, 1 + kinds[step], 1 + self.kinds + stack[depth, rows])
        return np.ascontiguousarray(tokens.T)

    def _unbalance(self, rng: np.random.Generator, tokens: Texts, lengths: Each, rows: Each) -> None:
        """Exchange two brackets of each of ``rows``, in place, to make the sequence unbalanced."""
        for _ in range(_TRIES):
            if not len(rows):
                return
            last = np.maximum(lengths[rows] - 2, 1)
            one, other = (rng.integers(1, last + 1) for _ in range(2))
            _exchange(tokens, rows, one, other)
            still = self._balanced(tokens[rows], lengths[rows])
            rows, one, other = rows[still], one[still], other[still]
            _exchange(tokens, rows, one, other)
        _exchange(tokens, rows, np.zeros_like(rows), lengths[rows] - 1)

    def _balanced(self, tokens: Texts, lengths: Each) -> Bool[np.ndarray, "n"]:
        rows = np.arange(len(lengths))
        by_step = np.ascontiguousarray(tokens.T)
        stack = np.zeros((self.deepest + 4, len(rows)), dtype=np.int64)  # an exchange adds at most 2 to the depth
        depth = np.zeros(len(rows), dtype=np.int64)
        good = np.ones(len(rows), dtype=bool)
        for step in range(self.length):
            token = by_step[step]
            live = good & (step < lengths)
            opens = token <= self.kinds
            down = live & ~opens
            good[down] = (depth[down] > 0) & (stack[depth[down] - 1, rows[down]] == token[down] - self.kinds)
            up = live & opens
            stack[depth[up], rows[up]] = token[up]
            depth = depth + up - (down & good)
        return good & (depth == 0)


def _exchange(tokens: Texts, rows: Each, one: Each, other: Each) -> None:
    tokens[rows, one], tokens[rows, other] = tokens[rows, other], tokens[rows, one]


@lru_cache(maxsize=16)
def _climbs(steps: int, deepest: int) -> Float[np.ndarray, "left depth end"]:
    """Probability that the next bracket opens, by remaining brackets, current depth and final depth.

    It is the share of paths that begin so, among all paths that stay within 0..``deepest``.
    """
    found = np.zeros((steps + 1, deepest + 1, deepest + 1))
    ways = np.eye(deepest + 1)
    for left in range(1, steps + 1):
        up, down = np.zeros_like(ways), np.zeros_like(ways)
        up[:-1], down[1:] = ways[1:], ways[:-1]
        ways = up + down
        np.divide(up, ways, out=found[left], where=ways > 0)
        ways /= ways.max(axis=0)  # only ratios matter; counts of paths overflow
    return found
