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
from toeplens.lens.kit.trace import AttentionTrace, LayerTrace
from toeplens.utils import InputError, choose, invalid

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
        if layer.input_position_part is None:
            raise invalid("split", f"be 'mean' or 'ablate' for layer {layer.layer}", got="'input'")
        p = layer.input_position_part.to(inputs.dtype).expand_as(inputs)
        return p, p
    if split == "mean":
        if len(inputs) < 2:
            raise InputError("split must not be 'mean' with fewer than 2 sequences.")

        def mean_part(x: Tensor) -> Tensor:
            return torch.nan_to_num(position_means(x, layer.traced_lengths)[1]).expand_as(x)

        p = mean_part(inputs)
        return p, p if inputs is key_inputs else mean_part(key_inputs)
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
MAX_LOGITS = 1 << 19  # logits computed at once, but at least one query of one sequence


def known_key_part(layer: LayerTrace) -> Float[Tensor, "B G R d"] | None:
    """The part of the keys that comes from vectors added at the input; None if keys contain more position than that."""
    if layer.position_vectors is None or (layer.input_position_part is None and layer.key_inputs is layer.inputs):
        return None
    p = layer.position_vectors.to(layer.key_inputs.dtype).expand_as(layer.key_inputs)
    return layer.project_part(p, p)[1]


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
        raise invalid("batches", f"have at least {FOLDS} sequences of one length for position effects", len(q))
    fold = torch.arange(len(q), device=q.device) % FOLDS
    means = [_mean_keys(k, key_part, layer.present, fold == index) for index in range(FOLDS)]
    heads, length = q.shape[1:3]
    all_rows = torch.arange(length, device=q.device)
    sequences_per_step = max(1, MAX_LOGITS // (heads * length * (length if rows is None else rows.shape[1])))
    step = max(1, MAX_LOGITS // (heads * length))
    total = count = torch.zeros((), dtype=q.dtype, device=q.device)
    for query_fold in range(FOLDS):
        keys, reached = zip(*(means[(query_fold + other) % FOLDS] for other in (1, 2)), strict=True)
        for sequences in torch.nonzero(fold == query_fold).squeeze(1).split(sequences_per_step):
            for queries in (all_rows if rows is None else rows[sequences]).split(step, dim=-1):
                covariance, num_queries = _covariance(layer, q, keys, reached[0] & reached[1], sequences, queries)
                total, count = total + covariance, count + num_queries
    return total / count


def _covariance(
    layer: LayerTrace,
    q: Float[Tensor, "B H R d"],
    keys: Sequence[Float[Tensor, "1 G R d"]],
    reached: Bool[Tensor, "R"],
    sequences: Int[Tensor, "b"],
    queries: Int[Tensor, "*_b Q"],
) -> tuple[Float[Tensor, "H"], Int[Tensor, "H"]]:
    """The covariance of a query's logits with both ``keys`` over those that it sees at ``reached`` positions.

    Summed over some sequences' ``queries`` that see at least two keys, and the number of these.
    """
    present, index = layer.present[sequences], torch.arange(len(sequences), device=q.device)
    query_present = present[index[:, None], queries]  # padded queries see nothing
    visible = query_present[:, None, :, None] & present[:, None, None, :]
    if layer.causal:
        visible = visible & (torch.arange(q.shape[2], device=q.device) <= queries.unsqueeze(-1)).unsqueeze(-3)
    visible = visible & reached
    keys = [k.expand(len(sequences), -1, -1, -1) for k in keys]
    logits = [layer.call_attention(attention_logits, q, k, sequences, queries) for k in keys]
    for x in logits:
        visible = visible & x.isfinite()
    count = visible.sum(-1)
    weight = visible / count.clamp(min=1).to(q.dtype).unsqueeze(-1)
    values = [torch.where(visible, x, 0) for x in logits]
    first, second = (torch.where(visible, x - (x * weight).sum(-1, keepdim=True), 0) for x in values)
    covariance = (first * second * weight).sum(-1)
    return torch.where(count > 1, covariance, 0).sum((0, 2)), (count > 1).sum((0, 2))


def _mean_keys(
    k: Tensor, key_part: Tensor | None, present: Bool[Tensor, "B R"], fold: Bool[Tensor, "B"]
) -> tuple[Float[Tensor, "1 G R d"], Bool[Tensor, "R"]]:
    """The mean key of a fold at each position, and which positions at least one of its sequences reaches."""
    in_fold = (present & fold[:, None])[:, None, :, None]
    counts = in_fold.sum(0)  # [1, R, 1]
    if key_part is None:
        mean = torch.where(in_fold, k, 0).sum(0) / counts.clamp(min=1)
    else:
        content = torch.where(in_fold, k - key_part, 0).sum((0, 2)) / counts.sum().clamp(min=1)
        mean = content.unsqueeze(1) + torch.where(in_fold, key_part, 0).sum(0) / counts.clamp(min=1)
    return mean.unsqueeze(0), (counts > 0)[0, :, 0]


def to_float64(layer: LayerTrace) -> LayerTrace:
    if layer.q.dtype == torch.float64:
        return layer
    key_features = None if layer.key_features is None else layer.key_features.double()
    encoding = copy.deepcopy(layer.encoding).double()
    return replace(layer, q=layer.q.double(), k=layer.k.double(), key_features=key_features, encoding=encoding)
