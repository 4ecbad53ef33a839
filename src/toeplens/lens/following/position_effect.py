"""The positional main effect of a head: how its logits vary with where a key stands, whatever that key says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.ground import InputError
from toeplens.lens.kit.position import (
    centred,
    effect_variance,
    evenly,
    in_float64,
    known_key_part,
    member_logits,
    tiles,
)
from toeplens.lens.kit.trace import LayerTrace

_NOTHING = 1e-12  # of the mean square of the logits: a variance below it is rounding


@dataclass(frozen=True)
class PositionEffect:
    """The variance of the positional main effect P of every head (measures, two-way analysis).

    variance     [L, H] mean over queries of Var_j(P_i(j)), in squared logits; an unbiased estimate, so that where there
                 is no effect it may fall below 0
    total        [L, H] mean over the same queries of the variance of their own logits over the keys they see
    share        [L, H] variance / total; NaN where the logits do not vary
    exact        [L] whether the position part of the keys was known exactly (else it is estimated by position)
    conditional  [L] whether the encoding reads the content of other tokens: P then holds for each sequence as it is
    sequences    how many sequences stand behind it
    """

    variance: Float[np.ndarray, "L H"]
    total: Float[np.ndarray, "L H"]
    share: Float[np.ndarray, "L H"]
    exact: tuple[bool, ...]
    conditional: tuple[bool, ...]
    sequences: int


@torch.no_grad()
def position_effect(
    layers: Iterable[LayerTrace], *, queries: Mapping[int, Int[Tensor, "B _"]] | None = None
) -> PositionEffect:
    """The variance of each head's positional main effect, Var_j(P_i(j)), mean over sequences and queries.

    P_i(j) is the logit of query i with the MEAN key content standing at position j, less its mean over the keys that
    the query sees. A rotation turns the mean key to j, a bias takes j; where position is added to the residual stream,
    the key at j is the mean content and the position part of the keys at j. In the first layer (and wherever keys come
    from the raw embeddings) that part is known: the vectors added at the input, through W_K, norms held. Deeper it is
    the mean key at j over the sequences (the `mean` estimator, theory 1).

    A mean over B sequences still holds content, which would add about Var(content) / B to the variance. The sequences
    are therefore dealt into three folds, and Var(P) is the covariance of the two P that the mean keys of the two folds
    without the query give: no content is in both, so that the estimate is unbiased.

    Queries that see two keys or more weigh the same. Nonlinear encodings (CoPE, DAPE) get the logit at the mean key,
    not the mean logit; factors after the softmax (URPE) are no part of P. Works in float64.

    Arguments
        layers   an `AttentionTrace`, or its layers, in order, all of one batch of 3 sequences or more
        queries  for some layers the queries that count, [B, Q] places of each sequence (one that is read out, say); all
                 unless given
    """
    effects, totals, exact, conditional, count = [], [], [], [], 0
    for layer in layers:
        wide = in_float64(layer)
        part = known_key_part(wide)
        rows = None if queries is None else queries.get(layer.layer)
        effects.append(effect_variance(wide, wide.q, wide.k, part, rows))
        totals.append(_own_variance(wide, rows))
        exact.append(part is not None)
        conditional.append(layer.encoding.data_dependent)
        count = len(layer.q)
    if not effects:
        raise InputError("layers must have at least one entry, got none.")
    variance, total, square = (
        torch.stack(x).cpu().numpy() for x in (effects, [t[0] for t in totals], [t[1] for t in totals])
    )
    varies = total > _NOTHING * square
    share = np.divide(variance, total, out=np.full_like(variance, np.nan), where=varies)
    return PositionEffect(variance, total, share, tuple(exact), tuple(conditional), count)


def _own_variance(layer: LayerTrace, rows: Tensor | None) -> tuple[Float[Tensor, "H"], Float[Tensor, "H"]]:
    """Mean over the queries of the variance of their own logits, and of their mean square."""
    variance = square = count = torch.zeros((), dtype=layer.q.dtype, device=layer.q.device)
    for members, at in tiles(layer.q, torch.arange(len(layer.q), device=layer.q.device), rows):
        logits, seen = member_logits(layer, layer.q, layer.k[members], members, at)
        seen = seen & logits.isfinite()
        counted, weight = evenly(seen, logits.dtype)
        values = torch.where(seen, logits, 0)
        variance = variance + ((centred(logits, seen, weight) ** 2 * weight).sum(-1) * counted).sum((0, 2))
        square = square + ((values**2 * weight).sum(-1) * counted).sum((0, 2))
        count = count + counted.sum((0, 2))
    return variance / count, square / count
