"""Queries and keys before their rotation; and whether anything else makes them depend on the position."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.sources.huggingface.cosines import turn
from toeplens.sources.huggingface.pairing import as_complex
from toeplens.sources.huggingface.proof import tolerance
from toeplens.sources.huggingface.rotation import Rotation

_ROUNDED = 4  # roundings, each by one unit, of a number that is multiplied
_ANGLE = 2.0**-23

Turned = tuple[Tensor, Tensor]  # what was given to a rotation, and what became of it


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
                        if factor is not None:
                            whole = final.clone()
                            whole[..., start : start + width] = factor * x[:, order]
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


def stays(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B G N d"],
    rotation: Rotation | None,
    positions: Int[Tensor, "_B N"],
    rounding: torch.dtype,
) -> bool:
    """Whether queries and keys of equal tokens are the same at every position, but for a rotation.

    A number that a query is multiplied by may depend on its position: it stays where it is, and its logits go with it.
    """
    allowed = max(tolerance(q.dtype), tolerance(rounding))
    if rotation is not None:
        allowed += _ANGLE * float((positions.max() * rotation.frequencies.abs()).max())
        q, k = (_turned_back(x, rotation, positions[:1]) for x in (q, k))
    q = torch.nn.functional.normalize(q.double(), dim=-1)
    q = torch.where((q == 0).all(-1, keepdim=True), q[:, :, -1:], q)  # multiplied by 0
    return all(bool((x - x[:, :, -1:]).abs().max() <= allowed * x.abs().max()) for x in (q, k.double()) if x.numel())


def _turned_back(x: Float[Tensor, "B H N d"], rotation: Rotation, positions: Int[Tensor, "1 N"]) -> Tensor:
    angles = -positions.unsqueeze(-1) * rotation.frequencies
    made, back = x.double().clone(), as_complex(x.double(), rotation.after) * turn(angles).unsqueeze(1)
    made[..., rotation.after[:, 0]], made[..., rotation.after[:, 1]] = back.real, back.imag
    return made
