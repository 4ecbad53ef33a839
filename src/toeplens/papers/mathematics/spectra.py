"""Spectra of Toeplitz matrices and trigonometric sums, and what free phases and rotations change (arXiv 2505.13027).

Theorem 3.1 (Szegő): the eigenvalues of T_N(a) fill [min a, max a]. For a trigonometric polynomial a of degree m there
is a rate: between its minimum and its maximum a runs through the whole range, and neighbouring ones of N even angles
lie at most s = mπ/N of the range apart (Bernstein: |a'| is at most m times half the range), so any piece of length l
holds l/s - 1 of the N values of a at these angles. They are the eigenvalues of a circulant matrix that differs from
T_N by one of rank 2m with m eigenvalues of each sign, so at most 2m of them are lost, and a hole is at most (2m + 1)s
long. For a_δ = ρ^|δ| (infinite, symbol (1 - ρ²)/(1 - 2ρ cos φ + ρ²)) each piece kπ/(N + 1) to (k + 1)π/(N + 1) has the
angle of one eigenvalue (Kac, Murdock and Szegő 1953), so a hole is at most 2π/(N + 1) times the largest slope.

Lemma B.1: f(θ) = Σ_i 2 w_i cos(iθ_i + iθ) and g(θ) = Σ_i 2 w_i cos(iθ), i = 0..N-1, w_i >= 0, with ψ_i = iθ_i. What
holds (theory section 5):

- max|f| <= max|g| = 2 Σ w_i. Equality if every term is ±1 at one θ: some φ has i(θ_i + φ) ≡ 0 (mod 2π) for every i with
  w_i > 0, or ≡ π for every such i (then w_0 = 0). The θ_i themselves need not coincide.
- range g is between 2 and 4 times Σ_(i>0) w_i, for its mean is 2 w_0 and its maximum 2 Σ w_i; range f <= 4 Σ_(i>0) w_i.
- f can be wider than g. With γ = α - β, f(α) - f(β) <= 4 Σ w_i |sin(iγ/2)|, attained by ψ_i = -π/2 sign(sin(iγ/2)),
  while g(0) - g(γ) = 4 Σ w_i sin²(iγ/2). As |sin(x/2)| = (8/π) Σ_k sin²(kx/2) / (4k² - 1), k = 1, 2, .., and
  Σ_k 1/(4k² - 1) = 1/2: range f <= (4/π) range g. No smaller constant will do: Fejér's w_i = 1 - i/N with γ = 2π/N give
  2 cot(π/2N)/N, which tends to 4/π.

Proposition B.3 takes W and E positive definite Toeplitz with every |E_ij| = 1. No such E exists for N > 1: a 2 x 2
minor is 1 - |E_ij|² = 0. A positive semi-definite one has rank 1, because its eigenvalues sum to N and their squares to
N²: E_ij = e^{i(i-j)θ}, W∘E = D W D^H, and nothing moves. The E of the proof's symbols, E_ij = e^{iψ_(i-j)} with free
phases, is in general not semi-definite, and W∘E can leave [λ_min(W), λ_max(W)]. What holds (theory section 5):

- Schur: W ⪰ 0, E ⪰ 0, E_ii = 1 puts the spectrum of W∘E within W's.
- Let P project on W's top eigenspace, λ_2 be its next eigenvalue and c = λ_max(P∘E) <= 1. From
  λ_min I + (λ_max - λ_min) P ⪯ W ⪯ λ_2 I + (λ_max - λ_2) P follows
  λ_min + (λ_max - λ_min) c <= λ_max(W∘E) <= λ_2 + (λ_max - λ_2) c: the top stays exactly if c = 1, and likewise at the
  bottom. W∘E is strictly narrower unless both stay.
- With free phases the width grows at most √(N/2)-fold: with W's range moved to be centred on 0,
  width(W∘E)² <= 2 |W∘E|_F² = 2 |W|_F² <= N width(W)²/2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Complex, Float, Inexact
from numpy.random import Generator
from scipy.linalg import eigvals_banded, eigvalsh, toeplitz
from scipy.optimize import linprog, minimize

from toeplens.encodings.kit import rotary_frequencies
from toeplens.lens.toeplitz.spectrum import max_value, szego
from toeplens.papers.mathematics.statements import ROUNDING, Margins, Record, Sizes, counterexample_search, round_values

Matrices = Inexact[np.ndarray, "*B N N"]
Columns = Inexact[np.ndarray, "*B N"]

# ---- Theorem 3.1: the eigenvalues fill the symbol's range -----------------------------------------------------------

DEGREES = (1, 2, 4, 8)
SIZES = (32, 64, 128, 256, 512)
RATES = (0.1, 0.3, 0.5, 0.7, 0.9)


def longest_hole(eigenvalues: Float[np.ndarray, "N"], low: float, high: float) -> float:
    """The longest gap in [low, high] without an eigenvalue, relative to its length."""
    inside = np.clip(np.sort(eigenvalues), low, high)
    return float(np.diff(np.concatenate(([low], inside, [high]))).max() / (high - low))


@counterexample_search
def filling(rng: Generator, margins: Margins, tries: int = 20, sizes: Sizes = SIZES) -> Record:
    """``tries`` kernels of each degree; ``holes``: for each degree the mean longest hole by N."""
    holes = np.zeros((len(DEGREES), len(sizes)))

    def hole(values: Float[np.ndarray, "N"], low: float, high: float, statement: str, bound: float) -> float:
        margins["inside"].append(max(low - values[0], values[-1] - high) / (high - low))
        longest = longest_hole(values, low, high)
        margins[statement] += [longest / bound - 1] if bound < 1 else []
        return longest

    for row, degree in enumerate(DEGREES):
        for _ in range(tries):
            half = rng.normal(size=degree) + 1j * rng.normal(size=degree)
            kernel = np.concatenate((half[::-1].conj(), [rng.normal()], half))  # a_δ for δ = -m to m
            limits = szego(kernel, [sizes[0]])
            ends = limits.symbol_low, limits.symbol_high
            for column, size in enumerate(sizes):
                values = np.asarray(eigvals_banded(np.repeat(kernel[degree:, None], size, axis=1), lower=True))
                holes[row, column] += hole(values, *ends, "filled", (2 * degree + 1) * degree * np.pi / size) / tries
    for rate in RATES:
        angles = np.linspace(0, np.pi, 100_001)
        symbol = (1 - rate**2) / (1 - 2 * rate * np.cos(angles) + rate**2)
        low, high = symbol[-1], symbol[0]
        slope = np.abs(np.gradient(symbol, angles)).max() / (high - low)
        for size in sizes:
            hole(eigvalsh(toeplitz(rate ** np.arange(size))), low, high, "decaying", 2 * np.pi / (size + 1) * slope)
    return {"holes": {"degrees": list(DEGREES), "sizes": list(sizes), "lengths": round_values(holes)}}


# ---- Lemma B.1: amplitudes and ranges of trigonometric sums with free phases ----------------------------------------

ALIGNMENT_TOLERANCE = 1e-7  # radians
TERM_COUNTS = (2, 3, 4, 6, 8, 12, 16)  # of terms
FEJER_SIZES = (2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
MATRIX_SIZES = (4, 8, 16, 32, 64, 128, 256)


def hermitian_toeplitz(column: Columns) -> Matrices:
    """The Hermitian Toeplitz matrix with this first column: a_(i-j) below the diagonal, its conjugate above."""
    offsets = np.subtract.outer(np.arange(column.shape[-1]), np.arange(column.shape[-1]))
    matrix = column[..., np.abs(offsets)]
    return np.where(offsets >= 0, matrix, matrix.conj())


def amplitude(coefficients: Columns) -> Float[np.ndarray, "*B"]:
    """max over θ of |2 Re Σ_i c_i e^{iiθ}|."""
    return np.maximum(max_value(coefficients), max_value(-coefficients))


def value_range(coefficients: Columns) -> Float[np.ndarray, "*B"]:
    """Maximum minus minimum over θ of 2 Re Σ_i c_i e^{iiθ}."""
    return max_value(coefficients) + max_value(-coefficients)


def misalignment(weights: Float[np.ndarray, "N"], phases: Float[np.ndarray, "N"]) -> float:
    """Distance of the θ_i from the condition of equality, in radians; 0 exactly if it holds. The first i > 0 with w_i
    > 0 leaves i candidates for φ with the target 0, i with π if w_0 = 0: the best one's worst |i(θ_i + φ) - target|.
    """
    indices = np.flatnonzero(weights[1:] > 0) + 1
    if len(indices) == 0:
        return 0.0
    first, worst = indices[0], []
    for target in (0, np.pi) if weights[0] == 0 else (0,):
        shifts = (target + 2 * np.pi * np.arange(first)) / first - phases[first]
        errors = indices * (phases[indices] + shifts[:, None]) - target
        worst.append(np.abs(np.angle(np.exp(1j * errors))).max(-1).min())
    return float(min(worst))


def best_phases(size: int, gap: float | Float[np.ndarray, "*B"]) -> Float[np.ndarray, "*B N"]:
    """The phases ψ_i with f(γ/2) - f(-γ/2) = 4 Σ w_i |sin(iγ/2)| for γ = ``gap``: no phases make it larger."""
    return -np.pi / 2 * np.sign(np.sin(np.asarray(gap)[..., None] * np.arange(size) / 2))


def best_ratio(size: int) -> tuple[float, Float[np.ndarray, "N"], float]:
    """The largest range f / range g that linear programs find for N weights, with the weights and γ, from a grid of γ:
    maximise Σ w_i |sin(iγ/2)| under Σ w_i sin²(iη/2) <= 1 for η on a grid. The ratio itself is computed without a grid.
    """
    index = np.arange(1, size)
    rows = np.sin(np.linspace(0, np.pi, 24 * size + 1)[1:, None] * index / 2) ** 2
    candidates = []
    for gap in (*np.linspace(0, np.pi, 13)[1:], 2 * np.pi / size):
        weights = np.concatenate(([0], linprog(-np.abs(np.sin(index * gap / 2)), rows, np.ones(len(rows))).x))
        ratio = value_range(weights * np.exp(1j * best_phases(size, gap))) / value_range(weights)
        candidates.append((float(ratio), weights, float(gap)))
    return max(candidates, key=lambda case: case[0])


def _weights(rng: Generator, tries: int, size: int) -> Float[np.ndarray, "B N"]:
    """Random w >= 0, about a third of them 0, with one w_i > 0 (i > 0) at least; at times decaying."""
    weights = rng.exponential(size=(tries, size)) * (rng.random((tries, size)) < 0.7)
    weights[np.arange(tries), rng.integers(1, size, tries)] += 0.1
    return weights * np.exp(-rng.exponential(size=(tries, 1)) * rng.integers(0, 2, (tries, 1)) * np.arange(size))


def _amplitudes(rng: Generator, margins: Margins, tries: int, sizes: Sizes) -> Record:
    """max|f| compared with 2 Σ w_i: random phases, coinciding phases, and phases that maximise f."""
    example = {}
    for size in sizes:
        index = np.arange(size)
        weights, phases = _weights(rng, tries, size), rng.uniform(0, 2 * np.pi, (tries, size))
        total = 2 * weights.sum(-1)
        margins["bound"] += list(amplitude(weights * np.exp(1j * index * phases)) / total - 1)
        margins["coinciding"] += list(1 - amplitude(weights * np.exp(1j * index * phases[:, :1])) / total)
        margins["coinciding-proof"] += list(1 - amplitude(weights * np.exp(1j * phases[:, :1])) / total)
        for _ in range(tries // 20 if size > 2 else 0):
            positive = rng.uniform(0.1, 1, size)
            angles = minimize(_shortfall, rng.uniform(0, 2 * np.pi, size), args=(positive,), jac=True, tol=1e-14).x
            reached = float(amplitude(positive * np.exp(1j * index * angles)) / (2 * positive.sum()))
            margins["bound"].append(reached - 1)
            if np.abs(np.exp(1j * angles[1:]) - np.exp(1j * angles[1])).max() > 1e-3:
                margins["not-coinciding"].append(reached - 1)
                if size == 4:
                    example = {
                        "w": round_values(positive),
                        "theta": round_values(angles % (2 * np.pi)),
                        "reached": round_values(reached),
                    }
    known = amplitude(np.exp(1j * np.array([0, 0, 2 * np.pi])))  # θ = (0, 0, π), w = 1
    margins["not-coinciding"].append(float(known) / 6 - 1)
    return example


def _shortfall(theta: Float[np.ndarray, "N"], weights: Float[np.ndarray, "N"]) -> tuple[float, Float[np.ndarray, "N"]]:
    """2 Σ w_i - f(0), at least the distance of max|f| from its bound, and its gradient in the θ_i."""
    index = np.arange(len(theta))
    return float(2 * weights @ (1 - np.cos(index * theta))), 2 * weights * index * np.sin(index * theta)


def _alignments(rng: Generator, margins: Margins, tries: int, sizes: Sizes) -> None:
    """The corrected condition of equality on instances that satisfy it, that miss it narrowly, and on random ones."""
    for size in sizes:
        index = np.arange(size)
        weights = rng.uniform(0.1, 1, (tries, size)) * (rng.random((tries, size)) < 0.8)
        weights[np.arange(tries), rng.integers(1, size, tries)] += 0.1
        weights[rng.random(tries) < 0.5, 0] = 0
        target = np.pi * rng.integers(0, 2, (tries, 1))
        windings = 2 * np.pi * rng.integers(0, size, (tries, size))
        phases = (target + windings) / np.maximum(index, 1) - rng.uniform(0, 2 * np.pi, (tries, 1))
        perturbed = rng.random((tries, size)) < 0.5 / size
        phases = phases + perturbed * rng.uniform(0.1, 1, (tries, size)) / np.maximum(index, 1)
        is_random = rng.random(tries) < 0.2
        phases[is_random] = rng.uniform(0, 2 * np.pi, (is_random.sum(), size))
        reached = amplitude(weights * np.exp(1j * index * phases)) / (2 * weights.sum(-1))
        holds = np.array([misalignment(*pair) < ALIGNMENT_TOLERANCE for pair in zip(weights, phases, strict=True)])
        margins["aligned"] += list(1 - reached[holds])
        margins["not-aligned"] += list(reached[~holds] - 1)


def _ranges(rng: Generator, margins: Margins, tries: int, sizes: Sizes, fejer: Sizes) -> Record:
    """range f and range g: random and best phases, the linear programs, Fejér's weights, and aligned phases."""
    ratios, limits, shares = [], margins["range-limits"], []
    for size in sizes:
        index = np.arange(size)
        weights = _weights(rng, tries, size)
        total, plain = 4 * weights[:, 1:].sum(-1), value_range(weights)
        gaps = np.linspace(0, np.pi, 16 * size + 1)[1:]
        best_gaps = gaps[np.argmax(weights @ np.abs(np.sin(np.outer(index, gaps) / 2)), axis=-1)]
        for psi in (rng.uniform(0, 2 * np.pi, (tries, size)) * (index > 0), best_phases(size, best_gaps)):
            reached = value_range(weights * np.exp(1j * psi))
            shares.append(float((reached / plain > 1 + ROUNDING).mean()))
            ratios += list(reached / plain)
            limits += list(reached / total - 1)
        margins["range-width"] += list(1 - plain / total)
        limits += [*(0.5 - plain / total), *(plain / total - 1)]
        weights = rng.uniform(0.1, 1, (tries, size))
        thetas = 2 * np.pi * rng.integers(0, size, (tries, size)) / np.maximum(index, 1)
        is_distinct = np.abs(np.exp(1j * thetas[:, 1:]) - np.exp(1j * thetas[:, 1:2])).max(-1) > 1e-3
        ratio = value_range(weights * np.exp(1j * index * thetas)) / value_range(weights)
        margins["range-equal"] += list(-np.abs(ratio - 1)[is_distinct])
    programs = [best_ratio(size) for size in sizes]
    triangles = [1 - np.arange(n) / n for n in fejer]
    waves = [w * np.exp(1j * best_phases(len(w), 2 * np.pi / len(w))) for w in triangles]
    known = [float(value_range(wave) / value_range(w)) for wave, w in zip(waves, triangles, strict=True)]
    ratios += [case[0] for case in programs] + known
    margins["range"] = [ratio - 1 for ratio in ratios]
    margins["range-constant"] = [ratio * np.pi / 4 - 1 for ratio in ratios]
    return {
        "sizes": list(sizes),
        "random_wider_share": shares[::2],
        "best_phases_wider_share": shares[1::2],
        "ratio_program": round_values([case[0] for case in programs]),
        "fejer_sizes": list(fejer),
        "ratio_fejer": round_values(known),
        "constant": round_values(4 / np.pi),
        "found": {
            "w": round_values(programs[2][1]),
            "gap": round_values(programs[2][2]),
            "psi": round_values(best_phases(4, programs[2][2])),
        },
    }


def _toeplitz_widths(margins: Margins, rows: Sizes) -> Record:
    """Eigenvalues of W∘E and of W as N grows (Szegő): W = T(3, 1, 1, 0, ..), f and g those of w = (1.5, 1, 1)."""
    gaps, angles = np.linspace(0, np.pi, 4001), np.linspace(-np.pi, np.pi, 73)
    psi = best_phases(3, gaps[np.argmax(np.sin(gaps / 2) + np.abs(np.sin(gaps)))])
    curves: dict[str, Any] = {"rows": list(rows), "psi": round_values(psi), "angles": round_values(angles)}
    widths = []
    for name, band in (("w", np.array([1.5, 1, 1])), ("product", np.array([1.5, 1, 1]) * np.exp(1j * psi))):
        columns = [np.concatenate(([3], band[1:], np.zeros(count - 3))) for count in rows]
        eigenvalues = [np.linalg.eigvalsh(hermitian_toeplitz(column)) for column in columns]
        widths.append(np.array([np.ptp(values) for values in eigenvalues]))
        curves[name] = {
            "widths": round_values(widths[-1]),
            "limit": round_values(value_range(band)),
            "eigenvalues": round_values(eigenvalues[rows.index(32)]),
            "symbol": round_values(2 * np.real(np.exp(1j * np.outer(angles, np.arange(3))) @ band)),
        }
    margins["szego"] = list(widths[1] / widths[0] - 1)
    return curves


@counterexample_search
def phases(
    rng: Generator,
    margins: Margins,
    tries: int = 200,
    sizes: Sizes = TERM_COUNTS,
    fejer: Sizes = FEJER_SIZES,
    rows: Sizes = MATRIX_SIZES,
) -> Record:
    """``equality``: w and θ_i that do not coincide yet reach 2 Σ w_i; ``ranges``: by N, the shares of random w with f
    wider than g (random and best phases), the largest ratio of the ranges by `best_ratio` and by Fejér's weights;
    ``toeplitz``: by N, the widths of the spectra of W and W∘E, their limits, the eigenvalues at 32 rows, the symbols.
    """
    equality = _amplitudes(rng, margins, tries, sizes)
    ranges = _ranges(rng, margins, tries, sizes, fejer)
    _alignments(rng, margins, tries, sizes)
    return {"equality": equality, "ranges": ranges, "toeplitz": _toeplitz_widths(margins, rows)}


# ---- Proposition B.3: Hadamard products with rotations --------------------------------------------------------------

MATRIX_ORDERS = (2, 3, 4, 8, 16)  # rows of random matrices
SEARCHED_SIZES = (2, 3, 4, 5, 6, 8, 12, 16, 64)
LENGTHS = (16, 32, 64, 128, 256)
HEAD_DIMS = (2, 4, 8, 16, 32, 64, 128)
BASE = 10000.0


def rotation_factors(frequencies: Float[np.ndarray, "*B n"], weights: Float[np.ndarray, "*B n"], size: int) -> Matrices:
    """Ē = Σ_t w_t E_t with (E_t)_ij = e^{i(i-j)θ_t}, of ``size`` rows: positive semi-definite for w >= 0."""
    phase_factors = np.exp(1j * frequencies[..., None, :] * np.arange(size)[:, None])
    return hermitian_toeplitz((phase_factors * weights[..., None, :]).sum(-1))


def rope_factor(head_dim: int, size: int) -> Matrices:
    """Ē with RoPE's frequencies for a head of ``head_dim``, equally weighted."""
    frequencies = rotary_frequencies(head_dim, BASE).numpy()
    return rotation_factors(frequencies, np.full(len(frequencies), 1 / len(frequencies)), size)


def kept_shares(matrix: Matrices, factor: Matrices) -> tuple[float, float, float, float]:
    """The share of the two extreme eigenspaces of W, positive semi-definite, that the product with E keeps.

    Returns c = λ_max(P∘E) at the bottom and at the top of W's spectrum (1: that end does not move), and the eigenvalues
    next to the bottom and next to the top.
    """
    values, vectors = np.linalg.eigh(matrix)
    tolerance = 1e-10 * values[-1]
    bottom, top = values <= values[0] + tolerance, values >= values[-1] - tolerance
    shares = []
    for end in (bottom, top):
        space = vectors[:, end]
        shares.append(float(np.linalg.eigvalsh((space @ space.conj().T) * factor)[-1]))
    return *shares, float(values[~bottom].min(initial=values[-1])), float(values[~top].max(initial=values[0]))


def bound_violation(matrix: Matrices, factor: Matrices) -> float:
    """The largest violation of the four bounds by the kept shares, relative to λ_max(W); <= 0 if none."""
    low_share, high_share, after, before = kept_shares(matrix, factor)
    (low, high), (new_low, new_high) = np.linalg.eigvalsh(matrix)[[0, -1]], np.linalg.eigvalsh(matrix * factor)[[0, -1]]
    width = high - low
    violations = (
        new_high - before - (high - before) * high_share,
        low + width * high_share - new_high,
        after - (after - low) * low_share - new_low,
        new_low - high + width * low_share,
    )
    return float(max(violations) / high)


def search_widest(size: int, rng: Generator, *, starts: int, positive: bool = False) -> Record:
    """Search for Toeplitz W and phases ψ that maximise width(W∘E) / width(W) (L-BFGS-B from random starts).

    As E_ii = 1, neither W's diagonal nor its scale matters to the ratio of the widths: the diagonal is chosen last, so
    that W is positive definite. With ``positive`` its entries are > 0, as Lemma B.1 has them. Returns a `rounded_case`.
    """
    free = [(None, None)] * (size - 1)
    limits = [(-5.0, 3.0)] * (size - 1) + ([(0.0, 0.0)] * (size - 1) if positive else free) + free
    results = []
    for _ in range(starts):
        phases = rng.uniform(0, 2 * np.pi, (2, size - 1)) * [[not positive], [True]]
        start = np.concatenate((0.1 * rng.normal(size=size - 1), *phases))
        options = {"method": "L-BFGS-B", "options": {"maxiter": 200}}
        results.append(minimize(_narrowness, start, jac=True, bounds=limits, **options))
    best = min(results, key=lambda result: result.fun)
    logs, old, new = np.split(best.x, 3)
    column = np.concatenate(([0], np.exp(logs + 1j * old)))
    lowest, highest = np.linalg.eigvalsh(hermitian_toeplitz(column))[[0, -1]]
    column = column / (highest - lowest)
    column[0] = 0.1 - lowest / (highest - lowest)
    return rounded_case(column, np.concatenate(([0], (new - old) % (2 * np.pi))))


def rounded_case(column: Complex[np.ndarray, "N"], phases: Float[np.ndarray, "N"]) -> Record:
    """A W and its phases, rounded, with the two spectra of the rounded numbers: the ``ratio`` of the widths, W's first
    column ``w`` as [real, imaginary], the ``phases`` ψ_δ from δ = 0 on, ``eigenvalues`` of W and of the ``product``.
    """
    column, phases = np.round(column, 6), np.round(phases, 6)
    before = np.linalg.eigvalsh(hermitian_toeplitz(column))
    after = np.linalg.eigvalsh(hermitian_toeplitz(column * np.exp(1j * phases)))
    return {
        "size": len(column),
        "ratio": round_values(np.ptp(after) / np.ptp(before)),
        "w": np.stack((np.real(column), np.imag(column)), -1).tolist(),
        "phases": phases.tolist(),
        "eigenvalues": round_values(before),
        "product": round_values(after),
    }


def _narrowness(x: Float[np.ndarray, "M"]) -> tuple[float, Float[np.ndarray, "M"]]:
    """log(width(W) / width(W∘E)) and its gradient, at x = (log |a_δ|, arg a_δ, arg (a_δ e^{iψ_δ})), δ = 1..N-1."""
    logs, old, new = np.split(x, 3)
    (width, by_old), (new_width, by_new) = (_spectral_width(np.exp(logs + 1j * phase)) for phase in (old, new))
    old, new = by_old / width, by_new / new_width
    return float(np.log(width / new_width)), np.concatenate((np.real(old - new), -np.imag(old), np.imag(new)))


def _spectral_width(kernel: Complex[np.ndarray, "M"]) -> tuple[float, Complex[np.ndarray, "M"]]:
    """Width of the spectrum of the Toeplitz matrix with a_0 = 0 and a_δ = ``kernel``, and its a_δ d(width)/d(a_δ), by
    v^H T v = 2 Re Σ_δ a_δ Σ_j conj(v_(j+δ)) v_j: an eigenvalue changes by its eigenvector's autocorrelation.
    """
    values, vectors = np.linalg.eigh(hermitian_toeplitz(np.concatenate(([0], kernel))))
    low, high = (np.correlate(v, v, "full")[len(v) :].conj() for v in (vectors[:, 0], vectors[:, -1]))
    return float(np.ptp(values)), 2 * (high - low) * kernel


def _random_toeplitz(rng: Generator, tries: int, size: int) -> Matrices:
    """Random positive definite Toeplitz matrices with unit diagonal, every second of them real."""
    weights = rng.dirichlet(np.ones(2 * size), tries)
    matrices = rotation_factors(rng.uniform(0, 2 * np.pi, (tries, 2 * size)), weights, size)
    matrices[::2] = np.real(matrices[::2])
    return matrices


def _random_wishart(rng: Generator, tries: int, size: int, columns: int) -> Matrices:
    """X X^T / columns with standard normal X of ``size`` x ``columns``."""
    x = rng.normal(size=(tries, size, columns))
    return x @ x.transpose(0, 2, 1) / columns


def _compare(margins: Margins, matrices: Matrices, products: Matrices, **statements: str) -> dict[str, np.ndarray]:
    """Compare W∘E with W, and add what is asked for to the margins of a statement; batches.

    ``outside`` its range, larger ``modulus`` and ``moved`` are in units of λ_max(W), ``wider`` is the ratio of the
    widths less 1, and ``condition`` the loss in λ_min/λ_max, which has a value for an indefinite product.
    """
    before, after = np.linalg.eigvalsh(matrices), np.linalg.eigvalsh(products)
    low, high = before[:, 0], before[:, -1]
    changes = {
        "outside": np.maximum(after[:, -1] - high, low - after[:, 0]) / high,
        "modulus": (np.abs(after).max(-1) - high) / high,
        "wider": (after[:, -1] - after[:, 0]) / (high - low) - 1,
        "condition": low / high - after[:, 0] / after[:, -1],
        "moved": np.abs(after - before).max(-1) / high,
    }
    for name, statement in statements.items():
        margins[statement] += list(changes[name])
    return changes


def _free_phases(rng: Generator, margins: Margins, tries: int, searched: Sizes) -> Record:
    """E Hermitian Toeplitz and unimodular with free phases: random instances, known ones and an optimisation."""

    def add(matrices: Matrices, factors: Matrices) -> dict[str, np.ndarray]:
        names = {"outside": "free-outside", "modulus": "free-modulus", "condition": "free-condition"}
        changes = _compare(margins, matrices, matrices * factors, **names)
        margins["free-bound"] += list(changes["wider"] + 1 - np.sqrt(factors.shape[-1] / 2))
        return changes

    orders, shares = (*MATRIX_ORDERS, 64), []
    for size in orders:
        matrices = _random_toeplitz(rng, tries, size)
        phases = rng.uniform(0, 2 * np.pi, (tries, size)) * (np.arange(size) > 0)
        changes = add(matrices, hermitian_toeplitz(np.exp(1j * phases)))
        shares.append([float((changes[key] > ROUNDING).mean()) for key in ("outside", "wider")])
    known = [rounded_case(np.array([2] + [1] * (n - 1)), np.pi / 2 * (np.arange(n) > 0)) for n in searched]
    cases: dict[str, list[Record]] = {"known_positive": known, "found": [], "found_positive": []}
    for size in searched:
        for kind in ("found", "found_positive"):
            starts = max(1, tries // (6 * size))
            cases[kind].append(search_widest(size, rng, starts=starts, positive=kind == "found_positive"))
    for case in (case for kind in cases.values() for case in kind):
        column, factors = np.array(case["w"]) @ [1, 1j], np.exp(1j * np.array(case["phases"]))
        add(hermitian_toeplitz(column)[None], hermitian_toeplitz(factors)[None])
    return {
        "sizes": list(orders),
        "random_outside_share": [row[0] for row in shares],
        "random_wider_share": [row[1] for row in shares],
        "searched_sizes": list(searched),
        **{f"ratio_{kind}": [case["ratio"] for case in group] for kind, group in cases.items()},
        "ratio_bound": round_values([np.sqrt(n / 2) for n in searched]),
        "known": cases["known_positive"][searched.index(3)],
        "found": cases["found"][searched.index(4)],
    }


def _many_frequencies(rng: Generator, margins: Margins, tries: int) -> None:
    """E the mean over 2 to 8 frequencies; also W with entries on every m-th diagonal, where all may agree."""
    names = {"outside": "mean-outside", "condition": "mean-condition"}
    for size in MATRIX_ORDERS[1:]:
        count = int(rng.integers(2, 9))
        frequencies = rng.uniform(0, 2 * np.pi, (2 * tries, count))
        frequencies[:, 1] = frequencies[:, 0] + rng.uniform(0.1, 2 * np.pi - 0.1, 2 * tries)
        weights = 0.5 / count + 0.5 * rng.dirichlet(np.ones(count), 2 * tries)
        factors = rotation_factors(frequencies, weights, size)
        matrices = np.concatenate((_random_wishart(rng, tries, size, size), _random_toeplitz(rng, tries, size)))
        _compare(margins, matrices, matrices * factors, **names, wider="mean-narrower")
        margins["mean-kept"] += [bound_violation(*pair) for pair in zip(matrices, factors, strict=True)]
    for matrix in _random_toeplitz(rng, tries, 12):
        period = int(rng.integers(2, 5))
        frequencies = 2 * np.pi / period * np.arange(period)
        sparse = matrix * rotation_factors(frequencies, np.full(period, 1 / period), 12)
        frequencies = frequencies if rng.random() < 0.5 else rng.uniform(0, 2 * np.pi, period)
        factor = rotation_factors(frequencies, rng.dirichlet(np.ones(period)), 12)
        _compare(margins, sparse[None], (sparse * factor)[None], **names, wider="sparse-narrower")
        margins["mean-kept"].append(bound_violation(sparse, factor))


def _by_size(rng: Generator, lengths: Sizes) -> Record:
    """Contraction by RoPE's Ē: N x 2N Wishart W by length and head width, and the example of theory section 5."""
    ratios, conditions, own_conditions = [], [], []
    for size in lengths:
        matrix = _random_wishart(rng, 1, size, 2 * size)[0]
        before = np.linalg.eigvalsh(matrix)
        after = [np.linalg.eigvalsh(matrix * rope_factor(head_dim, size)) for head_dim in HEAD_DIMS]
        ratios.append(round_values([np.ptp(values) / np.ptp(before) for values in after]))
        conditions.append(round_values([values[-1] / values[0] for values in after]))
        own_conditions.append(round_values(before[-1] / before[0]))
    square = _random_wishart(rng, 1, 64, 64)[0]
    return {
        "lengths": list(lengths),
        "head_dims": list(HEAD_DIMS),
        "width_ratio": ratios,
        "condition": conditions,
        "condition_w": own_conditions,
        "example": {
            "w": round_values(np.linalg.eigvalsh(square)),
            "mean": round_values(np.linalg.eigvalsh(square * rope_factor(16, 64))),
        },
    }


def _additive(rng: Generator, margins: Margins, tries: int) -> Record:
    """W∘Ē (RoPE, d = 16) compared with W + sB, B positive definite Toeplitz with unit diagonal, and with B = cI - W."""
    size = 32
    toeplitz = _random_toeplitz(rng, tries, size)
    matrices = np.concatenate((_random_wishart(rng, tries, size, size), toeplitz))
    biases = _random_toeplitz(rng, 2 * tries, size)
    largest = np.linalg.eigvalsh(toeplitz)[:, -1, None, None]
    sums = {f"{scale:g}": matrices + scale * biases for scale in (0.1, 10.0)}
    sums |= {"cancelling": toeplitz + (1.1 * largest * np.eye(size) - toeplitz)}
    eigenvalues, product = np.linalg.eigvalsh(matrices), np.linalg.eigvalsh(matrices * rope_factor(16, size))
    widths = {"product": round_values(np.mean(np.ptp(product, axis=-1) / np.ptp(eigenvalues, axis=-1)))}
    for name, summed in sums.items():
        values = np.linalg.eigvalsh(summed)
        products, before = product[-len(values) :], np.ptp(eigenvalues[-len(values) :], axis=-1)
        width = np.ptp(values, axis=-1)
        margins[f"additive-{name}"] += list((np.ptp(products, axis=-1) - width) / before)
        margins[f"additive-condition-{name}"] += list(values[:, 0] / values[:, -1] - products[:, 0] / products[:, -1])
        widths[name] = round_values(np.mean(width / before))
    return widths


@counterexample_search
def contraction(
    rng: Generator, margins: Margins, tries: int = 200, searched: Sizes = SEARCHED_SIZES, lengths: Sizes = LENGTHS
) -> Record:
    """``free``: by N, the shares of random instances outside and wider, the width ratios that the optimisation found
    and those of W = I + J with ψ_δ = π/2, which are 2 cot(π/2N)/N, the bound √(N/2), and a ``known`` and a ``found``
    instance in full (`rounded_case`); ``sizes``: width ratios and condition numbers by length and head width;
    ``additive``: mean widths of W∘Ē and of W + sB in units of W's.
    """
    free, widths = _free_phases(rng, margins, tries, searched), _additive(rng, margins, tries)
    for size in MATRIX_ORDERS:  # E positive semi-definite Toeplitz and unimodular: one frequency
        matrices = _random_toeplitz(rng, tries, size)
        factors = rotation_factors(rng.uniform(0, 2 * np.pi, (tries, 1)), np.ones((tries, 1)), size)
        names = {"wider": "one-narrower", "moved": "one-same", "modulus": "one-modulus", "condition": "one-condition"}
        _compare(margins, matrices, matrices * factors, **names)
    for size in MATRIX_ORDERS:  # E positive semi-definite with unit diagonal, against W of low and of full rank
        for rank in sorted({1, 2, size}):
            matrices = np.concatenate((_random_wishart(rng, tries, size, rank), _random_toeplitz(rng, tries, size)))
            x = rng.normal(size=(2 * tries, size, rank)) + 1j * rng.normal(size=(2 * tries, size, rank))
            x /= np.linalg.norm(x, axis=-1, keepdims=True)
            _compare(margins, matrices, matrices * (x @ x.conj().transpose(0, 2, 1)), outside="schur-outside")
    _many_frequencies(rng, margins, tries)
    return {"free": free, "sizes": _by_size(rng, lengths), "additive": widths}
