"""What a model loses without one frequency of one head: the causal use of a rotation's bands."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.encodings import BandControl
from toeplens.ground import InputError, choose
from toeplens.ground.records import AtLeast1, Record
from toeplens.lens.kit.intervals import bootstrap_means
from toeplens.lens.kit.interventions import Batch, Metric, Replayable, counted_batches, examples_answers, harm

Off = Literal["rotation", "pair"]


@runtime_checkable
class Controllable(Replayable, Protocol):
    """What the ablation of bands needs of a source beside replay: head outputs with bands under control."""

    @property
    def pairs(self) -> Sequence[int]:
        """How many pairs of dimensions each layer's encoding turns; 0 without a rotation."""
        ...

    def outputs_under(self, state: Any, control: BandControl) -> Float[Tensor, "b N H head_dim"]:
        """The head outputs of the state's layer at all positions, with its bands under control."""
        ...


@dataclass(frozen=True)
class BandAblation(Record):
    """What is lost when one band of one head is changed, everything else being as it is.

    drops      [L, H, n] mean over the examples that count, positive for harm; NaN in a layer without a rotation
    low, high  paired bootstrap interval over examples, each band's for itself: of many bands some intervals miss 0 by
               chance. A change that shows in none of the examples gets [0, 0], however few these are
    baseline   the metric of the intact model
    examples   how many count
    metric     ``accuracy``, ``loss`` or ``kl`` (see `ablate_heads`)
    off        ``rotation``: the pair no longer turns and its content counts; ``pair``: the pair is taken out
    """

    WORDS = "band ablation"

    drops: Float[np.ndarray, "L H n"]
    low: Float[np.ndarray, "L H n"]
    high: Float[np.ndarray, "L H n"]
    baseline: float
    examples: AtLeast1
    metric: Metric
    off: Off


@torch.no_grad()
def ablate_bands(
    source: Controllable,
    batches: Iterable[Batch],
    *,
    off: Off = "rotation",
    metric: Metric = "loss",
    layers: Collection[int] | None = None,
    bootstrap: int = 1000,
) -> BandAblation:
    """Take each frequency from each head and measure what the model loses (measures, "Frequency use", c).

    For one layer and band all heads' changed outputs are formed at once, and the model goes on from there with one head
    changed at a time: as much work as n head ablations.

    Arguments
        source     a model with a rotation in at least one layer (`toeplens.sources`)
        batches    (tokens [b, N], labels [b], lengths [b] or None); negative labels count nowhere
        off        what becomes of the band, see `BandAblation`
        metric     ``loss`` (cross-entropy in nats), ``accuracy`` or ``kl``
        layers     where bands are taken; everywhere unless given, and what is left out is NaN
        bootstrap  resamples for the intervals; none with 0
    """
    choose("off", off, get_args(Off))
    choose("metric", metric, get_args(Metric))
    kept, pairs = counted_batches(batches), source.pairs
    most = max(pairs)
    if most == 0:
        raise InputError("encoding: no layer of this model turns pairs of dimensions, so there are no bands to take.")
    wanted = range(len(pairs)) if layers is None else layers
    places = [(layer, band) for layer, count in enumerate(pairs) if layer in wanted for band in range(count)]
    if not places:
        turning = [layer for layer, count in enumerate(pairs) if count]
        raise InputError(f"layers: {list(wanted)} were given; the layers with a rotation are {turning}.")
    one_by_one = 1 - torch.eye(source.num_heads)

    def answers(index: int) -> Iterator[Tensor]:
        tokens, _, lengths = kept[index]
        for layer, state in enumerate(source.states(tokens, lengths)):
            if not layer:
                yield source.replay(state, torch.ones(1, source.num_heads))
            for band in range(pairs[layer]) if layer in wanted else ():
                control = BandControl(**{"still" if off == "rotation" else "silent": (band,)})
                yield source.replay(state, one_by_one, [source.outputs_under(state, control)])

    (before,), (after,) = examples_answers([metric], kept, answers)
    harms = harm(metric, before, after)
    low, high = bootstrap_means(harms.T, samples=bootstrap)
    shape = (source.num_layers, source.num_heads, most)

    def placed(values: Float[np.ndarray, "PH"]) -> Float[np.ndarray, "L H n"]:
        filled = np.full(shape, np.nan)
        for (layer, band), heads in zip(places, values.reshape(len(places), -1), strict=True):
            filled[layer, :, band] = heads
        return filled

    drops, low, high = placed(harms.mean(-1)), placed(low), placed(high)
    return BandAblation(drops, low, high, float(before.mean()), len(before), metric, off)
