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
from toeplens.encodings import FrequencyMask, Rotary, attention_weights, with_frequency_mask
from toeplens.lens.kit.trace import LayerTrace, Replacement
from toeplens.model import Block, Decoder, DecoderAttention, PassContext
from toeplens.utils import invalid

MAX_ELEMENTS = {"cpu": 2**19, "cuda": 2**28}  # numbers in the residual stream; on a CPU this fits in the cache
MAX_ELEMENTS_OTHER = 2**24  # on devices of unknown memory


@dataclass(frozen=True)
class LayerState:
    """A pass stopped inside a layer: its input, and the residual stream and head outputs where the layer is used."""

    layer: int
    inputs: Float[Tensor, "b N d_model"]
    residual: Float[Tensor, "b Nq d_model"]
    heads: Float[Tensor, "b Nq H head_dim"]
    context: PassContext


def replacement_heads(
    model: Decoder, bare: Decoder, layer: int, x: Tensor, context: PassContext, outputs: Tensor | None
) -> Float[Tensor, "B1 Nq H head_dim"]:
    """The replacement of the head outputs of ``layer``, at the positions where the layer is used.

    Arguments
        bare     the same weights without any encoding
        x        the layer's input, [B, N, d_model]
        outputs  at all positions, [1 or B, N, H, head_dim]; None for those of ``bare`` on the same input
    """
    if outputs is None:  # without coordinates, which ``bare`` does not have
        positions = torch.arange(x.shape[1], device=x.device)
        return bare.layer_heads(layer, x, replace(context, positions=positions, per_sequence=False))[1]
    read = model.read_position(layer, x.shape[:2], context)
    if read is None:
        return outputs.to(x)
    return outputs.to(x).expand(len(x), -1, -1, -1)[torch.arange(len(x), device=x.device), read].unsqueeze(1)


class _BranchedPass:
    """Copies of a pass over b sequences, as a tree: copies that agree up to a layer share a node there.

    The tree is traversed depth first, so memory is that of a few nodes per layer, for any number of copies.
    """

    def __init__(
        self,
        model: Decoder,
        bare: Decoder,
        gains: Tensor,
        replacement: Replacement,
        first_layer: int,
        context: PassContext,
        batch: int,
        sequences: int,
    ) -> None:
        self.model, self.bare, self.gains, self.replacement = model, bare, gains, replacement
        self.first_layer = first_layer
        self.gain_keys = [[row.tobytes() for row in rows] for rows in gains.double().numpy()]  # numpy has no bfloat16
        self.batch, self.max_nodes = batch, max(1, sequences // batch)
        self.contexts = {1: context}
        self.logits: dict[int, Tensor] = {}

    def run(self, inputs: Tensor, residual: Tensor, heads: Tensor) -> Float[Tensor, "V b *N C"]:
        """Class logits of every copy, from the first layer's input, residual stream and head outputs."""
        self._run_from(self.first_layer, inputs, residual, heads, [list(range(len(self.gain_keys)))])
        return torch.stack([self.logits[copy] for copy in range(len(self.gain_keys))])

    def _context(self, nodes: int) -> PassContext:
        if nodes not in self.contexts:
            self.contexts[nodes] = self.contexts[1].repeat(nodes)
        return self.contexts[nodes]

    def _run_from(self, layer: int, inputs: Tensor, residual: Tensor, heads: Tensor, members: list[list[int]]) -> None:
        """Continue from nodes of ``layer``, [nodes * b, ...], each with the copies that it represents."""
        groups: dict[tuple[int, bytes], list[int]] = {}  # by parent and gains
        for node, copies in enumerate(members):
            for member in copies:
                groups.setdefault((node, self.gain_keys[member][layer - self.first_layer]), []).append(member)
        children = [(node, copies) for (node, _), copies in groups.items()]
        branches = _LayerBranches(self, layer, inputs, residual, heads)
        for start in range(0, len(children), self.max_nodes):
            chunk = children[start : start + self.max_nodes]
            gains = self.gains[[copies[0] for _, copies in chunk], layer - self.first_layer]
            x = branches.finish([node for node, _ in chunk], None if bool((gains == 1).all()) else gains)
            context = self._context(len(chunk))
            if layer + 1 < self.first_layer + self.gains.shape[1]:
                next_heads = _layer_heads(self.model, layer + 1, x, context)
                self._run_from(layer + 1, x, *next_heads, [copies for _, copies in chunk])
                continue
            for index in range(layer + 1, self.model.config.num_layers):
                x = _finish_layer(self.model.block(index), *_layer_heads(self.model, index, x, context))
            for logits, (_, copies) in zip(self.model.compute_logits(x, context).split(self.batch), chunk, strict=True):
                self.logits.update(dict.fromkeys(copies, logits))


class _LayerBranches:
    """A layer's nodes, whose head outputs are changed in several ways before the layer is finished."""

    def __init__(self, tree: _BranchedPass, layer: int, inputs: Tensor, residual: Tensor, heads: Tensor) -> None:
        self.tree, self.layer, self.inputs = tree, layer, inputs
        self.block = tree.model.block(layer)
        self.residual, self.heads = (part.unflatten(0, (-1, tree.batch)) for part in (residual, heads))
        self.replaced: Tensor | None = None
        self.leave_one_out: _LeaveOneOut | None = None

    def finish(self, nodes: list[int], gains: Float[Tensor, "n H"] | None) -> Float[Tensor, "n_b Nq d_model"]:
        """The layer's output for each of ``nodes`` (which may be repeated) with its row of ``gains``."""
        can_share = len(self.heads) == 1 and not self.block.parallel
        if gains is not None and can_share and int((gains != 1).sum(1).max()) == 1:
            if self.leave_one_out is None:
                replaced = self._replaced_heads()
                self.leave_one_out = _LeaveOneOut(
                    self.block, self.residual[0], self.heads[0], None if replaced is None else replaced[0]
                )
            return self.leave_one_out.finish(gains)
        in_order = len(self.heads) == 1 or nodes == list(range(len(self.heads)))
        residual, heads = (part if in_order else part[nodes] for part in (self.residual, self.heads))
        if gains is not None:
            gains, replaced = gains.to(heads.device)[:, None, None, :, None], self._replaced_heads()
            if replaced is None:
                heads = heads * gains
            else:
                heads = torch.lerp(replaced if in_order or len(replaced) == 1 else replaced[nodes], heads, gains)
        return _finish_layer(self.block, residual, heads.flatten(0, 1))

    def _replaced_heads(self) -> Float[Tensor, "u1 b1 Nq H head_dim"] | None:
        tree = self.tree
        if tree.replacement is None or self.replaced is not None:
            return self.replaced
        if isinstance(tree.replacement, list):
            inputs, context = self.inputs[: tree.batch], tree.contexts[1]
            outputs = tree.replacement[self.layer - tree.first_layer]
            self.replaced = replacement_heads(tree.model, tree.bare, self.layer, inputs, context, outputs).unsqueeze(0)
        else:
            context = tree._context(len(self.heads))
            heads = replacement_heads(tree.model, tree.bare, self.layer, self.inputs, context, None)
            self.replaced = heads.unflatten(0, (-1, tree.batch))
        return self.replaced


class _LeaveOneOut:
    """Finish a layer many times, each time with one head changed.

    All linear work is done once: the change of head h, (1 - g) (z_h - replacement), is subtracted from the residual
    stream through W_O[:, h], and from the FFN's hidden layer, before its norm's scale, through W_1 W_O[:, h].
    """

    def __init__(self, block: Block, residual: Tensor, z: Tensor, replaced: Tensor | None) -> None:
        self.block, self.shape = block, residual.shape
        norm, first = block.norm_ffn, cast(nn.Linear, block.ffn[0])
        inner = first.weight * norm.weight
        inner = inner - inner.mean(1, keepdim=True)
        self.shift = F.linear(norm.bias, first.weight, first.bias)
        self.x = (residual + block.attention.merge(z)).flatten(0, 1)
        self.hidden = F.linear(self.x, inner)
        self.head_change = (z if replaced is None else z - replaced).flatten(0, 1).transpose(0, 1).contiguous()
        self.out = block.attention.out.weight.t().unflatten(0, (len(self.head_change), -1))
        self.inner = self.out @ inner.t()
        self.buffer: Tensor | None = None  # allocating memory for each chunk takes longer than the sums in it

    def finish(self, gains: Float[Tensor, "n H"]) -> Float[Tensor, "n_b Nq d_model"]:
        """The layer's output for each row of ``gains``, at most one of which differs from 1 in each row."""
        head_index = (gains != 1).int().argmax(1)
        share = (1 - gains.gather(1, head_index.unsqueeze(1)).unsqueeze(2)).to(self.x.device)
        head_index = head_index.to(self.x.device)
        head_change = self.head_change[head_index]
        x = torch.baddbmm(self.x.expand(len(head_index), -1, -1), head_change, self.out[head_index] * share, alpha=-1)
        if self.buffer is None:
            self.buffer = self.hidden.new_empty(len(head_index), *self.hidden.shape)
        hidden, inner = self.buffer[: len(head_index)], self.inner[head_index] * share
        torch.baddbmm(self.hidden.expand_as(hidden), head_change, inner, alpha=-1, out=hidden)
        norm = self.block.norm_ffn
        scale = torch.native_layer_norm(x, norm.normalized_shape, None, None, norm.eps)[2]
        hidden.mul_(scale).add_(self.shift)
        return x.add_(_ffn_output(self.block, hidden)).view(-1, *self.shape[1:])


def _finish_layer(block: Block, residual: Tensor, z: Tensor) -> Float[Tensor, "n_b Nq d_model"]:
    """`Block.finish` with few allocations; ``residual`` may be shared by several nodes, [1, b, ...]."""
    x = block.attention.merge(z)
    x.view(-1, *residual.shape[-3:]).add_(residual)
    if block.parallel:
        x.view(-1, *residual.shape[-3:]).add_(block.ffn(block.norm_attention(residual)))
        return x
    return _ffn_output(block, block.ffn[0](block.norm_ffn(x))).add_(x)


def _ffn_output(block: Block, hidden: Tensor) -> Tensor:
    """The FFN's output from its hidden layer before the activation, changed in place if possible."""
    activation = block.ffn[1]
    return block.ffn[2:](hidden.relu_() if isinstance(activation, nn.ReLU) else activation(hidden))


def _layer_heads(model: Decoder, layer: int, x: Tensor, context: PassContext) -> tuple[Tensor, Tensor]:
    """`Decoder.layer_heads`; if one position is read, attention weights are applied before W_V, not after."""
    block = model.block(layer)
    attention, read = block.attention, model.read_position(layer, x.shape[:2], context)
    if read is None or not isinstance(attention, DecoderAttention) or attention.encoding.overrides("add_values"):
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
        q_positions=(positions[batch, read] if context.per_sequence else positions[read]).unsqueeze(1),
        k_positions=positions,
        scale=attention.scale,
        rows=read.unsqueeze(1),
        key_features=attention.encoding.key_features(keys),
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
    def _bare_model(self) -> Decoder:
        return _remove_position(self.model)

    @torch.no_grad()
    def states(self, tokens: Int[Tensor, "b N"], lengths: Int[Tensor, "b"] | None) -> Iterator[LayerState]:
        """One pass over the batch, stopped inside each layer in turn."""
        x, context = self.model.start_pass(tokens, lengths)
        for layer in range(self.num_layers):
            residual, heads = self.model.layer_heads(layer, x, context)
            yield LayerState(layer, x, residual, heads, context)
            if layer < self.num_layers - 1:
                x = self.model.block(layer).finish(residual, heads)

    @torch.no_grad()
    def head_outputs(
        self, tokens: Int[Tensor, "b N"], lengths: Int[Tensor, "b"] | None
    ) -> Iterator[Float[Tensor, "b N H head_dim"]]:
        """The head outputs of each layer in turn, at all positions, padding included."""
        x, context = self.model.start_pass(tokens, lengths)
        for layer in range(self.num_layers):
            residual, heads = self.model.block(layer).head_outputs(x, context, read_positions=None, fused=True)
            yield heads
            if layer < self.num_layers - 1:
                x = self.model.block(layer).finish(residual, heads)

    @torch.no_grad()
    def head_outputs_with(self, state: LayerState, frequency_mask: FrequencyMask) -> Float[Tensor, "b N H head_dim"]:
        """The head outputs of the state's layer at all positions, with a mask of its rotation frequencies."""
        block = _shallow_copy(self.model.block(state.layer))
        block.attention = _shallow_copy(block.attention)
        block.attention.encoding = with_frequency_mask(self._rotary(state.layer), frequency_mask)
        return block.head_outputs(state.inputs, state.context, read_positions=None, fused=True)[1]

    def with_frequency_mask(self, frequency_mask: FrequencyMask, layers: Sequence[int] | None = None) -> DecoderSource:
        """The same weights with masked frequencies in these layers (default: all layers with a rotation)."""
        model = with_shared_weights(self.model)
        for layer in [i for i, pairs in enumerate(self.pairs_per_layer) if pairs] if layers is None else layers:
            model.block(layer).attention.encoding = with_frequency_mask(self._rotary(layer), frequency_mask)
        return DecoderSource(model)

    @property
    def pairs_per_layer(self) -> list[int]:
        """Number of rotated pairs of dimensions in each layer; 0 without a rotation."""
        layer_encodings = [self.model.block(layer).attention.encoding for layer in range(self.num_layers)]
        return [encoding.frequencies.shape[-1] if isinstance(encoding, Rotary) else 0 for encoding in layer_encodings]

    def _rotary(self, layer: int) -> Rotary:
        rotary_layers = [index for index, pairs in enumerate(self.pairs_per_layer) if pairs]
        if layer not in rotary_layers:
            raise invalid("layers", f"have a rotation ({rotary_layers})", layer)
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
        max_elements = MAX_ELEMENTS.get(state.inputs.device.type, MAX_ELEMENTS_OTHER)
        size = max(1, max_elements // (length * self.model.config.d_model))
        parts = []
        for start in range(0, batch, size):
            rows, part = slice(start, min(start + size, batch)), replacement
            if isinstance(part, list):
                part = [outputs if len(outputs) == 1 else outputs[rows] for outputs in part]
            context, bare = state.context.select(rows), self._bare_model
            tree = _BranchedPass(self.model, bare, gains, part, state.layer, context, rows.stop - start, size)
            parts.append(tree.run(state.inputs[rows], state.residual[rows], state.heads[rows]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def scale_heads(
        self,
        tokens: Int[Tensor, "b N"],
        lengths: Int[Tensor, "b"] | None,
        gains: Float[Tensor, "L b H"],
        replacement: Replacement = None,
    ) -> Float[Tensor, "b *N C"]:
        """Class logits with separate gains on all heads per sequence, as in `replay`; differentiable in the gains."""
        x, context = self.model.start_pass(tokens, lengths)
        for layer, gain in enumerate(gains):
            residual, heads = self.model.layer_heads(layer, x, context)
            head_gain = gain.to(heads.dtype)[:, None, :, None]
            changed = heads * head_gain
            if replacement is not None:
                outputs = replacement[layer] if isinstance(replacement, list) else None
                changed += replacement_heads(self.model, self._bare_model, layer, x, context, outputs) * (1 - head_gain)
            x = self.model.block(layer).finish(residual, changed)
        return self.model.compute_logits(x, context)

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
        model = self.model if positional else _remove_position(self.model)
        x, context = model.start_pass(tokens, lengths)
        added = position_vectors(model, x, context)
        for layer in range(layers[-1] + 1):
            if layer in layers:
                trace = trace_layer(model, layer, x, context, added, positions)
                yield replace(trace, project_part=torch.no_grad()(trace.project_part))
            if layer < layers[-1]:
                x = model.block(layer).finish(*model.layer_heads(layer, x, context))


def trace_layer(
    model: Decoder, layer: int, x: Tensor, context: PassContext, added: Tensor, chosen: Tensor | None = None
) -> LayerTrace:
    """A layer's trace from its input, at the chosen positions; differentiable."""
    block, attention = model.block(layer), model.block(layer).attention
    rows = torch.arange(x.shape[1], device=x.device) if chosen is None else chosen

    def select(tensor: Tensor, dim: int) -> Tensor:
        return tensor if chosen is None else tensor.index_select(dim, chosen)

    q, k, v = (select(part, 2) for part in block.project(x, context))
    inputs = select(x, 1)
    embeddings = None if context.embeddings is None else select(context.embeddings, 1)
    chosen_context = PassContext(context.positions, context.per_sequence, context.lengths, embeddings, None)
    keys = block.norm_attention(x) if context.embeddings is None else context.embeddings
    key_features = attention.encoding.key_features(keys)

    def part(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return block.project_part(queries, keys, x=inputs, context=chosen_context)

    return LayerTrace(
        layer=layer,
        inputs=inputs,
        key_inputs=inputs if embeddings is None else embeddings,
        position_vectors=select(added, -2),
        q=q,
        k=k,
        v=v,
        encoding=attention.encoding,
        positions=select(context.positions, 1 if context.per_sequence else 0),
        rows=rows,
        scale=attention.scale,
        causal=model.config.causal,
        lengths=context.lengths if model.config.pad_mask else None,
        project_part=part,
        key_features=key_features if chosen is None else None,
        has_all_positions=chosen is None,
        read_position=model.read_position(layer, x.shape[:2], context),
    )


def position_vectors(model: Decoder, x: Tensor, context: PassContext) -> Float[Tensor, "*B N D"]:
    """What the encodings add to the input regardless of the tokens."""
    zeros = torch.zeros_like(x if context.per_sequence else x[:1])
    vectors = model.encoding.embed(zeros, context.positions)
    if model.input_encoding is not None:
        vectors = model.input_encoding.embed(vectors, context.positions)
    return vectors if context.per_sequence else vectors[0]


def _shallow_copy(module: Module) -> Module:
    """A shallow copy whose modules can be replaced without changing the original."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


def with_shared_weights(model: Decoder) -> Decoder:
    """A copy in evaluation mode whose parameters are the model's own."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()}).eval()


def _remove_position(model: Decoder) -> Decoder:
    config = model.config
    bare = with_shared_weights(model)
    nope = encodings.build(
        "nope", d_model=config.d_model, num_heads=config.num_heads, head_dim=config.head_dim, max_len=config.max_len
    )
    bare.encoding, bare.input_encoding = nope, None
    for layer in range(config.num_layers):
        block = bare.block(layer)
        block.attention.encoding, block.shares_bias = nope, False
    return bare
