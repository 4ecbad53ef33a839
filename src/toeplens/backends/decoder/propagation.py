"""Relevance propagation through the toeplens decoder: one forward and one backward pass, in float64, on a copy.

Layer-wise relevance propagation distributes a class logit back, layer by layer, to the inputs. Here every operation is
replaced by one with the same value that is homogeneous of degree 1 in the inputs that receive relevance. The relevance
of x is then x . gradient, and by Euler's theorem the relevances add up to the logit.

From AttnLRP (Achtibat et al. 2024, arXiv 2402.05602)
    linear maps   each input by its own term (z-rule)
    norms         linear, with fixed statistics; activations: x times a fixed act(x)/x
    products      of weights and values, of queries and keys: half to each factor
    softmax       Taylor's rule: logit j receives L_j (R(A_j) - A_j sum_k R(A_k))
Ours
    biases        of linear maps and norms, and the remainder of the softmax rule, are separate terms
    rotation      L = L_0 + (L - L_0), where L_0 is the logit of the same query and key with both at position 0. For a
                  rotation L_0 = Re sum_t q_t conj(k_t), without rotation, and the coupled rest is
                  Re sum_t q_t conj(k_t) (e^(iota delta theta_t) - 1). L_0 belongs to content: half to the query, half
                  to the key. Of the rest, half belongs to position, a quarter to the query, a quarter to the key. So
                  content gets (L + L_0)/2 and position (L - L_0)/2: their Shapley values if content without rotation
                  gives L_0 and rotation without content gives nothing
    bias          of the logits, which depends only on position: belongs to position
    input         x = e + p is linear: the vector p belongs to position, the embedding e to content
    pairs         position's part of a logit belongs half to the query's position, half to the key's
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from toeplens.backends.decoder.source import DecoderSource, position_vectors
from toeplens.encodings import PositionalEncoding
from toeplens.lens.kit.toeplitz import diagonal_sums
from toeplens.lens.logits import Relevance
from toeplens.model import Block, Decoder, DecoderAttention, PassContext
from toeplens.model.decoder import apply_frozen_norm
from toeplens.utils import InputError, invalid

_MAX_PAIRS = 1 << 21  # query-key pairs of a layer processed at once, over batch and heads
_TOLERANCE = 1e-9  # relative to the summed absolute values of the parts
_SUPPORTED = (
    "vectors added at the input, biases that depend only on positions, or linear maps of queries and keys by position, "
    "such as rotations"
)


def relevance(
    source: Decoder | DecoderSource,
    tokens: Int[Tensor, "B N"],
    lengths: Int[Tensor, "B"] | None = None,
    classes: Int[Tensor, "B"] | None = None,
) -> Relevance:
    """The relevance of content, position, biases and softmax for each example's class logit.

    Every call checks that the parts add up to the model's own logit. The model is not changed; dropout is off.

    Arguments
        source   a `Decoder`, or a source of one
        tokens   [B, N] token ids
        lengths  [B] number of tokens of each sequence before its padding; None without padding. Padding has relevance 0
                 unless the model attends to it or reads it
        classes  [B] the class whose logit is explained (default: the predicted class)

    Raises `InputError` for no examples, for unknown classes, for unsupported encodings (named in the message), and if
    the parts do not add up to the logit.
    """
    model = copy.deepcopy(source if isinstance(source, Decoder) else source.model).double().eval()
    model.requires_grad_(False)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise invalid("tokens", "have shape [B, N] with no dimension 0", got=f"shape {list(tokens.shape)}")
    count, length = tokens.shape
    if model.config.readout == "each":
        raise InputError("readout: relevance needs a model with one answer per sequence.")
    limit = model.config.num_classes
    if classes is not None and (classes.shape != (count,) or int(classes.min()) < 0 or int(classes.max()) >= limit):
        raise invalid("classes", f"be {count} numbers from 0 to {limit - 1}", classes.flatten().tolist()[:8])
    _require_linear(model, length)
    size = max(1, _MAX_PAIRS // (model.config.num_heads * length**2))
    results = []
    for start in range(0, count, size):
        rows = slice(start, start + size)
        options = [None if x is None else x[rows] for x in (lengths, classes)]
        results.append(_propagate(model, tokens[rows], *options))

    def concatenate(name: str) -> Any:
        return np.concatenate([getattr(result, name) for result in results])

    attention = np.stack([len(result.target) * result.by_offset for result in results]).sum(0) / count
    names = ("content", "position_input", "position_attention", "biases", "softmax", "target", "classes")
    return Relevance(
        **{name: concatenate(name) for name in names},
        by_layer=attention.sum(-1),
        by_offset=attention,
        offsets=results[0].offsets,
    )


def _propagate(model: Decoder, tokens: Tensor, lengths: Tensor | None, classes: Tensor | None) -> Relevance:
    with torch.no_grad():
        logits = model(tokens, lengths, fused=False)
        chosen = logits.argmax(-1) if classes is None else classes
        target = logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
        x, context = model.start_pass(tokens, lengths)
        vectors = position_vectors(model, x, context)
    x.requires_grad_()
    if context.embeddings is not None:
        context = replace(context, embeddings=x)
    biases, softmax = (torch.ones_like(target, requires_grad=True) for _ in range(2))
    with torch.enable_grad(), _lrp_rules(model, biases):
        values, positions = _surrogate(model, x, context, biases, softmax)
        leaves = [x, biases, softmax, *positions]
        gradients = torch.autograd.grad(values.gather(1, chosen.unsqueeze(1)).sum(), leaves)
        grad_x, grad_biases, grad_softmax, *grad_positions = gradients
    pairs = torch.stack([position.detach() * grad for position, grad in zip(positions, grad_positions, strict=True)])
    size, causal = tokens.shape[1], model.config.causal
    attention = diagonal_sums(pairs.sum(1))[..., size - 1 if causal else 0 :] / len(tokens)
    values = {
        "content": (model.embedding(tokens) * grad_x).sum(-1),
        "position_input": (vectors * grad_x).sum(-1),
        "position_attention": ((pairs.sum((2, 4)) + pairs.sum((2, 3))) / 2).sum(0),
        "biases": grad_biases,
        "softmax": grad_softmax,
        "target": target,
        "classes": chosen,
        "by_layer": attention.sum(-1),
        "by_offset": attention,
        "offsets": torch.arange(0 if causal else 1 - size, size),
    }
    result = Relevance(**{name: x.detach().cpu().numpy() for name, x in values.items()})
    if not (result.errors <= _TOLERANCE).all():
        worst = int(np.nan_to_num(result.errors, nan=np.inf).argmax())
        raise InputError(
            f"encoding: relevance is not exact with {type(model.encoding).__name__}: a logit of "
            f"{result.target[worst]:.6g} has parts that add up to {result.total[worst]:.6g}. Encodings must be "
            f"{_SUPPORTED}."
        )
    return result


def _surrogate(
    model: Decoder, x: Tensor, context: PassContext, biases: Tensor, softmax: Tensor
) -> tuple[Float[Tensor, "b *N C"], list[Float[Tensor, "b H N N"]]]:
    """The class logits, and position's part of each layer's attention logits, as leaves of the graph."""
    length = x.shape[1]
    visible = context.key_mask
    if model.config.causal:
        past = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()[None, None]
        visible = past if visible is None else past & visible
    positions = []
    for layer in range(model.config.num_layers):
        block = model.block(layer)
        v, logits, position = _layer_logits(block, x, context, biases)
        positions.append(position)
        masked = logits if visible is None else logits.masked_fill(~visible, float("-inf"))
        weights = masked.softmax(-1)
        with torch.no_grad():
            linear = weights * (logits - (weights * logits).sum(-1, keepdim=True))
        z = product(redirect_relevance(weights, weights - linear, softmax), v)
        x = block.finish(x, z.transpose(1, 2))
    read = model.read_position(model.config.num_layers - 1, x.shape[:2], context)
    if read is not None:
        x = x[torch.arange(len(x), device=x.device), read].unsqueeze(1)
    return model.compute_logits(x, context), positions


def _layer_logits(block: Block, x: Tensor, context: PassContext, biases: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's values and logits, and position's part of the logits."""
    attention, positions = block.attention, context.positions
    normed = block.norm_attention(x)
    q, k, v = attention.project(normed, normed if context.embeddings is None else context.embeddings)
    if isinstance(attention, DecoderAttention):
        qkv_bias = attention.qkv.bias.unflatten(0, (3, attention.num_heads, 1, -1))
        q, k, v = (redirect_relevance(x, bias, biases) for x, bias in zip((q, k, v), qkv_bias, strict=True))
    encoding, rotated = attention.encoding, None
    if encoding.overrides("rotate"):
        zero_positions = torch.zeros_like(positions)
        rotated = encoding.rotate(q, k, positions, positions)
        q, k = encoding.rotate(q, k, zero_positions, zero_positions)
    content = product(q, k.mT) * attention.scale
    position = torch.zeros_like(content)
    if rotated is not None:
        rotated_logits = product(rotated[0], rotated[1].mT) * attention.scale
        content, position = (rotated_logits + content) / 2, (rotated_logits - content) / 2
    bias = encoding.bias(positions, positions)
    if bias is not None:
        position = position + bias.double()
    position = position.detach().requires_grad_()
    return v, content + position, position


def redirect_relevance(y: Tensor, constant: Tensor, unit: Float[Tensor, "B"]) -> Float[Tensor, "B *N"]:
    """``y`` [B, *N], with the relevance of its summand ``constant`` sent to ``unit`` (ones, one per example)."""
    return y + constant.detach() * (unit.view(-1, *[1] * (y.ndim - 1)) - 1)


def product(a: Float[Tensor, "*B n m"], b: Float[Tensor, "*B m k"]) -> Float[Tensor, "*B n k"]:
    """A matrix product; half of its relevance goes to each factor."""
    return (a @ b.detach() + a.detach() @ b) / 2


@contextmanager
def _lrp_rules(model: Decoder, biases: Tensor) -> Iterator[None]:
    """Make the model's norms, activations and linear maps follow the rules.

    An encoding's own modules depend only on position and are not changed. Some protocols do not call the projection to
    queries, keys and values as a module, so its biases are handled at its output.
    """

    def norm(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        normed, shift = apply_frozen_norm(module, inputs[0], inputs[0].detach()), getattr(module, "bias", None)
        return normed if shift is None else redirect_relevance(normed + shift, shift, biases)

    def linear(module: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output if module.bias is None else redirect_relevance(output, module.bias, biases)

    def activation(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return inputs[0] * torch.where(inputs[0] == 0, 0, output / inputs[0]).detach()

    rules = {nn.LayerNorm: norm, nn.RMSNorm: norm, nn.Linear: linear, nn.ReLU: activation, nn.GELU: activation}
    modules = list(model.modules())
    excluded = {id(child) for module in modules if isinstance(module, PositionalEncoding) for child in module.modules()}
    excluded |= {id(module.qkv) for module in modules if isinstance(module, DecoderAttention)}
    handles = [
        module.register_forward_hook(rules[type(module)])
        for module in modules
        if type(module) in rules and id(module) not in excluded
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _require_linear(model: Decoder, length: int) -> None:
    """Refuse encodings that are not followed, such as rotations that are not linear for random queries and keys."""
    device = model.readout.weight.device
    for encoding in {id(x): x for x in model.modules() if isinstance(x, PositionalEncoding)}.values():
        is_supported = encoding.fusable and not encoding.data_dependent
        is_supported = is_supported and (encoding.has_fixed_bias or not encoding.overrides("bias"))
        if is_supported and encoding.overrides("rotate"):
            shape = (2, 2, 1, encoding.num_heads, length, encoding.query_dim)
            generator = torch.Generator().manual_seed(0)
            first, second = torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
            positions = encoding.to_positions(torch.arange(length, device=device))
            rotated = [encoding.rotate(q, k, positions, positions) for q, k in (first, second, first + second)]
            is_supported = all(torch.allclose(a + b, c, rtol=0, atol=1e-9) for a, b, c in zip(*rotated, strict=True))
        if not is_supported:
            raise invalid("encoding", f"be {_SUPPORTED} for relevance", got=type(encoding).__name__)
