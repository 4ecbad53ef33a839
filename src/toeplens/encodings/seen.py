"""What an encoding's hooks may look at beside positions: queries, keys, notes of the content, and who sees whom."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.encodings.shapes import Keys, Queries
from toeplens.ground import InputError


@dataclass(frozen=True)
class Seen:
    """One attention's queries and keys, as a hook sees them.

    q, k    [B, H, Nq, d], [B, H, Nk, d]: as projected, in `rotate`; as they enter the inner product, in later hooks
    rows    which key is each query's own token: [Nq], or [B, Nq]
    notes   [B, H, Nk, c], the rows of `PositionalEncoding.note`, one a key; or None
    mask    True where a key may be seen, broadcastable to [B, H, Nq, Nk]; None if all may
    causal  whether the keys after a query's own are hidden from it
    scale   the factor of q . k
    """

    q: Float[Tensor, "B H Nq _"]
    k: Float[Tensor, "B H Nk _"]
    rows: Int[Tensor, "*B Nq"]
    notes: Float[Tensor, "B H Nk c"] | None = None
    mask: Bool[Tensor, "*_B _H _Nq Nk"] | None = None
    causal: bool = True
    scale: float = 1.0

    @staticmethod
    def of(q: Queries, k: Keys, rows: Int[Tensor, "*B Nq"] | None = None, **more: Any) -> Seen:
        """The same where ``rows`` may be left out: the queries are then the last tokens of the keys."""
        if rows is None:
            queries, keys = q.shape[-2], k.shape[-2]
            if more.get("causal", True) and queries > keys:
                raise InputError(
                    f"q: {queries} queries were given for {keys} keys; in causal attention each query's own token "
                    f"is among the keys: the last of them, unless rows says which."
                )
            rows = torch.arange(keys - queries, keys, device=q.device)
        return Seen(q, k, rows, **more)

    def own_notes(self) -> Float[Tensor, "B H Nq c"]:
        """The notes of the queries' own tokens."""
        assert self.notes is not None
        if self.rows.ndim == 1:
            return self.notes.index_select(2, self.rows)
        index = self.rows[:, None, :, None].expand(-1, self.notes.shape[1], -1, self.notes.shape[3])
        return self.notes.gather(2, index)

    def visible(self) -> Bool[Tensor, "*B Nq Nk"] | None:
        """True where a query sees a key, formed on request; None if every query sees every key."""
        if not self.causal:
            return self.mask
        past = torch.arange(self.k.shape[-2], device=self.k.device) <= self.rows.unsqueeze(-1)
        past = past if past.ndim == 2 else past.unsqueeze(1)
        return past if self.mask is None else past & self.mask

    def part(self, start: int, stop: int, keys: int) -> Seen:
        """The same for queries ``start`` to ``stop`` and the first ``keys`` keys alone."""
        mask = self.mask
        if mask is not None:
            mask = mask[..., :keys]
            mask = mask[..., start:stop, :] if mask.shape[-2] > 1 else mask
        return replace(
            self,
            q=self.q[..., start:stop, :],
            k=self.k[..., :keys, :],
            rows=self.rows[..., start:stop],
            notes=None if self.notes is None else self.notes[..., :keys, :],
            mask=mask,
        )
