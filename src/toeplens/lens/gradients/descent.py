"""What gradient measures need of a model: each example's own gradient at logits, queries and keys, layer by layer."""

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
    """What a layer's W_Q and W_K are applied to, so that q = W_Q queries and k = W_K keys, biases apart.

    queries   [B, Q, E] at the queries that are computed
    keys      [B, N, F]; for latent attention the latent vector and the layer's input side by side
    key_part  [B, N, F] the part of ``keys`` that the vectors added at the input make up, norms held at their value;
              None where that part is not known exactly
    own       [d, F] True where W_K of a head has a weight at all; None if everywhere
    """

    queries: Float[Tensor, "B Q E"]
    keys: Float[Tensor, "B N F"]
    key_part: Float[Tensor, "B N F"] | None
    own: Bool[Tensor, "d F"] | None


@dataclass(frozen=True)
class LayerView:
    """One layer's attention, through which gradients can pass.

    trace        all positions' queries and keys
    rows         [B, Q] the queries that the model computes there; None if all
    projections  what queries and keys are made from
    """

    trace: LayerTrace
    rows: Int[Tensor, "B Q"] | None
    projections: ProjectionInputs


@dataclass(frozen=True)
class LayerGradient:
    """Each example's gradient of its own cross-entropy loss in one layer.

    layer        from 0
    rows         [B, Q] the key that is each query's own token
    present      [B, N] True where a sequence has a token that counts: not hidden padding
    causal       whether keys after a query's own are hidden
    logits       [B, H, Q, N] at the logits that enter the softmax (scale, bias and all); 0 where a key is not seen
    q, k         [B, H, Q, d], [B, H, N, d] at queries and keys as projected, before the encoding acts; None unless
                 asked for
    projections  what those are made from; None unless asked for
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
    """What gradient measures need of a source (`toeplens.sources.decoder.gradients`)."""

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

        Returns the measure, its derivative by the step size at a step size of 0, and the Euclidean norms of the mean
        gradient and of all parameters.
        """
        ...


@dataclass(frozen=True)
class PositionalDrift(Record):
    """How the positional main effect of every head moves under plain gradient descent, to first order.

    effect          [L, H] Var(P_h) of the model as it is (see `position_effect`), in squared logits
    drift           [L, H] d Var(P_h) / d eta at eta = 0, for parameters - eta * mean gradient
    gradient_norm   Euclidean norm of the mean gradient over all parameters
    parameter_norm  Euclidean norm of all parameters
    examples        how many examples' gradients were averaged
    """

    WORDS = "positional drift"

    effect: Float[np.ndarray, "L H"]
    drift: Float[np.ndarray, "L H"]
    gradient_norm: Positive
    parameter_norm: Positive
    examples: AtLeast1

    @property
    def relative(self) -> Float[np.ndarray, "L H"]:
        """[L, H] the drift for a step as long as the parameters: comparable between models; times 1e-3, that of a step
        of a thousandth of their norm. NaN without a gradient."""
        return self.drift * (self.parameter_norm / self.gradient_norm if self.gradient_norm > 0 else np.nan)


def positional_drift(source: Differentiable, batch: Batch, *, probe: Batch | None = None) -> PositionalDrift:
    """How each head's Var(P_h) starts to change when all parameters step against their mean gradient (theory 7).

    The drift is the exact derivative by the step size at 0, not the difference after some small step: it needs no step
    size, has no second-order error and no rounding of a small difference, and is 0 where P cannot move.

    What cannot move, in the first layer under keys from the layer's own input and in every layer under keys from the
    raw embeddings: where nothing is added at the input and the logit is q . k and a bias, the mean key is one and the
    same at every position, q . mean key is no function of j, and P is the centred bias. So Var(P) is 0 for NoPE and
    constant for a fixed bias (ALiBi); a learned bias (T5) moves it through its own table, never through W_Q, W_K. A
    rotation or a vector added at the input makes P a function of W_Q and W_K. Deeper, the mean key at j carries what
    earlier layers wrote there, so that P can move under every encoding.

    Arguments
        source  a model whose gradients can be taken (`toeplens.sources.decoder.gradients`)
        batch   examples whose mean loss is descended; negative labels do not count
        probe   examples on which P is measured, 3 or more; their labels are not looked at, and all are worked at once.
                The first 256 of ``batch`` unless given
    """
    tokens, labels, lengths = batch
    if probe is None:
        probe = (tokens[:256], labels[:256], None if lengths is None else lengths[:256])
    *found, gradient_norm, parameter_norm = source.descend(variances, batch, probe)
    effect, drift = (x.double().cpu().numpy() for x in found)
    return PositionalDrift(effect, drift, gradient_norm, parameter_norm, examples=int(counts(labels).sum()))


def variances(layers: Sequence[LayerView]) -> Float[Tensor, "L H"]:
    """Var(P_h) of every layer and head, at the queries that the model computes, as a function of what it is made of."""
    found = []
    for view in layers:
        trace = view.trace
        found.append(effect_variance(trace, trace.q, trace.k, known_key_part(trace), view.rows))
    return torch.stack(found)
