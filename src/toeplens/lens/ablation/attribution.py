"""First-order head ablation: what one backward pass says of all heads at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.ground import InputError
from toeplens.lens.kit.interventions import Batch, Metric, Replacement, Replayable, counts
from toeplens.lens.kit.interventions import losses as example_losses

_NO_DERIVATIVE = {
    "accuracy": "accuracy has no derivative",
    "kl": "the divergence from the intact model is flat there, so that its first-order term is 0",
}


@runtime_checkable
class Scalable(Protocol):
    """What attribution needs of a source: one pass with gains on all heads, differentiable in them."""

    def scaled(
        self, tokens: Tensor, lengths: Tensor | None, gains: Float[Tensor, "L b H"], replacement: Replacement = None
    ) -> Float[Tensor, "b *N C"]:
        """Class logits with each sequence's own gains on the head outputs: gain * z + (1 - gain) * replacement."""
        ...


def first_order(
    source: Replayable, batches: Sequence[Batch], metric: Metric, replacing: Callable[[int], Replacement]
) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "L H n"]]:
    """The loss of each example that counts, and the first-order estimate of its rise without each head.

    The loss of example i as a function of a head's gain g is expanded at g = 1: loss(0) - loss(1) = -dloss/dg + ...,
    and dloss/dg = sum over positions of (z - replacement) . dloss/dz (attribution patching). As each example has gains
    of its own, one backward pass gives this for every head and example.

    Where the loss is flat (a model that is sure of its answers) or the heads do much, the slope says little of the
    rise; `toeplens.lens.ablation.estimate_check` tells.

    Arguments
        batches    at least one, with examples that count
        replacing  what replaces the heads of the batch of a given number
    """
    if metric != "loss":
        raise InputError(f"metric: {metric!r} was given; attribution takes 'loss' only, as {_NO_DERIVATIVE[metric]}.")
    if not isinstance(source, Scalable):
        raise InputError(
            f"method: 'attribution' was given; {type(source).__name__} cannot run with gains and gradients."
        )
    losses, slopes = [], []
    for index, (tokens, labels, lengths) in enumerate(batches):
        shape = (source.num_layers, len(tokens), source.num_heads)
        gains = torch.ones(shape, dtype=torch.float64, device=tokens.device, requires_grad=True)
        with torch.enable_grad():
            logits = source.scaled(tokens, lengths, gains, replacing(index))
            loss = example_losses(logits.double(), labels)
            (slope,) = torch.autograd.grad(loss.sum(), gains)
        counted = counts(labels)
        losses.append(loss.detach()[counted].cpu())
        slopes.append(slope[:, counted].transpose(1, 2).cpu())
    found, rises = torch.cat(losses).numpy(), -torch.cat(slopes, dim=2).numpy()
    if not (np.isfinite(found).all() and np.isfinite(rises).all()):
        raise InputError("source: its loss or the gradient of it is not finite; attribution needs finite ones.")
    return found, rises
