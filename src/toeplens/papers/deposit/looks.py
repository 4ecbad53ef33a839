"""What silencing heads costs a trained model: at a moment of its training, by accuracy or by loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from toeplens.engine.head_watch import MOMENTS
from toeplens.lens.ablation.deposit import counted_drops
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
    """Every head silenced, one at a time.

    costs  [layers, heads] by accuracy as a share of the skill, by loss in nats; 0 for a head whose cost is not told
           from none
    """

    costs: Float[np.ndarray, "L H"]

    def largest(self, layers: slice = slice(None)) -> float:
        """The largest cost of a head, of all layers or of some; 0 where there are none of these."""
        return float(self.costs[layers].max(initial=0.0))

    def second(self, layers: slice = slice(None)) -> float:
        """The second largest cost of a head, of all layers or of some; 0 where there is but one."""
        costs = np.sort(self.costs[layers], axis=None)
        return float(costs[-2]) if costs.size > 1 else 0.0

    def second_smallest(self, layers: slice) -> float:
        """The second smallest cost of a head of these layers, which have two at least."""
        return float(np.sort(self.costs[layers], axis=None)[1])

    @property
    def layer(self) -> float:
        """The layer, from 1, of the head that costs most, the mean of several; NaN where none costs anything."""
        most = self.costs.max(axis=1)
        return float(np.mean(np.flatnonzero(most == most.max())) + 1) if self.costs.any() else float("nan")

    @property
    def effective_heads(self) -> float:
        """(sum of costs)^2 over the sum of their squares, of the whole model; NaN where no head costs anything."""
        total = float(self.costs.sum())
        return total**2 / float((self.costs**2).sum()) if total > 0 else float("nan")

    @property
    def matter(self) -> int:
        """How many heads cost anything."""
        return int((self.costs > 0).sum())

    @property
    def top(self) -> float:
        """The costliest head's share of all costs together; NaN where no head costs anything."""
        total = float(self.costs.sum())
        return float(self.costs.max()) / total if total > 0 else float("nan")

    @property
    def total(self) -> float:
        """What all heads cost, added up."""
        return float(self.costs.sum())


def in_order(cell: CellResult, moment: str) -> bool:
    """Whether a moment is what it is taken for: over 90 % right, it has just learned, unless that came by chance later.

    Later than the plateau, that is. All other moments follow in their order by themselves.
    """
    seen, plateau = cell.events.get(moment), cell.events.get("plateau")
    return moment != "able" or (seen is not None and plateau is not None and seen.step < plateau.step)


def look_at(cell: CellResult, moment: str = END, measure: Measure = "accuracy") -> Look | None:
    """What silencing heads cost a cell's model; None where that was not seen, or the model had too little skill.

    Arguments
        moment  `END`, or one of `toeplens.engine.head_watch.MOMENTS`; where training ended there, the finished model is
                what was seen
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
