"""Attention patterns: by offset, and known head types; summed over blocks of queries, for any mask."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.lens.kit.toeplitz import ROUNDING, ToeplitzProfile, profile_of, sequence_ends
from toeplens.utils import InputError, invalid
from toeplens.utils.options import PositiveInt, check_value
from toeplens.utils.renamed import renamed

_MAX_LOGITS = 2**20  # logits processed at once; a few megabytes are fastest
_SOFTMAX_ROUNDINGS = 32  # units in the last place of an exponential
_COUNT_OF_SUM = {  # sums over queries, and the number of queries by which each is divided
    "entropy": "entropy_queries",
    "first": "first_queries",
    "kept": "queries",
    "induction": "eligible",
    "duplicate": "duplicate_queries",
}


@dataclass(frozen=True)
class Patterns:
    """The attention pattern of each head, over all queries that see a key. All arrays are [H] except the profile.

    Values are NaN where nothing counts. For cross-attention only ``entropy``, ``first`` and ``sink`` are defined.

    toeplitz           share of the logits' energy that depends only on the offset, over the visible pairs of all
                       sequences: ``share`` of `toeplens.lens.kit.toeplitz.ToeplitzProfile`
    toeplitz_variance  share of the logits' variance explained by the offset: ``variance_explained`` there
    distance           mean |i - j| of query and key, weighted by attention, in tokens
    entropy            mean of H(w) / log(number of visible keys) over the queries that see at least two keys, with w
                       the normalized weights on the keys: 0 for one key, 1 for uniform attention. Queries without any
                       weight on keys are left out
    first              mean weight on key 0, over all queries that see a key except query 0; with cross-attention over
                       all queries
    sink               mean over queries of 1 - sum of the weights on keys: the weight on a sink; otherwise rounding
    previous           mean weight on key i - 1, over the queries i that see it
    current            mean weight on key i, over the queries i that see it
    next               mean weight on key i + 1, over the queries i that see it
    induction          summed weight on the visible keys j that follow another copy of the query's token: the token at
                       j - 1 equals the one at i, and j - 1 is not i (so it is earlier if attention is causal; j may be
                       i); mean over the queries that see such a key (prefix matching, Olsson et al. 2022)
    duplicate          summed weight on the visible keys j != i with the query's token; mean over the queries that see
                       such a key (duplicate-token heads, Wang et al. 2022)
    profile            [H, P] mean weight by distance |i - j|: at 0, 1, 2-3, 4-7, 8-15, ...; sums to 1 - sink.
                       [H, 0] for cross-attention
    eligible           number of queries behind ``induction``
    """

    toeplitz: Float[np.ndarray, "H"]
    toeplitz_variance: Float[np.ndarray, "H"]
    distance: Float[np.ndarray, "H"]
    entropy: Float[np.ndarray, "H"]
    first: Float[np.ndarray, "H"]
    sink: Float[np.ndarray, "H"]
    previous: Float[np.ndarray, "H"]
    current: Float[np.ndarray, "H"]
    next: Float[np.ndarray, "H"]
    induction: Float[np.ndarray, "H"]
    duplicate: Float[np.ndarray, "H"]
    profile: Float[np.ndarray, "H P"]
    eligible: Int[np.ndarray, "H"]


class PatternSums:
    """Accumulates sums over queries, from which `Patterns` follow; memory is linear in queries and keys.

    Arguments
        heads    number of heads H
        queries  number of tokens in the queries' sequence, Nq
        keys     number of tokens in the keys' sequence, Nk; equals Nq unless ``cross``
        tokens   [S, N] token ids of all sequences that will be added, for ``induction`` and ``duplicate``
        cross    cross-attention: queries and keys come from different sequences, so there are no offsets
        profile  profile of the logits over all sequences, [H, D], if known; it is then not accumulated
    """

    def __init__(
        self,
        *,
        heads: int,
        queries: int,
        keys: int,
        tokens: Int[Tensor, "S N"] | None = None,
        cross: bool = False,
        profile: ToeplitzProfile | None = None,
    ) -> None:
        if min(heads, queries, keys) < 1:
            raise invalid("heads, queries and keys", "be at least 1", got=f"{heads}, {queries} and {keys}")
        if not cross and queries != keys:
            raise invalid("keys", f"be {queries}, as many as queries, in self-attention", keys)
        if tokens is not None and (cross or tokens.ndim != 2 or tokens.shape[1] != queries):
            raise invalid("tokens", f"have shape [S, {queries}], in self-attention only", tokens)
        self.heads, self.queries, self.keys, self.tokens, self.cross = heads, queries, keys, tokens, cross
        names = ("energy", *_COUNT_OF_SUM, *_COUNT_OF_SUM.values())
        self._totals = torch.zeros(len(names), heads, dtype=torch.float64)
        self._sums = dict(zip(names, self._totals, strict=True))  # views
        self._logits, self._weights, self._counts = torch.zeros(3, heads, 2 * keys - 1, dtype=torch.float64)
        self._has_profile = profile is not None
        if profile is not None:
            offsets, counts = profile.offsets.cpu() + keys - 1, profile.counts.double().cpu()
            self._counts[:, offsets] = counts
            self._logits[:, offsets] = profile.diagonal_means.nan_to_num().cpu() * counts
            self._sums["energy"] += profile.total_energy.cpu()

    @torch.no_grad()
    def add(
        self,
        rows: Int[Tensor, "R"],
        logits: Float[Tensor, "B H R K"],
        weights: Float[Tensor, "B H R K"],
        sequences: slice = slice(None),
        start: int = 0,
        visible: Bool[Tensor, "_B _H R K"] | None = None,
    ) -> None:
        """Add some queries of some sequences, each query once; the order does not matter, consecutive rows are fast.

        Computes in float64, weights in their own dtype but at least float32.

        Arguments
            rows       [R] the queries, counted from 0
            logits     [B, H, R, K] for K consecutive keys from ``start`` on, which must include all keys that these
                       queries see; -inf where a key is not visible
            weights    [B, H, R, K] on the keys, without a sink; weights on keys that are not visible are ignored,
                       and those of a query that sees no key may be NaN
            sequences  which rows of ``tokens`` the B sequences are
            visible    which keys a query sees, for all sequences and heads or for each (default: those with logits
                       above -inf). If passed, weights on the other keys must be 0

        Raises `InputError` for shapes that do not fit, and numbers that are not finite.
        """
        tokens = None if self.tokens is None else self.tokens[sequences].to(logits.device)
        expected = (logits.shape[0] if tokens is None else len(tokens), self.heads, len(rows), logits.shape[-1])
        if not 0 <= start < start + logits.shape[-1] <= self.keys:
            raise invalid("logits", f"end at key {self.keys} at most", start + logits.shape[-1])
        if logits.shape != expected or weights.shape != expected:
            shapes = f"{list(logits.shape)} and {list(weights.shape)}"
            raise invalid("logits and weights", f"have shape {list(expected)}", got=shapes)
        if len(rows) and (rows.min() < 0 or rows.max() >= self.queries):
            raise invalid("rows", f"be from 0 to {self.queries - 1}", got=f"{int(rows.min())} to {int(rows.max())}")
        visible = None if visible is None else visible.expand(expected[0], -1, -1, -1)
        for batch, heads, row_slice in _tiles(rows, *expected[:3], expected[3]):
            tile = (batch, heads, row_slice)
            tile_tokens = None if tokens is None else tokens[batch]
            mask_heads = slice(None) if visible is None or visible.shape[1] == 1 else heads
            mask = None if visible is None else visible[batch, mask_heads, row_slice]
            tile_rows = rows[row_slice].to(logits.device)
            self._add(heads, tile_rows, logits[tile], weights[tile], mask, tile_tokens, start)
        if not self._totals.isfinite().all():
            raise InputError("logits and weights must be finite where keys are visible.")

    def result(self) -> Patterns:
        """The patterns of everything added so far."""
        sums = {name: x.numpy() for name, x in self._sums.items()}
        means = {name: sums[name] / _divisor(sums[count]) for name, count in _COUNT_OF_SUM.items()}
        undefined = np.full(self.heads, np.nan)
        shares = dict.fromkeys(("toeplitz", "toeplitz_variance", "distance", "previous", "current", "next"), undefined)
        by_distance = np.empty((self.heads, 0))
        if not self.cross:
            counts, weights = self._counts.numpy(), self._weights.numpy()
            distances = np.abs(np.arange(1 - self.keys, self.keys))
            bins = np.frexp(distances)[1]  # 0; 1; 2 and 3; 4 to 7; ..
            by_distance = np.stack([np.bincount(bins, row) for row in weights]) / _divisor(sums["queries"])[:, None]
            energy, offsets = self._sums["energy"], torch.arange(1 - self.keys, self.keys)
            profile = profile_of(offsets, self._counts, self._logits, energy, ROUNDING * energy)
            shares = {"toeplitz": profile.share.numpy(), "toeplitz_variance": profile.variance_explained.numpy()}
            shares["distance"] = weights @ distances / _divisor(weights.sum(-1))
            for name, offset in (("previous", 1), ("current", 0), ("next", -1)):
                at = self.keys - 1 + offset
                shares[name] = weights[:, at] / _divisor(counts[:, at]) if self.keys > 1 or not offset else undefined
        return Patterns(
            **shares,
            sink=1 - means.pop("kept"),
            **means,
            profile=by_distance,
            eligible=sums["eligible"].astype(int),
        )

    def logits_by_offset(self) -> tuple[Float[np.ndarray, "H D"], Float[np.ndarray, "H D"]]:
        """Mean logit at each offset -(N-1) .. N-1 over the visible pairs, 0 where there is none, and their number."""
        counts = self._counts.numpy()
        return self._logits.numpy() / np.maximum(counts, 1), counts

    def _add(
        self,
        heads: slice,
        rows: Tensor,
        logits: Tensor,
        weights: Tensor,
        visible: Tensor | None,
        tokens: Tensor | None,
        start: int,
    ) -> None:
        if visible is None:
            visible = logits != -math.inf
            if bool((visible == visible[:, :1]).all()):
                visible = visible[:, :1]  # the same in all heads
            weights = weights.masked_fill(~visible, 0)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        num_visible = visible.sum(-1)
        mass = weights.sum(-1)
        has_several = (num_visible > 1) & (mass > 0)
        later = (rows > 0) | self.cross
        tiny = torch.finfo(weights.dtype).tiny
        entropy = mass.log() - weights.clamp(min=tiny).log_().mul_(weights).sum(-1) / mass  # of normalized weights
        sums = {
            "queries": num_visible > 0,
            "kept": mass,
            "first": weights[..., 0] * (later & (start == 0)),
            "first_queries": (num_visible > 0) & later,
            "entropy": (entropy / num_visible.clamp(min=2).to(mass.dtype).log()).where(has_several, 0),
            "entropy_queries": has_several,
        }
        if not self.cross:
            lowest = int(rows[0]) + self.keys - start - logits.shape[-1]
            offsets = slice(lowest, lowest + len(rows) + logits.shape[-1] - 1)
            self._weights[heads, offsets] += _sums_by_offset(weights).cpu()
            if not self._has_profile:
                self._counts[heads, offsets] += _sums_by_offset(visible.to(weights.dtype)).cpu()
                scores = logits.to(torch.float64, copy=True)
                scores.nan_to_num_(torch.nan, posinf=torch.inf, neginf=0.0)  # faster than by the mask
                self._logits[heads, offsets] += _sums_by_offset(scores).cpu()
                self._sums["energy"][heads] += scores.square_().sum((0, 2, 3)).cpu()
        if tokens is not None:
            for total, count, shift in (("induction", "eligible", 1), ("duplicate", "duplicate_queries", 0)):
                positions = torch.arange(start - shift, start - shift + logits.shape[-1], device=rows.device)
                # other copies of the query's token
                same = tokens[:, rows, None] == tokens[:, None, positions.clamp(min=0)]
                matches = (same & (positions >= 0) & (positions != rows.unsqueeze(-1))).unsqueeze(1) & visible
                sums[total], sums[count] = (weights * matches.to(weights.dtype)).sum(-1), matches.any(-1)
        totals = torch.stack([values.expand(mass.shape) for values in sums.values()]).double().sum((1, 3)).cpu()
        for name, total in zip(sums, totals, strict=True):
            self._sums[name][heads] += total


def _sums_by_offset(x: Float[Tensor, "B _H R K"]) -> Float[Tensor, "_H D"]:
    """Sums of consecutive queries' rows by i - j, from the last key and first query up, by skewing the rows."""
    x = x[0] if len(x) == 1 else x.sum(0)
    count, keys = x.shape[-2:]
    sums = x.new_zeros(*x.shape[:-2], count + keys - 1)
    for row in range(count):
        sums[..., count - 1 - row : count - 1 - row + keys].add_(x[..., row, :])
    return sums.double().flip(-1)


def _tiles(rows: Int[Tensor, "R"], batch: int, heads: int, count: int, keys: int) -> Iterator[tuple[slice, ...]]:
    """Sequences, heads and consecutive rows to process together."""
    num_heads = min(heads, max(1, _MAX_LOGITS // keys))  # per tile
    max_rows = max(1, _MAX_LOGITS // (keys * num_heads))
    breaks = (rows.diff() != 1).nonzero().flatten().add(1).tolist()
    for start, stop in zip((0, *breaks), (*breaks, count), strict=True):
        num_rows = min(max_rows, max(1, stop - start))
        num_sequences = max(1, _MAX_LOGITS // (keys * num_heads * num_rows))
        steps = range(0, batch, num_sequences), range(0, heads, num_heads), range(start, stop, num_rows)
        for b, h, r in product(*steps):
            yield slice(b, b + num_sequences), slice(h, h + num_heads), slice(r, min(r + num_rows, stop))


def _divisor(x: Float[np.ndarray, "*H"]) -> Float[np.ndarray, "*H"]:
    """A divisor: NaN instead of 0."""
    return np.where(x > 0, x, np.nan)


def patterns(
    weights: Float[Tensor, "*_B H N N"],
    tokens: Int[Tensor, "*_B N"] | None = None,
    *,
    causal: bool | None = None,
    window: int | None = None,
    lengths: Int[Tensor, "_B"] | None = None,
    sink: bool = False,
) -> Patterns:
    """The attention pattern of each head from its weights, as an audit measures it.

    The shares ``toeplitz`` and ``toeplitz_variance`` are NaN: they need logits (`toeplitz_profile`).

    Arguments
        weights  [B, H, N, N] or [H, N, N]: of query i (third dimension) on key j (last), after the softmax
        tokens   [B, N] or [N] token ids, for ``induction`` and ``duplicate`` (default: these are NaN)
        causal   query i sees key j only if j <= i (default: whether all weights on later keys are 0)
        window   query i sees key j only if |i - j| < window, for layers with a sliding window (default: no limit)
        lengths  [B]: positions from lengths[b] on are padding
        sink     the model has a sink without a key, so that the weights of a query may sum to less than 1 (gpt-oss)

    Raises `InputError` for weights that are not finite, negative, or on keys that a query does not see, and for queries
    whose weights do not sum to 1 within the rounding of their dtype.
    """
    if not isinstance(weights, Tensor) or weights.ndim not in (3, 4) or weights.shape[-1] != weights.shape[-2]:
        raise invalid("weights", "be a torch.Tensor of shape [B, H, N, N] or [H, N, N]", weights)
    weights = weights.unsqueeze(0) if weights.ndim == 3 else weights
    count, heads, length, _ = weights.shape
    tokens = None if tokens is None else torch.atleast_2d(torch.as_tensor(tokens))
    if tokens is not None and tokens.shape != (count, length):
        raise invalid("tokens", f"have shape [{count}, {length}]", tokens)
    check_value("window", window, PositiveInt | None)
    rows = torch.arange(length, device=weights.device)
    offsets, present = rows.unsqueeze(1) - rows, rows < sequence_ends(lengths, weights).unsqueeze(1)
    weights = weights.masked_fill(~present[:, None, :, None], 0)  # those of padding may be anything
    causal = not weights.triu(1).any() if causal is None else causal
    visible = (offsets.abs() < (window or length)) & (offsets >= (0 if causal else -length))
    visible = (visible & present.unsqueeze(1) & present.unsqueeze(2)).unsqueeze(1)
    if not weights.isfinite().all() or (weights < 0).any():
        raise InputError("weights must be finite and at least 0.")
    if weights.masked_fill(visible, 0).any():
        raise InputError("weights must be 0 on keys that a query does not see by causal, window and lengths.")
    totals = weights.double().sum(-1).masked_fill(~present.unsqueeze(1), 1)
    if ((totals - 1 if sink else (totals - 1).abs()) > _rounding_of_sums(weights)).any():
        got = f"{float(totals.min()):.6g} to {float(totals.max()):.6g}"
        raise invalid(
            "weights", "sum to 1 over the keys of each query, the last dimension (or less with sink)", got=got
        )
    sums = PatternSums(heads=heads, queries=length, keys=length, tokens=tokens)
    sums.add(rows, weights.new_zeros(()).expand_as(weights), weights, visible=visible)
    return sums.result()


def _rounding_of_sums(weights: Float[Tensor, "*B N"]) -> float:
    """How far rounding may move a sum of weights from 1: that of their dtype or, if they all are numbers of a coarser
    one, of that; and of a softmax in float32."""
    dtypes = [x for x in (torch.bfloat16, torch.float16) if torch.equal(weights, weights.to(x).to(weights.dtype))]
    coarsest, eps = (dtypes or [weights.dtype])[0], torch.finfo(torch.float32).eps
    return torch.finfo(coarsest).eps + (_SOFTMAX_ROUNDINGS + weights.shape[-1] ** 0.5) * eps


class RetrievalScores(NamedTuple):
    """How each head retrieves the answer, at the positions where the answer's tokens are predicted.

    score  share of the answer's tokens for which the key with the largest weight lies in the needle and is that token:
           the retrieval score of Wu et al. 2024 (arXiv 2404.15574, section 2), but for the correct answer
    mass   mean weight on the keys in the needle that are that token
    """

    score: Float[Tensor, "B H"]
    mass: Float[Tensor, "B H"]


@renamed
def retrieval(
    weights: Float[Tensor, "B H n K"],
    tokens: Int[Tensor, "B N"],
    answer_positions: Int[Tensor, "n"],
    needle: Int[Tensor, "B 2"],
) -> RetrievalScores:
    """Retrieval scores of heads, from their weights at the queries that predict an answer.

    Arguments
        weights           of the queries at ``answer_positions`` - 1 on the keys 0 .. K-1, without a sink
        tokens            all sequences, including question and answer
        answer_positions  of the answer's tokens
        needle            start and end (exclusive) of the needle's tokens, all of the answer's among them
    """
    keys, count = weights.shape[-1], len(answer_positions)
    if weights.shape[0] != len(tokens) or weights.shape[2] != count or needle.shape != (len(tokens), 2):
        needed = f"have shapes [{len(tokens)}, H, {count}, K] and [{len(tokens)}, 2]"
        raise invalid("weights and needle", needed, got=f"{list(weights.shape)} and {list(needle.shape)}")
    key_index = torch.arange(keys, device=weights.device)
    first, last = needle.to(key_index.device).unbind(1)
    inside = (key_index >= first.unsqueeze(1)) & (key_index < last.unsqueeze(1))
    token_ids, answers = tokens.to(key_index.device), answer_positions.to(key_index.device)
    hits = (token_ids[:, None, :keys] == token_ids[:, answers, None]) & inside.unsqueeze(1)
    if not bool(hits.any(-1).all()):
        raise InputError("needle must contain all tokens of the answer.")
    marked = hits.unsqueeze(1).to(weights.dtype)
    top = weights.argmax(-1, keepdim=True)
    top_hits = marked.expand_as(weights).gather(-1, top).squeeze(-1)
    return RetrievalScores(top_hits.double().mean(-1), (weights * marked).sum(-1).double().mean(-1))
