"""What the tasks share: texts of different lengths, random places in them, and checks of options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from toeplens.ground import InputError
from toeplens.tasks.base import PAD, Examples, Task


def at_least(low: int, **values: Any) -> None:
    """Raise an `InputError` for the first field that is not a whole number of at least ``low``."""
    for field, value in values.items():
        whole(**{field: value})
        if value < low:
            raise InputError(f"{field}: {value} was given; it must be a whole number of at least {low}.")


def whole(**values: Any) -> None:
    """Raise an `InputError` for the first field that is not a whole number."""
    for field, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"{field}: {value!r} was given; it must be a whole number.")


def yes_or_no(**values: Any) -> None:
    """Raise an `InputError` for the first field that is neither true nor false."""
    for field, value in values.items():
        if not isinstance(value, bool):
            raise InputError(f"{field}: {value!r} was given; it must be true or false.")


@dataclass(frozen=True, kw_only=True)
class SizedTask(Task):
    """A task whose texts have ``min_length`` to ``length`` tokens, each number as likely; ``length`` unless given."""

    length: int = 64
    min_length: int | None = None

    @property
    def shortest(self) -> int:
        """Fewest tokens of a text."""
        return self.length if self.min_length is None else self.min_length

    def options_at(self, length: int) -> dict[str, Any]:
        return {**vars(self), "length": length, "min_length": None}

    def check_lengths(self, low: int) -> None:
        """Raise an `InputError` unless every text has at least ``low`` tokens."""
        at_least(low, length=self.length)
        if self.min_length is not None:
            at_least(low, min_length=self.min_length)
            if self.min_length > self.length:
                raise InputError(f"min_length: {self.min_length} was given; it must be at most length ({self.length}).")

    def draw_lengths(self, rng: np.random.Generator, count: int) -> Int[np.ndarray, "count"]:
        """Tokens of each text."""
        return rng.integers(self.shortest, self.length + 1, size=count)


def places(
    rng: np.random.Generator,
    sizes: Int[np.ndarray, "n"],
    width: int,
    many: int,
    barred: Int[np.ndarray, "n barred"] | None = None,
) -> Int[np.ndarray, "n many"]:
    """``many`` different columns for each row, in random order: below the row's size, none of the ``barred`` ones.

    ``width`` is at least the largest size; every row needs as many columns as are asked for.
    """
    scores = rng.random((len(sizes), width))
    scores[np.arange(width) >= sizes[:, None]] = np.inf
    if barred is not None:
        np.put_along_axis(scores, barred, np.inf, axis=1)
    return np.argsort(scores, axis=1)[:, :many]


def finish(
    tokens: Int[np.ndarray, "n length"], labels: Int[np.ndarray, "n"], lengths: Int[np.ndarray, "n"]
) -> Examples:
    """The examples, with padding from each text's length on."""
    return Examples(np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, PAD), labels, lengths)
