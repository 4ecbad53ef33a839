"""Queries and keys before their rotation, and which dimensions it turns together: found from what it moves."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from toeplens.encodings.rotary import Pairing
from toeplens.lens.kit.rotation import index_of
from toeplens.lens.kit.terms import NoForm

_TRIED = 32  # positions on which the pairs of dimensions are tried out
_GLANCED = 3  # positions on which most are ruled out
_ROUNDED = 4  # roundings, each by one unit, of a number that is multiplied

Layout = tuple[Pairing, Int[Tensor, "n 2"], Int[Tensor, "n 2"]]
Turned = tuple[Tensor, Tensor]  # what was given to a rotation, and what became of it
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
    first, second = (x[..., index_of(dimensions)] for dimensions in pairs.unbind(-1))
    return torch.complex(first, second)


def _misfit(both: Both, pairs: Tensor, out: Tensor) -> float:
    """How far the best rotation of each pair at each position is from what was made, all heads turned alike."""
    parts = [(as_complex(before, pairs), as_complex(after, out)) for before, after in both]
    wrong = max(float((ratio(parts) * x - y).abs().max()) for x, y in parts)
    return wrong / max(float(y.abs().max()) for _, y in parts)


def before_rotation(final: Tensor, turned: list[Turned]) -> Tensor | None:
    """Queries or keys with what a rotation made of some of their dimensions put back; None if that is not in them.

    What was rotated may have been multiplied by a number for each token and head since, as a norm without weights does:
    such a factor and a rotation can change places, so that it goes with what is put back.
    """
    for exact in (True, False):
        for before, after in reversed(turned):
            if after.ndim != 4:
                continue
            for x, y in ((before, after), (before.transpose(1, 2), after.transpose(1, 2))):
                width, heads = y.shape[-1], final.shape[1]
                same = y.shape[0] == final.shape[0] and heads % max(1, y.shape[1]) == 0 and y.shape[2] == final.shape[2]
                if not same or width > final.shape[-1] or y.numel() == 0:
                    continue
                for start in dict.fromkeys((0, final.shape[-1] - width)):
                    part = final[..., start : start + width]
                    for order in _orders(y.shape[1], heads, final.device):
                        factor = _factor(part, y[:, order], exact)
                        if factor is None:
                            continue
                        put = x[:, order] if exact else factor * x[:, order]
                        if width == final.shape[-1]:
                            return put.to(final.dtype)
                        whole = final.clone()
                        whole[..., start : start + width] = put
                        return whole
    return None


def _orders(groups: int, heads: int, device: torch.device) -> list[Tensor]:
    """Which of the heads that were rotated each head may have: one after another, or each several times on end."""
    places = torch.arange(heads, device=device)
    return [places % groups] if groups in (1, heads) else [places % groups, places // (heads // groups)]


def _factor(part: Tensor, turned: Tensor, exact: bool) -> Tensor | float | None:
    """The number for each token and head that takes the second to the first; None if that leaves more than rounding."""
    if exact:
        return 1.0 if torch.equal(part, turned.to(part.dtype)) else None
    x, y = part.double(), turned.double()
    factor = (x * y).sum(-1, keepdim=True) / y.square().sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    missed = (factor * y - x).abs().amax(-1)
    return factor if bool((missed <= _ROUNDED * torch.finfo(part.dtype).eps * x.abs().amax(-1)).all()) else None
