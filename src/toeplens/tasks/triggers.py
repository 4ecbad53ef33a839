"""The paper's two tasks: the distance between two trigger words, and the number of trigger words."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from toeplens.ground import InputError, choose, invalid
from toeplens.tasks.base import PAD, Each, Examples, Task, at_least

Form = Literal["paper", "released"]


def _words(vocab_size: int, num_triggers: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The data set's trigger words and other words; id 0 is the padding."""
    shuffled = (
        np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, 2**32 - 1)))).permutation(vocab_size - 1) + 1
    )
    return shuffled[:num_triggers], np.sort(shuffled[num_triggers:])


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

    def __init__(
        self,
        *,
        form: Form = "paper",
        length: int = 128,
        vocab_size: int = 574,
        num_triggers: int = 2,
        max_distance: int | None = None,
        ordered: bool = False,
        max_between: int = 70,
        max_side: int = 25,
        cut: int = 120,
    ) -> None:
        self.form = choose("form", form, ("paper", "released"))
        at_least(2, length=length, num_triggers=num_triggers)
        at_least(1, max_between=max_between, max_side=max_side, cut=cut)
        at_least(num_triggers + 2, vocab_size=vocab_size)
        self.length, self.vocab_size, self.num_triggers, self.ordered = length, vocab_size, num_triggers, ordered
        self.max_between, self.max_side, self.cut = max_between, max_side, min(cut, length)
        if self.form == "paper":
            self.max_distance = length - 1 if max_distance is None else max_distance
            at_least(1, max_distance=self.max_distance)
            if self.max_distance >= length:
                raise invalid("max_distance", f"be from 1 to {length - 1} in {length} tokens", max_distance)
        else:
            self.max_distance = max_between + 1
            if num_triggers != 2:
                raise invalid("num_triggers", "be 2 in the released form", num_triggers)
            if max(max_between, max_side) > vocab_size - 1:
                raise invalid(
                    "vocab_size",
                    f"be at least {max(max_between, max_side) + 1} for segments without repeats",
                    vocab_size,
                )
            if max_side + 1 + max_between + 1 > self.cut:
                raise InputError(
                    f"length: the triggers do not fit. The second one ends after {max_side + max_between + 2} tokens, "
                    f"but sequences have {self.cut}."
                )

    @property
    def labels(self) -> range:
        return range(1 if self.form == "paper" else 2, self.max_distance + 1)

    def options_at(self, length: int) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("form", "vocab_size", "num_triggers", "ordered", "max_between")}
        longer = length - self.length
        if self.form == "paper":
            return {**kept, "length": length, "max_distance": self.max_distance}
        return {**kept, "length": length, "max_side": self.max_side + longer // 2, "cut": self.cut + longer}

    def length_chance(self, ignore_label: int | None = None) -> float:
        if self.form == "paper":
            return self.chance(ignore_label)
        side = np.full(self.max_side, 1 / self.max_side)
        sides = np.convolve(side, side)
        best: dict[int, float] = {}
        counted = [between for between in range(1, self.max_between + 1) if between + 1 != ignore_label]
        for between in counted:
            mass: dict[int, float] = {}
            for extra, share in enumerate(sides, start=2):
                total = min(between + 2 + extra, self.cut)
                mass[total] = mass.get(total, 0.0) + share / len(counted)
            for total, share in mass.items():
                best[total] = max(best.get(total, 0.0), share)
        return float(sum(best.values()))

    def marked_words(self, seed: int) -> Each:
        return _words(self.vocab_size, self.num_triggers, seed)[0]

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        return self._draw_paper(rng, count, seed) if self.form == "paper" else self._draw_released(rng, count, seed)

    def _draw_paper(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        triggers, others = _words(self.vocab_size, self.num_triggers, seed)
        rows = np.arange(count)
        tokens = rng.choice(others, size=(count, self.length))
        distance = rng.integers(1, self.max_distance + 1, size=count)
        first = rng.integers(0, self.length - distance)
        pair = rng.permuted(np.tile(np.arange(self.num_triggers), (count, 1)), axis=1)[:, :2]
        if self.ordered:
            pair.sort(axis=1)
        tokens[rows, first] = triggers[pair[:, 0]]
        tokens[rows, first + distance] = triggers[pair[:, 1]]
        return Examples(tokens, distance, np.full(count, self.length))

    def _draw_released(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        triggers, _ = _words(self.vocab_size, 2, seed)
        between = rng.integers(1, self.max_between + 1, size=count)
        left = rng.integers(1, self.max_side + 1, size=count)
        right = rng.integers(1, self.max_side + 1, size=count)
        column = np.arange(2 * self.max_side + self.max_between + 2)
        second = left + 1 + between
        total = second + 1 + right
        segments = (
            (np.zeros(count, int), left, self.max_side),
            (left + 1, between, self.max_between),
            (second + 1, right, self.max_side),
        )
        tokens = np.full((count, len(column)), PAD)
        for start, width, most in segments:
            words = rng.permuted(np.tile(np.arange(1, self.vocab_size), (count, 1)), axis=1)[:, :most]
            inside = (column >= start[:, None]) & (column < (start + width)[:, None])
            tokens[inside] = words[np.arange(most) < width[:, None]]
        rows = np.arange(count)
        tokens[rows, left], tokens[rows, second] = triggers
        lengths = np.minimum(total, self.cut)
        tokens = np.where(column < lengths[:, None], tokens, PAD)
        padded = np.full((count, self.length), PAD)
        width = min(self.length, len(column))
        padded[:, :width] = tokens[:, :width]
        return Examples(padded, between + 1, lengths)


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

    def __init__(
        self,
        *,
        form: Form = "paper",
        length: int = 128,
        words: int | None = None,
        vocab_size: int = 574,
        num_triggers: int | None = None,
        max_count: int | None = None,
    ) -> None:
        self.form = choose("form", form, ("paper", "released"))
        released = self.form == "released"
        self.num_triggers = (30 if released else 20) if num_triggers is None else num_triggers
        at_least(1, length=length, num_triggers=self.num_triggers)
        at_least(self.num_triggers + 2, vocab_size=vocab_size)
        self.length, self.vocab_size = length, vocab_size
        self.words = (min(120, length) if released else length) if words is None else words
        at_least(1, words=self.words)
        if self.words > length:
            raise invalid("words", f"be from 1 to length ({length})", self.words)
        self.max_count = min(100, self.words) if max_count is None else max_count
        at_least(1, max_count=self.max_count)
        if self.max_count > self.words:
            raise invalid("max_count", f"be small enough to fit in {self.words} words", self.max_count)

    @property
    def labels(self) -> range:
        return range(self.max_count + 1)

    def options_at(self, length: int) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("form", "vocab_size", "num_triggers", "max_count")}
        return {**kept, "length": length, "words": self.words + length - self.length}

    def draw(self, rng: np.random.Generator, count: int, seed: int) -> Examples:
        triggers, others = _words(self.vocab_size, self.num_triggers, seed)
        labels = rng.integers(0, self.max_count + 1, size=count)
        is_trigger = rng.permuted(np.arange(self.words) < labels[:, None], axis=1)
        tokens = np.full((count, self.length), PAD)
        tokens[:, : self.words] = np.where(
            is_trigger, rng.choice(triggers, size=is_trigger.shape), rng.choice(others, size=is_trigger.shape)
        )
        return Examples(tokens, labels, np.full(count, self.words))
