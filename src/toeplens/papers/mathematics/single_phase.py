"""One phase for all frequencies: how far a rotary head's logits are from a Gram matrix times one Toeplitz phase."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Complex, Float, Int
from torch import Tensor

from toeplens.utils import InputError, invalid

QUARTILES = (0.25, 0.5, 0.75)
_ROUNDING = 64 * np.finfo(np.float64).eps  # a sum below this share of its terms' moduli has no phase
_BISECTIONS = 60  # of [0, pi/2], down to float64 rounding


@dataclass(frozen=True)
class SinglePhase:
    """Distance of rotary heads from the form Gram ∘ G_e with one unimodular Toeplitz G_e.

    For a visible pair (i, j) of offset delta = i - j let z_t = q_i^(t) conj(k_j^(t)), W = sum over t of z_t (the Gram
    matrix), U = sum over t of z_t e^(i delta theta_t) and L = Re U (the logits, before their scale).
    Leading shape *B: one value per head.

    coherence      [*B] mean over the pairs of |U| / sum |z_t|; 1 if all rotated terms have one phase
    modulus        [*B, 3] quartiles over the pairs of |U / W|, the modulus of the factor that turns W into U; the form
                   needs 1. Infinite where W is 0 and U is not
    concentration  [*B] root mean square over the pairs of their diagonal's resultant: the length of the mean of the
                   unit phasors of U / W; 1 if the factor's phase depends only on delta (Toeplitz)
    error          [*B] least relative error of the logits over one phase phi per diagonal:
                   sqrt(sum (L - Re(W e^(i phi_delta)))^2 / sum L^2)
    phases         [*B, M] phi_delta of `error` by delta in ascending order, in radians; nan where W vanishes on the
                   diagonal

    A pair with U and W both 0 up to rounding fits any factor, and is ignored for modulus and concentration.
    """

    coherence: Float[np.ndarray, "*B"]
    modulus: Float[np.ndarray, "*B 3"]
    concentration: Float[np.ndarray, "*B"]
    error: Float[np.ndarray, "*B"]
    phases: Float[np.ndarray, "*B M"]


def single_phase(
    q: Complex[np.ndarray, "*B N n"] | Complex[Tensor, "*B N n"],
    k: Complex[np.ndarray, "*B N n"] | Complex[Tensor, "*B N n"],
    frequencies: Float[np.ndarray, "*#B n"] | Float[Tensor, "*#B n"],
    *,
    causal: bool = True,
) -> SinglePhase:
    """Test rotary heads against eq. 9 and its proof by a mean value (arXiv 2505.13027 v1, proposition B.1; theory 3).

    Complex numbers have no order, hence no mean value between bounds: the factor that a pair needs is in general not a
    phase, and depends on the pair's content. If W is constant along a diagonal, the real part can hide this: if
    |L| <= |W| there, some phase fits L though none fits U.

    Arguments
        q, k         [..., N, n] queries and keys before rotation, one complex number per pair of dimensions
        frequencies  [n] or [..., n] theta_t in radians per position

    Takes three N x N products per head. Raises `InputError` for values that are not finite.
    """
    queries, keys, thetas = (
        (x.detach().cpu().resolve_conj().numpy() if isinstance(x, Tensor) else x).astype(dtype)
        for x, dtype in ((q, np.complex128), (k, np.complex128), (frequencies, np.float64))
    )
    for field, values in (("q", queries), ("k", keys), ("frequencies", thetas)):
        if not np.isfinite(values).all():
            raise InputError(f"{field} must be finite.")
    heads, size, width = queries.shape[:-2], *queries.shape[-2:]
    if queries.size == 0:
        raise invalid("q", "have at least one position and one pair", got=f"shape {list(queries.shape)}")
    thetas = np.broadcast_to(thetas, (*heads, width)).reshape(-1, width)
    rows, columns = np.tril_indices(size) if causal else np.indices((size, size)).reshape(2, -1)
    measures = [
        _measure_head(*head, rows, columns)
        for head in zip(queries.reshape(-1, size, width), keys.reshape(-1, size, width), thetas, strict=True)
    ]
    stacked = {name: np.stack([head[name] for head in measures]) for name in measures[0]}
    return SinglePhase(**{name: values.reshape((*heads, *values.shape[1:])) for name, values in stacked.items()})


def _measure_head(
    q: Complex[np.ndarray, "N n"],
    k: Complex[np.ndarray, "N n"],
    frequencies: Float[np.ndarray, "n"],
    rows: Int[np.ndarray, "pairs"],
    columns: Int[np.ndarray, "pairs"],
) -> dict[str, np.ndarray | np.float64]:
    """The measures of one head, by field of `SinglePhase`."""
    phase_factors = np.exp(1j * np.arange(len(q))[:, None] * frequencies)
    rotated = ((q * phase_factors) @ (k * phase_factors).conj().T)[rows, columns]
    gram = (q @ k.conj().T)[rows, columns]
    moduli = (np.abs(q) @ np.abs(k).T)[rows, columns]
    diagonal = rows - columns
    diagonal -= diagonal.min()
    logits, a, b = np.real(rotated), np.real(gram), np.imag(gram)
    product = rotated * gram.conj()

    def sums(values: Float[np.ndarray, "pairs"]) -> Float[np.ndarray, "M"]:
        return np.bincount(diagonal, values)

    # with u = (cos phi, sin phi): sum (L - Re(W e^(i phi)))^2 = sum L^2 - 2 g.u + u.G u
    g = np.stack((sums(logits * a), -sums(logits * b)), -1)
    squares = np.stack((sums(a * a), -sums(a * b), -sums(a * b), sums(b * b)), -1).reshape(-1, 2, 2)
    best = _best_phases(squares, g)
    has_rotated, has_gram = np.abs(rotated) > _ROUNDING * moduli, np.abs(gram) > _ROUNDING * moduli
    known = has_rotated & has_gram
    phasors = np.zeros_like(product)
    phasors[known] = product[known] / np.abs(product[known])
    counts = sums(known.astype(float))
    with np.errstate(invalid="ignore", divide="ignore"):
        coherence = (np.abs(rotated) / moduli)[moduli > 0]
        modulus = np.where(has_gram, np.abs(rotated) / np.abs(gram), np.inf)[has_rotated | has_gram]
        resultants = np.hypot(sums(np.real(phasors)), sums(np.imag(phasors))) / counts
        residual = logits - np.real(gram * np.exp(1j * best)[diagonal])
        return {
            "coherence": np.divide(coherence.sum(), coherence.size),
            # without interpolation, so that infinite values do no harm
            "modulus": np.quantile(modulus if modulus.size else [np.nan], QUARTILES, method="inverted_cdf"),
            "concentration": np.sqrt(np.nansum(counts * resultants**2) / counts.sum()),
            "error": np.sqrt(np.sum(residual**2) / np.sum(logits**2)),
            "phases": np.where(np.trace(squares, axis1=1, axis2=2) > 0, best, np.nan),
        }


def _best_phases(squares: Float[np.ndarray, "M 2 2"], g: Float[np.ndarray, "M 2"]) -> Float[np.ndarray, "M"]:
    """The angle of the unit vector u that minimises u.G u - 2 g.u, for each of M matrices G.

    Along the axes of G the best u has the signs of g, so it lies in one quadrant. There, at the angle x from the axis
    of the larger eigenvalue, the derivative |g_1| sin x - |g_2| cos x - (l_1 - l_2) sin x cos x goes from at most 0 to
    at least 0, with one root, found by bisection.
    """
    values, axes = np.linalg.eigh(squares)
    along = np.einsum("mab,ma->mb", axes, g)
    gap = values[:, 1] - values[:, 0]
    small, large = np.abs(along).T
    low, high = np.zeros(len(g)), np.full(len(g), np.pi / 2)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        rises = large * np.sin(middle) - (small + gap * np.sin(middle)) * np.cos(middle) > 0
        low, high = np.where(rises, low, middle), np.where(rises, middle, high)
    signs = np.where(along < 0, -1.0, 1.0)
    u = np.einsum("mab,mb->ma", axes, signs * np.stack((np.sin(low), np.cos(low)), -1))
    return np.arctan2(u[:, 1], u[:, 0])
