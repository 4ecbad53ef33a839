"""The toeplens decoder as a source: traces, and replays from any layer with scaled heads."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens import encodings
from toeplens.encodings import BandControl, Rotary, attention_weights, controlled
from toeplens.ground import invalid
from toeplens.lens.kit.trace import LayerTrace, Replacement
from toeplens.model import Attention, Block, Context, Decoder

AT_ONCE = {"cpu": 2**19, "cuda": 2**28}  # numbers in the residual stream; on a CPU this fits in the cache
AT_ONCE_ELSEWHERE = 2**24  # on devices of unknown memory


@dataclass(frozen=True)
class LayerState:
    """A pass stopped inside a layer: its input, and the residual stream and head outputs where the layer is used."""

    layer: int
    inputs: Float[Tensor, "b N d_model"]
    residual: Float[Tensor, "b Nq d_model"]
    heads: Float[Tensor, "b Nq H head_dim"]
    context: Context


def replaced_heads(
    model: Decoder, bare: Decoder, layer: int, x: Float[Tensor, "B N d_model"], context: Context, given: Tensor | None
) -> Float[Tensor, "B1 Nq H head_dim"]:
    """The replacement of the head outputs of ``layer``, at the positions where the layer is used.

    Arguments
        bare   the same weights without any encoding
        x      the layer's input
        given  outputs at all positions, [1 or B, N, H, head_dim]; None for those of ``bare`` on the same input
    """
    if given is None:
        return bare.layer_heads(layer, x, context)[1]
    read = model.read_position(layer, x.shape[:2], context)
    if read is None:
        return given.to(x)
    return given.to(x).expand(len(x), -1, -1, -1)[torch.arange(len(x), device=x.device), read].unsqueeze(1)


class _Tree:
    """Copies of a pass over b sequences, as a tree: copies that agree up to a layer share a node there.

    The tree is traversed depth first, so memory is that of a few nodes per layer, for any number of copies.
    """

    def __init__(
        self,
        model: Decoder,
        bare: Decoder,
        gains: Tensor,
        replacement: Replacement,
        first: int,
        context: Context,
        batch: int,
        sequences: int,
    ) -> None:
        self.model, self.bare, self.gains, self.replacement, self.first = model, bare, gains, replacement, first
        self.keys = [[row.tobytes() for row in rows] for rows in gains.double().numpy()]  # numpy has no bfloat16
        self.batch, self.nodes = batch, max(1, sequences // batch)
        self.contexts = {1: context}
        self.logits: dict[int, Tensor] = {}

    def run(self, inputs: Tensor, residual: Tensor, heads: Tensor) -> Float[Tensor, "V b *N C"]:
        """Class logits of every copy, from the first layer's input, residual stream and head outputs."""
        self._descend(self.first, inputs, residual, heads, [list(range(len(self.keys)))])
        return torch.stack([self.logits[copy] for copy in range(len(self.keys))])

    def _context(self, nodes: int) -> Context:
        if nodes not in self.contexts:
            self.contexts[nodes] = self.contexts[1].repeat(nodes)
        return self.contexts[nodes]

    def _descend(self, layer: int, inputs: Tensor, residual: Tensor, heads: Tensor, members: list[list[int]]) -> None:
        """Continue from nodes of ``layer``, [nodes * b, ...], each with the copies that it represents."""
        found: dict[tuple[int, bytes], list[int]] = {}  # by parent and gains
        for node, copies in enumerate(members):
            for each in copies:
                found.setdefault((node, self.keys[each][layer - self.first]), []).append(each)
        children = [(node, copies) for (node, _), copies in found.items()]
        changed = _Changed(self, layer, inputs, residual, heads)
        for start in range(0, len(children), self.nodes):
            some = children[start : start + self.nodes]
            gains = self.gains[[copies[0] for _, copies in some], layer - self.first]
            x = changed.finish([node for node, _ in some], None if bool((gains == 1).all()) else gains)
            context = self._context(len(some))
            if layer + 1 < self.first + self.gains.shape[1]:
                after = _layer_heads(self.model, layer + 1, x, context)
                self._descend(layer + 1, x, *after, [copies for _, copies in some])
                continue
            for index in range(layer + 1, self.model.config.num_layers):
                x = _finish(self.model.block(index), *_layer_heads(self.model, index, x, context))
            for logits, (_, copies) in zip(self.model.end(x, context).split(self.batch), some, strict=True):
                self.logits.update(dict.fromkeys(copies, logits))


class _Changed:
    """A layer's nodes, whose head outputs are changed in several ways before the layer is finished."""

    def __init__(self, tree: _Tree, layer: int, inputs: Tensor, residual: Tensor, heads: Tensor) -> None:
        self.tree, self.layer, self.inputs = tree, layer, inputs
        self.block = tree.model.block(layer)
        self.residual, self.heads = (part.unflatten(0, (-1, tree.batch)) for part in (residual, heads))
        self.other: Tensor | None = None
        self.without_one: _WithoutOne | None = None

    def finish(self, nodes: list[int], gains: Float[Tensor, "n H"] | None) -> Float[Tensor, "n_b Nq d_model"]:
        """The layer's output for each of ``nodes`` (which may be repeated) with its row of ``gains``."""
        if gains is not None and len(self.heads) == 1 and int((gains != 1).sum(1).max()) == 1:
            if self.without_one is None:
                other = self._other()
                self.without_one = _WithoutOne(
                    self.block, self.residual[0], self.heads[0], None if other is None else other[0]
                )
            return self.without_one.finish(gains)
        same = len(self.heads) == 1 or nodes == list(range(len(self.heads)))
        residual, heads = (part if same else part[nodes] for part in (self.residual, self.heads))
        if gains is not None:
            gains, other = gains.to(heads.device)[:, None, None, :, None], self._other()
            if other is None:
                heads = heads * gains
            else:
                heads = torch.lerp(other if same or len(other) == 1 else other[nodes], heads, gains)
        return _finish(self.block, residual, heads.flatten(0, 1))

    def _other(self) -> Float[Tensor, "u1 b1 Nq H head_dim"] | None:
        tree = self.tree
        if tree.replacement is None or self.other is not None:
            return self.other
        if isinstance(tree.replacement, list):
            inputs, context = self.inputs[: tree.batch], tree.contexts[1]
            given = tree.replacement[self.layer - tree.first]
            self.other = replaced_heads(tree.model, tree.bare, self.layer, inputs, context, given).unsqueeze(0)
        else:
            context = tree._context(len(self.heads))
            found = replaced_heads(tree.model, tree.bare, self.layer, self.inputs, context, None)
            self.other = found.unflatten(0, (-1, tree.batch))
        return self.other


class _WithoutOne:
    """Finish a layer many times, each time with one head changed.

    All linear work is done once: the change of head h, (1 - g) (z_h - replacement), is subtracted from the residual
    stream through W_O[:, h], and from the FFN's hidden layer, before its norm's scale, through W_1 W_O[:, h].
    """

    def __init__(self, block: Block, residual: Tensor, z: Tensor, other: Tensor | None) -> None:
        self.block, self.shape = block, residual.shape
        norm, first = block.norm_ffn, cast(nn.Linear, block.ffn[0])
        inner = first.weight * norm.weight
        inner = inner - inner.mean(1, keepdim=True)
        self.shift = F.linear(norm.bias, first.weight, first.bias)
        self.x = (residual + block.attention.merge(z)).flatten(0, 1)
        self.hidden = F.linear(self.x, inner)
        self.lost = (z if other is None else z - other).flatten(0, 1).transpose(0, 1).contiguous()
        self.out = block.attention.out.weight.t().unflatten(0, (len(self.lost), -1))
        self.inner = self.out @ inner.t()
        self.buffer: Tensor | None = None  # allocating memory for each chunk takes longer than the sums in it

    def finish(self, gains: Float[Tensor, "n H"]) -> Float[Tensor, "n_b Nq d_model"]:
        """The layer's output for each row of ``gains``, at most one of which differs from 1 in each row."""
        which = (gains != 1).int().argmax(1)
        share = (1 - gains.gather(1, which.unsqueeze(1)).unsqueeze(2)).to(self.x.device)
        which = which.to(self.x.device)
        lost = self.lost[which]
        x = torch.baddbmm(self.x.expand(len(which), -1, -1), lost, self.out[which] * share, alpha=-1)
        if self.buffer is None:
            self.buffer = self.hidden.new_empty(len(which), *self.hidden.shape)
        hidden, inner = self.buffer[: len(which)], self.inner[which] * share
        torch.baddbmm(self.hidden.expand_as(hidden), lost, inner, alpha=-1, out=hidden)
        norm = self.block.norm_ffn
        scale = torch.native_layer_norm(x, norm.normalized_shape, None, None, norm.eps)[2]
        hidden.mul_(scale).add_(self.shift)
        return x.add_(_activated(self.block, hidden)).view(-1, *self.shape[1:])


def _finish(block: Block, residual: Tensor, z: Tensor) -> Float[Tensor, "n_b Nq d_model"]:
    """`Block.finish` with few allocations; ``residual`` may be shared by several nodes, [1, b, ...]."""
    x = block.attention.merge(z)
    x.view(-1, *residual.shape[-3:]).add_(residual)
    return _activated(block, block.ffn[0](block.norm_ffn(x))).add_(x)


def _activated(block: Block, hidden: Tensor) -> Tensor:
    """The FFN's output from its hidden layer before the activation, changed in place if possible."""
    activation = block.ffn[1]
    return block.ffn[2:](hidden.relu_() if isinstance(activation, nn.ReLU) else activation(hidden))


def _layer_heads(model: Decoder, layer: int, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """`Decoder.layer_heads`; if one position is read, attention weights are applied before W_V, not after."""
    block = model.block(layer)
    attention, read = block.attention, model.read_position(layer, x.shape[:2], context)
    if read is None or not isinstance(attention, Attention) or attention.encoding.overrides("add_values"):
        return model.layer_heads(layer, x, context)
    normed = block.norm_attention(x)
    keys = normed if context.embeddings is None else context.embeddings
    batch, positions = torch.arange(len(x), device=x.device), context.positions
    to_q, to_k, to_v = (part.unflatten(0, (attention.num_heads, -1)) for part in attention.qkv.weight.chunk(3))
    b_q, b_k, b_v = (part.unflatten(0, (attention.num_heads, -1)) for part in attention.qkv.bias.chunk(3))
    q = F.linear(normed[batch, read], to_q.flatten(0, 1), b_q.flatten()).unflatten(-1, b_q.shape).unsqueeze(2)
    k = F.linear(keys, to_k.flatten(0, 1), b_k.flatten()).unflatten(-1, b_k.shape).transpose(1, 2).contiguous()
    weights = attention_weights(
        q,
        k,
        encoding=attention.encoding,
        q_positions=(positions[batch, read] if context.by_sequence else positions[read]).unsqueeze(1),
        k_positions=positions,
        scale=attention.scale,
        rows=read.unsqueeze(1),
        notes=attention.encoding.note(keys),
        mask=context.key_mask,
        causal=attention.causal,
    ).squeeze(2)
    z = torch.einsum("bhm,hdm->bhd", weights @ keys, to_v) + weights.sum(-1, keepdim=True) * b_v
    return x[batch, read].unsqueeze(1), z.unsqueeze(1)


Module = TypeVar("Module", bound=nn.Module)


class DecoderSource:
    """A `Decoder` that can be traced and replayed; sets evaluation mode, so dropout is off."""

    def __init__(self, model: Decoder) -> None:
        self.model = model.eval()
        self.num_layers, self.num_heads = model.config.num_layers, model.config.num_heads

    @cached_property
    def _bare(self) -> Decoder:
        return _without_position(self.model)

    @torch.no_grad()
    def states(self, tokens: Int[Tensor, "b N"], lengths: Int[Tensor, "b"] | None) -> Iterator[LayerState]:
        """One pass over the batch, stopped inside each layer in turn."""
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
        """The head outputs of the state's layer at all positions, under the control of its rotation frequencies."""
        block = _own_modules(self.model.block(state.layer))
        block.attention = _own_modules(block.attention)
        block.attention.encoding = controlled(self._rotary(state.layer), control)
        return block.heads(state.inputs, state.context, read=None, fused=True)[1]

    def controlled(self, control: BandControl, layers: Sequence[int] | None = None) -> DecoderSource:
        """The same weights with controlled frequencies in these layers (default: all layers with a rotation)."""
        model = copy.deepcopy(self.model, {id(weight): weight for weight in self.model.parameters()})
        for layer in [i for i, pairs in enumerate(self.pairs) if pairs] if layers is None else layers:
            model.block(layer).attention.encoding = controlled(self._rotary(layer), control)
        return DecoderSource(model)

    @property
    def pairs(self) -> list[int]:
        """Number of rotated pairs of dimensions in each layer; 0 without a rotation."""
        every = [self.model.block(layer).attention.encoding for layer in range(self.num_layers)]
        return [each.frequencies.shape[-1] if isinstance(each, Rotary) else 0 for each in every]

    def _rotary(self, layer: int) -> Rotary:
        turning = [index for index, pairs in enumerate(self.pairs) if pairs]
        if layer not in turning:
            raise invalid("layers", f"have a rotation ({turning})", layer)
        return cast(Rotary, self.model.block(layer).attention.encoding)

    @torch.no_grad()
    def replay(
        self, state: LayerState, gains: Float[Tensor, "V *K H"], replacement: Replacement = None
    ) -> Float[Tensor, "V b *N C"]:
        """Class logits of V copies of the pass, whose head outputs become gain * z + (1 - gain) * replacement.

        Arguments
            state        where to continue from
            gains        [V, H] for each copy in the state's layer, or [V, K, H] in that layer and the K - 1 after it;
                         later layers are not changed
            replacement  for each of these layers outputs at all positions, [1 or b, N, H, head_dim]; ``position``: each
                         head's own output with its encoding switched off, from the layer's input in that copy; None:
                         zeros, so that gain 0 zero-ablates a head
        """
        gains = (gains if gains.ndim == 3 else gains.unsqueeze(1)).to("cpu", state.heads.dtype)
        batch, length = state.inputs.shape[:2]
        at_once = AT_ONCE.get(state.inputs.device.type, AT_ONCE_ELSEWHERE)
        size = max(1, at_once // (length * self.model.config.d_model))
        parts = []
        for start in range(0, batch, size):
            some, own = slice(start, min(start + size, batch)), replacement
            if isinstance(own, list):
                own = [outputs if len(outputs) == 1 else outputs[some] for outputs in own]
            context = state.context.part(some)
            tree = _Tree(self.model, self._bare, gains, own, state.layer, context, some.stop - start, size)
            parts.append(tree.run(state.inputs[some], state.residual[some], state.heads[some]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def scaled(
        self,
        tokens: Int[Tensor, "b N"],
        lengths: Int[Tensor, "b"] | None,
        gains: Float[Tensor, "L b H"],
        replacement: Replacement = None,
    ) -> Float[Tensor, "b *N C"]:
        """Class logits with separate gains on all heads per sequence, as in `replay`; differentiable in the gains."""
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
    """A layer's trace from its input, at the kept positions; differentiable."""
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
    """What the encodings add to the input regardless of the tokens."""
    zeros = torch.zeros_like(x if context.by_sequence else x[:1])
    vectors = model.encoding.embed(zeros, context.positions)
    if model.input_encoding is not None:
        vectors = model.input_encoding.embed(vectors, context.positions)
    return vectors if context.by_sequence else vectors[0]


def _own_modules(module: Module) -> Module:
    """A shallow copy whose modules can be replaced without changing the original."""
    own = copy.copy(module)
    own._modules = dict(module._modules)
    return own


def _without_position(model: Decoder) -> Decoder:
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
