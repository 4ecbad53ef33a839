"""Free phases: amplitudes and ranges of trigonometric sums and Toeplitz spectra (arXiv 2505.13027, Lemma B.1).

f(θ) = Σ_i 2 w_i cos(iθ_i + iθ) and g(θ) = Σ_i 2 w_i cos(iθ), i = 0..N-1, w_i >= 0, with ψ_i = iθ_i. What holds (theory
section 5):

- max|f| <= max|g| = 2 Σ w_i. Equality if every term is ±1 at one θ: some φ has i(θ_i + φ) ≡ 0 (mod 2π) for every i with
  w_i > 0, or ≡ π for every such i (then w_0 = 0). The θ_i themselves need not coincide.
- range g is between 2 and 4 times Σ_(i>0) w_i, for its mean is 2 w_0 and its maximum 2 Σ w_i; range f <= 4 Σ_(i>0) w_i.
- f can be wider than g. With γ = α - β, f(α) - f(β) <= 4 Σ w_i |sin(iγ/2)|, attained by ψ_i = -π/2 sign(sin(iγ/2)),
  while g(0) - g(γ) = 4 Σ w_i sin²(iγ/2). As |sin(x/2)| = (8/π) Σ_k sin²(kx/2) / (4k² - 1), k = 1, 2, .., and
  Σ_k 1/(4k² - 1) = 1/2: range f <= (4/π) range g. No smaller constant will do: Fejér's w_i = 1 - i/N with γ = 2π/N give
  2 cot(π/2N)/N, which tends to 4/π.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Complex, Float, Inexact
from scipy.optimize import linprog, minimize

from toeplens.papers.mathematics.records import ROUNDING, ClaimsOn, Records, generator, short, tally
from toeplens.studies.kit.claims import Claim

ALIGNED = 1e-7  # radians
SIZES = (2, 3, 4, 6, 8, 12, 16)
FEJER = (2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
ROWS = (4, 8, 16, 32, 64, 128, 256)
SOURCE = "arXiv 2505.13027 v1, Lemma B.1"

Matrices = Inexact[np.ndarray, "*B N N"]
Columns = Inexact[np.ndarray, "*B N"]

# by tally: the statement, and the words before its worst margin
TALLIES: dict[str, tuple[str, str]] = {
    "bound": ("max|f| <= 2 Σ w_i", "largest max|f| / 2 Σ w_i - 1:"),
    "coinciding": ("coinciding phases give equality", "largest deficit"),
    "not-coinciding": ("phases that do not coincide give less", "largest max|f| / 2 Σ w_i - 1:"),
    "aligned": ("the condition gives equality", "largest deficit"),
    "not-aligned": ("without the condition max|f| is smaller", "largest max|f| / 2 Σ w_i - 1:"),
    "coinciding-proof": ("coinciding phases give equality for P", "largest deficit"),
    "range-width": ("the range of g is 4 Σ w_i", "largest shortfall"),
    "range": ("range f <= range g", "largest range f / range g - 1:"),
    "range-equal": ("equal ranges require coinciding phases", "largest -|range f / range g - 1|:"),
    "range-constant": ("range f <= (4/π) range g", "largest (π/4) range f / range g - 1:"),
    "range-limits": ("the limits by Σ w_i", "largest excess"),
    "szego": ("W∘E is narrower than W = T(3, 1, 1, 0, ..)", "largest width(W∘E) / width(W) - 1:"),
}


def hermitian(column: Columns) -> Matrices:
    """The Hermitian Toeplitz matrix with this first column: a_(i-j) below the diagonal, its conjugate above."""
    offsets = np.subtract.outer(np.arange(column.shape[-1]), np.arange(column.shape[-1]))
    matrix = column[..., np.abs(offsets)]
    return np.where(offsets >= 0, matrix, matrix.conj())


def widest(size: int, rng: np.random.Generator, *, starts: int, positive: bool = False) -> dict[str, Any]:
    """Search for Toeplitz W and phases ψ that maximise width(W∘E) / width(W) (L-BFGS-B from random starts).

    As E_ii = 1, neither W's diagonal nor its scale matters to the ratio of the widths: the diagonal is chosen last, so
    that W is positive definite. With ``positive`` its entries are > 0, as Lemma B.1 has them. ``starts`` is 1 or more.

    Returns the ``ratio`` of the widths, W's first column ``w`` as [real, imaginary], the ``phases`` ψ_δ from δ = 0 on,
    and the ``eigenvalues`` of W and of the ``product``.
    """
    free = [(None, None)] * (size - 1)
    limits = [(-5.0, 3.0)] * (size - 1) + ([(0.0, 0.0)] * (size - 1) if positive else free) + free
    found = []
    for _ in range(starts):
        phases = rng.uniform(0, 2 * np.pi, (2, size - 1)) * [[not positive], [True]]
        start = np.concatenate((0.1 * rng.normal(size=size - 1), *phases))
        found.append(minimize(_narrowness, start, jac=True, method="L-BFGS-B", bounds=limits, options={"maxiter": 200}))
    best = min(found, key=lambda result: result.fun)
    logs, old, new = np.split(best.x, 3)
    column = np.concatenate(([0], np.exp(logs + 1j * old)))
    phases = np.concatenate(([0], (new - old) % (2 * np.pi)))
    lowest, highest = np.linalg.eigvalsh(hermitian(column))[[0, -1]]
    column = column / (highest - lowest)
    column[0] = 0.1 - lowest / (highest - lowest)
    return written(column, phases)


def written(column: Complex[np.ndarray, "N"], phases: Float[np.ndarray, "N"]) -> dict[str, Any]:
    """A W and its phases, rounded, with the two spectra of the rounded numbers."""
    column, phases = np.round(column, 6), np.round(phases, 6)
    before = np.linalg.eigvalsh(hermitian(column))
    after = np.linalg.eigvalsh(hermitian(column * np.exp(1j * phases)))
    parts = np.stack((np.real(column), np.imag(column)), -1)
    case = {"size": len(column), "ratio": short(np.ptp(after) / np.ptp(before)), "w": parts.tolist()}
    return {**case, "phases": phases.tolist(), "eigenvalues": short(before), "product": short(after)}


def _narrowness(x: Float[np.ndarray, "M"]) -> tuple[float, Float[np.ndarray, "M"]]:
    """log(width(W) / width(W∘E)) and its gradient, at x = (log |a_δ|, arg a_δ, arg (a_δ e^{iψ_δ})), δ = 1..N-1."""
    logs, old, new = np.split(x, 3)
    (width, by_old), (turned, by_new) = (_width(np.exp(logs + 1j * phase)) for phase in (old, new))
    old, new = by_old / width, by_new / turned
    return float(np.log(width / turned)), np.concatenate((np.real(old - new), -np.imag(old), np.imag(new)))


def _width(kernel: Complex[np.ndarray, "M"]) -> tuple[float, Complex[np.ndarray, "M"]]:
    """Width of the spectrum of the Toeplitz matrix with a_0 = 0 and a_δ = ``kernel``, and its a_δ d(width)/d(a_δ), by
    v^H T v = 2 Re Σ_δ a_δ Σ_j conj(v_(j+δ)) v_j: an eigenvalue changes by its eigenvector's autocorrelation.
    """
    values, vectors = np.linalg.eigh(hermitian(np.concatenate(([0], kernel))))
    low, high = (np.correlate(v, v, "full")[len(v) :].conj() for v in (vectors[:, 0], vectors[:, -1]))
    return float(np.ptp(values)), 2 * (high - low) * kernel


def peak(coefficients: Columns) -> Float[np.ndarray, "*B"]:
    """max over θ of 2 Re Σ_i c_i e^{iiθ}, to rounding: an FFT grid of 16N, then Newton from its 8 highest peaks."""
    size = coefficients.shape[-1]
    flat = coefficients.reshape(-1, size)
    count = 16 * size
    values = 2 * count * np.fft.ifft(flat, count, axis=-1).real
    tops = (values >= np.roll(values, 1, -1)) & (values >= np.roll(values, -1, -1))
    places = np.argpartition(np.where(tops, values, -np.inf), -8, axis=-1)[:, -8:]
    angles, best = 2 * np.pi * places / count, values.max(-1)
    index = np.arange(size)
    for _ in range(7):
        terms = flat[:, None] * np.exp(1j * angles[..., None] * index)
        best = np.maximum(best, 2 * terms.real.sum(-1).max(-1))
        slope, bend = -(terms.imag @ index), -(terms.real @ index**2)
        step = np.divide(-slope, bend, out=np.zeros_like(slope), where=bend < 0)
        angles = angles + np.clip(step, -2 * np.pi / count, 2 * np.pi / count)
    return best.reshape(coefficients.shape[:-1])


def amplitude(coefficients: Columns) -> Float[np.ndarray, "*B"]:
    """max over θ of |2 Re Σ_i c_i e^{iiθ}|."""
    return np.maximum(peak(coefficients), peak(-coefficients))


def span(coefficients: Columns) -> Float[np.ndarray, "*B"]:
    """Maximum minus minimum over θ of 2 Re Σ_i c_i e^{iiθ}."""
    return peak(coefficients) + peak(-coefficients)


def misalignment(weights: Float[np.ndarray, "N"], phases: Float[np.ndarray, "N"]) -> float:
    """Distance of the θ_i from the condition of equality, in radians; 0 exactly if it holds. The first i > 0 with w_i
    > 0 leaves i candidates for φ with the target 0, i with π if w_0 = 0: the best one's worst |i(θ_i + φ) - target|.
    """
    used = np.flatnonzero(weights[1:] > 0) + 1
    if len(used) == 0:
        return 0.0
    first, worst = used[0], []
    for target in (0, np.pi) if weights[0] == 0 else (0,):
        shifts = (target + 2 * np.pi * np.arange(first)) / first - phases[first]
        turns = used * (phases[used] + shifts[:, None]) - target
        worst.append(np.abs(np.angle(np.exp(1j * turns))).max(-1).min())
    return float(min(worst))


def turned(size: int, gap: float | Float[np.ndarray, "*B"]) -> Float[np.ndarray, "*B N"]:
    """The phases ψ_i with f(γ/2) - f(-γ/2) = 4 Σ w_i |sin(iγ/2)| for γ = ``gap``: no phases make it larger."""
    return -np.pi / 2 * np.sign(np.sin(np.asarray(gap)[..., None] * np.arange(size) / 2))


def best_ratio(size: int) -> tuple[float, Float[np.ndarray, "N"], float]:
    """The largest range f / range g that linear programs find for N weights, with the weights and γ, from a grid of γ:
    maximise Σ w_i |sin(iγ/2)| under Σ w_i sin²(iη/2) <= 1 for η on a grid. The ratio itself is computed without a grid.
    """
    index = np.arange(1, size)
    rows = np.sin(np.linspace(0, np.pi, 24 * size + 1)[1:, None] * index / 2) ** 2
    found = []
    for gap in (*np.linspace(0, np.pi, 13)[1:], 2 * np.pi / size):
        weights = np.concatenate(([0], linprog(-np.abs(np.sin(index * gap / 2)), rows, np.ones(len(rows))).x))
        found.append((float(span(weights * np.exp(1j * turned(size, gap))) / span(weights)), weights, float(gap)))
    return max(found, key=lambda case: case[0])


def _weights(rng: np.random.Generator, tries: int, size: int) -> Float[np.ndarray, "B N"]:
    """Random w >= 0, about a third of them 0, with one w_i > 0 (i > 0) at least; at times decaying."""
    weights = rng.exponential(size=(tries, size)) * (rng.random((tries, size)) < 0.7)
    weights[np.arange(tries), rng.integers(1, size, tries)] += 0.1
    return weights * np.exp(-rng.exponential(size=(tries, 1)) * rng.integers(0, 2, (tries, 1)) * np.arange(size))


def _amplitudes(rng: np.random.Generator, tries: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """max|f| compared with 2 Σ w_i: random phases, coinciding phases, and phases that maximise f."""
    bound, same, proof, other = [], [], [], []
    shown = {}
    for size in SIZES:
        index = np.arange(size)
        weights, phases = _weights(rng, tries, size), rng.uniform(0, 2 * np.pi, (tries, size))
        total = 2 * weights.sum(-1)
        bound += list(amplitude(weights * np.exp(1j * index * phases)) / total - 1)
        same += list(1 - amplitude(weights * np.exp(1j * index * phases[:, :1])) / total)
        proof += list(1 - amplitude(weights * np.exp(1j * phases[:, :1])) / total)
        for _ in range(tries // 20 if size > 2 else 0):
            positive = rng.uniform(0.1, 1, size)
            angles = minimize(_missing, rng.uniform(0, 2 * np.pi, size), args=(positive,), jac=True, tol=1e-14).x
            reached = float(amplitude(positive * np.exp(1j * index * angles)) / (2 * positive.sum()))
            bound.append(reached - 1)
            if np.abs(np.exp(1j * angles[1:]) - np.exp(1j * angles[1])).max() > 1e-3:
                other.append(reached - 1)
                if size == 4:
                    shown = {"w": short(positive), "theta": short(angles % (2 * np.pi)), "reached": short(reached)}
    other.append(float(amplitude(np.exp(1j * np.array([0, 0, 2 * np.pi])))) / 6 - 1)  # θ = (0, 0, π), w = 1
    tallies = {"bound": tally(bound), "coinciding": tally(same), "coinciding-proof": tally(proof)}
    return {**tallies, "not-coinciding": tally(other, beyond=-ROUNDING)}, shown


def _missing(theta: Float[np.ndarray, "N"], weights: Float[np.ndarray, "N"]) -> tuple[float, Float[np.ndarray, "N"]]:
    """2 Σ w_i - f(0), at least the distance of max|f| from its bound, and its gradient in the θ_i."""
    index = np.arange(len(theta))
    return float(2 * weights @ (1 - np.cos(index * theta))), 2 * weights * index * np.sin(index * theta)


def _alignments(rng: np.random.Generator, tries: int) -> dict[str, Any]:
    """The corrected condition of equality on instances that satisfy it, that miss it narrowly, and on random ones."""
    met, missed = [], []
    for size in SIZES:
        index = np.arange(size)
        weights = rng.uniform(0.1, 1, (tries, size)) * (rng.random((tries, size)) < 0.8)
        weights[np.arange(tries), rng.integers(1, size, tries)] += 0.1
        weights[rng.random(tries) < 0.5, 0] = 0
        target = np.pi * rng.integers(0, 2, (tries, 1))
        windings = 2 * np.pi * rng.integers(0, size, (tries, size))
        phases = (target + windings) / np.maximum(index, 1) - rng.uniform(0, 2 * np.pi, (tries, 1))
        astray = rng.random((tries, size)) < 0.5 / size
        phases = phases + astray * rng.uniform(0.1, 1, (tries, size)) / np.maximum(index, 1)
        random = rng.random(tries) < 0.2
        phases[random] = rng.uniform(0, 2 * np.pi, (random.sum(), size))
        reached = amplitude(weights * np.exp(1j * index * phases)) / (2 * weights.sum(-1))
        holds = np.array([misalignment(*pair) < ALIGNED for pair in zip(weights, phases, strict=True)])
        met += list(1 - reached[holds])
        missed += list(reached[~holds] - 1)
    return {"aligned": tally(met), "not-aligned": tally(missed, beyond=-ROUNDING)}


def _ranges(rng: np.random.Generator, tries: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """range f and range g: random and best phases, the linear programs, Fejér's weights, and aligned phases."""
    ratios, width, limits, equal, shares = [], [], [], [], []
    for size in SIZES:
        index = np.arange(size)
        weights = _weights(rng, tries, size)
        total, plain = 4 * weights[:, 1:].sum(-1), span(weights)
        gaps = np.linspace(0, np.pi, 16 * size + 1)[1:]
        best = gaps[np.argmax(weights @ np.abs(np.sin(np.outer(index, gaps) / 2)), axis=-1)]
        for psi in (rng.uniform(0, 2 * np.pi, (tries, size)) * (index > 0), turned(size, best)):
            reached = span(weights * np.exp(1j * psi))
            shares.append(float((reached / plain > 1 + ROUNDING).mean()))
            ratios += list(reached / plain)
            limits += list(reached / total - 1)
        width += list(1 - plain / total)
        limits += [*(0.5 - plain / total), *(plain / total - 1)]
        weights = rng.uniform(0.1, 1, (tries, size))
        thetas = 2 * np.pi * rng.integers(0, size, (tries, size)) / np.maximum(index, 1)
        apart = np.abs(np.exp(1j * thetas[:, 1:]) - np.exp(1j * thetas[:, 1:2])).max(-1) > 1e-3
        equal += list(-np.abs(span(weights * np.exp(1j * index * thetas)) / span(weights) - 1)[apart])
    programs = [best_ratio(size) for size in SIZES]
    triangles = [1 - np.arange(n) / n for n in FEJER]
    fejer = [float(span(w * np.exp(1j * turned(len(w), 2 * np.pi / len(w)))) / span(w)) for w in triangles]
    ratios += [case[0] for case in programs] + fejer
    tallies = {
        "range": tally(np.array(ratios) - 1),
        "range-width": tally(width),
        "range-equal": tally(equal, beyond=-ROUNDING),
        "range-constant": tally(np.array(ratios) * np.pi / 4 - 1),
        "range-limits": tally(limits),
    }
    curves = {
        "sizes": list(SIZES),
        "random_wider_share": shares[::2],
        "best_phases_wider_share": shares[1::2],
        "ratio_program": short([case[0] for case in programs]),
        "fejer_sizes": list(FEJER),
        "ratio_fejer": short(fejer),
        "constant": short(4 / np.pi),
        "found": {"w": short(programs[2][1]), "gap": short(programs[2][2]), "psi": short(turned(4, programs[2][2]))},
    }
    return tallies, curves


def _toeplitz_widths() -> tuple[dict[str, Any], dict[str, Any]]:
    """Eigenvalues of W∘E and of W as N grows (Szegő): W = T(3, 1, 1, 0, ..), f and g those of w = (1.5, 1, 1)."""
    gaps, angles = np.linspace(0, np.pi, 4001), np.linspace(-np.pi, np.pi, 73)
    psi = turned(3, gaps[np.argmax(np.sin(gaps / 2) + np.abs(np.sin(gaps)))])
    curves: dict[str, Any] = {"rows": list(ROWS), "psi": short(psi), "angles": short(angles)}
    widths = []
    for name, band in (("w", np.array([1.5, 1, 1])), ("product", np.array([1.5, 1, 1]) * np.exp(1j * psi))):
        columns = [np.concatenate(([3], band[1:], np.zeros(rows - 3))) for rows in ROWS]
        eigenvalues = [np.linalg.eigvalsh(hermitian(column)) for column in columns]
        widths.append(np.array([np.ptp(values) for values in eigenvalues]))
        curves[name] = {
            "widths": short(widths[-1]),
            "limit": short(span(band)),
            "eigenvalues": short(eigenvalues[ROWS.index(32)]),
            "symbol": short(2 * np.real(np.exp(1j * np.outer(angles, np.arange(3))) @ band)),
        }
    return {"szego": tally(widths[1] / widths[0] - 1, beyond=-ROUNDING)}, curves


def phases(seed: int, *, tries: int = 200) -> dict[str, Any]:
    """Amplitudes, ranges and Toeplitz spectra under free phases, for every statement of Lemma B.1.

    Arguments
        seed   of all random instances and of the optimisation's starts
        tries  random instances for each size and kind, 20 or more

    Returns ``tallies`` by statement (`tally`); ``equality``: w and θ_i that do not coincide yet reach 2 Σ w_i;
    ``ranges``: by N, the shares of random w with f wider than g (random and best phases), the largest ratio of the
    ranges by `best_ratio` and by Fejér's weights; ``toeplitz``: by N, the widths of the spectra of W and W∘E, their
    limits, the eigenvalues at 32 rows and the symbols.
    """
    rng = generator(seed, tries)
    tallies, equality = _amplitudes(rng, tries)
    of_ranges, ranges = _ranges(rng, tries)
    of_matrices, matrices = _toeplitz_widths()
    tallies |= {**_alignments(rng, tries), **of_ranges, **of_matrices}
    return {"seed": seed, "tallies": tallies, "equality": equality, "ranges": ranges, "toeplitz": matrices}


_claim = ClaimsOn(
    "phases", TALLIES, "A counterexample is a choice of w and θ_i whose max|f| or range contradicts it beyond rounding."
)
_stated = partial(_claim, SOURCE)
_corrected = partial(_claim, f"{SOURCE}, corrected")
CLAIMS: tuple[Claim[Records], ...] = (
    _stated("lemma-b1-bound", "max|f| is at most max|g| = 2 Σ w_i.", "The triangle inequality proves it.", ("bound",)),
    _stated(
        "lemma-b1-equality",
        "max|f| = 2 Σ w_i if and only if all phases θ_i coincide modulo 2π.",
        "'If' and 'only if' are separate parts. For 'only if', all w_i > 0 and θ_0, which has no effect, is excluded.",
        ("coinciding", "not-coinciding"),
    ),
    _corrected(
        "lemma-b1-equality-corrected",
        "max|f| = 2 Σ w_i if and only if some φ has i(θ_i + φ) ≡ 0 for all i with w_i > 0, or ≡ π for all of them.",
        "Both directions, on phases that satisfy the condition, that miss it by 0.1 to 1 radian, and random ones.",
        ("aligned", "not-aligned"),
    ),
    _claim(
        f"{SOURCE}, proof",
        "lemma-b1-proof",
        "With the phases of the proof, c_i = w_i e^{ιθ_i}, phases that coincide give max 2|Re P| = 2 Σ w_i.",
        "The lemma's f has iθ_i; the proof's P has θ_i instead.",
        ("coinciding-proof",),
    ),
    _stated(
        "lemma-b1-range",
        "The range of g is 4 Σ w_i, never below that of f, and equal to it only if all phases coincide.",
        "Three parts; the first without w_0, which shifts g.",
        ("range-width", "range", "range-equal"),
    ),
    _corrected(
        "lemma-b1-range-corrected",
        "range f <= (4/π) range g, range f <= 4 Σ w_i and 2 Σ w_i <= range g <= 4 Σ w_i, sums over i > 0.",
        "Proved in this module; the search shows how closely 4/π is approached.",
        ("range-constant", "range-limits"),
    ),
    ClaimsOn("phases", TALLIES)(
        "arXiv 2505.13027 v1, Proposition B.3, its use of Lemma B.1",
        "lemma-b1-szego",
        "By Szegő's theorem the spectrum of W∘E is more compact than W's.",
        "Fails if the eigenvalue range of W∘E is at least that of W, for Toeplitz W with entries >= 0.",
        ("szego",),
    ),
)
