"""Positional gradients: what remains of single examples' in a batch's mean, and what descent does to position.

The gradients of each example are at logits, queries and keys, layer by layer (theory, section 7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from toeplens.lens.kit.intervals import INTERVAL_QUANTILES
from toeplens.lens.kit.interventions import Batch, is_counted
from toeplens.lens.kit.position import FOLDS, effect_variance, known_key_part, to_float64
from toeplens.lens.kit.trace import LayerTrace
from toeplens.utils import InputError, choose, invalid
from toeplens.utils.records import NonNegative, PositiveInt, Record


@dataclass(frozen=True)
class ProjectionInputs:
    """The inputs of a layer's W_Q and W_K, so that q = W_Q queries and k = W_K keys, up to biases.

    queries      at the queries that are computed
    keys         for latent attention the concatenation of the latent vector and the layer's input
    key_part     the part of ``keys`` that comes from the vectors added at the input, with norm statistics fixed; None
                 if that part is not known exactly
    weight_mask  True where a head's W_K has weights; None if everywhere
    """

    queries: Float[Tensor, "B Q E"]
    keys: Float[Tensor, "B N F"]
    key_part: Float[Tensor, "B N F"] | None
    weight_mask: Bool[Tensor, "d F"] | None


@dataclass(frozen=True)
class LayerView:
    """The attention of one layer, as part of the autograd graph; ``rows`` are the queries that the model computes."""

    trace: LayerTrace
    rows: Int[Tensor, "B Q"] | None
    projections: ProjectionInputs


@dataclass(frozen=True)
class LayerGradient:
    """Each example's gradient of its own cross-entropy loss in one layer.

    rows         the key position of each query's own token
    present      False for masked padding
    logits       at the logits that enter the softmax, scale and bias included; 0 for masked keys
    q, k         at queries and keys as projected, before the encoding acts; None unless requested
    projections  None unless requested
    """

    layer: int
    rows: Int[Tensor, "B Q"]
    present: Bool[Tensor, "B N"]
    causal: bool
    logits: Float[Tensor, "B H Q N"]
    q: Float[Tensor, "B H Q d"] | None
    k: Float[Tensor, "B H N d"] | None
    projections: ProjectionInputs | None


Measure = Callable[[Sequence[LayerView]], Tensor]


@runtime_checkable
class Differentiable(Protocol):
    """What gradient measures need from a source (`toeplens.backends.decoder.gradients`)."""

    num_layers: int
    num_heads: int

    def gradients(
        self, tokens: Tensor, labels: Tensor, lengths: Tensor | None, *, projections: bool = True
    ) -> tuple[Tensor, list[LayerGradient]]:
        """Each example's loss [B], and its gradients in every layer."""
        ...

    def layer_views(self, tokens: Tensor, lengths: Tensor | None) -> list[LayerView]:
        """Every layer's attention."""
        ...

    def descend(self, measure: Measure, batch: Batch, probe: Batch) -> tuple[Tensor, Tensor, float, float]:
        """How ``measure`` on ``probe`` changes when all parameters step against their mean gradient over ``batch``.

        Returns the measure, its derivative with respect to the step size at 0, and the Euclidean norms of the mean
        gradient and of all parameters.
        """
        ...


@dataclass(frozen=True)
class PositionalDrift(Record):
    """How the positional main effect of every head changes under plain gradient descent, to first order.

    effect  [L, H] Var(P_h) of the current model (see `effect_variance`), in squared logits
    drift   [L, H] d Var(P_h) / d eta at eta = 0, for parameters - eta * mean gradient
    gradient_norm, parameter_norm  Euclidean norms of the mean gradient and of all parameters
    """

    LABEL = "positional drift"

    effect: Float[np.ndarray, "L H"]
    drift: Float[np.ndarray, "L H"]
    gradient_norm: NonNegative
    parameter_norm: NonNegative
    examples: PositiveInt

    @property
    def relative(self) -> Float[np.ndarray, "L H"]:
        """[L, H] the drift of a step as long as the parameters, comparable between models; NaN without a gradient."""
        return self.drift * (self.parameter_norm / self.gradient_norm if self.gradient_norm > 0 else np.nan)


def positional_drift(source: Differentiable, batch: Batch, *, probe: Batch | None = None) -> PositionalDrift:
    """How each head's Var(P_h) starts to change when all parameters step against their mean gradient (theory 7).

    The drift is the exact derivative with respect to the step size at 0, so it is 0 where P cannot change: where
    nothing is added at the input, the logit is q . k plus a bias, and the layer is the first (or keys come from the raw
    embeddings). Then the mean key is the same at every position, and P is the centred bias: Var(P) is 0 for NoPE and
    constant for a fixed bias (ALiBi); a learned bias (T5) changes it through its own table, never through W_Q and W_K.
    In deeper layers, the mean key at j contains what earlier layers wrote there, so P can change under every encoding.

    Arguments
        source  a differentiable model (`toeplens.backends.decoder.gradients`)
        batch   examples whose mean loss is minimized; negative labels are ignored
        probe   examples on which P is measured, at least 3, all processed at once; labels are not used (default: the
                first 256 of ``batch``)
    """
    tokens, labels, lengths = batch
    if probe is None:
        probe = (tokens[:256], labels[:256], None if lengths is None else lengths[:256])
    *measured, gradient_norm, parameter_norm = source.descend(effect_variances, batch, probe)
    effect, drift = (x.double().cpu().numpy() for x in measured)
    return PositionalDrift(effect, drift, gradient_norm, parameter_norm, examples=int(is_counted(labels).sum()))


def effect_variances(layers: Sequence[LayerView]) -> Float[Tensor, "L H"]:
    """Var(P_h) of every layer and head, at the queries that the model computes, differentiable."""
    traces = [(view.trace, view.rows) for view in layers]
    return torch.stack([effect_variance(x, x.q, x.k, known_key_part(x), rows) for x, rows in traces])


MIN_BATCH_SIZE = 8  # the first batch size


@dataclass(frozen=True)
class Strength(Record):
    """How much of single examples' vectors g remains in their mean, for one vector per head or per layer.

    strength  [*P, S] SNR_n = ||mean over a batch of n|| / sqrt(E ||g||^2), root mean square over all batches of size n
              from the pool; n by `SeedStrength.sizes`
    exponent  [*P] least-squares slope of log SNR_n against log n: -1/2 is pure cancellation, 0 a fixed vector
    share     [*P] ||E g||^2 / E ||g||^2, the share of the energy that is equal in all examples, by a U-statistic:
              unbiased up to O(1/n), so it can be negative
    *_low, *_high  bootstrap intervals over the examples; NaN without resamples. The exponent's interval is derived from
              the share's, with the share at least 0; if the estimate is negative, its lower end is the estimate

    All are NaN if the vectors are 0 or undefined.
    """

    LABEL = "strength"

    strength: Float[np.ndarray, "*P S"]
    exponent: Float[np.ndarray, "*P"]
    exponent_low: Float[np.ndarray, "*P"]
    exponent_high: Float[np.ndarray, "*P"]
    share: Float[np.ndarray, "*P"]
    share_low: Float[np.ndarray, "*P"]
    share_high: Float[np.ndarray, "*P"]


class GradientPool:
    """Accumulates sums over a pool of examples and over ``bootstrap`` resamples of it, without keeping the vectors."""

    def __init__(self, examples: int, *, bootstrap: int = 0, seed: int = 0) -> None:
        if examples < 1:
            raise InputError("batches must have at least one example that counts, got none.")
        self.examples = examples
        rng = np.random.Generator(np.random.Philox(seed))
        drawn = rng.multinomial(examples, np.full(examples, 1 / examples), size=bootstrap)
        self._weights = np.concatenate((np.ones((1, examples)), drawn))  # the pool, then the resamples
        self._num_added = 0
        self._sum: Any = 0.0
        self._energy: Any = 0.0
        self._self_energy: Any = 0.0  # of pairs of an example with itself

    def add(self, vectors: Float[np.ndarray, "b *P C"]) -> None:
        """Add the vectors of the next examples, with C numbers per head or layer."""
        size = len(vectors)
        weights = self._weights[:, self._num_added : self._num_added + size]
        self._num_added += size
        flat = vectors.reshape(size, -1)
        energy = np.square(vectors, dtype=np.float64).sum(-1)
        self._sum = self._sum + (weights @ flat).reshape(-1, *vectors.shape[1:])
        self._energy = self._energy + np.tensordot(weights, energy, 1)
        self._self_energy = self._self_energy + np.tensordot(weights**2, energy, 1)

    @property
    def mean(self) -> Float[np.ndarray, "*P C"]:
        """The mean over the pool."""
        return self._sum[0] / self.examples

    def strength(self, sizes: Int[np.ndarray, "S"], *, concatenate: bool = False) -> Strength:
        """What remains of the vectors in means of n, for ``sizes`` n; ``concatenate`` joins those of the heads.

        Over ALL batches of n different examples of the pool, the mean of ||mean||^2 is exactly
        E||g||^2 (1/n + (1 - 1/n) share), with share = (n^2 ||mean||^2 - sum ||g||^2) / (n (n - 1)) / E||g||^2 over the
        pool. In a resample, pairs of an example with itself are left out of the share, as they would look like a fixed
        part. If the true share is 0, the intervals are too wide by a factor of about sqrt(3).
        """
        sum_energy, energy, self_energy = (self._sum**2).sum(-1), self._energy, self._self_energy
        if concatenate:
            sum_energy, energy, self_energy = sum_energy.sum(-1), energy.sum(-1), self_energy.sum(-1)
        num_pairs = self.examples**2 - (self._weights**2).sum(1).reshape(-1, *[1] * (sum_energy.ndim - 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = (sum_energy - self_energy) / num_pairs / (energy / self.examples)
        shares = np.where(energy > 0, shares, np.nan)
        share = shares[0]
        low = high = np.full_like(share, np.nan)
        if len(shares) > 1:
            low, high = np.quantile(shares[1:], INTERVAL_QUANTILES, axis=0)
        strength = strength_by_size(share, sizes)
        return Strength(
            strength=strength,
            exponent=exponent(strength, sizes),
            exponent_low=exponent(strength_by_size(np.minimum(np.clip(low, 0, None), share), sizes), sizes),
            exponent_high=exponent(strength_by_size(np.clip(high, 0, None), sizes), sizes),
            share=share,
            share_low=low,
            share_high=high,
        )


def batch_sizes(examples: int) -> Int[np.ndarray, "S"]:
    """8, 16, 32, ..., up to the pool."""
    return 2 ** np.arange(MIN_BATCH_SIZE.bit_length() - 1, examples.bit_length())


def strength_by_size(share: Float[np.ndarray, "*P"], sizes: Int[np.ndarray, "S"]) -> Float[np.ndarray, "*P S"]:
    """SNR_n of independent examples with this fixed share of the energy: sqrt(1/n + (1 - 1/n) share)."""
    return np.sqrt(np.clip(1 / sizes + (1 - 1 / sizes) * share[..., None], 0, None))


def exponent(strength: Float[np.ndarray, "*P S"], sizes: Int[np.ndarray, "S"]) -> Float[np.ndarray, "*P"]:
    """Least-squares slope of log strength on log n; NaN with fewer than two sizes, or if strength is 0."""
    if len(sizes) < 2:
        return np.full(strength.shape[:-1], np.nan)
    x = np.log(sizes) - np.log(sizes).mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.log(strength) @ x / (x @ x)
    return np.where((strength > 0).all(-1), slope, np.nan)


# ---- the strength of the positional gradient -------------------------------------------------------------------------

Level = Literal["logits", "parameters"]
LEVELS: tuple[Level, ...] = get_args(Level)
REFERENCE_EXAMPLES = 256  # examples used to find the direction that changes P
_MAX_LOGITS = 1 << 21  # logits of one layer processed at once
_NEGLIGIBLE = 1e-9  # directions below this part of their possible size are rounding errors


@dataclass(frozen=True)
class LevelSignal(Record):
    """Seed strength at one level: of each head [L, H], and of each layer [L], with its heads' vectors concatenated.

    mean    [L, H, C] mean over the pool. At the logits: diagonal means of dloss/dL by offset (0, 1, ... if causal,
            otherwise from -(N - 1) on). At the parameters: one number, the rate at which a step against the gradient
            moves W_Q, W_K along the direction in which Var(P_h) grows
    """

    LABEL = "seed strength"

    heads: Strength
    layers: Strength
    mean: Float[np.ndarray, "L H C"]

    @property
    def signal(self) -> Float[np.ndarray, "L H"]:
        """[L, H] the norm of the mean, as compared by `margins`. Pure noise gives sqrt(E ||g||^2 / n), not 0."""
        return np.sqrt(np.square(self.mean).sum(-1))


@dataclass(frozen=True)
class SeedStrength(Record):
    """Signal-to-noise ratio of the positional gradient by batch size, on a pool of examples (theory 7).

    sizes   [S] batch sizes n: 8, 16, ... up to the pool of ``examples``, whose mean loss is ``loss``
    levels  by name: ``logits``, ``parameters``
    """

    LABEL = "seed strength"

    sizes: tuple[PositiveInt, ...]
    examples: PositiveInt
    loss: float
    levels: Annotated[dict[str, LevelSignal], Field(min_length=1)]


def seed_strength(
    source: Differentiable,
    batches: Iterable[Batch],
    *,
    levels: Sequence[Level] = LEVELS,
    bootstrap: int = 1000,
    seed: int = 0,
) -> SeedStrength:
    """How much of single examples' positional gradients remains in a batch's mean (arXiv 2505.13027, 6.1 and 6.2).

    Level ``logits``: the diagonal means of an example's dloss/dL over its visible pairs, by offset (the Toeplitz
    projection of its gradient; offsets longer than a short sequence count as 0). Level ``parameters``: the example's
    gradient of head h's W_Q and W_K, projected on the unit direction along which Var(P_h) (see `effect_variance`)
    grows fastest at this model with fixed layer inputs, times -1. It is positive if descent on the example makes the
    head more positional. Biases of the projections are left out. In latent attention W_Q acts on the latent vector,
    W_K on the latent vector and (rotary part) on the layer's input; weights shared by heads are treated as if each head
    had its own. NaN where W_Q and W_K cannot change P: in the first layer under NoPE and every bias.

    Arguments
        source     a differentiable model (`toeplens.backends.decoder.gradients`)
        batches    (tokens [b, N], labels [b], lengths [b] or None); negative labels are ignored
        levels     ``logits`` (alone without resamples cheap enough for calls during training), ``parameters``, or both;
                   the direction of the latter is computed from the first 256 examples, in float64
        bootstrap  resamples for the intervals, 0 for none
    """
    if not levels:
        raise InputError(f"levels must include {' or '.join(map(repr, LEVELS))}, got none.")
    for name in levels:
        choose("levels", name, LEVELS)
    batch_list = [
        (tokens[counted], labels[counted], None if lengths is None else lengths[counted])
        for tokens, labels, lengths in batches
        if (counted := is_counted(labels)).any()
    ]
    count = sum(len(batch[0]) for batch in batch_list)
    pools = {name: GradientPool(count, bootstrap=bootstrap, seed=seed) for name in levels}
    length = max(batch[0].shape[1] for batch in batch_list)
    layer_directions = weight_directions(source, _reference_batch(source, batch_list)) if "parameters" in levels else []
    loss = 0.0
    for batch in _split_batches(batch_list, source.num_heads):
        losses, layers = source.gradients(*batch, projections=bool(layer_directions))
        loss += float(losses.sum())
        for name, pool in pools.items():
            if name == "logits":
                vectors = [diagonal_means(layer, length) for layer in layers]
            else:
                vectors = [direction(layer) for direction, layer in zip(layer_directions, layers, strict=True)]
            pool.add(torch.stack(vectors, dim=1).double().cpu().numpy())
    pool = next(iter(pools.values()))
    sizes = batch_sizes(pool.examples)
    signals = {
        name: LevelSignal(pool.strength(sizes), pool.strength(sizes, concatenate=True), pool.mean)
        for name, pool in pools.items()
    }
    return SeedStrength(tuple(sizes.tolist()), pool.examples, loss / pool.examples, signals)


def diagonal_means(layer: LayerGradient, length: int) -> Float[Tensor, "B H C"]:
    """Means of dloss/dL over the visible pairs of each offset within ``length``; 0 where there are none."""
    rows, size = layer.rows, layer.logits.shape[-1]
    keys = torch.arange(size, device=rows.device)
    first = 0 if layer.causal else 1 - length
    offsets = rows.unsqueeze(-1) - keys
    visible = layer.present.gather(1, rows).unsqueeze(-1) & layer.present.unsqueeze(1)
    if layer.causal:
        visible = visible & (offsets >= 0)
    # masked pairs go to an extra slot
    index = torch.where(visible, offsets - first, length - first).flatten(1)
    counts = torch.zeros(len(rows), length - first + 1, device=rows.device, dtype=layer.logits.dtype)
    counts.scatter_add_(1, index, torch.ones_like(index, dtype=counts.dtype))
    sums = counts.new_zeros(*layer.logits.shape[:2], counts.shape[-1])
    flat = layer.logits.flatten(2)
    sums.scatter_add_(2, index.unsqueeze(1).expand_as(flat), flat)
    return (sums / counts.clamp(min=1).unsqueeze(1))[..., :-1]


@dataclass(frozen=True)
class WeightDirection:
    """The unit direction in each head's (W_Q, W_K) along which its Var(P) grows fastest; NaN if none changes it."""

    to_q: Float[Tensor, "H d E"]
    to_k: Float[Tensor, "H d F"]

    def __call__(self, layer: LayerGradient) -> Float[Tensor, "B H 1"]:
        """Minus each example's gradient of W_Q and W_K, projected on the direction."""
        inputs = layer.projections
        assert inputs is not None
        assert layer.q is not None
        assert layer.k is not None
        moved_q, moved_k = _apply_weight(self.to_q, inputs.queries), _apply_weight(self.to_k, inputs.keys)
        return -((layer.q * moved_q).sum((2, 3)) + (layer.k * moved_k).sum((2, 3))).unsqueeze(-1)


def _apply_weight(weight: Float[Tensor, "H d E"], x: Float[Tensor, "B N E"]) -> Float[Tensor, "B H N d"]:
    return F.linear(x, weight.flatten(0, 1).to(x.dtype)).unflatten(-1, weight.shape[:2]).transpose(1, 2)


def weight_directions(source: Differentiable, reference: Batch) -> list[WeightDirection]:
    """Each layer's `WeightDirection`, from at least 3 examples; labels are not used."""
    with torch.no_grad():
        return list(map(_weight_direction, source.layer_views(reference[0], reference[2])))


def _weight_direction(view: LayerView) -> WeightDirection:
    """The gradient of Var(P) with respect to W_Q and W_K, with fixed layer inputs."""
    inputs, key_part = view.projections, known_key_part(view.trace)
    trace = to_float64(view.trace)
    leaves = [x.detach().double().requires_grad_() for x in (trace.q, trace.k, key_part) if x is not None]
    with torch.enable_grad():
        variance = effect_variance(trace, leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None, view.rows)
        grad_q, grad_k, *grad_part = torch.autograd.grad(variance.sum(), leaves)
    if view.rows is not None:  # at the computed queries
        grad_q = grad_q.gather(2, view.rows[:, None, :, None].expand(-1, grad_q.shape[1], -1, grad_q.shape[3]))
    queries, keys = inputs.queries.double(), inputs.keys.double()
    direction_q, direction_k = (torch.einsum("bhnd,bne->hde", *pair) for pair in ((grad_q, queries), (grad_k, keys)))
    if inputs.key_part is not None and grad_part:
        direction_k = direction_k + torch.einsum("bhnd,bne->hde", grad_part[0], inputs.key_part.double())
    direction_k = direction_k if inputs.weight_mask is None else direction_k * inputs.weight_mask
    size = (direction_q.square().sum((1, 2)) + direction_k.square().sum((1, 2))).sqrt()
    logits = trace.logits()
    rms_logit = torch.where(logits.isfinite(), logits, 0).square().mean().sqrt()
    max_size = rms_logit * trace.scale * (_rms(queries) * _rms(trace.k) + _rms(keys) * _rms(trace.q))
    unit = torch.where(size > _NEGLIGIBLE * max_size, size, torch.nan)[:, None, None]
    return WeightDirection(direction_q / unit, direction_k / unit)


def _rms(x: Tensor) -> Tensor:
    return x.square().sum(-1).mean().sqrt()


def _reference_batch(source: Differentiable, batches: Sequence[Batch]) -> Batch:
    """The first examples that fit in memory, of the shape that most examples have."""
    shapes = Counter(dict.fromkeys(map(_shape_of, batches), 0))
    for batch in batches:
        shapes[_shape_of(batch)] += len(batch[0])
    ((length, padded), _), *_ = shapes.most_common(1)
    count = max(FOLDS, min(REFERENCE_EXAMPLES, 4 * _MAX_LOGITS // (source.num_heads * length**2)))
    same_shape = [batch for batch in batches if _shape_of(batch) == (length, padded)][:count]
    tokens, labels, lengths = zip(*same_shape, strict=True)
    return torch.cat(tokens)[:count], torch.cat(labels)[:count], torch.cat(lengths)[:count] if padded else None


def _shape_of(batch: Batch) -> tuple[int, bool]:
    """The number of tokens of a batch's sequences, and whether they are padded."""
    return batch[0].shape[1], batch[2] is not None


def _split_batches(batches: Iterable[Batch], heads: int) -> Iterator[Batch]:
    """Split the batches so that the logits fit in memory."""
    for tokens, labels, lengths in batches:
        size = max(1, _MAX_LOGITS // (heads * tokens.shape[1] ** 2))
        for start in range(0, len(tokens), size):
            rows = slice(start, start + size)
            yield tokens[rows], labels[rows], None if lengths is None else lengths[rows]


@dataclass(frozen=True)
class Margins:
    """The lead of the best head of each layer (arXiv 2505.13027, section 6; theory 7).

    ratio  [L] M_l, the signal of the best head divided by that of the second best; NaN with fewer than two signals
    gamma  [L - 1] M_l / M_{l+1}; the claim is gamma > 1 for each l, so that the lead grows back through the layers
    """

    ratio: Float[np.ndarray, "L"]
    gamma: Float[np.ndarray, "L1"]


def margins(signal: Float[np.ndarray, "L H"]) -> Margins:
    """Best against second-best head, layer by layer, by the norm of each head's mean gradient, NaN if undefined."""
    if np.any(signal < 0):
        raise invalid("signal", "be at least 0", float(np.nanmin(signal)))
    known = np.pad(np.where(np.isnan(signal), -np.inf, signal), ((0, 0), (0, 2)), constant_values=-np.inf)
    second, best = np.sort(known, axis=1)[:, -2:].T
    ratio = np.divide(best, second, out=np.full_like(best, np.nan), where=second > 0)
    return Margins(ratio, ratio[:-1] / ratio[1:])
