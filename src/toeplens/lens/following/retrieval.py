"""Retrieval heads: whether a head looks at the place that its model's answer is copied from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.ground import InputError


class Retrieval(NamedTuple):
    """What each head does where the answer's tokens are predicted.

    score  [B, H] share of the answer's tokens at whose prediction the key with the most weight is in the needle and
           holds that token: the retrieval score of Wu et al. 2024 (arXiv 2404.15574, section 2), with the right answer
           given in place of the generated one
    mass   [B, H] mean weight on the keys in the needle that hold the token
    """

    score: Float[Tensor, "B H"]
    mass: Float[Tensor, "B H"]


def retrieval(
    weights: Float[Tensor, "B H n K"], tokens: Int[Tensor, "B N"], places: Int[Tensor, "n"], needle: Int[Tensor, "B 2"]
) -> Retrieval:
    """Retrieval scores of heads, from their weights at the queries that predict an answer.

    Arguments
        weights  of the queries at ``places`` - 1 on the keys 0 .. K-1; without a sink's
        tokens   of all sequences, question and answer included
        places   of the answer's tokens
        needle   the first of the needle's tokens and the one after its last; it lies before the question

    Raises `InputError` for shapes that do not fit, and where a token of the answer is not in its needle.
    """
    keys = weights.shape[-1]
    if weights.shape[0] != len(tokens) or weights.shape[2] != len(places) or needle.shape != (len(tokens), 2):
        raise InputError(
            f"weights: their shape is {list(weights.shape)}, that of the needles {list(needle.shape)}; [{len(tokens)}, "
            f"H, {len(places)}, K] and [{len(tokens)}, 2] are needed."
        )
    at = torch.arange(keys, device=weights.device)
    first, last = needle.to(at.device).unbind(1)
    inside = (at >= first.unsqueeze(1)) & (at < last.unsqueeze(1))
    own = tokens.to(at.device)
    hits = (own[:, None, :keys] == own[:, places.to(at.device), None]) & inside.unsqueeze(1)
    if not bool(hits.any(-1).all()):
        raise InputError("needle: a token of the answer is not in it; it must hold all of them.")
    marked = hits.unsqueeze(1).to(weights.dtype)
    top = weights.argmax(-1, keepdim=True)
    found = marked.expand_as(weights).gather(-1, top).squeeze(-1)
    return Retrieval(found.double().mean(-1), (weights * marked).sum(-1).double().mean(-1))
