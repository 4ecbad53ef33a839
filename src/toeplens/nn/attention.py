"""An attention layer with any positional encoding, and its key cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from toeplens import encodings
from toeplens.encodings import MLA, PositionalEncoding, Positions, attend, attention_weights
from toeplens.encodings.attention import Told, check_positions
from toeplens.encodings.kit import require_count, require_tensor
from toeplens.encodings.shapes import Keys, Notes
from toeplens.ground import InputError, invalid
from toeplens.ground.options import Count, Finite, Positive, Share, check, must_be, parameters
from toeplens.model.decoder import LatentProjections


class Attention(nn.Module):
    """Self-attention with any positional encoding.

    Input and output are [B, N, d_model]. The layer applies the whole encoding, including vectors added to the token
    embeddings. In a model of several layers, add these once before the first layer (`PositionalEncoding.embed`), and
    build the layers with ``embed=False``.

    Arguments
        d_model        width of the input and the output
        num_heads      number of query heads
        encoding       a name from `toeplens.encodings.names`, several names, or an encoding instance
        num_key_heads  number of key and value heads, a divisor of ``num_heads``: grouped-query attention, or
                       multi-query attention for 1 (default: ``num_heads``)
        head_dim       dimensions of a head (default: d_model / num_heads)
        max_len        number of positions of position tables
        causal         mask later tokens
        window         sliding window: number of tokens that a query sees, including itself
        softcap        bound of the logits, as in Gemma 2
        sinks          one learned attention-sink logit per head, as in gpt-oss
        bias           whether the projections have biases
        dropout        dropout rate on the attention weights
        scale          factor of q . k (default: the encoding's published one)
        embed          whether this layer adds the input vectors of the encoding, if it has any
        options        the encoding's options
    """

    def __init__(
        self,
        d_model: Count,
        num_heads: Count,
        *,
        encoding: str | Sequence[str] | PositionalEncoding = "rope",
        num_key_heads: Count | None = None,
        head_dim: Count | None = None,
        max_len: int = 2048,
        causal: bool = True,
        window: Count | None = None,
        softcap: Positive | None = None,
        sinks: bool = False,
        bias: bool = False,
        dropout: Share = 0.0,
        scale: Finite | None = None,
        embed: bool = True,
        **options: Any,
    ) -> None:
        check(parameters(Attention.__init__), locals())
        super().__init__()
        if head_dim is None and d_model % num_heads:
            raise invalid("num_heads", f"divide d_model {d_model}, or head_dim be given", num_heads)
        self.d_model, self.num_heads = d_model, num_heads
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.num_key_heads = num_heads if num_key_heads is None else num_key_heads
        if num_heads % self.num_key_heads:
            raise invalid("num_key_heads", f"divide num_heads {num_heads}", num_key_heads)
        if window is not None and not causal:
            raise invalid("window", "be left out unless attention is causal", window)
        self.causal, self.window, self.softcap = causal, window, softcap
        self.dropout, self.embeds = dropout, embed
        sizes = {"d_model": d_model, "num_heads": num_heads, "head_dim": self.head_dim}
        self.encoding = _encoding(encoding, sizes, max_len, options)
        self.scale = self.encoding.scale if scale is None else scale
        if isinstance(self.encoding, MLA):
            if bias or self.num_key_heads != num_heads or num_heads * self.head_dim != d_model:
                raise InputError("num_key_heads, head_dim and bias must not be set with encoding 'mla'.")
            self.projections: nn.Module = _LatentProjections(self.encoding)
        else:
            width = self.encoding.query_dim
            self.projections = _Projections(d_model, num_heads, self.num_key_heads, width, self.head_dim, bias)
        self.out = nn.Linear(num_heads * self.head_dim, d_model, bias=bias)
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None

    def new_cache(self, batch: int, length: int) -> Cache:
        """An empty key cache for ``batch`` sequences of up to ``length`` tokens."""
        return Cache(batch, length)

    def forward(
        self,
        x: Float[Tensor, "B N d_model"],
        *others: Any,
        positions: Positions | None = None,
        key_padding_mask: Bool[Tensor, "B N"] | None = None,
        segments: Int[Tensor, "B N"] | None = None,
        mask: Bool[Tensor, "*_B _H N M"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B N d_model"]:
        """The layer's output, [B, N, d_model].

        Arguments
            positions         token positions, [N] or [B, N] (default: counted from 0 in each document)
            key_padding_mask  True where a token is padding, on either side, as in `torch.nn.MultiheadAttention`
            segments          id of the packed document that each token belongs to
            mask              True where a query may see a key, in addition to the other masks; one row per query, or
                              one for all
            cache             from `new_cache`: the tokens follow those in the cache and are added to it

        By default, positions count from 0 in each document, without padding, so that padding on either side and packing
        change nothing; with a ``cache``, they continue after its tokens. If ``positions`` are passed, they must be
        passed at every step. Raises `InputError` for inputs of wrong type or shape, and for a mask that the encoding
        does not support.
        """
        if others:
            must = "be the only input, as queries, keys and values come from it"
            raise invalid("x", must, got=f"{len(others) + 1} inputs")
        given = {"positions": positions, "key_padding_mask": key_padding_mask, "segments": segments, "cache": cache}
        found = self._positions(x, **given)
        with nullcontext() if cache is None else cache.kept_whole():
            q, k, v, told = self._inputs(x, found, mask, cache)
            z = attend(q, k, v, dropout=self.dropout if self.training else 0.0, **told)
        return self.out(z.transpose(1, 2).flatten(-2))

    def weights(
        self, x: Float[Tensor, "B N d_model"], *, mask: Tensor | None = None, **given: Any
    ) -> Float[Tensor, "B H N N"]:
        """The attention weights, formed explicitly. Takes the arguments of `forward`; does not change the cache."""
        found, cache = self._positions(x, **given), given.get("cache")
        with nullcontext() if cache is None else cache.kept_whole(only_looked_at=True):
            q, k, _, told = self._inputs(x, found, mask, cache)
            return attention_weights(q, k, **told)

    def _positions(
        self,
        x: Tensor,
        *,
        positions: Positions | None = None,
        key_padding_mask: Tensor | None = None,
        segments: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Positions, Tensor | None, Tensor | None]:
        """Positions, padding and each token's packed document, from the checked inputs of `forward`."""
        require_tensor("x", x, "float", ("B", "N", self.d_model))
        batch, tokens = x.shape[:2]
        if key_padding_mask is not None:
            require_tensor("key_padding_mask", key_padding_mask, "bool", (batch, tokens))
        if segments is not None:
            require_tensor("segments", segments, "integer", (batch, tokens))
        if cache is not None and not isinstance(cache, Cache):
            raise invalid("cache", "be a cache from new_cache", got=type(cache).__name__)
        if positions is not None:
            check_positions("positions", positions, self.encoding, batch, tokens)
        if tokens < 1:
            raise invalid("x", "have at least 1 token", tokens)
        if segments is not None and cache is not None:
            raise InputError("segments and cache must not both be set.")
        if cache is not None:
            cache.require(batch, tokens)
        if positions is None:
            positions = self.encoding.place(_counted(x, key_padding_mask, segments, cache))
        return positions, key_padding_mask, None if segments is None else _begins(segments).long().cumsum(1)

    def _inputs(
        self, x: Tensor, found: tuple[Positions, Any, Any], mask: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor, Told]:
        here, padding, texts = found
        x = self.encoding.embed(x, here) if self.embeds else x
        q, k, v = self.projections(x)
        content = x if padding is None else x.masked_fill(padding.unsqueeze(-1), 0.0)  # no content
        notes = self.encoding.note(content, None if cache is None else cache.notes)
        there = here
        if cache is not None:
            ragged = self.encoding.by_sequence(here)
            k, v, notes, there, padding = cache.append(k, v, notes, here, padding, ragged=ragged)
        told: Told = {
            "encoding": self.encoding,
            "q_positions": here,
            "k_positions": there,
            "scale": self.scale,
            "notes": notes,
            "mask": mask,
            "padding": padding,
            "causal": self.causal,
            "window": self.window,
            "texts": texts,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }
        return q, k, v, told

    def extra_repr(self) -> str:
        groups = "" if self.num_key_heads == self.num_heads else f", num_key_heads={self.num_key_heads}"
        return f"d_model={self.d_model}, num_heads={self.num_heads}{groups}, head_dim={self.head_dim}"


def _begins(segments: Int[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return begins


def _counted(x: Tensor, padding: Tensor | None, segments: Tensor | None, cache: Cache | None) -> Tensor:
    """Token indices: [N] if all sequences have the same, otherwise [B, N]."""
    tokens = x.shape[1]
    if segments is None and padding is None and (cache is None or not cache.ragged):
        start = 0 if cache is None else len(cache)
        return torch.arange(start, start + tokens, device=x.device)
    padding = torch.zeros_like(x[..., 0], dtype=torch.bool) if padding is None else padding
    if segments is not None:
        before = (~padding).long().cumsum(1) - (~padding).long()
        return before - before.where(_begins(segments), 0).cummax(1).values
    return count_unpadded(padding, None if cache is None else cache.next_places)


def count_unpadded(padding: Bool[Tensor, "B N"], start: Int[Tensor, "B"] | None = None) -> Int[Tensor, "B N"]:
    """Positions of tokens without padding, from ``start`` on (default: 0); padding has that of the token before it."""
    counted = (~padding).long().cumsum(1) - 1
    return (counted if start is None else counted + start[:, None]).clamp(min=0)


class _Projections(nn.Module):
    def __init__(self, d_model: int, heads: int, groups: int, width: int, values: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.q = nn.Linear(d_model, heads * width, bias=bias)
        self.k = nn.Linear(d_model, groups * width, bias=bias)
        self.v = nn.Linear(d_model, groups * values, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        return tuple(layer(x).unflatten(-1, (heads, -1)).transpose(1, 2) for layer, heads in made)


class _LatentProjections(LatentProjections):
    def __init__(self, encoding: MLA) -> None:
        super().__init__()
        self.num_heads = encoding.num_heads
        self.add_projections(encoding.d_model, encoding)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.project(x, x)


def _encoding(
    given: str | Sequence[str] | PositionalEncoding, sizes: dict[str, int], max_len: int, options: dict[str, Any]
) -> PositionalEncoding:
    if not isinstance(given, PositionalEncoding):
        return encodings.build(given, max_len=max_len, **sizes, **options)
    if options:
        raise InputError(f"{next(iter(options))} must not be set with an encoding that is already built.")
    for name, size in sizes.items():
        if given.sizes[name] != size:
            raise invalid("encoding", f"have the {name} of this layer, {size}", given.sizes[name])
    return given


class Cache:
    """The cache of one attention layer, created by `Attention.new_cache` and filled by its ``forward``.

    Holds keys, values, key features and positions of earlier tokens, with preallocated space for later ones. Keys are
    cached as projected, unrotated, so that encodings with length-dependent frequencies give the same result as a full
    pass. For inference only: the cache carries no gradients.

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
    def next_places(self) -> Int[Tensor, "B"] | None:
        """Number of cached tokens per sequence, without padding; None if nothing was ever cached."""
        padding = self._so_far("padding", 1)
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
    ) -> tuple[Any, Any, Tensor | None, Positions, Bool[Tensor, "B M"] | None]:
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
                self._kept[name] = new.new_zeros(*new.shape[:dim], self.room, *new.shape[dim + 1 :])
            self._kept[name].narrow(dim, start, new.shape[dim]).copy_(new.detach())
        keys, values, _, places, hidden = (self._so_far(name, dim) for name, (_, dim) in given.items())
        assert places is not None
        return keys, values, self.notes, places if self.ragged else places[0], hidden if self.ragged else None

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
        try:
            yield
            before = before if only_looked_at else (self.filled, self.ragged)
        finally:
            self.filled, self.ragged = before

    def _so_far(self, name: str, dim: int) -> Tensor | None:
        kept = self._kept.get(name)
        return None if kept is None else kept.narrow(dim, 0, self.filled)
