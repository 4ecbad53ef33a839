"""Windows on both sides and attention in chunks, as parts that see all keys, or those up to their own in a window.

Put query i in the place i + r: the keys from i - r to i + r are then those of a window of 2 r + 1 that ends there. The
last r queries have no such place; in the sequence read backwards they are among the first, and have one. Where a
sequence is so short that a query has neither, it sees all keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.lens.kit.movable import MovableKeys


@dataclass(frozen=True)
class Part:
    """Some queries of some sequences, with the keys that any of them sees.

    keys       without chunks, and with a window of causal attention alone
    sequences  [b] of the whole, which are the part's 0, 1, ..
    queries    [n] of the whole
    rows       [n] where those are in the part; its other queries do not count
    """

    keys: MovableKeys
    sequences: Int[Tensor, "b"]
    queries: Int[Tensor, "n"]
    rows: Int[Tensor, "n"]

    def put(self, whole: Float[Tensor, "k B H N"], found: Float[Tensor, "k b H n2"]) -> None:
        """Write what was found of the part's rows in its place."""
        some = whole[:, self.sequences]
        some[..., self.queries] = found[..., self.rows]
        whole[:, self.sequences] = some


def parts_of(keys: MovableKeys) -> Iterator[Part]:
    """Parts in which each query stands once, with the keys that it sees; none for those that see none."""
    length, device = keys.q.shape[2], keys.q.device
    every, size = torch.arange(len(keys.q), device=device), keys.chunk or length
    for start in range(0, length, size):
        chunk = _cut(keys, every, start, min(start + size, length))
        if keys.causal or keys.window is None:
            rows = torch.arange(chunk.q.shape[2], device=device)
            yield Part(chunk, every, start + rows, rows)
            continue
        for end in chunk.ends.unique().tolist():
            some = every[chunk.ends == end]
            for part in _on_both_sides(_cut(chunk, some, 0, end), keys.window - 1):
                yield replace(part, sequences=some, queries=start + part.queries)


def _on_both_sides(keys: MovableKeys, reach: int) -> Iterator[Part]:
    """Of sequences without padding, whose queries see ``reach`` keys on either side beside their own."""
    count, device = keys.q.shape[2], keys.q.device
    every, places = torch.arange(len(keys.q), device=device), torch.arange(count, device=device)
    whole = places[max(0, count - reach) : reach]
    if len(whole):
        asked = ((places >= count - reach) & (places < reach)).expand(len(every), -1)
        yield Part(replace(keys, window=None, asked=_both(asked, keys.asked)), every, whole, whole)
    if reach < count:
        yield Part(_later(keys, reach), every, places[: count - reach], places[reach:])
    last = min(2 * reach, count)
    if last > reach:
        back = _later(_backwards(_cut(keys, every, count - last, count)), reach)
        yield Part(back, every, places[max(count - reach, reach) :], places[reach:last].flip(0))


def _later(keys: MovableKeys, by: int) -> MovableKeys:
    """Causal, with each query so many places later; the first of them have none, and the last are left out."""
    count = keys.q.shape[2]
    q = torch.zeros_like(keys.q)
    q[:, :, by:] = keys.q[:, :, : count - by]
    asked = (torch.arange(count, device=q.device) >= by).expand(len(q), -1)
    if keys.asked is not None:
        asked = asked & keys.asked.roll(by, 1)
    bias = None if keys.bias is None else keys.bias[:, count - 1 - by : 2 * count - 1 - by]
    window = 2 * by + 1
    return replace(keys, q=q, causal=True, asked=asked, bias=bias, window=window if window < count else None)


def _backwards(keys: MovableKeys) -> MovableKeys:
    """Sequences without padding, and what is by offset on both sides, read from the end."""
    return replace(
        keys,
        q=keys.q.flip(2),
        content=keys.content.flip(2),
        places=None if keys.places is None else keys.places.flip(2),
        turns=keys.turns.flip(1),
        bias=None if keys.bias is None else keys.bias.flip(1),
        asked=None if keys.asked is None else keys.asked.flip(1),
    )


def _cut(keys: MovableKeys, some: Int[Tensor, "b"], start: int, stop: int) -> MovableKeys:
    """Some sequences from one place up to another, without chunks."""
    length, count = keys.q.shape[2], stop - start
    if len(some) == len(keys.q) and count == length:
        return replace(keys, chunk=None)
    rows, places, bias = slice(start, stop), keys.places, keys.bias
    if places is not None:
        places = (places[some] if len(places) > 1 else places)[:, :, rows]
    if bias is not None:
        bias = bias[:, :count] if keys.causal else bias[:, length - count : length - 1 + count]
    return replace(
        keys,
        q=keys.q[some][:, :, rows],
        content=keys.content[some][:, :, rows],
        places=places,
        turns=keys.turns[:, rows],
        bias=bias,
        ends=(keys.ends[some] - start).clamp(0, count),
        asked=None if keys.asked is None else keys.asked[some][:, rows],
        window=None if keys.window is None or keys.window >= count else keys.window,
        chunk=None,
    )


def _both(x: Tensor, y: Tensor | None) -> Tensor:
    return x if y is None else x & y
