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
from toeplens.sources.huggingface.outcome import apart, moved
from toeplens.sources.huggingface.passes import Passes, fits, same
from toeplens.sources.huggingface.replays import Address, Replay

_NOTHING = -1  # in place of a head


@torch.no_grad()
def silenced(
    passes: Passes,
    intact: Replay,
    baseline: Float[Tensor, "B"] | None,
    places: Sequence[Address],
    counts: Sequence[int],
    on_progress: Callable[[int, int], None],
) -> tuple[list[Float[np.ndarray, "B _H"]], int]:
    """Each call's effects, and how many calls were replayed from their layer.

    The heads of a call are copies of the batch in a few passes. In the first of these the last copy has nothing
    silenced: it has to give the intact states, and what the layers before the next call's hand over is taken of it.
    (The last, because where sequences compete, as for an expert's places, the later ones lose.) Where a replay fails in
    that, whole passes are run from there on, and where copies of the batch depend on each other, one at a time.
    """
    ways = list(dict.fromkeys([(True, passes.width), (False, passes.width), (False, 1)]))
    effects = [np.empty((passes.batch, count)) for count in counts]
    held: dict[str, Any] = {}
    reached = done = replayed = 0
    order = sorted(range(len(places)), key=lambda index: places[index].item)

    def run(index: int, heads: Sequence[int], **parts: Any) -> Replay:
        silent = torch.tensor(heads).unsqueeze(-1) == torch.arange(counts[index])
        change = {places[index]: _Silence(silent.repeat_interleave(passes.batch, 0))}
        return passes.run(len(heads), changes=change, **parts)

    for index, following in zip(order, [*order[1:], order[-1]], strict=True):
        begin, until, heads = places[index].item, places[following].item, range(counts[index])
        if ways[0][0] and reached < begin:
            held, reached = passes.run(start=reached, held=held, until=begin).kept, begin
        while True:
            replays, width = ways[0]
            parts = {"start": begin, "held": held} if replays else {}
            try:
                found = run(index, [*heads[: width - 1], _NOTHING], until=until if replays else 0, **parts)
                _nothing_changed(passes, found, intact)
                break
            except Exception as error:
                if len(ways) == 1 or _out_of_memory(error):
                    raise
            ways.pop(0)
        if replays:
            held, reached = found.kept, until
            replayed += begin > 0
        values = [_values(passes, found, intact, baseline)[: -passes.batch]] if width > 1 else []
        on_progress(done + len(heads[: width - 1]), sum(counts))
        for first in range(width - 1, len(heads), width):
            found = run(index, heads[first : first + width], **parts)
            values.append(_values(passes, found, intact, baseline))
            on_progress(done + len(heads[: first + width]), sum(counts))
        effects[index] = torch.cat(values).view(-1, passes.batch).T.cpu().numpy()
        done += counts[index]
    return effects, replayed


def _nothing_changed(passes: Passes, found: Replay, intact: Replay) -> None:
    """Refuse a pass whose last copy of the batch is not as it was."""
    far = apart(found.states[-passes.batch :], intact.states, passes.outcome.counted)
    if not far <= same(intact.states.dtype):
        raise InputError(
            f"model: {passes.kind} was run again with nothing silenced, and its last hidden states are {far:.1e} apart."
        )


def _values(passes: Passes, found: Replay, intact: Replay, baseline: Float[Tensor, "B"] | None) -> Float[Tensor, "R"]:
    if baseline is None:
        return moved(found.states, intact.states, passes.outcome.counted)
    return passes.losses(found) - baseline.repeat(found.rows)


@dataclass(frozen=True)
class _Silence:
    """Puts 0 in place of some heads' outputs."""

    silent: Bool[Tensor, "R H"]

    def __call__(self, heads: Float[Tensor, "R N H dv"]) -> Float[Tensor, "R N H dv"]:
        fits(heads, *self.silent.shape)
        return heads.masked_fill(self.silent.to(heads.device)[:, None, :, None], 0)


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
