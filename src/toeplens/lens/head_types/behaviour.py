"""Positional and symbolic heads, measured exactly (after Urrutia et al. 2025, arXiv 2511.11579).

In the paper, a head acts positionally on a query if its logits do not change when the keys are permuted (invariance).
It acts symbolically if the logits move with the keys (equivariance). It can do both only if all logits are equal
(exclusion). Here both follow from a table: M_jm is the logit of content m, placed at position j, for all visible m
and j. The two-way analysis of variance M_jm = mu + P_j + S_m + I_jm splits Var(M) into the shares

    positional = Var(P) / Var(M),  symbolic = Var(S) / Var(M),  interaction = Var(I) / Var(M),  which sum to 1.

The positional share is 1 exactly if M_jm does not depend on m (invariance), the symbolic share exactly if it does not
depend on j (equivariance). What an encoding reads from tokens in addition (`PositionalEncoding.key_features`) stays at
its position. Where position adds to the logit (biases, gates, vectors at the input) the interaction is exactly 0. There
is no table if the logit of a key depends on the content of other keys (CoPE, DAPE v2), and it is not sufficient if
weights change after the softmax (URPE, stick-breaking). Rotations of pairs, biases and vectors at the input have a
closed form (`two_way_variances`); for other encodings the table is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from toeplens.lens.head_types.two_way import two_way_variances
from toeplens.lens.kit.separable_keys import (
    AttentionOptionArguments,
    AttentionOptions,
    PairwiseLogits,
    PermutableKeys,
    SeparableKeys,
    iter_layer_keys,
)
from toeplens.lens.kit.terms import zero_padding
from toeplens.lens.kit.toeplitz import check_finite
from toeplens.lens.kit.trace import AttentionTrace, LayerTrace
from toeplens.utils import InputError, invalid
from toeplens.utils.records import ApproxShare, ItemType, NonNegative, NonNegativeInt, PositiveInt, Record

_NEGLIGIBLE = 1e-12  # variances below this part of the largest possible mean square count as rounding errors


@dataclass(frozen=True)
class Behaviour(Record):
    """How positional and how symbolic each head is. All arrays are [H], [L, H] for a trace, [] for q [N, d].

    positional   share of Var(P), the main effect of position: how the logit of the mean content varies with position
    symbolic     share of Var(S), the main effect of content: how the logit varies with content, averaged over positions
    interaction  share of Var(I), the rest; 0 for additive encodings
    variance     mean of Var(M) over the queries, in squared logits; the shares are ratios of such means, so each query
                 has weight Var(M)
    flat         whether Var(M) is only rounding error; the shares are then NaN
    queries      number of queries used: those that see at least two keys, over all sequences. For a trace one number
                 per layer; in older records of traces only the first layer's
    layers       the layers of the first dimension; empty for tensors
    splits       how the keys of each layer were split into content and position: ``input``, ``mean``, ``ablate``, or
                 ``none`` (all of the key is content); empty for tensors
    """

    LABEL = "behaviour"

    positional: Annotated[Float[np.ndarray, "*H"], ItemType(ApproxShare)]
    symbolic: Annotated[Float[np.ndarray, "*H"], ItemType(ApproxShare)]
    interaction: Annotated[Float[np.ndarray, "*H"], ItemType(ApproxShare)]
    variance: Annotated[Float[np.ndarray, "*H"], ItemType(NonNegative)]
    flat: Bool[np.ndarray, "*H"]
    queries: NonNegativeInt | tuple[NonNegativeInt, ...]
    layers: tuple[NonNegativeInt, ...] = ()
    splits: tuple[str, ...] = ()


@torch.no_grad()
def behaviour(
    q: Float[Tensor, "*_B _N _d"] | AttentionTrace | LayerTrace,
    k: Float[Tensor, "*_B2 _N _d"] | None = None,
    **arguments: Unpack[AttentionOptionArguments],
) -> Behaviour:
    """The positional, symbolic and interaction share of every head, exactly: no sampling, no N x N table.

    Takes O(N d^2) time and O(N d) memory per head, in float64. For a trace or one of its layers, everything but ``q``,
    ``split`` and ``counted`` is read from it. If its logits are more than a rotation of pairs, a bias by offset and
    vectors added at the input, each query's table is computed and spot-checked: O(N^3) time per head, and above 2^31
    logits only the first sequences are used.

    Arguments
        q           [..., H, N, d] queries, or [N, d], before the rotation; or an `AttentionTrace`, or one of its layers
        k           [..., G, N, d] keys, before the rotation; head h reads key head h // (H / G). Or [N, d]
        rotation    from `rope` or `rotation_of`. Or [n] or [H, n] frequencies, in radians per position, of the first
                    2 n dimensions. Or an encoding of H heads of d dimensions: its rotation, pairing and bias are used,
                    but not its scale, and what it adds at the input must already be in q and k
        pairing     which dimensions form a pair, required with frequencies only: ``half`` t and t + n (Llama, Qwen,
                    Gemma), ``interleaved`` 2t and 2t + 1 (the RoPE paper, GPT-J)
        rotated     q and k are after the rotation, at the positions 0 .. N-1; it is undone (default: False)
        layout      ``bhnd`` for q and k as above (default), or ``bnhd`` for [..., N, H, d], as in TransformerLens.
                    Required with frequencies if q has more heads than tokens
        bias        [D] or [H, D] by offset, for the offsets 0 .. N-1 if causal, otherwise -(N-1) .. N-1; or a 4-D table
                    that broadcasts to [B, H, N, N], by query and position, which does not move with the content
        k_position  [..., N, d] the part of k that belongs to the position, broadcastable to k: it stays in place, and
                    the rest of k is the content (default: none)
        causal      query i sees key j only if j <= i (default: True); otherwise it sees every key
        scale       of the products, usually 1 / sqrt(d); not applied to the bias (default: 1)
        lengths     [B] for q [B, H, N, d]: positions from lengths[b] on are padding
        split       for a trace, which part of a key belongs to the position. ``known`` (default): the vectors added at
                    the input, in layers that form keys from it, elsewhere nothing. ``none``: nothing, as in the paper,
                    which moves whole keys. ``input``, ``mean`` or ``ablate``: see `toeplens.lens.position_parts`;
                    ``mean`` leaves about 1 / sequences of the content's variance in the position part
        counted     for a trace, which queries count: ``all`` (default), or ``used``: in a layer whose output is read
                    at one position, only the query there
        window      query i sees key j only if |i - j| < window, for layers with a sliding window (default: no limit)
        chunk       queries see only keys of their own chunk of this many positions, as in Llama 4 (default: no chunks)

    Raises `InputError` for shapes that do not fit, numbers that are not finite, and encodings without such a table.
    """
    options = AttentionOptions(**arguments)
    results = [(layer, name, *_head_shares(keys)) for layer, name, keys in iter_layer_keys(q, k, options)]
    layers, splits, heads, queries = zip(*results, strict=True)
    names, values = ("positional", "symbolic", "interaction", "variance", "flat"), zip(*heads, strict=True)
    arrays = {name: _stack_layers(q, value) for name, value in zip(names, values, strict=True)}
    return Behaviour(**arrays, **_record_fields(q, layers, splits, queries))


def _stack_layers(q: Tensor | AttentionTrace | LayerTrace, values: Sequence[np.ndarray]) -> np.ndarray:
    """Join the heads' values over layers: [L, H] for a trace, [H] without layers, [] for q [N, d]."""
    if isinstance(q, AttentionTrace):
        return np.stack(values)
    return values[0].reshape(() if isinstance(q, Tensor) and q.ndim == 2 else -1)


def _record_fields(
    q: Tensor | AttentionTrace | LayerTrace, layers: Sequence[int], splits: Sequence[str], queries: Sequence[int]
) -> dict[str, Any]:
    """The fields of a record that describe what was measured."""
    if isinstance(q, Tensor):
        return {"queries": queries[0]}
    counts = tuple(queries) if isinstance(q, AttentionTrace) else queries[0]
    return {"queries": counts, "layers": tuple(layers), "splits": tuple(splits)}


def _head_shares(keys: PermutableKeys) -> tuple[list[np.ndarray], int]:
    """The arrays of `Behaviour` for each head, and the number of queries counted."""
    variances = two_way_variances(keys)
    num_queries = int((keys.num_visible() > 1).sum())
    *parts, size = (x.sum((0, 2)).cpu().numpy() for x in vars(variances).values())
    total = np.stack(parts).sum(0)
    flat = ~(total > _NEGLIGIBLE * size)
    shares = [np.divide(x, total, out=np.full_like(x, np.nan), where=~flat) for x in parts]
    variance = total / num_queries if num_queries else np.full_like(total, np.nan)
    return [*shares, variance, flat], num_queries


@dataclass(frozen=True)
class AgreementScores(Record):
    """Agreement of sequences with and without a permutation: 1 for equal sequences, about 0 for unrelated ones.

    NaN if the sequences are constant. The errors are standard errors over the drawn queries, permutations included.

    positional  agreement of the permuted keys' logits with the original ones (invariance)
    symbolic    agreement of the permuted keys' logits with the original ones, permuted alike (equivariance)
    """

    positional: Float[np.ndarray, "*H"]
    symbolic: Float[np.ndarray, "*H"]
    positional_error: Float[np.ndarray, "*H"]
    symbolic_error: Float[np.ndarray, "*H"]


@dataclass(frozen=True)
class PermutationScores(Record):
    """How positional and symbolic heads are, from sampled permutations (see `permutation_scores`).

    logits, weights  scores of the logits, and of the attention weights, their softmax
    queries          number of queries drawn; for a trace one number per layer (in older records the last layer's)
    permutations     number of permutations per query
    layers, splits   as in `Behaviour`
    """

    LABEL = "permutation scores"

    logits: AgreementScores
    weights: AgreementScores
    queries: NonNegativeInt | tuple[NonNegativeInt, ...]
    permutations: PositiveInt
    seed: NonNegativeInt
    layers: tuple[NonNegativeInt, ...] = ()
    splits: tuple[str, ...] = ()


@torch.no_grad()
def permutation_scores(
    q: Float[Tensor, "*_B _N _d"] | AttentionTrace | LayerTrace,
    k: Float[Tensor, "*_B2 _N _d"] | None = None,
    *,
    queries: int = 64,
    permutations: int = 32,
    seed: int = 0,
    **arguments: Unpack[AttentionOptionArguments],
) -> PermutationScores:
    """Monte Carlo scores of invariance (positional) and equivariance (symbolic) under permutations of the keys.

    For a query that sees n keys, let a_j be its logits, and a^pi_j its logits with the content of key pi(j) at
    position j, where pi is a uniform random permutation of all n keys. The agreement of two sequences is
    2 Cov(x, y) / (Var x + Var y). The positional score is the agreement of a^pi with a, the symbolic score that of a^pi
    with a o pi (at j: a_pi(j)). Numerators and denominators are summed over permutations and queries, so queries are
    weighted by their variance. The scores are 1 exactly if all sequences are invariant or equivariant. Invariance,
    equivariance and sampled permutations are defined as in the paper's abstract, which was all that was available. It
    leaves open what we chose: this measure of agreement, without the mean (softmax ignores it), the weighting of
    queries, and that pi also moves the query's own key.

    The mean of Cov(a^pi, a) is Var(P) + Cov(P_j, S_j + I_jj), as a is the diagonal of M. So the scores equal the exact
    shares up to the correlation of content and position in the actual order of the keys.

    Arguments as in `behaviour`, and
        queries       number of queries to draw over all sequences, from those that see at least two keys
        permutations  number of permutations per query; a query takes O(n d) time per permutation and head

    Raises `InputError` as `behaviour` does, for counts below 1, and if no query sees two keys.
    """
    for name, count in (("queries", queries), ("permutations", permutations)):
        if count < 1:
            raise invalid(name, "be at least 1", count)
    layer_keys = iter_layer_keys(q, k, AttentionOptions(**arguments))
    results = [(layer, name, _score_terms(keys, queries, permutations, seed)) for layer, name, keys in layer_keys]
    layers, splits, terms = zip(*results, strict=True)
    scores = [zip(*(vars(_agreement_scores(x[:, which])).values() for x in terms), strict=True) for which in range(2)]
    logits, weights = (AgreementScores(*(_stack_layers(q, values) for values in group)) for group in scores)
    fields = _record_fields(q, layers, splits, [len(group) for group in terms])
    return PermutationScores(logits, weights, permutations=permutations, seed=seed, **fields)


def _score_terms(keys: PermutableKeys, queries: int, permutations: int, seed: int) -> Float[np.ndarray, "Q 2 4 H"]:
    """For each drawn query, of logits and weights: twice both covariances, the sum of variances, the mean square."""
    present = torch.arange(keys.content.shape[2], device=keys.ends.device) < keys.ends.unsqueeze(1)
    assert isinstance(keys, SeparableKeys | PairwiseLogits)
    q = keys.q if isinstance(keys, SeparableKeys) else keys.layer.q
    tensors = {name: zero_padding(x.double(), present) for name, x in (("q", q), ("k", keys.content))}
    check_finite(tensors["q"].sum() + tensors["k"].sum(), **tensors)
    rng = np.random.Generator(np.random.Philox(seed))
    num_visible = keys.num_visible().cpu().numpy()
    candidates = np.argwhere(num_visible > 1)
    if len(candidates) == 0:
        raise InputError("q must have a query that sees at least two keys.")
    results = []
    for choice in rng.choice(len(candidates), min(queries, len(candidates)), replace=False):
        sequence, query = map(int, candidates[choice])
        orders = np.tile(np.arange(num_visible[sequence, query]), (permutations + 1, 1))
        orders[1:] = rng.permuted(orders[1:], axis=1)
        contents = torch.from_numpy(orders).to(keys.ends.device)
        logits = keys.logits(sequence, query, contents)
        values = []
        for x in (logits, logits.softmax(-1)):  # agreement of the original sequence with each of the others
            square = x.square().mean((-2, -1)) * permutations
            x = x - x.mean(-1, keepdim=True)
            first, others = x[:, :1], x[:, 1:]
            covariances = [(others * y).mean(-1).sum(-1) for y in (first, first[:, 0, contents[1:]])]
            variances = (first.square() + others.square()).mean(-1).sum(-1)
            values.append(torch.stack((*(2 * c for c in covariances), variances, square)))
        results.append(torch.stack(values).cpu().numpy())
    return np.stack(results)


def _agreement_scores(terms: Float[np.ndarray, "Q 4 H"]) -> AgreementScores:
    """Ratios of sums over the queries, with their standard errors."""
    total, count = terms[:, 2].sum(0), len(terms)
    total = np.where(total > _NEGLIGIBLE * terms[:, 3].sum(0), total, np.nan)
    ratios = [terms[:, which].sum(0) / total for which in range(2)]
    residuals = [terms[:, which] - ratio * terms[:, 2] for which, ratio in enumerate(ratios)]
    scale = count / (count - 1) if count > 1 else np.nan
    return AgreementScores(*ratios, *(np.sqrt((residual**2).sum(0) * scale) / total for residual in residuals))
