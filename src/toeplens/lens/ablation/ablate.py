"""Head ablation: the effect of single heads, cumulative ablation by layer, and the rank agreement of two ablations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict, Unpack, get_args

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from toeplens.ground import choose, invalid
from toeplens.ground.reading import Share
from toeplens.ground.records import AtLeast1, Record
from toeplens.lens.ablation.attribution import EstimateCheck, Sample, check_estimates, first_order
from toeplens.lens.kit.intervals import TAILS, Estimate, bootstrap_means, spearman
from toeplens.lens.kit.interventions import (
    Batch,
    Intervention,
    Memory,
    Metric,
    Replacement,
    Replayable,
    counted_batches,
    examples_answers,
    harm,
    replacements,
)

Method = Literal["exact", "attribution"]


@dataclass(frozen=True)
class HeadAblation(Record):
    """The effect of ablating heads.

    drops         [layers, heads] ablation effect, positive for harm: metric(intact) - metric(ablated) for accuracy,
                  metric(ablated) - metric(intact) for loss and kl
    low, high     [layers, heads] paired bootstrap interval of the drops over the examples, not corrected for the number
                  of heads: among many heads some intervals miss 0 by chance. [0, 0] for a head without an effect on any
                  example, however few there are. nan without resamples
    baseline      the intact model's metric
    cumulative    [layers, heads + 1] metric with 0, 1, 2, ... heads of a layer ablated together, most important first;
                  nan where not run
    examples      number of examples counted
    chance        chance accuracy, as passed in
    metric        ``accuracy`` (a share), ``loss`` (nats) or ``kl`` (nats)
    intervention  ``zero``, ``mean``, ``resample`` or ``position``
    method        ``exact`` or ``attribution``
    check         for an attribution: how its estimates compare with exact drops on a sample of the heads. None in old
                  records without this check; their estimates must not be read as effects
    """

    WORDS = "ablation"
    LATER = ("method", "check")

    drops: Annotated[Float[np.ndarray, "L H"], Field(min_length=1)]
    low: Float[np.ndarray, "L H"]
    high: Float[np.ndarray, "L H"]
    baseline: float
    cumulative: Float[np.ndarray, "L H+1"]
    examples: AtLeast1
    chance: Share
    metric: Metric = "accuracy"
    intervention: Intervention = "zero"
    method: Method = "exact"
    check: EstimateCheck | None = None

    def verify(self) -> None:
        for name, least in (("drops", -1), ("low", -1), ("high", -1), ("cumulative", 0)):
            numbers = getattr(self, name)
            if self.metric == "accuracy" and ((numbers < least) | (numbers > 1)).any():
                raise ValueError(f"{name} must be from {least} to 1 for accuracies.")
        if self.metric == "accuracy" and not 0 <= self.baseline <= 1:
            raise invalid("baseline", "be from 0 to 1 for accuracies", self.baseline)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON; None for NaN. ``check`` is left out if there is none."""
        content = super().to_dict()
        return {name: value for name, value in content.items() if name != "check" or value is not None}


class Choices(TypedDict, total=False):
    """Keyword arguments of an ablation; see `ablate_heads`."""

    chance: float
    intervention: Intervention
    method: Method
    cumulative: bool
    bootstrap: int
    seed: int
    memory: Memory | None


def ablate_heads(
    source: Replayable, batches: Iterable[Batch], *, metric: Metric = "accuracy", **choices: Unpack[Choices]
) -> HeadAblation:
    """Ablate each head of each layer and measure the effect on the model (arXiv 2505.13027, section 5.1).

    The head's output z, in the input of the output projection, becomes gain * z + (1 - gain) * replacement with
    gain 0, at every position, padding included. The layers before the head's layer run once and are shared by all its
    heads, which are replayed together as one batch.

    Arguments
        source        a model that can replay from a layer (`toeplens.backends`)
        batches       (tokens [b, N], labels [b] or, where the model answers at every token, [b, N], lengths [b] or
                      None); negative labels are ignored, and an example with several labels counts as their mean
        chance        chance accuracy, kept for `deposit` (default: 0)
        metric        ``accuracy``, ``loss`` (cross-entropy) or ``kl``: KL(intact || ablated) of the output
                      distribution, 0 for the intact model; for each, a positive drop means harm
        intervention  the replacement: ``zero``; ``mean``, the head's mean at that position over the counted examples
                      with a token there (0 if there are none; needs a second pass over the data); ``resample``, its
                      output at that position in another counted example, of the same length if there is one; or
                      ``position``, its own output on the same input with the encoding switched off in that head only:
                      no rotation, no bias, nothing after the softmax. Encodings added at the input do not belong to a
                      head, so ``position`` gives drops of 0 for them
        method        ``exact``; or ``attribution``, the first-order estimate (z - replacement) . dloss/dz of all heads
                      from one backward pass, for the loss only, without cumulative ablation; needs a `Scalable` source.
                      A sample of the heads is also ablated exactly, and the result's ``check`` says whether the
                      estimates can be read as effects
        cumulative    also ablate each layer's heads together, in order of importance (default: True)
        bootstrap     resamples for the intervals, 0 for none (default: 1,000)
        seed          seed of the examples drawn by ``resample``
        memory        stores each batch's results, so that an interrupted exact ablation can be resumed

    Raises `InputError` for an unknown choice, if no example counts, for attribution with a metric other than the loss,
    and if ``resample`` has only one example or sequences of several widths.
    """
    _known((metric,), **choices)
    return ablate_by((metric,), source, batches, **choices)[metric]


def ablate_by(
    metrics: Sequence[Metric],
    source: Replayable,
    batches: Iterable[Batch],
    *,
    chance: float = 0.0,
    intervention: Intervention = "zero",
    method: Method = "exact",
    cumulative: bool = True,
    bootstrap: int = 1000,
    seed: int = 0,
    memory: Memory | None = None,
) -> dict[Metric, HeadAblation]:
    """`ablate_heads` for several metrics from the same passes; only the first gets a cumulative curve, in its order."""
    _known(metrics, intervention=intervention, method=method)
    kept = counted_batches(batches)
    layers, heads = source.num_layers, source.num_heads
    replacing = replacements(source, kept, intervention, seed)
    curve = np.full((layers, heads + 1), np.nan)
    check = None
    if method == "attribution":
        if len(metrics) > 1:
            raise invalid("metrics", "be only the loss for an attribution", got=f"{len(metrics)} metrics")
        intact, harms = first_order(source, kept, metrics[0], replacing)
        check = check_estimates(harms.mean(-1), lambda sample: _sampled(source, kept, sample, metrics[0], replacing))
        intacts, effects = intact[None], [harms]
    else:
        single = [1 - torch.eye(heads)] * layers
        intacts, alone = _answers(source, kept, single, metrics, replacing, memory, "single")
        effects = [harm(*each).reshape(layers, heads, -1) for each in zip(metrics, intacts, alone, strict=True)]
        if cumulative:
            orders = np.argsort(-effects[0].mean(-1), axis=1, kind="stable")
            curve[:, 0] = intacts[0].mean()
            curve[:, 1] = np.take_along_axis(alone[0].mean(-1).reshape(layers, heads), orders, 1)[:, 0]
            if heads > 1:
                places = np.argsort(orders, axis=1)[:, None]  # the first 2, 3, ... heads are ablated together
                growing = list(torch.from_numpy((places >= np.arange(2, heads + 1)[:, None]).astype(np.float32)))
                together = _answers(source, kept, growing, metrics[:1], replacing, memory, "together")[1]
                curve[:, 2:] = together.mean(-1).reshape(layers, heads - 1)
    found: dict[Metric, HeadAblation] = {}
    for metric, intact, harms in zip(metrics, intacts, effects, strict=True):
        low, high = bootstrap_means(harms.reshape(layers * heads, -1).T, samples=bootstrap)
        found[metric] = HeadAblation(
            harms.mean(-1),
            low.reshape(layers, heads),
            high.reshape(layers, heads),
            float(intact.mean()),
            np.full_like(curve, np.nan) if found else curve,
            intacts.shape[-1],
            chance,
            metric,
            intervention,
            method,
            check,
        )
    return found


def _known(metrics: Sequence[str], *, intervention: str = "zero", method: str = "exact", **others: Any) -> None:
    for metric in metrics:
        choose("metric", metric, get_args(Metric))
    choose("intervention", intervention, get_args(Intervention))
    choose("method", method, get_args(Method))


def _sampled(
    source: Replayable,
    batches: Sequence[Batch],
    sample: Sample,
    metric: Metric,
    replacing: Callable[[int], Replacement],
) -> list[Float[np.ndarray, "_k"]]:
    """The effects of ablating each head of a sample, layer by layer."""
    gains = [(1 - torch.eye(source.num_heads))[heads] for heads in sample]
    (intact,), (alone,) = _answers(source, batches, gains, [metric], replacing, None, "sample")
    return np.split(harm(metric, intact, alone).mean(-1), np.cumsum([len(heads) for heads in sample])[:-1])


def _answers(
    source: Replayable,
    batches: Sequence[Batch],
    gains: Sequence[Float[Tensor, "V H"]],
    metrics: Sequence[Metric],
    replacing: Callable[[int], Replacement],
    memory: Memory | None,
    phase: str,
) -> tuple[Float[np.ndarray, "M n"], Float[np.ndarray, "M LV n"]]:
    """Each metric of each counted example: intact, and for each row of each layer's gains, layer after layer."""

    def answers(index: int) -> Iterator[Tensor]:
        tokens, _, lengths = batches[index]
        instead = replacing(index)
        states = list(source.states(tokens, lengths))
        yield source.replay(states[-1], torch.ones(1, source.num_heads))
        for layer, state in enumerate(states):
            yield source.replay(state, gains[layer], [instead[layer]] if isinstance(instead, list) else instead)

    return examples_answers(metrics, batches, answers, memory, phase)


def rank_correlation(exact: HeadAblation, attributed: HeadAblation, *, samples: int = 1000, seed: int = 0) -> Estimate:
    """Spearman correlation of two ablations' drops over all heads, with a bootstrap interval over the heads.

    Heads are resampled with replacement across layers. The correlation is nan if all drops of one ablation are equal;
    such resamples are left out of the interval. The metrics may differ, the interventions may not.

    Arguments
        exact, attributed  two ablations of one model
        samples            number of resamples
        seed               seed of the resampling
    """
    if exact.drops.shape != attributed.drops.shape:
        raise invalid("attributed", f"have the heads of exact, {list(exact.drops.shape)}", list(attributed.drops.shape))
    if exact.intervention != attributed.intervention:
        raise invalid("attributed", f"have the intervention of exact, {exact.intervention!r}", attributed.intervention)
    both = np.stack((exact.drops.ravel(), attributed.drops.ravel()))
    count = both.shape[1]
    rng = np.random.Generator(np.random.Philox(seed))
    drawn = spearman(both[:, rng.integers(count, size=(samples, count))])
    known = drawn[~np.isnan(drawn)]
    low, high = np.quantile(known, TAILS) if len(known) else (np.nan, np.nan)
    return Estimate(float(spearman(both)), float(low), float(high), count)
