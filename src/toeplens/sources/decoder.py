"""Our own decoder as a source: it can be traced, and it runs once and replays from any layer with heads scaled."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens import encodings
from toeplens.lens.trace import LayerTrace
from toeplens.model import Context, Decoder


@dataclass(frozen=True)
class LayerState:
    """A pass stopped inside a layer: the residual stream and the head outputs where the layer is needed."""

    layer: int
    residual: Float[Tensor, "b Nq d_model"]
    heads: Float[Tensor, "b Nq H head_dim"]
    context: Context


class DecoderSource:
    """A `Decoder` that can be traced and replayed; put in evaluation mode, so that dropout is off."""

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

    @torch.no_grad()
    def attention(
        self,
        tokens: Int[Tensor, "b N"],
        lengths: Int[Tensor, "b"] | None,
        *,
        layers: Sequence[int],
        positions: Int[Tensor, "R"] | None,
        positional: bool = True,
    ) -> Iterator[LayerTrace]:
        """The chosen layers' attention in order, at the chosen positions, one layer at a time.

        ``positional=False`` runs the same weights with the encoding switched off: nothing is added at the input, no
        rotation, no bias; the causal mask stays.
        """
        model = self.model if positional else _without_position(self.model)
        x, context = model.begin(tokens, lengths)
        for layer in range(layers[-1] + 1):
            if layer in layers:
                yield self._trace(model, layer, x, context, positions)
            if layer < layers[-1]:
                x = model.block(layer).finish(*model.layer_heads(layer, x, context))

    def _trace(self, model: Decoder, layer: int, x: Tensor, context: Context, kept: Tensor | None) -> LayerTrace:
        block, config = model.block(layer), model.config
        attention = block.attention
        rows = torch.arange(x.shape[1], device=x.device) if kept is None else kept

        def here(tensor: Tensor, dim: int) -> Tensor:
            return tensor if kept is None else tensor.index_select(dim, kept)

        q, k, v = (here(part, 2) for part in block.project(x, context))
        inputs = here(x, 1)
        embeddings = None if context.embeddings is None else here(context.embeddings, 1)
        notes = attention.encoding.note(block.norm_attention(x) if context.embeddings is None else context.embeddings)
        places_dim = 1 if context.by_sequence else 0
        here_context = Context(context.positions, context.by_sequence, context.lengths, embeddings, None)

        def part(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                return block.project_part(queries, keys, x=inputs, context=here_context)

        return LayerTrace(
            layer=layer,
            inputs=inputs,
            key_inputs=inputs if embeddings is None else embeddings,
            vectors=here(_position_vectors(model, x, context), -2) if layer == 0 else None,
            q=q,
            k=k,
            v=v,
            encoding=attention.encoding,
            positions=here(context.positions, places_dim),
            rows=rows,
            scale=attention.scale,
            causal=config.causal,
            lengths=context.lengths if config.pad_mask else None,
            part=part,
            notes=notes if kept is None else None,
            whole=kept is None,
        )


def _position_vectors(model: Decoder, x: Tensor, context: Context) -> Float[Tensor, "*B N D"]:
    """What the encodings add to the input, whatever the tokens are."""
    zeros = torch.zeros_like(x if context.by_sequence else x[:1])
    vectors = model.encoding.embed(zeros, context.positions)
    if model.input_encoding is not None:
        vectors = model.input_encoding.embed(vectors, context.positions)
    return vectors if context.by_sequence else vectors[0]


def _without_position(model: Decoder) -> Decoder:
    """The same weights without any encoding."""
    config = model.config
    bare = copy.deepcopy(model)
    nothing = encodings.build(
        "nope", d_model=config.d_model, num_heads=config.num_heads, head_dim=config.head_dim, max_len=config.max_len
    )
    bare.encoding, bare.input_encoding = nothing, None
    for layer in range(config.num_layers):
        block = bare.block(layer)
        block.attention.encoding, block.shares_bias = nothing, False
    return bare.eval()
