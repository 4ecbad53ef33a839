"""The deposit: is a layer's skill carried by one head, by a few, by many together, or by none in particular?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from toeplens.ground import InputError, invalid
from toeplens.lens.ablation.ablate import HeadAblation

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
    """The deposit of each layer, from an ablation by accuracy with its cumulative part.

    Arguments
        guess  chance accuracy (default: the ablation's own ``chance``)

    Raises `InputError` for another metric or without the cumulative part.
    """
    if ablation.metric != "accuracy":
        raise invalid("ablation", "have the metric 'accuracy' for a deposit", ablation.metric)
    if np.isnan(ablation.cumulative).any():
        raise InputError("ablation must include the cumulative part for a deposit.")
    without = ablation.chance if guess is None else guess
    return [
        _layer(drops, curve, ablation.baseline, without)
        for drops, curve in zip(counted_drops(ablation), ablation.cumulative, strict=True)
    ]


def _layer(
    clipped: Float[np.ndarray, "H"], curve: Float[np.ndarray, "H1"], accuracy: float, guess: float
) -> LayerDeposit:
    skill = accuracy - guess
    order = np.argsort(-clipped, kind="stable")
    total = float(clipped.sum())
    share = clipped / skill if skill > 0 else np.zeros_like(clipped)
    peak = float(share[order[0]])
    second = float(share[order[1]]) if len(order) > 1 else 0.0
    lost = np.flatnonzero(curve[0] - curve >= LOST * skill) if skill > 0 else np.empty(0, int)
    half_at = int(lost[0]) if len(lost) else None
    few = max(2, len(clipped) // 4)
    kind: Kind
    if skill < SKILL:
        kind = "no-skill"
    elif peak >= PEAK and second <= SECOND * peak:
        kind = "single-head"
    elif half_at is None:
        kind = "redundant"
    elif half_at <= few:
        kind = "few-head"
    else:
        kind = "distributed"
    return LayerDeposit(
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


def gini(values: Float[np.ndarray, "H"]) -> float:
    """Gini coefficient of non-negative values: 0 if all are equal, 1 - 1/H if one has everything; 0 if all are 0."""
    ordered = np.sort(values)
    total = ordered.sum()
    if total <= 0:
        return 0.0
    count = len(ordered)
    return float((2 * np.arange(1, count + 1) - count - 1) @ ordered / (count * total))
