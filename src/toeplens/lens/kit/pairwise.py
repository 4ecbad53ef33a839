"""Tables of logits, every key content at every position, from a layer's own function, for encodings of any form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.encodings import attention_logits
from toeplens.ground import InputError
from toeplens.lens.kit.position import in_float64
from toeplens.lens.kit.trace import LayerTrace

WORK = 1 << 31  # logits of all tables; of more than that the first sequences count alone
_AT_ONCE = 1 << 22  # logits of tables held at once


@dataclass(frozen=True)
class PairwiseLogits:
    """The logits of a layer, each of one query and one key's content; all else that its encoding reads stays in place.

    A query's table M_jm is the logit at position j of the key whose content is that of position m. What the encoding
    reads beside queries and keys (`PositionalEncoding.note`: forget gates, angles made from the content) belongs to the
    position.

    layer    the layer, in float64
    content  [B, G, N, d] keys before the rotation, less their position part; head h reads h // (H / G)
    places   [B or 1, G or 1, N, d] the keys' position part; None if there is none
    ends     [B] tokens of each sequence
    asked    [B, N] the queries that count
    window, chunk  as in `MovableKeys`
    """

    layer: LayerTrace
    content: Float[Tensor, "B G N d"]
    places: Float[Tensor, "_B _G N d"] | None
    ends: Int[Tensor, "B"]
    asked: Bool[Tensor, "B N"]
    window: int | None = None
    chunk: int | None = None

    @classmethod
    def of(cls, layer: LayerTrace, part: Float[Tensor, "B G R d"] | None, asked: Bool[Tensor, "B N"]) -> PairwiseLogits:
        """Of a layer and the part of its keys that is position. Raises `InputError` where one table is too large."""
        layer = in_float64(layer)
        _, heads, length, _ = layer.q.shape
        longest = math.isqrt((_AT_ONCE << 6) // heads)
        if length > longest:
            raise InputError(
                f"tokens: with {type(layer.encoding).__name__} and {heads} heads, sequences must have at most "
                f"{longest} tokens (got {length})."
            )
        work = (asked.sum(1) * heads * length**2).cumsum(0)
        within = (work <= WORK) | (torch.arange(len(work), device=work.device) == 0)
        lengths = layer.kept_lengths
        ends = torch.full((len(asked),), length, device=asked.device) if lengths is None else lengths
        content = layer.k if part is None else layer.k - part.double()
        return cls(layer, content, part, ends, asked & within.unsqueeze(1))

    @property
    def causal(self) -> bool:
        return self.layer.causal

    def seen(self) -> Int[Tensor, "B N"]:
        """How many keys each query sees; 0 for those that do not count."""
        return self._visible(torch.arange(self.asked.shape[1], device=self.asked.device)).sum(-1) * self.asked

    def tables(self) -> Iterator[tuple[slice, Int[Tensor, "Q"], Float[Tensor, "b H Q N N"], Bool[Tensor, "b Q N"]]]:
        """Sequences, queries, their tables [position, content], and the keys that each query sees; some at a time."""
        _, heads, length, _ = self.layer.q.shape
        at_once = max(1, _AT_ONCE // (heads * length**2))
        for queries in torch.arange(length, device=self.asked.device).split(min(at_once, length)):
            step = max(1, at_once // len(queries))
            for start in range(0, len(self.asked), step):
                some = slice(start, start + step)
                if self.asked[some, queries].any():
                    seen = self._visible(queries)[some] & self.asked[some, queries].unsqueeze(-1)
                    last = int(queries[-1]) + 1 if self.causal else length
                    yield some, queries, self._table(some, queries, last), seen

    def logits(self, sequence: int, query: int, contents: Int[Tensor, "*K n"]) -> Float[Tensor, "H *K n"]:
        """As `MovableKeys.logits`."""
        only = torch.tensor([query], device=self.asked.device)
        seen = self._visible(only)[sequence, 0].nonzero().flatten()[: contents.shape[-1]]
        contents = contents + seen[0]
        table = self._table(slice(sequence, sequence + 1), only, int(contents.max()) + 1)[0, :, 0]
        return table[:, seen, contents]

    def _table(self, sequences: slice, queries: Int[Tensor, "Q"], contents: int) -> Float[Tensor, "b H Q N N"]:
        """The logits of the first so many contents at every position; 0 for the others."""
        q, own = self.layer.q, self.content[sequences]
        places = self.places if self.places is None or len(self.places) == 1 else self.places[sequences]
        made = q.new_zeros(len(own), q.shape[1], len(queries), own.shape[2], own.shape[2])
        for content in range(contents):
            keys = own[:, :, content : content + 1].expand_as(own)
            keys = keys if places is None else keys + places
            made[..., content] = self.layer.formed(attention_logits, q, keys, sequences, queries).detach()
        return made

    def _visible(self, queries: Int[Tensor, "Q"]) -> Bool[Tensor, "B Q N"]:
        return visible_keys(queries, self.asked.shape[1], self.ends, self.causal, self.window, self.chunk)


def visible_keys(
    queries: Int[Tensor, "Q"], length: int, ends: Int[Tensor, "B"], causal: bool, window: int | None, chunk: int | None
) -> Bool[Tensor, "B Q N"]:
    """Which of ``length`` keys each query sees, in sequences of ``ends`` tokens; the rest as in `MovableKeys`."""
    rows = torch.arange(length, device=ends.device)
    offsets = queries.unsqueeze(1) - rows
    seen = offsets >= 0 if causal else torch.ones_like(offsets, dtype=torch.bool)
    if window is not None:
        seen = seen & (offsets.abs() < window)
    if chunk is not None:
        seen = seen & (queries.unsqueeze(1) // chunk == rows // chunk)
    there = rows < ends.unsqueeze(1)
    return seen & there.unsqueeze(1) & there[:, queries].unsqueeze(-1)


def table_variances(
    table: Float[Tensor, "b H Q N N"], seen: Bool[Tensor, "b Q N"]
) -> tuple[Float[Tensor, "b H Q"], Float[Tensor, "b H Q"], Float[Tensor, "b H Q"], Float[Tensor, "b H Q"]]:
    """Var(P), Var(S), Var(I) of each table over the keys seen, and its mean square; 0 where fewer than two are."""
    both = (seen.unsqueeze(-1) & seen.unsqueeze(-2)).unsqueeze(1)
    count = torch.where(seen.sum(-1) > 1, seen.sum(-1), torch.inf).unsqueeze(1).double()
    table = table.masked_fill(~both, 0)
    size = table.square().sum((-2, -1)) / count**2
    mean = table.sum((-2, -1)) / count**2
    table = torch.where(both, table - mean[..., None, None], 0)
    position, content = ((table.sum(dim) / count.unsqueeze(-1)) for dim in (-1, -2))
    rest = torch.where(both, table - position.unsqueeze(-1) - content.unsqueeze(-2), 0)
    position, content = (x.square().sum(-1) / count for x in (position, content))
    return position, content, rest.square().sum((-2, -1)) / count**2, size
