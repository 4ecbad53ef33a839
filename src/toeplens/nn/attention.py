"""An attention layer with any positional encoding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from toeplens import encodings
from toeplens.encodings import MLA, PositionalEncoding, Positions, attend, attention_weights
from toeplens.encodings.kit import require_count, require_number, require_tensor
from toeplens.ground import InputError, invalid
from toeplens.ground.options import must_be
from toeplens.model.attention import LatentProjections
from toeplens.nn.cache import Cache
from toeplens.nn.positions import TokenPositions, token_positions


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
        d_model: int,
        num_heads: int,
        *,
        encoding: str | Sequence[str] | PositionalEncoding = "rope",
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        max_len: int = 2048,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        embed: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        require_count(d_model=d_model, num_heads=num_heads)
        if head_dim is None and d_model % num_heads:
            raise invalid("num_heads", f"divide d_model {d_model}, or head_dim be given", num_heads)
        self.d_model, self.num_heads = d_model, num_heads
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.num_key_heads = num_heads if num_key_heads is None else num_key_heads
        require_count(head_dim=self.head_dim, num_key_heads=self.num_key_heads)
        if num_heads % self.num_key_heads:
            raise invalid("num_key_heads", f"divide num_heads {num_heads}", num_key_heads)
        self.dropout = require_number("dropout", dropout, at_least=0, at_most=1)
        for name, value in {"causal": causal, "sinks": sinks, "bias": bias, "embed": embed}.items():
            must_be(name, value, bool)
        if window is not None:
            require_count(window=window)
            if not causal:
                raise invalid("window", "be left out unless attention is causal", window)
        if softcap is not None:
            require_number("softcap", softcap, over=0)
        self.causal, self.window, self.softcap, self.embeds = causal, window, softcap, embed
        sizes = {"d_model": d_model, "num_heads": num_heads, "head_dim": self.head_dim}
        self.encoding = _encoding(encoding, sizes, max_len, options)
        self.scale = self.encoding.scale if scale is None else require_number("scale", scale)
        self.projections = self._projections(bias)
        self.out = nn.Linear(num_heads * self.head_dim, d_model, bias=bias)
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None

    def _projections(self, bias: bool) -> nn.Module:
        if not isinstance(self.encoding, MLA):
            width = self.encoding.query_dim
            return _Projections(self.d_model, self.num_heads, self.num_key_heads, width, self.head_dim, bias)
        if bias or self.num_key_heads != self.num_heads or self.num_heads * self.head_dim != self.d_model:
            raise InputError("num_key_heads, head_dim and bias must not be set with encoding 'mla'.")
        return _LatentProjections(self.encoding)

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

        Raises `InputError` for inputs of wrong type or shape, and for a mask that the encoding does not support.
        """
        if others:
            raise invalid(
                "x", "be the only input, as queries, keys and values come from it", got=f"{len(others) + 1} inputs"
            )
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

    def _positions(self, x: Tensor, **given: Any) -> TokenPositions:
        require_tensor("x", x, "float", ("B", "N", self.d_model))
        return token_positions(self.encoding, x.shape[0], x.shape[1], x.device, **given)

    def _inputs(
        self, x: Tensor, found: TokenPositions, mask: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        here = found.positions
        x = self.encoding.embed(x, here) if self.embeds else x
        q, k, v = self.projections(x)
        content = x if found.padding is None else x.masked_fill(found.padding.unsqueeze(-1), 0.0)  # no content
        notes = self.encoding.note(content, None if cache is None else cache.notes)
        there, padding = here, found.padding
        if cache is not None:
            ragged = self.encoding.by_sequence(here)
            k, v, notes, there, padding = cache.append(k, v, notes, here, padding, ragged=ragged)
        return (
            q,
            k,
            v,
            {
                "encoding": self.encoding,
                "q_positions": here,
                "k_positions": there,
                "scale": self.scale,
                "notes": notes,
                "mask": mask,
                "padding": padding,
                "causal": self.causal,
                "window": self.window,
                "texts": found.texts,
                "softcap": self.softcap,
                "sinks": self.sinks,
            },
        )

    def extra_repr(self) -> str:
        groups = "" if self.num_key_heads == self.num_heads else f", num_key_heads={self.num_key_heads}"
        return f"d_model={self.d_model}, num_heads={self.num_heads}{groups}, head_dim={self.head_dim}"


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
