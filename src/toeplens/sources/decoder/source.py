"""Our own decoder as a source: it can be traced, and it runs once and replays from any layer with heads scaled."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from toeplens import encodings
from toeplens.encodings import BandControl, Rotary, controlled
from toeplens.ground import InputError
from toeplens.lens.kit.interventions import Replacement
from toeplens.lens.kit.trace import LayerTrace
from toeplens.model import Context, Decoder
from toeplens.sources.decoder.replay import LayerState, replaced_heads, replay

Module = TypeVar("Module", bound=nn.Module)


class DecoderSource:
    """A `Decoder` that can be traced and replayed; put in evaluation mode, so that dropout is off."""

    def __init__(self, model: Decoder) -> None:
        self.model = model.eval()
        self.num_layers, self.num_heads = model.config.num_layers, model.config.num_heads

    @cached_property
    def _bare(self) -> Decoder:
        return _without_position(self.model)

    @torch.no_grad()
    def states(self, tokens: Int[Tensor, "b N"], lengths: Int[Tensor, "b"] | None) -> Iterator[LayerState]:
        """One pass over the batch, stopping inside each layer in turn."""
        x, context = self.model.begin(tokens, lengths)
        for layer in range(self.num_layers):
            residual, heads = self.model.layer_heads(layer, x, context)
            yield LayerState(layer, x, residual, heads, context)
            if layer < self.num_layers - 1:
                x = self.model.block(layer).finish(residual, heads)

    @torch.no_grad()
    def outputs(
        self, tokens: Int[Tensor, "b N"], lengths: Int[Tensor, "b"] | None
    ) -> Iterator[Float[Tensor, "b N H head_dim"]]:
        """The head outputs of each layer in turn, at all positions, padding included."""
        x, context = self.model.begin(tokens, lengths)
        for layer in range(self.num_layers):
            residual, heads = self.model.block(layer).heads(x, context, read=None, fused=True)
            yield heads
            if layer < self.num_layers - 1:
                x = self.model.block(layer).finish(residual, heads)

    @torch.no_grad()
    def outputs_under(self, state: LayerState, control: BandControl) -> Float[Tensor, "b N H head_dim"]:
        """The head outputs of the state's layer at all positions, with the bands of its rotation under control."""
        block = _own_modules(self.model.block(state.layer))
        block.attention = _own_modules(block.attention)
        block.attention.encoding = controlled(self._rotary(state.layer), control)
        return block.heads(state.inputs, state.context, read=None, fused=True)[1]

    def controlled(self, control: BandControl, layers: Sequence[int] | None = None) -> DecoderSource:
        """The same weights with the bands under control in these layers; in all that have a rotation unless given."""
        model = copy.deepcopy(self.model, {id(weight): weight for weight in self.model.parameters()})
        for layer in [i for i, pairs in enumerate(self.pairs) if pairs] if layers is None else layers:
            model.block(layer).attention.encoding = controlled(self._rotary(layer), control)
        return DecoderSource(model)

    @property
    def pairs(self) -> list[int]:
        """How many pairs of dimensions each layer's encoding turns; 0 without a rotation."""
        every = [self.model.block(layer).attention.encoding for layer in range(self.num_layers)]
        return [each.frequencies.shape[-1] if isinstance(each, Rotary) else 0 for each in every]

    def _rotary(self, layer: int) -> Rotary:
        turning = [index for index, pairs in enumerate(self.pairs) if pairs]
        if layer not in turning:
            raise InputError(f"layers: {layer} was given; the layers with a rotation are {turning}.")
        return cast(Rotary, self.model.block(layer).attention.encoding)

    @torch.no_grad()
    def replay(
        self, state: LayerState, gains: Float[Tensor, "V *K H"], replacement: Replacement = None
    ) -> Float[Tensor, "V b *N C"]:
        """Class logits of V copies of the pass, whose head outputs become gain * z + (1 - gain) * replacement.

        Arguments
            state        where to go on from
            gains        [V, H] of each copy in the state's layer, or [V, K, H] in that layer and the K - 1 after it;
                         layers after those stay as they are
            replacement  for each of these layers outputs at all positions, [1 or b, N, H, head_dim]; ``position``: each
                         head's own output with its encoding off, from the input that the copy's layer then has; None:
                         nothing, so that a head of gain 0 is silent
        """
        return replay(self.model, self._bare, state, gains if gains.ndim == 3 else gains.unsqueeze(1), replacement)

    def scaled(
        self,
        tokens: Int[Tensor, "b N"],
        lengths: Int[Tensor, "b"] | None,
        gains: Float[Tensor, "L b H"],
        replacement: Replacement = None,
    ) -> Float[Tensor, "b *N C"]:
        """Class logits with each sequence's own gains on all heads, as in `replay`; differentiable in the gains."""
        x, context = self.model.begin(tokens, lengths)
        for layer, gain in enumerate(gains):
            residual, heads = self.model.layer_heads(layer, x, context)
            kept = gain.to(heads.dtype)[:, None, :, None]
            changed = heads * kept
            if replacement is not None:
                given = replacement[layer] if isinstance(replacement, list) else None
                changed += replaced_heads(self.model, self._bare, layer, x, context, given) * (1 - kept)
            x = self.model.block(layer).finish(residual, changed)
        return self.model.end(x, context)

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
        added = position_vectors(model, x, context)
        for layer in range(layers[-1] + 1):
            if layer in layers:
                trace = traced(model, layer, x, context, added, positions)
                yield replace(trace, part=torch.no_grad()(trace.part))
            if layer < layers[-1]:
                x = model.block(layer).finish(*model.layer_heads(layer, x, context))


def traced(
    model: Decoder, layer: int, x: Tensor, context: Context, added: Tensor, kept: Tensor | None = None
) -> LayerTrace:
    """A layer's trace from its input, at the places that are kept, through which gradients can pass."""
    block, attention = model.block(layer), model.block(layer).attention
    rows = torch.arange(x.shape[1], device=x.device) if kept is None else kept

    def here(tensor: Tensor, dim: int) -> Tensor:
        return tensor if kept is None else tensor.index_select(dim, kept)

    q, k, v = (here(part, 2) for part in block.project(x, context))
    inputs = here(x, 1)
    embeddings = None if context.embeddings is None else here(context.embeddings, 1)
    here_context = Context(context.positions, context.by_sequence, context.lengths, embeddings, None)
    notes = attention.encoding.note(block.norm_attention(x) if context.embeddings is None else context.embeddings)

    def part(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return block.project_part(queries, keys, x=inputs, context=here_context)

    return LayerTrace(
        layer=layer,
        inputs=inputs,
        key_inputs=inputs if embeddings is None else embeddings,
        added=here(added, -2),
        q=q,
        k=k,
        v=v,
        encoding=attention.encoding,
        positions=here(context.positions, 1 if context.by_sequence else 0),
        rows=rows,
        scale=attention.scale,
        causal=model.config.causal,
        lengths=context.lengths if model.config.pad_mask else None,
        part=part,
        notes=notes if kept is None else None,
        whole=kept is None,
        read=model.read_position(layer, x.shape[:2], context),
    )


def position_vectors(model: Decoder, x: Tensor, context: Context) -> Float[Tensor, "*B N D"]:
    """What the encodings add to the input, whatever the tokens are."""
    zeros = torch.zeros_like(x if context.by_sequence else x[:1])
    vectors = model.encoding.embed(zeros, context.positions)
    if model.input_encoding is not None:
        vectors = model.input_encoding.embed(vectors, context.positions)
    return vectors if context.by_sequence else vectors[0]


def _own_modules(module: Module) -> Module:
    """A shallow copy whose parts can be replaced without touching the original's."""
    own = copy.copy(module)
    own._modules = dict(module._modules)
    return own


def _without_position(model: Decoder) -> Decoder:
    """The same weights, the tensors themselves, without any encoding."""
    config = model.config
    bare = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    nothing = encodings.build(
        "nope", d_model=config.d_model, num_heads=config.num_heads, head_dim=config.head_dim, max_len=config.max_len
    )
    bare.encoding, bare.input_encoding = nothing, None
    for layer in range(config.num_layers):
        block = bare.block(layer)
        block.attention.encoding, block.shares_bias = nothing, False
    return bare.eval()
