"""Two-way analysis of variance of attention logits: every content at every position, without forming the table.

A query at position i sees n keys. Put the content c_m of the key at m at position j, for all visible j and m:

    M_jm = q_i . R_(i-j) (c_m + p_j) + b_(i-j) = mu + P_j + S_m + I_jm,

with R the rotation, p_j the part of a key that position itself adds, and b a bias; the actual logits are the diagonal.
In complex pairs, with w = q_i e^(iota i theta) and e_j = e^(-iota j theta), the rotated dimensions give
Re sum_t w_t e_jt conj(c_mt), and

    P_j = Re sum_t w_t conj(mean c)_t (e_j - mean e)_t + (w . R_j p_j + b_(i-j), minus its mean),
    S_m = Re sum_t w_t (mean e)_t conj(c_m - mean c)_t + (the same for dimensions that are not rotated, where e is 1),
    I_jm = Re sum_t w_t (e_j - mean e)_t conj(c_m - mean c)_t.

So Var(P) and Var(S) are quadratic forms in the running covariances of (e_j, R_j p_j) and of c_m; the covariance of a
bias with the former is a convolution (FFT). Var(I) needs, for each query, an n_t x n_t sum over pairs of frequencies:

    Var(I) = 1/2 Re sum_ts [ w_t conj(w_s) Cov(e_t, e_s) conj(Cov(c_t, c_s)) + w_t w_s Cov'(e_t, e_s) conj(Cov'(..)) ],

with Cov' without the conjugate (`sum_of_squares`). The sums over j of e^(-iota j (theta_t +- theta_s)) are accumulated
with those of the keys: no frequency causes a small denominator, and e_j may be any factors (xPos's decay). Covariances
are kept about the running mean (Chan, Golub, LeVeque 1983), so cancellation is small. Takes O(N d^2) per head.

With a window, one running sum forwards and one backwards are added, as in `toeplens.lens.kit.toeplitz`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.nn import functional as F

from toeplens.lens.kit.separable_keys import (
    PairwiseLogits,
    PermutableKeys,
    SeparableKeys,
    complex_pairs,
    interleave_complex,
    query_blocks,
    replace_pairs,
)
from toeplens.lens.kit.terms import ToeplitzMatrix
from toeplens.lens.kit.toeplitz import check_finite

STEP = 4  # number of queries that see each other's rows one by one


@dataclass(frozen=True)
class VaryingRows:
    """Rows that only some queries of a chunk see, centred on the mean of the rows that all of them see.

    chunk_rows     [..., C, F] the chunk's own rows; query r sees those up to row r
    previous_rows  [..., C - 1, F] with a window, rows of the previous block, seen by query r from row r on; or None
    """

    chunk_rows: Tensor
    previous_rows: Tensor | None

    def apply(self, function: Callable[[Tensor], Tensor]) -> VaryingRows:
        previous = None if self.previous_rows is None else function(self.previous_rows)
        return VaryingRows(function(self.chunk_rows), previous)

    def visible_sums(self) -> Float[Tensor, "*B C F"]:
        """Sums over the rows that each query sees."""
        previous = None if self.previous_rows is None else suffix_sums(self.previous_rows, -2)
        return add_previous(self.chunk_rows.cumsum(-2), previous, -2)

    def split_steps(
        self, products: Float[Tensor, "*B two_n two_n"]
    ) -> tuple[Float[Tensor, "*B U two_n two_n"], Float[Tensor, "*B U P two_n"]]:
        """For each step of queries, the products of the rows that all its queries see, and the rows only some see.

        ``products`` are the sums of products over the rows that all queries of the chunk see.
        """
        rows = _split_steps(self.chunk_rows)
        steps = rows.shape[-3]
        known = products.unsqueeze(-3) + _exclusive_cumsum(rows.mT @ rows)
        if self.previous_rows is None:
            return known, rows
        previous, remaining = self.previous_rows[..., : steps * STEP, :], self.previous_rows[..., steps * STEP :, :]
        previous = _split_steps(F.pad(previous, (0, 0, 0, max(0, steps * STEP - previous.shape[-2]))))
        later = _exclusive_cumsum((previous.mT @ previous).flip(-3)).flip(-3)
        return known + later + (remaining.mT @ remaining).unsqueeze(-3), torch.cat((rows, previous), dim=-2)

    def weighted_sums(self, weights: Float[Tensor, "*_B C F"]) -> tuple[Float[Tensor, "*_B C"], Float[Tensor, "*_B C"]]:
        """The sums of (weights . row)^2 and of weights . row, over the rows that each query sees."""
        projected = matmul_shared(weights, self.chunk_rows.mT).tril_()
        square, total = projected.square().sum(-1), projected.sum(-1)
        if self.previous_rows is None:
            return square, total
        previous = matmul_shared(weights, self.previous_rows.mT).triu_()
        return square + previous.square().sum(-1), total + previous.sum(-1)


@dataclass(frozen=True)
class Moments:
    """The number and mean of some rows, and the sums of their products about it."""

    count: int
    mean: Float[Tensor, "*B 1 F"]
    products: Float[Tensor, "*B F F"]

    def add_rows(self, rows: Float[Tensor, "*B C F"]) -> Moments:
        """With more rows, centred on this mean."""
        count = self.count + rows.shape[-2]
        shift = rows.sum(-2, keepdim=True) / count
        return Moments(count, self.mean + shift, self.products + rows.mT @ rows - count * (shift.mT @ shift))

    def merge(self, other: Moments) -> Moments:
        """With the rows of another."""
        if not self.count or not other.count:
            return self if self.count else other
        shift, both = other.mean - self.mean, self.count + other.count
        products = self.products + other.products + self.count * other.count / both * (shift.mT @ shift)
        return Moments(both, self.mean + other.count / both * shift, products)

    def weighted_moments(
        self, weights: Float[Tensor, "*_B C F"], varying: VaryingRows | None, num_visible: Float[Tensor, "_"]
    ) -> tuple[Float[Tensor, "*_B C"], Float[Tensor, "*_B C"] | float]:
        """Mean square and mean of weights . row about this mean, over these rows and those that each query adds."""
        square, total = (matmul_shared(weights, self.products) * weights).sum(-1), 0.0
        if varying is not None:
            squares, sums = varying.weighted_sums(weights)
            square, total = square + squares, sums / num_visible
        return square / num_visible, total


@dataclass(frozen=True)
class MomentSums:
    """Moments of some keys and positions; ``squares`` [b, k, 1] are their squared lengths, not centred."""

    contents: Moments
    positions: Moments
    squares: Tensor

    def add_rows(self, contents: Tensor, positions: Tensor, squares: Tensor) -> MomentSums:
        """With more rows, centred on these means."""
        both = self.contents.add_rows(contents), self.positions.add_rows(positions)
        return MomentSums(*both, self.squares + squares.sum(-1))

    def merge(self, other: MomentSums) -> MomentSums:
        both = self.contents.merge(other.contents), self.positions.merge(other.positions)
        return MomentSums(*both, self.squares + other.squares)


def matmul_shared(x: Float[Tensor, "*B C F"], shared: Float[Tensor, "*_B F e"]) -> Float[Tensor, "*B C e"]:
    """x @ shared; all rows multiplied by the same matrix form one matrix product."""
    rows = x
    while shared.ndim > 2 and shared.shape[-3] == 1:
        shared, rows = shared.squeeze(-3), rows.flatten(-3, -2)
    return (rows @ shared).reshape(*x.shape[:-1], shared.shape[-1])


def suffix_sums(x: Tensor, dim: int) -> Tensor:
    """Sums over each row and all later ones."""
    return x.flip(dim).cumsum(dim).flip(dim)


def add_previous(sums: Tensor, previous: Tensor | None, dim: int) -> Tensor:
    """Add to each query's sums those of the previous block's rows that it sees."""
    if previous is not None:
        count = min(sums.shape[dim], previous.shape[dim])
        sums.narrow(dim, 0, count).add_(previous.narrow(dim, 0, count))
    return sums


def sum_of_squares(
    w: Complex[Tensor, "b k g C n"], contents: tuple[Tensor, VaryingRows], positions: tuple[Tensor, VaryingRows]
) -> Float[Tensor, "b k g C"]:
    """For each query, the sum over the visible j and m of A_jm^2, where A_jm = Re sum_t w_t e_jt conj(c_mt).

    With S = sum_j e_j e_j^H and S' = sum_j e_j e_j^T over the positions, and Z, Z' likewise for the contents, it is
    1/2 Re [ w^T (S * conj Z) conj w + w^T (S' * conj Z') w ], with * entry by entry: n^2 operations per query, for the
    rows that all queries of a step see. Rows that only some see are handled one by one: with u = w e_j, the sum over
    the contents is the quadratic form of u in the contents' products, and likewise with the roles swapped. A_jm is
    formed where both are such rows. Contents are [b, k, ..], shared by g heads, positions [1, k or 1, ..]; of each the
    products over the rows that all queries see, and the others, with real and imaginary parts alternating.
    """
    content_products, near_contents = contents[1].split_steps(contents[0])
    position_products, near_positions = positions[1].split_steps(positions[0])
    count, group = w.shape[-2], w.shape[-3]
    queries = _split_steps(w).transpose(-4, -3).flatten(-3, -2)  # [b, k, U, g STEP, n]
    total = _quadratic_sum(queries, position_products, content_products)
    square_mask = torch.ones(STEP, STEP, dtype=torch.bool, device=w.device)  # the step's own rows, then the far ones
    allowed = torch.cat((square_mask.tril(), square_mask.triu()), dim=-1)[:, : near_contents.shape[-2]].repeat(group, 1)
    query, row = allowed.nonzero().unbind(-1)
    chosen = queries[..., query, :]
    position_rows = interleave_complex(_as_complex(near_positions)[..., row, :] * chosen)
    content_rows = interleave_complex(_as_complex(near_contents)[..., row, :] * chosen.conj())
    values = ((position_rows @ content_products) * position_rows).sum(-1)
    values = values + ((content_rows @ position_products) * content_rows).sum(-1)
    values = values + ((position_rows @ near_contents.mT).square() * allowed[query]).sum(-1)
    total = total.index_add_(-1, query, values).unflatten(-1, (group, -1))
    return total.transpose(-3, -2).flatten(-2)[..., :count]


def _quadratic_sum(
    w: Complex[Tensor, "*B C n"], positions: Float[Tensor, "*_B two_n two_n"], contents: Float[Tensor, "*B two_n two_n"]
) -> Float[Tensor, "*B C"]:
    """The sum for queries that see the same rows."""
    both = zip(_products(positions), _products(contents), strict=True)
    hermitian, symmetric = (w @ (a * b.conj()) for a, b in both)
    return ((hermitian * w.conj()).real + (symmetric * w).real).sum(-1) / 2


def _products(x: Float[Tensor, "*B two_n two_n"]) -> tuple[Complex[Tensor, "*B n n"], Complex[Tensor, "*B n n"]]:
    """sum x x^H and sum x x^T, from the products of real and imaginary parts."""
    real, imaginary = _as_complex(x[..., 0::2, :]), _as_complex(x[..., 1::2, :])  # [t, s] of Re x_t, Im x_t and x_s
    return real.conj() + 1j * imaginary.conj(), real + 1j * imaginary


def _as_complex(x: Float[Tensor, "*B two_n"]) -> Complex[Tensor, "*B n"]:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _split_steps(x: Tensor) -> Tensor:
    """Cut [*B, C, F] into [*B, U, STEP, F], padded with zeros."""
    padding = -x.shape[-2] % STEP
    return F.pad(x, (0, 0, 0, padding)).unflatten(-2, (-1, STEP))


def _exclusive_cumsum(x: Float[Tensor, "*B U n n"]) -> Float[Tensor, "*B U n n"]:
    """The sums over the steps before each."""
    return F.pad(x[..., :-1, :, :].cumsum(-3), (0, 0, 0, 0, 1, 0))


CHUNK = 32  # queries at once; within their own chunk they see the keys one by one
BLOCK = 2**21  # target size of a working array, in numbers
_MAX_FULL_SIZE = 2**25  # target size of an array over all positions, in numbers
_COLUMNS = 16  # columns per convolution


@dataclass(frozen=True)
class TwoWay:
    """The variances of each query's table M over visible positions and contents, in squared logits; 0 for padding.

    positional, symbolic, interaction  [B, H, N] Var(P), Var(S), Var(I); the three sum to Var(M)
    size  [B, H, N] an upper bound on the squared sum of products and bias: the scale of rounding errors

    Errors are about 1e-15 of each query's Var(M). With a bias, Var(P) of queries that see few keys also has the FFT's
    error: 1e-16 of the largest biases of any query in its sequence. With causal attention, Var(I) of float32 (or less
    precise) keys is computed in float32: errors are about 1e-6 of a query's Var(M), 1e-8 of the sum over queries.
    """

    positional: Float[Tensor, "B H N"]
    symbolic: Float[Tensor, "B H N"]
    interaction: Float[Tensor, "B H N"]
    size: Float[Tensor, "B H N"]


@torch.no_grad()
def two_way_variances(keys: PermutableKeys) -> TwoWay:
    """The two-way analysis of variance of every query's table, in O(N d^2) time and O(N d) memory per head.

    A bias by query and position adds only to Var(P), in O(N^2 d) time. A window of w keys needs O(w d^2 / chunk) more
    memory. `PairwiseLogits` take O(N^3) time and O(N^2) memory. Raises `InputError` for numbers that are not finite.
    """
    if isinstance(keys, PairwiseLogits):
        return _two_way_from_tables(keys)
    assert isinstance(keys, SeparableKeys)
    variances = torch.zeros(4, *keys.q.shape[:3], dtype=torch.float64, device=keys.q.device)
    for block in query_blocks(replace(keys, table=None)):
        block_variances = variances[:, block.sequences]
        block_variances[..., block.queries] = _variances(block.keys)[..., block.rows]
        variances[:, block.sequences] = block_variances
    if keys.table is not None:
        _add_table(variances, keys)
    return TwoWay(*variances.clamp(min=0))


def _add_table(variances: Float[Tensor, "4 B H N"], keys: SeparableKeys) -> None:
    """Replace Var(P) and the size by those with a bias by query and position."""
    assert keys.table is not None
    length, pairs, num_visible = keys.q.shape[2], keys.num_pairs, keys.num_visible()
    for queries in torch.arange(length, device=keys.q.device).split(max(1, BLOCK // (keys.q.shape[1] * length))):
        visible = keys.visible_mask(queries).double()
        key_weights = visible / visible.sum(-1, keepdim=True).clamp(min=1)
        for sequence, weights in enumerate(key_weights):
            q = keys.order_pairs_first(keys.q[sequence, :, queries])
            mean = weights @ keys.order_pairs_first(keys.content[sequence])[keys.key_heads()]
            rotated = complex_pairs(q, pairs) * complex_pairs(mean, pairs).conj() @ keys.phase_factors.mT
            unrotated = (q[..., 2 * pairs :] * mean[..., 2 * pairs :]).sum(-1, keepdim=True)
            position = rotated.real + unrotated + keys.position_logits(sequence, queries)
            deviation = position - (position * weights).sum(-1, keepdim=True)
            has_several = num_visible[sequence, queries] > 1
            table = keys.table[sequence if len(keys.table) > 1 else 0][:, queries].double()
            variances[0, sequence, :, queries] = (deviation.square() * weights).sum(-1) * has_several
            variances[3, sequence, :, queries] += (table.square() * weights).sum(-1) * has_several
    check_finite(variances[0].sum(), q=keys.q, k=keys.content, bias=keys.table)


def _two_way_from_tables(keys: PairwiseLogits) -> TwoWay:
    """The variances from the computed tables, over the visible keys; 0 with fewer than two keys."""
    variances = torch.zeros(4, *keys.layer.q.shape[:3], dtype=torch.float64, device=keys.ends.device)
    for sequences, queries, table, visible in keys.tables():
        pair_mask = (visible.unsqueeze(-1) & visible.unsqueeze(-2)).unsqueeze(1)
        count = torch.where(visible.sum(-1) > 1, visible.sum(-1), torch.inf).unsqueeze(1).double()
        table = table.masked_fill(~pair_mask, 0)
        size = table.square().sum((-2, -1)) / count**2
        mean = table.sum((-2, -1)) / count**2
        table = torch.where(pair_mask, table - mean[..., None, None], 0)
        position, content = (table.sum(dim) / count.unsqueeze(-1) for dim in (-1, -2))
        residual = torch.where(pair_mask, table - position.unsqueeze(-1) - content.unsqueeze(-2), 0)
        position, content = (x.square().sum(-1) / count for x in (position, content))
        parts = (position, content, residual.square().sum((-2, -1)) / count**2, size)
        variances[:, sequences, :, queries] = torch.stack(parts)
    check_finite(variances.sum(), q=keys.layer.q, k=keys.layer.k)
    return TwoWay(*variances)


def _variances(keys: SeparableKeys) -> Float[Tensor, "4 B H N"]:
    """Var(P), Var(S), Var(I) and size, for keys without chunks; with a window only for causal attention."""
    variances = torch.zeros(4, *keys.q.shape[:3], dtype=torch.float64, device=keys.q.device)
    num_visible = keys.num_visible()
    for sequences, heads in _tiles(keys):
        if not (num_visible[sequences] > 1).any():
            continue
        for rows, values in _Tile(keys, sequences, heads).run():
            variances[:, sequences, heads, rows] = values
    variances = torch.where(num_visible.unsqueeze(1) > 1, variances, 0)
    inputs = {"q": keys.q, "k": keys.content, "k_position": keys.position_part, "rotation": keys.phase_factors.real}
    inputs |= {"bias": keys.bias}
    check_finite(variances.sum(), **{name: x for name, x in inputs.items() if x is not None})
    return variances


def _tiles(keys: SeparableKeys) -> Iterator[tuple[slice, slice]]:
    """Sequences and heads to process together: all that share some keys, or some of those that share one."""
    count, heads, length, width = keys.q.shape
    group = heads // keys.content.shape[1]
    numbers = CHUNK * max(4 * keys.num_pairs * (STEP + keys.num_pairs // STEP), width)
    full_size = 0 if keys.bias is None else length * (2 * keys.num_pairs + (0 if keys.position_part is None else width))
    num_heads = max(1, min(BLOCK // numbers, _MAX_FULL_SIZE // max(1, full_size)))  # per tile
    num_sequences = max(1, num_heads // heads) if keys.causal or bool((keys.ends == keys.ends[0]).all()) else 1
    num_heads = num_heads if num_heads < group else num_heads - num_heads % group
    whole_groups = max(group, num_heads)
    for start in range(0, count, num_sequences):
        for first in range(0, heads, whole_groups):
            last = min(first + whole_groups, heads)
            for head in range(first, last, num_heads):
                yield slice(start, min(start + num_sequences, count)), slice(head, min(head + num_heads, last))


class _Chunk(NamedTuple):
    """The keys and positions that only some queries of a chunk see, and sums of their squared lengths."""

    contents: VaryingRows
    positions: VaryingRows
    squares: Float[Tensor, "b k 1 C"]


class _Tile:
    """Some heads of some sequences, processed in chunks of positions.

    Queries are [b, k, g, ..], for k key heads shared by g heads each; contents and positions are [b, k, 1, ..]. If
    every head has its own rotation, nothing is shared: k is then the number of heads, and g is 1.
    """

    def __init__(self, keys: SeparableKeys, sequences: slice, heads: slice) -> None:
        self.keys, self.sequences, self.heads = keys, sequences, heads
        self.length = int(keys.ends[sequences].max())
        key_heads = keys.key_heads(heads)
        count = len(key_heads)
        self.key_heads = key_heads if len(keys.phase_factors) > 1 else slice(int(key_heads[0]), int(key_heads[-1]) + 1)
        self.content = keys.content[sequences][:, self.key_heads]
        self.group_shape = self.content.shape[1], count // self.content.shape[1]  # k, g
        self.phase_factors = self.by_group(_select_heads(keys.phase_factors, heads))
        self.first_features = self.position_features(self._row_chunks(0, 1)[0])
        self.dtype = torch.float64 if keys.content.dtype == torch.float64 else torch.float32
        self.bias = None if keys.bias is None else _Bias(self, _select_heads(keys.bias.double(), heads))

    def by_group(self, x: Tensor, dim: int = 0) -> Tensor:
        """Unflatten a dimension over heads, key heads or 1 into key heads and the heads that share each."""
        return x.unflatten(dim, self.group_shape if x.shape[dim] == math.prod(self.group_shape) else (-1, 1))

    def run(self) -> Iterator[tuple[slice, Float[Tensor, "4 b h C"]]]:
        """Var(P), Var(S), Var(I) and size, some queries at a time."""
        for rows, before, chunk in self._chunks():
            yield rows, self._values(rows, before, chunk).flatten(2, 3)

    def _chunks(self) -> Iterator[tuple[slice, MomentSums, _Chunk | None]]:
        """Chunks of queries, the rows that all of them see, and, if causal, those that only some see."""
        if not self.keys.causal:
            all_chunks = self._row_chunks(0, self.length)
            all_sums = self._empty_sums(all_chunks[0])
            for rows in all_chunks:
                all_sums = all_sums.add_rows(*self.centre_rows(rows, all_sums))
            yield from ((rows, all_sums, None) for rows in all_chunks)
            return
        size = self.length if self.keys.window is None else self.keys.window
        previous: list[tuple[slice, MomentSums]] = []
        for start in range(0, self.length, size):
            chunks = self._row_chunks(start, min(start + size, self.length))
            block_sums = self._empty_sums(chunks[0])
            for index, rows in enumerate(chunks):
                previous_rows, later_sums = previous[index] if previous else (None, None)
                before = block_sums if later_sums is None else later_sums.merge(block_sums)
                centred = self.centre_rows(rows, before)
                yield rows, before, self._chunk(centred, previous_rows, before)
                centred = centred if before is block_sums else self.centre_rows(rows, block_sums)
                block_sums = block_sums.add_rows(*centred)
            if start + size < self.length:  # the chunks of this block, and the sums over all later rows of it
                later_sums, previous = self._empty_sums(chunks[-1]), []
                for rows in reversed(chunks):
                    previous.insert(0, (rows, later_sums))
                    later_sums = later_sums.add_rows(*self.centre_rows(rows, later_sums))

    def position_features(self, rows: slice) -> Float[Tensor, "_b _k 1 C F"]:
        """The features of a position: e_j, real and imaginary parts, and R_j p_j."""
        phase_factors, position_part = self.phase_factors[:, :, rows], self.keys.position_part
        rotated = interleave_complex(phase_factors).unsqueeze(0)
        if position_part is None:
            return rotated
        position_part = position_part[self.sequences] if len(position_part) > 1 else position_part
        p = self.keys.order_pairs_first(position_part[:, :, rows])
        p = (p[:, self.key_heads] if p.shape[1] > 1 else p).unsqueeze(2)
        p = replace_pairs(complex_pairs(p, self.keys.num_pairs) * phase_factors.conj(), p)
        lead = torch.broadcast_shapes(rotated.shape[:3], p.shape[:3])
        return torch.cat((rotated.expand(*lead, -1, -1), p.expand(*lead, -1, -1)), dim=-1)

    def centre_rows(
        self, rows: slice, sums: MomentSums
    ) -> tuple[Float[Tensor, "b k 1 C d"], Float[Tensor, "_b _k 1 C F"], Float[Tensor, "b k 1 C"]]:
        """Keys and positions about the means of ``sums``, and their squared lengths, not centred."""
        contents, positions = self._contents(rows), self.position_features(rows)
        squares = contents.square().sum(-1) + positions[..., 2 * self.keys.num_pairs :].square().sum(-1)
        return contents - sums.contents.mean, positions - sums.positions.mean, squares

    def _row_chunks(self, start: int, stop: int) -> list[slice]:
        return [slice(first, min(first + CHUNK, stop)) for first in range(start, stop, CHUNK)]

    def _empty_sums(self, rows: slice) -> MomentSums:
        """Empty sums, centred on the mean of these rows."""
        means = [x.mean(-2, keepdim=True) for x in (self._contents(rows), self.position_features(rows))]
        contents, positions = (Moments(0, x, x.new_zeros(*x.shape[:-2], x.shape[-1], x.shape[-1])) for x in means)
        return MomentSums(contents, positions, torch.zeros_like(means[0][..., 0, 0]))

    def _contents(self, rows: slice) -> Float[Tensor, "b k 1 C d"]:
        return self.keys.order_pairs_first(self.content[:, :, rows]).unsqueeze(2)

    def _shared_positions(self, positions: Float[Tensor, "_b _k 1 C F"]) -> Float[Tensor, "1 _k 1 C F"]:
        """Position features, once for all sequences and heads that share the rotation."""
        return positions[:1, : len(self.phase_factors)]

    def _chunk(self, centred: tuple[Tensor, Tensor, Tensor], previous_rows: slice | None, before: MomentSums) -> _Chunk:
        """A chunk, and the one a window earlier, about the means of ``before``."""
        contents, positions, squares = centred
        squares = squares.cumsum(-1)
        previous_contents = previous_positions = None
        if previous_rows is not None and previous_rows.stop - previous_rows.start > 1:
            later_rows = slice(previous_rows.start + 1, previous_rows.stop)
            previous_contents, previous_positions, lengths = self.centre_rows(later_rows, before)
            squares = add_previous(squares, suffix_sums(lengths, -1), -1)
        return _Chunk(VaryingRows(contents, previous_contents), VaryingRows(positions, previous_positions), squares)

    def _values(self, rows: slice, before: MomentSums, chunk: _Chunk | None) -> Float[Tensor, "4 b k g C"]:
        """The variances of queries that all see ``before``, and each its own part of the chunk."""
        keys, pairs = self.keys, self.keys.num_pairs
        num_visible = torch.arange(rows.start + 1, rows.stop + 1, dtype=torch.float64, device=keys.q.device)
        num_visible = num_visible if keys.window is None else num_visible.clamp(max=keys.window)
        num_visible = torch.full_like(num_visible, before.contents.count) if chunk is None else num_visible
        q = keys.order_pairs_first(keys.q[self.sequences, self.heads, rows]).unflatten(1, self.group_shape)
        w = complex_pairs(q, pairs)
        varying = (None, None) if chunk is None else (chunk.contents, chunk.positions)
        content, position = (
            x.mean * 0 if added is None else added.visible_sums() / num_visible.unsqueeze(-1)
            for x, added in zip((before.contents, before.positions), varying, strict=True)
        )
        content_mean, position_mean = before.contents.mean + content, before.positions.mean + position
        weights = interleave_complex(w.conj() * complex_pairs(content_mean, pairs))
        if keys.position_part is not None:
            weights = torch.cat((weights, replace_pairs(w, q)), dim=-1)
        square, mean = before.positions.weighted_moments(weights, varying[1], num_visible)
        positional = square - mean**2
        weights_q = replace_pairs(w * complex_pairs(position_mean, pairs), q)
        square, mean = before.contents.weighted_moments(weights_q, varying[0], num_visible)
        symbolic = square - mean**2
        squares = before.squares.unsqueeze(-1) + (0 if chunk is None else chunk.squares)
        size = q.square().sum(-1) * squares / num_visible
        if self.bias is not None:
            common = self.bias.common[:, :, :, rows] / num_visible.unsqueeze(-1)
            common = common - (position_mean - self.first_features) * self.bias.mean[..., rows].unsqueeze(-1)
            positional = positional + 2 * (weights * common).sum(-1) + self.bias.variance[..., rows]
            size = size + self.bias.square[..., rows]
        shifts = complex_pairs(content, pairs), complex_pairs(position, pairs)
        interaction = self._interaction(w, *shifts, before, chunk, num_visible)
        return torch.stack([x.expand_as(symbolic) for x in (positional, symbolic, interaction, size)])

    def _interaction(
        self,
        w: Complex[Tensor, "b k g C n"],
        content: Complex[Tensor, "b k 1 _C n"],
        position: Complex[Tensor, "_b _k 1 _C n"],
        before: MomentSums,
        chunk: _Chunk | None,
        num_visible: Float[Tensor, "C"],
    ) -> Float[Tensor, "b k g C"]:
        """Var(I), from squares about the means of ``before``; the true means differ by ``content`` and ``position``."""
        pairs = w.shape[-1]
        if not pairs:
            return w.real.sum(-1)
        products = before.contents.products, self._shared_positions(before.positions.products)
        contents, positions = (x[..., : 2 * pairs, : 2 * pairs] for x in products)
        if chunk is None:
            both = (x.squeeze(2).contiguous() for x in (positions, contents))
            return _quadratic_sum(w.flatten(-3, -2), *both).unflatten(-1, w.shape[-3:-1]) / num_visible**2
        dtype = self.dtype if before.contents.count else torch.float64  # the first rows are centred on later ones too

        def narrow(x: Tensor) -> Tensor:
            return x[..., : 2 * pairs].to(dtype).contiguous()

        def mean_square(weights: Tensor, products: Tensor, rows: VaryingRows) -> Tensor:
            weights = interleave_complex(weights).to(dtype)
            own = (matmul_shared(weights, products) * weights).sum(-1)
            return (own + rows.weighted_sums(weights)[0]) / num_visible

        shared = self._shared_positions
        rows = chunk.contents.apply(narrow), chunk.positions.apply(lambda x: narrow(shared(x)))
        both = narrow(contents), narrow(positions)
        shared_rows = ((x.squeeze(2), y.apply(lambda z: z.squeeze(2))) for x, y in zip(both, rows, strict=True))
        square = sum_of_squares(w.to(dtype.to_complex()), *shared_rows) / num_visible**2
        mean = (w * position * content.conj()).sum(-1).real
        square = square - mean_square(w * position, both[0], rows[0])
        return square - mean_square(w.conj() * content, both[1], rows[1]) + mean**2


class _Bias:
    """A bias over the keys that each query sees, minus its value at the query's own position.

    mean, variance, square  [_k, _g, L] of the bias; ``square`` is the mean square of the original bias
    common                  [_b, _k, _g, L, F] the sum of bias times position features, minus the first position's
    """

    def __init__(self, tile: _Tile, bias: Float[Tensor, "_h D"]) -> None:
        self.length, self.causal = tile.length, tile.keys.causal
        self.reach = self.length if tile.keys.window is None else min(self.length, tile.keys.window)
        first = 0 if self.causal else bias.shape[-1] // 2 + 1 - self.length
        bias = bias[:, first : first + (self.length if self.causal else 2 * self.length - 1)]
        rows = torch.arange(self.length, device=bias.device)
        num_visible = (rows + 1).clamp(max=self.reach).double() if self.causal else self.length
        self.square = tile.by_group(self._visible_sums(bias**2) / num_visible)
        bias = bias - bias[:, :1] if self.causal else bias - bias[:, self.length - 1 : self.length]
        self.mean = tile.by_group(self._visible_sums(bias) / num_visible)
        self.variance = tile.by_group(self._visible_sums(bias**2) / num_visible) - self.mean**2
        positions = tile.position_features(slice(0, self.length)) - tile.first_features
        if len(bias) > 1 and positions.shape[1] > 1:
            positions = positions.expand(-1, *tile.group_shape, -1, -1)
        positions = positions.flatten(1, 2)
        kernel = ToeplitzMatrix.from_bias(bias, self.length, self.causal, self.reach)
        sums = [kernel.apply(columns) for columns in positions.split(_COLUMNS, dim=-1) if columns.shape[-1]]
        self.common = tile.by_group(torch.cat(sums, dim=-1) if sums else positions, dim=1)

    def _visible_sums(self, values: Float[Tensor, "_h D"]) -> Float[Tensor, "_h L"]:
        """Sums over the visible keys."""
        sums = values.cumsum(-1)
        if self.causal:
            sums[:, self.reach :] = sums[:, self.reach - 1, None]
            return sums
        return sums[:, self.length - 1 :] - sums[:, : self.length] + values[:, : self.length]


def _select_heads(x: Tensor, heads: slice) -> Tensor:
    """The rows of these heads; a single row belongs to all heads."""
    return x if len(x) == 1 else x[heads]
