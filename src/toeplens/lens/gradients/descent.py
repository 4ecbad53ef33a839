"""What gradient measures need of a model: each example's own gradient at logits, queries and keys, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.lens.kit.interventions import Batch
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
