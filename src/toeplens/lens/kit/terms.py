"""Terms of attention logits and their shares of the variance of the whole, without forming queries by keys.

A term is a product q_i . k_j, or a fixed matrix: by offset (a position kernel), or written out. Its share is its
covariance with the whole, over the variance of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from scipy.fft import next_fast_len
from torch import Tensor

from toeplens.lens.kit.sums import inner_within, over_keys

_NOTHING = 1e-12  # of the energy before any mean is taken off: a variance below it is rounding


@runtime_checkable
class Fixed(Protocol):
    """A matrix of logits that is known by itself; invisible pairs count as 0."""

    def apply(self, x: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H N d"]:
        """The matrix times ``x``, summed over the visible keys."""
        ...

    def times(self, other: Fixed) -> Fixed:
        """The Hadamard product with another matrix of the same kind."""
        ...

    def at(self, queries: Int[Tensor, "Q"], sequence: int) -> Float[Tensor, "H Q N"]:
        """Some queries' rows for one sequence of the batch."""
        ...


@dataclass(frozen=True)
class Offsets:
    """A Toeplitz matrix by its kernel, [H, 2N - 1] at offsets i - j = -(N - 1) .. N - 1."""

    kernel: Float[Tensor, "H D"]
    causal: bool

    def apply(self, x: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H N d"]:
        length = x.shape[-2]
        kernel = self.kernel[:, length - 1 :] if self.causal else self.kernel
        size = next_fast_len(kernel.shape[1] + length - 1, real=True)
        wave = torch.fft.rfft(kernel, size).unsqueeze(-1) * torch.fft.rfft(x, size, dim=-2)
        first = 0 if self.causal else length - 1
        return torch.fft.irfft(wave, size, dim=-2)[..., first : first + length, :]

    def times(self, other: Fixed) -> Offsets:
        assert isinstance(other, Offsets)
        return Offsets(self.kernel * other.kernel, self.causal)

    def at(self, queries: Int[Tensor, "Q"], sequence: int) -> Float[Tensor, "H Q N"]:
        length = (self.kernel.shape[1] + 1) // 2
        offsets = queries.unsqueeze(1) - torch.arange(length, device=self.kernel.device)
        rows = self.kernel[:, offsets + length - 1]
        return rows.masked_fill(offsets < 0, 0) if self.causal else rows


@dataclass(frozen=True)
class Written:
    """A matrix written out, [B or 1, H, N, N], 0 where a pair is not visible."""

    matrix: Float[Tensor, "_ H N N"]

    def apply(self, x: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H N d"]:
        return self.matrix @ x

    def times(self, other: Fixed) -> Written:
        assert isinstance(other, Written)
        return Written(self.matrix * other.matrix)

    def at(self, queries: Int[Tensor, "Q"], sequence: int) -> Float[Tensor, "H Q N"]:
        return self.matrix[sequence if len(self.matrix) > 1 else 0][:, queries]


@dataclass(frozen=True)
class CovarianceSums:
    """What a term has in common with the whole, summed over the sequences of a batch; adds up over batches.

    total   [H, ...] sum of the term over the visible pairs
    inner   [H, ...] sum of the term times the whole
    rows    [H, ...] sum over queries of (row sum of the term) (row sum of the whole) / (keys that the query sees)
    """

    total: Tensor
    inner: Tensor
    rows: Tensor

    def __add__(self, other: CovarianceSums) -> CovarianceSums:
        return CovarianceSums(self.total + other.total, self.inner + other.inner, self.rows + other.rows)

    def summed(self) -> CovarianceSums:
        """Summed over the last dimension."""
        return CovarianceSums(self.total.sum(-1), self.inner.sum(-1), self.rows.sum(-1))


def sum_of(found: list[CovarianceSums]) -> CovarianceSums:
    """The sum over batches."""
    total = found[0]
    for one in found[1:]:
        total = total + one
    return total


class Whole:
    """The logits q_i . k_j + fixed_ij of a batch, over the visible pairs.

    Arguments
        q, k     [B, H, N, d], as they enter the inner product, the scale in q; 0 where nothing is present
        fixed    the fixed terms, all of one kind
        present  [B, N] where there is a token that counts
        causal   whether key j > i is hidden from query i
        asked    [B, N] the queries that count, of those present; q is 0 at the others
        window   how many keys up to its own a query sees at most, if causal; the fixed terms are 0 beyond it
    """

    def __init__(
        self,
        q: Float[Tensor, "B H N d"],
        k: Float[Tensor, "B H N d"],
        fixed: list[Fixed],
        present: Bool[Tensor, "B N"],
        causal: bool,
        asked: Bool[Tensor, "B N"],
        window: int | None = None,
    ) -> None:
        self.q, self.k, self.fixed, self.causal, self.window = q, k, fixed, causal, window
        there, counted = present.to(q.dtype), asked.to(q.dtype)
        self.there, self.asked = (x[:, None, :, None].expand(-1, q.shape[1], -1, -1) for x in (there, counted))
        seen = over_keys(there.unsqueeze(-1), causal, window).squeeze(-1).expand_as(there)
        self.seen = (seen * there).clamp(min=1).unsqueeze(1)  # keys that each query sees
        self.pairs = float((seen * counted).sum())
        self.row_sums = self._rows(q, k).sum(-1) + sum(self._fixed_rows(term) for term in fixed)

    def products(self, q: Float[Tensor, "B H N e"], k: Float[Tensor, "B H N e"]) -> CovarianceSums:
        """The term q_i . k_j, dimension by dimension: [H, e]."""
        if not (q.any() and k.any()):
            nothing = q.new_zeros(q.shape[1], q.shape[-1])
            return CovarianceSums(nothing, nothing, nothing)
        raw = inner_within(self.window, q, k, self.q, self.k, causal=self.causal).sum(0)
        for term in self.fixed:
            raw = raw + (q * term.apply(k)).sum((0, 2))
        rows = self._rows(q, k)
        return CovarianceSums(rows.sum((0, 2)), raw, (rows * (self.row_sums / self.seen).unsqueeze(-1)).sum((0, 2)))

    def known(self, term: Fixed) -> CovarianceSums:
        """A fixed term: [H]."""
        raw = (self.q * term.apply(self.k)).sum((0, 2, 3))
        for other in self.fixed:
            raw = raw + self._fixed_rows(term.times(other)).sum((0, 2))
        rows = self._fixed_rows(term)
        return CovarianceSums(rows.sum((0, 2)), raw, (rows * self.row_sums / self.seen).sum((0, 2)))

    def _rows(self, q: Tensor, k: Tensor) -> Float[Tensor, "B H N e"]:
        return q * over_keys(k, self.causal, self.window)

    def _fixed_rows(self, term: Fixed) -> Float[Tensor, "B H N"]:
        return (term.apply(self.there) * self.asked).squeeze(-1)


@dataclass(frozen=True)
class Shares:
    """Each term's share of the variance of the logits over the visible pairs: its covariance with them, over it.

    Shares sum to 1 and may be negative, where a term works against the rest. A row's mean cannot be seen by a softmax:
    ``softmax`` is the same with each query's mean over its keys removed. NaN where the logits do not vary.
    """

    logits: Float[Tensor, "H P"]
    softmax: Float[Tensor, "H P"]


def spread(term: CovarianceSums, whole: CovarianceSums, pairs: float) -> tuple[Tensor, Tensor]:
    """Sums of products with the whole, less the means: over all pairs, and with each row's mean removed."""
    total = whole.total if term.total.ndim == whole.total.ndim else whole.total.unsqueeze(-1)
    return term.inner - term.total * total / pairs, term.inner - term.rows


def shares_of(
    terms: list[tuple[Tensor, Tensor]], variances: tuple[Tensor, Tensor], energy: Float[Tensor, "H"]
) -> Shares:
    """The terms' spreads over the whole's own; NaN where the whole does not vary.

    Arguments
        terms, variances  spreads, as `spread` gives them
        energy            what the terms hold in absolute value before their means are taken off
    """
    made = []
    for which, variance in enumerate(variances):
        stacked = torch.stack([term[which] for term in terms], dim=-1)
        varies = variance > _NOTHING * energy.clamp(min=1e-300)
        made.append(torch.where(varies.unsqueeze(-1), stacked / variance.unsqueeze(-1), torch.nan))
    return Shares(*made)


def grouped(part: CovarianceSums, groups: Int[Tensor, "d"], count: int | None = None) -> CovarianceSums:
    """A product's dimensions summed by group: [H, groups]; ``count`` groups, or as many as occur."""
    count = int(groups.max()) + 1 if count is None else count

    def gather(x: Tensor) -> Tensor:
        return torch.zeros(x.shape[0], count, dtype=x.dtype, device=x.device).index_add_(1, groups, x)

    return CovarianceSums(gather(part.total), gather(part.inner), gather(part.rows))


def by_column(found: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The spreads of each column of a term, [H] each."""
    return list(zip(*(x.unbind(-1) for x in found), strict=True))
