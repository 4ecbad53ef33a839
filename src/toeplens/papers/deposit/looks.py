"""Ablation effects of a model's heads at a checkpoint, by accuracy or by loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from toeplens.engine.head_watch import MOMENTS
from toeplens.lens.ablation import counted_drops
from toeplens.studies.kit.results import SKILLED, CellResult

Measure = Literal["accuracy", "loss"]
END = "end"
LOOKS: tuple[tuple[str, Measure], ...] = (
    (END, "accuracy"),
    (END, "loss"),
    *((moment, measure) for moment in MOMENTS for measure in ("accuracy", "loss")),
)


@dataclass(frozen=True)
class Look:
    """Single-head ablation effects of a model.

    costs  [layers, heads] effects: by accuracy as a share of the skill, by loss in nats; 0 if not significant
    """

    costs: Float[np.ndarray, "L H"]

    def largest(self, layers: slice = slice(None)) -> float:
        """The largest effect in the given layers (default: all); 0 without layers."""
        return float(self.costs[layers].max(initial=0.0))

    def second(self, layers: slice = slice(None)) -> float:
        """The second largest effect in the given layers (default: all); 0 with one head."""
        costs = np.sort(self.costs[layers], axis=None)
        return float(costs[-2]) if costs.size > 1 else 0.0

    def second_smallest(self, layers: slice) -> float:
        """The second smallest effect in these layers, which need at least two heads."""
        return float(np.sort(self.costs[layers], axis=None)[1])

    @property
    def layer(self) -> float:
        """The layer (from 1) of the largest effect (mean of ties); NaN without effects."""
        most = self.costs.max(axis=1)
        return float(np.mean(np.flatnonzero(most == most.max())) + 1) if self.costs.any() else float("nan")

    @property
    def effective_heads(self) -> float:
        """(sum of effects)^2 / sum of squared effects, over the whole model; NaN without effects."""
        total = float(self.costs.sum())
        return total**2 / float((self.costs**2).sum()) if total > 0 else float("nan")

    @property
    def matter(self) -> int:
        """Number of heads with a significant effect."""
        return int((self.costs > 0).sum())

    @property
    def top(self) -> float:
        """The largest effect as a share of the sum; NaN without effects."""
        total = float(self.costs.sum())
        return float(self.costs.max()) / total if total > 0 else float("nan")

    @property
    def total(self) -> float:
        """The sum of all effects."""
        return float(self.costs.sum())


def in_order(cell: CellResult, moment: str) -> bool:
    """Whether a checkpoint is in order: the one with over 90 % accuracy must come before the plateau.

    All other checkpoints are in order by construction.
    """
    seen, plateau = cell.events.get(moment), cell.events.get("plateau")
    return moment != "able" or (seen is not None and plateau is not None and seen.step < plateau.step)


def look_at(cell: CellResult, moment: str = END, measure: Measure = "accuracy") -> Look | None:
    """The ablation effects of a cell's model; None if not measured or with too little skill.

    Arguments
        moment  `END`, or one of `toeplens.engine.head_watch.MOMENTS`; if training ended there, the finished model
    """
    if moment == END:
        found = cell.ablation, cell.by_loss
    else:
        seen = cell.events.get(moment)
        if seen is None:
            return None
        ended = seen.ablation is None and seen.step == cell.watched[-1]["step"]
        found = (cell.ablation, cell.by_loss) if ended else (seen.ablation, seen.by_loss)
    by_accuracy, by_loss = found
    guess = cell.length_chance
    if by_accuracy is None or (by_accuracy.baseline - guess) / (1 - guess) < SKILLED:
        return None
    if measure == "loss":
        return None if by_loss is None else Look(counted_drops(by_loss))
    return Look(counted_drops(by_accuracy) / (by_accuracy.baseline - guess))
