"""Token positions of a forward pass and masks for padding, packed documents and cached tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from toeplens.encodings import PositionalEncoding, Positions
from toeplens.encodings.attention import check_positions
from toeplens.encodings.kit import require_tensor
from toeplens.ground import InputError, invalid
from toeplens.nn.cache import Cache


@dataclass(frozen=True)
class TokenPositions:
    """The token positions of a forward pass, shared by its layers.

    positions  [N], or [B, N] if sequences differ; coordinates, if any, are the last dimension
    padding    [B, N], True where a token is padding; None if there is none
    texts      [B, N], id of the packed document that each token belongs to; None if each sequence is one document
    """

    positions: Positions
    padding: Bool[Tensor, "B N"] | None = None
    texts: Int[Tensor, "B N"] | None = None


def token_positions(
    encoding: PositionalEncoding,
    batch: int,
    tokens: int,
    device: torch.device,
    *,
    positions: Positions | None = None,
    key_padding_mask: Bool[Tensor, "B N"] | None = None,
    segments: Int[Tensor, "B N"] | None = None,
    cache: Cache | None = None,
) -> TokenPositions:
    """Positions of ``tokens`` new tokens per sequence.

    By default they count from 0 in each document, without padding, so that padding on either side and packing
    change nothing; with a ``cache``, they continue after its tokens. If ``positions`` are passed, they must be passed
    at every step.

    Arguments
        key_padding_mask  True where a token is padding
        segments          id of the document that each token belongs to: numbers that change between documents
    """
    if key_padding_mask is not None:
        require_tensor("key_padding_mask", key_padding_mask, "bool", (batch, tokens))
    if segments is not None:
        require_tensor("segments", segments, "integer", (batch, tokens))
    if cache is not None and not isinstance(cache, Cache):
        raise invalid("cache", "be a cache from new_cache", got=type(cache).__name__)
    if positions is not None:
        check_positions("positions", positions, encoding, batch, tokens)
    if tokens < 1:
        raise invalid("x", "have at least 1 token", tokens)
    if segments is not None and cache is not None:
        raise InputError("segments and cache must not both be set.")
    if cache is not None:
        cache.require(batch, tokens)
    if positions is None:
        positions = encoding.place(_counted(batch, tokens, device, key_padding_mask, segments, cache))
    return TokenPositions(positions, key_padding_mask, None if segments is None else _begins(segments).long().cumsum(1))


def _begins(segments: Int[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return begins


def _counted(
    batch: int, tokens: int, device: torch.device, padding: Tensor | None, segments: Tensor | None, cache: Cache | None
) -> Tensor:
    """Token indices: [N] if all sequences have the same, otherwise [B, N]."""
    if segments is not None:
        real = torch.ones_like(segments) if padding is None else (~padding).long()
        before = real.cumsum(1) - real
        return before - before.where(_begins(segments), torch.zeros_like(before)).cummax(1).values
    if padding is None and (cache is None or not cache.ragged):
        start = 0 if cache is None else len(cache)
        return torch.arange(start, start + tokens, device=device)
    padding = torch.zeros(batch, tokens, dtype=torch.bool, device=device) if padding is None else padding
    return count_unpadded(padding, None if cache is None else cache.next_places)


def count_unpadded(padding: Bool[Tensor, "B N"], start: Int[Tensor, "B"] | None = None) -> Int[Tensor, "B N"]:
    """Positions of tokens without padding, from ``start`` on (default: 0); padding has that of the token before it."""
    counted = (~padding).long().cumsum(1) - 1
    return (counted if start is None else counted + start[:, None]).clamp(min=0)
