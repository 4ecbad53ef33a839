"""Passes of a Hugging Face model in which one thing is changed at a time, and what that does to its outcome."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.effects.replays import Address, Change, Passes, Replay

NOTHING = -1  # in place of what is changed


@torch.no_grad()
def one_by_one(
    passes: Passes,
    places: Sequence[Address],
    counts: Sequence[int],
    chosen: Sequence[Sequence[int]],
    change: Callable[[int, Sequence[int]], Change],
    on_call: Callable[[int, Float[np.ndarray, "B K _H"]], None],
    on_progress: Callable[[int, int], None],
    known: Collection[int] = (),
) -> tuple[list[Float[np.ndarray, "B K _H"]], int]:
    """Each call's effects, NaN for what is not chosen; and how many calls were replayed from their layer.

    What is changed of a call, one head or band after the other, are copies of the batch in a few passes of equally many
    copies; of neighbouring calls together, where that takes fewer layers in all (`Passes.plan`). Whether copies of the
    batch are independent is seen in a pass of two with nothing silenced, both of which have to give the intact states
    (where calls are known to give these, it was seen there); where they are not, passes have one. What the layers
    before a call's hand over is run once, in one copy with nothing silenced, and repeated where its copies would lie.
    In the first pass from each layer some copies have nothing silenced and have to give the intact states; where a
    replay fails in that, whole passes are run from there on. From the layers of calls of which it is known that they
    give these states (`intact_from`), that is asked of the first pass of all, and else where there are copies to spare.
    """
    effects = [np.full((passes.batch, passes.outcome.blocks, count), np.nan) for count in counts]
    total = sum(map(len, chosen))
    if not total:
        return effects, 0
    order = sorted((i for i, each in enumerate(chosen) if len(each)), key=lambda index: places[index].item)
    intact = [int(place == 0 or index not in known) for place, index in enumerate(order)]
    begins, sizes = [places[index].item for index in order], [len(chosen[index]) for index in order]
    width, groups = passes.plan(begins, sizes, intact, alike=bool(known))
    ways = [(True, width), (False, width), *([(False, 1)] if width > 1 else [])]
    held: dict[str, Any] = {}
    reached = done = replayed = 0

    def run(some: Sequence[tuple[int, int]], **parts: Any) -> Replay:
        calls = dict.fromkeys(index for index, _ in some)
        changed = {index: [head if own == index else NOTHING for own, head in some] for index in calls}
        changes = {places[index]: change(index, heads) for index, heads in changed.items()}
        return passes.run(len(some), changes=changes, **parts)

    for group in groups:
        calls = [order[place] for place in group]
        begin = places[calls[0]].item
        heads = [(index, head) for index in calls for head in chosen[index]]
        while True:
            replays, width = ways[0]
            first = len(heads) % width  # passes after the first are full
            try:
                if replays and reached < begin:
                    held, reached = passes.before(begin, start=reached, held=held), begin
                parts = {"start": begin, "held": passes.copied(begin, held, width)} if replays else {}
                values = list[Float[Tensor, "R K"]]()
                if first or intact[group.start]:
                    found = run([*heads[:first], *[(calls[0], NOTHING)] * (width - first)], **parts)
                    passes.require_same(found, first)
                    values = [passes.effects(found, first)] if first else []
                break
            except Exception as error:
                if len(ways) == 1 or out_of_memory(error):
                    raise
            ways.pop(0)
        if replays and begin > 0:
            replayed += len(calls)
        on_progress(done + first, total)
        for start in range(first, len(heads), width):
            found = run(heads[start : start + width], **parts)
            values.append(passes.effects(found, width))
            on_progress(done + start + width, total)
        split = torch.cat(values).unflatten(0, (-1, passes.batch)).permute(1, 2, 0).cpu().numpy()
        for column, (index, head) in enumerate(heads):
            effects[index][:, :, head] = split[:, :, column]
        for index in calls:
            on_call(index, effects[index])
        done += len(heads)
    return effects, replayed


@torch.no_grad()
def intact_from(passes: Passes, places: Sequence[Address]) -> frozenset[int]:
    """The calls from whose layer on a replay of two copies, in which nothing is changed, gives the intact states; none
    where one does not."""
    held: dict[str, Any] = {}
    found, reached = set[int](), 0
    for index in sorted(range(len(places)), key=lambda index: places[index].item):
        begin = places[index].item
        if begin == 0:
            continue
        try:
            if reached < begin:
                held, reached = passes.before(begin, start=reached, held=held), begin
            passes.require_same(passes.run(2, start=begin, held=passes.copied(begin, held, 2)))
        except Exception as error:
            if out_of_memory(error):
                raise
            return frozenset()
        found.add(index)
    return frozenset(found)
