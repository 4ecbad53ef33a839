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

with Cov' without the conjugate (`summed_squares`). The sums over j of e^(-iota j (theta_t +- theta_s)) are accumulated
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
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.lens.kit.movable import (
    Keys,
    MovableKeys,
    PairwiseLogits,
    complex_pairs,
    joined,
    parts_of,
    turned_by,
)
from toeplens.lens.kit.terms import Offsets
from toeplens.lens.kit.toeplitz import finite

STEP = 8  # number of queries that see each other's rows one by one


@dataclass(frozen=True)
class Met:
    """Rows that only some queries of a chunk see, centred on the mean of the rows that all of them see.

    own   [..., C, F] the chunk's own rows; query r sees those up to row r
    far   [..., C - 1, F] with a window, rows of the previous block, which query r sees from row r on; otherwise None
    """

    own: Tensor
    far: Tensor | None

    def of(self, change: Callable[[Tensor], Tensor]) -> Met:
        return Met(change(self.own), None if self.far is None else change(self.far))

    def summed(self) -> Float[Tensor, "*B C F"]:
        """Sums over the rows that each query sees."""
        return with_far(self.own.cumsum(-2), None if self.far is None else from_each(self.far, -2), -2)

    def stepped(
        self, products: Float[Tensor, "*B two_n two_n"]
    ) -> tuple[Float[Tensor, "*B U two_n two_n"], Float[Tensor, "*B U P two_n"]]:
        """For each step of queries, the products of the rows that all its queries see, and the rows only some see.

        ``products`` are the sums of products over the rows that all queries of the chunk see.
        """
        own = _steps(self.own)
        steps = own.shape[-3]
        known = products.unsqueeze(-3) + _before(own.mT @ own)
        if self.far is None:
            return known, own
        far, others = self.far[..., : steps * STEP, :], self.far[..., steps * STEP :, :]
        far = _steps(F.pad(far, (0, 0, 0, max(0, steps * STEP - far.shape[-2]))))
        after = _before((far.mT @ far).flip(-3)).flip(-3)
        return known + after + (others.mT @ others).unsqueeze(-3), torch.cat((own, far), dim=-2)

    def along(self, weights: Float[Tensor, "*_B C F"]) -> tuple[Float[Tensor, "*_B C"], Float[Tensor, "*_B C"]]:
        """The sums of (weights . row)^2 and of weights . row, over the rows that each query sees."""
        own = times(weights, self.own.mT).tril()
        square, total = own.square().sum(-1), own.sum(-1)
        if self.far is None:
            return square, total
        far = times(weights, self.far.mT).triu()
        return square + far.square().sum(-1), total + far.sum(-1)


@dataclass(frozen=True)
class Moments:
    """The number and mean of some rows, and the sums of their products about it."""

    count: int
    mean: Float[Tensor, "*B 1 F"]
    products: Float[Tensor, "*B F F"]

    def added(self, rows: Float[Tensor, "*B C F"]) -> Moments:
        """With more rows, centred on this mean."""
        count = self.count + rows.shape[-2]
        shift = rows.sum(-2, keepdim=True) / count
        return Moments(count, self.mean + shift, self.products + rows.mT @ rows - count * (shift.mT @ shift))

    def joined(self, other: Moments) -> Moments:
        """With the rows of another."""
        if not self.count or not other.count:
            return self if self.count else other
        shift, both = other.mean - self.mean, self.count + other.count
        products = self.products + other.products + self.count * other.count / both * (shift.mT @ shift)
        return Moments(both, self.mean + other.count / both * shift, products)

    def of(
        self, weights: Float[Tensor, "*_B C F"], met: Met | None, seen: Float[Tensor, "_"]
    ) -> tuple[Float[Tensor, "*_B C"], Float[Tensor, "*_B C"] | float]:
        """Mean square and mean of weights . row about this mean, over these rows and those that each query adds."""
        square, total = (times(weights, self.products) * weights).sum(-1), 0.0
        if met is not None:
            squares, sums = met.along(weights)
            square, total = square + squares, sums / seen
        return square / seen, total


@dataclass(frozen=True)
class Sums:
    """Moments of some keys and positions; ``squares`` [b, k, 1] are their squared lengths, not centred."""

    contents: Moments
    positions: Moments
    squares: Tensor

    def added(self, contents: Tensor, positions: Tensor, squares: Tensor) -> Sums:
        """With more rows, centred on these means."""
        return Sums(self.contents.added(contents), self.positions.added(positions), self.squares + squares.sum(-1))

    def joined(self, other: Sums) -> Sums:
        both = self.contents.joined(other.contents), self.positions.joined(other.positions)
        return Sums(*both, self.squares + other.squares)


def times(x: Float[Tensor, "*B C F"], shared: Float[Tensor, "*_B F e"]) -> Float[Tensor, "*B C e"]:
    """x @ shared; all rows multiplied by the same matrix form one matrix product."""
    rows = x
    while shared.ndim > 2 and shared.shape[-3] == 1:
        shared, rows = shared.squeeze(-3), rows.flatten(-3, -2)
    return (rows @ shared).reshape(*x.shape[:-1], shared.shape[-1])


def from_each(x: Tensor, dim: int) -> Tensor:
    """Sums over each row and all later ones."""
    return x.flip(dim).cumsum(dim).flip(dim)


def with_far(sums: Tensor, far: Tensor | None, dim: int) -> Tensor:
    """Add to each query's sums those of the ``far`` rows that it sees."""
    if far is not None:
        count = min(sums.shape[dim], far.shape[dim])
        sums.narrow(dim, 0, count).add_(far.narrow(dim, 0, count))
    return sums


def summed_squares(
    w: Complex[Tensor, "b k g C n"], contents: tuple[Tensor, Met], positions: tuple[Tensor, Met]
) -> Float[Tensor, "b k g C"]:
    """For each query, the sum over the visible j and m of A_jm^2, where A_jm = Re sum_t w_t e_jt conj(c_mt).

    With S = sum_j e_j e_j^H and S' = sum_j e_j e_j^T over the positions, and Z, Z' likewise for the contents, it is
    1/2 Re [ w^T (S * conj Z) conj w + w^T (S' * conj Z') w ], with * entry by entry: n^2 operations per query, for the
    rows that all queries of a step see. Rows that only some see are handled one by one: with u = w e_j, the sum over
    the contents is the quadratic form of u in the contents' products, and likewise with the roles swapped. A_jm is
    formed where both are such rows. Contents are [b, k, ..], shared by g heads, positions [1, k or 1, ..]; of each the
    products over the rows that all queries see, and the others, with real and imaginary parts alternating.
    """
    seen, near_contents = contents[1].stepped(contents[0])
    placed, near_positions = positions[1].stepped(positions[0])
    count, group = w.shape[-2], w.shape[-3]
    queries = _steps(w).transpose(-4, -3).flatten(-3, -2)  # [b, k, U, g STEP, n]
    total = _formed(queries, placed, seen)
    own = torch.ones(STEP, STEP, dtype=torch.bool, device=w.device)  # the step's own rows, then the far ones
    allowed = torch.cat((own.tril(), own.triu()), dim=-1)[:, : near_contents.shape[-2]].repeat(group, 1)
    query, row = allowed.nonzero().unbind(-1)
    chosen = queries[..., query, :]
    put = joined(_complex(near_positions)[..., row, :] * chosen)
    taken = joined(_complex(near_contents)[..., row, :] * chosen.conj())
    each = ((put @ seen) * put).sum(-1) + ((taken @ placed) * taken).sum(-1)
    each = each + ((put @ near_contents.mT).square() * allowed[query]).sum(-1)
    total = total.index_add_(-1, query, each).unflatten(-1, (group, -1))
    return total.transpose(-3, -2).flatten(-2)[..., :count]


def _formed(
    w: Complex[Tensor, "*B C n"], positions: Float[Tensor, "*_B two_n two_n"], contents: Float[Tensor, "*B two_n two_n"]
) -> Float[Tensor, "*B C"]:
    """The sum for queries that see the same rows."""
    both = zip(_products(positions), _products(contents), strict=True)
    plain, turned = (w @ (a * b.conj()) for a, b in both)
    return ((plain * w.conj()).real + (turned * w).real).sum(-1) / 2


def _products(x: Float[Tensor, "*B two_n two_n"]) -> tuple[Complex[Tensor, "*B n n"], Complex[Tensor, "*B n n"]]:
    """sum x x^H and sum x x^T, from the products of real and imaginary parts."""
    real, imaginary = _complex(x[..., 0::2, :]), _complex(x[..., 1::2, :])  # [t, s] of Re x_t, Im x_t and x_s
    return real.conj() + 1j * imaginary.conj(), real + 1j * imaginary


def _complex(x: Float[Tensor, "*B two_n"]) -> Complex[Tensor, "*B n"]:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _steps(x: Tensor) -> Tensor:
    """Cut [*B, C, F] into [*B, U, STEP, F], padded with zeros."""
    more = -x.shape[-2] % STEP
    return F.pad(x, (0, 0, 0, more)).unflatten(-2, (-1, STEP))


def _before(x: Float[Tensor, "*B U n n"]) -> Float[Tensor, "*B U n n"]:
    """The sums over the steps before each."""
    return F.pad(x[..., :-1, :, :].cumsum(-3), (0, 0, 0, 0, 1, 0))


CHUNK = 32  # queries at once; within their own chunk they see the keys one by one
BLOCK = 2**21  # target size of a working array, in numbers
_WHOLE = 2**25  # target size of an array over all positions, in numbers
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
def two_way(keys: Keys) -> TwoWay:
    """The two-way analysis of variance of every query's table, in O(N d^2) time and O(N d) memory per head.

    A bias by query and position adds only to Var(P), in O(N^2 d) time. A window of w keys needs O(w d^2 / chunk) more
    memory. `PairwiseLogits` take O(N^3) time and O(N^2) memory. Raises `InputError` for numbers that are not finite.
    """
    if isinstance(keys, PairwiseLogits):
        return _tabled(keys)
    assert isinstance(keys, MovableKeys)
    found = torch.zeros(4, *keys.q.shape[:3], dtype=torch.float64, device=keys.q.device)
    for part in parts_of(replace(keys, table=None)):
        some = found[:, part.sequences]
        some[..., part.queries] = _variances(part.keys)[..., part.rows]
        found[:, part.sequences] = some
    if keys.table is not None:
        _add_table(found, keys)
    return TwoWay(*found.clamp(min=0))


def _add_table(found: Float[Tensor, "4 B H N"], keys: MovableKeys) -> None:
    """Replace Var(P) and the size by those with a bias by query and position."""
    assert keys.table is not None
    length, pairs, seen = keys.q.shape[2], keys.pairs, keys.seen()
    for queries in torch.arange(length, device=keys.q.device).split(max(1, BLOCK // (keys.q.shape[1] * length))):
        visible = keys.visible(queries).double()
        each = visible / visible.sum(-1, keepdim=True).clamp(min=1)
        for sequence, weights in enumerate(each):
            q = keys.ordered(keys.q[sequence, :, queries])
            mean = weights @ keys.ordered(keys.content[sequence])[keys.key_heads()]
            turned = complex_pairs(q, pairs) * complex_pairs(mean, pairs).conj() @ keys.turns.mT
            still = (q[..., 2 * pairs :] * mean[..., 2 * pairs :]).sum(-1, keepdim=True)
            position = turned.real + still + keys.of_positions(sequence, queries)
            away = position - (position * weights).sum(-1, keepdim=True)
            several = seen[sequence, queries] > 1
            table = keys.table[sequence if len(keys.table) > 1 else 0][:, queries].double()
            found[0, sequence, :, queries] = (away.square() * weights).sum(-1) * several
            found[3, sequence, :, queries] += (table.square() * weights).sum(-1) * several
    finite(found[0].sum(), q=keys.q, k=keys.content, bias=keys.table)


def _tabled(keys: PairwiseLogits) -> TwoWay:
    """The variances from the computed tables, over the visible keys; 0 with fewer than two keys."""
    found = torch.zeros(4, *keys.layer.q.shape[:3], dtype=torch.float64, device=keys.ends.device)
    for sequences, queries, table, seen in keys.tables():
        both = (seen.unsqueeze(-1) & seen.unsqueeze(-2)).unsqueeze(1)
        count = torch.where(seen.sum(-1) > 1, seen.sum(-1), torch.inf).unsqueeze(1).double()
        table = table.masked_fill(~both, 0)
        size = table.square().sum((-2, -1)) / count**2
        mean = table.sum((-2, -1)) / count**2
        table = torch.where(both, table - mean[..., None, None], 0)
        position, content = (table.sum(dim) / count.unsqueeze(-1) for dim in (-1, -2))
        rest = torch.where(both, table - position.unsqueeze(-1) - content.unsqueeze(-2), 0)
        position, content = (x.square().sum(-1) / count for x in (position, content))
        parts = (position, content, rest.square().sum((-2, -1)) / count**2, size)
        found[:, sequences, :, queries] = torch.stack(parts)
    finite(found.sum(), q=keys.layer.q, k=keys.layer.k)
    return TwoWay(*found)


def _variances(keys: MovableKeys) -> Float[Tensor, "4 B H N"]:
    """Var(P), Var(S), Var(I) and size, for keys without chunks; with a window only for causal attention."""
    found = torch.zeros(4, *keys.q.shape[:3], dtype=torch.float64, device=keys.q.device)
    seen = keys.seen()
    for sequences, heads in _tiles(keys):
        if not (seen[sequences] > 1).any():
            continue
        for rows, values in _Tile(keys, sequences, heads).run():
            found[:, sequences, heads, rows] = values
    found = torch.where(seen.unsqueeze(1) > 1, found, 0)
    others = {"k_position": keys.places, "rotation": keys.turns.real, "bias": keys.bias}
    finite(found.sum(), q=keys.q, k=keys.content, **{name: x for name, x in others.items() if x is not None})
    return found


def _tiles(keys: MovableKeys) -> Iterator[tuple[slice, slice]]:
    """Sequences and heads to process together: all that share some keys, or some of those that share one."""
    count, heads, length, width = keys.q.shape
    group = heads // keys.content.shape[1]
    numbers = CHUNK * max(4 * keys.pairs * (STEP + keys.pairs // STEP), width)
    whole = 0 if keys.bias is None else length * (2 * keys.pairs + (0 if keys.places is None else width))
    at_once = max(1, min(BLOCK // numbers, _WHOLE // max(1, whole)))
    together = max(1, at_once // heads) if keys.causal or bool((keys.ends == keys.ends[0]).all()) else 1
    at_once = at_once if at_once < group else at_once - at_once % group
    whole_groups = max(group, at_once)
    for start in range(0, count, together):
        for first in range(0, heads, whole_groups):
            last = min(first + whole_groups, heads)
            for head in range(first, last, at_once):
                yield slice(start, min(start + together, count)), slice(head, min(head + at_once, last))


class _Chunk(NamedTuple):
    """The keys and positions that only some queries of a chunk see, and sums of their squared lengths."""

    contents: Met
    positions: Met
    squares: Float[Tensor, "b k 1 C"]


class _Tile:
    """Some heads of some sequences, processed in chunks of positions.

    Queries are [b, k, g, ..], for k key heads shared by g heads each; contents and positions are [b, k, 1, ..]. If
    every head has its own rotation, nothing is shared: k is then the number of heads, and g is 1.
    """

    def __init__(self, keys: MovableKeys, sequences: slice, heads: slice) -> None:
        self.movable, self.sequences, self.heads = keys, sequences, heads
        self.length = int(keys.ends[sequences].max())
        own = keys.key_heads(heads)
        count = len(own)
        self.own = own if len(keys.turns) > 1 else slice(int(own[0]), int(own[-1]) + 1)
        self.content = keys.content[sequences][:, self.own]
        self.grouped = self.content.shape[1], count // self.content.shape[1]  # k, g
        self.turns = self.by_group(_by_head(keys.turns, heads))
        self.first = self.at(self._rows(0, 1)[0])
        self.dtype = torch.float64 if keys.content.dtype == torch.float64 else torch.float32
        self.bias = None if keys.bias is None else _Bias(self, _by_head(keys.bias.double(), heads))

    def by_group(self, x: Tensor, dim: int = 0) -> Tensor:
        """Unflatten a dimension over heads, key heads or 1 into key heads and the heads that share each."""
        return x.unflatten(dim, self.grouped if x.shape[dim] == math.prod(self.grouped) else (-1, 1))

    def run(self) -> Iterator[tuple[slice, Float[Tensor, "4 b h C"]]]:
        """Var(P), Var(S), Var(I) and size, some queries at a time."""
        for rows, before, chunk in self._chunks():
            yield slice(int(rows[0]), int(rows[-1]) + 1), self._answer(rows, before, chunk).flatten(2, 3)

    def _chunks(self) -> Iterator[tuple[Tensor, Sums, _Chunk | None]]:
        """Chunks of queries, the rows that all of them see, and, if causal, those that only some see."""
        if not self.movable.causal:
            every_chunk = self._rows(0, self.length)
            every = self._none(every_chunk[0])
            for rows in every_chunk:
                every = every.added(*self.about(rows, every))
            yield from ((rows, every, None) for rows in every_chunk)
            return
        size = self.length if self.movable.window is None else self.movable.window
        far: list[tuple[Tensor, Sums]] = []
        for start in range(0, self.length, size):
            chunks = self._rows(start, min(start + size, self.length))
            own = self._none(chunks[0])
            for index, rows in enumerate(chunks):
                there, after = far[index] if far else (None, None)
                before = own if after is None else after.joined(own)
                yield rows, before, self._chunk(rows, there, before)
                own = own.added(*self.about(rows, own))
            if start + size < self.length:  # the chunks of this block, and the sums over all later rows of it
                after, far = self._none(chunks[-1]), []
                for rows in reversed(chunks):
                    far.insert(0, (rows, after))
                    after = after.added(*self.about(rows, after))

    def at(self, rows: Int[Tensor, "C"]) -> Float[Tensor, "_b _k 1 C F"]:
        """The features of a position: e_j, real and imaginary parts, and R_j p_j."""
        turns, places = self.turns[:, :, rows], self.movable.places
        turned = joined(turns).unsqueeze(0)
        if places is None:
            return turned
        places = places[self.sequences] if len(places) > 1 else places
        p = self.movable.ordered(places[:, :, rows])
        p = (p[:, self.own] if p.shape[1] > 1 else p).unsqueeze(2)
        p = turned_by(complex_pairs(p, self.movable.pairs) * turns.conj(), p)
        lead = torch.broadcast_shapes(turned.shape[:3], p.shape[:3])
        return torch.cat((turned.expand(*lead, -1, -1), p.expand(*lead, -1, -1)), dim=-1)

    def about(
        self, rows: Int[Tensor, "C"], sums: Sums
    ) -> tuple[Float[Tensor, "b k 1 C d"], Float[Tensor, "_b _k 1 C F"], Float[Tensor, "b k 1 C"]]:
        """Keys and positions about the means of ``sums``, and their squared lengths, not centred."""
        contents, positions = self._contents(rows), self.at(rows)
        squares = contents.square().sum(-1) + positions[..., 2 * self.movable.pairs :].square().sum(-1)
        return contents - sums.contents.mean, positions - sums.positions.mean, squares

    def _rows(self, start: int, stop: int) -> list[Int[Tensor, "_"]]:
        return list(torch.arange(start, stop, device=self.movable.q.device).split(CHUNK))

    def _none(self, rows: Int[Tensor, "C"]) -> Sums:
        """Empty sums, centred on the mean of these rows."""
        means = [x.mean(-2, keepdim=True) for x in (self._contents(rows), self.at(rows))]
        contents, positions = (Moments(0, x, x.new_zeros(*x.shape[:-2], x.shape[-1], x.shape[-1])) for x in means)
        return Sums(contents, positions, torch.zeros_like(means[0][..., 0, 0]))

    def _contents(self, rows: Int[Tensor, "C"]) -> Float[Tensor, "b k 1 C d"]:
        return self.movable.ordered(self.content[:, :, rows]).unsqueeze(2)

    def _shared(self, positions: Float[Tensor, "_b _k 1 C F"]) -> Float[Tensor, "1 _k 1 C F"]:
        """Position features, once for all sequences and heads that share the rotation."""
        return positions[:1, : len(self.turns)]

    def _chunk(self, rows: Int[Tensor, "C"], far: Int[Tensor, "_"] | None, before: Sums) -> _Chunk:
        """A chunk, and the one a window earlier, about the means of ``before``."""
        contents, positions, squares = self.about(rows, before)
        squares = squares.cumsum(-1)
        far_contents = far_positions = None
        if far is not None and len(far) > 1:
            far_contents, far_positions, lengths = self.about(far[1:], before)
            squares = with_far(squares, from_each(lengths, -1), -1)
        return _Chunk(Met(contents, far_contents), Met(positions, far_positions), squares)

    def _answer(self, rows: Int[Tensor, "C"], before: Sums, chunk: _Chunk | None) -> Float[Tensor, "4 b k g C"]:
        """The variances of queries that all see ``before``, and each its own part of the chunk."""
        keys, pairs = self.movable, self.movable.pairs
        seen = rows * 0 + before.contents.count if chunk is None else rows + 1
        seen = seen.double() if keys.window is None else seen.clamp(max=keys.window).double()
        q = keys.ordered(keys.q[self.sequences, self.heads, rows]).unflatten(1, self.grouped)
        w = complex_pairs(q, pairs)
        met = (None, None) if chunk is None else (chunk.contents, chunk.positions)
        content, position = (
            x.mean * 0 if rows is None else rows.summed() / seen.unsqueeze(-1)
            for x, rows in zip((before.contents, before.positions), met, strict=True)
        )
        content_mean, position_mean = before.contents.mean + content, before.positions.mean + position
        weights = joined(w.conj() * complex_pairs(content_mean, pairs))
        if keys.places is not None:
            weights = torch.cat((weights, turned_by(w, q)), dim=-1)
        square, mean = before.positions.of(weights, met[1], seen)
        positional = square - mean**2
        square, mean = before.contents.of(turned_by(w * complex_pairs(position_mean, pairs), q), met[0], seen)
        symbolic = square - mean**2
        squares = before.squares.unsqueeze(-1) + (0 if chunk is None else chunk.squares)
        size = q.square().sum(-1) * squares / seen
        if self.bias is not None:
            common = self.bias.common[:, :, :, rows] / seen.unsqueeze(-1)
            common = common - (position_mean - self.first) * self.bias.mean[..., rows].unsqueeze(-1)
            positional = positional + 2 * (weights * common).sum(-1) + self.bias.variance[..., rows]
            size = size + self.bias.square[..., rows]
        moved = complex_pairs(content, pairs), complex_pairs(position, pairs)
        interaction = self._interaction(w, *moved, before, chunk, seen)
        return torch.stack([x.expand_as(symbolic) for x in (positional, symbolic, interaction, size)])

    def _interaction(
        self,
        w: Complex[Tensor, "b k g C n"],
        content: Complex[Tensor, "b k 1 _C n"],
        position: Complex[Tensor, "_b _k 1 _C n"],
        before: Sums,
        chunk: _Chunk | None,
        seen: Float[Tensor, "C"],
    ) -> Float[Tensor, "b k g C"]:
        """Var(I), from squares about the means of ``before``; the true means differ by ``content`` and ``position``."""
        pairs = w.shape[-1]
        if not pairs:
            return w.real.sum(-1)
        products = before.contents.products, self._shared(before.positions.products)
        contents, positions = (x[..., : 2 * pairs, : 2 * pairs] for x in products)
        if chunk is None:
            both = (x.squeeze(2).contiguous() for x in (positions, contents))
            return _formed(w.flatten(-3, -2), *both).unflatten(-1, w.shape[-3:-1]) / seen**2
        dtype = (
            self.dtype if before.contents.count else torch.float64
        )  # the first rows are centred on a mean of later ones too

        def narrow(x: Tensor) -> Tensor:
            return x[..., : 2 * pairs].squeeze(2).to(dtype).contiguous()

        own = chunk.contents.of(narrow), chunk.positions.of(lambda x: narrow(self._shared(x)))
        square = (
            summed_squares(w.to(dtype.to_complex()), (narrow(contents), own[0]), (narrow(positions), own[1])) / seen**2
        )
        by_content = _wide(joined(w * position), before.contents.mean.shape[-1])
        by_position = _wide(joined(w.conj() * content), before.positions.mean.shape[-1])
        mean = (w * position * content.conj()).sum(-1).real
        square = square - before.contents.of(by_content, chunk.contents, seen)[0]
        return square - before.positions.of(by_position, chunk.positions, seen)[0] + mean**2


class _Bias:
    """A bias over the keys that each query sees, minus its value at the query's own position.

    mean, variance, square  [_k, _g, L] of the bias; ``square`` is the mean square of the original bias
    common                  [_b, _k, _g, L, F] the sum of bias times position features, minus the first position's
    """

    def __init__(self, tile: _Tile, bias: Float[Tensor, "_h D"]) -> None:
        self.length, self.causal = tile.length, tile.movable.causal
        self.reach = self.length if tile.movable.window is None else min(self.length, tile.movable.window)
        first = 0 if self.causal else bias.shape[-1] // 2 + 1 - self.length
        bias = bias[:, first : first + (self.length if self.causal else 2 * self.length - 1)]
        rows = torch.arange(self.length, device=bias.device)
        seen = (rows + 1).clamp(max=self.reach).double() if self.causal else self.length
        self.square = tile.by_group(self._windows(bias**2) / seen)
        bias = bias - bias[:, :1] if self.causal else bias - bias[:, self.length - 1 : self.length]
        self.mean = tile.by_group(self._windows(bias) / seen)
        self.variance = tile.by_group(self._windows(bias**2) / seen) - self.mean**2
        positions = tile.at(rows) - tile.first
        if len(bias) > 1 and positions.shape[1] > 1:
            positions = positions.expand(-1, *tile.grouped, -1, -1)
        positions = positions.flatten(1, 2)
        kernel = Offsets.of(bias, self.length, self.causal, self.reach)
        made = [kernel.apply(some) for some in positions.split(_COLUMNS, dim=-1) if some.shape[-1]]
        self.common = tile.by_group(torch.cat(made, dim=-1) if made else positions, dim=1)

    def _windows(self, values: Float[Tensor, "_h D"]) -> Float[Tensor, "_h L"]:
        """Sums over the visible keys."""
        sums = values.cumsum(-1)
        if self.causal:
            sums[:, self.reach :] = sums[:, self.reach - 1, None]
            return sums
        return sums[:, self.length - 1 :] - sums[:, : self.length] + values[:, : self.length]


def _by_head(x: Tensor, heads: slice) -> Tensor:
    """The rows of these heads; a single row belongs to all heads."""
    return x if len(x) == 1 else x[heads]


def _wide(x: Float[Tensor, "*B _"], width: int) -> Float[Tensor, "*B F"]:
    return F.pad(x, (0, width - x.shape[-1]))
