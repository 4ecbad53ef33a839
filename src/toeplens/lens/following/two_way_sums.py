"""Sums over the rows that a query sees, for `two_way`: of all rows before a chunk, and of those met one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Met:
    """Rows that a chunk's queries meet one by one, about the mean of those that all of its queries see.

    own   [..., C, F] the chunk's own, which query r sees up to row r
    far   [..., C - 1, F] with a window, those of the block before, which query r sees from row r on; else None
    """

    own: Tensor
    far: Tensor | None

    def of(self, change: Callable[[Tensor], Tensor]) -> Met:
        """With both changed alike."""
        return Met(change(self.own), None if self.far is None else change(self.far))

    def summed(self) -> Float[Tensor, "*B C F"]:
        """Over the rows that each query sees."""
        return with_far(self.own.cumsum(-2), None if self.far is None else from_each(self.far, -2), -2)

    def along(self, weights: Float[Tensor, "*_B C F"]) -> tuple[Float[Tensor, "*_B C"], Float[Tensor, "*_B C"]]:
        """The sums of the squares of weights . row and of weights . row, over the rows that each query sees."""
        own = times(weights, self.own.mT).tril()
        square, total = own.square().sum(-1), own.sum(-1)
        if self.far is None:
            return square, total
        far = times(weights, self.far.mT).triu()
        return square + far.square().sum(-1), total + far.sum(-1)


class Moments:
    """Mean and sums of squares and products about it, of some rows; of none, about any mean."""

    def __init__(self, mean: Float[Tensor, "*B 1 F"], products: Float[Tensor, "*B F F"] | None = None) -> None:
        self.mean = mean
        self.products = mean.new_zeros(*mean.shape[:-2], mean.shape[-1], mean.shape[-1])
        self.products = self.products if products is None else products

    def added(self, rows: Float[Tensor, "*B C F"], count: int) -> Moments:
        """With more rows, given about the mean; ``count`` is how many there are then."""
        shift = rows.sum(-2, keepdim=True) / count
        return Moments(self.mean + shift, self.products + rows.mT @ rows - count * (shift.mT @ shift))

    def joined(self, count: int, other: Moments, others: int) -> Moments:
        """With the rows of another; ``count`` and ``others`` are how many each has."""
        shift = other.mean - self.mean
        products = self.products + other.products + count * others / (count + others) * (shift.mT @ shift)
        return Moments(self.mean + others / (count + others) * shift, products)

    def of(
        self, weights: Float[Tensor, "*_B C F"], met: Met | None, seen: Float[Tensor, "_"]
    ) -> tuple[Float[Tensor, "*_B C"], Float[Tensor, "*_B C"] | float]:
        """Mean square and mean of weights . row about the mean here, over the rows here and those met one by one."""
        square, total = (times(weights, self.products) * weights).sum(-1), 0.0
        if met is not None:
            squares, sums = met.along(weights)
            square, total = square + squares, sums / seen
        return square / seen, total


@dataclass(frozen=True)
class Sums:
    """What is kept of some rows of keys and positions.

    count                how many rows
    contents, positions  their moments
    squares              [b, k, 1] the sum of squared lengths of content and position part, not about a mean
    """

    count: int
    contents: Moments
    positions: Moments
    squares: Tensor

    def added(self, contents: Tensor, positions: Tensor, squares: Tensor) -> Sums:
        """With more rows, given about the means here, and their squared lengths."""
        count = self.count + contents.shape[-2]
        moments = self.contents.added(contents, count), self.positions.added(positions, count)
        return Sums(count, *moments, self.squares + squares.sum(-1))

    def joined(self, other: Sums) -> Sums:
        """With the rows of another."""
        if not self.count or not other.count:
            return self if self.count else other
        contents, positions = (
            mine.joined(self.count, its, other.count)
            for mine, its in ((self.contents, other.contents), (self.positions, other.positions))
        )
        return Sums(self.count + other.count, contents, positions, self.squares + other.squares)


def times(x: Float[Tensor, "*B C F"], shared: Float[Tensor, "*_B F e"]) -> Float[Tensor, "*B C e"]:
    """x @ shared, all rows that are multiplied by the same matrix as one product of matrices."""
    rows = x
    while shared.ndim > 2 and shared.shape[-3] == 1:
        shared, rows = shared.squeeze(-3), rows.flatten(-3, -2)
    return (rows @ shared).reshape(*x.shape[:-1], shared.shape[-1])


def from_each(x: Tensor, dim: int) -> Tensor:
    """Sums over the rows from each one on."""
    return x.flip(dim).cumsum(dim).flip(dim)


def with_far(sums: Tensor, far: Tensor | None, dim: int) -> Tensor:
    """Sums of each query of a chunk, in their place with those of ``far``, of all queries of a whole chunk but one."""
    if far is not None:
        count = min(sums.shape[dim], far.shape[dim])
        sums.narrow(dim, 0, count).add_(far.narrow(dim, 0, count))
    return sums
