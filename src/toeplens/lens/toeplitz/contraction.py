"""The effect of position on the spectrum of a head's matrices, and the size of a bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.encodings import PositionalEncoding
from toeplens.ground import InputError, invalid
from toeplens.ground.records import AtLeast1, Record
from toeplens.lens.kit.terms import rotation_of
from toeplens.lens.kit.trace import LayerTrace

LARGEST = 1024  # maximum rows of a matrix whose eigenvalues are all computed


@dataclass(frozen=True)
class Contraction:
    """Spectra of a layer's heads with position, divided by those of the same queries and keys without; mean ratios.

    All pairs are used, visible or not, as the papers' statements are about whole matrices.

    width  [H] range of the eigenvalues of the logits' symmetric part, (L + L^T) / 2
    norm   [H] largest singular value of the logits
    gram   [H] largest eigenvalue of the keys' Gram matrix, rotated divided by as projected; its trace does not change
           if the encoding is a pure rotation (xPos also scales keys). NaN without a rotation of pairs
    bound  [H] the same eigenvalue divided by its bound, the sum of those of the frequencies' own Gram matrices (Schur,
           frequency by frequency): never above 1
    """

    width: Float[Tensor, "H"]
    norm: Float[Tensor, "H"]
    gram: Float[Tensor, "H"]
    bound: Float[Tensor, "H"]


@torch.no_grad()
def contraction(layer: LayerTrace, *, sequences: int = 16) -> Contraction:
    """Spectra with and without position, over the first ``sequences`` of at least two tokens (theory, 5; float64).

    Raises `InputError` if the encoding reads other tokens' content, the matrices exceed 1024 x 1024, or no sequence has
    two tokens.
    """
    encoding = layer.encoding
    if encoding.data_dependent or encoding.overrides("transform_logits") or "bias" in encoding._seeing:
        raise InputError(f"encoding must be a rotation, a bias or vectors at the input, got {type(encoding).__name__}.")
    if len(layer.rows) > LARGEST:
        raise invalid("positions", f"be at most {LARGEST}", len(layer.rows))
    rotation = rotation_of(layer)
    bias = encoding.bias(layer.positions, layer.positions)
    several = (layer.present.sum(1) > 1).nonzero().flatten().tolist()
    if not several:
        raise InputError("lengths must include a sequence of at least two tokens.")
    repeats = layer.q.shape[1] // layer.k.shape[1]  # grouped queries: a key head serves several
    wide_q, wide_k = layer.q.double(), layer.k.double().repeat_interleave(repeats, 1)
    turned_q, turned_k = layer.turn(wide_q, wide_k)
    found = []
    for sequence in several[:sequences]:
        there = layer.present[sequence]
        q, k, tq, tk = (x[sequence][:, there] for x in (wide_q, wide_k, turned_q, turned_k))
        without = q @ k.mT * layer.scale
        logits = tq @ tk.mT * layer.scale
        if bias is not None:
            own = bias if bias.ndim == 3 else bias[sequence]
            logits = logits + own.double()[:, there][:, :, there]
        gram = bound = torch.full((q.shape[0],), torch.nan, dtype=torch.float64, device=q.device)
        if rotation is not None:
            largest = _largest(tk)
            gram = largest / _largest(k)
            groups = [tk[..., rotation.groups == group] for group in rotation.groups.unique()]
            bound = largest / torch.stack([_largest(part) for part in groups]).sum(0)
        norms = [torch.linalg.matrix_norm(x, 2) for x in (logits, without)]
        found.append(torch.stack((_width(logits) / _width(without), norms[0] / norms[1], gram, bound)))
    return Contraction(*torch.stack(found).mean(0))


def _width(matrix: Float[Tensor, "H N N"]) -> Float[Tensor, "H"]:
    values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)
    return values[..., -1] - values[..., 0]


def _largest(k: Float[Tensor, "H N d"]) -> Float[Tensor, "H"]:
    """The largest eigenvalue of the Gram matrix, from the smaller of k k^T and k^T k."""
    return torch.linalg.matrix_norm(k, 2) ** 2


@dataclass(frozen=True)
class BiasSpread(Record):
    """A bias by distance, by layer and head, in logits.

    offsets  number of distances
    spread   [L, H] root mean square of b_d over the offsets d, about the head's mean, which softmax ignores
    """

    WORDS = "bias spread"

    offsets: AtLeast1
    spread: Float[np.ndarray, "L H"]

    @property
    def doublings(self) -> float:
        """log2 of the root mean square of all heads' spreads; -inf for a constant bias."""
        with np.errstate(divide="ignore"):
            return float(np.log2(np.sqrt(np.square(self.spread).mean())))


@torch.no_grad()
def bias_spread(encodings: Sequence[PositionalEncoding], length: int, *, causal: bool = True) -> BiasSpread:
    """The spread of the bias of each layer's encoding over the distances in a sequence.

    Arguments
        encodings  one per layer
        length     number of tokens in the sequence
        causal     distances 0 .. length - 1; otherwise also those to keys after the query

    Raises `InputError` for an encoding without a bias by distance.
    """
    offsets = torch.arange(0 if causal else 1 - length, length)
    spreads = []
    for encoding in encodings:
        kernel = encoding.kernel(offsets) if encoding.coupling == "bias" else None
        if kernel is None:
            raise InputError(f"encoding must add a bias by distance, got {type(encoding).__name__}.")
        spreads.append(kernel.double().cpu().std(dim=-1, correction=0).numpy())
    return BiasSpread(len(offsets), np.stack(spreads))
