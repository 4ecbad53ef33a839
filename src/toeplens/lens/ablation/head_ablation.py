"""The record of a head ablation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from toeplens.ground import InputError
from toeplens.ground.records import plain_numbers, require_shapes
from toeplens.lens.ablation.estimate_check import EstimateCheck

_ARRAYS = ("drops", "low", "high", "cumulative")


@dataclass(frozen=True)
class HeadAblation:
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

    drops: Float[np.ndarray, "L H"]
    low: Float[np.ndarray, "L H"]
    high: Float[np.ndarray, "L H"]
    baseline: float
    cumulative: Float[np.ndarray, "L H1"]
    examples: int
    chance: float
    metric: str = "accuracy"
    intervention: str = "zero"
    method: str = "exact"
    check: EstimateCheck | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON; None for nan."""
        content = {key: plain_numbers(value) if key in _ARRAYS else value for key, value in vars(self).items()}
        check = content.pop("check")
        return content if check is None else {**content, "check": check.to_dict()}

    @classmethod
    def from_dict(cls, content: Any) -> HeadAblation:
        """The inverse of `to_dict`; what is no such record raises `InputError`. Older ones have no method, no check."""
        try:
            arrays = {key: np.asarray(content[key], dtype=float) for key in _ARRAYS}
            layers, heads = arrays["drops"].shape
            shapes = dict.fromkeys(_ARRAYS, (layers, heads)) | {"cumulative": (layers, heads + 1)}
            require_shapes(arrays, shapes)
            rest = {key: content[key] for key in ("baseline", "examples", "chance", "metric", "intervention")}
            method, check = content.get("method", "exact"), content.get("check")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"ablation: the record is damaged ({error}).") from None
        return cls(**arrays, **rest, method=method, check=None if check is None else EstimateCheck.from_dict(check))
