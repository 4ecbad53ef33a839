"""Terms of attention logits and their shares of the variance of the whole, without forming queries by keys.

A term is a product q_i . k_j, or a fixed matrix: by offset (a position kernel), or written out. Its share is its
covariance with the whole, over the variance of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from scipy.fft import next_fast_len
from torch import Tensor
from torch.nn import functional as F

from toeplens.lens.kit.sums import inner_within, over_keys

_NOTHING = 1e-12  # of the energy before any mean is taken off: a variance below it is rounding


# What a term has in common with the whole, over the sequences of a batch: the sum over the visible pairs of the term,
# and of it times the whole; over queries that of (row sum of the term) (row sum of the whole) / (keys that are seen)
CovarianceSums = Float[Tensor, "3 H *_columns"]


@dataclass(frozen=True)
class Offsets:
    """A Toeplitz matrix by its kernel, [H, 2N - 1] at offsets i - j = -(N - 1) .. N - 1; invisible pairs count as 0."""

    kernel: Float[Tensor, "H D"]
    causal: bool

    @classmethod
    def of(cls, bias: Float[Tensor, "H _"], length: int, causal: bool, window: int | None) -> Offsets:
        """Of a bias at the offsets 0 .. N-1 if ``causal``, 0 from ``window`` on; else at all of them."""
        reach = length if window is None else min(length, window)
        return cls(F.pad(bias[:, :reach], (length - 1, length - reach)) if causal else bias, causal)

    def apply(self, x: Float[Tensor, "B _H N d"]) -> Float[Tensor, "B _H2 N d"]:
        """The matrix times ``x``, summed over the visible keys."""
        length = x.shape[-2]
        kernel = self.kernel[:, length - 1 :] if self.causal else self.kernel
        size = next_fast_len(2 * length - 1, real=True)  # what wraps around is not kept
        wave = torch.fft.rfft(kernel, size).unsqueeze(-1) * torch.fft.rfft(x, size, dim=-2)
        first = 0 if self.causal else length - 1
        return torch.fft.irfft(wave, size, dim=-2)[..., first : first + length, :]

    def times(self, other: Fixed) -> Offsets:
        """The Hadamard product with another matrix of the same kind."""
        assert isinstance(other, Offsets)
        return Offsets(self.kernel * other.kernel, self.causal)

    def at(self, queries: Int[Tensor, "Q"], sequence: int) -> Float[Tensor, "H Q N"]:
        """Some queries' rows for one sequence of the batch."""
        length = (self.kernel.shape[1] + 1) // 2
        offsets = queries.unsqueeze(1) - torch.arange(length, device=self.kernel.device)
        rows = self.kernel[:, offsets + length - 1]
        return rows.masked_fill(offsets < 0, 0) if self.causal else rows


@dataclass(frozen=True)
class Written:
    """A matrix written out, [B or 1, H, N, N], 0 where a pair is not visible; does what `Offsets` does."""

    matrix: Float[Tensor, "_ H N N"]

    def apply(self, x: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H N d"]:
        return self.matrix @ x

    def times(self, other: Fixed) -> Written:
        assert isinstance(other, Written)
        return Written(self.matrix * other.matrix)

    def at(self, queries: Int[Tensor, "Q"], sequence: int) -> Float[Tensor, "H Q N"]:
        return self.matrix[sequence if len(self.matrix) > 1 else 0][:, queries]


Fixed = Offsets | Written  # a matrix of logits that is known by itself


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
        fixed: Sequence[Fixed],
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
        """The term q_i . k_j, dimension by dimension: [3, H, e]."""
        if not (q.any() and k.any()):
            return q.new_zeros(3, q.shape[1], q.shape[-1])
        raw = inner_within(self.window, q, k, self.q, self.k, causal=self.causal).sum(0)
        for term in self.fixed:
            raw = raw + (q * term.apply(k)).sum((0, 2))
        rows = self._rows(q, k)
        return torch.stack((rows.sum((0, 2)), raw, (rows * (self.row_sums / self.seen).unsqueeze(-1)).sum((0, 2))))

    def known(self, term: Fixed) -> CovarianceSums:
        """A fixed term: [3, H]."""
        raw = (self.q * term.apply(self.k)).sum((0, 2, 3))
        for other in self.fixed:
            raw = raw + self._fixed_rows(term.times(other)).sum((0, 2))
        rows = self._fixed_rows(term)
        return torch.stack((rows.sum((0, 2)), raw, (rows * self.row_sums / self.seen).sum((0, 2))))

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
    total, inner, rows = term
    of_whole = whole[0] if term.ndim == whole.ndim else whole[0].unsqueeze(-1)
    return inner - total * of_whole / pairs, inner - rows


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


def grouped(x: Float[Tensor, "*B d"], groups: Int[Tensor, "d"], count: int | None = None) -> Float[Tensor, "*B g"]:
    """Dimensions summed by group; ``count`` groups, or as many as occur."""
    count = int(groups.max()) + 1 if count is None else count
    return x.new_zeros(*x.shape[:-1], count).index_add_(-1, groups, x)


def by_column(found: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The spreads of each column of a term, [H] each."""
    return list(zip(*(x.unbind(-1) for x in found), strict=True))
