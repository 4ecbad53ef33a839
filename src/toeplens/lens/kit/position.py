"""The position part of a layer's inputs and keys, and the variance of its effect on the logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.encodings import attention_logits
from toeplens.ground import InputError, choose, invalid
from toeplens.lens.kit.trace import AttentionTrace, LayerTrace

Split = Literal["mean", "input", "ablate"]  # how a layer's input is split into content and position


def position_parts(
    trace: AttentionTrace, layer: LayerTrace, split: Split
) -> tuple[Float[Tensor, "B R D"], Float[Tensor, "B R D"]]:
    """The position part p of the inputs of queries and of keys; the rest is content.

    Arguments
        split  ``input``: the vectors added to the token embeddings; exact, and known where the input itself is read.
               ``mean``: the mean over the trace's sequences at each position, minus the mean over all positions.
               ``ablate``: the difference that switching off the encoding in the whole model makes on the same tokens.
    """
    choose("split", split, get_args(Split))
    shared = layer.inputs is layer.key_inputs
    if split == "input":
        if layer.vectors is None:
            raise invalid("split", f"be 'mean' or 'ablate' for layer {layer.layer}", got="'input'")
        p = layer.vectors.to(layer.inputs.dtype).expand_as(layer.inputs)
        return p, p
    if split == "mean":
        if len(layer.inputs) < 2:
            raise InputError("split must not be 'mean' with fewer than 2 sequences.")
        p = _mean_part(layer.inputs, layer)
        return p, p if shared else _mean_part(layer.key_inputs, layer)
    bare = trace.without_position(layer.layer)
    p = layer.inputs - bare.inputs
    return p, p if shared else layer.key_inputs - bare.key_inputs


def _mean_part(x: Tensor, layer: LayerTrace) -> Tensor:
    _, p = position_means(x, layer.kept_lengths)
    return torch.nan_to_num(p).expand_as(x)


def position_means(
    x: Float[Tensor, "B N D"], lengths: Int[Tensor, "B"] | None = None
) -> tuple[Float[Tensor, "B N D"], Float[Tensor, "N D"]]:
    """Split x into content and position by the `mean` estimator (theory 1): p_i = E[x_i] - E[x], c_i = x_i - p_i.

    Arguments
        x        [B, N, D] one vector per sequence and position
        lengths  [B] number of tokens of each sequence, from the first position on (default: N)

    Returns the content [B, N, D] and the position part [N, D], on the device and in the dtype of ``x``; sums are
    in float64. Only positions within a sequence's length are counted. Later positions are split by the same p, and p_i
    is nan if no sequence reaches i. Raises `InputError` for a length outside 0 to N.
    """
    size = x.shape[1]
    if lengths is None:
        lengths = torch.full((len(x),), size, device=x.device)
    elif lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= size:
        raise invalid("lengths", f"be from 0 to {size}", lengths.tolist())
    counted = torch.arange(size, device=x.device) < lengths.to(x.device).unsqueeze(-1)
    sums = torch.where(counted.unsqueeze(-1), x, 0).sum(0, dtype=torch.float64)
    counts = counted.sum(0)
    p = (sums / counts.unsqueeze(-1) - sums.sum(0) / counts.sum()).to(x.dtype)
    return x - p, p


FOLDS = 3  # one with the query, and one for each of two mean keys
AT_ONCE = 1 << 19  # logits computed at once, but at least one query of one sequence


def known_key_part(layer: LayerTrace) -> Float[Tensor, "B G R d"] | None:
    """The part of the keys that comes from vectors added at the input; None if keys contain more position than that."""
    if layer.added is None or (layer.vectors is None and layer.key_inputs is layer.inputs):
        return None
    p = layer.added.to(layer.key_inputs.dtype).expand_as(layer.key_inputs)
    return layer.part(p, p)[1]


def effect_variance(
    layer: LayerTrace,
    q: Float[Tensor, "B H R d"],
    k: Float[Tensor, "B G R d"],
    key_part: Float[Tensor, "B G R d"] | None,
    rows: Int[Tensor, "B _"] | None,
) -> Float[Tensor, "H"]:
    """Var(P) of a layer with these queries and keys, differentiable in them (see `position_effect`).

    Arguments
        q, k      as projected, at all positions
        key_part  the position part of k, if known; None for the mean key at each position
        rows      [B, Q] the queries that count (default: all)
    """
    if len(q) < FOLDS:
        raise invalid("layers", f"have a batch of at least {FOLDS} sequences for position effects", len(q))
    fold = torch.arange(len(q), device=q.device) % FOLDS
    means = [_mean_keys(k, key_part, layer.present, fold == one) for one in range(FOLDS)]
    total = count = torch.zeros((), dtype=q.dtype, device=q.device)
    for own in range(FOLDS):
        (first, reached), (second, also) = (means[(own + 1) % FOLDS], means[(own + 2) % FOLDS])
        for members, at in tiles(q, torch.nonzero(fold == own).squeeze(1), rows):
            seen, effects = None, []
            for mean in (first, second):
                logits, seen = member_logits(layer, q, mean.expand(len(members), -1, -1, -1), members, at)
                effects.append(logits)
            assert seen is not None
            seen = seen & (reached & also)
            counted, weight = evenly(seen, q.dtype)
            a, b = (centred(x, seen, weight) for x in effects)
            total = total + torch.where(counted, (a * b * weight).sum(-1), 0).sum((0, 2))
            count = count + counted.sum((0, 2))
    return total / count


def tiles(
    q: Float[Tensor, "B H R d"], members: Int[Tensor, "b"], rows: Int[Tensor, "B Q"] | None
) -> Iterator[tuple[Int[Tensor, "_b"], Int[Tensor, "*_b2 _Q"]]]:
    """Some sequences and some of their queries, [Q] equal for all or [b, Q], with at most `AT_ONCE` logits."""
    heads, length = q.shape[1:3]
    queries = length if rows is None else rows.shape[1]
    for some in members.split(max(1, AT_ONCE // (heads * queries * length))):
        own = torch.arange(length, device=q.device) if rows is None else rows[some]
        for part in own.split(max(1, AT_ONCE // (heads * length)), dim=-1):
            yield some, part


def _mean_keys(
    k: Tensor, key_part: Tensor | None, present: Bool[Tensor, "B R"], fold: Bool[Tensor, "B"]
) -> tuple[Float[Tensor, "G R d"], Bool[Tensor, "R"]]:
    """The mean key of a fold at each position, and which positions at least one of its sequences reaches."""
    there = (present & fold[:, None])[:, None, :, None]
    counts = there.sum(0)  # [1, R, 1]
    if key_part is None:
        mean = torch.where(there, k, 0).sum(0) / counts.clamp(min=1)
    else:
        content = torch.where(there, k - key_part, 0).sum((0, 2)) / counts.sum().clamp(min=1)
        mean = content.unsqueeze(1) + torch.where(there, key_part, 0).sum(0) / counts.clamp(min=1)
    return mean, (counts > 0)[0, :, 0]


def member_logits(
    layer: LayerTrace, q: Tensor, k: Float[Tensor, "b G R d"], members: Int[Tensor, "b"], rows: Int[Tensor, "*_b Q"]
) -> tuple[Float[Tensor, "b H Q R"], Bool[Tensor, "b 1 Q R"]]:
    """The logits of some sequences' queries with these keys, and the visibility mask (padded queries see nothing)."""
    there = layer.present[members]
    own = there[torch.arange(len(members), device=q.device)[:, None], rows]
    seen = own[:, None, :, None] & there[:, None, None, :]
    if layer.causal:
        past = torch.arange(q.shape[2], device=q.device) <= rows.unsqueeze(-1)
        seen = seen & (past if past.ndim == 2 else past.unsqueeze(1))
    return layer.formed(attention_logits, q, k, members, rows), seen


def evenly(
    seen: Bool[Tensor, "b _H Q R"], dtype: torch.dtype
) -> tuple[Bool[Tensor, "b _H Q"], Float[Tensor, "b _H Q R"]]:
    """The queries that see at least two keys, and the weights of a mean over the keys that each sees."""
    count = seen.sum(-1)
    return count > 1, seen / count.clamp(min=1).to(dtype).unsqueeze(-1)


def centred(logits: Tensor, seen: Tensor, weight: Tensor) -> Tensor:
    values = torch.where(seen, logits, 0)
    return torch.where(seen, values - (values * weight).sum(-1, keepdim=True), 0)


def in_float64(layer: LayerTrace) -> LayerTrace:
    if layer.q.dtype == torch.float64:
        return layer
    notes = None if layer.notes is None else layer.notes.double()
    encoding = copy.deepcopy(layer.encoding).double()
    return replace(layer, q=layer.q.double(), k=layer.k.double(), notes=notes, encoding=encoding)
