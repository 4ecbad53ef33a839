"""Every head of a Hugging Face model silenced alone, in passes that begin at its layer where that gives the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from toeplens.ground import InputError
from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.outcome import apart, moved
from toeplens.sources.huggingface.passes import Passes, fits
from toeplens.sources.huggingface.replays import Address, Replay

_NOTHING = -1  # in place of a head


@torch.no_grad()
def silenced(
    passes: Passes,
    intact: Replay,
    baseline: Float[Tensor, "B K"] | None,
    places: Sequence[Address],
    counts: Sequence[int],
    chosen: Sequence[Sequence[int]],
    on_call: Callable[[int, Float[np.ndarray, "B K _H"]], None],
    on_progress: Callable[[int, int], None],
) -> tuple[list[Float[np.ndarray, "B K _H"]], int]:
    """Each call's effects, NaN for heads that are not chosen, and how many calls were replayed from their layer.

    The heads of a call are copies of the batch in a few passes of equally many copies. Whether copies of the batch are
    independent is seen in a pass with nothing silenced, all of whose copies have to give the intact states; where they
    are not, passes have one. What the layers before a call's hand over is taken of a pass of as many copies with
    nothing silenced, which ends there: however their tensors are laid out, no silenced head is in them. In the first
    pass of each call some copies have nothing silenced and have to give the intact states; where a replay fails in
    that, whole passes are run from there on.
    """
    effects = [np.full((passes.batch, passes.outcome.blocks, count), np.nan) for count in counts]
    total = sum(map(len, chosen))
    if not total:
        return effects, 0
    width = _width(passes, intact, max(map(len, chosen)))
    ways = [(True, width), (False, width), *([(False, 1)] if width > 1 else [])]
    held: dict[str, Any] = {}
    reached = done = replayed = 0

    def run(index: int, heads: Sequence[int], **parts: Any) -> Replay:
        silent = torch.tensor(heads).unsqueeze(-1) == torch.arange(counts[index])
        change = {places[index]: _Silence(silent.repeat_interleave(passes.batch, 0))}
        return passes.run(len(heads), changes=change, **parts)

    for index in sorted(range(len(places)), key=lambda index: places[index].item):
        begin, heads = places[index].item, list(chosen[index])
        if not heads:
            continue
        while True:
            replays, width = ways[0]
            first = len(heads) - len(heads) // width * width  # passes after the first are full
            try:
                if replays and reached < begin:
                    held, reached = passes.before(begin, width, start=reached, held=held), begin
                parts = {"start": begin, "held": held} if replays else {}
                found = run(index, [*heads[:first], *[_NOTHING] * (width - first)], **parts)
                _nothing_changed(passes, found, intact, first)
                break
            except Exception as error:
                if len(ways) == 1 or out_of_memory(error):
                    raise
            ways.pop(0)
        replayed += replays and begin > 0
        values = [_values(passes, found, intact, baseline)[: first * passes.batch]] if first else []
        on_progress(done + first, total)
        for start in range(first, len(heads), width):
            found = run(index, heads[start : start + width], **parts)
            values.append(_values(passes, found, intact, baseline))
            on_progress(done + start + width, total)
        split = torch.cat(values).unflatten(0, (-1, passes.batch))
        effects[index][:, :, heads] = split.permute(1, 2, 0).cpu().numpy()
        on_call(index, effects[index])
        done += len(heads)
    return effects, replayed


def _width(passes: Passes, intact: Replay, most: int) -> int:
    """Copies of a pass: those of ``most`` heads, and one more, in as few passes as can be; 1 if they are not alike."""
    copies = most + 1
    width = -(-copies // -(-copies // passes.width))
    try:
        if width > 1:
            _nothing_changed(passes, passes.run(width), intact)
    except Exception as error:
        if out_of_memory(error):
            raise
        return 1
    return width


def _nothing_changed(passes: Passes, found: Replay, intact: Replay, first: int = 0) -> None:
    """Refuse a pass in which the copies of the batch from ``first`` on are not as they were."""
    copies = found.states[first * passes.batch :].split(passes.batch)
    far = max(apart(states, intact.states, passes.outcome.counted) for states in copies)
    if not far <= passes.same:
        raise InputError(
            f"model: {passes.kind} was run again with nothing silenced, and its last hidden states are {far:.1e} apart."
        )


def _values(
    passes: Passes, found: Replay, intact: Replay, baseline: Float[Tensor, "B K"] | None
) -> Float[Tensor, "R K"]:
    if baseline is None:
        return moved(found.states, intact.states, passes.outcome.counted, passes.outcome.blocks)
    return passes.losses(found) - baseline.repeat(found.rows, 1)


@dataclass(frozen=True)
class _Silence:
    """Puts 0 in place of some heads' outputs."""

    silent: Bool[Tensor, "R H"]

    def __call__(self, heads: Float[Tensor, "R N H dv"]) -> Float[Tensor, "R N H dv"]:
        fits(heads, *self.silent.shape)
        return heads.masked_fill(self.silent.to(heads.device)[:, None, :, None], 0)
