"""Margins: how far a layer's best head is ahead of its second, and how the lead changes from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from toeplens.ground import InputError


@dataclass(frozen=True)
class Margins:
    """The lead of the best head of each layer (arXiv 2505.13027, section 6; theory 7).

    ratio  [L] M_l, the best head's signal over the second best's; NaN with fewer than two heads that have one
    gamma  [L - 1] M_l / M_{l+1}: the claim is that it is over 1, so that the lead grows back through the layers
    """

    ratio: Float[np.ndarray, "L"]
    gamma: Float[np.ndarray, "L1"]


def margins(signal: Float[np.ndarray, "L H"]) -> Margins:
    """Best against second best head, layer by layer.

    The product of all gamma is M_0 / M_{L-1} whatever the signals are; what is claimed is gamma_l > 1 for each l.

    Arguments
        signal  [L, H] size of each head's mean positional gradient (`SeedStrength`), at least 0; NaN where there is
                none
    """
    if np.any(signal < 0):
        raise InputError(f"signal: {np.nanmin(signal):g} was given; sizes of gradients are at least 0.")
    known = np.where(np.isnan(signal), -np.inf, signal)
    best, second = -np.sort(np.concatenate((-known, np.full((len(signal), 2), np.inf)), axis=1), axis=1)[:, :2].T
    ratio = np.divide(best, second, out=np.full_like(best, np.nan), where=second > 0)
    return Margins(ratio, ratio[:-1] / ratio[1:])
