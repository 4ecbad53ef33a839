"""Counting marks: in a stated region, and modulo two."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toeplens.tasks.base import Examples, SizedTask, at_least, finish, places


@dataclass(frozen=True, kw_only=True)
class ContextualCount(SizedTask):
    """How many marks are there in the stated region? (after contextual counting, arXiv 2406.02585)

    Regions are enclosed by delimiters, with other words before, between and after them. The last token states a
    region, and the label is the number of marks in it. In the sequence 1 [ 0 1 ] 0 1 [ 1 1 0 ] <2>,
    with 1 the mark, it is 2. The count is uniform and no region is narrower than ``max_count``, so the positions of
    the delimiters carry no information. Outside the regions half of the words are marks.

    Arguments
        length, min_length  maximum and minimum number of tokens, including the query (default of min_length:
                            ``length``)
        regions             number of regions
        max_count           maximum count
        marks, words        number of distinct marks, and of distinct other words

    Longer sequences have wider regions, with the same counts, and more words between them.
    """

    name = "contextual-count"
    answer = "both"

    regions: int = 3
    max_count: int = 8
    marks: int = 1
    words: int = 1

    def __post_init__(self) -> None:
        at_least(1, regions=self.regions, max_count=self.max_count, marks=self.marks, words=self.words)
        self.check_lengths(self.regions * (self.max_count + 2) + 1)

    @property
    def vocab_size(self) -> int:
        return max(1 + self.marks + self.words + 2 + self.regions, self.max_count + 1)

    @property
    def labels(self) -> range:
        return range(self.max_count + 1)

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        rows, column = np.arange(count), np.arange(self.length)
        lengths = self.draw_lengths(rng, count)
        opens, closes = self._delimiters(rng, lengths - 1)
        counts = rng.integers(0, self.max_count + 1, size=(count, self.regions))

        region = np.full((count, self.length), self.regions)  # of each column; the last index is outside
        for each in range(self.regions):
            region[(column > opens[:, each, None]) & (column < closes[:, each, None])] = each
        rank = np.empty_like(region)  # random rank of each column within its region
        np.put_along_axis(rank, np.argsort(region + rng.random(region.shape), axis=1), column[None, :], axis=1)
        marked = np.cumsum(np.pad(closes - opens - 1, ((0, 0), (1, 0))), axis=1)  # the first rank of each region ...
        marked[:, :-1] += counts  # ... and the first that is not a mark
        is_mark = rank < np.take_along_axis(marked, region, axis=1)
        outside = region == self.regions
        is_mark[outside] = rng.random(int(outside.sum())) < 0.5

        mark, word = (rng.integers(0, many, size=region.shape) for many in (self.marks, self.words))
        tokens = np.where(is_mark, 1 + mark, 1 + self.marks + word)
        bracket = 1 + self.marks + self.words
        np.put_along_axis(tokens, opens, bracket, axis=1)
        np.put_along_axis(tokens, closes, bracket + 1, axis=1)
        asked = rng.integers(0, self.regions, size=count)
        tokens[rows, lengths - 1] = bracket + 2 + asked
        return finish(tokens, counts[rows, asked], lengths)

    def _delimiters(self, rng: np.random.Generator, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Columns [count, regions] of the opening and the closing delimiters, uniform over all placements."""
        spare = sizes - self.regions * (self.max_count + 2)
        bars = 2 * self.regions  # they divide the spare columns among regions and gaps
        cuts = np.sort(places(rng, spare + bars, int(spare.max()) + bars, bars), axis=1)
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

    marks: int = 1
    words: int = 1

    def __post_init__(self) -> None:
        at_least(1, marks=self.marks, words=self.words)
        self.check_lengths(1)

    @property
    def vocab_size(self) -> int:
        return 1 + self.marks + self.words

    @property
    def labels(self) -> range:
        return range(2)

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        lengths = self.draw_lengths(rng, count)
        shape = (count, self.length)
        is_mark = rng.random(shape) < 0.5
        mark, word = (rng.integers(0, many, size=shape) for many in (self.marks, self.words))
        labels = (is_mark & (np.arange(self.length) < lengths[:, None])).sum(axis=1) % 2
        return finish(np.where(is_mark, 1 + mark, 1 + self.marks + word), labels, lengths)
