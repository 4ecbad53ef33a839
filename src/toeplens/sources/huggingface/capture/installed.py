"""One attention call of an encoding installed by `toeplens.hosts.install`; the encoding itself provides its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from toeplens.encodings import PositionalEncoding
from toeplens.encodings.attention import AttentionParts
from toeplens.lens.kit.terms import NoForm
from toeplens.sources.huggingface.capture.attention import Attention
from toeplens.sources.huggingface.capture.rotation import Rotation, find_rotation, stays
from toeplens.sources.huggingface.hosts.passes import PASS
from toeplens.sources.huggingface.hosts.seat import Here, Seat, scale_of
from toeplens.sources.huggingface.model import SEAT

_OTHER = {"score": "products", "transform_logits": "logits", "transform_weights": "weights", "add_values": "outputs"}
_NO_ROTATION = (
    "changes queries and keys by more than a rotation of pairs of dimensions, equal in all heads, by an angle "
    "linear in the position."
)


@dataclass(frozen=True)
class RotationParts:
    """Queries and keys before their rotation, the rotation, or why it is not known; see `AttentionCall`."""

    unrotated: tuple[Float[Tensor, "B H N d"], Float[Tensor, "B _G N d"]] | None = None
    rotation: Rotation | None = None
    unknown: str | None = None


@dataclass(frozen=True)
class InstalledCall:
    """A call in its parts.

    parts      of the attention
    added      [B, Nq, H, dv] part of the heads' outputs besides weighted values; None if there is none
    positions  [_B, Nq] of the queries
    rotation   of queries and keys
    """

    parts: Attention
    added: Float[Tensor, "B Nq H dv"] | None
    positions: Int[Tensor, "_B Nq"]
    rotation: RotationParts


def pass_of(kwargs: Mapping[str, Any]) -> Here | None:
    """The state of the pass in the arguments of an attention module with an encoding; None for others."""
    told = kwargs.get(PASS)
    return told if isinstance(told, Here) else None


def positions_of(here: Here | None) -> Int[Tensor, "_B Nq"] | None:
    """The positions of a pass's queries; None without an installed encoding."""
    return None if here is None else here.now.positions.view(-1, here.now.positions.shape[-1])


def without_pass(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an attention function, without the one added by toeplens."""
    return {name: x for name, x in kwargs.items() if name != PASS}


def name_of(module: nn.Module) -> str | None:
    """The name of the encoding installed in a module."""
    seat: Seat | None = vars(module).get(SEAT)
    return None if seat is None else seat.stack.name


def installed_call(
    module: nn.Module,
    q: Float[Tensor, "B H Nq d"],
    k: Float[Tensor, "B G Nk d"],
    v: Float[Tensor, "B G Nk dv"],
    mask: Tensor | None,
    here: Here,
    kwargs: Mapping[str, Any],
    equal: tuple[Tensor, Tensor] | None,
    rounding: torch.dtype,
) -> InstalledCall:
    """The parts of a module's attention call with its encoding.

    Arguments
        equal     queries and keys of one token repeated at every position (`of_equal_tokens`); None if not known
        rounding  the coarsest dtype of the model's weights
    """
    seat: Seat = vars(module)[SEAT]
    how = without_pass(kwargs)
    made = seat.parts(module, q, k, v, mask, here, **how)
    parts = Attention(
        q=made.q,
        k=made.k,
        v=v,
        scale=float(scale_of(q, how)),
        softcap=how.get("softcap"),
        sinks=how.get("s_aux"),
        bias=made.bias,
        visible=made.visible,
        factor=made.factor,
    )
    positions = positions_of(here)
    assert positions is not None
    rotation = _rotation(q, k, made, positions, rounding)
    why = rotation.unknown or _other(seat.encoding)
    if why is None and equal is None:
        why = "may have keys that depend on position beyond their content; this could not be checked."
    if why is None and equal is not None and not stays(*equal, None, positions, rounding):
        why = "has queries or keys that depend on position in an unknown way."
    if why is not None:
        rotation = RotationParts(rotation.unrotated, None, f"encoding {seat.stack.name} {why}")
    return InstalledCall(parts, None if made.values is None else made.values.transpose(1, 2), positions, rotation)


def _other(encoding: PositionalEncoding) -> str | None:
    """What an encoding changes other than by a rotation and a bias; None if nothing."""
    found = [what for hook, what in _OTHER.items() if encoding.overrides(hook)]
    return f"changes the {' and the '.join(found)} by more than a rotation or a bias." if found else None


def _rotation(
    q: Tensor, k: Tensor, made: AttentionParts, positions: Int[Tensor, "_B N"], rounding: torch.dtype
) -> RotationParts:
    """How queries and keys were changed before their product, if by a rotation of pairs."""
    if made.q is q and made.k is k:
        return RotationParts()
    if made.k.shape[1] != k.shape[1]:  # keys per head
        k = k.repeat_interleave(made.k.shape[1] // k.shape[1], 1)
    if torch.equal(made.q, q) and torch.equal(made.k, k):
        return RotationParts()
    try:
        if made.q.shape == q.shape:
            return RotationParts((q, k), find_rotation((q, made.q), (k, made.k), positions, rounding))
    except NoForm:
        pass
    return RotationParts((q, k), None, _NO_ROTATION)
