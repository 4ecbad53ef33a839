"""Control of a rotation's bands in a model that is there: rotations stopped, pairs taken out, bands exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from toeplens.encodings.kit import require_indices
from toeplens.ground import InputError


@dataclass(frozen=True)
class BandControl:
    """What is done to the frequencies of a rotation, t = 0 (the highest) .. n - 1.

    still   these pairs no longer turn, and their content counts as if all offsets were 0: E_t becomes J (up to the
            encoding's own magnitude)
    silent  these pairs are taken out: their part of every logit is 0
    order   pair t turns as pair ``order[t]`` did; None for all as they are
    heads   the heads that are meant; None for all

    Raises `InputError` for pairs that are to be both still and silent.
    """

    still: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    order: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if set(self.still) & set(self.silent):
            raise InputError("silent: some of its pairs were given in still too; each must be in one of the two.")

    def check(self, pairs: int, num_heads: int) -> None:
        """Raise an `InputError` unless all of it fits ``pairs`` frequencies and ``num_heads`` heads."""
        for field, given, most in (
            ("still", self.still, pairs),
            ("silent", self.silent, pairs),
            ("heads", self.heads or (), num_heads),
        ):
            require_indices(field, given, most)
        if self.order is not None and sorted(self.order) != list(range(pairs)):
            raise InputError(f"order: {list(self.order)} was given; it must name each of 0 to {pairs - 1} once.")

    def tables(
        self, cos: Float[Tensor, "*B H N n"], sin: Float[Tensor, "*B H N n"], num_heads: int
    ) -> tuple[Tensor, Tensor]:
        """The cosines and sines that are left of these (H is 1 where heads share them)."""
        after = torch.complex(cos, sin)
        after = self._changed(after.movedim(-1, -2)).movedim(-2, -1)
        kept = self._chosen(num_heads, cos.device)
        if kept is not None:
            after = torch.where(kept[:, None, None], after, torch.complex(cos, sin))
        return after.real, after.imag

    def kernel(self, kernel: Complex[Tensor, "H n D"], num_heads: int) -> Complex[Tensor, "G n D"]:
        """What is left of a rotation's kernel."""
        kept = self._chosen(num_heads, kernel.device)
        after = self._changed(kernel)
        return after if kept is None else torch.where(kept[:, None, None], after, kernel)

    def _changed(self, turns: Complex[Tensor, "*B n D"]) -> Complex[Tensor, "*B n D"]:
        pairs = turns.shape[-2]
        turns = turns if self.order is None else turns[..., list(self.order), :]
        still, silent = (self._marked(bands, pairs, turns.device).unsqueeze(-1) for bands in (self.still, self.silent))
        turns = torch.where(still, turns.abs().to(turns.dtype), turns)
        return torch.where(silent, torch.zeros_like(turns), turns)

    @staticmethod
    def _marked(indices: Sequence[int], count: int, device: torch.device) -> Bool[Tensor, "count"]:
        marks = torch.zeros(count, dtype=torch.bool, device=device)
        marks[list(indices)] = True
        return marks

    def _chosen(self, num_heads: int, device: torch.device) -> Bool[Tensor, "H"] | None:
        return None if self.heads is None else self._marked(self.heads, num_heads, device)


def swapped(pairs: int, first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """The ``order`` in which two bands of the same size exchange their frequencies, the first for the first."""
    order = list(range(pairs))
    bands = [*first, *second]
    if len(first) != len(second) or len(set(bands)) != len(bands) or not all(0 <= t < pairs for t in bands):
        raise InputError(
            f"second: {list(second)} was given for {list(first)}; two bands that are exchanged have as many different "
            f"indices from 0 to {pairs - 1}, none in both."
        )
    for t, s in zip(first, second, strict=True):
        order[t], order[s] = s, t
    return tuple(order)
