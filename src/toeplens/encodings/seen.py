"""The attention inputs that an encoding's hooks can read: queries, keys, key features, and the mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.encodings.kit import is_readable
from toeplens.encodings.shapes import Keys, Queries
from toeplens.ground import InputError, invalid


@dataclass(frozen=True)
class Seen:
    """The inputs of one attention call, as a hook sees them.

    q, k    [B, H, Nq, d], [B, H, Nk, d]: as projected in `rotate`; as they enter the inner product in later hooks
    rows    index of each query's own token among the keys: [Nq], or [B, Nq]
    notes   [B, H, Nk, c], the key features of `PositionalEncoding.note`, one row per key; or None
    mask    True where a key may be seen, broadcastable to [B, H, Nq, Nk]; None for all
    causal  whether keys after a query's own are masked
    window  sliding window: the number of keys that a query sees, including its own; None for no limit
    scale   the factor of q . k
    texts   [B, Nk], id of the packed document that each key belongs to; None if each row is one document
    padding  [B, Nk], True where a key's token is padding, which is masked and skipped by cumulative sums; or None
    """

    q: Float[Tensor, "B H Nq _"]
    k: Float[Tensor, "B H Nk _"]
    rows: Int[Tensor, "*B Nq"]
    notes: Float[Tensor, "B H Nk c"] | None = None
    mask: Bool[Tensor, "*_B _H _Nq Nk"] | None = None
    causal: bool = True
    scale: float = 1.0
    window: int | None = None
    texts: Int[Tensor, "B Nk"] | None = None
    padding: Bool[Tensor, "B Nk"] | None = None

    @staticmethod
    def of(q: Queries, k: Keys, rows: Int[Tensor, "*B Nq"] | None = None, **more: Any) -> Seen:
        """Build it with defaults: without ``rows``, the queries are the last tokens of the keys.

        Keys that the mask hides from all queries and heads count as padding.
        """
        mask, padding = more.get("mask"), more.get("padding")
        if mask is not None and all(size == 1 for size in mask.shape[-3:-1]):
            hidden = ~mask.reshape(-1, mask.shape[-1]).expand(len(q), -1)
            more |= {"mask": None, "padding": hidden if padding is None else hidden | padding}
        if rows is None:
            queries, keys = q.shape[-2], k.shape[-2]
            if more.get("causal", True) and queries > keys:
                raise invalid(
                    "q",
                    f"have at most as many queries as there are keys ({keys}) in causal attention, unless rows is set",
                    queries,
                )
            rows = torch.arange(keys - queries, keys, device=q.device)
        return Seen(q, k, rows, **more)

    @property
    def is_masked(self) -> bool:
        """Whether any mask other than the causal one hides keys."""
        return self.mask is not None or self.padding is not None or self.texts is not None

    def is_scattered(self) -> bool:
        """Whether a query sees anything but one contiguous run of tokens, apart from padding; reads the mask.

        True for masks that must not be read (in a compiler). A query that does not see its own token counts as
        padding.
        """
        if self.mask is None:
            return False
        if not is_readable(self.mask):
            return True
        visible = self.visible()
        assert visible is not None
        visible = visible[(None,) * (4 - visible.ndim)]
        own = visible.take_along_dim(self.own_index(), dim=-1).squeeze(-1)
        tokens = (
            torch.ones_like(self.k[:, 0, :, 0], dtype=torch.long) if self.padding is None else (~self.padding).long()
        )
        counted = tokens.cumsum(-1)[:, None, None, :].masked_fill(~visible, 0)  # from 1
        first = counted.masked_fill(~visible, counted.shape[-1] + 1).amin(-1)
        return bool((own & (counted.amax(-1) - first + 1 != visible.sum(-1))).any())

    def require_run(self, encoding: Any) -> None:
        """Raise `InputError` for a mask under which cumulative sums between two tokens would be wrong."""
        if self.mask is not None and is_readable(self.mask) and self.is_scattered():
            raise InputError(f"mask: each query must see one contiguous run of tokens for {type(encoding).__name__}.")

    def own_index(self) -> Int[Tensor, "_B 1 Nq 1"]:
        """The rows as indices of keys, for `torch.take_along_dim`."""
        rows = self.rows if self.rows.ndim == 2 else self.rows.unsqueeze(0)
        return rows[:, None, :, None]

    def own_notes(self) -> Float[Tensor, "B H Nq c"]:
        """The key features of the queries' own tokens."""
        assert self.notes is not None
        if self.rows.ndim == 1:
            return self.notes.index_select(2, self.rows)
        index = self.rows[:, None, :, None].expand(-1, self.notes.shape[1], -1, self.notes.shape[3])
        return self.notes.gather(2, index)

    def visible(self) -> Bool[Tensor, "*B Nq Nk"] | None:
        """True where a query sees a key, computed on request; None if every query sees every key."""
        if self.texts is not None:
            own = self.texts.gather(1, self.rows.expand(len(self.texts), -1)).unsqueeze(2) == self.texts.unsqueeze(1)
            own = own.unsqueeze(1)
            return replace(self, texts=None, mask=own if self.mask is None else own & self.mask).visible()
        if self.padding is not None:
            real = ~self.padding[:, None, None, :]
            return replace(self, padding=None, mask=real if self.mask is None else real & self.mask).visible()
        if not self.causal:
            return self.mask
        keys, rows = torch.arange(self.k.shape[-2], device=self.k.device), self.rows.unsqueeze(-1)
        past = keys <= rows if self.window is None else (keys <= rows) & (keys > rows - self.window)
        past = past if past.ndim == 2 else past.unsqueeze(1)
        return past if self.mask is None else past & self.mask

    def part(self, queries: slice, keys: slice) -> Seen:
        """A slice of the queries and keys."""
        mask = self.mask
        if mask is not None:
            mask = mask[..., keys]
            mask = mask[..., queries, :] if mask.shape[-2] > 1 else mask
        return replace(
            self,
            q=self.q[..., queries, :],
            k=self.k[..., keys, :],
            rows=self.rows[..., queries] - keys.start if keys.start else self.rows[..., queries],
            notes=None if self.notes is None else self.notes[..., keys, :],
            mask=mask,
            texts=None if self.texts is None else self.texts[..., keys],
            padding=None if self.padding is None else self.padding[..., keys],
        )
