"""Looking up a word by its position (index), its key (retrieval, recall), or an offset from a key (mix)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from toeplens.tasks.base import PAD, Examples, SizedTask, Task, Tokens, at_least, at_most, pad_examples, random_columns
from toeplens.utils import InputError
from toeplens.utils.options import AtLeast2, NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class Index(SizedTask):
    """Which word stands at the stated position? (after the index task of arXiv 2511.11579)

    The input is random words, then an index token that states a position; the label is the word there. Index token 0
    states the first word, or with ``from_end`` the last one, and 1 the next one. After the words a b c, index token 0
    asks for a, or with ``from_end`` for c.

    Arguments
        length, min_length  maximum and minimum number of tokens, with the index token (default: the same)
        words               number of distinct words; the label is the word's token id, 1..``words``
        positions           number of possible index tokens (default: all positions of the shortest sequence)
        from_end            count positions from the end

    Longer sequences have more words, and the same index tokens.
    """

    name = "index"
    answer = "position"

    words: AtLeast2 = 32
    positions: PositiveInt | None = None
    from_end: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_lengths(2)
        at_most(self.shortest_length - 1, "{}, the words of the shortest sequences", positions=self.num_positions)

    @property
    def num_positions(self) -> int:
        """Number of possible index tokens."""
        return self.shortest_length - 1 if self.positions is None else self.positions

    def vocab_and_labels(self) -> tuple[int, range]:
        return 1 + self.words + self.num_positions, range(1, self.words + 1)

    def options_at(self, length: int) -> dict[str, Any]:
        return {"min_length": None, "positions": self.num_positions}

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        rows = np.arange(count)
        lengths = self.draw_lengths(rng, count)
        tokens = rng.integers(1, self.words + 1, size=(count, self.length))
        index = rng.integers(0, self.num_positions, size=count)
        labels = tokens[rows, lengths - 2 - index if self.from_end else index]
        tokens[rows, lengths - 1] = 1 + self.words + index
        return pad_examples(tokens, labels, lengths)


@dataclass(frozen=True, kw_only=True)
class Retrieval(SizedTask):
    """Which value does the key at the end have? (after the retrieval task of arXiv 2511.11579)

    Pair words, each of which holds a key and its value, stand among distractors in random order. The last token is one
    of their keys, and the label is its value. In the sequence (b, 3) x (a, 1) (c, 1) b, with x a distractor, it is 3. A
    pair is one word, so positions do not matter. With keys and values as separate words, it is `recall` with one query.

    Arguments
        length, min_length  maximum and minimum number of tokens, with the query (default: the same)
        keys, values        number of distinct keys and values; the label is the value, 0..``values`` - 1
        pairs               pairs per sequence, all with different keys
        distractors         number of distinct distractors; with 0 a sequence is its pairs, the query, and padding

    Longer sequences have more distractors or, if there are none, more pairs.
    """

    name = "retrieval"
    answer = "content"

    keys: PositiveInt = 8
    values: AtLeast2 = 16
    pairs: PositiveInt = 8
    distractors: NonNegativeInt = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most(self.keys, "{}, the number of different keys", pairs=self.pairs)
        self.check_lengths(self.pairs + 1)
        if self.min_length is not None and not self.distractors:
            raise InputError(
                f"min_length must not be set without distractors: all sequences have {self.pairs + 1} tokens, got "
                f"{self.min_length}."
            )

    def vocab_and_labels(self) -> tuple[int, range]:
        return 1 + self.keys * self.values + self.keys + self.distractors, range(self.values)

    def options_at(self, length: int) -> dict[str, Any]:
        return {"min_length": None, "pairs": self.pairs if self.distractors else length - 1}

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        query = 1 + self.keys * self.values
        if self.distractors:
            lengths = self.draw_lengths(rng, count)
            tokens = query + self.keys + rng.integers(0, self.distractors, size=(count, self.length))
        else:
            lengths = np.full(count, self.pairs + 1)
            tokens = np.zeros((count, self.length), dtype=np.int64)
        keys = random_columns(rng, np.full(count, self.keys), self.keys, self.pairs)
        values = rng.integers(0, self.values, size=keys.shape)
        columns = random_columns(rng, lengths - 1, self.length, self.pairs)
        np.put_along_axis(tokens, columns, 1 + keys * self.values + values, axis=1)
        tokens[np.arange(count), lengths - 1] = query + keys[:, 0]  # any pair will do: their positions are random
        return pad_examples(tokens, values[:, 0], lengths)


@dataclass(frozen=True, kw_only=True)
class Mix(SizedTask):
    """Which word stands at a stated offset from the key? (after the mixed task of arXiv 2511.11579)

    Different keys stand among random words. The input ends in one of the keys and an offset token, and the label is the
    word that many positions after that key (before it, for negative offsets). For x K y z J x K <2> it is z.
    If there is only one possible offset, the offset token is left out.

    Arguments
        length, min_length  maximum and minimum number of tokens, with the query (default: the same)
        words               number of distinct words; the label is the word's token id, 1..``words``
        keys                number of distinct keys
        placed              keys per sequence
        min_offset, max_offset   minimum and maximum offset; 0, the key itself, is excluded

    Longer sequences have more words and the same number of keys.
    """

    name = "mix"
    answer = "both"

    words: AtLeast2 = 32
    keys: PositiveInt = 8
    placed: PositiveInt = 4
    min_offset: int = 1
    max_offset: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most(self.keys, "{}, the number of different keys", placed=self.placed)
        at_most(self.max_offset, "max_offset ({})", min_offset=self.min_offset)
        self.check_lengths(max(self.placed, abs(self.min_offset), abs(self.max_offset)) + 1)  # before all are listed
        if not len(self.offsets):
            raise InputError("max_offset must not be 0 if min_offset is 0.")
        self.check_lengths(max(self.placed, int(np.abs(self.offsets).max())) + 1 + self.query_tokens)

    @property
    def offsets(self) -> np.ndarray:
        """The possible offsets."""
        candidates = np.arange(self.min_offset, self.max_offset + 1)
        return candidates[candidates != 0]

    @property
    def query_tokens(self) -> int:
        """Tokens of the query: the key, and the offset unless there is only one."""
        return 1 + (len(self.offsets) > 1)

    def vocab_and_labels(self) -> tuple[int, range]:
        num_offsets = len(self.offsets) if self.query_tokens > 1 else 0
        return 1 + self.words + self.keys + num_offsets, range(1, self.words + 1)

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        rows = np.arange(count)
        lengths = self.draw_lengths(rng, count)
        sizes = lengths - self.query_tokens
        tokens = rng.integers(1, self.words + 1, size=(count, self.length))
        offset_index = rng.integers(0, len(self.offsets), size=count)
        offset = self.offsets[offset_index]
        pos = rng.integers(np.maximum(0, -offset), sizes - np.maximum(0, offset))
        labels = tokens[rows, pos + offset]
        keys = 1 + self.words + random_columns(rng, np.full(count, self.keys), self.keys, self.placed)
        excluded = np.stack((pos, pos + offset), axis=1)
        others = random_columns(rng, sizes, self.length, self.placed - 1, excluded)
        np.put_along_axis(tokens, np.column_stack((pos, others)), keys, axis=1)
        tokens[rows, sizes] = keys[:, 0]
        if self.query_tokens > 1:
            tokens[rows, sizes + 1] = 1 + self.words + self.keys + offset_index
        return pad_examples(tokens, labels, lengths)


@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """Which value followed the earlier occurrence of the last key? (multi-query associative recall, arXiv 2312.04927)

    The input is keys, each followed by its value, with distractors between these pairs; then some of the keys again,
    all but the last with their values. The label is the last one's value. For a 3 b 1 x c 3, with x a
    distractor, and the queries c 3 a, it is 3.

    Arguments
        length       maximum number of tokens
        keys, values number of distinct keys and values; the label is the value's token id
        pairs        pairs per sequence, all with different keys
        queries      maximum number of queried keys, all different; the number is uniform from 1
        distractors  number of distinct distractors; with 0 a sequence is its pairs, the queries, and padding

    Longer sequences have more distractors or, if there are none, more pairs. Sequences with the same pairs and
    distractors are all in train or all in test.
    """

    name = "recall"
    answer = "both"

    length: int = 64
    keys: PositiveInt = 32
    values: AtLeast2 = 32
    pairs: PositiveInt = 8
    queries: PositiveInt = 4
    distractors: NonNegativeInt = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most(self.keys, "{}, the number of different keys", pairs=self.pairs)
        at_most(self.pairs, "{}, the number of pairs", queries=self.queries)
        at_least(2 * self.pairs + self._query_tokens, length=self.length)

    @property
    def _query_tokens(self) -> int:
        """Maximum number of tokens from the first query on."""
        return 2 * self.queries - 1

    @property
    def context_len(self) -> int:
        """Number of tokens before the first query."""
        return self.length - self._query_tokens if self.distractors else 2 * self.pairs

    def vocab_and_labels(self) -> tuple[int, range]:
        first = 1 + self.keys
        return first + self.values + self.distractors, range(first, first + self.values)

    def options_at(self, length: int) -> dict[str, Any]:
        return {} if self.distractors else {"pairs": max(1, (length - self._query_tokens) // 2)}

    def split_key(self, examples: Examples) -> Tokens:
        return np.where(np.arange(self.length) < self.context_len, examples.tokens, PAD)

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        rows = np.arange(count)
        keys = 1 + random_columns(rng, np.full(count, self.keys), self.keys, self.pairs)
        values = 1 + self.keys + rng.integers(0, self.values, size=keys.shape)
        tokens = np.full((count, self.length), PAD)
        if self.distractors:
            low = 1 + self.keys + self.values
            tokens[:, : self.context_len] = rng.integers(low, low + self.distractors, size=(count, self.context_len))
        units = self.context_len - self.pairs  # a pair takes one unit among the distractors, then one more column
        columns = np.sort(random_columns(rng, np.full(count, units), units, self.pairs), axis=1) + np.arange(self.pairs)
        np.put_along_axis(tokens, columns, keys, axis=1)
        np.put_along_axis(tokens, columns + 1, values, axis=1)
        query = random_columns(rng, np.full(count, self.pairs), self.pairs, self.queries)
        tokens[:, self.context_len :: 2][:, : self.queries] = np.take_along_axis(keys, query, axis=1)
        tokens[:, self.context_len + 1 :: 2][:, : self.queries - 1] = np.take_along_axis(values, query[:, :-1], axis=1)
        last = rng.integers(0, self.queries, size=count)
        return pad_examples(tokens, values[rows, query[rows, last]], self.context_len + 2 * last + 1)
