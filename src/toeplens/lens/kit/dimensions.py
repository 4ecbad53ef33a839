"""Some of a head's dimensions, as an index: of even steps where they lie so, which is several times as fast."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor


def index_of(dimensions: Int[Tensor, "n"]) -> slice | Int[Tensor, "n"]:
    """What takes these dimensions, in this order: a slice where they rise by even steps, else themselves.

    With a slice a view is given, not a copy.
    """
    places = dimensions.tolist()
    if not places:
        return slice(0, 0)
    step = places[1] - places[0] if len(places) > 1 else 1
    even = step > 0 and places == list(range(places[0], places[0] + step * len(places), step))
    return slice(places[0], places[-1] + 1, step) if even else dimensions
