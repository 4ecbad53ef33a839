"""What position alone and what content alone give of a head's logits, each without the sequence that is looked at."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.lens.kit.pieces import BIAS, Batch, Pieces, rest
from toeplens.lens.kit.shares import Shares, shares_of, spread
from toeplens.lens.kit.terms import Common, Whole, Written, sum_of

KINDS = ("position", "content", "coupled")


def kinds_of(pieces: Pieces) -> Shares:
    """Shares of `KINDS` in the logits, [H, 3]; NaN with one sequence, and where the mean of the rotation is not known.

    With mean query and key by position, position is what the means give at their places, and the bias; content is what
    queries and keys without their positions' means give at the mean rotation; coupled is the rest. A mean over B
    sequences holds a B-th of each of them, which would pass for position (by 1 / B^2 of content) and for coupled (by
    2 / B). The means are therefore those of the other sequences: of independent queries and keys no share is then
    biased. Where queries and keys of one sequence are correlated (those of one token are), position holds 1 / (B - 1)
    of what that adds to the mean logits.

    The pairs are those at positions that two sequences or more reach, so that there are others.
    """
    heads = pieces.q.shape[1]
    if len(pieces.q) < 2:
        unknown = pieces.q.new_full((heads, len(KINDS)), torch.nan)
        return Shares(unknown, unknown)
    pieces = _reached_twice(pieces)
    every, positions, contents = [], [], []
    energy = pieces.q.new_zeros(heads)
    for sequences, batch in pieces.batches():
        whole = batch.whole()
        own = whole.products(whole.q, whole.k)
        fixed = [whole.known(term) for term in whole.fixed]
        energy = energy + own.inner.abs().sum(-1) + sum(term.inner.abs() for term in fixed)
        every.append(sum_of([own.summed(), *fixed]))
        q, k, position_q, position_k = _split(pieces, sequences, whole)
        positions.append(_position(batch, whole, position_q, position_k))
        if (rotation := pieces.rotation) is not None:
            q = rotation.turn_by_mean(q, pieces.layer)
        contents.append(whole.products(q * pieces.layer.scale, k).summed())
    total = sum_of(every)
    variances = spread(total, total, pieces.pairs)
    position, content = (spread(sum_of(found), total, pieces.pairs) for found in (positions, contents))
    if pieces.rotation is None and pieces.layer.encoding.overrides("rotate"):
        content = content[0] * torch.nan, content[1] * torch.nan
    coupled = variances[0] - position[0] - content[0], variances[1] - position[1] - content[1]
    return shares_of([position, content, coupled], variances, energy)


def _reached_twice(pieces: Pieces) -> Pieces:
    """The same with the longest sequence as long as the next."""
    layer, lengths = pieces.layer, pieces.layer.lengths
    if lengths is None:
        return pieces
    longest, second = lengths.topk(2).values.tolist()
    if longest == second:
        return pieces
    nothing = torch.zeros_like(layer.inputs), torch.zeros_like(layer.key_inputs)
    return Pieces(replace(layer, lengths=lengths.clamp(max=second)), *nothing)


def _split(pieces: Pieces, sequences: slice, whole: Whole) -> tuple[Float[Tensor, "B H N d"], ...]:
    """Queries and keys as content, and as position: the others' means at each place, and what they leave of the own."""
    others = (pieces.present.sum(0) - pieces.present[sequences].long()).double()
    at, all_places = others[:, None, :, None], others.sum(1)[:, None, None, None]
    contents, means = [], []
    for x in (pieces.q, pieces.k):
        rest_of_them = x.sum(0) - x[sequences]
        mean = rest_of_them / at.clamp(min=1)
        contents.append((x[sequences] - mean + rest_of_them.sum(2, keepdim=True) / all_places) * whole.there)
        means.append(mean * whole.there)
    return *contents, *means


def _position(batch: Batch, whole: Whole, mean_q: Float[Tensor, "B H N d"], mean_k: Float[Tensor, "B H N d"]) -> Common:
    q, k = batch.layer.turn(mean_q, mean_k)
    found = whole.products(q * batch.layer.scale, k).summed()
    if batch.layer.encoding.overrides("transform_logits"):
        return found + whole.known(Written(rest(batch.layer, mean_q, mean_k)))
    return found + whole.known(batch.fixed[BIAS]) if BIAS in batch.fixed else found
