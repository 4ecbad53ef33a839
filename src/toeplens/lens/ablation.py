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

from toeplens.ground import InputError, choose, invalid
from toeplens.ground.records import AtLeast1, Count, Dims, Each, MaybeNaN, Record, Share
from toeplens.lens.kit.intervals import bootstrap_means, spearman
from toeplens.lens.kit.interventions import (
    Batch,
    Intervention,
    Memory,
    Metric,
    counted_batches,
    counts,
    examples_answers,
    harm,
    losses,
    outcomes,
    replacements,
)
from toeplens.lens.kit.trace import Replacement, Source

# ---- first-order estimates, checked by exact ablation of a sample of the heads ---------------------------------------

# A rank correlation of 0.9 on 32 heads puts that of all heads above 0.78 (95 %). Some trained models reached only 0.6
# or 0.0; there the most important heads can get estimates near zero.
BAR = 0.9
SAMPLE = 32
FEWEST = 4  # with fewer heads, chance produces a perfect order more often than once in 20
SIZES = (0.5, 2.0)  # slopes between which an estimate has about the right size

UNCHECKED = "These estimates were not checked by exact ablation, so they must not be read as effects."

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
        rank, slope = (
            "not defined" if np.isnan(value) else f"{value:.2f}" for value in (self.rank_correlation, self.slope)
        )
        found = (
            f"{len(self.heads)} of {self.of} heads were also ablated exactly: rank correlation {rank}, "
            f"exact effects {slope} times the estimates"
        )
        if len(self.heads) < FEWEST:
            return f"{found}; fewer than {FEWEST} heads cannot confirm the estimates; do not read them as effects."
        if not self.holds:
            return f"{found}; the rank correlation is below {BAR:g}, so do not read the estimates as effects."
        if not SIZES[0] <= self.slope <= SIZES[1]:
            return f"{found}; the order of the estimates is right, their size is not."
        return f"{found}; the estimates are confirmed."


def sample_heads(estimates: Layered, count: int = SAMPLE) -> Sample:
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
    estimates: Layered, exact: Sequence[Float[np.ndarray, "_k"]], sample: Sample | None = None
) -> EstimateCheck:
    """Compare each layer's estimates [H] with the exact effects [k] of a sample of heads (default: `sample_heads`)."""
    sample = sample_heads(estimates) if sample is None else sample
    sizes = list(map(len, sample))
    if list(map(len, exact)) != sizes:
        raise invalid("exact", f"have the lengths of the sample, {sizes}", list(map(len, exact)))
    layers = np.repeat(np.arange(len(sample)), sizes)
    x = np.concatenate([values[heads] for values, heads in zip(estimates, sample, strict=True)])
    y = np.concatenate([np.asarray(each, dtype=float) for each in exact])
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
    source: Source, batches: Sequence[Batch], metric: Metric, replacing: Callable[[int], Replacement]
) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "L H n"]]:
    """The loss of each counted example, and the first-order estimate of its rise without each head.

    The loss is expanded at a head's gain of 1: loss(0) - loss(1) = -dloss/dgain + ..., the sum over positions of
    (z - replacement) . dloss/dz (attribution patching). Each example has its own gains, so one backward pass gives this
    for all heads and examples. Where the loss is flat or heads have large effects, the slope says little.
    """
    if metric != "loss":
        why = {
            "accuracy": "accuracy has no derivative",
            "kl": "the divergence from the intact model has zero gradient there, so its first-order term is 0",
        }
        raise invalid("metric", f"be 'loss' for attribution ({why[metric]})", metric)
    if not hasattr(source, "scaled"):
        raise InputError(f"method must not be 'attribution' for {type(source).__name__}, which has no gradients.")
    found, slopes = [], []
    for index, (tokens, labels, lengths) in enumerate(batches):
        shape = (source.num_layers, len(tokens), source.num_heads)
        gains = torch.ones(shape, dtype=torch.float64, device=tokens.device, requires_grad=True)
        with torch.enable_grad():
            logits = source.scaled(tokens, lengths, gains, replacing(index))
            loss = losses(logits.double(), labels)
            (slope,) = torch.autograd.grad(loss.sum(), gains)
        counted = counts(labels)
        found.append(loss.detach()[counted].cpu())
        slopes.append(slope[:, counted].transpose(1, 2).cpu())
    intact, rises = torch.cat(found).numpy(), -torch.cat(slopes, dim=2).numpy()
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
        return {name: value for name, value in super().to_dict().items() if name != "check" or value is not None}


def ablate_heads(
    source: Source, batches: Iterable[Batch], *, metric: Metric = "accuracy", **choices: Any
) -> HeadAblation:
    """Ablate each head of each layer and measure the effect on the model (arXiv 2505.13027, section 5.1).

    The head's output z, in the input of the output projection, is replaced at every position, padding included. The
    layers before the head's layer run once and are shared by all its heads, which are replayed together as one batch.

    Arguments
        source        a model that can replay from a layer (`toeplens.sources`)
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
                      without cumulative ablation; needs a source with `scaled`. A sample of the heads is also ablated
                      exactly, and the result's ``check`` says whether the estimates can be read as effects
        cumulative    also ablate each layer's heads together, in order of importance (default: True)
        bootstrap     resamples for the intervals, 0 for none (default: 1,000)
        seed          seed of the examples drawn by ``resample``
        memory        stores each batch's results, so that an interrupted exact ablation can be resumed

    Raises `InputError` for an unknown choice, if no example counts, for attribution with a metric other than the loss,
    and if ``resample`` has only one example or sequences of several widths.
    """
    return ablate_by((metric,), source, batches, **choices)[metric]


def ablate_by(
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
    memory: Memory | None = None,
) -> dict[Metric, HeadAblation]:
    """`ablate_heads` for several metrics from the same passes; only the first gets a cumulative curve, in its order."""
    for metric in metrics:
        choose("metric", metric, get_args(Metric))
    choose("intervention", intervention, get_args(Intervention))
    choose("method", method, get_args(Method))
    kept = counted_batches(batches)
    layers, heads = source.num_layers, source.num_heads
    replacing = replacements(source, kept, intervention, seed)

    def answers(gains: Sequence[Tensor], some: Sequence[Metric], memory: Memory | None, phase: str) -> Any:
        """Each metric of each counted example: intact [M, n], and for each row of each layer's gains [M, LV, n]."""

        def logits_of(index: int) -> Iterator[Tensor]:
            instead = replacing(index)
            states = list(source.states(kept[index][0], kept[index][2]))
            yield source.replay(states[-1], torch.ones(1, heads))
            for layer, state in enumerate(states):
                yield source.replay(state, gains[layer], [instead[layer]] if isinstance(instead, list) else instead)

        return examples_answers(some, kept, logits_of, memory, phase)

    single = 1 - torch.eye(heads)
    curve = np.full((layers, heads + 1), np.nan)
    check = None
    if method == "attribution":
        if len(metrics) > 1:
            raise invalid("metrics", "be only the loss for an attribution", got=f"{len(metrics)} metrics")
        intact, harms = first_order(source, kept, metrics[0], replacing)
        sample = sample_heads(harms.mean(-1))
        (before,), (alone,) = answers([single[some] for some in sample], metrics, None, "sample")
        exact = harm(metrics[0], before, alone).mean(-1)
        check = check_estimates(harms.mean(-1), np.split(exact, np.cumsum(list(map(len, sample)))[:-1]), sample)
        intacts, effects = intact[None], [harms]
    else:
        intacts, alone = answers([single] * layers, metrics, memory, "single")
        effects = [harm(*each).reshape(layers, heads, -1) for each in zip(metrics, intacts, alone, strict=True)]
        if cumulative:
            orders = np.argsort(-effects[0].mean(-1), axis=1, kind="stable")
            curve[:, 0] = intacts[0].mean()
            curve[:, 1] = np.take_along_axis(alone[0].mean(-1).reshape(layers, heads), orders, 1)[:, 0]
            if heads > 1:
                places = np.argsort(orders, axis=1)[:, None]  # the first 2, 3, ... heads are ablated together
                growing = list(torch.from_numpy((places >= np.arange(2, heads + 1)[:, None]).astype(np.float32)))
                together = answers(growing, metrics[:1], memory, "together")[1]
                curve[:, 2:] = together.mean(-1).reshape(layers, heads - 1)
    found: dict[Metric, HeadAblation] = {}
    for metric, intact, harms in zip(metrics, intacts, effects, strict=True):
        ends = bootstrap_means(harms.reshape(layers * heads, -1).T, samples=bootstrap)
        low, high = (x.reshape(layers, heads) for x in ends)
        own, examples = np.full_like(curve, np.nan) if found else curve, intacts.shape[-1]
        numbers = harms.mean(-1), low, high, float(intact.mean()), own, examples, chance
        found[metric] = HeadAblation(*numbers, metric, intervention, method, check)
    return found


# ---- sets of heads ---------------------------------------------------------------------------------------------------

Order = Literal["greedy", "importance", "random"]
RANDOM_ORDERS = 3
POINTS = 12  # points per curve: each step ablates this fraction of all heads, at least one
SCORED = 64  # number of examples that choose which head is tried next; all examples decide the rest
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

    WORDS = "head sets"

    baseline: Share
    chance: Share
    examples: AtLeast1
    greedy: Annotated[Float[np.ndarray, "M+1"], Each(Share)]
    importance: Annotated[Float[np.ndarray, "M+1"], Each(Share)]
    random: Annotated[Float[np.ndarray, "R M+1"], Each(Share), Field(min_length=1)]
    order: Annotated[list[list[Count]], Dims("M 2"), Field(min_length=1)]
    sufficient: Annotated[list[list[Count]], Dims("S 2")]
    keep: Share
    kept: Share

    def verify(self) -> None:
        order, few = ([tuple(head) for head in heads] for heads in (self.order, self.sufficient))
        if len(set(order)) < len(order) or len(set(few)) < len(few) or not set(few) <= set(order):
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

    heads     [S, 2] as (layer, head) from 0; none can be left out, so S is an upper bound on the smallest size
    accuracy  with only these heads
    needed    the accuracy to keep: chance + keep * (baseline - chance)
    baseline  the intact model's accuracy
    """

    heads: Int[np.ndarray, "S 2"]
    accuracy: float
    needed: float
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
    kept = counted_batches(batches)
    greedy, importance, random = (
        cumulative_ablation(source, kept, order=order, intervention=intervention, seed=seed)
        for order in get_args(Order)
    )
    found = sufficient_set(source, kept, chance=chance, keep=keep, intervention=intervention, seed=seed)
    return HeadSets(
        baseline=found.baseline,
        chance=chance,
        examples=found.examples,
        greedy=greedy.curves[0],
        importance=importance.curves[0],
        random=random.curves,
        order=greedy.orders[0].tolist(),
        sufficient=found.heads.tolist(),
        keep=keep,
        kept=found.accuracy,
    )


def cumulative_ablation(
    source: Source,
    batches: Iterable[Batch],
    *,
    order: Order = "greedy",
    metric: Metric = "accuracy",
    intervention: Intervention = "zero",
    seed: int = 0,
) -> CumulativeAblation:
    """Ablate heads cumulatively in the whole model, a twelfth of all at a time (at least one), until none is left.

    Arguments as in `ablate_heads`, and
        order         ``importance``: by the drops of single heads (L H passes to find the order); ``random``: three
                      random orders (no passes); ``greedy``: the most harmful next, with all remaining heads tried again
                      at every step (about (L H)^2 / (2 step) passes over the first `SCORED` examples). Ties are broken
                      by the loss
        seed          seed of the random orders and of ``resample``
    """
    choose("order", order, get_args(Order))
    choose("metric", metric, get_args(Metric))
    trials = _Trials(source, batches, metric, intervention, seed)
    every = np.ones(trials.shape, bool)
    count = every.size
    if order == "random":
        rng = np.random.Generator(np.random.Philox(seed))
        orders = np.stack([rng.permutation(np.argwhere(every)) for _ in range(RANDOM_ORDERS)])
    elif order == "importance":
        orders = trials.by_harm(every, None)[None]
    else:
        left, gone = every, []
        while left.any():
            gone.append(trials.by_harm(left, SCORED)[: trials.step])
            (left,) = _without(left, gone[-1:])
        orders = np.concatenate(gone)[None]
    sizes = [*range(0, count, trials.step), count]
    kept = np.concatenate([_without(every, [heads[:size] for size in sizes]) for heads in orders])
    curves = np.full((len(orders), count + 1), np.nan)
    curves[:, sizes] = trials(kept, (trials.metric,))[0].reshape(len(orders), -1)
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

    Backward elimination: each round tries all remaining heads one by one on the first `SCORED` examples. It then
    ablates the least harmful ones for good, up to a twelfth of all heads at once, as long as the accuracy on all
    examples suffices. If that fails, the next round tries heads on all examples. It ends when, on all examples, no
    single head can be left out. The smallest possible set may be smaller.

    Arguments as in `ablate_heads`; ``keep`` is above 0 and at most 1.
    """
    if not 0 < keep <= 1:
        raise invalid("keep", "be over 0 and at most 1", keep)
    trials = _Trials(source, batches, "accuracy", intervention, seed)
    left = np.ones(trials.shape, bool)
    accuracy = baseline = float(trials(left[None], ("accuracy",))[0, 0])
    needed = chance + keep * (baseline - chance)
    most: int | None = SCORED
    while left.any():
        least = trials.by_harm(left, most)[::-1]
        sizes = {min(size, len(least)) for size in (*(2**k for k in range(trials.step.bit_length())), trials.step)}
        further = _without(left, [least[:size] for size in sorted(sizes)])
        accuracies = trials(further, ("accuracy",))[0]
        enough = np.flatnonzero(accuracies >= needed - ROUNDOFF)
        if len(enough):
            left, accuracy, most = further[enough[-1]], float(accuracies[enough[-1]]), SCORED
        elif most is None:  # by all examples, not even the least harmful head can be left out
            break
        else:
            most = None
    return SufficientSet(np.argwhere(left), accuracy, needed, baseline, trials.examples)


class _Trials:
    """Evaluate a model on one data set with sets of heads ablated."""

    def __init__(
        self, source: Source, batches: Iterable[Batch], metric: Metric, intervention: Intervention, seed: int
    ) -> None:
        choose("intervention", intervention, get_args(Intervention))
        self.source = source
        self.metric: Metric = metric
        self.batches = counted_batches(batches)
        self.replacing = replacements(source, self.batches, intervention, seed)
        self.examples = int(sum(counts(labels).sum() for _, labels, _ in self.batches))
        self.shape = source.num_layers, source.num_heads
        self.step = max(1, source.num_layers * source.num_heads // POINTS)

    def __call__(
        self, kept: Bool[np.ndarray, "V L H"], metrics: tuple[Metric, ...], most: int | None = None
    ) -> Float[np.ndarray, "metrics V"]:
        """The metrics with all heads but ``kept`` ablated, over the first ``most`` counted examples."""
        gains = torch.from_numpy(np.concatenate((np.ones((1, *self.shape), bool), kept)).astype(np.float32))
        sums = np.zeros((len(metrics), len(kept)))
        left = total = min(most or self.examples, self.examples)
        for index, (tokens, labels, lengths) in enumerate(self.batches):
            rows = int(torch.searchsorted(counts(labels).cumsum(0), left)) + 1
            tokens, labels = tokens[:rows], labels[:rows]
            instead = self.replacing(index)
            if isinstance(instead, list):
                instead = [outputs if len(outputs) == 1 else outputs[:rows] for outputs in instead]
            first = next(iter(self.source.states(tokens, None if lengths is None else lengths[:rows])))
            logits = self.source.replay(first, gains, instead)
            for place, metric in enumerate(metrics):
                sums[place] += outcomes(metric, logits[1:], logits[0], labels).double().sum(1).cpu().numpy()
            left -= int(counts(labels).sum())
            if left == 0:
                break
        return sums / total

    def by_harm(self, kept: Bool[np.ndarray, "L H"], most: int | None) -> Int[np.ndarray, "S 2"]:
        """The ``kept`` heads, most harmful to ablate first; ties are broken by the loss."""
        heads = np.argwhere(kept)
        values, ties = self(_without(kept, heads[:, None]), (self.metric, "loss"), most)
        return heads[np.lexsort((-ties, -harm(self.metric, np.zeros_like(values), values)))]


def _without(
    kept: Bool[np.ndarray, "L H"], gone: Sequence[Int[np.ndarray, "_ 2"]] | Int[np.ndarray, "V _ 2"]
) -> Bool[np.ndarray, "V L H"]:
    """``kept`` without each of several sets of heads."""
    rows = np.repeat(kept[None], len(gone), axis=0)
    for row, heads in zip(rows, gone, strict=True):
        row[heads[:, 0], heads[:, 1]] = False
    return rows


# ---- the deposit: is a layer's skill carried by one head, by a few, by many together, or by none in particular? ------

Kind = Literal["single-head", "few-head", "distributed", "redundant", "no-skill"]
PEAK = 0.5
SECOND = 0.5
LOST = 0.5
SKILL = 0.05
# what the kinds of layers mean, in words
THRESHOLDS = (
    f"single-head: the largest drop is at least {PEAK:g} of the skill (accuracy above the baseline), the second "
    f"largest at most {SECOND:g} of the largest; few-head: ablating the most important heads, up to max(2, a quarter) "
    f"of them, removes at least {LOST:g} of the skill; distributed: more heads are needed for that; redundant: no "
    f"number of heads removes that; no-skill: accuracy is less than {SKILL:g} above the baseline"
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
    kind: Kind


def counted_drops(ablation: HeadAblation) -> Float[np.ndarray, "L H"]:
    """The ablation effect of each head; 0 if not significant, that is, if its interval does not lie above 0.

    Without intervals every positive drop counts.
    """
    sure = np.isnan(ablation.low) | (ablation.low > 0)
    return np.where(sure, np.clip(ablation.drops, 0, None), 0.0)


def deposit(ablation: HeadAblation, guess: float | None = None) -> list[LayerDeposit]:
    """The deposit of each layer, from an ablation by accuracy with its cumulative part (else raises `InputError`).

    ``guess`` is the chance accuracy (default: the ablation's own ``chance``).
    """
    if ablation.metric != "accuracy":
        raise invalid("ablation", "have the metric 'accuracy' for a deposit", ablation.metric)
    if np.isnan(ablation.cumulative).any():
        raise InputError("ablation must include the cumulative part for a deposit.")
    without = ablation.chance if guess is None else guess
    skill = ablation.baseline - without
    found = []
    for clipped, curve in zip(counted_drops(ablation), ablation.cumulative, strict=True):
        order = np.argsort(-clipped, kind="stable")
        total = float(clipped.sum())
        share = clipped / skill if skill > 0 else np.zeros_like(clipped)
        peak = float(share[order[0]])
        second = float(share[order[1]]) if len(order) > 1 else 0.0
        lost = np.flatnonzero(curve[0] - curve >= LOST * skill) if skill > 0 else np.empty(0, int)
        half_at = int(lost[0]) if len(lost) else None
        kind: Kind = "distributed"
        if skill < SKILL:
            kind = "no-skill"
        elif peak >= PEAK and second <= SECOND * peak:
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
        found.append(layer)
    return found


def gini(values: Float[np.ndarray, "H"]) -> float:
    """Gini coefficient of non-negative values: 0 if all are equal, 1 - 1/H if one has everything; 0 if all are 0."""
    ordered, count = np.sort(values), len(values)
    total = ordered.sum()
    return float((2 * np.arange(1, count + 1) - count - 1) @ ordered / (count * total)) if total > 0 else 0.0
