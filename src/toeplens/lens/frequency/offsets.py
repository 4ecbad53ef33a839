"""Rotary offsets: pairs of dimensions in which queries and keys stand at an angle to each other that stays the same.

Such a pair's part of a logit is a function of the distance alone, m cos(phi + theta (i - j)): position without content.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.encodings.rotary import Pairing
from toeplens.ground import InputError
from toeplens.lens.kit.rotation import pair_numbers, pairing_of
from toeplens.lens.kit.toeplitz import Layout, as_bhnd


class RotaryOffsets(NamedTuple):
    """Of each head and pair, before the rotation.

    strength  [H, n] |E q| |E k| / (E|q| E|k|), means over the tokens of all sequences, pairs as complex numbers: 1
              where all queries point one way, and all keys; near 0 where either points anywhere. NaN where either is 0
    angle     [H, n] of E q conj(E k), radians in (-pi, pi]: the logit's part is largest at the offset i - j that turns
              it back to 0
    """

    strength: Float[Tensor, "H n"]
    angle: Float[Tensor, "H n"]


@torch.no_grad()
def rotary_offsets(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B G N d"],
    pairs: int,
    lengths: Int[Tensor, "B"] | None = None,
    *,
    pairing: Pairing,
    layout: Layout | None = None,
) -> RotaryOffsets:
    """How fixed the angle between queries and keys is, pair by pair (after Jonasson 2025, arXiv 2503.01832).

    The source calls pairs with large values in queries and keys at such an angle rotary offset features; the measure is
    ours. In float64.

    Arguments
        q, k     before their rotation; head h reads key head h // (H / G)
        pairs    how many pairs are turned
        lengths  tokens of each sequence before its padding; all unless given
        pairing, layout  as in `toeplens.lens.behaviour`

    Raises `InputError` for shapes that do not fit.
    """
    q, k = as_bhnd(q, k, layout, required=True)
    if not 0 <= 2 * pairs <= q.shape[-1] or q.shape[1] % k.shape[1]:
        raise InputError(
            f"pairs: {pairs} were given; {list(q.shape)} and {list(k.shape)} hold no so many in each head."
        )
    order = pair_numbers(pairs, pairing_of(pairing), q.device).argsort(stable=True)
    there = torch.ones(len(q), q.shape[2], dtype=torch.float64, device=q.device)
    if lengths is not None:
        there = (torch.arange(q.shape[2], device=q.device) < lengths.to(q.device).unsqueeze(1)).double()
    means, sizes = zip(*(_mean(x[..., order], there) for x in (q, k)), strict=True)
    group = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // k.shape[1])
    strength = means[0].abs() * means[1].abs()[group] / (sizes[0] * sizes[1][group])
    return RotaryOffsets(strength, (means[0] * means[1][group].conj()).angle())


def _mean(x: Float[Tensor, "B H N p"], there: Float[Tensor, "B N"]) -> tuple[Tensor, Tensor]:
    """Of each head and pair, the mean over tokens as a complex number, and the mean of its size."""
    x = x.double()
    weight = (there / there.sum())[:, None, None, :]
    sizes = (x[..., 0::2].square() + x[..., 1::2].square()).sqrt()
    mean, size = ((weight @ each).sum((0, 2)) for each in (x, sizes))
    return torch.view_as_complex(mean.unflatten(-1, (-1, 2))), size
