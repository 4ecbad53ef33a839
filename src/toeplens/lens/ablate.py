"""Head ablation: what is lost when a head is silenced, head by head and head after head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.ground import InputError, choose
from toeplens.lens.bootstrap import bootstrap_means

# tokens [b, N], labels [b], lengths [b]: not named, because b may differ from batch to batch
Batch = tuple[Int[Tensor, "_ _"], Int[Tensor, "_"], Int[Tensor, "_"] | None]
Metric = Literal["accuracy"]


@runtime_checkable
class Replayable(Protocol):
    """What ablation needs of a source: run once, then go on from a layer with some heads' outputs scaled."""

    num_layers: int
    num_heads: int

    def states(self, tokens: Tensor, lengths: Tensor | None) -> Iterable[Any]:
        """For each layer in order, an opaque state from which `replay` goes on at that layer."""
        ...

    def replay(self, state: Any, gains: Float[Tensor, "V H"]) -> Float[Tensor, "V b C"]:
        """Class logits with the layer's head outputs scaled by each of V rows of ``gains``."""
        ...


@runtime_checkable
class Memory(Protocol):
    """Where an ablation keeps what it has answered; `get` may raise to stop it between two batches."""

    def get(self, key: str) -> Bool[np.ndarray, "L V n"] | None: ...

    def put(self, key: str, right: Bool[np.ndarray, "L V n"]) -> None: ...


@dataclass(frozen=True)
class HeadAblation:
    """The effect of silencing heads.

    drops        [layers, heads] metric(intact) - metric(ablated)
    low, high    [layers, heads] paired bootstrap interval of the drops over the examples
    baseline     the intact model's metric
    cumulative   [layers, heads + 1] metric with a layer's 0, 1, 2, ... heads silenced together, most important first
    examples     how many examples were counted
    chance       the metric of the best constant guess
    """

    drops: Float[np.ndarray, "L H"]
    low: Float[np.ndarray, "L H"]
    high: Float[np.ndarray, "L H"]
    baseline: float
    cumulative: Float[np.ndarray, "L H1"]
    examples: int
    chance: float
    metric: str = "accuracy"
    intervention: str = "zero"

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in vars(self).items()}

    @classmethod
    def from_dict(cls, content: Any) -> HeadAblation:
        """The inverse of `to_dict`; what is no such record raises `InputError`."""
        try:
            arrays = {key: np.asarray(content[key], dtype=float) for key in ("drops", "low", "high", "cumulative")}
            rest = {key: content[key] for key in ("baseline", "examples", "chance", "metric", "intervention")}
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"ablation: the record is damaged ({error}).") from None
        return cls(**arrays, **rest)


@torch.no_grad()
def ablate_heads(
    source: Replayable,
    batches: Iterable[Batch],
    *,
    chance: float = 0.0,
    metric: Metric = "accuracy",
    intervention: Literal["zero"] = "zero",
    method: Literal["exact"] = "exact",
    cumulative: bool = True,
    bootstrap: int = 1000,
    memory: Memory | None = None,
) -> HeadAblation:
    """Silence each head of each layer and measure what the model loses (arXiv 2505.13027, section 5.1).

    A head lives in the input of the output projection: that is where it is set to zero. Everything before a layer is
    run once and shared by all its heads, which are then replayed together as one batch.

    Arguments
        source        a model that can replay from a layer (`toeplens.sources`)
        batches       (tokens [b, N], labels [b], lengths [b] or None); negative labels count nowhere
        chance        accuracy of the best constant guess, kept for `deposit`
        metric        ``accuracy``
        intervention  ``zero``
        method        ``exact``
        cumulative    also silence each layer's heads together, in order of importance
        bootstrap     resamples for the intervals
        memory        keeps each batch's answers, so that a long ablation can be stopped and gone on with
    """
    choose("metric", metric, ("accuracy",))
    choose("intervention", intervention, ("zero",))
    choose("method", method, ("exact",))
    kept = list(batches)
    if not any((labels >= 0).any() for _, labels, _ in kept):
        raise InputError("batches: no examples that count were given; at least one is needed.")
    layers, heads = source.num_layers, source.num_heads
    single = 1 - torch.eye(heads)
    rows = [torch.cat((torch.ones(1, heads), single)) for _ in range(layers)]
    right = _right(source, kept, rows, memory, "single")  # per layer [1 + H, n]
    count = right[0].shape[1]
    intact = right[0][0]
    drops = np.stack([(intact[None] - layer[1:]).mean(1) for layer in right])
    paired = np.concatenate([intact[None] - layer[1:] for layer in right]).T
    low, high = bootstrap_means(paired, samples=bootstrap)
    curve = np.full((layers, heads + 1), np.nan)
    if cumulative:
        orders = np.argsort(-drops, axis=1, kind="stable")
        growing = []
        for order in orders:
            gains = torch.ones(heads - 1, heads)
            for k in range(2, heads + 1):
                gains[k - 2, torch.from_numpy(order[:k].copy())] = 0
            growing.append(gains)
        together = _right(source, kept, growing, memory, "together") if heads > 1 else [np.empty((0, count))] * layers
        for layer in range(layers):
            curve[layer, 0] = intact.mean()
            curve[layer, 1] = right[layer][1 + orders[layer][0]].mean()
            curve[layer, 2:] = together[layer].mean(1)
    shape = (layers, heads)
    return HeadAblation(drops, low.reshape(shape), high.reshape(shape), float(intact.mean()), curve, count, chance)


def _right(
    source: Replayable, batches: list[Batch], gains: list[Float[Tensor, "V H"]], memory: Memory | None, phase: str
) -> list[Float[np.ndarray, "V n"]]:
    """For each layer and each row of its gains: 1 where the answer is right, over the examples that count."""
    parts = []
    for index, (tokens, labels, lengths) in enumerate(batches):
        key = f"{phase}-{index}"
        right = memory.get(key) if memory else None
        if right is None:
            counted = labels >= 0
            answers = [
                source.replay(state, gains[layer].to(tokens.device)).argmax(-1) == labels
                for layer, state in enumerate(source.states(tokens, lengths))
            ]
            right = torch.stack(answers)[:, :, counted].cpu().numpy()
            if memory:
                memory.put(key, right)
        parts.append(right)
    return list(np.concatenate(parts, axis=2).astype(float))
