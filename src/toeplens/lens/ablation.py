"""Head ablation: the effect of single heads, exact or first-order, of sets of heads, and the deposit of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from toeplens.lens.kit.intervals import bootstrap_means, spearman
from toeplens.lens.kit.interventions import (
    AblationCache,
    Batch,
    Intervention,
    Metric,
    counted_batches,
    example_metrics,
    harm,
    is_counted,
    losses,
    metric_values,
    replacements,
)
from toeplens.lens.kit.trace import Replacement, Source
from toeplens.utils import InputError, choose, invalid
from toeplens.utils.records import Dims, FloatOrNaN, ItemType, NonNegativeInt, PositiveInt, Record, Share
from toeplens.utils.renamed import renamed

# ---- first-order estimates, checked by exact ablation of a sample of the heads ---------------------------------------

# A rank correlation of 0.9 on 32 heads puts that of all heads above 0.78 (95 %). Some trained models reached only 0.6
# or 0.0; there the most important heads can get estimates near zero.
RANK_THRESHOLD = 0.9
SAMPLE_SIZE = 32
MIN_HEADS = 4  # with fewer heads, chance produces a perfect order more often than once in 20
SLOPE_RANGE = (0.5, 2.0)  # slopes between which an estimate has about the right size

UNCHECKED_NOTE = "These estimates were not checked by exact ablation, so they must not be read as effects."

HeadSample = list[Int[np.ndarray, "_k"]]
# layers may have different numbers of heads
HeadValues = Float[np.ndarray, "_L _H"] | Sequence[Float[np.ndarray, "_H"]]


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

    LABEL = "check"

    layers: Annotated[tuple[NonNegativeInt, ...], Dims("n")]
    heads: Annotated[tuple[NonNegativeInt, ...], Dims("n")]
    estimates: Annotated[tuple[float, ...], Dims("n")]
    exact: Annotated[tuple[float, ...], Dims("n")]
    of: NonNegativeInt
    rank_correlation: FloatOrNaN
    slope: FloatOrNaN

    @property
    def is_reliable(self) -> bool:
        """Whether at least the order of the estimates can be trusted: it reaches `RANK_THRESHOLD`."""
        return len(self.heads) >= MIN_HEADS and self.rank_correlation >= RANK_THRESHOLD

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        numbers = self.rank_correlation, self.slope
        rank, slope = ("not defined" if np.isnan(value) else f"{value:.2f}" for value in numbers)
        text = (
            f"{len(self.heads)} of {self.of} heads were also ablated exactly: rank correlation {rank}, "
            f"exact effects {slope} times the estimates"
        )
        if len(self.heads) < MIN_HEADS:
            return f"{text}; fewer than {MIN_HEADS} heads cannot confirm the estimates; do not read them as effects."
        if not self.is_reliable:
            return f"{text}; the rank correlation is below {RANK_THRESHOLD:g}, so do not read the estimates as effects."
        if not SLOPE_RANGE[0] <= self.slope <= SLOPE_RANGE[1]:
            return f"{text}; the order of the estimates is right, their size is not."
        return f"{text}; the estimates are confirmed."


def sample_heads(estimates: HeadValues, count: int = SAMPLE_SIZE) -> HeadSample:
    """Choose at least ``count`` heads on which estimates are checked, equally many from each layer, by layer.

    With k of a layer's H heads, these are the ranks (i + phase) H / k of its estimates [H]. The phase advances by the
    golden ratio from layer to layer, so that few heads per layer cover the whole range, and no layer's largest is
    favoured. Heads with nan are never drawn.
    """
    k = -(-count // max(len(estimates), 1))
    sample = []
    for layer, values in enumerate(estimates):
        order = np.argsort(values, kind="stable")[: int((~np.isnan(values)).sum())]
        size = min(k, len(order))
        phase = (layer + 0.5) * ((5**0.5 - 1) / 2) % 1
        ranks = ((np.arange(size) + phase) * (len(order) / max(size, 1))).astype(int)
        sample.append(np.sort(order[ranks]))
    return sample


def check_estimates(
    estimates: HeadValues, exact: Sequence[Float[np.ndarray, "_k"]], sample: HeadSample | None = None
) -> EstimateCheck:
    """Compare each layer's estimates [H] with the exact effects [k] of a sample of heads (default: `sample_heads`)."""
    sample = sample_heads(estimates) if sample is None else sample
    sizes = list(map(len, sample))
    if list(map(len, exact)) != sizes:
        raise invalid("exact", f"have the lengths of the sample, {sizes}", list(map(len, exact)))
    layers = np.repeat(np.arange(len(sample)), sizes)
    x = np.concatenate([values[heads] for values, heads in zip(estimates, sample, strict=True)])
    y = np.concatenate([np.asarray(effects, dtype=float) for effects in exact])
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


def first_order(
    source: Source, batches: Sequence[Batch], metric: Metric, replacement_of: Callable[[int], Replacement]
) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "L H n"]]:
    """The loss of each counted example, and the first-order estimate of its rise without each head.

    The loss is expanded at a head's gain of 1: loss(0) - loss(1) = -dloss/dgain + ..., the sum over positions of
    (z - replacement) . dloss/dz (attribution patching). Each example has its own gains, so one backward pass gives this
    for all heads and examples. Where the loss is flat or heads have large effects, the slope says little.
    """
    if metric != "loss":
        reasons = {
            "accuracy": "accuracy has no derivative",
            "kl": "the divergence from the intact model has zero gradient there, so its first-order term is 0",
        }
        raise invalid("metric", f"be 'loss' for attribution ({reasons[metric]})", metric)
    if not hasattr(source, "scale_heads"):
        raise InputError(f"method must not be 'attribution' for {type(source).__name__}, which has no gradients.")
    intact_losses, slopes = [], []
    for index, (tokens, labels, lengths) in enumerate(batches):
        shape = (source.num_layers, len(tokens), source.num_heads)
        gains = torch.ones(shape, dtype=torch.float64, device=tokens.device, requires_grad=True)
        with torch.enable_grad():
            logits = source.scale_heads(tokens, lengths, gains, replacement_of(index))
            loss = losses(logits.double(), labels)
            (slope,) = torch.autograd.grad(loss.sum(), gains)
        counted = is_counted(labels)
        intact_losses.append(loss.detach()[counted].cpu())
        slopes.append(slope[:, counted].transpose(1, 2).cpu())
    intact, rises = torch.cat(intact_losses).numpy(), -torch.cat(slopes, dim=2).numpy()
    if not (np.isfinite(intact).all() and np.isfinite(rises).all()):
        raise InputError("source must have a finite loss and gradient for attribution.")
    return intact, rises


# ---- single heads ----------------------------------------------------------------------------------------------------

Method = Literal["exact", "attribution"]


@dataclass(frozen=True)
class HeadAblation(Record):
    """The effect of ablating heads.

    drops         [layers, heads] ablation effect, positive for harm: the fall in accuracy, the rise in loss or kl
    low, high     [layers, heads] paired bootstrap interval of the drops over the examples, not corrected for the number
                  of heads: among many heads some intervals miss 0 by chance. [0, 0] for a head without an effect on any
                  example, however few there are. nan without resamples
    baseline      the intact model's metric
    cumulative    [layers, heads + 1] metric with 0, 1, 2, ... heads of a layer ablated together, most important first;
                  nan where not run
    examples      number of examples counted
    chance        chance accuracy, as passed in
    metric        ``accuracy`` (a share), ``loss`` (nats) or ``kl`` (nats)
    check         of an attribution against exact drops of a sample of the heads; None in old records without it, whose
                  estimates must not be read as effects
    """

    LABEL = "ablation"
    ADDED_LATER = ("method", "check")

    drops: Annotated[Float[np.ndarray, "L H"], Field(min_length=1)]
    low: Float[np.ndarray, "L H"]
    high: Float[np.ndarray, "L H"]
    baseline: float
    cumulative: Float[np.ndarray, "L H+1"]
    examples: PositiveInt
    chance: Share
    metric: Metric = "accuracy"
    intervention: Intervention = "zero"
    method: Method = "exact"
    check: EstimateCheck | None = None

    def verify(self) -> None:
        for name, minimum in (("drops", -1), ("low", -1), ("high", -1), ("cumulative", 0)):
            numbers = getattr(self, name)
            if self.metric == "accuracy" and ((numbers < minimum) | (numbers > 1)).any():
                raise ValueError(f"{name} must be from {minimum} to 1 for accuracies.")
        if self.metric == "accuracy" and not 0 <= self.baseline <= 1:
            raise invalid("baseline", "be from 0 to 1 for accuracies", self.baseline)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON; None for NaN. ``check`` is left out if there is none."""
        return {name: value for name, value in super().to_dict().items() if name != "check" or value is not None}


@renamed
def ablate_heads(
    source: Source, batches: Iterable[Batch], *, metric: Metric = "accuracy", **options: Any
) -> HeadAblation:
    """Ablate each head of each layer and measure the effect on the model (arXiv 2505.13027, section 5.1).

    The head's output z, in the input of the output projection, is replaced at every position, padding included. The
    layers before the head's layer run once and are shared by all its heads, which are replayed together as one batch.

    Arguments
        source        a model that can replay from a layer (`toeplens.backends`)
        batches       (tokens [b, N], labels [b] or, where the model answers at every token, [b, N], lengths [b] or
                      None); negative labels are ignored, and an example with several labels counts as their mean
        chance        chance accuracy, kept for `deposit` (default: 0)
        metric        ``accuracy``, ``loss`` (cross-entropy) or ``kl``: KL(intact || ablated) of the output distribution
        intervention  the replacement: ``zero``; ``mean``, the head's mean at that position over the counted examples
                      with a token there (0 if there are none; needs a second pass over the data); ``resample``, its
                      output at that position in another counted example, of the same length if there is one; or
                      ``position``, its own output on the same input with the encoding switched off in that head only:
                      no rotation, no bias, nothing after the softmax, but what was added at the input remains
        method        ``exact``; or ``attribution``, the first-order estimate from one backward pass, for the loss only,
                      without cumulative ablation; needs a source with `scale_heads`. A sample of the heads is also
                      ablated exactly, and the result's ``check`` says whether the estimates can be read as effects
        cumulative    also ablate each layer's heads together, in order of importance (default: True)
        bootstrap     resamples for the intervals, 0 for none (default: 1,000)
        seed          seed of the examples drawn by ``resample``
        cache         stores each batch's results, so that an interrupted exact ablation can be resumed

    Raises `InputError` for an unknown choice, if no example counts, for attribution with a metric other than the loss,
    and if ``resample`` has only one example or sequences of several widths.
    """
    return ablate_heads_by_metric((metric,), source, batches, **options)[metric]


def ablate_heads_by_metric(
    metrics: Sequence[Metric],
    source: Source,
    batches: Iterable[Batch],
    *,
    chance: float = 0.0,
    intervention: Intervention = "zero",
    method: Method = "exact",
    cumulative: bool = True,
    bootstrap: int = 1000,
    seed: int = 0,
    cache: AblationCache | None = None,
) -> dict[Metric, HeadAblation]:
    """`ablate_heads` for several metrics from the same passes; only the first gets a cumulative curve, in its order."""
    for metric in metrics:
        choose("metric", metric, get_args(Metric))
    choose("intervention", intervention, get_args(Intervention))
    choose("method", method, get_args(Method))
    batch_list = counted_batches(batches)
    layers, heads = source.num_layers, source.num_heads
    replacement_of = replacements(source, batch_list, intervention, seed)

    def evaluate(gains: Sequence[Tensor], subset: Sequence[Metric], cache: AblationCache | None, phase: str) -> Any:
        """Each metric of each counted example: intact [M, n], and for each row of each layer's gains [M, LV, n]."""

        def logits_of(index: int) -> Iterator[Tensor]:
            replacement = replacement_of(index)
            states = list(source.states(batch_list[index][0], batch_list[index][2]))
            yield source.replay(states[-1], torch.ones(1, heads))
            for layer, state in enumerate(states):
                outputs = [replacement[layer]] if isinstance(replacement, list) else replacement
                yield source.replay(state, gains[layer], outputs)

        return example_metrics(subset, batch_list, logits_of, cache, phase)

    single = 1 - torch.eye(heads)
    curve = np.full((layers, heads + 1), np.nan)
    check = None
    if method == "attribution":
        if len(metrics) > 1:
            raise invalid("metrics", "be only the loss for an attribution", got=f"{len(metrics)} metrics")
        intact, harms = first_order(source, batch_list, metrics[0], replacement_of)
        sample = sample_heads(harms.mean(-1))
        (intact_value,), (ablated,) = evaluate([single[subset] for subset in sample], metrics, None, "sample")
        exact = harm(metrics[0], intact_value, ablated).mean(-1)
        check = check_estimates(harms.mean(-1), np.split(exact, np.cumsum(list(map(len, sample)))[:-1]), sample)
        intacts, effects = intact[None], [harms]
    else:
        intacts, ablated = evaluate([single] * layers, metrics, cache, "single")
        effects = [harm(*values).reshape(layers, heads, -1) for values in zip(metrics, intacts, ablated, strict=True)]
        if cumulative:
            orders = np.argsort(-effects[0].mean(-1), axis=1, kind="stable")
            curve[:, 0] = intacts[0].mean()
            curve[:, 1] = np.take_along_axis(ablated[0].mean(-1).reshape(layers, heads), orders, 1)[:, 0]
            if heads > 1:
                ranks = np.argsort(orders, axis=1)[:, None]  # the first 2, 3, ... heads are ablated together
                curve_gains = list(torch.from_numpy((ranks >= np.arange(2, heads + 1)[:, None]).astype(np.float32)))
                curve_values = evaluate(curve_gains, metrics[:1], cache, "together")[1]
                curve[:, 2:] = curve_values.mean(-1).reshape(layers, heads - 1)
    results: dict[Metric, HeadAblation] = {}
    for metric, intact, harms in zip(metrics, intacts, effects, strict=True):
        intervals = bootstrap_means(harms.reshape(layers * heads, -1).T, samples=bootstrap)
        low, high = (x.reshape(layers, heads) for x in intervals)
        metric_curve, examples = np.full_like(curve, np.nan) if results else curve, intacts.shape[-1]
        numbers = harms.mean(-1), low, high, float(intact.mean()), metric_curve, examples, chance
        results[metric] = HeadAblation(*numbers, metric, intervention, method, check)
    return results


# ---- sets of heads ---------------------------------------------------------------------------------------------------

AblationOrder = Literal["greedy", "importance", "random"]
RANDOM_ORDERS = 3
CURVE_POINTS = 12  # points per curve: each step ablates this fraction of all heads, at least one
SCORING_EXAMPLES = 64  # number of examples that choose which head is tried next; all examples decide the rest
ROUNDOFF = 1e-9


@dataclass(frozen=True)
class HeadSets(Record):
    """Which heads carry a model's skill together (`CumulativeAblation`, `SufficientSet`).

    greedy      [L H + 1] accuracy with 0, 1, 2, ... heads ablated, the most harmful next; nan where not run
    importance  [L H + 1] the same in the order of the drops of single heads
    random      [R, L H + 1] the same in R random orders
    order       the greedy order, as [layer, head] from 0
    sufficient  a set of heads that keeps the share ``keep`` of accuracy - chance when all others are ablated
    kept        accuracy with only these heads, on the examples that chose them; on others it may be lower
    """

    LABEL = "head sets"

    baseline: Share
    chance: Share
    examples: PositiveInt
    greedy: Annotated[Float[np.ndarray, "M+1"], ItemType(Share)]
    importance: Annotated[Float[np.ndarray, "M+1"], ItemType(Share)]
    random: Annotated[Float[np.ndarray, "R M+1"], ItemType(Share), Field(min_length=1)]
    order: Annotated[list[list[NonNegativeInt]], Dims("M 2"), Field(min_length=1)]
    sufficient: Annotated[list[list[NonNegativeInt]], Dims("S 2")]
    keep: Share
    kept: Share

    def verify(self) -> None:
        order, sufficient = ([tuple(head) for head in heads] for heads in (self.order, self.sufficient))
        if len(set(order)) < len(order) or len(set(sufficient)) < len(sufficient) or not set(sufficient) <= set(order):
            raise ValueError("order must contain each head of the model once.")


@dataclass(frozen=True)
class CumulativeAblation:
    """A metric against the number of heads ablated in the whole model.

    curves    [R, L H + 1] the metric with 0, 1, 2, ... heads ablated, R > 1 only for random orders; nan where not run
    orders    [R, L H, 2] the order of ablation, as (layer, head) from 0
    baseline  the intact model's metric
    """

    curves: Float[np.ndarray, "R LH1"]
    orders: Int[np.ndarray, "R LH 2"]
    baseline: float
    examples: int
    metric: str


@dataclass(frozen=True)
class SufficientSet:
    """A small set of heads that keeps a share of the skill when all others are ablated.

    heads            [S, 2] as (layer, head) from 0; none can be left out, so S is an upper bound on the smallest size
    accuracy         with only these heads
    target_accuracy  the accuracy to keep: chance + keep * (baseline - chance)
    baseline         the intact model's accuracy
    """

    heads: Int[np.ndarray, "S 2"]
    accuracy: float
    target_accuracy: float
    baseline: float
    examples: int


def head_sets(
    source: Source,
    batches: Iterable[Batch],
    *,
    chance: float = 0.0,
    keep: float = 0.9,
    intervention: Intervention = "zero",
    seed: int = 0,
) -> HeadSets:
    """Cumulative ablation in all three orders and a sufficient set; see `cumulative_ablation` and `sufficient_set`."""
    batch_list = counted_batches(batches)
    greedy, importance, random = (
        cumulative_ablation(source, batch_list, order=order, intervention=intervention, seed=seed)
        for order in get_args(AblationOrder)
    )
    result = sufficient_set(source, batch_list, chance=chance, keep=keep, intervention=intervention, seed=seed)
    return HeadSets(
        baseline=result.baseline,
        chance=chance,
        examples=result.examples,
        greedy=greedy.curves[0],
        importance=importance.curves[0],
        random=random.curves,
        order=greedy.orders[0].tolist(),
        sufficient=result.heads.tolist(),
        keep=keep,
        kept=result.accuracy,
    )


def cumulative_ablation(
    source: Source,
    batches: Iterable[Batch],
    *,
    order: AblationOrder = "greedy",
    metric: Metric = "accuracy",
    intervention: Intervention = "zero",
    seed: int = 0,
) -> CumulativeAblation:
    """Ablate heads cumulatively in the whole model, a twelfth of all at a time (at least one), until none is left.

    Arguments as in `ablate_heads`, and
        order         ``importance``: by the drops of single heads (L H passes to find the order); ``random``: three
                      random orders (no passes); ``greedy``: the most harmful next, with all remaining heads tried again
                      at every step (about (L H)^2 / (2 step) passes over the first `SCORING_EXAMPLES`). Ties are broken
                      by the loss
        seed          seed of the random orders and of ``resample``
    """
    choose("order", order, get_args(AblationOrder))
    choose("metric", metric, get_args(Metric))
    trials = _AblationTrials(source, batches, metric, intervention, seed)
    all_heads = np.ones(trials.shape, bool)
    count = all_heads.size
    if order == "random":
        rng = np.random.Generator(np.random.Philox(seed))
        orders = np.stack([rng.permutation(np.argwhere(all_heads)) for _ in range(RANDOM_ORDERS)])
    elif order == "importance":
        orders = trials.heads_by_harm(all_heads, None)[None]
    else:
        remaining, removed = all_heads, []
        while remaining.any():
            removed.append(trials.heads_by_harm(remaining, SCORING_EXAMPLES)[: trials.step])
            (remaining,) = _remove_heads(remaining, removed[-1:])
        orders = np.concatenate(removed)[None]
    sizes = [*range(0, count, trials.step), count]
    masks = np.concatenate([_remove_heads(all_heads, [heads[:size] for size in sizes]) for heads in orders])
    curves = np.full((len(orders), count + 1), np.nan)
    curves[:, sizes] = trials(masks, (trials.metric,))[0].reshape(len(orders), -1)
    return CumulativeAblation(curves, orders, float(curves[0, 0]), trials.examples, trials.metric)


def sufficient_set(
    source: Source,
    batches: Iterable[Batch],
    *,
    chance: float = 0.0,
    keep: float = 0.9,
    intervention: Intervention = "zero",
    seed: int = 0,
) -> SufficientSet:
    """A small set of heads that keeps the share ``keep`` of the skill, accuracy - chance, when all others are ablated.

    Backward elimination: each round tries all remaining heads one by one on the first `SCORING_EXAMPLES`. It then
    ablates the least harmful ones for good, up to a twelfth of all heads at once, as long as the accuracy on all
    examples suffices. If that fails, the next round tries heads on all examples. It ends when, on all examples, no
    single head can be left out. The smallest possible set may be smaller.

    Arguments as in `ablate_heads`; ``keep`` is above 0 and at most 1.
    """
    if not 0 < keep <= 1:
        raise invalid("keep", "be over 0 and at most 1", keep)
    trials = _AblationTrials(source, batches, "accuracy", intervention, seed)
    remaining = np.ones(trials.shape, bool)
    accuracy = baseline = float(trials(remaining[None], ("accuracy",))[0, 0])
    target_accuracy = chance + keep * (baseline - chance)
    max_examples: int | None = SCORING_EXAMPLES
    while remaining.any():
        candidates = trials.heads_by_harm(remaining, max_examples)[::-1]
        sizes = {min(size, len(candidates)) for size in (*(2**k for k in range(trials.step.bit_length())), trials.step)}
        smaller = _remove_heads(remaining, [candidates[:size] for size in sorted(sizes)])
        accuracies = trials(smaller, ("accuracy",))[0]
        passing = np.flatnonzero(accuracies >= target_accuracy - ROUNDOFF)
        if len(passing):
            remaining, accuracy, max_examples = smaller[passing[-1]], float(accuracies[passing[-1]]), SCORING_EXAMPLES
        elif max_examples is None:  # by all examples, not even the least harmful head can be left out
            break
        else:
            max_examples = None
    return SufficientSet(np.argwhere(remaining), accuracy, target_accuracy, baseline, trials.examples)


class _AblationTrials:
    """Evaluate a model on one data set with sets of heads ablated."""

    def __init__(
        self, source: Source, batches: Iterable[Batch], metric: Metric, intervention: Intervention, seed: int
    ) -> None:
        choose("intervention", intervention, get_args(Intervention))
        self.source = source
        self.metric: Metric = metric
        self.batches = counted_batches(batches)
        self.replacement_of = replacements(source, self.batches, intervention, seed)
        self.examples = int(sum(is_counted(labels).sum() for _, labels, _ in self.batches))
        self.shape = source.num_layers, source.num_heads
        self.step = max(1, source.num_layers * source.num_heads // CURVE_POINTS)

    def __call__(
        self, masks: Bool[np.ndarray, "V L H"], metrics: tuple[Metric, ...], max_examples: int | None = None
    ) -> Float[np.ndarray, "metrics V"]:
        """The metrics with only the heads of each mask intact, over the first ``max_examples`` counted examples."""
        gains = torch.from_numpy(np.concatenate((np.ones((1, *self.shape), bool), masks)).astype(np.float32))
        sums = np.zeros((len(metrics), len(masks)))
        remaining = total = min(max_examples or self.examples, self.examples)
        for index, (tokens, labels, lengths) in enumerate(self.batches):
            rows = int(torch.searchsorted(is_counted(labels).cumsum(0), remaining)) + 1
            tokens, labels = tokens[:rows], labels[:rows]
            replacement = self.replacement_of(index)
            if isinstance(replacement, list):
                replacement = [outputs if len(outputs) == 1 else outputs[:rows] for outputs in replacement]
            first_state = next(iter(self.source.states(tokens, None if lengths is None else lengths[:rows])))
            logits = self.source.replay(first_state, gains, replacement)
            for metric_index, metric in enumerate(metrics):
                sums[metric_index] += metric_values(metric, logits[1:], logits[0], labels).double().sum(1).cpu().numpy()
            remaining -= int(is_counted(labels).sum())
            if remaining == 0:
                break
        return sums / total

    def heads_by_harm(self, mask: Bool[np.ndarray, "L H"], max_examples: int | None) -> Int[np.ndarray, "S 2"]:
        """The heads in ``mask``, most harmful to ablate first; ties are broken by the loss."""
        heads = np.argwhere(mask)
        values, ties = self(_remove_heads(mask, heads[:, None]), (self.metric, "loss"), max_examples)
        return heads[np.lexsort((-ties, -harm(self.metric, np.zeros_like(values), values)))]


def _remove_heads(
    mask: Bool[np.ndarray, "L H"], removed: Sequence[Int[np.ndarray, "_ 2"]] | Int[np.ndarray, "V _ 2"]
) -> Bool[np.ndarray, "V L H"]:
    """``mask`` without each of several sets of heads."""
    rows = np.repeat(mask[None], len(removed), axis=0)
    for row, heads in zip(rows, removed, strict=True):
        row[heads[:, 0], heads[:, 1]] = False
    return rows


# ---- the deposit: is a layer's skill carried by one head, by a few, by many together, or by none in particular? ------

DepositKind = Literal["single-head", "few-head", "distributed", "redundant", "no-skill"]
PEAK_SHARE = 0.5
SECOND_RATIO = 0.5
LOST_SHARE = 0.5
MIN_SKILL = 0.05
# what the kinds of layers mean, in words
THRESHOLDS = (
    f"single-head: the largest drop is at least {PEAK_SHARE:g} of the skill (accuracy above the baseline), the second "
    f"largest at most {SECOND_RATIO:g} of the largest; few-head: ablating the most important heads, up to max(2, a "
    f"quarter) of them, removes at least {LOST_SHARE:g} of the skill; distributed: more heads are needed for that; "
    f"redundant: no number of heads removes that; no-skill: accuracy is less than {MIN_SKILL:g} above the baseline"
)


@dataclass(frozen=True)
class LayerDeposit:
    """The deposit of one layer, from the counted drops d_h of its heads.

    peak             max d_h / (accuracy - guess): the share of the skill that one head carries
    head             index of that head
    second           the second largest d_h / (accuracy - guess)
    top_share        max d_h / sum d_h
    effective_heads  (sum d_h)^2 / sum d_h^2
    gini             Gini coefficient of d_h
    lead             peak - second
    half_at          number of heads to ablate, most important first, until half of the skill is lost; None if never
    kind             see `THRESHOLDS`
    """

    peak: float
    head: int
    second: float
    top_share: float
    effective_heads: float
    gini: float
    lead: float
    half_at: int | None
    kind: DepositKind


def significant_drops(ablation: HeadAblation) -> Float[np.ndarray, "L H"]:
    """The ablation effect of each head; 0 if not significant, that is, if its interval does not lie above 0.

    Without intervals every positive drop counts.
    """
    significant = np.isnan(ablation.low) | (ablation.low > 0)
    return np.where(significant, np.clip(ablation.drops, 0, None), 0.0)


def deposit(ablation: HeadAblation, guess: float | None = None) -> list[LayerDeposit]:
    """The deposit of each layer, from an ablation by accuracy with its cumulative part (else raises `InputError`).

    ``guess`` is the chance accuracy (default: the ablation's own ``chance``).
    """
    if ablation.metric != "accuracy":
        raise invalid("ablation", "have the metric 'accuracy' for a deposit", ablation.metric)
    if np.isnan(ablation.cumulative).any():
        raise InputError("ablation must include the cumulative part for a deposit.")
    chance = ablation.chance if guess is None else guess
    skill = ablation.baseline - chance
    deposits = []
    for clipped, curve in zip(significant_drops(ablation), ablation.cumulative, strict=True):
        order = np.argsort(-clipped, kind="stable")
        total = float(clipped.sum())
        share = clipped / skill if skill > 0 else np.zeros_like(clipped)
        peak = float(share[order[0]])
        second = float(share[order[1]]) if len(order) > 1 else 0.0
        lost = np.flatnonzero(curve[0] - curve >= LOST_SHARE * skill) if skill > 0 else np.empty(0, int)
        half_at = int(lost[0]) if len(lost) else None
        kind: DepositKind = "distributed"
        if skill < MIN_SKILL:
            kind = "no-skill"
        elif peak >= PEAK_SHARE and second <= SECOND_RATIO * peak:
            kind = "single-head"
        elif half_at is None:
            kind = "redundant"
        elif half_at <= max(2, len(clipped) // 4):
            kind = "few-head"
        layer = LayerDeposit(
            peak=peak,
            head=int(order[0]),
            second=second,
            top_share=float(clipped.max() / total) if total > 0 else 0.0,
            effective_heads=float(total**2 / (clipped**2).sum()) if total > 0 else 0.0,
            gini=gini(clipped),
            lead=peak - second,
            half_at=half_at,
            kind=kind,
        )
        deposits.append(layer)
    return deposits


def gini(values: Float[np.ndarray, "H"]) -> float:
    """Gini coefficient of non-negative values: 0 if all are equal, 1 - 1/H if one has everything; 0 if all are 0."""
    ordered, count = np.sort(values), len(values)
    total = ordered.sum()
    return float((2 * np.arange(1, count + 1) - count - 1) @ ordered / (count * total)) if total > 0 else 0.0
