"""First-order head ablation, checked against exact ablation of a sample of the heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.ground import InputError, invalid
from toeplens.ground.reading import Count
from toeplens.ground.records import Dims, MaybeNaN, Record
from toeplens.lens.kit.intervals import spearman
from toeplens.lens.kit.interventions import Batch, Metric, Replacement, Replayable, counts
from toeplens.lens.kit.interventions import losses as example_losses

# A rank correlation of 0.9 on 32 heads puts that of all heads above 0.78 (95 %). Some trained models reached only 0.6
# or 0.0; there the most important heads can get estimates near zero.
BAR = 0.9
SAMPLE = 32
FEWEST = 4  # with fewer heads, chance produces a perfect order more often than once in 20
SIZES = (0.5, 2.0)  # slopes between which an estimate has about the right size

UNCHECKED = "These estimates were not checked by exact ablation, so they must not be read as effects."

_GOLDEN = (5**0.5 - 1) / 2

Sample = list[Int[np.ndarray, "_k"]]
Layered = Float[np.ndarray, "_L _H"] | Sequence[Float[np.ndarray, "_H"]]  # layers may have different numbers of heads


@dataclass(frozen=True)
class EstimateCheck(Record):
    """Estimated and exact effects of the same heads.

    layers, heads     [n] the sampled heads, counted from 0
    estimates, exact  [n] their estimated effects, and their effects by exact ablation
    of                number of heads with an estimate
    rank_correlation  Spearman's, over the sample; nan if all estimates or all effects are equal
    slope             of exact effects against estimates, least squares through the origin; 1 if they agree, nan if all
                      estimates are 0
    """

    WORDS = "check"

    layers: Annotated[tuple[Count, ...], Dims("n")]
    heads: Annotated[tuple[Count, ...], Dims("n")]
    estimates: Annotated[tuple[float, ...], Dims("n")]
    exact: Annotated[tuple[float, ...], Dims("n")]
    of: Count
    rank_correlation: MaybeNaN
    slope: MaybeNaN

    @property
    def holds(self) -> bool:
        """Whether at least the order of the estimates can be trusted: the rank correlation reaches `BAR`."""
        return len(self.heads) >= FEWEST and self.rank_correlation >= BAR

    @property
    def words(self) -> str:
        """The verdict in one sentence."""
        found = (
            f"{len(self.heads)} of {self.of} heads were also ablated exactly: rank correlation "
            f"{_figure(self.rank_correlation)}, exact effects {_figure(self.slope)} times the estimates"
        )
        if len(self.heads) < FEWEST:
            return f"{found}; fewer than {FEWEST} heads cannot confirm the estimates; do not read them as effects."
        if not self.holds:
            return f"{found}; the rank correlation is below {BAR:g}, so do not read the estimates as effects."
        if not SIZES[0] <= self.slope <= SIZES[1]:
            return f"{found}; the order of the estimates is right, their size is not."
        return f"{found}; the estimates are confirmed."


def sample_heads(estimates: Layered, count: int = SAMPLE) -> Sample:
    """Choose the heads on which estimates are checked: equally many from each layer, spread over the estimates' ranks.

    With k of a layer's H heads, these are the ranks (i + phase) H / k. The phase advances by the golden ratio from
    layer to layer, so that few heads per layer still cover the whole range, and no layer's largest is favoured.

    Arguments
        estimates  for each layer, [H]; heads with nan are never drawn
        count      minimum number of heads, if there are as many
    """
    k = -(-count // max(len(estimates), 1))
    sample = []
    for layer, values in enumerate(estimates):
        order = np.argsort(values, kind="stable")[: int((~np.isnan(values)).sum())]
        size = min(k, len(order))
        phase = (layer + 0.5) * _GOLDEN % 1
        ranks = ((np.arange(size) + phase) * (len(order) / max(size, 1))).astype(int)
        sample.append(np.sort(order[ranks]))
    return sample


def check_estimates(
    estimates: Layered,
    exact: Sequence[Float[np.ndarray, "_k"]] | Callable[[Sample], Sequence[Float[np.ndarray, "_k"]]],
    sample: Sample | None = None,
) -> EstimateCheck:
    """Compare estimates with exact effects on a sample.

    Arguments
        estimates  for each layer, [H]
        exact      for each layer, [k] effects of the sampled heads, or a function that returns them for a sample
        sample     for each layer, [k] heads (default: those of `sample_heads`)
    """
    if sample is None:
        sample = sample_heads(estimates)
    found = exact(sample) if callable(exact) else exact
    if [len(x) for x in found] != [len(heads) for heads in sample]:
        raise invalid("exact", f"have the lengths of the sample, {list(map(len, sample))}", [len(x) for x in found])
    layers = np.repeat(np.arange(len(sample)), [len(heads) for heads in sample])
    x = np.concatenate([values[heads] for values, heads in zip(estimates, sample, strict=True)])
    y = np.concatenate([np.asarray(each, dtype=float) for each in found])
    square = float((x**2).sum())
    return EstimateCheck(
        tuple(layers.tolist()),
        tuple(np.concatenate(sample).tolist()),
        tuple(x.tolist()),
        tuple(y.tolist()),
        int(sum((~np.isnan(values)).sum() for values in estimates)),
        float(spearman(np.stack((x, y)))),
        float((x * y).sum() / square) if square > 0 else float("nan"),
    )


def _figure(value: float) -> str:
    return "not defined" if np.isnan(value) else f"{value:.2f}"


_NO_DERIVATIVE = {
    "accuracy": "accuracy has no derivative",
    "kl": "the divergence from the intact model has zero gradient there, so its first-order term is 0",
}


@runtime_checkable
class Scalable(Protocol):
    """What attribution needs from a source: a pass that is differentiable in a gain on each head."""

    def scaled(
        self, tokens: Tensor, lengths: Tensor | None, gains: Float[Tensor, "L b H"], replacement: Replacement = None
    ) -> Float[Tensor, "b *N C"]:
        """Class logits with separate gains on the head outputs per sequence: gain * z + (1 - gain) * replacement."""
        ...


def first_order(
    source: Replayable, batches: Sequence[Batch], metric: Metric, replacing: Callable[[int], Replacement]
) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "L H n"]]:
    """The loss of each counted example, and the first-order estimate of its rise without each head.

    The loss of example i as a function of a head's gain g is expanded at g = 1: loss(0) - loss(1) = -dloss/dg + ...,
    with dloss/dg = sum over positions of (z - replacement) . dloss/dz (attribution patching). As each example has its
    own gains, one backward pass gives this for every head and example.

    Where the loss is flat (a model certain of its answers) or heads have large effects, the slope says little about the
    rise; `check_estimates` measures this.

    Arguments
        batches    at least one, with counted examples
        replacing  returns the replacement of the heads for a batch index
    """
    if metric != "loss":
        raise invalid("metric", f"be 'loss' for attribution ({_NO_DERIVATIVE[metric]})", metric)
    if not isinstance(source, Scalable):
        raise InputError(f"method must not be 'attribution' for {type(source).__name__}, which has no gradients.")
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
        raise InputError("source must have a finite loss and gradient for attribution.")
    return found, rises
