"""The position part of a layer's inputs and keys, and how logits vary with a key's position whatever its content."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
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
_NOTHING = 1e-12  # variances below this part of the logits' mean square count as rounding errors


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

    ``key_part`` is the position part of k, if known; ``rows`` [B, Q] are the queries that count (default: all).
    """
    if len(q) < FOLDS:
        raise invalid("layers", f"have a batch of at least {FOLDS} sequences for position effects", len(q))
    fold = torch.arange(len(q), device=q.device) % FOLDS
    means = [_mean_keys(k, key_part, layer.present, fold == one) for one in range(FOLDS)]
    total = count = torch.zeros((), dtype=q.dtype, device=q.device)
    for own in range(FOLDS):
        (first, reached), (second, also) = (means[(own + 1) % FOLDS], means[(own + 2) % FOLDS])
        members = torch.nonzero(fold == own).squeeze(1)
        for covariance, _, number in _sums(layer, q, (first, second), members, rows, reached & also):
            total, count = total + covariance, count + number
    return total / count


def _sums(
    layer: LayerTrace,
    q: Float[Tensor, "B H R d"],
    keys: Sequence[Float[Tensor, "_B G R d"]],
    members: Int[Tensor, "b"],
    rows: Int[Tensor, "B Q"] | None,
    reached: Bool[Tensor, "R"] | None = None,
) -> Iterator[tuple[Float[Tensor, "H"], Float[Tensor, "H"], Int[Tensor, "H"]]]:
    """Sums over some sequences' queries that see at least two keys, and their number; at most `AT_ONCE` logits at once.

    They are the covariance, over the keys that a query sees, of its logits with the first and with the last of ``keys``
    (one for all sequences, or one each), and the mean square of the last. Only the keys at ``reached`` positions count.
    """
    heads, length = q.shape[1:3]
    every = torch.arange(length, device=q.device)
    asked = length if rows is None else rows.shape[1]
    for some in members.split(max(1, AT_ONCE // (heads * asked * length))):
        for at in (every if rows is None else rows[some]).split(max(1, AT_ONCE // (heads * length)), dim=-1):
            there = layer.present[some]
            own = there[torch.arange(len(some), device=q.device)[:, None], at]  # padded queries see nothing
            seen = own[:, None, :, None] & there[:, None, None, :]
            if layer.causal:
                past = every <= at.unsqueeze(-1)
                seen = seen & (past if past.ndim == 2 else past.unsqueeze(1))
            seen = seen if reached is None else seen & reached
            logits = [
                layer.formed(attention_logits, q, k[some] if len(k) > 1 else k.expand(len(some), -1, -1, -1), some, at)
                for k in keys
            ]
            for x in logits:
                seen = seen & x.isfinite()
            count = seen.sum(-1)
            weight = seen / count.clamp(min=1).to(q.dtype).unsqueeze(-1)
            values = [torch.where(seen, x, 0) for x in logits]
            centred = [torch.where(seen, x - (x * weight).sum(-1, keepdim=True), 0) for x in values]
            covariance, square = (centred[0] * centred[-1] * weight).sum(-1), (values[-1] ** 2 * weight).sum(-1)
            covariance, square = (torch.where(count > 1, x, 0).sum((0, 2)) for x in (covariance, square))
            yield covariance, square, (count > 1).sum((0, 2))


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
    """The variance of each head's positional main effect, Var_j(P_i(j)), averaged over sequences and queries (float64).

    P_i(j) is the logit of query i with the MEAN key content placed at position j, minus its mean over the keys that
    the query sees. A rotation rotates the mean key to j, a bias is taken at j. If position is added to the residual
    stream, the key at j is the mean content plus the position part of the keys at j. In the first layer (and wherever
    keys come from the raw embeddings) that part is known: the vectors added at the input, passed through W_K with
    fixed norms. In deeper layers it is the mean key at j over the sequences (the `mean` estimator, theory 1). Such a
    mean still contains content. So the sequences are split into three folds, and Var(P) is the covariance of the two P
    computed from the mean keys of the two folds without the query. They share no content: the estimate is unbiased.

    Queries that see at least two keys have equal weights. Nonlinear encodings (CoPE, DAPE) are evaluated at the mean
    key, which is not the mean logit; factors after the softmax (URPE) are ignored.

    Arguments
        layers   an `AttentionTrace`, or its layers, in order, all from one batch of at least 3 sequences
        queries  for some layers the queries that count, as positions [B, Q] in each sequence (such as the one whose
                 output is read); default: all
    """
    found, exact, conditional, count = [], [], [], 0
    for layer in layers:
        wide = in_float64(layer)
        part = known_key_part(wide)
        rows = None if queries is None else queries.get(layer.layer)
        effect = effect_variance(wide, wide.q, wide.k, part, rows)
        own = _sums(wide, wide.q, (wide.k,), torch.arange(len(wide.q), device=wide.q.device), rows)
        total, square, number = (torch.stack(each).sum(0) for each in zip(*own, strict=True))
        found.append(torch.stack((effect, total / number, square / number)))
        exact.append(part is not None)
        conditional.append(layer.encoding.data_dependent)
        count = len(layer.q)
    if not found:
        raise InputError("layers must have at least one entry, got none.")
    variance, total, square = torch.stack(found, dim=1).cpu().numpy()
    share = np.divide(variance, total, out=np.full_like(variance, np.nan), where=total > _NOTHING * square)
    return PositionEffect(variance, total, share, tuple(exact), tuple(conditional), count)
