"""The paper's two tasks: the distance between two trigger words, and the number of trigger words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from toeplens.tasks.base import PAD, Examples, Task, Vector, at_least, insert, pad_examples
from toeplens.utils import InputError, invalid
from toeplens.utils.options import AtLeast2, PositiveInt

Form = Literal["paper", "released"]


def _draw_vocabulary(vocab_size: int, num_triggers: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The data set's trigger words and other words; id 0 is the padding."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, 2**32 - 1))))
    shuffled = 1 + rng.permutation(vocab_size - 1)
    return shuffled[:num_triggers], np.sort(shuffled[num_triggers:])


@dataclass(frozen=True, kw_only=True)
class TriggerDistance(Task):
    """Task 1: how far apart are the two trigger words? (arXiv 2505.13027, section 4.1)

    ``paper``     two different triggers (of ``num_triggers`` words, fixed for the data set) among other
                  words, exactly ``length`` tokens; the label is their distance, uniform on 1..``max_distance``
    ``released``  word 1, then word 2 (one fixed ordered pair), with 1..``max_between`` words between them and
                  1..``max_side`` on either side, uniform. Fillers are drawn without replacement within a segment from
                  the whole vocabulary, including triggers, so some examples are ambiguous. Cut at ``cut`` tokens and
                  padded to ``length``; the label is the distance, 2..``max_between`` + 1

    Arguments
        form          ``paper`` or ``released``
        length        tokens of a sequence, including padding
        vocab_size    number of token ids, including the padding's 0
        num_triggers  number of trigger words from which the two are drawn (released: exactly 2)
        max_distance  maximum distance (paper form; default: length - 1)
        ordered       the first trigger of the list always comes first (paper form); otherwise either order
        max_between, max_side, cut   of the released form

    Longer sequences have the same distances. In the paper form positions are drawn from the whole sequence, in the
    released form the sides get wider.
    """

    name = "trigger-distance"
    answer = "both"

    form: Form = "paper"
    length: AtLeast2 = 128
    vocab_size: int = 574
    num_triggers: AtLeast2 = 2
    max_distance: PositiveInt | None = None
    ordered: bool = False
    max_between: PositiveInt = 70
    max_side: PositiveInt = 25
    cut: PositiveInt = 120

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self.num_triggers + 2, vocab_size=self.vocab_size)
        object.__setattr__(self, "cut", min(self.cut, self.length))
        object.__setattr__(self, "max_distance", self.farthest)
        if self.form == "paper":
            if self.farthest >= self.length:
                raise invalid("max_distance", f"be from 1 to {self.length - 1} in {self.length} tokens", self.farthest)
            return
        if self.num_triggers != 2:
            raise invalid("num_triggers", "be 2 in the released form", self.num_triggers)
        widest = max(self.max_between, self.max_side)
        if widest > self.vocab_size - 1:
            raise invalid("vocab_size", f"be at least {widest + 1} for segments without repeats", self.vocab_size)
        end = self.max_side + self.max_between + 2
        if end > self.cut:
            raise InputError(
                f"length: the triggers do not fit. The second one ends after {end} tokens, but sequences have "
                f"{self.cut}."
            )

    @property
    def farthest(self) -> int:
        """The maximum distance."""
        if self.form == "released":
            return self.max_between + 1
        return self.length - 1 if self.max_distance is None else self.max_distance

    def vocab_and_labels(self) -> tuple[int, range]:
        return self.vocab_size, range(1 if self.form == "paper" else 2, self.farthest + 1)

    def options_at(self, length: int) -> dict[str, Any]:
        if self.form == "paper":
            return {"max_distance": self.farthest}
        longer = length - self.length
        return {"max_side": self.max_side + longer // 2, "cut": self.cut + longer}

    def length_chance(self, ignore_label: int | None = None) -> float:
        if self.form == "paper":
            return self.chance(ignore_label)
        side = np.full(self.max_side, 1 / self.max_side)
        both_sides = np.convolve(side, side)  # by the sum of both sides, from 2 on
        counted = [between for between in range(1, self.max_between + 1) if between + 1 != ignore_label]
        best = np.zeros(self.cut + 1)
        for between in counted:
            totals = np.minimum(between + 4 + np.arange(len(both_sides)), self.cut)
            best = np.maximum(best, np.bincount(totals, both_sides / len(counted), minlength=self.cut + 1))
        return float(sum(best.tolist()))

    def marked_words(self, seed: int) -> Vector:
        return _draw_vocabulary(self.vocab_size, self.num_triggers, seed)[0]

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        triggers, others = _draw_vocabulary(self.vocab_size, self.num_triggers, seed)
        if self.form == "released":
            return self._draw_released(rng, count, triggers)
        rows = np.arange(count)
        tokens = rng.choice(others, size=(count, self.length))
        distance = rng.integers(1, self.farthest + 1, size=count)
        first = rng.integers(0, self.length - distance)
        pair = rng.permuted(np.tile(np.arange(self.num_triggers), (count, 1)), axis=1)[:, :2]
        if self.ordered:
            pair.sort(axis=1)
        tokens[rows, first] = triggers[pair[:, 0]]
        tokens[rows, first + distance] = triggers[pair[:, 1]]
        return Examples(tokens, distance, np.full(count, self.length))

    def _draw_released(self, rng: np.random.Generator, count: int, triggers: Vector) -> Examples:
        rows = np.arange(count)
        between = rng.integers(1, self.max_between + 1, size=count)
        left = rng.integers(1, self.max_side + 1, size=count)
        right = rng.integers(1, self.max_side + 1, size=count)
        second = left + 1 + between
        tokens = np.full((count, max(self.length, 2 * self.max_side + self.max_between + 2)), PAD)
        segments = (
            (np.zeros_like(left), left, self.max_side),
            (left + 1, between, self.max_between),
            (second + 1, right, self.max_side),
        )
        for start, size, limit in segments:
            words = rng.permuted(np.tile(np.arange(1, self.vocab_size), (count, 1)), axis=1)[:, :limit]
            insert(tokens, start, words, size)
        tokens[rows, left], tokens[rows, second] = triggers
        return pad_examples(tokens[:, : self.length], between + 1, np.minimum(second + 1 + right, self.cut))


@dataclass(frozen=True, kw_only=True)
class TriggerCount(Task):
    """Task 2: how many trigger words are there? (arXiv 2505.13027, section 4.1)

    The count is uniform on 0..``max_count``. That many words are drawn from the triggers (with replacement), the others
    from the rest of the vocabulary, and all are shuffled. Both protocols do this; they differ in sizes.

    Arguments
        form          ``paper`` (``words`` = ``length``) or ``released`` (120 words, padded to ``length``)
        length        tokens of a sequence, including padding
        words         tokens before the padding
        vocab_size    number of token ids, including the padding's 0
        num_triggers  number of trigger words (paper: 10 to 30, default 20; released: 30)
        max_count     maximum count (default: 100, or ``words`` if that is less)

    Longer sequences have the same counts among more words.
    """

    name = "trigger-count"
    answer = "content"

    form: Form = "paper"
    length: PositiveInt = 128
    words: PositiveInt | None = None
    vocab_size: int = 574
    num_triggers: PositiveInt | None = None
    max_count: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self.triggers + 2, vocab_size=self.vocab_size)
        if self.num_words > self.length:
            raise invalid("words", f"be from 1 to length ({self.length})", self.num_words)
        if self.top_count > self.num_words:
            raise invalid("max_count", f"be small enough to fit in {self.num_words} words", self.top_count)
        for name, value in (("num_triggers", self.triggers), ("words", self.num_words), ("max_count", self.top_count)):
            object.__setattr__(self, name, value)

    @property
    def triggers(self) -> int:
        """Number of trigger words."""
        return {"paper": 20, "released": 30}[self.form] if self.num_triggers is None else self.num_triggers

    @property
    def num_words(self) -> int:
        """Number of tokens before the padding."""
        if self.words is None:
            return self.length if self.form == "paper" else min(120, self.length)
        return self.words

    @property
    def top_count(self) -> int:
        """The maximum count."""
        return min(100, self.num_words) if self.max_count is None else self.max_count

    def vocab_and_labels(self) -> tuple[int, range]:
        return self.vocab_size, range(self.top_count + 1)

    def options_at(self, length: int) -> dict[str, Any]:
        return {"words": self.num_words + length - self.length, "max_count": self.top_count}

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        triggers, others = _draw_vocabulary(self.vocab_size, self.triggers, seed)
        labels = rng.integers(0, self.top_count + 1, size=count)
        is_trigger = rng.permuted(np.arange(self.num_words) < labels[:, None], axis=1)
        tokens = np.full((count, self.length), PAD)
        tokens[:, : self.num_words] = np.where(
            is_trigger, rng.choice(triggers, size=is_trigger.shape), rng.choice(others, size=is_trigger.shape)
        )
        return Examples(tokens, labels, np.full(count, self.num_words))
