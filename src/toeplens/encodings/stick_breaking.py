"""Stick-breaking attention: each key, from the nearest on, takes its share of what nearer keys have left."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import widened
from toeplens.encodings.seen import Seen
from toeplens.encodings.shapes import Pairs, Positions
from toeplens.ground import choose


class StickBreaking(PositionalEncoding):
    """Stick-breaking attention (Tan et al. 2024): A_ij = beta_ij times the product of 1 - beta_im over m from j to i.

    beta_ij = sigmoid(q_i . k_j / sqrt(d)); i is the query's place, j the key's, and m runs over the keys between them.
    Order alone decides, and positions are not used. Keys that a query does not see (padding, other texts) take nothing
    of the stick. Keys after the query are never weighed, also without a causal mask, which is ours.

    What no key took, R_i = 1 - sum_j A_ij, stands at the query's own key while the softmax is taken, whose weights are
    then A itself; afterwards it is taken out or left there. Where the softmax has no place for it (the own token is
    hidden; or is a key itself, and R_i dropped), weights are multiplied by 1 - R_i, which is then worked once more from
    queries and keys: a softcap of the logits, which an attention may have, is not in that.

    Arguments
        own        the query's own token is a key too, the first to take from the stick (``attend_current`` in the
                   released program); else keys are those strictly before it, as published, and the first query has none
        remainder  what becomes of R_i: ``dropped``, as in the paper's equations, so that weights sum to 1 - R_i; or
                   ``own``, the query's own value takes it, as in the authors' tests of their program
    """

    coupling = "logits"
    also_couples = ("weights",)
    data_dependent = True
    toeplitz = False
    forms_logits = True
    pair_width = 4
    citation = "Tan et al. 2024, arXiv 2410.17980"
    formula = (
        r"A_{ij} = \beta_{ij} \prod_{m=j+1}^{i-1} (1 - \beta_{im}),\quad \beta_{ij} = \sigma(q_i^\top k_j / \sqrt d)"
    )

    def __init__(self, *, own: bool = False, remainder: Literal["dropped", "own"] = "dropped", **sizes: int) -> None:
        super().__init__(**sizes)
        self.own = own
        self.remainder = choose("remainder", remainder, ("dropped", "own"))
        if self.remainder == "own":
            self.also_couples = ()

    def transform_logits(self, logits: Pairs, q_positions: Positions, k_positions: Positions, seen: Seen) -> Pairs:
        z = logits.to(widened(logits.dtype))
        before, own = _places(seen)
        left = self._left(z, seen)
        log_weights = (F.logsigmoid(z) + left[..., 1:]).masked_fill(~(before | own if self.own else before), -torch.inf)
        if not self.own:
            log_weights = torch.where(own, left[..., :1], log_weights)
        elif self.remainder == "own":
            log_weights = torch.where(own, torch.logaddexp(log_weights, left[..., :1]), log_weights)
        return log_weights.to(logits.dtype)

    def transform_weights(self, weights: Pairs, q_positions: Positions, k_positions: Positions, seen: Seen) -> Pairs:
        own = _places(seen)[1]
        if self.own and self.remainder == "dropped":
            weights = weights * self._sum(seen).to(weights.dtype)
        elif (visible := seen.visible()) is not None and seen.is_masked:
            held = (own & visible).any(-1, keepdim=True)
            weights = weights * torch.where(held, 1.0, self._sum(seen)).to(weights.dtype)
        return weights if self.own or self.remainder == "own" else weights.masked_fill(own, 0.0)

    def _left(self, z: Pairs, seen: Seen) -> Float[Tensor, "B H Nq more"]:
        """The log of what each key leaves of the stick, with all nearer ones; and a last 0, for the whole stick."""
        before, own = _places(seen)
        breaking, visible = before | own if self.own else before, seen.visible()
        breaking = breaking if visible is None else breaking & visible
        kept = F.logsigmoid(-z).masked_fill(~breaking, 0.0)
        return F.pad(kept.flip(-1).cumsum(-1).flip(-1), (0, 1))

    def _sum(self, seen: Seen) -> Float[Tensor, "B H Nq 1"]:
        """1 - R_i, from queries and keys once more: a softmax forgets it."""
        q, k = (x.to(widened(x.dtype)) for x in (seen.q, seen.k))
        return -torch.expm1(self._left(q @ k.transpose(-2, -1) * seen.scale, seen)[..., :1])


def _places(seen: Seen) -> tuple[Bool[Tensor, "*B Nq Nk"], Bool[Tensor, "*B Nq Nk"]]:
    """Which keys are before each query's own, and which is its own; for all heads alike."""
    keys, rows = torch.arange(seen.k.shape[-2], device=seen.k.device), seen.rows.unsqueeze(-1)
    rows = rows if rows.ndim == 2 else rows.unsqueeze(1)
    return keys < rows, keys == rows


ENCODINGS: dict[str, type[PositionalEncoding]] = {"stick-breaking": StickBreaking}
