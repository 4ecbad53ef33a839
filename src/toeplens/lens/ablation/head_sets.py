"""Sets of heads across layers: the metric as more and more heads are ablated, and how few heads carry the skill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field

from toeplens.ground import choose, invalid
from toeplens.ground.reading import Count, Share
from toeplens.ground.records import AtLeast1, Dims, Each, Record
from toeplens.lens.kit.interventions import (
    Batch,
    Intervention,
    Metric,
    Replayable,
    counted_batches,
    counts,
    harm,
    outcomes,
    replacements,
)

Order = Literal["greedy", "importance", "random"]
RANDOM_ORDERS = 3
POINTS = 12  # points per curve: each step ablates this fraction of all heads, at least one
SCORED = 64  # number of examples that choose which head is tried next; all examples decide the rest
ROUNDOFF = 1e-9


@dataclass(frozen=True)
class HeadSets(Record):
    """Which heads carry a model's skill together.

    baseline    the intact model's accuracy
    chance      chance accuracy, as passed in
    examples    number of examples counted
    greedy      [L H + 1] accuracy with 0, 1, 2, ... heads ablated, the most harmful next; nan where not run
    importance  [L H + 1] the same in the order of the drops of single heads
    random      [R, L H + 1] the same in R random orders
    order       the greedy order, as [layer, head] from 0
    sufficient  a set of heads that keeps the share ``keep`` of the skill when all others are ablated, as [layer, head];
                no single one can be left out. Its size is an upper bound on that of the smallest such set
    keep        the share of accuracy - chance to keep
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
    examples  number of examples counted
    metric    ``accuracy``, ``loss`` or ``kl``
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
    examples  number of examples counted
    """

    heads: Int[np.ndarray, "S 2"]
    accuracy: float
    needed: float
    baseline: float
    examples: int


def head_sets(
    source: Replayable,
    batches: Iterable[Batch],
    *,
    chance: float = 0.0,
    keep: float = 0.9,
    intervention: Intervention = "zero",
    seed: int = 0,
) -> HeadSets:
    """Cumulative ablation in all three orders and a sufficient set; see `cumulative_ablation` and `sufficient_set`."""
    trials = _Trials(source, batches, "accuracy", intervention, seed)
    greedy, importance, random = (_cumulative(trials, order, seed) for order in get_args(Order))
    found = _sufficient(trials, chance, keep)
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
    source: Replayable,
    batches: Iterable[Batch],
    *,
    order: Order = "greedy",
    metric: Metric = "accuracy",
    intervention: Intervention = "zero",
    seed: int = 0,
) -> CumulativeAblation:
    """Ablate heads cumulatively in the whole model, until none is left.

    Each step ablates a twelfth of all heads, at least one. Every point of a curve is one pass over all examples, from
    the first changed layer; passes that agree up to a layer share it.

    Arguments
        source        a model that can replay from a layer
        batches       (tokens [b, N], labels [b], lengths [b] or None); negative labels are ignored
        order         ``importance``: by the drops of single heads (L H passes to find the order); ``random``: three
                      random orders (no passes); ``greedy``: the most harmful next, with all remaining heads tried again
                      at every step (about (L H)^2 / (2 step) passes over the first `SCORED` examples)
        metric        ``accuracy``, ``loss`` or ``kl``; ties in accuracy are broken by the loss
        intervention  what replaces a head's output; see `ablate_heads`
        seed          seed of the random orders and of ``resample``

    Raises `InputError` for an unknown choice, and if no example counts.
    """
    choose("order", order, get_args(Order))
    choose("metric", metric, get_args(Metric))
    return _cumulative(_Trials(source, batches, metric, intervention, seed), order, seed)


def sufficient_set(
    source: Replayable,
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

    Arguments as in `cumulative_ablation`, and
        chance  chance accuracy
        keep    share of the skill to keep, above 0 and at most 1
    """
    return _sufficient(_Trials(source, batches, "accuracy", intervention, seed), chance, keep)


class _Trials:
    """Evaluate a model on one data set with sets of heads ablated."""

    def __init__(
        self, source: Replayable, batches: Iterable[Batch], metric: Metric, intervention: Intervention, seed: int
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
        values, losses = self(_without(kept, heads[:, None]), (self.metric, "loss"), most)
        return heads[np.lexsort((-losses, -harm(self.metric, np.zeros_like(values), values)))]


def _without(
    kept: Bool[np.ndarray, "L H"], gone: Sequence[Int[np.ndarray, "_ 2"]] | Int[np.ndarray, "V _ 2"]
) -> Bool[np.ndarray, "V L H"]:
    """``kept`` without each of several sets of heads."""
    rows = np.repeat(kept[None], len(gone), axis=0)
    for row, heads in zip(rows, gone, strict=True):
        row[heads[:, 0], heads[:, 1]] = False
    return rows


def _cumulative(trials: _Trials, order: Order, seed: int) -> CumulativeAblation:
    every = np.ones(trials.shape, bool)
    count = every.size
    if order == "random":
        rng = np.random.Generator(np.random.Philox(seed))
        orders = np.stack([rng.permutation(np.argwhere(every)) for _ in range(RANDOM_ORDERS)])
    elif order == "importance":
        orders = trials.by_harm(every, None)[None]
    else:
        orders = _greedy(trials)[None]
    sizes = [*range(0, count, trials.step), count]
    kept = np.concatenate([_without(every, [heads[:size] for size in sizes]) for heads in orders])
    curves = np.full((len(orders), count + 1), np.nan)
    curves[:, sizes] = trials(kept, (trials.metric,))[0].reshape(len(orders), -1)
    return CumulativeAblation(curves, orders, float(curves[0, 0]), trials.examples, trials.metric)


def _greedy(trials: _Trials) -> Int[np.ndarray, "LH 2"]:
    """The order from most harmful to least, recomputed after each step."""
    left = np.ones(trials.shape, bool)
    order = []
    while left.any():
        worst = trials.by_harm(left, SCORED)[: trials.step]
        order.append(worst)
        (left,) = _without(left, [worst])
    return np.concatenate(order)


def _sufficient(trials: _Trials, chance: float, keep: float) -> SufficientSet:
    if not 0 < keep <= 1:
        raise invalid("keep", "be over 0 and at most 1", keep)
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
