"""Does softmax preserve Toeplitz matrices? (arXiv 2505.13027, Remark 3.1)

Attention(p_i, p_j) = [a_{i-j}] of Assumption 3.2 is written with an equal sign "because the normalization operation
does not change the Toeplitz property". For softmax S_ij = e^{a_(i-j)} / Z_i with Z_i the sum over row i. What holds:
for finite a_δ, S is Toeplitz if and only if all Z_i are equal, for the rows i and i + 1 have the diagonals of their
first entries in common. Over all keys Z_(i+1) - Z_i = e^{a_(i+1)} - e^{a_(i+1-N)}: they are equal just for circulant
matrices. Under a causal mask it is e^{a_(i+1)} > 0, so that S never is one; with a window of M (a_δ = -∞ from δ = M on)
all rows from M - 1 on have one sum, and there S is Toeplitz.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from toeplens.encodings import build
from toeplens.papers.mathematics.records import ROUNDING, ClaimsOn, Records, generator, tally
from toeplens.studies.kit.claims import Claim

SIZES = (2, 3, 8, 32)
WINDOW = 4
WIDTH = 16  # of the sinusoid
APART = 1e-3  # minimum relative difference of row sums that count as different
SOURCE = "arXiv 2505.13027 v1, Remark 3.1"

_GAP = "largest relative distance from the nearest Toeplitz matrix"
_NEAREST = "smallest relative distance from the nearest Toeplitz matrix (negated)"
TALLIES: dict[str, tuple[str, str]] = {
    "softmax": ("the softmax over all keys of a random Toeplitz matrix is Toeplitz", _GAP),
    "causal": ("the softmax over the keys up to the query is Toeplitz", _GAP),
    "sinusoid": ("the softmax of the sinusoid's p_i · p_j / √d is Toeplitz", _GAP),
    "scaled": ("the factor 1/√d preserves the property", _GAP),
    "circulant": ("the softmax of a circulant matrix is Toeplitz", _GAP),
    "window": ("under a causal window the rows after the first few are Toeplitz", _GAP),
    "causal-lost": ("the softmax over the keys up to the query is not Toeplitz", _NEAREST),
    "unequal": (f"if row sums differ by at least {APART:g}, the softmax is not Toeplitz", _NEAREST),
}


def toeplitz_gap(matrix: Float[np.ndarray, "R N"]) -> float:
    """Relative distance from the nearest Toeplitz matrix; 0 if and only if every diagonal is constant."""
    means = np.zeros_like(matrix)
    rows, columns = np.indices(matrix.shape)
    for offset in range(1 - matrix.shape[1], matrix.shape[0]):
        at = rows - columns == offset
        means[at] = matrix[at].mean()
    return float(np.linalg.norm(matrix - means) / np.linalg.norm(matrix))


def softmax(logits: Float[np.ndarray, "N N"]) -> Float[np.ndarray, "N N"]:
    """Softmax of each row; -∞ gives 0."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def causal(logits: Float[np.ndarray, "N N"], window: int | None = None) -> Float[np.ndarray, "N N"]:
    """-∞ for keys after the query, and for those ``window`` or more before it."""
    offsets = np.subtract.outer(np.arange(len(logits)), np.arange(len(logits)))
    return np.where((offsets >= 0) & (offsets < (window or len(logits))), logits, -np.inf)


def _spread(logits: Float[np.ndarray, "N N"]) -> float:
    """Range of the row sums of the exponentials, relative to the largest."""
    sums = np.exp(logits).sum(-1)
    return float(np.ptp(sums) / sums.max())


def _sinusoid(size: int) -> Float[np.ndarray, "N N"]:
    encoding = build("sinusoidal", d_model=WIDTH, num_heads=1, head_dim=WIDTH, max_len=size)
    p = encoding.embed(torch.zeros(1, size, WIDTH, dtype=torch.float64), torch.arange(size))[0].numpy()
    return p @ p.T / np.sqrt(WIDTH)


def normalising(seed: int, *, tries: int = 200) -> dict[str, Any]:
    """Toeplitz matrices before and after softmax.

    Arguments
        seed   of the random kernels
        tries  kernels of each size, 20 or more

    Returns ``tallies`` by statement (`tally`).
    """
    rng = generator(seed, tries)
    margins: dict[str, list[float]] = {name: [] for name in TALLIES}
    for size in SIZES:
        offsets = np.subtract.outer(np.arange(size), np.arange(size))
        margins["sinusoid"].append(toeplitz_gap(softmax(_sinusoid(size))))
        for _ in range(tries):
            kernel = rng.normal(size=2 * size - 1)
            logits = kernel[offsets + size - 1]
            for name, masked in (("softmax", logits), ("causal", causal(logits))):
                gap = toeplitz_gap(softmax(masked))
                margins[name].append(gap)
                if name == "causal":
                    margins["causal-lost"].append(-gap)
                if _spread(masked) >= APART:
                    margins["unequal"].append(-gap)
            margins["scaled"].append(toeplitz_gap(logits / np.sqrt(WIDTH)))
            margins["circulant"].append(toeplitz_gap(softmax(kernel[offsets % size])))
            if size > WINDOW:
                margins["window"].append(toeplitz_gap(softmax(causal(logits, WINDOW))[WINDOW - 1 :]))
    lost = ("causal-lost", "unequal")
    tallies = {name: tally(found, beyond=-ROUNDING if name in lost else ROUNDING) for name, found in margins.items()}
    return {"seed": seed, "tallies": tallies}


_claim = ClaimsOn(
    "normalising",
    TALLIES,
    f"A counterexample is a normalised matrix whose diagonals are not constant to {ROUNDING:g} of its norm.",
)
CLAIMS: tuple[Claim[Records], ...] = (
    _claim(
        SOURCE,
        "normalising",
        "The normalization operation does not change the Toeplitz property of the matrix.",
        "Normalisation is softmax, over all keys and under a causal mask. Supporting: the factor 1/√d.",
        ("softmax", "causal", "sinusoid"),
        supporting=("scaled",),
    ),
    _claim(
        f"{SOURCE}, corrected",
        "normalising-corrected",
        "The softmax of a Toeplitz matrix is Toeplitz if and only if all rows have the same sum: for circulant logits, "
        "or for the rows of a causal window after the first few; never under a full causal mask.",
        "Proved in this module.",
        ("circulant", "window", "causal-lost", "unequal"),
    ),
)
