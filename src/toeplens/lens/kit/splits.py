"""Three ways to split a token's representation into content and position: x = c + p (theory, section 1)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.ground import InputError, choose
from toeplens.lens.kit.trace import AttentionTrace, LayerTrace

Split = Literal["mean", "input", "ablate"]  # how a layer's input is parted into content and position


def position_parts(
    trace: AttentionTrace, layer: LayerTrace, split: Split
) -> tuple[Float[Tensor, "B R D"], Float[Tensor, "B R D"]]:
    """The position part p of what queries and of what keys are made from; the rest is content.

    Arguments
        split  ``input``: the vectors added to the token embeddings; exact, and known where the input itself is read.
               ``mean``: the mean over the trace's sequences at each position, less the mean over all positions.
               ``ablate``: what the same tokens lose when the encoding is switched off in the whole model.
    """
    choose("split", split, get_args(Split))
    shared = layer.inputs is layer.key_inputs
    if split == "input":
        if layer.vectors is None:
            raise InputError(
                f"split: 'input' was given; layer {layer.layer} reads no bare input, so it needs 'mean' or 'ablate'."
            )
        p = layer.vectors.to(layer.inputs.dtype).expand_as(layer.inputs)
        return p, p
    if split == "mean":
        if len(layer.inputs) < 2:
            raise InputError("split: 'mean' was given; it needs the mean over at least 2 sequences.")
        p = _mean_part(layer.inputs, layer)
        return p, p if shared else _mean_part(layer.key_inputs, layer)
    bare = trace.without_position(layer.layer)
    p = layer.inputs - bare.inputs
    return p, p if shared else layer.key_inputs - bare.key_inputs


def _mean_part(x: Tensor, layer: LayerTrace) -> Tensor:
    _, p = position_means(x, layer.kept_lengths)
    return torch.nan_to_num(p).expand_as(x)


def position_means(
    x: Float[Tensor, "B N D"], lengths: Int[Tensor, "B"] | None = None
) -> tuple[Float[Tensor, "B N D"], Float[Tensor, "N D"]]:
    """Split x into content and position by the `mean` estimator (theory 1): p_i = E[x_i] - E[x], c_i = x_i - p_i.

    Arguments
        x        [B, N, D] one vector a sequence and position
        lengths  [B] tokens of each sequence, from the first position on; all N unless given

    Returns the content [B, N, D] and the position part [N, D], on the device and in the dtype of ``x``; sums are
    taken in float64. Only positions within a sequence's length are counted. What lies beyond it is split by the same
    p, and p_i is nan where no sequence reaches i. Raises `InputError` for a length outside 0 to N.
    """
    size = x.shape[1]
    if lengths is None:
        lengths = torch.full((len(x),), size, device=x.device)
    elif lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= size:
        raise InputError(f"lengths: {lengths.tolist()} was given; each must be from 0 to {size}.")
    counted = torch.arange(size, device=x.device) < lengths.to(x.device).unsqueeze(-1)
    sums = torch.where(counted.unsqueeze(-1), x, 0).sum(0, dtype=torch.float64)
    counts = counted.sum(0)
    p = (sums / counts.unsqueeze(-1) - sums.sum(0) / counts.sum()).to(x.dtype)
    return x - p, p
