"""The positional drift: does gradient descent, from this model, make a head more or less positional?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.ground.reading import Positive
from toeplens.ground.records import AtLeast1, Record
from toeplens.lens.gradients.descent import Differentiable, LayerView
from toeplens.lens.kit.interventions import Batch, counts
from toeplens.lens.kit.position import effect_variance, known_key_part


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
