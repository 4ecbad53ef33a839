"""Can the position component be extracted, and is it a curve? (arXiv 2505.13027 v1, Appendix C.4)

The planted components are known, so each statement can be tested. Position vectors p_i come from the absolute
encodings, words w_v are drawn as a fresh `torch.nn.Embedding` draws them, heads are given by their logits. What holds:

- Orthogonality is sufficient for a linear separation, not necessary: where the two spans share 0 alone, the oblique
  projection on one along the other is exact. With as many independent words as dimensions they always share more; the
  best linear map, min over M of E|(w + p) M - p|^2, then has an error. Both tables are finite, so that a search for
  the pair (v, i) still finds it.
- The Levinson recursion finds the position kernel where the logits' Toeplitz part is an autocorrelation. Content
  that query and key share adds |c_i|^2 at offset 0 alone, a white noise; two different projections of position make
  the kernel indefinite.
- One logit matrix fits a positional head and one that reads content; a permutation of the tokens tells them apart.
- C.4 calls absolute position encoding f(g(i)), g a continuous curve on a torus and f an embedding. Any points p_0, p_1,
  .. lie on such a curve, so the form alone says nothing. What can be asked is whether the positions resolve it: whether
  a position's neighbours tell it (`neighbour_error`), and whether a few neighbours need fewer dimensions than points in
  no order would (`curve_dimension`), though all together span many more. The tables as they are drawn are asked here,
  those that models have learned among the heads' records.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.random import Generator, Philox
from scipy.linalg import cholesky, orthogonal_procrustes, solve_banded, toeplitz

from toeplens.encodings import build
from toeplens.lens.kit.position import position_means
from toeplens.lens.stream import curve_dimension, neighbour_error, position_subspace
from toeplens.papers.mathematics.levinson import linear_predictor, prony_frequencies
from toeplens.papers.mathematics.statements import (
    Experiment,
    Record,
    Records,
    Sizes,
    relative_error,
    round_values,
    statements_of,
    universal_finding,
)
from toeplens.studies.kit.verdicts import Finding, below, difference, unknown_finding
from toeplens.utils import InputError

ENCODINGS = ("sinusoidal", "learned", "random-fixed")
Table = Float[np.ndarray, "N D"]


def linear_error(p: Float[np.ndarray, "N D"], words: Float[np.ndarray, "V D"]) -> float:
    """Relative error of the best linear map M from sums w_v + p_i to p_i, over all pairs (v, i), both tables centred.

    The minimum of sqrt(E|(w + p) M - p|^2 / E|p|^2): 0 up to rounding if the two spans share only 0, at most 1. As v
    and i are independent, E|(w + p) M - p|^2 = E|w M|^2 + E|p M - p|^2. Nan if p has no variance.
    """
    position, word = ((x - x.mean(0)) / np.sqrt(len(x)) for x in (p, words))
    design, target = np.concatenate((position, word)), np.concatenate((position, np.zeros_like(word)))
    residual = design @ np.linalg.lstsq(design, target, rcond=None)[0] - target
    with np.errstate(invalid="ignore"):
        return float(np.linalg.norm(residual) / np.linalg.norm(position))


def position_table(encoding: str, width: int, length: int, seed: int) -> Table:
    """The position vectors of an untrained absolute encoding, float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        table = build(encoding, d_model=width, num_heads=1, head_dim=width, max_len=length)
    zeros = torch.zeros(1, length, width, dtype=torch.float64)
    return table.embed(zeros, torch.arange(length))[0].detach().numpy()


# ---- extraction from planted models ---------------------------------------------------------------------------------

WIDTHS, VOCABULARIES = (64, 256), (8, 64, 574)
POSITIONS = 128
ORDER = 4
CONTENT_SIZES = (0.0, 0.1, 0.3, 1.0, 3.0)  # sizes of content against position
DRAWS = 16
TEXTS = 64


def _estimators(
    seed: int, *, widths: Sizes = WIDTHS, vocabularies: Sizes = VOCABULARIES, draws: int = DRAWS, texts: int = TEXTS
) -> Record:
    """``spans`` (a row for each encoding, width and vocabulary); ``levinson``: median error of predictors and of
    frequencies over ``draws`` heads each, by kind and size of their content; ``definite``: share of heads without
    content, but with random W_Q and W_K, whose kernel could be an autocorrelation; ``pair`` (`_head_pair`)."""
    rng = Generator(Philox(seed))
    spans = [_spans(*case, seed, rng) for case in product(ENCODINGS, widths, vocabularies)]
    processes, sinusoids = ([make(rng) for _ in range(draws)] for make in (_autoregression, _sinusoids))
    levinson: dict[str, Any] = {
        "sizes": list(CONTENT_SIZES),
        "recovered": [_position_error(diagonal_means(p @ p.T), p, angles) for p, angles in sinusoids],
    }

    def median_error(name: str, kind: str, size: float, heads: Any) -> float:
        means = ((diagonal_means(_logits(p, size, kind, rng)), planted) for p, planted in heads)
        return float(np.median([_kernel_error(name, *pair) for pair in means]))

    for kind in ("own", "shared"):
        levinson[kind] = {
            name: [median_error(name, kind, size, heads) for size in CONTENT_SIZES]
            for name, heads in (("predictor", processes), ("frequencies", sinusoids))
        }
    definite = []
    for _ in range(draws):
        p, angles = _sinusoids(rng)
        logits = p @ rng.normal(size=(p.shape[1], p.shape[1])) @ p.T
        kernel = diagonal_means((logits + logits.T) / 2)[: 2 * len(angles)]
        definite.append(np.linalg.eigvalsh(toeplitz(kernel))[0] > 0)
    return {"spans": spans, "levinson": levinson, "definite": float(np.mean(definite)), "pair": _head_pair(rng, texts)}


def _spans(encoding: str, width: int, vocabulary: int, seed: int, rng: Generator) -> Record:
    """Angles between position and word vectors, and the error of each method of separating their sums; ``lookup`` is
    the share of 64 random sums w_v + p_i of which the nearest sum is that of the same v and i."""
    p, words = position_table(encoding, width, POSITIONS, seed), rng.normal(size=(vocabulary, width))
    subspace = position_subspace(p, words, energy=1)
    oblique = None
    if subspace.separable:
        separated = subspace.separate(p[:, None] + words[:8])[0]
        oblique = relative_error(separated - p[:, None], np.stack([p - p.mean(0)] * 8))
    v, i = rng.integers(vocabulary, size=64), rng.integers(len(p), size=64)
    sums = np.sum(words**2, 1)[:, None] + np.sum(p**2, 1) + 2 * words @ p.T  # |w + p|^2, [V, N]
    nearest = [np.argmin(sums - 2 * ((words @ row)[:, None] + p @ row)) for row in words[v] + p[i]]
    return {
        "encoding": encoding,
        "width": width,
        "vocabulary": vocabulary,
        **{name: getattr(subspace, name) for name in ("rank", "word_rank", "overlap", "chance", "separable")},
        "least_angle": float(subspace.angles[0]),
        "oblique_error": oblique,
        "linear_error": linear_error(p, words),
        "lookup": float(np.mean(np.array(nearest) == v * len(p) + i)),
    }


def _kernel_error(name: str, means: Float[np.ndarray, "N"], planted: Float[np.ndarray, "m"]) -> float:
    """Relative error of the predictor or of the frequencies from a kernel; infinite if the kernel is rejected."""
    order = len(planted)
    try:
        if name == "predictor":
            return relative_error(linear_predictor(means[: order + 1], order).coefficients - planted, planted)
        return relative_error(prony_frequencies(means, order) - planted, planted)
    except InputError:
        return np.inf


def _autoregression(rng: Generator) -> tuple[Table, Float[np.ndarray, "m"]]:
    """Vectors of length 1 whose Gram matrix is the autocorrelation of a random x_i = sum of c_k x_(i-k) + noise; c."""
    poles = rng.uniform(0.5, 0.9, ORDER // 2) * np.exp(1j * rng.uniform(0.2, np.pi - 0.2, ORDER // 2))
    polynomial = np.real(np.poly(np.concatenate((poles, poles.conj()))))
    response = _recursion(polynomial, np.eye(1, 1024))[0]
    kernel = np.correlate(response, response, "full")[1023 : 1023 + POSITIONS]
    return cholesky(toeplitz(kernel / kernel[0]), lower=True), -polynomial[1:]


def _recursion(polynomial: Float[np.ndarray, "m1"], noise: Float[np.ndarray, "*B M"]) -> Float[np.ndarray, "*B M"]:
    """x with sum over k of polynomial_k x_(i-k) = noise_i, starting from 0."""
    bands = np.repeat(polynomial[:, None], noise.shape[-1], 1)
    solution = solve_banded((len(polynomial) - 1, 0), bands, noise.reshape(-1, noise.shape[-1]).T)
    return solution.T.reshape(noise.shape)


def _sinusoids(rng: Generator) -> tuple[Table, Float[np.ndarray, "m"]]:
    """Position vectors (A_t cos i theta_t, A_t sin i theta_t) of length 1, and their three frequencies, rising."""
    angles = np.cumsum(rng.uniform(0.3, 0.9, 3))
    return _circles(np.sqrt(rng.dirichlet(np.full(3, 5.0))), angles), angles


def _circles(amplitudes: Float[np.ndarray, "m"], angles: Float[np.ndarray, "m"]) -> Table:
    phases = np.arange(POSITIONS)[:, None] * angles
    return np.concatenate((amplitudes * np.cos(phases), amplitudes * np.sin(phases)), axis=1)


def _logits(p: Table, size: float, kind: str, rng: Generator) -> Float[np.ndarray, "N N"]:
    """(p_i + a_i).(p_j + b_j) with as many dimensions as positions; |a_i| and |b_j| near ``size``, a = b if shared."""
    position = np.pad(p, ((0, 0), (0, POSITIONS - p.shape[1])))
    content = rng.normal(size=(2, POSITIONS, POSITIONS)) * size / np.sqrt(POSITIONS)
    return (position + content[0]) @ (position + content[0 if kind == "shared" else 1]).T


def diagonal_means(logits: Float[np.ndarray, "N N"]) -> Float[np.ndarray, "N"]:
    """The means of the diagonals delta = 0, ..., N - 1 on and below the main one."""
    return np.array([np.diagonal(logits, -delta).mean() for delta in range(len(logits))])


def _position_error(means: Float[np.ndarray, "N"], p: Table, angles: Float[np.ndarray, "m"]) -> float:
    """Relative error of position vectors rebuilt from a kernel, up to a rotation, which no Gram matrix determines."""
    estimated = prony_frequencies(means, len(angles))
    powers = np.linalg.lstsq(np.cos(np.arange(POSITIONS)[:, None] * estimated), means, rcond=None)[0]
    rebuilt = _circles(np.sqrt(np.clip(powers, 0, None)), estimated)
    return relative_error(rebuilt @ orthogonal_procrustes(rebuilt, p)[0] - p, p)


def _head_pair(rng: Generator, texts: int) -> Record:
    """A positional and a content head, on sequences for which their logits agree.

    ``single_gap`` on one text, ``means_gap`` in the mean diagonals of several texts of stationary content,
    ``extraction_gap`` between the medians and the means of one matrix's diagonals. For each head, correlations after a
    permutation of the tokens with the logits that ``stay`` and with those that ``move``, and the share of its
    vectors' energy that the position means over texts hold.
    """
    p, planted = _autoregression(rng)
    off_diagonal = ~np.eye(POSITIONS, dtype=bool)
    words = p @ np.linalg.qr(rng.normal(size=(POSITIONS, POSITIONS)))[0]  # the text has word i at place i
    order = rng.permutation(POSITIONS)
    positional, content, permuted = p @ p.T, words @ words.T, words[order] @ words[order].T
    noise = rng.normal(size=(texts, POSITIONS, POSITIONS + 256))  # the first 256 steps forget the start
    x = _recursion(np.concatenate(([1.0], -planted)), noise)[..., 256:].transpose(0, 2, 1)
    x = x / np.linalg.norm(x) * np.sqrt(texts * POSITIONS)
    kernel, mean_kernel = p @ p[0], diagonal_means(np.mean(x @ x.transpose(0, 2, 1), 0))
    mixed = positional + np.exp(rng.normal(size=positional.shape))
    medians = np.array([np.median(np.diagonal(mixed, -delta)) for delta in range(POSITIONS)])
    record: dict[str, Any] = {
        "single_gap": relative_error(content - positional, positional),
        "means_gap": relative_error(mean_kernel - kernel, kernel),
        "extraction_gap": relative_error(medians - diagonal_means(mixed), medians),
    }
    heads = {"positional": (positional, positional, np.stack([p] * texts)), "content": (content, permuted, x)}
    for name, (before, after, vectors) in heads.items():
        means = np.stack([position_means(torch.from_numpy(vectors))[1]] * texts)
        record[name] = {
            "stay": float(np.corrcoef(before[off_diagonal], after[off_diagonal])[0, 1]),
            "move": float(np.corrcoef(before[np.ix_(order, order)][off_diagonal], after[off_diagonal])[0, 1]),
            "position_share": relative_error(means, vectors) ** 2,
        }
    return record


EXACT_ERROR = 1e-6  # a relative error below this is rounding
RIGHT_ANGLE = 90 - EXACT_ERROR  # degrees
LARGE_ERROR = 0.1  # a relative error above this is none
COMPARED_SIZE = 0.3  # the size of content against position at which own and shared content are compared
MAX_OVERLAP = 0.5  # of the words' share in the positions' span by chance: less is nearer to orthogonal than to chance


def _is_below(error: float | None, threshold: float) -> bool:
    """Whether an error is below a threshold; False for None (infinite errors in JSON)."""
    return error is not None and error < threshold


def _not_orthogonal(records: Records) -> list[Finding]:
    findings = []
    for encoding in ENCODINGS:
        rows = [row for run in records["estimators"] for row in run["spans"] if row["encoding"] == encoding]
        ratios = [row["overlap"] / row["chance"] for row in rows] or [np.nan]
        statement = f"{encoding}: the share of the words' variance in the positions' span is that of chance"
        worst = f"at least {min(ratios):.2f} times chance, mean {np.mean(ratios):.2f}"
        violations = sum(ratio <= MAX_OVERLAP for ratio in ratios)
        findings.append(universal_finding(statement, tried=len(rows), violations=violations, worst=worst))
    return findings


def _no_subspace(records: Records) -> list[Finding]:
    rows = [row for run in records["estimators"] for row in run["spans"] if row["least_angle"] < RIGHT_ANGLE]
    exact = [row for row in rows if _is_below(row["oblique_error"], EXACT_ERROR)]
    worst = "none is separated"
    if exact:
        row = min(exact, key=lambda row: row["least_angle"])
        error, words = f"relative error {row['oblique_error']:.1e}", f"{row['vocabulary']} words"
        worst = f"{row['encoding']}, {words} in {row['width']}: least angle {row['least_angle']:.1f}°, {error}"
    statement = "no linear projection separates position from words that are not orthogonal to it"
    return [universal_finding(statement, tried=len(rows), violations=len(exact), worst=worst)]


def _separable(records: Records) -> list[Finding]:
    rows = [row for run in records["estimators"] for row in run["spans"]]
    largest_separable = max((row["linear_error"] for row in rows if row["separable"]), default=np.nan)
    least_inseparable = min((row["linear_error"] for row in rows if not row["separable"]), default=np.nan)
    share = min((row["lookup"] for row in rows), default=np.nan)
    return [
        universal_finding(
            "the best linear map is exact if and only if the spans share only 0",
            tried=len(rows),
            violations=sum(row["separable"] != _is_below(row["linear_error"], EXACT_ERROR) for row in rows),
            worst=f"error at most {largest_separable:.1e} if they do, at least {least_inseparable:.2f} otherwise",
        ),
        universal_finding(
            "the nearest sum of a word and a position identifies both",
            tried=len(rows),
            violations=sum(row["lookup"] < 1 for row in rows),
            worst=f"a share of at least {share:.2f}",
        ),
    ]


def _properties(run: Record) -> dict[str, bool]:
    """Whether a record has the properties of statements.yaml."""
    levinson, pair, index = run["levinson"], run["pair"], CONTENT_SIZES.index(COMPARED_SIZE)
    ideal = {name: [levinson[kind][name][0] for kind in ("own", "shared")] for name in ("predictor", "frequencies")}
    position, content = pair["positional"], pair["content"]
    return {
        **{name: all(_is_below(error, EXACT_ERROR) for error in errors) for name, errors in ideal.items()},
        "vectors": all(_is_below(error, EXACT_ERROR) for error in levinson["recovered"]),
        "shared": not _is_below(levinson["shared"]["predictor"][index], LARGE_ERROR),
        "separate": _is_below(levinson["own"]["predictor"][index], LARGE_ERROR),
        "indefinite": run["definite"] < 0.5,
        "one-matrix": _is_below(pair["single_gap"], EXACT_ERROR),
        "mean-diagonals": _is_below(pair["means_gap"], LARGE_ERROR),
        "permutation": position["stay"] - position["move"] > 0.5 and content["move"] - content["stay"] > 0.5,
        "position-means": position["position_share"] - content["position_share"] > 0.5,
        "extraction": not _is_below(pair["extraction_gap"], LARGE_ERROR),
    }


def _in_all(name: str, statement: str, records: Records) -> list[Finding]:
    """Whether every seed's record has a property."""
    results = [_properties(run)[name] for run in records["estimators"]]
    if not results:
        return [unknown_finding(statement, "no record qualifies")]
    return [Finding("holds" if all(results) else "fails", f"{statement}: in {sum(results)} of {len(results)} seeds")]


estimators = Experiment(
    "estimators",
    _estimators,
    {
        "not-orthogonal": _not_orthogonal,
        "no-subspace": _no_subspace,
        "separable": _separable,
        **{name: partial(_in_all, name, each["says"]) for name, each in statements_of("estimators").items()},
    },
)

# ---- the curve ------------------------------------------------------------------------------------------------------

CURVE_WIDTHS, LENGTHS = (16, 64, 256), (24, 128, 512)
WINDOW = 8
PREDICTED_ERROR = 0.5  # neighbour error below which neighbours explain three quarters of a position's variance
UNPREDICTED_ERROR = 1.0  # neighbour error at which neighbours explain no more than the mean of all positions
MAX_LOCAL_RANK = (WINDOW - 1) / 2  # dimensions: points in no order need WINDOW - 1


def measure_curve(p: Table) -> Record:
    """Measures of a position table: ``neighbour_error``, ``local_rank`` (of `WINDOW` positions), ``rank``."""
    dimension = curve_dimension(p, window=WINDOW)
    return {
        "neighbour_error": round_values(neighbour_error(p)),
        "local_rank": round_values(dimension.local_rank),
        "rank": dimension.rank,
    }


def _manifold(seed: int, *, widths: Sizes = CURVE_WIDTHS, lengths: Sizes = LENGTHS) -> Record:
    """``tables``: a row for each untrained encoding, width and length."""
    return {
        "tables": [
            {
                "encoding": encoding,
                "width": width,
                "length": length,
                **measure_curve(position_table(encoding, width, length, seed)),
            }
            for encoding, width, length in product(ENCODINGS, widths, lengths)
        ]
    }


def _on_tables(encoding: str, property_: str, records: Records) -> list[Finding]:
    """A statement about the tables of an untrained encoding: ``told`` by neighbours, not so, or locally ``thin``."""
    rows = [row for run in records["manifold"] for row in run["tables"] if row["encoding"] == encoding]
    errors, ranks = ([row[name] for row in rows] or [np.nan] for name in ("neighbour_error", "local_rank"))
    statement, violations, worst = {
        "told": (
            ": a position is predicted by its neighbours",
            sum(error >= PREDICTED_ERROR for error in errors),
            f"largest error {max(errors):.2f}, threshold {PREDICTED_ERROR:g}",
        ),
        "untold": (
            ", untrained: neighbours predict a position no better than the mean of all positions",
            sum(error < UNPREDICTED_ERROR for error in errors),
            f"smallest error {min(errors):.2f}, threshold {UNPREDICTED_ERROR:g}",
        ),
        "thin": (
            f": {WINDOW} neighbours need few dimensions, and all positions need more",
            sum(row["local_rank"] > min(MAX_LOCAL_RANK, row["rank"] - 1) for row in rows),
            f"at most {max(ranks):.2f} of {WINDOW - 1}, threshold {MAX_LOCAL_RANK:g}",
        ),
    }[property_]
    return [universal_finding(f"{encoding}{statement}", tried=len(rows), violations=violations, worst=worst)]


def _learned_values(records: Records, state: str, field: str = "neighbour_error") -> list[float]:
    """One number per model with a learned table."""
    models = [run.get(f"learned {state}", {}) for run in records["heads"]]
    return [model["curve"][field] for model in models if "curve" in model]


def _learned_below(text: str, field: str, threshold: float, records: Records) -> list[Finding]:
    return [below(f"a learned table after training: {text}", _learned_values(records, "trained", field), threshold)]


def _neighbour_gain(records: Records) -> list[Finding]:
    change = difference(_learned_values(records, "trained"), _learned_values(records, "untrained"))
    return [below("a learned table: neighbour error after training − before", change, 0.0)]


manifold = Experiment(
    "manifold",
    _manifold,
    {
        **{f"told-{encoding}": partial(_on_tables, encoding, "told") for encoding in ENCODINGS},
        **{f"untold-{encoding}": partial(_on_tables, encoding, "untold") for encoding in ENCODINGS},
        "thin": partial(_on_tables, "sinusoidal", "thin"),
        "learned-told": partial(_learned_below, "neighbour error", "neighbour_error", PREDICTED_ERROR),
        "learned-better": partial(_learned_below, "neighbour error", "neighbour_error", UNPREDICTED_ERROR),
        "learned-thin": partial(_learned_below, f"dimensions of {WINDOW} neighbours", "local_rank", MAX_LOCAL_RANK),
        "gained": _neighbour_gain,
    },
)
