"""Positional against symbolic heads by sampled permutations, in the manner of arXiv 2511.11579."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.ground import InputError
from toeplens.ground.reading import Count
from toeplens.ground.records import AtLeast1, Record
from toeplens.lens.following.behaviour import one_a_layer
from toeplens.lens.kit.movable import Around, Given, Keys, by_layer, looked_at, movable_from
from toeplens.lens.kit.trace import AttentionTrace, LayerTrace

_NOTHING = 1e-12  # of the mean square of the sequences: a variance below it is rounding
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
            raise ValueError("weights: their arrays are not of the shape of those of logits.")
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
            raise InputError(f"{name}: {count} was given; it must be at least 1.")
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
        raise InputError("q: no query sees two keys; there is nothing to permute.")
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
