"""Gradients of the toeplens decoder for every layer, head and example, from one forward and one backward pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from toeplens.backends.decoder.source import position_vectors, trace_layer, with_shared_weights
from toeplens.encodings import PositionalEncoding
from toeplens.lens.gradients import LayerGradient, LayerView, Measure, ProjectionInputs
from toeplens.lens.kit.interventions import Batch, is_counted
from toeplens.lens.kit.interventions import losses as example_losses
from toeplens.model import Decoder, LatentAttention, PassContext
from toeplens.model.decoder import apply_frozen_norm
from toeplens.utils import InputError

_NO_SPLIT = 2**62  # pairs at once: no splitting, as the logits are needed in one piece
_BATCH_SIZE = 256  # sequences per pass when parameter gradients are summed


class DecoderGradients:
    """A `Decoder` with gradients; the model is not changed, dropout is off.

    Every layer computes its logits explicitly. As in the model itself, the last layer has a query only at the position
    that is read out.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = with_shared_weights(model)
        self.num_layers, self.num_heads = model.config.num_layers, model.config.num_heads

    def gradients(
        self,
        tokens: Int[Tensor, "b N"],
        labels: Int[Tensor, "b *N"],
        lengths: Int[Tensor, "b"] | None,
        *,
        projections: bool = True,
    ) -> tuple[Float[Tensor, "b"], list[LayerGradient]]:
        """Each example's cross-entropy loss, and its gradients in every layer.

        The losses are summed before the single backward pass, so row b of a gradient belongs to example b. Loss and
        gradients are 0 for examples with a negative label.

        Arguments
            tokens, labels, lengths  a batch; lengths are None without padding
            projections              also return the gradients at q and k, and the inputs of their projections
        """
        model = self.model
        with torch.enable_grad():
            x, context = _begin_pass(model, tokens, lengths)
            steps = []
            for layer in range(self.num_layers):
                steps.append(_layer_step(model, layer, x, context))
                x = model.block(layer).finish(steps[-1].residual, steps[-1].heads)
            losses = example_losses(model.compute_logits(x, context), labels)
            targets = [step.tap.logits for step in steps]
            if projections:
                targets += [step.q for step in steps] + [step.k for step in steps]
            grads = torch.autograd.grad(losses.sum(), targets)
        present = torch.ones_like(tokens, dtype=torch.bool)
        if context.lengths is not None and model.config.pad_mask:
            present = torch.arange(tokens.shape[1], device=tokens.device) < context.lengths.unsqueeze(1)
        layers = []
        for layer, step in enumerate(steps):
            grad_logits = grads[layer]
            grad_q = grad_k = inputs = None
            if projections:
                grad_q, grad_k = grads[self.num_layers + layer], grads[2 * self.num_layers + layer]
                with torch.no_grad():
                    detached = replace(step, queries=step.queries.detach(), keys=step.keys.detach())
                    inputs = _projection_inputs(model, layer, detached, None)
            causal = model.config.causal
            layers.append(LayerGradient(layer, step.rows, present, causal, grad_logits, grad_q, grad_k, inputs))
        return losses.detach(), layers

    def layer_views(self, tokens: Int[Tensor, "b N"], lengths: Int[Tensor, "b"] | None) -> list[LayerView]:
        """Every layer's attention, as functions of the model's parameters if gradients are recorded."""
        return _layer_views(self.model, tokens, lengths)

    def descend(self, measure: Measure, batch: Batch, probe: Batch) -> tuple[Tensor, Tensor, float, float]:
        """See `toeplens.lens.gradients.Differentiable`.

        The derivative is computed by forward-mode differentiation in float64, without a step size.
        Raises `InputError` if no example of ``batch`` counts.
        """
        model = copy.deepcopy(self.model).double().eval().requires_grad_()
        parameters = dict(model.named_parameters())
        direction = {name: -gradient for name, gradient in _mean_gradient(model, parameters, batch).items()}
        module = _MeasureModule(model, measure)
        tokens, _, lengths = probe

        def value(values: dict[str, Tensor]) -> Tensor:
            named = {f"model.{name}": tensor for name, tensor in values.items()}
            return torch.func.functional_call(module, named, (tokens, lengths))

        with torch.no_grad():
            primals = {name: parameter.detach() for name, parameter in parameters.items()}
            result = torch.func.jvp(value, (primals,), (direction,))
        norms = [float(torch.nn.utils.get_total_norm(list(x.values()))) for x in (direction, primals)]
        return result[0].detach(), result[1].detach(), norms[0], norms[1]


class _LogitTap(PositionalEncoding):
    """An encoding that stores its logits, before the mask."""

    logits: Tensor

    def __init__(self, inner: PositionalEncoding) -> None:
        super().__init__(
            d_model=inner.d_model, num_heads=inner.num_heads, head_dim=inner.head_dim, max_len=inner.max_len
        )
        self.inner = inner
        self.axes = inner.axes

    def call_hook(self, name: str, *arguments: Any, inputs: Any) -> Any:
        result = self.inner.call_hook(name, *arguments, inputs=inputs)
        if name == "transform_logits":
            self.logits = result
        return result


@dataclass(frozen=True)
class _LayerStep:
    """One layer of a pass, up to its head outputs.

    inputs, keys  the input of the norm, and the input of the keys
    queries       the normed input at the queries that are computed
    query_index   of those queries, for `Tensor.__getitem__`; None if all are computed
    """

    inputs: Float[Tensor, "b N D"]
    keys: Float[Tensor, "b N D"]
    queries: Float[Tensor, "b Q D"]
    query_index: Any
    rows: Int[Tensor, "b Q"]
    residual: Float[Tensor, "b Q D"]
    heads: Float[Tensor, "b Q H d"]
    q: Float[Tensor, "b H Q d"]
    k: Float[Tensor, "b H N d"]
    tap: _LogitTap


class _MeasureModule(nn.Module):
    def __init__(self, model: Decoder, measure: Measure) -> None:
        super().__init__()
        self.model, self.measure = model, measure

    def forward(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
        return self.measure(_layer_views(self.model, tokens, lengths))


def _begin_pass(model: Decoder, tokens: Tensor, lengths: Tensor | None) -> tuple[Tensor, PassContext]:
    """Start a pass whose gradient flows back to the embeddings and no further, even if parameters are frozen."""
    x, context = model.start_pass(tokens, lengths)
    x = x.detach().requires_grad_()
    return x, context if context.embeddings is None else replace(context, embeddings=x)


def _layer_step(model: Decoder, layer: int, x: Tensor, context: PassContext) -> _LayerStep:
    block = model.block(layer)
    attention, positions = block.attention, context.positions
    read = model.read_position(layer, x.shape[:2], context)
    queries = block.norm_attention(x)
    keys = queries if context.embeddings is None else context.embeddings
    query_index, q_positions, residual = None, positions, x
    rows = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
    if read is not None:
        query_index, rows = (torch.arange(len(x), device=x.device)[:, None], read[:, None]), read[:, None]
        queries, residual = queries[query_index], x[query_index]
        q_positions = positions[query_index] if context.per_sequence else positions[rows]
    q, k, v = attention.project(queries, keys)
    tap = _LogitTap(attention.encoding)
    where = {"q_positions": q_positions, "k_positions": positions, "rows": None if query_index is None else rows}
    options = {"mask": context.key_mask, "fused": False, "pairs_per_chunk": _NO_SPLIT}
    heads = attention.attend(q, k, v, keys, tap, **where, **options)
    return _LayerStep(x, keys, queries, query_index, rows, residual, heads, q, k, tap)


def _projection_inputs(model: Decoder, layer: int, step: _LayerStep, vectors: Tensor | None) -> ProjectionInputs:
    """The inputs of the layer's W_Q and W_K; ``vectors`` are those added at the input, if keys contain only these."""
    block = model.block(layer)
    attention, key_part = block.attention, None
    if vectors is not None:
        key_part = vectors.to(step.inputs.dtype).expand_as(step.inputs)
        if model.config.key_value_source == "layer":
            key_part = apply_frozen_norm(block.norm_attention, key_part, step.inputs)
    if not isinstance(attention, LatentAttention):
        return ProjectionInputs(step.queries, step.keys, key_part, None)
    queries = attention.norm_q(attention.down_q(step.queries))
    latent = attention.down_kv(step.keys)
    keys = torch.cat((attention.norm_kv(latent), step.keys), dim=-1)
    if key_part is not None:
        latent_part = apply_frozen_norm(attention.norm_kv, attention.down_kv(key_part), latent)
        key_part = torch.cat((latent_part, key_part), dim=-1)
    # content dimensions come from the latent vector, rotary ones from the layer's input
    weight_mask = torch.zeros(step.q.shape[-1], keys.shape[-1], dtype=torch.bool, device=keys.device)
    weight_mask[: attention.head_dim, : latent.shape[-1]] = True
    weight_mask[attention.head_dim :, latent.shape[-1] :] = True
    return ProjectionInputs(queries, keys, key_part, weight_mask)


def _layer_views(model: Decoder, tokens: Tensor, lengths: Tensor | None) -> list[LayerView]:
    x, context = model.start_pass(tokens, lengths)
    added = position_vectors(model, x, context)
    views = []
    for layer in range(model.config.num_layers):
        step = _layer_step(model, layer, x, context)
        has_key_part = layer == 0 or context.embeddings is not None
        projections = _projection_inputs(model, layer, step, added if has_key_part else None)
        trace = trace_layer(model, layer, x, context, added)
        views.append(LayerView(trace, None if step.query_index is None else step.rows, projections))
        x = model.block(layer).finish(step.residual, step.heads)
    return views


def _mean_gradient(model: Decoder, parameters: dict[str, nn.Parameter], batch: Batch) -> dict[str, Tensor]:
    tokens, labels, lengths = batch
    count = int(is_counted(labels).sum())
    if count == 0:
        raise InputError("batch must have at least one example that counts, got none.")
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    with torch.enable_grad():
        for start in range(0, len(tokens), _BATCH_SIZE):
            rows = slice(start, start + _BATCH_SIZE)
            logits = model(tokens[rows], None if lengths is None else lengths[rows])
            loss = example_losses(logits, labels[rows]).sum() / count
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    total[name] += gradient
    return total
