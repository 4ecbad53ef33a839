"""The record of a probe: what a model makes of each item, intact and changed, and what its heads do for a needle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from toeplens.ground import reading
from toeplens.ground.records import Record
from toeplens.ground.words import fixed
from toeplens.lens import Estimate, bootstrap_means, over_seeds
from toeplens.lens.kit.intervals import newcombe, wilson
from toeplens.studies.kit.questions import Behaviour
from toeplens.studies.kit.retrieving import HeadRetrieval

_ENOUGH = 8  # items whose resamples say something; of fewer the interval is Student's
Number = reading.Number | None


@dataclass(frozen=True, kw_only=True)
class ItemRecord(Record):
    """One item, or of a text's loss one range of places in it.

    item    its number; ranges of one text share it
    length, depth  as in `toeplens.studies.kit.questions.Item`
    start, stop    of a range, its first place and the one after its last; else None
    nats    mean -log p of the answer's tokens, over the choices where there are some
    right   whether no other token is likelier at any of them; of a text and of copying the share of them
    changed_nats, changed_right  the same of the changed model; None without changes
    """

    behaviour: Behaviour
    item: reading.Count
    length: reading.Count
    depth: Number = None
    start: reading.Count | None = None
    stop: reading.Count | None = None
    nats: reading.Positive
    right: reading.Share
    changed_nats: Number = None
    changed_right: Number = None

    @property
    def places(self) -> int:
        """What it counts for beside other ranges of its item."""
        return 1 if self.start is None or self.stop is None else self.stop - self.start

    def verify(self) -> None:
        if (self.start is None) != (self.stop is None) or (self.places < 1):
            raise ValueError("stop must be after start.")
        if (self.changed_nats is None) != (self.changed_right is None):
            raise ValueError("changed_right and changed_nats must be set together.")


@dataclass(frozen=True)
class Summary:
    """Items of one kind, with 95 % intervals over them; of a changed model also what it has more."""

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
    """What a model was asked and how it did.

    about    the model, the text, how much was asked, versions, seconds
    changes  what was done to its attention, in words; none if nothing was
    items    every item
    heads    every head's retrieval, layer by layer; none if it was not measured
    """

    WORDS = "probe"

    about: dict[str, Any]
    changes: tuple[reading.Text, ...]
    items: tuple[ItemRecord, ...]
    heads: tuple[HeadRetrieval, ...]

    def of(self, behaviour: Behaviour) -> list[ItemRecord]:
        """The items of one behaviour."""
        return [item for item in self.items if item.behaviour == behaviour]

    def summary(self, behaviour: Behaviour) -> Summary:
        """All items of a behaviour, of which there are some, together."""
        return next(self.summaries(behaviour))

    def summaries(self, behaviour: Behaviour, *by: str) -> Iterator[Summary]:
        """The items of a behaviour in groups that share the fields ``by``: of ``length``, ``depth``, ``start``."""
        groups: dict[tuple[Any, ...], list[ItemRecord]] = {}
        for item in self.of(behaviour):
            groups.setdefault(tuple(getattr(item, name) for name in by), []).append(item)
        for key, items in sorted(groups.items()):
            yield _summary(behaviour, dict(zip(by, key, strict=True)), items)


def _summary(behaviour: Behaviour, place: dict[str, Any], items: list[ItemRecord]) -> Summary:
    def over(values: Iterable[float], *, share: bool = False) -> Estimate:
        return _over_items(items, list(values), share)

    after: tuple[Estimate | None, ...] = (None, None, None, None)
    if items[0].changed_nats is not None:
        nats = [float(item.changed_nats or 0.0) for item in items]
        right = over((float(item.changed_right or 0.0) for item in items), share=True)
        more = over(changed - item.nats for changed, item in zip(nats, items, strict=True))
        after = (over(nats), right, more, _more_right(items))
    return Summary(
        behaviour,
        place.get("length"),
        place.get("depth"),
        place.get("start"),
        len({item.item for item in items}),
        over(item.nats for item in items),
        over((item.right for item in items), share=True),
        *after,
    )


def _more_right(items: list[ItemRecord]) -> Estimate:
    """What the changed model gets right more often, item by item."""
    before, after = (
        _by_item(items, [float(each or 0) for each in found])
        for found in zip(*((item.right, item.changed_right) for item in items), strict=True)
    )
    found = _estimate(after - before)
    if set(before) | set(after) <= {0.0, 1.0}:
        return Estimate(found.value, *newcombe(before, after), found.count)
    return found


def _over_items(items: list[ItemRecord], values: list[float], share: bool) -> Estimate:
    """Mean over items, with its interval; Wilson's where each is 0 or 1, so that 0 of 10 leaves room."""
    means = _by_item(items, values)
    found = _estimate(means)
    if share and set(means) <= {0.0, 1.0}:
        return Estimate(found.value, *wilson(round(means.sum()), len(means)), found.count)
    return found


def _by_item(items: list[ItemRecord], values: list[float]) -> Float[np.ndarray, "n"]:
    """Of each item the mean of its ranges, weighed by their places."""
    numbers, at = np.unique([item.item for item in items], return_inverse=True)
    places = np.array([item.places for item in items], dtype=float)
    weights: Float[np.ndarray, "n"] = np.bincount(at, places, len(numbers))
    return np.bincount(at, places * values, len(numbers)) / weights


def _estimate(means: Float[np.ndarray, "n"]) -> Estimate:
    if len(means) < _ENOUGH:
        return over_seeds(means)
    (low,), (high,) = bootstrap_means(means[:, None])
    return Estimate(float(means.mean()), float(low), float(high), len(means))


def title_of(behaviour: Behaviour) -> str:
    """What a behaviour is called in a table."""
    return {"loss": "Text"}.get(behaviour, behaviour.capitalize())


def interval(each: Estimate | None, digits: int = 3, *, least: float | None = 0.0, most: float | None = None) -> str:
    """A mean and the ends of its interval, which go no further than the least and the most that there can be."""
    if each is None:
        return "–"
    low = each.low if least is None else max(least, each.low)
    high = each.high if most is None else min(most, each.high)
    return f"{fixed(each.value, digits)} [{fixed(low, digits)}, {fixed(high, digits)}]"
