"""Which passes over changed heads take the fewest layers."""

from __future__ import annotations

from collections.abc import Sequence


def together(
    left: Sequence[int], counts: Sequence[int], width: int, alone: float, intact: Sequence[int]
) -> tuple[float, list[range]]:
    """What passes of so many copies cost at least, in layers, and which neighbouring calls they are then of.

    Arguments
        left    layers from each call's on
        counts  what is changed of each
        alone   what a pass costs by itself, in copies
        intact  copies with nothing changed that passes have at least which begin at each call's layer
    """
    best, begins = [0.0], list[int]()
    for stop in range(1, len(left) + 1):
        cost = {
            start: best[start] + left[start] * -(-(sum(counts[start:stop]) + intact[start]) // width) * (width + alone)
            for start in range(stop - 1, -1, -1)
        }
        begins.append(min(cost, key=lambda start: cost[start]))
        best.append(cost[begins[-1]])
    groups, stop = list[range](), len(left)
    while stop:
        groups.append(range(begins[stop - 1], stop))
        stop = groups[-1].start
    return best[-1], groups[::-1]
