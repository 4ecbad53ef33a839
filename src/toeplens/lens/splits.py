"""Three ways to split a token's representation into content and position: x = c + p (theory, section 1)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.ground import InputError, choose
from toeplens.lens.subspace import position_means
from toeplens.lens.trace import AttentionTrace, LayerTrace

Split = Literal["mean", "input", "ablate"]


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
