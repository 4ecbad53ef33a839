"""Shares of a variance: each term's covariance with the whole, over the variance of the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.lens.kit.terms import Common

_NOTHING = 1e-12  # of the energy before any mean is taken off: a variance below it is rounding


@dataclass(frozen=True)
class Shares:
    """Each term's share of the variance of the logits over the visible pairs: its covariance with them, over it.

    Shares sum to 1 and may be negative, where a term works against the rest. A row's mean cannot be seen by a softmax:
    ``softmax`` is the same with each query's mean over its keys removed. NaN where the logits do not vary.
    """

    logits: Float[Tensor, "H P"]
    softmax: Float[Tensor, "H P"]


def spread(term: Common, whole: Common, pairs: float) -> tuple[Tensor, Tensor]:
    """Sums of products with the whole, less the means: over all pairs, and with each row's mean removed."""
    total = whole.total if term.total.ndim == whole.total.ndim else whole.total.unsqueeze(-1)
    return term.inner - term.total * total / pairs, term.inner - term.rows


def shares_of(
    terms: list[tuple[Tensor, Tensor]], variances: tuple[Tensor, Tensor], energy: Float[Tensor, "H"]
) -> Shares:
    """The terms' spreads over the whole's own; NaN where the whole does not vary.

    Arguments
        terms, variances  spreads, as `spread` gives them
        energy            what the terms hold in absolute value before their means are taken off
    """
    made = []
    for which, variance in enumerate(variances):
        stacked = torch.stack([term[which] for term in terms], dim=-1)
        varies = variance > _NOTHING * energy.clamp(min=1e-300)
        made.append(torch.where(varies.unsqueeze(-1), stacked / variance.unsqueeze(-1), torch.nan))
    return Shares(*made)


def grouped(part: Common, groups: Int[Tensor, "d"], count: int | None = None) -> Common:
    """A product's dimensions summed by group: [H, groups]; ``count`` groups, or as many as occur."""
    count = int(groups.max()) + 1 if count is None else count

    def gather(x: Tensor) -> Tensor:
        return torch.zeros(x.shape[0], count, dtype=x.dtype, device=x.device).index_add_(1, groups, x)

    return Common(gather(part.total), gather(part.inner), gather(part.rows))
