"""Positional against symbolic heads, exactly (after Urrutia et al. 2025, arXiv 2511.11579).

There, a head acts positionally on a query if its logits stay the same when the keys change places (invariance), and
symbolically if they go with the keys (equivariance); it can do both only if they are all the same (exclusion). Here
both are read off the table M_jm of the logits that each visible content m gives at each visible position j: its
two-way analysis of variance, M_jm = mu + P_j + S_m + I_jm, splits Var(M) into the shares

    positional = Var(P) / Var(M),  symbolic = Var(S) / Var(M),  interaction = Var(I) / Var(M),  which sum to 1.

Positional is 1 just where M_jm does not depend on m, that is, for invariance; symbolic just where it does not depend on
j, for equivariance; and their sum is at most 1, which is the exclusion.

A table exists for every logit that is a function of one query, one key and their positions. What an encoding reads of
the tokens beside queries and keys (`PositionalEncoding.note`: FoX's gates, angles made from the content) stays at its
position. Where position adds (biases, terms that read the query, gates, vectors at the input) M_jm = f_j + g_m, so the
interaction is exactly 0; a rotation multiplies, and the interaction is what that gives. There is no table where the
logit of a key depends on the content of other keys (CoPE, DAPE v2), and it is not enough where weights are changed
after the softmax (URPE, stick-breaking). Rotations of pairs, biases by offset and vectors at the input have a closed
form without the table (`two_way`); for other encodings it is written out.

`permutation_scores` samples orders of the keys instead, in the manner of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Unpack

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.ground import InputError, invalid
from toeplens.ground.reading import Count, Positive
from toeplens.ground.records import AtLeast1, Each, NearlyShare, Record
from toeplens.lens.following.two_way import two_way
from toeplens.lens.kit.movable import Around, Given, Keys, by_layer, looked_at, movable_from
from toeplens.lens.kit.trace import AttentionTrace, LayerTrace

_NOTHING = 1e-12  # of what products and bias could add up to, and of a mean square: a variance below it is rounding
_SHARES = ("positional", "symbolic", "interaction", "variance")


@dataclass(frozen=True)
class Behaviour(Record):
    """How positional and how symbolic each head is. All arrays are [H], [L, H] for a trace, [] for q [N, d].

    positional   share of Var(P), the position's main effect: what the mean content gives from place to place
    symbolic     share of Var(S), the content's main effect: what it gives at the mean place
    interaction  share of Var(I), the rest; 0 for additive schemes
    variance     mean of Var(M) over the queries, in squared logits; the shares are ratios of such means, so that each
                 query weighs by its Var(M)
    flat         whether Var(M) is nothing but rounding; the shares are then NaN
    queries      how many queries stand behind it: those that see two keys or more, of all sequences. One number a layer
                 for a trace; in older records of traces one number, which is the first layer's
    layers       the layers of the first dimension; empty without one
    splits       how the keys of each layer were split into content and position: ``input``, ``mean``, ``ablate``, or
                 ``none``, where all of the key is content; empty without layers
    """

    WORDS = "behaviour"

    positional: Annotated[Float[np.ndarray, "*H"], Each(NearlyShare)]
    symbolic: Annotated[Float[np.ndarray, "*H"], Each(NearlyShare)]
    interaction: Annotated[Float[np.ndarray, "*H"], Each(NearlyShare)]
    variance: Annotated[Float[np.ndarray, "*H"], Each(Positive)]
    flat: Bool[np.ndarray, "*H"]
    queries: Count | tuple[Count, ...]
    layers: tuple[Count, ...] = ()
    splits: tuple[str, ...] = ()

    def verify(self) -> None:
        one_a_layer(self.positional, queries=self.queries, layers=self.layers, splits=self.splits)


@torch.no_grad()
def behaviour(
    q: Float[Tensor, "*_B _N _d"] | AttentionTrace | LayerTrace,
    k: Float[Tensor, "*_B2 _N _d"] | None = None,
    **around: Unpack[Around],
) -> Behaviour:
    """The positional, symbolic and interaction share of every head, exact: no sampling, no table of N x N.

    In O(N d^2) time and O(N d) memory per head, in float64. Of a trace or a layer the rest is read there. Where its
    logits are more than a rotation of pairs, a bias by offset and vectors added at the input, each query's table is
    written out: O(N^3) time per head, and above 2^31 logits only the first sequences count. That each logit depends on
    one query and one key is checked on some of them.

    Arguments
        q           [..., H, N, d] queries, or [N, d], before any rotation; or an `AttentionTrace`, or one layer of it
        k           [..., G, N, d] keys, before any rotation; head h reads key head h // (H / G). Or [N, d]
        rotation    [n] or [H, n] frequencies, radians a position, of the first 2 n dimensions; the others stay. Or an
                    encoding of H heads of d dimensions, whose rotation, pairing and bias are taken (not its scale, and
                    what it adds at the input is in q and k already)
        pairing     which dimensions make a pair, required with frequencies: ``half`` t and t + n (Llama, Qwen, Gemma),
                    ``interleaved`` 2t and 2t + 1 (RoPE's paper, GPT-J)
        layout      ``bhnd`` (default) for q and k as above; ``bnhd`` for [..., N, H, d], as in TransformerLens.
                    Required with frequencies where q has more heads than tokens; without them that is a warning
        bias        [D] or [H, D] by offset, for the offsets 0 .. N-1 if causal, else -(N-1) .. N-1; or a table by query
                    and position, of 4 dimensions that broadcast to [B, H, N, N], which does not go with the content
        k_position  [..., N, d] the part of k that belongs to the place, of a shape that broadcasts to k's: it stays
                    where it is, and the rest is the content; none unless given
        causal      key j is visible to query i if j <= i, as unless given; otherwise every key is
        scale       of the products, usually 1 / sqrt(d); not of the bias; 1 unless given
        lengths     [B] for q [B, H, N, d]: positions from lengths[b] on are not there, as queries or as keys
        split       of a trace, what of a key belongs to the place: ``known`` (unless given), the vectors added at
                    the input where keys are made from it, elsewhere nothing, so that what earlier layers wrote into the
                    keys is content; ``none``, nothing, as in the paper, which moves whole keys; ``input``, ``mean`` or
                    ``ablate`` as in `toeplens.lens.decompose`. ``mean`` leaves content of about 1 / sequences of its
                    variance in the position part
        counted     of a trace, which queries count: ``all`` (unless given), or those ``used``: of a layer whose output
                    is read in one place, the query there. What its other queries would do is nothing that the model was
                    trained for
        window      key j is visible to query i only for |i - j| < window, in a layer with a sliding window; at any
                    distance unless given
        chunk       positions are cut into chunks of so many from 0 on, and no key of another is visible, as in Llama 4;
                    no cuts unless given

    Raises `InputError` for shapes that do not fit, numbers that are not finite, and encodings without such a table.
    """
    given = Given(**around)
    found = [(layer, name, *_heads(keys)) for layer, name, keys in movable_from(q, k, given)]
    layers, splits, heads, queries = zip(*found, strict=True)
    arrays = {key: by_layer(q, [each[key] for each in heads]) for key in heads[0]}
    return Behaviour(**arrays, **looked_at(q, layers, splits, queries))


def one_a_layer(array: Float[np.ndarray, "*H"], **given: Any) -> None:
    """Raise `ValueError` for tuples that are not as long as an array of layers; those of tensors are empty."""
    for name, values in given.items():
        needed = 0 if not given["layers"] else len(array) if array.ndim == 2 else 1
        if isinstance(values, tuple) and len(values) != needed:
            raise invalid(name, f"have {needed} entries along L", len(values))


def _heads(keys: Keys) -> tuple[dict[str, np.ndarray], int]:
    """Shares, variance and flatness of each head, and how many queries were counted."""
    found = two_way(keys)
    counted = int((keys.seen() > 1).sum())
    parts = {key: getattr(found, key).sum((0, 2)).cpu().numpy() for key in _SHARES[:3]}
    total = np.stack(list(parts.values())).sum(0)
    flat = ~(total > _NOTHING * found.size.sum((0, 2)).cpu().numpy())
    shares = {key: np.divide(x, total, out=np.full_like(x, np.nan), where=~flat) for key, x in parts.items()}
    variance = total / counted if counted else np.full_like(total, np.nan)
    return {**shares, "variance": variance, "flat": flat}, counted


_ARRAYS = ("positional", "symbolic", "positional_error", "symbolic_error")


@dataclass(frozen=True)
class Scores(Record):
    """Agreement of sequences with and without a permutation; 1 if all agree, at most 1, about 0 if nothing does.

    Arrays are [H], [L, H] for a trace, [] for q [N, d]. NaN where the sequences do not vary.

    positional        of the permuted keys' sequence with the unpermuted one (invariance)
    symbolic          of the permuted keys' sequence with the unpermuted one, permuted (equivariance)
    positional_error  standard error over the queries drawn, the permutations' included; NaN for one query
    symbolic_error    the same
    """

    positional: Float[np.ndarray, "*H"]
    symbolic: Float[np.ndarray, "*H"]
    positional_error: Float[np.ndarray, "*H"]
    symbolic_error: Float[np.ndarray, "*H"]


@dataclass(frozen=True)
class PermutationScores(Record):
    """How far heads are positional and symbolic, from sampled permutations (see `permutation_scores`).

    logits        scores of the logits
    weights       scores of the attention weights, their softmax
    queries       how many queries were drawn; one number a layer for a trace (in older records one, the last layer's)
    permutations  how many permutations for each of them
    seed          of both
    layers        the layers of the first dimension; empty for tensors
    splits        how the keys of each layer were split into content and position (see `behaviour`)
    """

    WORDS = "permutation scores"

    logits: Scores
    weights: Scores
    queries: Count | tuple[Count, ...]
    permutations: AtLeast1
    seed: Count
    layers: tuple[Count, ...] = ()
    splits: tuple[str, ...] = ()

    def verify(self) -> None:
        if self.logits.positional.shape != self.weights.positional.shape:
            raise ValueError("weights must have the shapes of logits.")
        one_a_layer(self.logits.positional, queries=self.queries, layers=self.layers, splits=self.splits)


@torch.no_grad()
def permutation_scores(
    q: Float[Tensor, "*_B _N _d"] | AttentionTrace | LayerTrace,
    k: Float[Tensor, "*_B2 _N _d"] | None = None,
    *,
    queries: int = 64,
    permutations: int = 32,
    seed: int = 0,
    **around: Unpack[Around],
) -> PermutationScores:
    """Monte Carlo scores of invariance (positional) and equivariance (symbolic) under permutations of the keys.

    For a query that sees n keys let a_j be its sequence of logits, and a^pi_j the same with the content of the key
    pi(j) at position j, pi a uniform random permutation of all n. The agreement of two sequences is

        1 - |(x - mean x) - (y - mean y)|^2 / (|x - mean x|^2 + |y - mean y|^2) = 2 Cov(x, y) / (Var x + Var y).

    The positional score is that of a^pi with a, the symbolic one that of a^pi with a o pi (at j: a_pi(j)), numerators
    and denominators summed over permutations and queries, so that each query weighs by its variance. Both are 1 just
    for all-invariant and all-equivariant sequences. The definitions (invariance, equivariance, sampled permutations)
    are the paper's; that sequences are compared by this agreement, that a sequence's mean does not count (a softmax
    cannot see it), how queries weigh, and that pi moves the query's own key too, had to be chosen: its abstract, which
    is what we have, does not say.

    What they estimate, with M = mu + P + S + I as in `behaviour`: Cov(a^pi, a) is on average Var(P) + Cov(P_j, S_j +
    I_jj), a being the diagonal of M. So the scores are the exact shares up to what content and place have to do with
    each other in the order that is there, which the table of all orders has no part in.

    Arguments
        queries       how many queries are drawn, of all sequences together, of those that see two keys or more
        permutations  drawn for each of them; one query costs O(n d) a permutation and head
        seed          of the queries and permutations
        the others    as in `behaviour`

    Raises `InputError` as `behaviour`, for counts under 1, and where no query sees two keys.
    """
    for name, count in (("queries", queries), ("permutations", permutations)):
        if count < 1:
            raise invalid(name, "be at least 1", count)
    given = Given(**around)
    layers, splits, terms = zip(
        *((layer, name, _terms(keys, queries, permutations, seed)) for layer, name, keys in movable_from(q, k, given)),
        strict=True,
    )
    logits, weights = (
        Scores(*(by_layer(q, [getattr(one, key) for one in found]) for key in _ARRAYS))
        for found in ([_scores(each[:, which]) for each in terms] for which in range(2))
    )
    told = looked_at(q, layers, splits, [len(each) for each in terms])
    return PermutationScores(logits, weights, permutations=permutations, seed=seed, **told)


def _terms(keys: Keys, queries: int, permutations: int, seed: int) -> Float[np.ndarray, "Q 2 4 H"]:
    """For each query drawn, of logits and of weights: twice both covariances, the variances' sum, the mean square."""
    rng = np.random.Generator(np.random.Philox(seed))
    seen = keys.seen().cpu().numpy()
    places = np.argwhere(seen > 1)
    if len(places) == 0:
        raise InputError("q must have a query that sees at least two keys.")
    made = []
    for place in rng.choice(len(places), min(queries, len(places)), replace=False):
        sequence, query = map(int, places[place])
        orders = np.tile(np.arange(seen[sequence, query]), (permutations + 1, 1))
        orders[1:] = rng.permuted(orders[1:], axis=1)
        contents = torch.from_numpy(orders).to(keys.ends.device)
        logits = keys.logits(sequence, query, contents)
        made.append(np.stack([_agreement(x, contents[1:]) for x in (logits, logits.softmax(-1))]))
    return np.stack(made)


def _agreement(x: Float[Tensor, "H K1 n"], orders: Int[Tensor, "K n"]) -> Float[np.ndarray, "4 H"]:
    """Of the unpermuted sequence, the first, with each of the others."""
    square = x.square().mean((-2, -1))
    x = x - x.mean(-1, keepdim=True)
    first, others = x[:, :1], x[:, 1:]
    covariances = [(others * y).mean(-1).sum(-1) for y in (first, first[:, 0, orders])]
    variances = (first.square() + others.square()).mean(-1).sum(-1)
    return torch.stack((*(2 * c for c in covariances), variances, square * orders.shape[0])).cpu().numpy()


def _scores(terms: Float[np.ndarray, "Q 4 H"]) -> Scores:
    """Ratios of sums over the queries, with the standard error of a ratio."""
    total = terms[:, 2].sum(0)
    varies = total > _NOTHING * terms[:, 3].sum(0)
    count = len(terms)
    made = []
    for which in range(2):
        ratio = np.divide(terms[:, which].sum(0), total, out=np.full_like(total, np.nan), where=varies)
        rest = terms[:, which] - ratio * terms[:, 2]
        error = np.full_like(total, np.nan)
        if count > 1:
            spread = np.sqrt((rest**2).sum(0) * count / (count - 1))
            error = np.divide(spread, total, out=error, where=varies)
        made.append((ratio, error))
    return Scores(made[0][0], made[1][0], made[0][1], made[1][1])
