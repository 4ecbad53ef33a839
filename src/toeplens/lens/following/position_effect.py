"""The positional main effect of a head: how its logits vary with a key's position, regardless of its content."""

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

_NOTHING = 1e-12  # variances below this part of the logits' mean square count as rounding errors


@dataclass(frozen=True)
class PositionEffect:
    """The variance of the positional main effect P of every head (see the two-way analysis of variance).

    variance     [L, H] mean over queries of Var_j(P_i(j)), in squared logits; an unbiased estimate, so it can be
                 negative if there is no effect
    total        [L, H] mean over the same queries of the variance of their actual logits over the keys they see
    share        [L, H] variance / total; NaN if the logits do not vary
    exact        [L] whether the position part of the keys is known exactly (otherwise it is estimated by position)
    conditional  [L] whether the encoding reads the content of other tokens: P is then conditional on each sequence
    sequences    number of sequences used
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
    """The variance of each head's positional main effect, Var_j(P_i(j)), averaged over sequences and queries.

    P_i(j) is the logit of query i with the MEAN key content placed at position j, minus its mean over the keys that
    the query sees. A rotation rotates the mean key to j, a bias is taken at j. If position is added to the residual
    stream, the key at j is the mean content plus the position part of the keys at j. In the first layer (and wherever
    keys come from the raw embeddings) that part is known: the vectors added at the input, passed through W_K with
    fixed norms. In deeper layers it is the mean key at j over the sequences (the `mean` estimator, theory 1).

    A mean over B sequences still contains content, which would add about Var(content) / B to the variance. So the
    sequences are split into three folds, and Var(P) is the covariance of the two P computed from the mean keys of the
    two folds without the query. They share no content, so the estimate is unbiased.

    Queries that see at least two keys have equal weights. Nonlinear encodings (CoPE, DAPE) are evaluated at the mean
    key, which is not the mean logit; factors after the softmax (URPE) are ignored. Computes in float64.

    Arguments
        layers   an `AttentionTrace`, or its layers, in order, all from one batch of at least 3 sequences
        queries  for some layers the queries that count, as positions [B, Q] in each sequence (such as the one whose
                 output is read); default: all
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
    """Means over the queries of the variance and of the mean square of their actual logits."""
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
