"""The record of a head ablation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float
from pydantic import Field

from toeplens.ground.reading import Share
from toeplens.ground.records import AtLeast1, Record
from toeplens.lens.ablation.estimate_check import EstimateCheck
from toeplens.lens.kit.interventions import Intervention
from toeplens.lens.kit.outcomes import Metric

Method = Literal["exact", "attribution"]


@dataclass(frozen=True)
class HeadAblation(Record):
    """The effect of ablating heads.

    drops         [layers, heads] what is lost without the head, positive for harm: metric(intact) - metric(ablated)
                  for accuracy, metric(ablated) - metric(intact) for loss and kl
    low, high     [layers, heads] paired bootstrap interval of the drops over the examples, each head's for itself: of
                  many heads some intervals miss 0 by chance. A head whose loss shows in none of the examples gets
                  [0, 0], however few these are. nan without resamples
    baseline      the intact model's metric
    cumulative    [layers, heads + 1] metric with a layer's 0, 1, 2, ... heads ablated together, most important first;
                  nan where that was not run
    examples      how many examples were counted
    chance        the accuracy of the best constant guess
    metric        ``accuracy`` (a share), ``loss`` (nats) or ``kl`` (nats)
    intervention  ``zero``, ``mean``, ``resample`` or ``position``
    method        ``exact`` or ``attribution``
    check         of an attribution: how its estimates compare to exact drops on a sample of the heads; None in records
                  that are older than the check, whose estimates are no effects
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
                raise ValueError(f"{name}: of accuracies only numbers from {least} to 1 can come.")
        if self.metric == "accuracy" and not 0 <= self.baseline <= 1:
            raise ValueError(f"baseline: {self.baseline} was given; an accuracy is from 0 to 1.")

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON; None for NaN. Only an estimate has a check."""
        content = super().to_dict()
        return {name: value for name, value in content.items() if name != "check" or value is not None}
