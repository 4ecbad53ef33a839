"""Position in the residual stream: how much of it, in which directions, how well it decodes; its subspace and curve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.linalg import subspace_angles
from torch import Tensor

from toeplens.lens.kit.intervals import bootstrap_means
from toeplens.lens.kit.position import position_means
from toeplens.lens.kit.trace import AttentionTrace, LayerTrace
from toeplens.utils import InputError, invalid
from toeplens.utils.records import Dims, FloatOrNaN, ItemType, NonNegativeInt, PositiveInt, Record, Share
from toeplens.utils.renamed import renamed

PENALTIES = 10.0 ** np.arange(-8, 3)  # of the ridge regression, relative to the mean eigenvalue of its Gram matrix
_NUM_FOLDS = 5  # folds of sequences: three fit the probe, one chooses its penalty, one tests it
_ROUNDING = 1e-12  # variances below this share of the total are rounding errors


@dataclass(frozen=True)
class Representation(Record):
    """Position in the residual stream before each of L layers (arXiv 2505.13027, section 5.2).

    p is the position part of the stream at a layer by the `mean` estimator (theory 1), weighted by the sequences that
    reach a position. The reference vectors are those added at the input, or those passed in. Values that are not
    defined are NaN: without a reference, and, for the directions of p, if the interval of its variance share reaches 0.

    positions        [N] the positions that count: those that enough sequences reach
    energy           share of variance that a subspace must hold
    reference_rank   number of directions that hold ``energy`` of the reference vectors' variance; 0 without a reference
    chance           reference_rank / D: the expected alignment of random directions; nan without a reference
    variance         [L] variance of p over the positions, without the noise of finitely many sequences
    variance_share   [L] the same, as a share of the stream's variance over all tokens; may be slightly negative
    low, high        [L] bootstrap interval of the share, over the sequences
    rank             [L] number of directions that hold ``energy`` of p's variance; 0 if not known
    angles           L arrays [min(rank, reference_rank)]: principal angles between the two subspaces, in degrees,
                     ascending
    mean_cosine      [L] mean squared cosine of the angles
    alignment        [L] share of p's variance that lies in the reference subspace
    alignment_low, alignment_high  [L] its bootstrap interval
    displaced        [L] 1 - alignment / alignment at the input: 0 at layer 0, about 1 - chance for random directions,
                     1 if p avoids the subspace; nan unless the trace holds layer 0 and most of p's variance lies in
                     the subspace there
    coefficient      [L] of the regression of p on the reference vectors, <p, p0> / <p0, p0>: 1 if they are passed on
                     unchanged, 0 if they are gone, whatever other directions were added
    cosine           [L] of the angle between p and the reference vectors, as [N, D] tables; noise can raise it above 1
    decodability     [L] R^2 of a ridge regression of the position on the stream, on held-out sequences; negative if a
                     constant prediction is better
    """

    LABEL = "representation"

    layers: Annotated[Int[np.ndarray, "L"], ItemType(NonNegativeInt)]
    sequences: PositiveInt
    positions: Annotated[Int[np.ndarray, "N"], ItemType(NonNegativeInt)]
    energy: Share
    reference_rank: NonNegativeInt
    chance: FloatOrNaN
    variance: Float[np.ndarray, "L"]
    variance_share: Float[np.ndarray, "L"]
    low: Float[np.ndarray, "L"]
    high: Float[np.ndarray, "L"]
    rank: Annotated[Int[np.ndarray, "L"], ItemType(NonNegativeInt)]
    angles: Annotated[tuple[Float[np.ndarray, "_"], ...], Dims("L")]
    mean_cosine: Float[np.ndarray, "L"]
    alignment: Float[np.ndarray, "L"]
    alignment_low: Float[np.ndarray, "L"]
    alignment_high: Float[np.ndarray, "L"]
    displaced: Float[np.ndarray, "L"]
    coefficient: Float[np.ndarray, "L"]
    cosine: Float[np.ndarray, "L"]
    decodability: Float[np.ndarray, "L"]


@torch.no_grad()
@renamed
def representation(
    trace: AttentionTrace,
    *,
    reference: Float[np.ndarray, "R D"] | Float[Tensor, "R D"] | None = None,
    energy: float = 0.99,
    min_sequences: int = 16,
    bootstrap: int = 1000,
    seed: int = 0,
) -> Representation:
    """Position in the residual stream before each layer of a trace: are its directions still those of the input?

    The covariance of p over the positions is estimated by cross-fitting: each sequence's tokens are multiplied by the
    position means of all others, so that no token is multiplied by its own noise. It is unbiased if all
    sequences have the same length, and nearly so otherwise. `coefficient` is linear in p and needs none. The intervals
    resample the sequences' terms of that sum, to first order.

    Arguments
        trace          the trace to measure; padding is ignored, whether or not the model masks it
        reference      [R, D] vectors at the trace's R positions, instead of those added at the input
        energy         share of the variance that a subspace must hold, above 0 and at most 1
        min_sequences  positions that fewer sequences reach do not count; at least 5
        bootstrap      resamples for the intervals
        seed           seed of the resamples, and of the sequences that fit and test the probe

    The output of the last layer is not measured. Takes O(B R D^2 + D^3) per layer in addition to the forward pass, in
    float64. Raises `InputError` for a reference of another shape, and if fewer than two positions are reached by
    ``min_sequences`` sequences.
    """
    _check_energy(energy)
    if min_sequences < _NUM_FOLDS:
        raise invalid("min_sequences", f"be at least {_NUM_FOLDS}", min_sequences)
    rng = np.random.Generator(np.random.Philox(seed))
    folds = [torch.from_numpy(fold) for fold in np.array_split(rng.permutation(len(trace.tokens)), _NUM_FOLDS)]
    ref: _ReferenceVectors | None = None
    positions, terms, covariances, products, scores = None, [], [], [], []
    for layer in trace:
        # how many of the positions each sequence has tokens at, whether or not the model masks padding
        lengths = torch.full((len(layer.inputs),), len(layer.rows), device=layer.inputs.device)
        if trace.lengths is not None:
            lengths = (layer.rows < trace.lengths.to(layer.rows.device).unsqueeze(1)).sum(1)
        sequence_counts = (torch.arange(len(layer.rows), device=lengths.device) < lengths.unsqueeze(1)).sum(0)
        num_positions = int((sequence_counts >= min_sequences).sum())  # from the first position on
        if num_positions < 2:
            got = f"{min_sequences}, which {num_positions} positions reach"
            raise invalid("min_sequences", "be small enough for at least 2 positions", got=got)
        stream = _LayerStream(layer.inputs[:, :num_positions], lengths.clamp(max=num_positions))
        p, weights = stream.p.cpu().numpy(), stream.weights.cpu().numpy()
        if not terms:
            positions = layer.rows[:num_positions].cpu().numpy()
            ref = _reference_vectors(layer, lengths, reference, weights, energy)
        in_subspace = np.full(len(stream.x), np.nan) if ref is None else stream.terms(ref.basis)
        terms.append((stream.terms(), in_subspace, stream.total()))
        covariances.append(stream.covariance())
        products.append(np.nan if ref is None else float(weights @ (p * ref.p).sum(1)))
        scores.append(_decodability(stream, layer.rows[:num_positions], folds))
    assert positions is not None
    position_terms, in_subspace, total = np.stack(terms, axis=-1)  # [B, L] each
    variance = position_terms.mean(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = variance / total.mean(0)
        influence = (2 * (position_terms - variance) - share * (total - total.mean(0))) / total.mean(0)
        low, high = bootstrap_means(share + influence, samples=bootstrap, seed=seed)
        is_significant = low > _ROUNDING
        alignment = np.where(is_significant, in_subspace.mean(0) / variance, np.nan)
        influence = 2 * (in_subspace - alignment * position_terms) / variance
        alignment_low, alignment_high = bootstrap_means(alignment + influence, samples=bootstrap, seed=seed)
        reference_variance = np.nan if ref is None else ref.variance
        product = np.array(products)
        pairs = zip(covariances, is_significant, strict=True)
        bases = [_leading_eigenvectors(x, energy) if significant else None for x, significant in pairs]
        angles = tuple(np.empty(0) if basis is None or ref is None else _angles(basis, ref.basis) for basis in bases)
        return Representation(
            layers=np.array(trace.layers),
            sequences=len(trace.tokens),
            positions=positions,
            energy=energy,
            reference_rank=0 if ref is None else ref.basis.shape[1],
            chance=np.nan if ref is None else ref.basis.shape[1] / len(ref.basis),
            variance=variance,
            variance_share=share,
            low=low,
            high=high,
            rank=np.array([0 if basis is None else basis.shape[1] for basis in bases]),
            angles=angles,
            mean_cosine=np.array([np.mean(np.cos(np.radians(a)) ** 2) if len(a) else np.nan for a in angles]),
            alignment=alignment,
            alignment_low=alignment_low,
            alignment_high=alignment_high,
            displaced=1 - alignment / (alignment[0] if trace.layers[0] == 0 and alignment[0] > 0.5 else np.nan),
            coefficient=product / reference_variance,
            cosine=product / np.sqrt(np.where(is_significant, variance, np.nan) * reference_variance),
            decodability=np.array(scores),
        )


@dataclass(frozen=True)
class _ReferenceVectors:
    """The reference vectors [N, D], centred, their variance, and the subspace [D, r] that holds its share."""

    p: Float[np.ndarray, "N D"]
    variance: float
    basis: Float[np.ndarray, "D r"]


class _LayerStream:
    """The stream before a layer, and for each sequence the position part from all other sequences.

    x              [B, N, D] centred over all tokens; 0 at padding
    leave_one_out  [B, N, D] the position part without this sequence; ``p`` [N, D] is that from all
    present        [B, N] whether a sequence has the token
    weights        [N] share of the tokens at each position
    """

    def __init__(self, inputs: Float[Tensor, "B N D"], lengths: Int[Tensor, "B"]) -> None:
        content, self.p = position_means(inputs.double(), lengths)
        self.present = torch.arange(inputs.shape[1], device=inputs.device) < lengths.unsqueeze(1)
        mask, counts = self.present.unsqueeze(-1), self.present.sum(0)
        mean = torch.where(mask, content, 0).sum((0, 1)) / counts.sum()
        noise = torch.where(mask, content - mean, 0)
        self.weights = counts.double() / counts.sum()
        # leaving a sequence out changes a position's mean by -noise / (count - 1), and with it the mean over positions
        shift = noise / (counts - 1).unsqueeze(-1)
        self._mean_shift = torch.einsum("n,bnd->bd", self.weights, shift).unsqueeze(1)
        self.x = torch.where(mask, self.p + noise, 0)
        self.leave_one_out = self.p - shift + self._mean_shift
        self._term_scale = len(inputs) / int(counts.sum())
        variance = self.x.square().sum() / counts.sum()
        if variance <= _ROUNDING * (variance + mean.square().sum()):
            self.x, self.leave_one_out, self.p = map(torch.zeros_like, (self.x, self.leave_one_out, self.p))

    def terms(self, basis: Float[np.ndarray, "D r"] | None = None) -> Float[np.ndarray, "B"]:
        """Each sequence's term of the variance of p, or of its part in the span of ``basis``."""
        x, leave_one_out = self.x, self.leave_one_out
        if basis is not None:
            span = torch.from_numpy(basis).to(x.device)
            x, leave_one_out = x @ span, leave_one_out @ span
        return ((x * leave_one_out).sum((1, 2)) * self._term_scale).cpu().numpy()

    def total(self) -> Float[np.ndarray, "B"]:
        """Each sequence's term of the variance over all tokens, about the mean of the others."""
        return ((self.x * (self.x + self._mean_shift)).sum((1, 2)) * self._term_scale).cpu().numpy()

    def covariance(self) -> Float[np.ndarray, "D D"]:
        """The unbiased covariance of p over the positions; its trace is the mean of `terms`."""
        product = self.x.flatten(0, 1).T @ self.leave_one_out.flatten(0, 1) / self.present.sum()
        return ((product + product.T) / 2).cpu().numpy()


def _reference_vectors(
    layer: LayerTrace,
    lengths: Int[Tensor, "B"],
    reference: Float[np.ndarray, "R D"] | Float[Tensor, "R D"] | None,
    weights: Float[np.ndarray, "N"],
    energy: float,
) -> _ReferenceVectors | None:
    """The reference vectors at the counted positions; None if there are none, or they do not vary."""
    shape = layer.inputs.shape[1:]
    raw = layer.input_position_part if reference is None else torch.as_tensor(reference)
    if raw is None:
        return None
    if reference is not None and (raw.shape != shape or not raw.isfinite().all()):
        raise invalid("reference", f"be finite and have shape {list(shape)}", got=f"shape {list(raw.shape)}")
    raw = raw.detach().double()
    if raw.ndim == 3:  # each sequence has its own positions
        raw = position_means(raw, lengths)[1]
    vectors = raw[: len(weights)].cpu().numpy()
    p = vectors - weights @ vectors
    variance = float(weights @ (p**2).sum(1))
    if variance <= _ROUNDING * float(weights @ (vectors**2).sum(1)):
        return None
    return _ReferenceVectors(p, variance, _leading_eigenvectors((p * weights[:, None]).T @ p, energy))


def _leading_eigenvectors(covariance: Float[np.ndarray, "D D"], energy: float) -> Float[np.ndarray, "D r"]:
    """The fewest leading eigenvectors that hold ``energy`` of the trace; negative eigenvalues count as 0."""
    values, vectors = np.linalg.eigh(covariance)
    values, vectors = values[::-1], vectors[:, ::-1].copy()
    positive = int(np.sum(values > len(values) * np.finfo(np.float64).eps * values[0]))
    needed = energy * (1 - 1e-12) * np.trace(covariance)
    return vectors[:, : min(positive, 1 + int(np.searchsorted(np.cumsum(values[:positive]), needed)))]


def _decodability(stream: _LayerStream, rows: Int[Tensor, "N"], folds: list[Tensor]) -> float:
    """R^2 of a ridge regression of the position on the stream, on the last fifth of the sequences; nan for no variance.

    Three fifths fit it under each of `PENALTIES`, the fourth chooses among them, and all four fit it again.
    """

    def tokens(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        chosen = torch.cat(parts).to(stream.x.device)
        present = stream.present[chosen]
        return stream.x[chosen][present], rows.double().expand_as(present)[present]

    fit, (validation, targets) = _ridge(*tokens(folds[:3])), tokens(folds[3:4])
    best = int((fit(validation) - targets.unsqueeze(1)).square().sum(0).argmin())
    refit, (test, targets) = _ridge(*tokens(folds[:4])), tokens(folds[4:])
    spread = (targets - targets.mean()).square().sum()
    residual = (refit(test)[:, best] - targets).square().sum()
    return float(1 - residual / spread) if spread > 0 and stream.x.any() else float("nan")


def _ridge(
    x: Float[Tensor, "T D"], y: Float[Tensor, "T"]
) -> Callable[[Float[Tensor, "_T D"]], Float[Tensor, "_T penalties"]]:
    """Predictions of ridge regressions of y on x, one for each of `PENALTIES`."""
    mean, level = x.mean(0), y.mean()
    values, vectors = torch.linalg.eigh((x - mean).T @ (x - mean))
    penalties = torch.from_numpy(PENALTIES).to(x.device) * values.mean()
    projected = vectors.T @ ((x - mean).T @ (y - level))
    weights = vectors @ (projected.unsqueeze(1) / (values.unsqueeze(1) + penalties))
    return lambda other: (other - mean) @ weights + level


# ---- the position vectors as a set -----------------------------------------------------------------------------------

TOLERANCE = 1e-3  # degrees; the oblique projection then amplifies rounding errors by at most 6e4


@dataclass(frozen=True)
class PositionSubspace:
    """The linear span of the position vectors, compared with that of the word vectors; both are centred first.

    spectrum       [min(N, D)] share of the position vectors' variance along each principal direction, descending
    rank, word_rank  number of directions that hold ``energy`` of the variance
    participation  participation ratio of the spectrum, (sum s)^2 / sum s^2: effective number of directions
    angles         [min(rank, word_rank)] principal angles between the two spans in degrees, ascending
    overlap        share of the words' variance that lies in the position span
    chance         rank / D: the expected overlap of words without a preferred direction
    separable      whether the spans share only 0: rank + word_rank <= D and no angle below `TOLERANCE` degrees
    amplification  largest factor by which `separate` amplifies other vectors: 1 / sin(least angle)
    basis, word_basis  [D, rank] and [D, word_rank] orthonormal bases of the spans, from their means
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
        left out of both parts. Returns position and word part, float64. Raises `InputError` if the spans share vectors.
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
        energy  share of the variance that a span must hold, above 0 and at most 1 (then `separate` is exact)

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
    angles = _angles(basis, word_basis) if rank and word_rank else np.empty(0)
    min_angle = angles[0] if len(angles) else 90.0
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
            separable=bool(min_angle > TOLERANCE and rank + word_rank <= width),
            amplification=float(1 / np.sin(np.radians(min_angle))),
            position_mean=position_mean,
            word_mean=word_mean,
            basis=basis,
            word_basis=word_basis,
        )


@dataclass(frozen=True)
class CurveDimension:
    """The position vectors as points of a curve i -> p_i, which may bend through many dimensions and yet be thin.

    rank        number of dimensions that hold ``energy`` of the variance of all positions
    local_rank  the same within a window of consecutive positions, mean over the windows
    arc_chord   path length divided by the distance of its ends, median over the windows

    The latter two are 1 for a curve that is straight within the window, near window - 1 for unordered points.
    """

    rank: int
    local_rank: float
    arc_chord: float
    window: int


def curve_dimension(
    p: Float[np.ndarray, "N D"] | Float[Tensor, "N D"], *, window: int = 8, energy: float = 0.99
) -> CurveDimension:
    """Is the position component a thin curve rather than a flat subspace? (arXiv 2505.13027 v1, C.4)

    ``p`` are position vectors in order; a window has 3 to N consecutive ones. Raises `InputError` for values that are
    not finite, a window or an energy out of range.
    """
    position = _float64(p)
    if not np.isfinite(position).all():
        raise InputError("p must be finite.")
    if not 3 <= window <= len(position):
        raise invalid("window", f"be from 3 to the {len(position)} positions", window)
    _check_energy(energy)
    windows = np.lib.stride_tricks.sliding_window_view(position, window, axis=0).transpose(0, 2, 1)
    ranks = [_span(points, energy)[2].shape[1] for points in windows]
    arcs = np.linalg.norm(np.diff(windows, axis=1), axis=2).sum(1)
    chords = np.linalg.norm(windows[:, -1] - windows[:, 0], axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = float(np.median(arcs / chords))
    return CurveDimension(_span(position, energy)[2].shape[1], float(np.mean(ranks)), ratio, window)


def neighbour_error(p: Float[np.ndarray, "N D"] | Float[Tensor, "N D"]) -> float:
    """How badly the midpoint of its two neighbours predicts a position vector: do the positions resolve the curve?

    The root mean square of |p_i - (p_(i-1) + p_(i+1))/2| divided by that of |p_i - mean of all|, both over the inner
    positions (at least one): 0 on a straight line with equal steps, 1 if neighbours predict no better than the mean,
    and sqrt(3/2) on average for unordered vectors. Nan if all inner positions equal the mean.
    """
    position = _float64(p)
    if len(position) < 3 or not np.isfinite(position).all():
        raise invalid("p", "be finite and have at least 3 rows", len(position))
    inner = position[1:-1]
    residual = inner - (position[:-2] + position[2:]) / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.linalg.norm(residual) / np.linalg.norm(inner - position.mean(0)))


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


def _angles(basis: Float[np.ndarray, "D r"], other: Float[np.ndarray, "D s"]) -> Float[np.ndarray, "least"]:
    """The principal angles between two spans, in degrees, ascending."""
    return np.degrees(subspace_angles(basis, other))[::-1]


def _check_energy(energy: float) -> None:
    if not 0 < energy <= 1:
        raise invalid("energy", "be over 0 and at most 1", energy)


def _float64(values: Float[np.ndarray, "..."] | Float[Tensor, "..."]) -> Float[np.ndarray, "..."]:
    if isinstance(values, Tensor):
        return values.detach().to("cpu", torch.float64).numpy()
    return values.astype(np.float64)
