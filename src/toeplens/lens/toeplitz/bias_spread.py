"""How much a bias on the distance weighs: its spread over the offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from toeplens.encodings import PositionalEncoding
from toeplens.ground import InputError
from toeplens.ground.records import AtLeast1, Record


@dataclass(frozen=True)
class BiasSpread(Record):
    """A bias on the distance, layer by layer and head by head, in logits.

    offsets  how many distances were looked at
    spread   [L, H] root mean square of b_d over the offsets d, about the head's mean, which softmax does not see
    """

    WORDS = "bias spread"

    offsets: AtLeast1
    spread: Float[np.ndarray, "L H"]

    @property
    def doublings(self) -> float:
        """log2 of the root mean square of the spreads of all heads; -inf for a bias that says nothing."""
        with np.errstate(divide="ignore"):
            return float(np.log2(np.sqrt(np.square(self.spread).mean())))


@torch.no_grad()
def bias_spread(encodings: Sequence[PositionalEncoding], length: int, *, causal: bool = True) -> BiasSpread:
    """The spread of the bias of each layer's encoding over the distances of a text.

    Arguments
        encodings  of each layer
        length     tokens of a text
        causal     distances 0 .. length - 1; else those to keys after the query too

    Raises `InputError` for an encoding whose bias is no function of the distance.
    """
    offsets = torch.arange(0 if causal else 1 - length, length)
    spreads = []
    for encoding in encodings:
        kernel = encoding.kernel(offsets) if encoding.coupling == "bias" else None
        if kernel is None:
            raise InputError(f"encoding: {type(encoding).__name__} adds no bias on the distance.")
        spreads.append(kernel.double().cpu().std(dim=-1, correction=0).numpy())
    return BiasSpread(len(offsets), np.stack(spreads))
