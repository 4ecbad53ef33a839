"""A model's own tables of cosines and sines, found among what its rotation is given."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from toeplens.lens.kit.pieces import NoForm

_SIZES = 0.05  # what the sizes of numbers of one size may differ by, rounded in any precision


def tables_of(given: Iterable[Tensor], tokens: int) -> list[Complex[Tensor, "_B N n"]]:
    """What may be tables of e^(iota angle), of each token and pair: complex ones, two real ones, the halves of one."""
    rows = [each for x in given if (each := _rows(x, tokens)) is not None]
    real = [x.double() for x in rows if x.is_floating_point()]
    found = [x.to(torch.complex128) for x in rows if x.is_complex()]
    found += [torch.complex(x, y) for x, y in permutations(real, 2) if x.shape == y.shape]
    found += [torch.complex(*pair) for x in real if x.shape[-1] % 2 == 0 for pair in permutations(x.chunk(2, -1))]
    return [_once(x) for x in found if _turns(x)]


def _turns(x: Complex[Tensor, "_B N m"]) -> bool:
    """Whether each column is of one size."""
    sizes = x.abs().flatten(0, 1)
    return bool((sizes.amax(0) - sizes.amin(0) <= _SIZES * sizes.amax(0)).all())


def _once(x: Complex[Tensor, "_B N m"]) -> Complex[Tensor, "_B N n"]:
    """A column for each pair, where a table has one for each of its dimensions."""
    half = x.shape[-1] // 2
    if x.shape[-1] % 2:
        return x
    if torch.equal(x[..., :half], x[..., half:]):
        return x[..., :half]
    return x[..., ::2] if torch.equal(x[..., ::2], x[..., 1::2]) else x


def _rows(x: Tensor, tokens: int) -> Tensor | None:
    """[B or 1, N, m] of a tensor that has such rows, with dimensions of 1 among its own."""
    lead = [size for size in x.shape[:-1] if size != 1]
    if x.ndim < 2 or x.shape[-1] == 0 or lead[-1:] != [tokens] or len(lead) > 2:
        return None
    return x.detach().reshape(-1, tokens, x.shape[-1])


def line(
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
    rest = ratio * turn(-places * slope)
    start = rest.sum(1, keepdim=True).angle()
    left = (rest * turn(-start)).angle()
    correction = ((places - middle) * left).sum((0, 1)) / (places - middle).square().sum()
    start = start + left.mean(1, keepdim=True) - correction * middle
    return slope + correction, start.squeeze(1)


def turn(angles: Float[Tensor, "*B"]) -> Complex[Tensor, "*B"]:
    """e^(iota angle)."""
    return torch.polar(torch.ones_like(angles), angles)
