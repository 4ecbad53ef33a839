"""What a rotary encoding is, found from queries and keys before and after it: pairs, frequencies, magnitude."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from toeplens.encodings.rotary import Pairing
from toeplens.lens.decompose import NoForm
from toeplens.sources.huggingface.proof import tolerance

_TRIED = 32  # positions on which the pairs of dimensions are tried out
_ANGLE = 2.0**-23  # models form their angles in float32, whatever their own dtype


@dataclass(frozen=True)
class Rotation:
    """A rotation R_i of pairs of dimensions, by an angle linear in the position i: R_i R_j^H depends on i - j alone.

    A pair, as a complex number x, becomes m e^(iota (i theta + c)) x; c is common to queries and keys, so that it does
    not show in their products.

    pairing      ``interleaved`` or ``half``: how the pairs lie in what is rotated
    pairs        [n, 2] the dimensions of each pair, before the rotation
    after        [n, 2] those where it comes out; the same, but for models that reorder while they rotate
    frequencies  [n] theta, radians a position; found from the angles, so that each is known modulo 2 pi
    magnitudes   [n] m; 1 unless the model scales while it rotates
    error        largest difference of what this rotation makes of queries and keys from what the model made of them,
                 relative to the largest of those
    """

    pairing: Pairing
    pairs: Int[Tensor, "n 2"]
    after: Int[Tensor, "n 2"]
    frequencies: Float[Tensor, "n"]
    magnitudes: Float[Tensor, "n"]
    error: float


def find_rotation(
    q: tuple[Float[Tensor, "B H N d"], Float[Tensor, "B H N d"]],
    k: tuple[Float[Tensor, "B G N d"], Float[Tensor, "B G N d"]],
    positions: Int[Tensor, "_B N"],
    rounding: torch.dtype | None = None,
) -> Rotation:
    """The rotation that takes the first of each two tensors to the second.

    Arguments
        q, k       before and after the rotation
        positions  of the tokens, of all sequences or of each
        rounding   what queries and keys were rounded to before they came to be of their dtype; that unless given

    Raises `NoForm` where they are not related by one angle a position for each pair of dimensions.
    """
    tokens = q[0].shape[2]
    if tokens < 2:
        raise NoForm(f"rotation: it cannot be read off {tokens} token; at least 2 are needed.")
    positions = positions.expand(q[0].shape[0], -1)
    both = [(before.double(), after.double()) for before, after in (q, k)]
    rounded = tolerance(rounding or q[1].dtype)
    pairing, pairs, out = _pairs(both, rounded)
    parts = [(_complex(before, pairs), _complex(after, out)) for before, after in both]
    ratio = _ratio(parts)
    frequencies, start = _line(ratio.squeeze(1), positions)
    turns = _turn(positions.unsqueeze(-1) * frequencies + start.unsqueeze(1)).unsqueeze(1)
    magnitudes = (ratio * turns.conj()).real.mean((0, 1, 2))
    wrong = max(float((magnitudes * turns * x - y).abs().max()) for x, y in parts)
    error = wrong / max(float(after.abs().max()) for _, after in both)
    allowed = rounded + _ANGLE * float((positions.max() * frequencies.abs()).max())
    if not error <= allowed:
        raise NoForm(
            f"rotation: it is not one angle a position for each pair of dimensions; one angle misses by {error:.1e} of "
            f"the largest query or key, where {allowed:.1e} is rounding."
        )
    return Rotation(pairing, pairs, out, frequencies, magnitudes, error)


def _turn(angles: Float[Tensor, "*B"]) -> Complex[Tensor, "*B"]:
    return torch.polar(torch.ones_like(angles), angles)


def _complex(x: Float[Tensor, "*B d"], pairs: Int[Tensor, "n 2"]) -> Complex[Tensor, "*B n"]:
    return torch.complex(x[..., pairs[:, 0]], x[..., pairs[:, 1]])


def _pairs(both: list[tuple[Tensor, Tensor]], allowed: float) -> tuple[Pairing, Tensor, Tensor]:
    """Pairing, and the dimensions of each pair before and after, on the positions that are turned the most."""
    moved = torch.stack([(before != after).flatten(0, -2).any(0) for before, after in both]).any(0).nonzero()
    if len(moved) == 0:
        raise NoForm("rotation: it leaves queries and keys as they are.")
    tokens = both[0][0].shape[2]
    last = slice(max(0, tokens - _TRIED), tokens)
    few = [(before[:, :, last], after[:, :, last]) for before, after in both]
    first, width, device = int(moved.min()), both[0][0].shape[-1], moved.device
    # the slowest pairs may not show in a low precision, so that more may be turned than moved
    for pairing, pairs, out in _layouts(first, int(moved.max()) + 1, width):
        pairs, out = pairs.to(device), out.to(device)
        if _misfit(few, pairs, out) <= allowed:
            return pairing, pairs, out
    raise NoForm("rotation: it turns no pairs of dimensions that lie next to each other or half apart.")


def _layouts(start: int, end: int, width: int) -> Iterator[tuple[Pairing, Tensor, Tensor]]:
    """Candidates for the pairs among the dimensions from ``start`` to at least ``end``, the narrowest first."""
    for count in range((end - start + 1) // 2, (width - start) // 2 + 1):
        half = start + torch.stack((torch.arange(count), torch.arange(count) + count), -1)
        beside = start + torch.arange(2 * count).view(-1, 2)
        yield "half", half, half
        yield "interleaved", beside, beside
        yield "interleaved", beside, half


def _ratio(parts: list[tuple[Tensor, Tensor]]) -> Complex[Tensor, "B 1 N n"]:
    """What each pair is multiplied by at each position, by least squares over the heads of queries and keys."""
    size = torch.stack([x.abs().square().sum(1, keepdim=True) for x, _ in parts]).sum(0)
    product = torch.stack([(y * x.conj()).sum(1, keepdim=True) for x, y in parts]).sum(0)
    return product / size.clamp_min(torch.finfo(torch.float64).tiny)


def _misfit(both: list[tuple[Tensor, Tensor]], pairs: Tensor, out: Tensor) -> float:
    """How far the best rotation of each pair at each position is from what was made, all heads turned alike."""
    parts = [(_complex(before, pairs), _complex(after, out)) for before, after in both]
    wrong = max(float((_ratio(parts) * x - y).abs().max()) for x, y in parts)
    return wrong / max(float(y.abs().max()) for _, y in parts)


def _line(
    ratio: Complex[Tensor, "B N n"], positions: Int[Tensor, "B N"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "B n"]]:
    """Slope, and each sequence's start, of the angles as a function of the position."""
    beside = (positions.diff(dim=1) == 1).unsqueeze(-1)
    if not beside.any():
        raise NoForm("rotation: no two tokens that follow each other are one position apart.")
    slope = ((ratio[:, 1:] * ratio[:, :-1].conj()) * beside).sum((0, 1)).angle()
    # the angle between neighbours leaves little rounding to correct: by least squares over all positions
    places = positions.double().unsqueeze(-1)
    middle = places.mean(1, keepdim=True)
    rest = ratio * _turn(-places * slope)
    start = rest.sum(1, keepdim=True).angle()
    left = (rest * _turn(-start)).angle()
    correction = ((places - middle) * left).sum((0, 1)) / (places - middle).square().sum()
    start = start + left.mean(1, keepdim=True) - correction * middle
    return slope + correction, start.squeeze(1)
