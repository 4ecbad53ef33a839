"""What a mask of queries by keys says, read a block of queries at a time: one [N, N] mask is held, no copy of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

AT_ONCE = 1 << 24  # numbers of a block


def blocks(queries: int, numbers: int) -> Iterator[slice]:
    """Slices of the queries, as many together as have at most `AT_ONCE` numbers, with ``numbers`` to a query."""
    step = max(1, AT_ONCE // max(1, numbers))
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))


def one_way(visible: Bool[Tensor, "_B _H Nq Nk"]) -> bool:
    """Whether no query sees a key after it."""
    return not any(bool(part.triu(1 + rows.start).any()) for rows, part in _parts(visible))


def just_causal(visible: Bool[Tensor, "_B _H Nq Nk"]) -> bool:
    """Whether every query sees its own key and those before, and no other."""
    return all(bool((part == _earlier(rows, part)).all()) for rows, part in _parts(visible))


def window_of(visible: Bool[Tensor, "_B _H Nq Nk"]) -> int | None:
    """Of a causal mask, how many keys up to its own a query sees at most; None if one sees all."""
    reach, keys = 0, visible.shape[-1]
    for rows, part in _parts(visible):
        near = part.any(0).any(0)
        first = near.to(torch.uint8).argmax(-1)
        own = torch.arange(rows.start, rows.stop, device=near.device)
        reach = max(reach, int(((own - first + 1) * near.any(-1)).max()))
    return reach if reach < keys else None


def padded_lengths(
    visible: Bool[Tensor, "B _H Nq Nk"], causal: bool, window: int | None
) -> Int[Tensor, "B"] | str | None:
    """Tokens of each sequence, if nothing but padding after them is hidden, and what ``causal`` and ``window`` hide.

    None if there is no padding; a word on what is seen where something else is hidden.
    """
    keys = visible.shape[-1]
    seen = torch.zeros(visible.shape[0], keys, dtype=torch.bool, device=visible.device)
    for _, part in _parts(visible):
        seen |= part.any(2).any(1)
    ends = seen.sum(-1)
    there = torch.arange(keys, device=seen.device) < ends.unsqueeze(-1)
    for rows, part in _parts(visible):
        wanted = there[:, None, None, :].expand(-1, 1, rows.stop - rows.start, -1)
        if causal:
            wanted = wanted & _earlier(rows, part)
        if window is not None:
            wanted = wanted & ~_earlier(rows, part, window)
        if bool(((part != wanted) & there[:, None, rows, None]).any()):
            return "some of the keys"
    return None if bool(there.all()) else ends


def table_by_offset(
    bias: Float[Tensor, "B Nq Nk"], seen: Bool[Tensor, "B Nq Nk"] | None, causal: bool, relative: bool, allowed: float
) -> Float[Tensor, "D"] | None:
    """One head's bias as a function of the offset, of -(N-1) .. N-1, where keys are seen; None if it is no such thing.

    Arguments
        relative  whether that of each query's own key is taken off first, of those that see it
        allowed   largest difference, relative to the largest bias, that rounding explains
    """
    length = bias.shape[1]
    sums, counts = torch.zeros(2, 2 * length - 1, dtype=torch.float64, device=bias.device)

    def each() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in blocks(length, bias.shape[0] * bias.shape[2]):
            part = bias[:, rows].double()
            there = torch.ones_like(part, dtype=torch.bool) if seen is None else seen[:, rows].expand_as(part)
            there = there & _earlier(rows, part) if causal else there
            own = torch.arange(rows.start, rows.stop, device=bias.device).unsqueeze(-1)
            if relative:
                places = own.expand(len(part), -1, 1)
                part, there = part - part.gather(2, places), there & there.gather(2, places)
            at = own - torch.arange(bias.shape[2], device=bias.device) + length - 1
            yield at.expand_as(part)[there], part[there]

    size = 0.0
    for at, values in each():
        sums.index_add_(0, at, values)
        counts.index_add_(0, at, torch.ones_like(values))
        size = max(size, float(values.abs().max()) if len(values) else 0.0)
    table = sums / counts.clamp_min(1)
    missed = (float((table[at] - values).abs().max()) for at, values in each() if len(at))
    return table if all(miss <= allowed * size for miss in missed) else None


def _parts(visible: Tensor) -> Iterator[tuple[slice, Tensor]]:
    numbers = visible.shape[0] * visible.shape[1] * visible.shape[3]
    for rows in blocks(visible.shape[2], numbers):
        yield rows, visible[:, :, rows]


def _earlier(rows: slice, part: Tensor, by: int = 0) -> Bool[Tensor, "R Nk"]:
    """Whether a key is at least so many places before the query."""
    own = torch.arange(rows.start, rows.stop, device=part.device).unsqueeze(-1)
    return torch.arange(part.shape[-1], device=part.device) <= own - by
