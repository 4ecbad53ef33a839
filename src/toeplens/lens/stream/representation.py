"""Position in the residual stream, layer by layer: how much of it, in which directions, and how well it decodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.linalg import subspace_angles
from torch import Tensor

from toeplens.ground import invalid
from toeplens.ground.reading import Count, Share
from toeplens.ground.records import AtLeast1, Dims, Each, MaybeNaN, Record
from toeplens.lens.kit.intervals import bootstrap_means
from toeplens.lens.kit.position import position_means
from toeplens.lens.kit.trace import AttentionTrace, LayerTrace

PENALTIES = 10.0 ** np.arange(-8, 3)  # of the ridge regression, relative to the mean eigenvalue of its Gram matrix
_FIFTHS = 5  # folds of sequences: three fit the probe, one chooses its penalty, one tests it
_ROUNDING = 1e-12  # variances below this share of the total are rounding errors


@dataclass(frozen=True)
class Representation(Record):
    """Position in the residual stream before each of L layers (arXiv 2505.13027, section 5.2).

    p is the position part of the stream at a layer by the `mean` estimator (theory 1), weighted by the sequences that
    reach a position. It includes any dependence of the content's distribution on position. The reference vectors are
    those added at the input, or those passed in. Values that are not defined are NaN: without a reference, and, for the
    directions of p, if the interval of its variance share reaches 0.

    layers           [L] layers whose input is measured; from 0
    sequences        number of sequences used
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

    WORDS = "representation"

    layers: Annotated[Int[np.ndarray, "L"], Each(Count)]
    sequences: AtLeast1
    positions: Annotated[Int[np.ndarray, "N"], Each(Count)]
    energy: Share
    reference_rank: Count
    chance: MaybeNaN
    variance: Float[np.ndarray, "L"]
    variance_share: Float[np.ndarray, "L"]
    low: Float[np.ndarray, "L"]
    high: Float[np.ndarray, "L"]
    rank: Annotated[Int[np.ndarray, "L"], Each(Count)]
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
def representation(
    trace: AttentionTrace,
    *,
    reference: Float[np.ndarray, "R D"] | Float[Tensor, "R D"] | None = None,
    energy: float = 0.99,
    least: int = 16,
    bootstrap: int = 1000,
    seed: int = 0,
) -> Representation:
    """Position in the residual stream before each layer of a trace: are its directions still those of the input?

    The covariance of p over the positions is estimated by cross-fitting: each sequence's tokens are multiplied by the
    position means of all others, so that no token is multiplied by its own noise. It is unbiased, given the sequences'
    lengths. If all lengths are equal, it is the mean, over all splits of the batch into halves, of one half's p times
    the other's. `coefficient` is linear in p and needs no cross-fitting. The intervals resample the sequences' terms of
    that sum, to first order.

    Arguments
        trace      the trace to measure; padding is ignored, whether or not the model masks it
        reference  [R, D] vectors at the trace's R positions, instead of those added at the input
        energy     share of the variance that a subspace must hold, above 0 and at most 1
        least      positions that fewer sequences reach do not count; at least 5
        bootstrap  resamples for the intervals
        seed       seed of the resamples, and of the sequences that fit and test the probe

    The output of the last layer is not measured. Takes O(B R D^2 + D^3) per layer in addition to the forward pass, in
    float64. Raises `InputError` for numbers out of range, a reference of another shape, and if ``least`` sequences
    reach fewer than two positions.
    """
    if not 0 < energy <= 1:
        raise invalid("energy", "be over 0 and at most 1", energy)
    if least < _FIFTHS:
        raise invalid("least", f"be at least {_FIFTHS}", least)
    rng = np.random.Generator(np.random.Philox(seed))
    fifths = [torch.from_numpy(part) for part in np.array_split(rng.permutation(len(trace.tokens)), _FIFTHS)]
    original: _Original | None = None
    found: list[_Layer] = []
    for layer in trace:
        lengths = _lengths(trace, layer)
        kept = _kept(lengths, layer, least)
        stream = _Stream(layer.inputs[:, :kept], lengths.clamp(max=kept))
        if not found:
            original = _original(_vectors(layer, lengths, reference, kept), stream.weights.cpu().numpy(), energy)
        found.append(_look(stream, layer.rows[:kept], original, fifths))
    own, within, total = (np.stack([getattr(one, name) for one in found], 1) for name in ("own", "within", "total"))
    variance = own.mean(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = variance / total.mean(0)
        moved = (2 * (own - variance) - share * (total - total.mean(0))) / total.mean(0)
        low, high = bootstrap_means(share + moved, samples=bootstrap, seed=seed)
        known = low > _ROUNDING
        alignment = np.where(known, within.mean(0) / variance, np.nan)
        moved = 2 * (within - alignment * own) / variance
        alignment_low, alignment_high = bootstrap_means(alignment + moved, samples=bootstrap, seed=seed)
        norms = np.sqrt(np.where(known, variance, np.nan) * (np.nan if original is None else original.variance))
        product = np.array([one.product for one in found])
        bases = [_leading(one.covariance, energy) if there else None for one, there in zip(found, known, strict=True)]
        angles = tuple(
            np.empty(0)
            if basis is None or original is None
            else np.degrees(subspace_angles(basis, original.basis))[::-1]
            for basis in bases
        )
        return Representation(
            layers=np.array(trace.layers),
            sequences=len(trace.tokens),
            positions=found[0].positions,
            energy=energy,
            reference_rank=0 if original is None else original.basis.shape[1],
            chance=np.nan if original is None else original.basis.shape[1] / len(original.basis),
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
            coefficient=product / (np.nan if original is None else original.variance),
            cosine=product / norms,
            decodability=np.array([one.decodability for one in found]),
        )


@dataclass(frozen=True)
class _Original:
    """The reference vectors [N, D], centred, their variance, and the subspace [D, r] that holds its share."""

    p: Float[np.ndarray, "N D"]
    variance: float
    basis: Float[np.ndarray, "D r"]


@dataclass(frozen=True)
class _Layer:
    """Statistics of a layer's stream: terms whose mean over the B sequences is an unbiased estimate, and the rest.

    own         [B] of the variance of p
    within      [B] of its part in the reference subspace; nan without one
    total       [B] of the stream's variance over all tokens
    covariance  [D, D] of p over the positions
    product     <p, p0>, the mean over the positions; nan without a reference
    """

    positions: Int[np.ndarray, "N"]
    own: Float[np.ndarray, "B"]
    within: Float[np.ndarray, "B"]
    total: Float[np.ndarray, "B"]
    covariance: Float[np.ndarray, "D D"]
    product: float
    decodability: float


class _Stream:
    """The stream before a layer, and for each sequence the position part from all other sequences.

    x        [B, N, D] centred over all tokens; 0 at padding
    others   [B, N, D] the position part without this sequence
    p        [N, D] the position part from all sequences
    there    [B, N] whether a sequence has the token
    weights  [N] share of the tokens at each position
    """

    def __init__(self, inputs: Float[Tensor, "B N D"], lengths: Int[Tensor, "B"]) -> None:
        content, self.p = position_means(inputs.double(), lengths)
        self.there = torch.arange(inputs.shape[1], device=inputs.device) < lengths.unsqueeze(1)
        seen, counts = self.there.unsqueeze(-1), self.there.sum(0)
        mean = torch.where(seen, content, 0).sum((0, 1)) / counts.sum()
        noise = torch.where(seen, content - mean, 0)
        self.weights = counts.double() / counts.sum()
        # leaving a sequence out changes a position's mean by -noise / (count - 1), and with it the mean over positions
        moved = noise / (counts - 1).unsqueeze(-1)
        self._mean_moved = torch.einsum("n,bnd->bd", self.weights, moved).unsqueeze(1)
        self.x = torch.where(seen, self.p + noise, 0)
        self.others = self.p - moved + self._mean_moved
        self._per = len(inputs) / int(counts.sum())
        variance = self.x.square().sum() / counts.sum()
        if variance <= _ROUNDING * (variance + mean.square().sum()):
            self.x, self.others, self.p = (torch.zeros_like(part) for part in (self.x, self.others, self.p))

    def terms(self, basis: Float[np.ndarray, "D r"] | None = None) -> Float[np.ndarray, "B"]:
        """Each sequence's term of the variance of p, or of its part in the span of ``basis``."""
        x, others = self.x, self.others
        if basis is not None:
            span = torch.from_numpy(basis).to(x.device)
            x, others = x @ span, others @ span
        return ((x * others).sum((1, 2)) * self._per).cpu().numpy()

    def total(self) -> Float[np.ndarray, "B"]:
        """Each sequence's term of the variance over all tokens, about the mean of the others."""
        return ((self.x * (self.x + self._mean_moved)).sum((1, 2)) * self._per).cpu().numpy()

    def covariance(self) -> Float[np.ndarray, "D D"]:
        """The unbiased covariance of p over the positions; its trace is the mean of `terms`."""
        product = self.x.flatten(0, 1).T @ self.others.flatten(0, 1) / self.there.sum()
        return ((product + product.T) / 2).cpu().numpy()


def _look(stream: _Stream, rows: Tensor, original: _Original | None, fifths: list[Tensor]) -> _Layer:
    nothing = np.full(len(stream.x), np.nan)
    p, weights = stream.p.cpu().numpy(), stream.weights.cpu().numpy()
    return _Layer(
        positions=rows.cpu().numpy(),
        own=stream.terms(),
        within=nothing if original is None else stream.terms(original.basis),
        total=stream.total(),
        covariance=stream.covariance(),
        product=np.nan if original is None else float(weights @ (p * original.p).sum(1)),
        decodability=_decodability(stream, rows, fifths),
    )


def _lengths(trace: AttentionTrace, layer: LayerTrace) -> Int[Tensor, "B"]:
    """How many of the layer's positions each sequence has tokens at, whether or not the model masks padding."""
    if trace.lengths is None:
        return torch.full((len(layer.inputs),), len(layer.rows), device=layer.inputs.device)
    return (layer.rows < trace.lengths.to(layer.rows.device).unsqueeze(1)).sum(1)


def _kept(lengths: Int[Tensor, "B"], layer: LayerTrace, least: int) -> int:
    """Number of positions, from the first on, that enough sequences reach."""
    reached = (torch.arange(len(layer.rows), device=lengths.device) < lengths.unsqueeze(1)).sum(0)
    kept = int((reached >= least).sum())
    if kept < 2:
        raise invalid("least", "be small enough for at least 2 positions", got=f"{least}, which {kept} positions reach")
    return kept


def _vectors(
    layer: LayerTrace,
    lengths: Int[Tensor, "B"],
    reference: Float[np.ndarray, "R D"] | Float[Tensor, "R D"] | None,
    kept: int,
) -> Float[np.ndarray, "N D"] | None:
    """The reference vectors at the counted positions; None if there are none."""
    shape = layer.inputs.shape[1:]
    found = layer.vectors if reference is None else torch.as_tensor(reference)
    if found is None:
        return None
    if reference is not None and (found.shape != shape or not found.isfinite().all()):
        raise invalid("reference", f"be finite and have shape {list(shape)}", got=f"shape {list(found.shape)}")
    found = found.detach().double()
    if found.ndim == 3:  # each sequence has its own positions
        found = position_means(found, lengths)[1]
    return found[:kept].cpu().numpy()


def _original(
    vectors: Float[np.ndarray, "N D"] | None, weights: Float[np.ndarray, "N"], energy: float
) -> _Original | None:
    """The reference from its vectors; None if they do not vary."""
    if vectors is None:
        return None
    p = vectors - weights @ vectors
    variance = float(weights @ (p**2).sum(1))
    if variance <= _ROUNDING * float(weights @ (vectors**2).sum(1)):
        return None
    return _Original(p, variance, _leading((p * weights[:, None]).T @ p, energy))


def _leading(covariance: Float[np.ndarray, "D D"], energy: float) -> Float[np.ndarray, "D r"]:
    """The fewest leading eigenvectors that hold ``energy`` of the trace; negative eigenvalues count as 0."""
    values, vectors = np.linalg.eigh(covariance)
    values, vectors = values[::-1], vectors[:, ::-1].copy()
    positive = int(np.sum(values > len(values) * np.finfo(np.float64).eps * values[0]))
    held = np.cumsum(values[:positive])
    return vectors[:, : min(positive, 1 + int(np.searchsorted(held, energy * (1 - 1e-12) * np.trace(covariance))))]


def _decodability(stream: _Stream, rows: Int[Tensor, "N"], fifths: list[Tensor]) -> float:
    """R^2 of a ridge regression of the position on the stream, on the last fifth of the sequences; nan for no variance.

    Three fifths fit it under each of `PENALTIES`, the fourth chooses among them, and all four fit it again.
    """

    def tokens(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        chosen = torch.cat(parts).to(stream.x.device)
        there = stream.there[chosen]
        return stream.x[chosen][there], rows.double().expand_as(there)[there]

    first, (choice, wanted) = _ridge(*tokens(fifths[:3])), tokens(fifths[3:4])
    best = int((first(choice) - wanted.unsqueeze(1)).square().sum(0).argmin())
    again, (test, wanted) = _ridge(*tokens(fifths[:4])), tokens(fifths[4:])
    spread = (wanted - wanted.mean()).square().sum()
    rest = (again(test)[:, best] - wanted).square().sum()
    return float(1 - rest / spread) if spread > 0 and stream.x.any() else float("nan")


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
