"""The position part of a layer's inputs and keys, and how logits vary with a key's position whatever its content."""

from __future__ import annotations

import copy
from collections.abc import Sequence
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
    inputs, key_inputs = layer.inputs, layer.key_inputs
    if split == "input":
        if layer.vectors is None:
            raise invalid("split", f"be 'mean' or 'ablate' for layer {layer.layer}", got="'input'")
        p = layer.vectors.to(inputs.dtype).expand_as(inputs)
        return p, p
    if split == "mean":
        if len(inputs) < 2:
            raise InputError("split must not be 'mean' with fewer than 2 sequences.")

        def part(x: Tensor) -> Tensor:
            return torch.nan_to_num(position_means(x, layer.kept_lengths)[1]).expand_as(x)

        p = part(inputs)
        return p, p if inputs is key_inputs else part(key_inputs)
    bare = trace.without_position(layer.layer)
    p = inputs - bare.inputs
    return p, p if inputs is key_inputs else key_inputs - bare.key_inputs


def position_means(
    x: Float[Tensor, "B N D"], lengths: Int[Tensor, "B"] | None = None
) -> tuple[Float[Tensor, "B N D"], Float[Tensor, "N D"]]:
    """Split x into content and position by the `mean` estimator (theory 1): p_i = E[x_i] - E[x], c_i = x_i - p_i.

    Returns the content and the position part in the dtype of ``x``; sums are in float64. Only positions within a
    sequence's length (default: N) are counted. Later positions are split by the same p, and p_i is nan if no sequence
    reaches i. Raises `InputError` for a length outside 0 to N.
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


# ---- the positional main effect --------------------------------------------------------------------------------------

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
    """Var_j(P_i(j)) of each head, a mean over sequences and queries, differentiable in the queries and keys.

    P_i(j) is the logit of query i with the MEAN key content placed at position j, minus its mean over the keys that
    the query sees. A rotation rotates the mean key to j, a bias is taken at j. If position is added to the residual
    stream, the key at j is the mean content plus the position part of the keys at j. In the first layer (and wherever
    keys come from the raw embeddings) that part is known: the vectors added at the input, passed through W_K with
    fixed norms (`known_key_part`). In deeper layers it is the mean key at j over the sequences (the `mean` estimator,
    theory 1). Such a mean still contains content. So the sequences are split into three folds, and Var(P) is the
    covariance of the two P computed from the mean keys of the two folds without the query. They share no content: the
    estimate is unbiased, and can be negative if there is no effect.

    Queries that see at least two keys have equal weights. Nonlinear encodings (CoPE, DAPE) are evaluated at the mean
    key, which is not the mean logit; factors after the softmax (URPE) are ignored.

    Arguments
        q, k      queries and keys, in place of the layer's own
        key_part  the position part of k, if known
        rows      [B, Q] the queries that count, as positions in each sequence (default: all)
    """
    if len(q) < FOLDS:
        raise invalid("layers", f"have a batch of at least {FOLDS} sequences for position effects", len(q))
    fold = torch.arange(len(q), device=q.device) % FOLDS
    means = [_mean_keys(k, key_part, layer.present, fold == one) for one in range(FOLDS)]
    heads, length = q.shape[1:3]
    every = torch.arange(length, device=q.device)
    at_once = max(1, AT_ONCE // (heads * length * (length if rows is None else rows.shape[1])))
    total = count = torch.zeros((), dtype=q.dtype, device=q.device)
    for own in range(FOLDS):
        keys, reached = zip(*(means[(own + step) % FOLDS] for step in (1, 2)), strict=True)
        for some in torch.nonzero(fold == own).squeeze(1).split(at_once):
            for at in (every if rows is None else rows[some]).split(max(1, AT_ONCE // (heads * length)), dim=-1):
                covariance, number = _covariance(layer, q, keys, reached[0] & reached[1], some, at)
                total, count = total + covariance, count + number
    return total / count


def _covariance(
    layer: LayerTrace,
    q: Float[Tensor, "B H R d"],
    keys: Sequence[Float[Tensor, "1 G R d"]],
    reached: Bool[Tensor, "R"],
    some: Int[Tensor, "b"],
    at: Int[Tensor, "*_b Q"],
) -> tuple[Float[Tensor, "H"], Int[Tensor, "H"]]:
    """The covariance of a query's logits with both ``keys`` over those that it sees at ``reached`` positions.

    Summed over some sequences' queries ``at`` these positions that see at least two keys, and the number of these.
    """
    there = layer.present[some]
    own = there[torch.arange(len(some), device=q.device)[:, None], at]  # padded queries see nothing
    seen = own[:, None, :, None] & there[:, None, None, :]
    if layer.causal:
        seen = seen & (torch.arange(q.shape[2], device=q.device) <= at.unsqueeze(-1)).unsqueeze(-3)
    seen = seen & reached
    logits = [layer.formed(attention_logits, q, k.expand(len(some), -1, -1, -1), some, at) for k in keys]
    for x in logits:
        seen = seen & x.isfinite()
    count = seen.sum(-1)
    weight = seen / count.clamp(min=1).to(q.dtype).unsqueeze(-1)
    values = [torch.where(seen, x, 0) for x in logits]
    first, second = (torch.where(seen, x - (x * weight).sum(-1, keepdim=True), 0) for x in values)
    covariance = (first * second * weight).sum(-1)
    return torch.where(count > 1, covariance, 0).sum((0, 2)), (count > 1).sum((0, 2))


def _mean_keys(
    k: Tensor, key_part: Tensor | None, present: Bool[Tensor, "B R"], fold: Bool[Tensor, "B"]
) -> tuple[Float[Tensor, "1 G R d"], Bool[Tensor, "R"]]:
    """The mean key of a fold at each position, and which positions at least one of its sequences reaches."""
    there = (present & fold[:, None])[:, None, :, None]
    counts = there.sum(0)  # [1, R, 1]
    if key_part is None:
        mean = torch.where(there, k, 0).sum(0) / counts.clamp(min=1)
    else:
        content = torch.where(there, k - key_part, 0).sum((0, 2)) / counts.sum().clamp(min=1)
        mean = content.unsqueeze(1) + torch.where(there, key_part, 0).sum(0) / counts.clamp(min=1)
    return mean.unsqueeze(0), (counts > 0)[0, :, 0]


def in_float64(layer: LayerTrace) -> LayerTrace:
    if layer.q.dtype == torch.float64:
        return layer
    notes = None if layer.notes is None else layer.notes.double()
    encoding = copy.deepcopy(layer.encoding).double()
    return replace(layer, q=layer.q.double(), k=layer.k.double(), notes=notes, encoding=encoding)
