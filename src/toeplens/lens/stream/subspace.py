"""The position component as a set of vectors: the subspace it spans, and the curve it forms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.linalg import subspace_angles
from torch import Tensor

from toeplens.ground import InputError, invalid

TOLERANCE = 1e-3  # degrees; the oblique projection then amplifies rounding errors by at most 6e4


@dataclass(frozen=True)
class PositionSubspace:
    """The linear span of the position vectors, compared with that of the word vectors; both are centred first.

    spectrum       [min(N, D)] share of the position vectors' variance along each principal direction, descending
    rank           number of directions that hold ``energy`` of it
    participation  participation ratio of the spectrum, (sum s)^2 / sum s^2: effective number of directions
    word_rank      number of directions that hold ``energy`` of the words' variance
    angles         [min(rank, word_rank)] principal angles between the two spans in degrees, ascending
    overlap        share of the words' variance that lies in the position span
    chance         rank / D: the expected overlap of words without a preferred direction
    separable      whether the spans share only 0: rank + word_rank <= D and no angle below `TOLERANCE` degrees
    amplification  largest factor by which `separate` amplifies other vectors: 1 / sin(least angle)
    position_mean  [D] mean of the position vectors
    word_mean      [D] mean of the word vectors
    basis          [D, rank] orthonormal basis of the position span
    word_basis     [D, word_rank] orthonormal basis of the word span
    """

    spectrum: Float[np.ndarray, "min_N_D"]
    rank: int
    participation: float
    word_rank: int
    angles: Float[np.ndarray, "min_rank"]
    overlap: float
    chance: float
    separable: bool
    amplification: float
    position_mean: Float[np.ndarray, "D"]
    word_mean: Float[np.ndarray, "D"]
    basis: Float[np.ndarray, "D rank"]
    word_basis: Float[np.ndarray, "D word_rank"]

    def separate(
        self, x: Float[np.ndarray, "*B D"] | Float[Tensor, "*B D"]
    ) -> tuple[Float[np.ndarray, "*B D"], Float[np.ndarray, "*B D"]]:
        """Split sums of a position and a word vector by the oblique projection on one span along the other.

        Exact for such sums, orthogonal or not, up to rounding times `amplification`; components outside both spans are
        left out of both parts. Returns position and word part, float64. Raises `InputError` if the spans share
        vectors, as these could belong to either part.
        """
        if not self.separable:
            raise InputError(
                f"x: a position span of {self.rank} and a word span of {self.word_rank} dimensions overlap in "
                f"{len(self.position_mean)} dimensions, so x cannot be separated."
            )
        joint = np.linalg.pinv(np.concatenate((self.basis, self.word_basis), axis=1))
        parts = (_float64(x) - self.position_mean - self.word_mean) @ joint.T
        position = self.position_mean + parts[..., : self.rank] @ self.basis.T
        return position, self.word_mean + parts[..., self.rank :] @ self.word_basis.T


def position_subspace(
    p: Float[np.ndarray, "N D"] | Float[Tensor, "N D"],
    words: Float[np.ndarray, "V D_words"] | Float[Tensor, "V D_words"],
    *,
    energy: float = 0.99,
) -> PositionSubspace:
    """Is the position component a linear subspace separate from the words'? (arXiv 2505.13027 v1, C.4)

    Arguments
        p       [N, D] position vectors (`position_means`, or an encoding's table)
        words   [V, D] token embeddings, or content vectors
        energy  share of the variance that a span must hold, above 0 and at most 1; at 1 the span holds everything down
                to float64 rounding, and `PositionSubspace.separate` is exact

    Raises `InputError` for values that are not finite, two different widths, or an energy out of range.
    """
    position, word = _float64(p), _float64(words)
    for field, values in (("p", position), ("words", word)):
        if not (values.size and np.isfinite(values).all()):
            raise invalid(field, "be finite and have at least one row", got=f"shape {list(values.shape)}")
    if position.shape[1] != word.shape[1]:
        raise invalid("words", f"have the width of p, {position.shape[1]}", word.shape[1])
    _check_energy(energy)
    position_mean, spectrum, basis = _span(position, energy)
    word_mean, _, word_basis = _span(word, energy)
    rank, word_rank, width = basis.shape[1], word_basis.shape[1], position.shape[1]
    angles = np.empty(0)
    if rank and word_rank:
        angles = np.degrees(subspace_angles(basis, word_basis))[::-1]
    least = angles[0] if len(angles) else 90.0
    centred = word - word_mean
    with np.errstate(invalid="ignore", divide="ignore"):
        return PositionSubspace(
            spectrum=spectrum,
            rank=rank,
            participation=float(1 / np.sum(spectrum**2)),
            word_rank=word_rank,
            angles=angles,
            overlap=float(np.sum((centred @ basis) ** 2) / np.sum(centred**2)),
            chance=rank / width,
            separable=bool(least > TOLERANCE and rank + word_rank <= width),
            amplification=float(1 / np.sin(np.radians(least))),
            position_mean=position_mean,
            word_mean=word_mean,
            basis=basis,
            word_basis=word_basis,
        )


def linear_error(
    p: Float[np.ndarray, "N D"] | Float[Tensor, "N D"], words: Float[np.ndarray, "V D"] | Float[Tensor, "V D"]
) -> float:
    """Relative error of the best linear map M from sums w_v + p_i to p_i, over all pairs (v, i), both tables centred.

    The minimum of sqrt(E|(w + p) M - p|^2 / E|p|^2): 0 up to rounding if the two spans share only 0, at most 1. As v
    and i are independent, E|(w + p) M - p|^2 = E|w M|^2 + E|p M - p|^2. Nan if p has no variance.

    Arguments
        p      [N, D] position vectors
        words  [V, D] token embeddings, or content vectors
    """
    position, word = ((x - x.mean(0)) / np.sqrt(len(x)) for x in (_float64(p), _float64(words)))
    design, wanted = np.concatenate((position, word)), np.concatenate((position, np.zeros_like(word)))
    rest = design @ np.linalg.lstsq(design, wanted, rcond=None)[0] - wanted
    with np.errstate(invalid="ignore"):
        return float(np.linalg.norm(rest) / np.linalg.norm(position))


@dataclass(frozen=True)
class CurveDimension:
    """The position vectors as points of a curve i -> p_i, which may bend through many dimensions and yet be thin.

    rank        number of dimensions that hold ``energy`` of the variance of all positions
    local_rank  the same within a window of consecutive positions, mean over the windows; 1 for a curve that is straight
                within the window, near window - 1 for unordered points
    arc_chord   path length divided by the distance of its ends, median over the windows; 1 for a straight piece, near
                window - 1 for unordered points
    window      number of positions in a window
    """

    rank: int
    local_rank: float
    arc_chord: float
    window: int


def curve_dimension(
    p: Float[np.ndarray, "N D"] | Float[Tensor, "N D"], *, window: int = 8, energy: float = 0.99
) -> CurveDimension:
    """Is the position component a thin curve rather than a flat subspace? (arXiv 2505.13027 v1, C.4)

    Arguments
        p       [N, D] position vectors in order
        window  number of consecutive positions in a window, 3 to N
        energy  share of the variance that a rank must hold, above 0 and at most 1

    Raises `InputError` for values that are not finite, a window or an energy out of range.
    """
    position = _float64(p)
    if not np.isfinite(position).all():
        raise InputError("p must be finite.")
    if not 3 <= window <= len(position):
        raise invalid("window", f"be from 3 to the {len(position)} positions", window)
    _check_energy(energy)
    pieces = np.lib.stride_tricks.sliding_window_view(position, window, axis=0).transpose(0, 2, 1)
    ranks = [_span(piece, energy)[2].shape[1] for piece in pieces]
    arcs = np.linalg.norm(np.diff(pieces, axis=1), axis=2).sum(1)
    chords = np.linalg.norm(pieces[:, -1] - pieces[:, 0], axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = float(np.median(arcs / chords))
    return CurveDimension(_span(position, energy)[2].shape[1], float(np.mean(ranks)), ratio, window)


def neighbour_error(p: Float[np.ndarray, "N D"] | Float[Tensor, "N D"]) -> float:
    """How badly the midpoint of its two neighbours predicts a position vector: do the positions resolve the curve?

    Any points lie on some curve, but only a curve that neighbours predict is useful. Returns the root mean square of
    |p_i - (p_(i-1) + p_(i+1))/2| divided by that of |p_i - mean of all|, both over the inner positions: 0 on a straight
    line with equal steps, 1 if neighbours predict no better than the mean, and sqrt(3/2) on average for unordered
    vectors. Nan if all inner positions equal the mean.

    Arguments
        p  [N, D] position vectors in order, at least 3
    """
    position = _float64(p)
    if len(position) < 3 or not np.isfinite(position).all():
        raise invalid("p", "be finite and have at least 3 rows", len(position))
    inner = position[1:-1]
    rest = inner - (position[:-2] + position[2:]) / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.linalg.norm(rest) / np.linalg.norm(inner - position.mean(0)))


def _span(
    values: Float[np.ndarray, "M D"], energy: float
) -> tuple[Float[np.ndarray, "D"], Float[np.ndarray, "min_M_D"], Float[np.ndarray, "D rank"]]:
    """Mean, shares of variance, and an orthonormal basis of the centred rows' span; shares are nan for equal rows."""
    mean = values.mean(0)
    _, singular, directions = np.linalg.svd(values - mean, full_matrices=False)
    rounding = max(values.shape) * np.finfo(np.float64).eps * np.abs(values).max(initial=0) * np.sqrt(values.size)
    rank = int(np.sum(singular > rounding))
    with np.errstate(invalid="ignore"):
        shares = singular**2 / np.sum(singular**2) if rank else np.full_like(singular, np.nan)
    if energy < 1 and rank:
        rank = min(rank, 1 + int(np.searchsorted(np.cumsum(shares), energy * (1 - 1e-12))))
    return mean, shares, directions[:rank].T


def _check_energy(energy: float) -> None:
    if not 0 < energy <= 1:
        raise invalid("energy", "be over 0 and at most 1", energy)


def _float64(values: Float[np.ndarray, "..."] | Float[Tensor, "..."]) -> Float[np.ndarray, "..."]:
    if isinstance(values, Tensor):
        return values.detach().to("cpu", torch.float64).numpy()
    return values.astype(np.float64)
