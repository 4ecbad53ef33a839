"""What a probe says in words."""

from __future__ import annotations

from toeplens.ground.words import fixed
from toeplens.lens import Estimate
from toeplens.studies.kit.questions import Behaviour


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
