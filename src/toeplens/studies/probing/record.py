"""The record of a probe: results for each item, intact and changed, and retrieval scores of heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from toeplens.ground import reading
from toeplens.ground.records import Record
from toeplens.ground.words import fixed
from toeplens.lens import Estimate, bootstrap_means, over_seeds
from toeplens.lens.kit.intervals import newcombe, wilson
from toeplens.studies.kit.questions import Behaviour, HeadRetrieval

_ENOUGH = 8  # minimum number of items for a bootstrap; otherwise Student's t interval
Number = reading.Number | None


@dataclass(frozen=True, kw_only=True)
class ItemRecord(Record):
    """One item (`toeplens.studies.kit.questions.Item`), or one range of positions of a text."""

    behaviour: Behaviour
    item: reading.Count  # ranges of one text share this number
    length: reading.Count
    depth: Number = None
    start: reading.Count | None = None  # first position of a range
    stop: reading.Count | None = None  # the one after its last
    nats: reading.Positive  # mean -log p of the answer's tokens, among the choices if there are any
    right: reading.Share  # whether all answer tokens are the most likely ones; for text and copying the share that is
    changed_nats: Number = None  # of the changed model; None without changes
    changed_right: Number = None

    @property
    def places(self) -> int:
        """The weight of the range within its item."""
        return 1 if self.start is None or self.stop is None else self.stop - self.start

    def verify(self) -> None:
        if (self.start is None) != (self.stop is None) or (self.places < 1):
            raise ValueError("stop must be after start.")
        if (self.changed_nats is None) != (self.changed_right is None):
            raise ValueError("changed_right and changed_nats must be set together.")


@dataclass(frozen=True)
class Summary:
    """Means over items of one kind with 95 % intervals; with changes also of the changed model and the difference."""

    behaviour: Behaviour
    length: int | None
    depth: float | None
    start: int | None
    count: int
    nats: Estimate
    right: Estimate
    changed_nats: Estimate | None
    changed_right: Estimate | None
    more_nats: Estimate | None
    more_right: Estimate | None


@dataclass(frozen=True)
class ProbeRecord(Record):
    """The results of a probe."""

    WORDS = "probe"

    about: dict[str, Any]  # the model, the text, the settings, versions, seconds
    changes: tuple[reading.Text, ...]  # interventions on the attention
    items: tuple[ItemRecord, ...]
    heads: tuple[HeadRetrieval, ...]  # retrieval of every head, layer by layer; empty if not measured

    def of(self, behaviour: Behaviour) -> list[ItemRecord]:
        """The items of one behaviour."""
        return [item for item in self.items if item.behaviour == behaviour]

    def summary(self, behaviour: Behaviour) -> Summary:
        """Summary over all items of a behaviour; there must be at least one."""
        return next(self.summaries(behaviour))

    def summaries(self, behaviour: Behaviour, *by: str) -> Iterator[Summary]:
        """Summaries of the items of a behaviour, grouped by the fields ``by``: ``length``, ``depth``, ``start``."""
        groups: dict[tuple[Any, ...], list[ItemRecord]] = {}
        for item in self.of(behaviour):
            groups.setdefault(tuple(getattr(item, name) for name in by), []).append(item)
        for key, items in sorted(groups.items()):
            yield _summary(behaviour, dict(zip(by, key, strict=True)), items)


def _summary(behaviour: Behaviour, place: dict[str, Any], items: list[ItemRecord]) -> Summary:
    numbers, at = np.unique([item.item for item in items], return_inverse=True)
    places = np.array([item.places for item in items], dtype=float)
    weights: Float[np.ndarray, "n"] = np.bincount(at, places, len(numbers))

    def means(name: str, less: str = "") -> Float[np.ndarray, "n"]:
        """The mean over the ranges of each item, weighted by their positions; of the difference from ``less``."""
        values = [float(getattr(item, name)) - (float(getattr(item, less)) if less else 0.0) for item in items]
        return np.bincount(at, places * values, len(numbers)) / weights

    after: tuple[Estimate | None, ...] = (None, None, None, None)
    before = means("right")
    if items[0].changed_nats is not None:
        right = means("changed_right")
        more = _estimate(right - before)
        if {*before, *right} <= {0.0, 1.0}:
            more = Estimate(more.value, *newcombe(before, right), more.count)
        after = _estimate(means("changed_nats")), _share(right), _estimate(means("changed_nats", "nats")), more
    length, depth, start = (place.get(name) for name in ("length", "depth", "start"))
    return Summary(behaviour, length, depth, start, len(numbers), _estimate(means("nats")), _share(before), *after)


def _share(means: Float[np.ndarray, "n"]) -> Estimate:
    """Mean of shares with its interval: Wilson's if all values are 0 or 1."""
    found = _estimate(means)
    if {*means} <= {0.0, 1.0}:
        return Estimate(found.value, *wilson(round(means.sum()), len(means)), found.count)
    return found


def _estimate(means: Float[np.ndarray, "n"]) -> Estimate:
    if len(means) < _ENOUGH:
        return over_seeds(means)
    (low,), (high,) = bootstrap_means(means[:, None])
    return Estimate(float(means.mean()), float(low), float(high), len(means))


def title_of(behaviour: Behaviour) -> str:
    """The title of a behaviour in tables."""
    return {"loss": "Text"}.get(behaviour, behaviour.capitalize())


def interval(each: Estimate | None, digits: int = 3, *, least: float | None = 0.0, most: float | None = None) -> str:
    """A mean and its interval as text, clipped to the possible range from ``least`` to ``most``."""
    if each is None:
        return "–"
    low = each.low if least is None else max(least, each.low)
    high = each.high if most is None else min(most, each.high)
    return f"{fixed(each.value, digits)} [{fixed(low, digits)}, {fixed(high, digits)}]"
