"""Spectra of Toeplitz kernels (symbol, eigenvalues), and of heads' matrices with and without position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Complex, Float, Inexact, Int, Shaped
from scipy.linalg import eigvalsh, toeplitz
from torch import Tensor

from toeplens.encodings import PositionalEncoding
from toeplens.lens.kit.terms import pair_rotation
from toeplens.lens.kit.trace import LayerTrace
from toeplens.utils import InputError, invalid
from toeplens.utils.records import PositiveInt, Record

Kernel = Float[np.ndarray, "D"] | Complex[np.ndarray, "D"]
Columns = Inexact[np.ndarray, "*B N"]

MAX_DENSE_POSITIONS = 1024  # maximum number of positions for heads' matrices


def symbol(
    kernel: Float[np.ndarray, "*rows D"] | Complex[np.ndarray, "*rows D"], points: int | None = None
) -> tuple[Float[np.ndarray, "points"], Complex[np.ndarray, "*rows points"]]:
    """The symbol a(e^(i phi)) = sum over delta of a_delta e^(i delta phi) of a Toeplitz matrix (theory: Szegő).

    Arguments
        kernel  a_delta at delta = -(M-1), ..., M-1 in the last dimension (D = 2M - 1); for a matrix of M rows the sum
                ends there, so an infinite kernel is truncated to a window of M
        points  number of angles, evenly spaced from 0 on, at least 1 (default: D)

    Returns the angles phi in [-pi, pi) and the symbol at each, real for a kernel with a_(-delta) = conj(a_delta).
    """
    size = kernel.shape[-1]
    count = size if points is None else points
    if count < 1:
        raise invalid("points", "be at least 1", points)
    half = (size - 1) // 2
    folded = np.zeros((*kernel.shape[:-1], count), dtype=np.complex128)
    index = np.arange(-half, size - half) % count  # at these angles, offsets that differ by their number coincide
    np.add.at(np.moveaxis(folded, -1, 0), index, np.moveaxis(kernel, -1, 0))
    values = np.fft.ifft(folded, axis=-1) * count  # the inverse transform has the sign e^(+i delta phi)
    angles = 2 * np.pi * np.fft.fftfreq(count)
    order = np.argsort(angles)
    return angles[order], values[..., order]


@dataclass(frozen=True)
class Szego:
    """A kernel's eigenvalues by size N, compared with its symbol (`szego`).

    lowest, highest   [K] the extreme eigenvalues of T_N
    symbol_low, symbol_high  the symbol's minimum and maximum
    gap_low, gap_high [K] lowest - symbol_low and symbol_high - highest, never negative beyond rounding
    distribution_gap  [K] largest distance between the sorted eigenvalues and the sorted values of the symbol at N even
                      angles
    """

    sizes: Int[np.ndarray, "K"]
    lowest: Float[np.ndarray, "K"]
    highest: Float[np.ndarray, "K"]
    symbol_low: float
    symbol_high: float
    gap_low: Float[np.ndarray, "K"]
    gap_high: Float[np.ndarray, "K"]
    distribution_gap: Float[np.ndarray, "K"]


def hermitian_part(
    kernel: Float[np.ndarray, "*rows D"] | Complex[np.ndarray, "*rows D"],
) -> Float[np.ndarray, "*rows D"] | Complex[np.ndarray, "*rows D"]:
    """(a_delta + conj a_(-delta)) / 2: the kernel of (T + T^H) / 2, whose symbol is the real part of T's.

    For a causal kernel (0 where delta < 0) it is half of the kernel plus half of its mirror image, with a_0 unchanged.
    """
    _require_odd(kernel)
    return (kernel + kernel[..., ::-1].conj()) / 2


def szego(kernel: Kernel, sizes: Sequence[int]) -> Szego:
    """How the eigenvalues of T_N fill the range of the symbol as N grows (Grenander & Szegő 1958; theory 4).

    T_N of any N is a section of the infinite Toeplitz matrix with that symbol, so all eigenvalues lie between the
    symbol's minimum and maximum. As N grows, the extremes tend to these bounds, and the sorted eigenvalues to those of
    the symbol at even angles. A kernel that extends beyond delta = M - 1 is truncated there: the symbol then has the
    window's ripples (a positive semi-definite kernel can have a truncated symbol below 0), and sizes much below M need
    not come near its bounds.

    Arguments
        kernel  a_delta at delta = -(M-1), ..., M-1 (D = 2M - 1), taken as zero beyond
        sizes   numbers of rows N, in O(N^2) memory and O(N^3) time each

    Raises `InputError` for a kernel that is not Hermitian (see `hermitian_part`) or not finite.
    """
    _require_odd(kernel)
    if not np.isfinite(kernel).all():
        raise InputError("kernel must be finite.")
    if np.abs(kernel - kernel[::-1].conj()).max() > 1e-9 * np.abs(kernel).max():
        raise InputError("kernel must be Hermitian: k(-delta) = conj(k(delta)). Use `hermitian_part`.")
    if min(sizes, default=1) < 1:
        raise invalid("sizes", "be at least 1", min(sizes))
    extremes, distribution = np.empty((len(sizes), 2)), np.empty(len(sizes))
    half = kernel[len(kernel) // 2 :].astype(np.result_type(kernel.dtype, np.float64))
    coefficients = np.concatenate((half[:1] / 2, half[1:]))
    low, high = -float(max_value(-coefficients)), float(max_value(coefficients))
    for index, size in enumerate(sizes):
        eigenvalues = eigvalsh(toeplitz(np.pad(half[:size], (0, max(0, size - len(half))))))
        extremes[index] = eigenvalues[[0, -1]]
        distribution[index] = np.abs(eigenvalues - np.sort(np.real(symbol(kernel, size)[1]))).max()
    lowest, highest = extremes.T
    return Szego(np.array(sizes, dtype=int), lowest, highest, low, high, lowest - low, high - highest, distribution)


def _require_odd(kernel: Shaped[np.ndarray, "..."]) -> None:
    if kernel.shape[-1] % 2 == 0:
        raise invalid("kernel", "have an odd number of values, 2M - 1", kernel.shape[-1])


def max_value(coefficients: Columns) -> Float[np.ndarray, "*B"]:
    """max over θ of 2 Re Σ_i c_i e^{iiθ}, to rounding: an FFT grid of 16N, then Newton from its 8 highest peaks."""
    size = coefficients.shape[-1]
    flat = coefficients.reshape(-1, size)
    count = 16 * size
    values = 2 * count * np.fft.ifft(flat, count, axis=-1).real
    is_peak = (values >= np.roll(values, 1, -1)) & (values >= np.roll(values, -1, -1))
    peak_indices = np.argpartition(np.where(is_peak, values, -np.inf), -8, axis=-1)[:, -8:]
    angles, best = 2 * np.pi * peak_indices / count, values.max(-1)
    index = np.arange(size)
    for _ in range(7):
        terms = flat[:, None] * np.exp(1j * angles[..., None] * index)
        best = np.maximum(best, 2 * terms.real.sum(-1).max(-1))
        slope, curvature = -(terms.imag @ index), -(terms.real @ index**2)
        step = np.divide(-slope, curvature, out=np.zeros_like(slope), where=curvature < 0)
        angles = angles + np.clip(step, -2 * np.pi / count, 2 * np.pi / count)
    return best.reshape(coefficients.shape[:-1])


# ---- heads' matrices -------------------------------------------------------------------------------------------------


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
    if encoding.data_dependent or encoding.overrides("transform_logits") or "bias" in encoding._inputs_argument:
        raise InputError(f"encoding must be a rotation, a bias or vectors at the input, got {type(encoding).__name__}.")
    if len(layer.rows) > MAX_DENSE_POSITIONS:
        raise invalid("positions", f"be at most {MAX_DENSE_POSITIONS}", len(layer.rows))
    rotation = pair_rotation(layer)
    bias = encoding.bias(layer.positions, layer.positions)
    usable = (layer.present.sum(1) > 1).nonzero().flatten().tolist()
    if not usable:
        raise InputError("lengths must include a sequence of at least two tokens.")
    repeats = layer.q.shape[1] // layer.k.shape[1]  # grouped queries: a key head serves several
    wide_q, wide_k = layer.q.double(), layer.k.double().repeat_interleave(repeats, 1)
    rotated_q, rotated_k = layer.rotate(wide_q, wide_k)
    results = []
    for sequence in usable[:sequences]:
        present = layer.present[sequence]
        q, k, tq, tk = (x[sequence][:, present] for x in (wide_q, wide_k, rotated_q, rotated_k))
        bare_logits = q @ k.mT * layer.scale
        logits = tq @ tk.mT * layer.scale
        if bias is not None:
            sequence_bias = bias if bias.ndim == 3 else bias[sequence]
            logits = logits + sequence_bias.double()[:, present][:, :, present]
        gram = bound = torch.full((q.shape[0],), torch.nan, dtype=torch.float64, device=q.device)
        if rotation is not None:
            largest = _largest_eigenvalue(tk)
            gram = largest / _largest_eigenvalue(k)
            groups = [tk[..., rotation.groups == group] for group in rotation.groups.unique()]
            bound = largest / torch.stack([_largest_eigenvalue(k_group) for k_group in groups]).sum(0)
        norms = [torch.linalg.matrix_norm(x, 2) for x in (logits, bare_logits)]
        width = _eigenvalue_range(logits) / _eigenvalue_range(bare_logits)
        results.append(torch.stack((width, norms[0] / norms[1], gram, bound)))
    return Contraction(*torch.stack(results).mean(0))


def _eigenvalue_range(matrix: Float[Tensor, "H N N"]) -> Float[Tensor, "H"]:
    values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)
    return values[..., -1] - values[..., 0]


def _largest_eigenvalue(k: Float[Tensor, "H N d"]) -> Float[Tensor, "H"]:
    """The largest eigenvalue of the Gram matrix."""
    return torch.linalg.matrix_norm(k, 2) ** 2


@dataclass(frozen=True)
class BiasSpread(Record):
    """A bias by distance, by layer and head, in logits.

    offsets  number of distances
    spread   [L, H] root mean square of b_d over the offsets d, about the head's mean, which softmax ignores
    """

    LABEL = "bias spread"

    offsets: PositiveInt
    spread: Float[np.ndarray, "L H"]

    @property
    def log2_spread(self) -> float:
        """log2 of the root mean square of all heads' spreads; -inf for a constant bias."""
        with np.errstate(divide="ignore"):
            return float(np.log2(np.sqrt(np.square(self.spread).mean())))


@torch.no_grad()
def bias_spread(encodings: Sequence[PositionalEncoding], length: int, *, causal: bool = True) -> BiasSpread:
    """The spread of the bias of each layer's encoding over the distances in a sequence.

    Distances are 0 .. length - 1; without ``causal`` also those to keys after the query. Raises `InputError` for an
    encoding without a bias by distance.
    """
    offsets = torch.arange(0 if causal else 1 - length, length)
    spreads = []
    for encoding in encodings:
        kernel = encoding.kernel(offsets) if encoding.coupling == "bias" else None
        if kernel is None:
            raise InputError(f"encoding must add a bias by distance, got {type(encoding).__name__}.")
        spreads.append(kernel.double().cpu().std(dim=-1, correction=0).numpy())
    return BiasSpread(len(offsets), np.stack(spreads))
