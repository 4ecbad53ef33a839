"""Our own decoder as a source: it runs once and replays from any layer with heads scaled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.model import Context, Decoder


@dataclass(frozen=True)
class LayerState:
    """A pass stopped inside a layer: the residual stream and the head outputs where the layer is needed."""

    layer: int
    residual: Float[Tensor, "b Nq d_model"]
    heads: Float[Tensor, "b Nq H head_dim"]
    context: Context


class DecoderSource:
    """A `Decoder` that can be replayed from a layer; put in evaluation mode, so that dropout is off."""

    def __init__(self, model: Decoder) -> None:
        self.model = model.eval()
        self.num_layers, self.num_heads = model.config.num_layers, model.config.num_heads

    @torch.no_grad()
    def states(self, tokens: Int[Tensor, "b N"], lengths: Int[Tensor, "b"] | None) -> Iterator[LayerState]:
        """One pass over the batch, stopping inside each layer in turn."""
        x, context = self.model.begin(tokens, lengths)
        for layer in range(self.num_layers):
            residual, heads = self.model.layer_heads(layer, x, context)
            yield LayerState(layer, residual, heads, context)
            if layer < self.num_layers - 1:
                x = self.model.block(layer).finish(residual, heads)

    @torch.no_grad()
    def replay(self, state: LayerState, gains: Float[Tensor, "V H"]) -> Float[Tensor, "V b C"]:
        """Class logits with the layer's head outputs scaled by each row of ``gains``, all rows as one batch."""
        variants, batch = len(gains), len(state.residual)
        heads = (state.heads.unsqueeze(0) * gains.to(state.heads.dtype)[:, None, None, :, None]).flatten(0, 1)
        residual = state.residual.repeat(variants, 1, 1)
        context = state.context.repeat(variants)
        x = self.model.block(state.layer).finish(residual, heads)
        return self.model.replay(state.layer + 1, x, context).unflatten(0, (variants, batch))
