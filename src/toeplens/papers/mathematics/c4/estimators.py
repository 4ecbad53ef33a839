"""Can the position component be extracted? The statements of arXiv 2505.13027 v1, Appendix C.4, on planted models.

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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.linalg import cholesky, orthogonal_procrustes, solve_banded, toeplitz

from toeplens.encodings import build
from toeplens.ground import InputError
from toeplens.lens.kit.position import position_means
from toeplens.lens.stream import position_subspace
from toeplens.papers.mathematics.c4.levinson import frequencies, predictor
from toeplens.papers.mathematics.records import UNIVERSAL, Record, Records, in_all, relative_error, universal
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.verdicts import Finding, opposite, supporting

ENCODINGS = ("sinusoidal", "learned", "random-fixed")
WIDTHS, VOCABULARIES = (64, 256), (8, 64, 574)
POSITIONS = 128
ORDER = 4
SIZES = (0.0, 0.1, 0.3, 1.0, 3.0)  # of content against position
DRAWS = 16
TEXTS = 64


def estimators(seed: int) -> dict[str, Any]:
    """Test the statements of C.4 on planted models; takes a few seconds.

    Returns ``spans`` (a row for each encoding, width and vocabulary), ``levinson`` (errors of the recursion, by kind
    and size of the content), ``definite`` (`_projections`) and ``pair`` (`_pair`).
    """
    rng = np.random.Generator(np.random.Philox(seed))
    spans = [_spans(*case, seed, rng) for case in product(ENCODINGS, WIDTHS, VOCABULARIES)]
    return {"spans": spans, "levinson": _levinson(rng), "definite": _projections(rng), "pair": _pair(rng)}


def linear_error(p: Float[np.ndarray, "N D"], words: Float[np.ndarray, "V D"]) -> float:
    """Relative error of the best linear map M from sums w_v + p_i to p_i, over all pairs (v, i), both tables centred.

    The minimum of sqrt(E|(w + p) M - p|^2 / E|p|^2): 0 up to rounding if the two spans share only 0, at most 1. As v
    and i are independent, E|(w + p) M - p|^2 = E|w M|^2 + E|p M - p|^2. Nan if p has no variance.
    """
    position, word = ((x - x.mean(0)) / np.sqrt(len(x)) for x in (p, words))
    design, wanted = np.concatenate((position, word)), np.concatenate((position, np.zeros_like(word)))
    rest = design @ np.linalg.lstsq(design, wanted, rcond=None)[0] - wanted
    with np.errstate(invalid="ignore"):
        return float(np.linalg.norm(rest) / np.linalg.norm(position))


def _spans(encoding: str, width: int, vocabulary: int, seed: int, rng: np.random.Generator) -> dict[str, Any]:
    """Angles between position and word vectors, and the error of each method of separating their sums."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        table = build(encoding, d_model=width, num_heads=1, head_dim=width, max_len=POSITIONS)
    zeros = torch.zeros(1, POSITIONS, width, dtype=torch.float64)
    p = table.embed(zeros, torch.arange(POSITIONS))[0].detach().numpy()
    words = rng.normal(size=(vocabulary, width))
    found = position_subspace(p, words, energy=1)
    oblique = None
    if found.separable:
        oblique = relative_error(found.separate(p[:, None] + words[:8])[0] - p[:, None], np.stack([p - p.mean(0)] * 8))
    return {
        "encoding": encoding,
        "width": width,
        "vocabulary": vocabulary,
        **{name: getattr(found, name) for name in ("rank", "word_rank", "overlap", "chance", "separable")},
        "least_angle": float(found.angles[0]),
        "oblique_error": oblique,
        "linear_error": linear_error(p, words),
        "lookup": _lookup(p, words, rng),
    }


def _lookup(p: Float[np.ndarray, "N D"], words: Float[np.ndarray, "V D"], rng: np.random.Generator) -> float:
    """Share of 64 random sums w_v + p_i of which the nearest sum is that of the same v and i."""
    v, i = rng.integers(len(words), size=64), rng.integers(len(p), size=64)
    x = words[v] + p[i]
    sums = np.sum(words**2, 1)[:, None] + np.sum(p**2, 1) + 2 * words @ p.T  # |w + p|^2, [V, N]
    nearest = [np.argmin(sums - 2 * ((words @ row)[:, None] + p @ row)) for row in x]
    return float(np.mean(np.array(nearest) == v * len(p) + i))


# ---- the Levinson recursion ------------------------------------------------------------------------------------------


def _levinson(rng: np.random.Generator) -> dict[str, Any]:
    """Median error of predictors and of frequencies over `DRAWS` heads each, by kind and size of their content."""
    processes = [_autoregression(rng) for _ in range(DRAWS)]
    sinusoids = [_sinusoids(rng) for _ in range(DRAWS)]
    record: dict[str, Any] = {
        "sizes": list(SIZES),
        "recovered": [_recovered(diagonal_means(p @ p.T), p, angles) for p, angles in sinusoids],
    }
    for kind in ("own", "shared"):
        record[kind] = {
            name: [
                float(np.median([_error(name, diagonal_means(_logits(p, size, kind, rng)), plan) for p, plan in heads]))
                for size in SIZES
            ]
            for name, heads in (("predictor", processes), ("frequencies", sinusoids))
        }
    return record


def _error(name: str, means: Float[np.ndarray, "N"], planted: Float[np.ndarray, "m"]) -> float:
    """Relative error of the predictor or of the frequencies from a kernel; infinite if the kernel is rejected."""
    order = len(planted)
    try:
        if name == "predictor":
            return relative_error(predictor(means[: order + 1], order).coefficients - planted, planted)
        return relative_error(frequencies(means, order) - planted, planted)
    except InputError:
        return np.inf


def _autoregression(rng: np.random.Generator) -> tuple[Float[np.ndarray, "N D"], Float[np.ndarray, "m"]]:
    """Vectors of length 1 whose Gram matrix is the autocorrelation of a random x_i = sum of c_k x_(i-k) + noise; c."""
    poles = rng.uniform(0.5, 0.9, ORDER // 2) * np.exp(1j * rng.uniform(0.2, np.pi - 0.2, ORDER // 2))
    polynomial = np.real(np.poly(np.concatenate((poles, poles.conj()))))
    response = _recursion(polynomial, np.eye(1, 1024))[0]
    kernel = np.correlate(response, response, "full")[1023 : 1023 + POSITIONS]
    return cholesky(toeplitz(kernel / kernel[0]), lower=True), -polynomial[1:]


def _recursion(polynomial: Float[np.ndarray, "m1"], noise: Float[np.ndarray, "*B M"]) -> Float[np.ndarray, "*B M"]:
    """x with sum over k of polynomial_k x_(i-k) = noise_i, starting from 0."""
    bands = np.repeat(polynomial[:, None], noise.shape[-1], 1)
    found = solve_banded((len(polynomial) - 1, 0), bands, noise.reshape(-1, noise.shape[-1]).T)
    return found.T.reshape(noise.shape)


def _sinusoids(rng: np.random.Generator) -> tuple[Float[np.ndarray, "N D"], Float[np.ndarray, "m"]]:
    """Position vectors (A_t cos i theta_t, A_t sin i theta_t) of length 1, and their three frequencies, rising."""
    angles = np.cumsum(rng.uniform(0.3, 0.9, 3))
    return _circles(np.sqrt(rng.dirichlet(np.full(3, 5.0))), angles), angles


def _circles(amplitudes: Float[np.ndarray, "m"], angles: Float[np.ndarray, "m"]) -> Float[np.ndarray, "N D"]:
    phases = np.arange(POSITIONS)[:, None] * angles
    return np.concatenate((amplitudes * np.cos(phases), amplitudes * np.sin(phases)), axis=1)


def _logits(p: Float[np.ndarray, "N D"], size: float, kind: str, rng: np.random.Generator) -> Float[np.ndarray, "N N"]:
    """(p_i + a_i).(p_j + b_j) with as many dimensions as positions; |a_i| and |b_j| near ``size``, a = b if shared."""
    position = np.pad(p, ((0, 0), (0, POSITIONS - p.shape[1])))
    own = rng.normal(size=(2, POSITIONS, POSITIONS)) * size / np.sqrt(POSITIONS)
    return (position + own[0]) @ (position + own[0 if kind == "shared" else 1]).T


def diagonal_means(logits: Float[np.ndarray, "N N"]) -> Float[np.ndarray, "N"]:
    """The means of the diagonals delta = 0, ..., N - 1 on and below the main one."""
    return np.array([np.diagonal(logits, -delta).mean() for delta in range(len(logits))])


def _recovered(means: Float[np.ndarray, "N"], p: Float[np.ndarray, "N D"], angles: Float[np.ndarray, "m"]) -> float:
    """Relative error of position vectors rebuilt from a kernel, up to a rotation, which no Gram matrix determines."""
    found = frequencies(means, len(angles))
    powers = np.linalg.lstsq(np.cos(np.arange(POSITIONS)[:, None] * found), means, rcond=None)[0]
    rebuilt = _circles(np.sqrt(np.clip(powers, 0, None)), found)
    return relative_error(rebuilt @ orthogonal_procrustes(rebuilt, p)[0] - p, p)


def _projections(rng: np.random.Generator) -> float:
    """Share of heads without content, but with random W_Q and W_K, whose kernel could be an autocorrelation."""
    definite = []
    for _ in range(DRAWS):
        p, angles = _sinusoids(rng)
        logits = p @ rng.normal(size=(p.shape[1], p.shape[1])) @ p.T
        kernel = diagonal_means((logits + logits.T) / 2)[: 2 * len(angles)]
        definite.append(np.linalg.eigvalsh(toeplitz(kernel))[0] > 0)
    return float(np.mean(definite))


# ---- a positional and a content head with the same logits ------------------------------------------------------------


def _pair(rng: np.random.Generator) -> dict[str, Any]:
    """A positional and a content head, on sequences for which their logits agree.

    ``single_gap`` on one text, ``means_gap`` in the mean diagonals of `TEXTS` texts of stationary content,
    ``extraction_gap`` between the medians and the means of one matrix's diagonals. For each head, correlations after a
    permutation of the tokens with the logits that ``stay`` and with those that ``move``, and the share of its
    vectors' energy that the position means over texts hold.
    """
    p, planted = _autoregression(rng)
    off = ~np.eye(POSITIONS, dtype=bool)
    words = p @ np.linalg.qr(rng.normal(size=(POSITIONS, POSITIONS)))[0]  # the text has word i at place i
    order = rng.permutation(POSITIONS)
    kernel = p @ p[0]
    positional, content, permuted = p @ p.T, words @ words.T, words[order] @ words[order].T
    noise = rng.normal(size=(TEXTS, POSITIONS, POSITIONS + 256))  # the first 256 steps forget the start
    texts = _recursion(np.concatenate(([1.0], -planted)), noise)[..., 256:].transpose(0, 2, 1)
    texts = texts / np.linalg.norm(texts) * np.sqrt(TEXTS * POSITIONS)
    mixed = positional + np.exp(rng.normal(size=positional.shape))
    medians = np.array([np.median(np.diagonal(mixed, -delta)) for delta in range(POSITIONS)])
    record: dict[str, Any] = {
        "single_gap": relative_error(content - positional, positional),
        "means_gap": relative_error(diagonal_means(np.mean(texts @ texts.transpose(0, 2, 1), 0)) - kernel, kernel),
        "extraction_gap": relative_error(medians - diagonal_means(mixed), medians),
    }
    for name, before, after, x in (
        ("positional", positional, positional, np.stack([p] * TEXTS)),
        ("content", content, permuted, texts),
    ):
        record[name] = {
            "stay": float(np.corrcoef(before[off], after[off])[0, 1]),
            "move": float(np.corrcoef(before[np.ix_(order, order)][off], after[off])[0, 1]),
            "position_share": relative_error(np.stack([position_means(torch.from_numpy(x))[1]] * TEXTS), x) ** 2,
        }
    return record


EXACT = 1e-6  # a relative error below this is rounding
SQUARE = 90 - EXACT  # degrees
CLEAR = 0.1  # a relative error above this is none
NOTICED = 0.3  # the size of content against position at which own and shared content are compared
TURNED = 0.5  # of what chance puts of the words into the positions' span: less is nearer to orthogonal than to chance

_SOURCE = "arXiv 2505.13027 v1, Appendix C.4"


def _rows(records: Records) -> list[Record]:
    return [row for run in records.get("estimators", ()) for row in run["spans"]]


def _judged(*parts: tuple[str, Callable[[Record], bool]]) -> Callable[[Records], list[Finding]]:
    """A check of properties that each seed's record must have."""
    return lambda records: [
        in_all(what, [shows(run) for run in records.get("estimators", ())]) for what, shows in parts
    ]


def _under(error: float | None, bar: float) -> bool:
    """Whether an error is below a threshold; False for None (infinite errors in JSON)."""
    return error is not None and error < bar


def _every(what: str, rows: Sequence[Record], breaks: Callable[[Record], bool], worst: str) -> Finding:
    """A statement about all rows, with a predicate for counterexamples."""
    return universal(what, tried=len(rows), violations=sum(map(breaks, rows)), worst=worst)


def _not_orthogonal(records: Records) -> list[Finding]:
    findings = []
    for encoding in ENCODINGS:
        own = [row for row in _rows(records) if row["encoding"] == encoding]
        ratios = [row["overlap"] / row["chance"] for row in own]
        worst = f"at least {min(ratios, default=np.nan):.2f} times chance, mean {np.mean(ratios or [np.nan]):.2f}"
        what = f"{encoding}: the share of the words' variance in the positions' span is that of chance"
        findings.append(_every(what, own, lambda row: not row["overlap"] / row["chance"] > TURNED, worst))
    return findings


def _no_subspace(records: Records) -> list[Finding]:
    rows = [row for row in _rows(records) if row["least_angle"] < SQUARE]
    exact = [row for row in rows if _under(row["oblique_error"], EXACT)]
    worst = "none is separated"
    if exact:
        row = min(exact, key=lambda row: row["least_angle"])
        error, words = f"relative error {row['oblique_error']:.1e}", f"{row['vocabulary']} words"
        worst = f"{row['encoding']}, {words} in {row['width']}: least angle {row['least_angle']:.1f}°, {error}"
    what = "no linear projection separates position from words that are not orthogonal to it"
    return [_every(what, rows, lambda row: _under(row["oblique_error"], EXACT), worst)]


def _meeting_spans(records: Records) -> list[Finding]:
    rows = _rows(records)
    apart = max((row["linear_error"] for row in rows if row["separable"]), default=np.nan)
    meeting = min((row["linear_error"] for row in rows if not row["separable"]), default=np.nan)
    return [
        _every(
            "the best linear map is exact if and only if the spans share only 0",
            rows,
            lambda row: row["separable"] != _under(row["linear_error"], EXACT),
            f"error at most {apart:.1e} if they do, at least {meeting:.2f} otherwise",
        ),
        _every(
            "the nearest sum of a word and a position identifies both",
            rows,
            lambda row: row["lookup"] < 1,
            f"a share of at least {min((row['lookup'] for row in rows), default=np.nan):.2f}",
        ),
    ]


def _ideal(name: str) -> Callable[[Record], bool]:
    return lambda run: all(_under(run["levinson"][kind][name][0], EXACT) for kind in ("own", "shared"))


def _noticed(kind: str) -> Callable[[Record], bool]:
    place = SIZES.index(NOTICED)
    return lambda run: not _under(run["levinson"][kind]["predictor"][place], CLEAR)


def _told_apart(run: Record) -> bool:
    """Whether a permutation leaves one head's logits in place and permutes the other's."""
    position, content = run["pair"]["positional"], run["pair"]["content"]
    return position["stay"] - position["move"] > 0.5 and content["move"] - content["stay"] > 0.5


def _against(finding: Finding) -> Finding:
    return supporting(replace(opposite(finding), evidence=f"not: {finding.evidence}"))


_ALIKE = (
    (
        "one sequence: a positional and a content head have the same matrix",
        lambda run: _under(run["pair"]["single_gap"], EXACT),
    ),
    (f"{TEXTS} stationary sequences: the same mean diagonals", lambda run: _under(run["pair"]["means_gap"], CLEAR)),
)
_APART = (
    ("one permutation of the tokens distinguishes them", _told_apart),
    (
        f"the position means of {TEXTS} sequences distinguish them",
        lambda run: run["pair"]["positional"]["position_share"] - run["pair"]["content"]["position_share"] > 0.5,
    ),
)
_TWO_PARTS = (
    "the means and the medians of one matrix's diagonals differ",
    lambda run: not _under(run["pair"]["extraction_gap"], CLEAR),
)


CLAIMS: tuple[Claim[Records], ...] = (
    Claim(
        "c4-not-orthogonal",
        _SOURCE,
        "The position embedding of absolute position encoding is not orthogonal to word embedding.",
        f"{UNIVERSAL} This tests untrained models; heads-not-orthogonal tests trained ones. Independent random spans "
        f"are never orthogonal. A counterexample is an untrained encoding and embedding for which the share of the "
        f"words' variance in the span of the positions is at most {TURNED:g} of that by chance.",
        _not_orthogonal,
    ),
    Claim(
        "c4-no-subspace",
        _SOURCE,
        "Therefore, there is no subspace decomposition that can completely separate the two components.",
        f"{UNIVERSAL} A counterexample has spans that are not orthogonal and an oblique projection that separates "
        f"their sums with a relative error below {EXACT:g}.",
        _no_subspace,
    ),
    Claim(
        "c4-no-subspace-corrected",
        _SOURCE,
        "A linear map separates position and words exactly if and only if their centred spans share only 0, orthogonal "
        "or not. So none does if the words span the whole space, like the paper's 574 words in 256 dimensions. A "
        "search of the two finite tables still finds both parts.",
        f"{UNIVERSAL} Exact means a relative error below {EXACT:g}; the search must succeed for every sampled sum.",
        _meeting_spans,
    ),
    Claim(
        "c4-levinson",
        _SOURCE,
        "In an extremely ideal case, we can use the Levinson-Durbin algorithm to recursively solve the changes in the "
        "position manifold through the values of the Toeplitz matrix.",
        f"For heads whose logits depend only on position, the planted values are recovered with a relative error below "
        f"{EXACT:g}: predictors and frequencies in the median of {DRAWS} heads, position vectors in each head.",
        _judged(
            ("the predictor of an autoregressive kernel", _ideal("predictor")),
            ("the frequencies of a sum of sinusoids", _ideal("frequencies")),
            (
                "the sinusoids' position vectors, up to a rotation",
                lambda run: all(_under(error, EXACT) for error in run["levinson"]["recovered"]),
            ),
        ),
    ),
    Claim(
        "c4-levinson-corrected",
        _SOURCE,
        "The ideal case requires more than little content: content shared by query and key biases the recursion, while "
        "separate content only adds noise; with two different projections of position there is no autocorrelation.",
        f"Median error of the predictor over {DRAWS} heads with content of {NOTICED:g} of position's size, threshold "
        f"{CLEAR:g}. After random projections, fewer than half of the kernels are positive definite.",
        _judged(
            ("shared content: the error exceeds the threshold", _noticed("shared")),
            ("separate content: the error stays below it", lambda run: not _noticed("own")(run)),
            ("random projections: few kernels are positive definite", lambda run: run["definite"] < 0.5),
        ),
    ),
    Claim(
        "c4-not-unique",
        _SOURCE,
        "Extracting a Toeplitz matrix from a general matrix is not unique, and we cannot determine whether the "
        "extracted Toeplitz matrix truly represents the position information.",
        f"Not unique: two extraction methods differ by more than {CLEAR:g}. Cannot determine: the same matrix is "
        f"extracted from a positional and from a content head. Supporting, as the statement is about one matrix: "
        f"neither several sequences nor permuted tokens distinguish them.",
        lambda records: [
            *_judged(_TWO_PARTS, _ALIKE[0])(records),
            *map(supporting, _judged(_ALIKE[1])(records)),
            *map(_against, _judged(*_APART)(records)),
        ],
    ),
    Claim(
        "c4-not-unique-corrected",
        _SOURCE,
        "Neither one logit matrix nor the mean diagonals of many sequences distinguish position from stationary "
        "content. One permutation of the tokens does, and so do the position means of the heads' vectors over many "
        "sequences.",
        f"The pair agrees to {EXACT:g} on one sequence and to {CLEAR:g} in the mean diagonals. It differs by more than "
        f"0.5 in correlation after a permutation and in the energy share of the position means.",
        _judged(*_ALIKE, *_APART),
    ),
)
