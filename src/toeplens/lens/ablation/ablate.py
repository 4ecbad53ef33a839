"""Head ablation: what is lost without a head, head by head and head after head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, get_args, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.ground import choose
from toeplens.lens.ablation.attribution import first_order
from toeplens.lens.ablation.estimate_check import Sample, check_estimates
from toeplens.lens.ablation.head_ablation import HeadAblation, Method
from toeplens.lens.kit.intervals import bootstrap_means
from toeplens.lens.kit.interventions import Batch, Intervention, Replacement, Replayable, counted_batches, replacements
from toeplens.lens.kit.outcomes import Metric, harm, outcomes


@runtime_checkable
class Memory(Protocol):
    """Where an ablation keeps what it has answered; `get` may raise to stop it between two batches.

    One memory serves one ablation: the keys do not name metric, intervention or method.
    """

    def get(self, key: str) -> Bool[np.ndarray, "V n"] | Float[np.ndarray, "V n"] | None: ...

    def put(self, key: str, answers: Bool[np.ndarray, "V n"] | Float[np.ndarray, "V n"]) -> None: ...


def ablate_heads(
    source: Replayable,
    batches: Iterable[Batch],
    *,
    chance: float = 0.0,
    metric: Metric = "accuracy",
    intervention: Intervention = "zero",
    method: Method = "exact",
    cumulative: bool = True,
    bootstrap: int = 1000,
    seed: int = 0,
    memory: Memory | None = None,
) -> HeadAblation:
    """Ablate each head of each layer and measure what the model loses (arXiv 2505.13027, section 5.1).

    A head lives in the input of the output projection: there its output z becomes gain * z + (1 - gain) * replacement
    with gain 0, at every position, padding included. Everything before a layer is run once and shared by all its
    heads, which are then replayed together as one batch.

    Arguments
        source        a model that can replay from a layer (`toeplens.sources`)
        batches       (tokens [b, N], labels [b], lengths [b] or None); negative labels count nowhere
        chance        accuracy of the best constant guess, kept for `deposit`
        metric        ``accuracy``, ``loss`` (cross-entropy) or ``kl``: KL(intact || ablated) of the output
                      distribution, 0 for the intact model; drops are positive for harm with each
        intervention  the replacement: ``zero``; ``mean``, the head's mean at the position over the examples that count
                      and have a token there (0 where none has; a second pass over the data); ``resample``, its output
                      at the position in another example that counts, of the same length where there is one; or
                      ``position``, its own output on the same input with the encoding off in that head alone: no
                      rotation, no bias, nothing after the softmax. Encodings added at the input are no part of a head,
                      so they give drops of 0 there
        method        ``exact``; or ``attribution``, the first-order estimate (z - replacement) . dloss/dz of all heads
                      from one backward pass, for the loss alone; needs a `Scalable` source, runs nothing cumulative. A
                      sample of the heads is ablated exactly as well, and the result's ``check`` says whether the
                      estimates may be read as effects
        cumulative    also ablate each layer's heads together, in order of importance
        bootstrap     resamples for the intervals; none with 0
        seed          of the examples that ``resample`` puts in each other's places
        memory        keeps each batch's answers, so that a long exact ablation can be stopped and gone on with

    Raises `InputError` for an unknown choice, for no example that counts, for an attribution of another metric than
    the loss, and where ``resample`` has one example or sequences of several widths.
    """
    choose("metric", metric, get_args(Metric))
    choose("intervention", intervention, get_args(Intervention))
    choose("method", method, get_args(Method))
    kept = counted_batches(batches)
    layers, heads = source.num_layers, source.num_heads
    replacing = replacements(source, kept, intervention, seed)
    curve = np.full((layers, heads + 1), np.nan)
    check = None
    if method == "attribution":
        intact, harms = first_order(source, kept, metric, replacing)
        check = check_estimates(harms.mean(-1), lambda sample: _sampled(source, kept, sample, metric, replacing))
    else:
        single = [1 - torch.eye(heads)] * layers
        intact, alone = _answers(source, kept, single, metric, replacing, memory, "single")
        harms = harm(metric, intact, alone).reshape(layers, heads, -1)
    drops = harms.mean(-1)
    low, high = bootstrap_means(harms.reshape(layers * heads, -1).T, samples=bootstrap)
    if cumulative and method == "exact":
        orders = np.argsort(-drops, axis=1, kind="stable")
        curve[:, 0] = intact.mean()
        curve[:, 1] = np.take_along_axis(alone.mean(-1).reshape(layers, heads), orders, 1)[:, 0]
        if heads > 1:
            growing = [_silenced_in(order) for order in orders]
            together = _answers(source, kept, growing, metric, replacing, memory, "together")[1]
            curve[:, 2:] = together.mean(-1).reshape(layers, heads - 1)
    shape = (layers, heads)
    return HeadAblation(
        drops,
        low.reshape(shape),
        high.reshape(shape),
        float(intact.mean()),
        curve,
        len(intact),
        chance,
        metric,
        intervention,
        method,
        check,
    )


def _sampled(
    source: Replayable,
    batches: Sequence[Batch],
    sample: Sample,
    metric: Metric,
    replacing: Callable[[int], Replacement],
) -> list[Float[np.ndarray, "_k"]]:
    """What is lost without each head of a sample, layer by layer."""
    gains = [(1 - torch.eye(source.num_heads))[heads] for heads in sample]
    intact, alone = _answers(source, batches, gains, metric, replacing, None, "sample")
    return np.split(harm(metric, intact, alone).mean(-1), np.cumsum([len(heads) for heads in sample])[:-1])


def _silenced_in(order: Int[np.ndarray, "H"]) -> Float[Tensor, "H1 H"]:
    """Gains with the first 2, 3, ... heads of the order ablated together."""
    return torch.from_numpy((np.argsort(order) >= np.arange(2, len(order) + 1)[:, None]).astype(np.float32))


def _answers(
    source: Replayable,
    batches: Sequence[Batch],
    gains: Sequence[Float[Tensor, "V H"]],
    metric: Metric,
    replacing: Callable[[int], Replacement],
    memory: Memory | None,
    phase: str,
) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "LV n"]]:
    """The metric of each example that counts: intact, and for each row of each layer's gains, layer after layer."""
    last = source.num_layers - 1
    parts = []
    for index, (tokens, labels, lengths) in enumerate(batches):
        key = f"{phase}-{index}"
        answers = memory.get(key) if memory else None
        if answers is None:
            instead = replacing(index)
            logits = []
            for layer, state in enumerate(source.states(tokens, lengths)):
                own = [instead[layer]] if isinstance(instead, list) else instead
                rows = torch.cat((gains[layer], torch.ones(1, source.num_heads))) if layer == last else gains[layer]
                logits.append(source.replay(state, rows, own))
            changed, intact = torch.cat(logits).split((sum(map(len, gains)), 1))
            both = torch.cat((intact, changed))
            answers = outcomes(metric, both, intact[0], labels).cpu().numpy()
            if memory:
                memory.put(key, answers)
        parts.append(answers)
    together = np.concatenate(parts, axis=1).astype(float)
    return together[0], together[1:]
