"""Which dimensions a rotation turns together, found from what it moves and from what is there to be moved."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from toeplens.encodings.rotary import Pairing
from toeplens.lens.kit.pieces import NoForm

_TRIED = 32  # positions on which the pairs of dimensions are tried out
_GLANCED = 3  # positions on which most are ruled out

Layout = tuple[Pairing, Int[Tensor, "n 2"], Int[Tensor, "n 2"]]
Both = list[tuple[Float[Tensor, "B _H N d"], Float[Tensor, "B _H N d"]]]  # queries and keys, before and after


def layouts_of(both: Both, allowed: float, count: int | None = None) -> Iterator[Layout]:
    """Pairings, and the dimensions of each pair before and after, that fit where most is turned; the likeliest first.

    Dimensions in which no query and no key has anything do not move, and may be of the rotated part all the same: it is
    wherever those that move can be pairs, with as few as can be beside them that have something and stay.

    Arguments
        allowed  how far the rotated may be from what was made, relative to the largest
        count    how many pairs there are; any number unless given

    Raises `NoForm` where nothing moves.
    """
    moved = torch.stack([(before != after).flatten(0, -2).any(0) for before, after in both]).any(0)
    if not bool(moved.any()):
        raise NoForm("rotation: it leaves queries and keys as they are.")
    alive = torch.stack([(x != 0).flatten(0, -2).any(0) for each in both for x in each]).any(0)
    parts = [[(b[:, :, -few:], a[:, :, -few:]) for b, a in both] for few in (_GLANCED, _TRIED)]
    for name, start, number in _candidates(moved, alive):
        if count in (None, number):
            pairs, out = (x.to(moved.device) for x in _dimensions(name, start, number))
            if all(_misfit(few, pairs, out) <= allowed for few in parts):
                yield "half" if name == "half" else "interleaved", pairs, out


def _candidates(moved: Bool[Tensor, "d"], alive: Bool[Tensor, "d"]) -> list[tuple[str, int, int]]:
    """Layout, first dimension and number of pairs, the likeliest first.

    The rotated part begins where something moves, or before that where nothing is. The slowest pairs may not show in a
    low precision, so that more may be turned than moved.
    """
    at, width = moved.nonzero().flatten().tolist(), len(moved)
    first, end = at[0], at[-1] + 1
    lowest = first
    while lowest > 0 and not alive[lowest - 1]:
        lowest -= 1
    still = [0, *(alive & ~moved).cumsum(0).tolist()]  # dimensions before this one that have something, and stay
    found = []
    for start in range(first, lowest - 1, -1):
        for count in range((end - start + 1) // 2, (width - start) // 2 + 1):
            stop = start + 2 * count
            edges = (start == 0) + (stop == width)
            rank = (still[stop] - still[start], -edges, first - start, count)
            found.append((rank, start, count))
    return [(name, start, count) for _, start, count in sorted(found) for name in ("half", "beside", "sorted")]


def _dimensions(name: str, start: int, count: int) -> tuple[Int[Tensor, "n 2"], Int[Tensor, "n 2"]]:
    """Those of each pair before and after: half apart, next to each other, or the one and then the other."""
    half = start + torch.stack((torch.arange(count), torch.arange(count) + count), -1)
    beside = start + torch.arange(2 * count).view(-1, 2)
    return half if name == "half" else beside, beside if name == "beside" else half


def ratio(parts: list[tuple[Tensor, Tensor]]) -> Complex[Tensor, "B 1 N n"]:
    """What each pair is multiplied by at each position, by least squares over the heads of queries and keys."""
    size = torch.stack([x.abs().square().sum(1, keepdim=True) for x, _ in parts]).sum(0)
    product = torch.stack([(y * x.conj()).sum(1, keepdim=True) for x, y in parts]).sum(0)
    return product / size.clamp_min(torch.finfo(torch.float64).tiny)


def as_complex(x: Float[Tensor, "*B d"], pairs: Int[Tensor, "n 2"]) -> Complex[Tensor, "*B n"]:
    """Each pair as a complex number."""
    return torch.complex(x[..., pairs[:, 0]], x[..., pairs[:, 1]])


def _misfit(both: Both, pairs: Tensor, out: Tensor) -> float:
    """How far the best rotation of each pair at each position is from what was made, all heads turned alike."""
    parts = [(as_complex(before, pairs), as_complex(after, out)) for before, after in both]
    wrong = max(float((ratio(parts) * x - y).abs().max()) for x, y in parts)
    return wrong / max(float(y.abs().max()) for _, y in parts)
