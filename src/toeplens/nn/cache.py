"""A key cache: keys, values, key features and positions of earlier tokens, with preallocated space for later ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.encodings import Positions
from toeplens.encodings.kit import require_count, require_tensor
from toeplens.encodings.shapes import Keys, Notes
from toeplens.ground import invalid
from toeplens.ground.options import must_be


class Cache:
    """The cache of one attention layer, created by `toeplens.nn.Attention.new_cache` and filled by its ``forward``.

    Keys are cached as projected, unrotated, so that encodings with length-dependent frequencies give the same result as
    a full pass. For inference only: the cache carries no gradients.

    Arguments
        batch   number of sequences
        length  maximum number of tokens per sequence

    ``ragged`` tells whether token positions differ between sequences.
    """

    def __init__(self, batch: int, length: int) -> None:
        require_count(batch=batch, length=length)
        self.batch, self.room, self.filled = batch, length, 0
        self.ragged = False
        self._kept: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return self.filled

    @property
    def notes(self) -> Notes | None:
        """The key features of the cached tokens; None if there are none."""
        return self._so_far("notes", 2) if self.filled else None

    @property
    def padding(self) -> Bool[Tensor, "B N"] | None:
        """True where a cached token is padding; None if the cache is empty."""
        return self._so_far("padding", 1)

    @property
    def next_places(self) -> Int[Tensor, "B"] | None:
        """Number of cached tokens per sequence, without padding; None if the cache is empty."""
        padding = self.padding
        return None if padding is None else (~padding).sum(1)

    def require(self, batch: int, tokens: int) -> None:
        """Raise `InputError` for more tokens than fit, and for another batch size."""
        if batch != self.batch:
            raise invalid("cache", f"be used with {self.batch} sequences", batch)
        if self.filled + tokens > self.room:
            raise invalid("cache", f"have room for the tokens ({self.filled} of {self.room} are used)", tokens)

    def append(
        self,
        k: Keys,
        v: Float[Tensor, "B G N dv"],
        notes: Notes | None,
        positions: Positions,
        padding: Bool[Tensor, "B N"] | None,
        *,
        ragged: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Positions, Bool[Tensor, "B M"] | None]:
        """Append new tokens; returns the same quantities for all cached tokens.

        ``ragged``: whether ``positions`` have one row per sequence. The result has one row per sequence once any call
        did.
        """
        tokens = k.shape[2]
        self.require(len(k), tokens)
        self.ragged = self.ragged or ragged or padding is not None
        positions = positions if ragged else positions.expand(self.batch, *positions.shape)
        padding = torch.zeros(self.batch, tokens, dtype=torch.bool, device=k.device) if padding is None else padding
        given = {"k": (k, 2), "v": (v, 2), "notes": (notes, 2), "positions": (positions, 1), "padding": (padding, 1)}
        start, self.filled = self.filled, self.filled + tokens
        for name, (new, dim) in given.items():
            if new is None:
                continue
            if name not in self._kept:
                shape = list(new.shape)
                shape[dim] = self.room
                self._kept[name] = new.new_zeros(shape)
            self._kept[name].narrow(dim, start, new.shape[dim]).copy_(new.detach())
        keys, values, places, hidden = (
            self._so_far(name, given[name][1]) for name in ("k", "v", "positions", "padding")
        )
        assert keys is not None
        assert values is not None
        assert places is not None
        assert hidden is not None
        if not self.ragged:
            return keys, values, self.notes, places[0], None
        return keys, values, self.notes, places, hidden

    def reorder(self, sequences: Int[Tensor, "B"]) -> None:
        """Put sequence ``sequences[b]`` at index b, for as many sequences as cached (for beam search)."""
        require_tensor("sequences", sequences, "integer", (self.batch,))
        self._kept = {name: kept.index_select(0, sequences.long()) for name, kept in self._kept.items()}

    def repeat(self, times: int) -> None:
        """Repeat each sequence ``times`` times, adjacent."""
        require_count(times=times)
        self.batch *= times
        self._kept = {name: kept.repeat_interleave(times, dim=0) for name, kept in self._kept.items()}

    def crop(self, length: int) -> None:
        """Keep only the first ``length`` tokens."""
        must_be("length", length, int)
        if not 0 <= length <= self.filled:
            raise invalid("length", f"be from 0 to {self.filled}, the number of cached tokens", length)
        self.filled = length

    @contextmanager
    def kept_whole(self, *, only_looked_at: bool = False) -> Iterator[None]:
        """Restore the cache if an exception is raised inside; always if ``only_looked_at``."""
        before = self.filled, self.ragged
        done = False
        try:
            yield
            done = not only_looked_at
        finally:
            if not done:
                self.filled, self.ragged = before

    def _so_far(self, name: str, dim: int) -> Tensor | None:
        kept = self._kept.get(name)
        return None if kept is None else kept.narrow(dim, 0, self.filled)
