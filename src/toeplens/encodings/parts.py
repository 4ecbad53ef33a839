"""What an encoding does in one attention, taken apart: what enters the product, is added to it, follows the softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from toeplens.encodings.attention import Told, after_rotation
from toeplens.encodings.shapes import Keys, Queries


@dataclass(frozen=True)
class AttentionParts:
    """Weights = factor softmax(softcap(scale q . k) + bias) over the visible keys and a sink.

    q, k       [B, H, Nq, d], [B, G, Nk, d] as they enter the product, after `PositionalEncoding.rotate`
    bias       what is added to the scaled product, whichever hooks make it: 0 where no key is visible; None if nothing
    visible    True where a query sees a key; None if every query sees every key
    factor     what the weights are multiplied by after the softmax; None if they are not
    values     [B, H, Nq, dv] what is added to the heads' outputs; None if nothing is
    """

    q: Float[Tensor, "B H Nq d"]
    k: Float[Tensor, "B G Nk d"]
    bias: Float[Tensor, "_B _H Nq Nk"] | None
    visible: Bool[Tensor, "_B _H _Nq Nk"] | None
    factor: Float[Tensor, "B H Nq Nk"] | None
    values: Float[Tensor, "B H Nq dv"] | None


@torch.no_grad()
def attention_parts(q: Queries, k: Keys, **told: Unpack[Told]) -> AttentionParts:
    """The parts of the attention that `toeplens.encodings.attend` computes of these queries and keys.

    Where an encoding forms its logits otherwise (``score``, ``transform_logits``), the bias is the difference of these
    logits and the scaled product. It is formed for all queries and keys: memory grows with their product.

    Arguments are those of `toeplens.encodings.attend`.
    """
    encoding = told["encoding"]
    rotated = after_rotation(q, k, groups=encoding.turns_alike, **told)
    whole = rotated.ungrouped()
    seen, positions = whole.seen, (whole.q_positions, whole.k_positions)
    visible, logits = _four(seen.visible()), None
    bias = factor = values = None
    if encoding.overrides("score") or encoding.overrides("transform_logits"):
        logits = whole.logits()
        wide = torch.promote_types(logits.dtype, torch.float32)
        product = (seen.q.to(wide) @ seen.k.to(wide).transpose(-2, -1)) * seen.scale
        if whole.softcap is not None:
            product = whole.softcap * (product / whole.softcap).tanh()
        hidden = logits.isneginf()
        if visible is not None:
            hidden = hidden & visible
        if bool(hidden.any()):
            visible = ~logits.isneginf()
        bias = (logits.to(wide) - product).masked_fill(logits.isneginf(), 0.0)
    elif encoding.overrides("bias"):
        bias = _four(encoding.hook("bias", *positions, seen=seen))
        if bias is not None and visible is not None and len(visible) == 1:
            bias = bias.masked_fill(~visible, 0.0)
    if encoding.overrides("transform_weights") or encoding.overrides("add_values"):
        weights = whole.softmax(whole.logits() if logits is None else logits)
        changed = encoding.hook("transform_weights", weights, *positions, seen=seen)
        if encoding.overrides("transform_weights"):
            factor = torch.where(weights == 0, 0.0, changed / weights)
        values = encoding.hook("add_values", changed, *positions, seen=seen)
    return AttentionParts(rotated.seen.q, rotated.seen.k, bias, visible, factor, values)


def _four(x: Tensor | None) -> Tensor | None:
    """With leading dimensions of 1."""
    return None if x is None else x[(None,) * (4 - x.ndim)]
