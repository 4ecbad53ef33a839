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
from toeplens.encodings.attention import AttentionArguments, check_positions
from toeplens.encodings.base import KeyFeatures
from toeplens.encodings.kit import require_count, require_tensor
from toeplens.encodings.shapes import Keys
from toeplens.model.decoder import LatentProjections
from toeplens.utils import InputError, invalid
from toeplens.utils.options import FiniteFloat, Positive, PositiveInt, Share, check_arguments, check_value, parameters
from toeplens.utils.renamed import renamed


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
        window         sliding window: number of tokens that a query sees, including itself and without padding
        softcap        bound of the logits, as in Gemma 2
        sinks          one learned attention-sink logit per head, as in gpt-oss
        bias           whether the projections have biases
        dropout        dropout rate on the attention weights
        scale          factor of q . k (default: the encoding's published one)
        embed          whether this layer adds the input vectors of the encoding, if it has any
        options        the encoding's options; one that is also an argument of the layer, such as the ``window`` of
                       ``swin``, needs an instance (`toeplens.encodings.build`)
    """

    def __init__(
        self,
        d_model: PositiveInt,
        num_heads: PositiveInt,
        *,
        encoding: str | Sequence[str] | PositionalEncoding = "rope",
        num_key_heads: PositiveInt | None = None,
        head_dim: PositiveInt | None = None,
        max_len: int = 2048,
        causal: bool = True,
        window: PositiveInt | None = None,
        softcap: Positive | None = None,
        sinks: bool = False,
        bias: bool = False,
        dropout: Share = 0.0,
        scale: FiniteFloat | None = None,
        embed: bool = True,
        **options: Any,
    ) -> None:
        given, keywords = locals(), parameters(Attention.__init__)
        if not isinstance(encoding, PositionalEncoding):
            for name in keywords.keys() & encodings.options(encoding).keys():
                if given[name] is not keywords[name].default:
                    instance = f"toeplens.encodings.build({encoding!r}, ..., {name}=...)"
                    raise InputError(f"{name} is also an option of encoding {encoding!r}: pass {instance} as encoding.")
        check_arguments(keywords, given)
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
        self.encoding = _build_encoding(encoding, sizes, max_len, options)
        self.scale = self.encoding.scale if scale is None else scale
        if isinstance(self.encoding, MLA):
            if bias or self.num_key_heads != num_heads or num_heads * self.head_dim != d_model:
                raise InputError("num_key_heads, head_dim and bias must not be set with encoding 'mla'.")
            self.projections: nn.Module = _MLAProjections(self.encoding)
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
        *extra_inputs: Any,
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
        if extra_inputs:
            must = "be the only input, as queries, keys and values come from it"
            raise invalid("x", must, got=f"{len(extra_inputs) + 1} inputs")
        options = {"positions": positions, "key_padding_mask": key_padding_mask, "segments": segments, "cache": cache}
        token_info = self._positions(x, **options)
        with nullcontext() if cache is None else cache.restore_on_error():
            q, k, v, arguments = self._attention_arguments(x, token_info, mask, cache)
            z = attend(q, k, v, dropout=self.dropout if self.training else 0.0, **arguments)
        return self.out(z.transpose(1, 2).flatten(-2))

    def weights(
        self, x: Float[Tensor, "B N d_model"], *, mask: Tensor | None = None, **options: Any
    ) -> Float[Tensor, "B H N N"]:
        """The attention weights, formed explicitly. Takes the arguments of `forward`; does not change the cache."""
        token_info, cache = self._positions(x, **options), options.get("cache")
        with nullcontext() if cache is None else cache.restore_on_error(always=True):
            q, k, _, arguments = self._attention_arguments(x, token_info, mask, cache)
            return attention_weights(q, k, **arguments)

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
            cache.require_room(batch, tokens)
        if positions is None:
            positions = self.encoding.to_positions(_count_positions(x, key_padding_mask, segments, cache))
        return positions, key_padding_mask, None if segments is None else _segment_starts(segments).long().cumsum(1)

    def _attention_arguments(
        self, x: Tensor, token_info: tuple[Positions, Any, Any], mask: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor, AttentionArguments]:
        positions, padding, document_ids = token_info
        x = self.encoding.embed(x, positions) if self.embeds else x
        q, k, v = self.projections(x)
        content = x if padding is None else x.masked_fill(padding.unsqueeze(-1), 0.0)  # no content
        features = self.encoding.key_features(content, None if cache is None else cache.key_features)
        k_positions = positions
        if cache is not None:
            ragged = self.encoding.is_per_sequence(positions)
            k, v, features, k_positions, padding = cache.append(k, v, features, positions, padding, ragged=ragged)
        arguments: AttentionArguments = {
            "encoding": self.encoding,
            "q_positions": positions,
            "k_positions": k_positions,
            "scale": self.scale,
            "key_features": features,
            "mask": mask,
            "padding": padding,
            "causal": self.causal,
            "window": self.window,
            "document_ids": document_ids,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }
        return q, k, v, arguments

    def extra_repr(self) -> str:
        groups = "" if self.num_key_heads == self.num_heads else f", num_key_heads={self.num_key_heads}"
        return f"d_model={self.d_model}, num_heads={self.num_heads}{groups}, head_dim={self.head_dim}"


def _segment_starts(segments: Int[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return starts


def _count_positions(x: Tensor, padding: Tensor | None, segments: Tensor | None, cache: Cache | None) -> Tensor:
    """Token indices: [N] if all sequences have the same, otherwise [B, N]."""
    tokens = x.shape[1]
    if segments is None and padding is None and (cache is None or not cache.ragged):
        start = 0 if cache is None else len(cache)
        return torch.arange(start, start + tokens, device=x.device)
    padding = torch.zeros_like(x[..., 0], dtype=torch.bool) if padding is None else padding
    if segments is not None:
        index = (~padding).long().cumsum(1) - (~padding).long()
        return index - index.where(_segment_starts(segments), 0).cummax(1).values
    return count_unpadded(padding, None if cache is None else cache.next_positions)


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
        projections = ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        return tuple(layer(x).unflatten(-1, (heads, -1)).transpose(1, 2) for layer, heads in projections)


class _MLAProjections(LatentProjections):
    def __init__(self, encoding: MLA) -> None:
        super().__init__()
        self.num_heads = encoding.num_heads
        self.add_projections(encoding.d_model, encoding)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.project(x, x)


def _build_encoding(
    encoding: str | Sequence[str] | PositionalEncoding, sizes: dict[str, int], max_len: int, options: dict[str, Any]
) -> PositionalEncoding:
    if not isinstance(encoding, PositionalEncoding):
        return encodings.build(encoding, max_len=max_len, **sizes, **options)
    if options:
        raise InputError(f"{next(iter(options))} must not be set with an encoding that is already built.")
    for name, size in sizes.items():
        if encoding.sizes[name] != size:
            raise invalid("encoding", f"have the {name} of this layer, {size}", encoding.sizes[name])
    return encoding


@renamed
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
        self.batch, self.capacity, self.num_tokens = batch, length, 0
        self.ragged = False
        self._tensors: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def key_features(self) -> KeyFeatures | None:
        """The key features of the cached tokens; None if there are none."""
        return self._cached("key_features", 2) if self.num_tokens else None

    @property
    def next_positions(self) -> Int[Tensor, "B"] | None:
        """Number of cached tokens per sequence, without padding; None if nothing was ever cached."""
        padding = self._cached("padding", 1)
        return None if padding is None else (~padding).sum(1)

    def require_room(self, batch: int, tokens: int) -> None:
        """Raise `InputError` for more tokens than fit, and for another batch size."""
        if batch != self.batch:
            raise invalid("cache", f"be used with {self.batch} sequences", batch)
        if self.num_tokens + tokens > self.capacity:
            raise invalid("cache", f"have room for the tokens ({self.num_tokens} of {self.capacity} are used)", tokens)

    def append(
        self,
        k: Keys,
        v: Float[Tensor, "B G N dv"],
        key_features: KeyFeatures | None,
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
        self.require_room(len(k), tokens)
        self.ragged = self.ragged or ragged or padding is not None
        positions = positions.expand(self.batch, *positions.shape[ragged:])
        padding = torch.zeros(self.batch, tokens, dtype=torch.bool, device=k.device) if padding is None else padding
        new: dict[str, tuple[Tensor | None, int]] = {"k": (k, 2), "v": (v, 2), "key_features": (key_features, 2)}
        new |= {"positions": (positions, 1), "padding": (padding, 1)}
        start, self.num_tokens = self.num_tokens, self.num_tokens + tokens
        for name, (tensor, dim) in new.items():
            if tensor is None:
                continue
            if name not in self._tensors:
                self._tensors[name] = tensor.new_zeros(*tensor.shape[:dim], self.capacity, *tensor.shape[dim + 1 :])
            self._tensors[name].narrow(dim, start, tensor.shape[dim]).copy_(tensor.detach())
        keys, values, _, all_positions, all_padding = (self._cached(name, dim) for name, (_, dim) in new.items())
        assert all_positions is not None
        all_positions, all_padding = (all_positions, all_padding) if self.ragged else (all_positions[0], None)
        return keys, values, self.key_features, all_positions, all_padding

    def reorder(self, sequences: Int[Tensor, "B"]) -> None:
        """Put sequence ``sequences[b]`` at index b, for as many sequences as cached (for beam search)."""
        require_tensor("sequences", sequences, "integer", (self.batch,))
        self._tensors = {name: tensor.index_select(0, sequences.long()) for name, tensor in self._tensors.items()}

    def repeat(self, times: int) -> None:
        """Repeat each sequence ``times`` times, adjacent."""
        require_count(times=times)
        self.batch *= times
        self._tensors = {name: tensor.repeat_interleave(times, dim=0) for name, tensor in self._tensors.items()}

    def crop(self, length: int) -> None:
        """Keep only the first ``length`` tokens."""
        check_value("length", length, int)
        if not 0 <= length <= self.num_tokens:
            raise invalid("length", f"be from 0 to {self.num_tokens}, the number of cached tokens", length)
        self.num_tokens = length

    @contextmanager
    def restore_on_error(self, *, always: bool = False) -> Iterator[None]:
        """Restore the cache if an exception is raised inside, or ``always``."""
        saved = self.num_tokens, self.ragged
        try:
            yield
            saved = saved if always else (self.num_tokens, self.ragged)
        finally:
            self.num_tokens, self.ragged = saved

    def _cached(self, name: str, dim: int) -> Tensor | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.narrow(dim, 0, self.num_tokens)
