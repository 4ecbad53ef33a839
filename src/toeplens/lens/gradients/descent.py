"""Gradients of each example at logits, queries and keys, layer by layer; the drift of positional effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.ground.reading import Positive
from toeplens.ground.records import AtLeast1, Record
from toeplens.lens.kit.interventions import Batch, counts
from toeplens.lens.kit.position import effect_variance, known_key_part
from toeplens.lens.kit.trace import LayerTrace


@dataclass(frozen=True)
class ProjectionInputs:
    """The inputs of a layer's W_Q and W_K, so that q = W_Q queries and k = W_K keys, up to biases.

    queries   [B, Q, E] at the queries that are computed
    keys      [B, N, F]; for latent attention the concatenation of the latent vector and the layer's input
    key_part  [B, N, F] the part of ``keys`` that comes from the vectors added at the input, with norm statistics fixed;
              None if that part is not known exactly
    own       [d, F] True where a head's W_K has weights; None if everywhere
    """

    queries: Float[Tensor, "B Q E"]
    keys: Float[Tensor, "B N F"]
    key_part: Float[Tensor, "B N F"] | None
    own: Bool[Tensor, "d F"] | None


@dataclass(frozen=True)
class LayerView:
    """The attention of one layer, as part of the autograd graph.

    trace        queries and keys at all positions
    rows         [B, Q] the queries that the model computes; None if all
    projections  the inputs of queries and keys
    """

    trace: LayerTrace
    rows: Int[Tensor, "B Q"] | None
    projections: ProjectionInputs


@dataclass(frozen=True)
class LayerGradient:
    """Each example's gradient of its own cross-entropy loss in one layer.

    layer        from 0
    rows         [B, Q] the key position of each query's own token
    present      [B, N] False for masked padding
    causal       whether keys after the query are masked
    logits       [B, H, Q, N] at the logits that enter the softmax, scale and bias included; 0 for masked keys
    q, k         [B, H, Q, d], [B, H, N, d] at queries and keys as projected, before the encoding acts; None unless
                 requested
    projections  the inputs of the projections; None unless requested
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
    """What gradient measures need from a source (`toeplens.backends.gradients`)."""

    num_layers: int
    num_heads: int

    def gradients(
        self, tokens: Tensor, labels: Tensor, lengths: Tensor | None, *, projections: bool = True
    ) -> tuple[Tensor, list[LayerGradient]]:
        """Each example's loss [B], and its gradients in every layer."""
        ...

    def layers(self, tokens: Tensor, lengths: Tensor | None) -> list[LayerView]:
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

    effect          [L, H] Var(P_h) of the current model (see `position_effect`), in squared logits
    drift           [L, H] d Var(P_h) / d eta at eta = 0, for parameters - eta * mean gradient
    gradient_norm   Euclidean norm of the mean gradient over all parameters
    parameter_norm  Euclidean norm of all parameters
    examples        number of examples whose gradients were averaged
    """

    WORDS = "positional drift"

    effect: Float[np.ndarray, "L H"]
    drift: Float[np.ndarray, "L H"]
    gradient_norm: Positive
    parameter_norm: Positive
    examples: AtLeast1

    @property
    def relative(self) -> Float[np.ndarray, "L H"]:
        """[L, H] the drift scaled to a step as long as the parameter vector, comparable between models; times 1e-3 it
        is the drift of a step of a thousandth of that norm. NaN without a gradient."""
        return self.drift * (self.parameter_norm / self.gradient_norm if self.gradient_norm > 0 else np.nan)


def positional_drift(source: Differentiable, batch: Batch, *, probe: Batch | None = None) -> PositionalDrift:
    """How each head's Var(P_h) starts to change when all parameters step against their mean gradient (theory 7).

    The drift is the exact derivative with respect to the step size at 0, not a finite difference. So it has no
    second-order error and no rounding error of a small difference, and it is 0 where P cannot change.

    P cannot change in the first layer if keys come from the layer's own input, and in every layer if they come from the
    raw embeddings, in this case: nothing is added at the input, and the logit is q . k plus a bias. Then the mean key
    is the same at every position, q . mean key does not depend on j, and P is the centred bias. So Var(P) is 0 for NoPE
    and constant for a fixed bias (ALiBi); a learned bias (T5) changes it through its own table, never through W_Q, W_K.
    A rotation or a vector added at the input makes P a function of W_Q and W_K. In deeper layers, the mean key at j
    contains what earlier layers wrote there, so P can change under every encoding.

    Arguments
        source  a differentiable model (`toeplens.backends.gradients`)
        batch   examples whose mean loss is minimized; negative labels are ignored
        probe   examples on which P is measured, at least 3, all processed at once; labels are not used (default: the
                first 256 of ``batch``)
    """
    tokens, labels, lengths = batch
    if probe is None:
        probe = (tokens[:256], labels[:256], None if lengths is None else lengths[:256])
    *found, gradient_norm, parameter_norm = source.descend(variances, batch, probe)
    effect, drift = (x.double().cpu().numpy() for x in found)
    return PositionalDrift(effect, drift, gradient_norm, parameter_norm, examples=int(counts(labels).sum()))


def variances(layers: Sequence[LayerView]) -> Float[Tensor, "L H"]:
    """Var(P_h) of every layer and head, at the queries that the model computes, differentiable."""
    found = []
    for view in layers:
        trace = view.trace
        found.append(effect_variance(trace, trace.q, trace.k, known_key_part(trace), view.rows))
    return torch.stack(found)
