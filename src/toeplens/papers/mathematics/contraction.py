"""Spectral contraction: the effect of a Hadamard product with rotations on a spectrum (arXiv 2505.13027, Prop. B.3).

The proposition takes W and E positive definite Toeplitz with every |E_ij| = 1. No such E exists for N > 1: a 2 x 2
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

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from toeplens.encodings.rotary import rotary_frequencies
from toeplens.papers.mathematics.phases import Matrices, hermitian, widest, written
from toeplens.papers.mathematics.records import ROUNDING, ClaimsOn, Records, generator, short, tally
from toeplens.studies.kit.claims import Claim

SIZES = (2, 3, 4, 8, 16)
SEARCHED = (2, 3, 4, 5, 6, 8, 12, 16, 64)
LENGTHS = (16, 32, 64, 128, 256)
HEAD_DIMS = (2, 4, 8, 16, 32, 64, 128)
SCALES = (0.1, 10.0)
BASE = 10000.0
SOURCE = "arXiv 2505.13027 v1, Proposition B.3"

_ADDED = {"0.1": "s = 0.1", "10": "s = 10", "cancelling": "B = cI - W"}  # the added biases B
_OUTSIDE = "largest distance outside, relative to λ_max(W),"
_WIDER = "largest width(W∘E) / width(W) - 1:"
_LOSS = "largest decrease of λ_min / λ_max"
# by tally: the statement, and the words before its worst margin
TALLIES: dict[str, tuple[str, str]] = {
    "one-narrower": ("one frequency: W∘E is strictly narrower", _WIDER),
    "free-outside": ("free phases: W∘E stays within W's range", _OUTSIDE),
    "one-modulus": ("one frequency: |λ| does not grow", "largest growth, relative to λ_max(W),"),
    "free-modulus": ("free phases: |λ| does not grow", "largest growth, relative to λ_max(W),"),
    "one-condition": ("one frequency: W∘E is strictly better conditioned", _LOSS),
    "free-condition": ("free phases: W∘E is not worse conditioned", _LOSS),
    "one-same": ("the eigenvalues are the same", "largest change, relative to λ_max(W),"),
    "free-bound": ("the width grows at most √(N/2)-fold", "largest excess over the bound"),
    "schur-outside": ("the spectrum stays within W's", _OUTSIDE),
    "mean-outside": ("the spectrum stays within W's", _OUTSIDE),
    "mean-kept": ("the bounds by the kept share of the eigenspaces", "largest violation, relative to λ_max(W),"),
    "mean-narrower": ("random W: W∘Ē is narrower", _WIDER),
    "sparse-narrower": ("W on every m-th diagonal: W∘Ē is narrower", _WIDER),
    "mean-condition": ("W∘Ē is not worse conditioned", _LOSS),
    **{
        f"additive-{name}": (f"{b}: W∘Ē is narrower", "largest excess width, in widths of W,")
        for name, b in _ADDED.items()
    },
    **{f"additive-condition-{name}": (f"{b}: W∘Ē is better conditioned", _LOSS) for name, b in _ADDED.items()},
}


def rotations(frequencies: Float[np.ndarray, "*B n"], weights: Float[np.ndarray, "*B n"], size: int) -> Matrices:
    """Ē = Σ_t w_t E_t with (E_t)_ij = e^{i(i-j)θ_t}, of ``size`` rows: positive semi-definite for w >= 0."""
    turns = np.exp(1j * frequencies[..., None, :] * np.arange(size)[:, None])
    return hermitian((turns * weights[..., None, :]).sum(-1))


def rope(head_dim: int, size: int) -> Matrices:
    """Ē with RoPE's frequencies for a head of ``head_dim``, equally weighted."""
    frequencies = rotary_frequencies(head_dim, BASE).numpy()
    return rotations(frequencies, np.full(len(frequencies), 1 / len(frequencies)), size)


def kept(matrix: Matrices, factor: Matrices) -> tuple[float, float, float, float]:
    """The share of the two extreme eigenspaces of W, positive semi-definite, that the product with E keeps.

    Returns c = λ_max(P∘E) at the bottom and at the top of W's spectrum (1: that end does not move), and the eigenvalues
    next to the bottom and next to the top.
    """
    values, vectors = np.linalg.eigh(matrix)
    near = 1e-10 * values[-1]
    bottom, top = values <= values[0] + near, values >= values[-1] - near
    shares = []
    for end in (bottom, top):
        space = vectors[:, end]
        shares.append(float(np.linalg.eigvalsh((space @ space.conj().T) * factor)[-1]))
    return *shares, float(values[~bottom].min(initial=values[-1])), float(values[~top].max(initial=values[0]))


def bounds_broken(matrix: Matrices, factor: Matrices) -> float:
    """The largest violation of the four bounds by the kept shares, relative to λ_max(W); <= 0 if none."""
    low_share, high_share, after, before = kept(matrix, factor)
    (low, high), (new_low, new_high) = np.linalg.eigvalsh(matrix)[[0, -1]], np.linalg.eigvalsh(matrix * factor)[[0, -1]]
    width = high - low
    broken = (
        new_high - before - (high - before) * high_share,
        low + width * high_share - new_high,
        after - (after - low) * low_share - new_low,
        new_low - high + width * low_share,
    )
    return float(max(broken) / high)


def _toeplitz(rng: np.random.Generator, tries: int, size: int) -> Matrices:
    """Random positive definite Toeplitz matrices with unit diagonal, every second of them real."""
    weights = rng.dirichlet(np.ones(2 * size), tries)
    matrices = rotations(rng.uniform(0, 2 * np.pi, (tries, 2 * size)), weights, size)
    matrices[::2] = np.real(matrices[::2])
    return matrices


def _wishart(rng: np.random.Generator, tries: int, size: int, columns: int) -> Matrices:
    """X X^T / columns with standard normal X of ``size`` x ``columns``."""
    x = rng.normal(size=(tries, size, columns))
    return x @ x.transpose(0, 2, 1) / columns


def _correlations(rng: np.random.Generator, tries: int, size: int, rank: int) -> Matrices:
    """Random complex positive semi-definite matrices of this rank with unit diagonal."""
    x = rng.normal(size=(tries, size, rank)) + 1j * rng.normal(size=(tries, size, rank))
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    return x @ x.conj().transpose(0, 2, 1)


def _compared(matrices: Matrices, products: Matrices) -> dict[str, np.ndarray]:
    """Compare W∘E with W: outside its range, larger modulus, wider, worse conditioned, different.

    ``outside``, ``modulus`` and ``moved`` are in units of λ_max(W), ``wider`` is the ratio of the widths less 1, and
    ``condition`` the loss in λ_min/λ_max, the reciprocal condition number, which has a value for an indefinite product.
    """
    before, after = np.linalg.eigvalsh(matrices), np.linalg.eigvalsh(products)
    top = before[..., -1]
    widths = before[..., -1] - before[..., 0]
    return {
        "outside": np.maximum(after[..., -1] - top, before[..., 0] - after[..., 0]) / top,
        "modulus": (np.abs(after).max(-1) - top) / top,
        "wider": (after[..., -1] - after[..., 0]) / widths - 1,
        "condition": before[..., 0] / top - after[..., 0] / after[..., -1],
        "moved": np.abs(after - before).max(-1) / top,
    }


def _stacked(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _one_frequency(rng: np.random.Generator, tries: int) -> dict[str, Any]:
    """E positive semi-definite Toeplitz and unimodular: one frequency."""
    parts = []
    for size in SIZES:
        matrices = _toeplitz(rng, tries, size)
        factors = rotations(rng.uniform(0, 2 * np.pi, (tries, 1)), np.ones((tries, 1)), size)
        parts.append(_compared(matrices, matrices * factors))
    margins = _stacked(parts)
    return {
        "one-narrower": tally(margins["wider"], beyond=-ROUNDING),
        "one-same": tally(margins["moved"]),
        "one-modulus": tally(margins["modulus"]),
        "one-condition": tally(margins["condition"], beyond=-ROUNDING),
    }


def _free_phases(rng: np.random.Generator, tries: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """E Hermitian Toeplitz and unimodular with free phases: random instances, known ones and an optimisation."""
    parts, bound, shares = [], [], []
    for size in (*SIZES, 64):
        matrices = _toeplitz(rng, tries, size)
        phases = rng.uniform(0, 2 * np.pi, (tries, size)) * (np.arange(size) > 0)
        part = _compared(matrices, matrices * hermitian(np.exp(1j * phases)))
        shares.append([float((part[key] > ROUNDING).mean()) for key in ("outside", "wider")])
        bound.append(part["wider"] + 1 - np.sqrt(size / 2))
        parts.append(part)
    flat = [written(np.array([2] + [1] * (n - 1)), np.pi / 2 * (np.arange(n) > 0)) for n in SEARCHED]
    cases = {"known_positive": flat, "found": [], "found_positive": []}
    for size in SEARCHED:
        starts = max(1, tries // (6 * size))
        cases["found"].append(widest(size, rng, starts=starts))
        cases["found_positive"].append(widest(size, rng, starts=starts, positive=True))
    for case in itertools.chain(*cases.values()):
        column = np.array(case["w"]) @ [1, 1j]
        product = hermitian(column * np.exp(1j * np.array(case["phases"])))
        parts.append(_compared(hermitian(column)[None], product[None]))
        bound.append(parts[-1]["wider"] + 1 - np.sqrt(case["size"] / 2))
    margins = _stacked(parts)
    tallies = {
        "free-outside": tally(margins["outside"]),
        "free-modulus": tally(margins["modulus"]),
        "free-condition": tally(margins["condition"]),
        "free-bound": tally(np.concatenate(bound)),
    }
    curves = {
        "sizes": [*SIZES, 64],
        "random_outside_share": [row[0] for row in shares],
        "random_wider_share": [row[1] for row in shares],
        "searched_sizes": list(SEARCHED),
        **{f"ratio_{kind}": [case["ratio"] for case in each] for kind, each in cases.items()},
        "ratio_bound": short([np.sqrt(n / 2) for n in SEARCHED]),
        "known": cases["known_positive"][SEARCHED.index(3)],
        "found": cases["found"][SEARCHED.index(4)],
    }
    return tallies, curves


def _schur(rng: np.random.Generator, tries: int) -> dict[str, Any]:
    """E positive semi-definite with unit diagonal, of rank 1, 2 and N, against W of low and of full rank."""
    parts = []
    for size in SIZES:
        for rank in sorted({1, 2, size}):
            matrices = np.concatenate((_wishart(rng, tries, size, rank), _toeplitz(rng, tries, size)))
            parts.append(_compared(matrices, matrices * _correlations(rng, 2 * tries, size, rank)))
    return {"schur-outside": tally(_stacked(parts)["outside"])}


def _many_frequencies(rng: np.random.Generator, tries: int) -> dict[str, Any]:
    """E the mean over 2 to 8 frequencies; also W with entries on every m-th diagonal, where all may agree."""
    parts, rare, broken = [], [], []
    for size in SIZES[1:]:
        count = int(rng.integers(2, 9))
        frequencies = rng.uniform(0, 2 * np.pi, (2 * tries, count))
        frequencies[:, 1] = frequencies[:, 0] + rng.uniform(0.1, 2 * np.pi - 0.1, 2 * tries)
        weights = 0.5 / count + 0.5 * rng.dirichlet(np.ones(count), 2 * tries)
        factors = rotations(frequencies, weights, size)
        matrices = np.concatenate((_wishart(rng, tries, size, size), _toeplitz(rng, tries, size)))
        parts.append(_compared(matrices, matrices * factors))
        broken += [bounds_broken(*pair) for pair in zip(matrices, factors, strict=True)]
    for matrix in _toeplitz(rng, tries, 12):
        period = int(rng.integers(2, 5))
        frequencies = 2 * np.pi / period * np.arange(period)
        sparse = matrix * rotations(frequencies, np.full(period, 1 / period), 12)
        frequencies = frequencies if rng.random() < 0.5 else rng.uniform(0, 2 * np.pi, period)
        factor = rotations(frequencies, rng.dirichlet(np.ones(period)), 12)
        rare.append(_compared(sparse[None], (sparse * factor)[None]))
        broken.append(bounds_broken(sparse, factor))
    margins, special = _stacked(parts), _stacked(rare)
    return {
        "mean-outside": tally(np.concatenate((margins["outside"], special["outside"]))),
        "mean-condition": tally(np.concatenate((margins["condition"], special["condition"]))),
        "mean-narrower": tally(margins["wider"], beyond=-ROUNDING),
        "sparse-narrower": tally(special["wider"], beyond=-ROUNDING),
        "mean-kept": tally(broken),
    }


def _by_size(rng: np.random.Generator) -> dict[str, Any]:
    """Contraction by RoPE's Ē: N x 2N Wishart W by length and head width, and the example of theory section 5."""
    ratios, conditions, own = [], [], []
    for size in LENGTHS:
        matrix = _wishart(rng, 1, size, 2 * size)[0]
        before = np.linalg.eigvalsh(matrix)
        after = [np.linalg.eigvalsh(matrix * rope(head_dim, size)) for head_dim in HEAD_DIMS]
        ratios.append(short([np.ptp(values) / np.ptp(before) for values in after]))
        conditions.append(short([values[-1] / values[0] for values in after]))
        own.append(short(before[-1] / before[0]))
    square = _wishart(rng, 1, 64, 64)[0]
    return {
        "lengths": list(LENGTHS),
        "head_dims": list(HEAD_DIMS),
        "width_ratio": ratios,
        "condition": conditions,
        "condition_w": own,
        "example": {"w": short(np.linalg.eigvalsh(square)), "mean": short(np.linalg.eigvalsh(square * rope(16, 64)))},
    }


def _additive(rng: np.random.Generator, tries: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """W∘Ē (RoPE, d = 16) compared with W + sB, B positive definite Toeplitz with unit diagonal, and with B = cI - W."""
    size = 32
    toeplitz = _toeplitz(rng, tries, size)
    matrices, biases = np.concatenate((_wishart(rng, tries, size, size), toeplitz)), _toeplitz(rng, 2 * tries, size)
    largest = np.linalg.eigvalsh(toeplitz)[:, -1, None, None]
    others = {f"{scale:g}": matrices + scale * biases for scale in SCALES}
    others |= {"cancelling": toeplitz + (1.1 * largest * np.eye(size) - toeplitz)}
    own, product = np.linalg.eigvalsh(matrices), np.linalg.eigvalsh(matrices * rope(16, size))
    tallies, widths = {}, {"product": short(np.mean(np.ptp(product, axis=-1) / np.ptp(own, axis=-1)))}
    for name, summed in others.items():
        values = np.linalg.eigvalsh(summed)
        ours, before = product[-len(values) :], np.ptp(own[-len(values) :], axis=-1)
        width = np.ptp(values, axis=-1)
        tallies[f"additive-{name}"] = tally((np.ptp(ours, axis=-1) - width) / before, beyond=-ROUNDING)
        losses = values[:, 0] / values[:, -1] - ours[:, 0] / ours[:, -1]
        tallies[f"additive-condition-{name}"] = tally(losses, beyond=-ROUNDING)
        widths[name] = short(np.mean(width / before))
    return tallies, widths


def contraction(seed: int, *, tries: int = 200) -> dict[str, Any]:
    """The spectra of W, W∘E and W + B under every reading of Proposition B.3.

    Arguments
        seed   of all random instances and of the optimisation's starts
        tries  random instances for each size and kind, 20 or more

    Returns ``tallies`` by statement (`tally`); ``free``: by N, the shares of random instances outside and wider, the
    width ratios that the optimisation found and those of W = I + J with ψ_δ = π/2, which are 2 cot(π/2N)/N, the bound
    √(N/2), and a ``known`` and a ``found`` instance in full (`widest`); ``sizes``: width ratios and condition numbers
    by length and head width; ``additive``: mean widths of W∘Ē and of W + sB in units of W's.
    """
    rng = generator(seed, tries)
    free, curves = _free_phases(rng, tries)
    sums, widths = _additive(rng, tries)
    tallies = {**_one_frequency(rng, tries), **free, **_schur(rng, tries), **_many_frequencies(rng, tries), **sums}
    return {"seed": seed, "tallies": tallies, "free": curves, "sizes": _by_size(rng), "additive": widths}


_claim = ClaimsOn(
    "contraction",
    TALLIES,
    "A counterexample is an instance whose eigenvalues contradict it by over 1e-9 of their scale.",
)
_stated = partial(_claim, SOURCE)
_corrected = partial(_claim, f"{SOURCE}, corrected")
CLAIMS: tuple[Claim[Records], ...] = (
    _stated(
        "contraction",
        "For W, E positive (semi-)definite Toeplitz and |E_ij| = 1, the spectrum of W∘E is more compact than W's.",
        "No E is definite for N > 1. E is therefore read as semi-definite, which leaves one frequency. Supporting: E "
        "with free phases, as in the proof.",
        ("one-narrower",),
        supporting=("free-outside",),
    ),
    _stated(
        "contraction-modulus",
        "By Schur's inequality no eigenvalue of W∘E has a larger modulus than the largest of W.",
        "For the same two readings of E.",
        ("one-modulus",),
        supporting=("free-modulus",),
    ),
    _stated(
        "contraction-condition",
        "The product lowers the condition number (section 3.3).",
        "For the same two readings of E.",
        ("one-condition",),
        supporting=("free-condition",),
    ),
    _corrected(
        "contraction-same",
        "For E positive semi-definite with all |E_ij| = 1, W∘E has the same eigenvalues as W.",
        "Proved: W∘E = D W D^H with D diagonal and unitary.",
        ("one-same",),
    ),
    _corrected(
        "contraction-free",
        "For E Hermitian Toeplitz with all |E_ij| = 1, width(W∘E) <= √(N/2) width(W).",
        "Proved in this module; an optimisation looks for the widest.",
        ("free-bound",),
    ),
    _corrected(
        "contraction-schur",
        "For W, E positive semi-definite and E_ii = 1, λ_min(W) <= λ(W∘E) <= λ_max(W).",
        "Schur's theorem.",
        ("schur-outside",),
    ),
    _corrected(
        "contraction-corrected",
        "A mean Ē over frequencies keeps the spectrum within W's, and narrows it to the extent that it breaks up W's "
        "extreme eigenspaces.",
        "Proved in this module, with the bounds by c = λ_max(P∘Ē).",
        ("mean-outside", "mean-kept"),
    ),
    _corrected(
        "contraction-strict",
        "With two different frequencies W∘Ē is strictly narrower than a random W, but not necessarily narrower than a "
        "Toeplitz W with entries on every m-th diagonal only.",
        "Random W: N > 2, two frequencies at least 0.1 apart, weights at least 1/16; m = 2, 3, 4. The second part "
        "holds if a counterexample to its opposite is found.",
        ("mean-narrower",),
        refuted=("sparse-narrower",),
    ),
    _corrected(
        "contraction-condition-corrected",
        "A mean Ē over frequencies does not raise the condition number.",
        "Follows from Schur's theorem.",
        ("mean-condition",),
    ),
    _claim(
        "arXiv 2505.13027 v1, section 3.3",
        "contraction-against-additive",
        "The product has a tighter spectrum than the sum W + B with a positive definite Toeplitz B.",
        "The product is W∘Ē. The paper gives no scale for B: with W's diagonal near 1, random sB with s = 0.1 or 10 is "
        "tested, and B = cI - W. Tighter means narrower. Supporting: the condition number.",
        [f"additive-{name}" for name in _ADDED],
        supporting=[f"additive-condition-{name}" for name in _ADDED],
    ),
)
