"""Which part of a logit is a function of the distance only? (arXiv 2505.13027 v1, Remark 3.2 and section 3.2)

Remark 3.2. Positions of a sinusoid are p_i = R^i p_0, R a rotation by the frequencies, pair by pair. A head multiplies
them by M = W_qᵀ W_k. Then p_i·M p_j is a function of i - j for all i and j just where p_i·(Rᵀ M R - M) p_j = 0 for all
of them, and where frequencies in (0, π) all differ, p_0 is nowhere 0 and N is at least d, the p_i span the space: M has
to commute with R, that is, to be a rotation times a factor on each pair and 0 between pairs.

Section 3.2. Additive logits are L_ij = m(c_i, c_j) + u(c_i, j) + v(c_j, i) + s(i, j), the cross terms u and v, and no
width limits what these functions are. Let L_ij = g(c_i, c_j, i - j). Then g(c, c', i - j) - g(c₀, c', i - j) is
u(c, j) - u(c₀, j) and what has no position: with j fixed, i running, it is one number for all distances. So g =
m'(c, c') + t(i - j): two terms, content and distance, that are independent of each other.

Softmax does not see a term r(c_i, i) of a row. With it g(c, c', δ) - g(c, c₀', δ) is one number for all distances, the
same for all c, and what remains is h(c, i - j) = u'(c, j) + s'(i, j) + r'(c, i) for all c: differences of h between
contents are sums of a function of i and one of j, which in i - j are straight lines. So g = m'(c, c') + t(i - j) +
α(c)(i - j): the query may set a slope, and the key nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.linalg import block_diag, null_space, orth

from toeplens.encodings import PositionalEncoding, attention_logits, build
from toeplens.encodings.absolute import Sinusoidal
from toeplens.papers.mathematics.normalising import toeplitz_gap
from toeplens.papers.mathematics.records import ROUNDING, ClaimsOn, Records, generator, tally
from toeplens.papers.mathematics.related import BIASES, stretch
from toeplens.studies.kit.claims import Claim

WIDTHS, POSITIONS = (4, 8, 16), 32
SINES: tuple[dict[str, Any], ...] = (
    {"name": "sinusoidal"},
    {"name": "sinusoidal", "layout": "halves"},
    {"name": "sinusoidal", "base": 100.0},
    {"name": "scaled-sinusoidal", "layout": "halves"},
)
PRODUCTS = ("rope", "xpos", "rollpe", "pope", "shaw", "transformer-xl", "deberta")
CONTENTS, LENGTHS = (2, 3), (3, 4, 5, 6, 7)
CLEAR = 0.01  # of the logits' norm: minimum size of a coupling
REMARK = "arXiv 2505.13027 v1, Remark 3.2"
CROSS = "arXiv 2505.13027 v1, section 3.2"

_GAP = "largest relative distance from the nearest Toeplitz matrix"
_FARTHEST = "smallest relative distance from the nearest Toeplitz matrix (negated)"
_BEYOND = "largest share outside that form"
TALLIES: dict[str, tuple[str, str]] = {
    "sinusoid": ("sinusoids: p_i · p_j is Toeplitz", _GAP),
    "sinusoid-heads": ("sinusoids: W_q p_i · W_k p_j is Toeplitz in a random head", _GAP),
    "bias": ("relative biases: their contribution to the logits is Toeplitz", _GAP),
    "product": ("encodings that multiply content: the logits of a sequence of one repeated word are Toeplitz", _GAP),
    "product-words": ("their contribution to the logits of a sequence of many words is Toeplitz", _GAP),
    "commuting": ("W_qᵀ W_k commutes with the rotation: Toeplitz", _GAP),
    "not-commuting": ("W_qᵀ W_k does not commute with it: not Toeplitz", _FARTHEST),
    "uncoupled": ("additive logits that are a function of contents and distance do not couple the two", _BEYOND),
    "softmax": ("the same up to terms that softmax ignores", _BEYOND),
    "slope": ("up to terms that softmax ignores, they add only a slope set by the query", _BEYOND),
    "reached": ("all such functions are reached: the dimensions of the spaces agree", "most missing dimensions"),
    "rotary": ("RoPE's logits are a function of contents and distance", "largest relative error"),
    "rotary-coupled": ("RoPE's logits couple the two", "smallest share of the coupling (negated)"),
}


def sinusoid(name: str, width: int, **options: Any) -> Float[np.ndarray, "N d"]:
    """p_0 to p_(N-1) of one of our sinusoids, float64."""
    encoding = _one_head(name, width, **options)
    assert isinstance(encoding, Sinusoidal)
    with torch.no_grad():
        return encoding.table(torch.arange(POSITIONS)).double().numpy()


def commuting(rng: np.random.Generator, width: int) -> Float[np.ndarray, "d d"]:
    """A random matrix that commutes with every rotation of the pairs (0, 1), (2, 3), ..."""
    return np.asarray(block_diag(*([[a, -b], [b, a]] for a, b in rng.normal(size=(width // 2, 2)))))


def _sinusoids(rng: np.random.Generator, tries: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"sinusoid": [], "sinusoid-heads": [], "commuting": [], "not-commuting": []}
    for width in WIDTHS:
        for options in SINES:
            table = sinusoid(**options, width=width)
            found["sinusoid"].append(toeplitz_gap(table @ table.T))
            paired = table
            if options.get("layout") == "halves":
                paired = table[:, np.arange(width).reshape(2, -1).T.ravel()]
            for _ in range(tries // 10):
                head = np.einsum("ea,eb->ab", *rng.normal(size=(2, width, width)))
                gap = toeplitz_gap(table @ head @ table.T)
                found["sinusoid-heads"].append(gap)
                found["not-commuting"].append(-gap)
                found["commuting"].append(toeplitz_gap(paired @ commuting(rng, width) @ paired.T))
    limits = {"not-commuting": -ROUNDING}
    return {name: tally(values, beyond=limits.get(name, ROUNDING)) for name, values in found.items()}


def _relative(rng: np.random.Generator, tries: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"bias": [], "product": [], "product-words": []}
    plain = _one_head("nope")
    for name in (*BIASES, *PRODUCTS):
        for _ in range(tries // 10):
            encoding, word = _stretched(name, int(rng.integers(2**31))), rng.normal(size=(2, 1, WIDTHS[1]))
            q, k = rng.normal(size=(2, POSITIONS, WIDTHS[1]))
            added = _logits(encoding, q, k) - _logits(plain, q, k)
            found["bias" if name in BIASES else "product-words"].append(toeplitz_gap(added))
            if name in PRODUCTS:
                one, other = (np.repeat(row, POSITIONS, 0) for row in word)
                found["product"].append(toeplitz_gap(_logits(encoding, one, other)))
    return {name: tally(values) for name, values in found.items()}


def _one_head(name: str, width: int = WIDTHS[1], **options: Any) -> PositionalEncoding:
    """One of our encodings for one head, float64."""
    return build(name, d_model=width, num_heads=1, head_dim=width, max_len=POSITIONS, **options).double()


def _stretched(name: str, seed: int) -> PositionalEncoding:
    """The encoding with its parameters moved far from their initial values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoding = _one_head(name)
        stretch(encoding)
    return encoding


def _logits(
    encoding: PositionalEncoding, q: Float[np.ndarray, "M d"], k: Float[np.ndarray, "M d"], length: int = POSITIONS
) -> Float[np.ndarray, "M M"]:
    """Of texts of ``length`` positions, one after the other, each query with all keys."""
    a, b = torch.from_numpy(np.stack((q, k)))[:, None, None]
    places = torch.arange(len(q)) % length
    with torch.no_grad():
        logits = attention_logits(
            a, b, encoding=encoding, scale=q.shape[1] ** -0.5, q_positions=places, k_positions=places, causal=False
        )
    return logits[0, 0].numpy()


def functions_of_distance(contents: int, length: int, *, causal: bool, rows: bool) -> Float[np.ndarray, "C C D f"]:
    """All functions g(c, c', δ) that additive logits can be, as an orthonormal basis, δ from its least on.

    They are all L(c, c', i, j) = m(c, c') + u(c, j) + v(c', i) + s(i, j), with ``rows`` plus r(c, i), that depend on i
    and j by i - j alone: of all parameters those by which no two cells of one (c, c', i - j) differ.

    Arguments
        contents  C, words
        length    N, positions
        causal    with keys up to the query alone
        rows      softmax is asked for: what is the same for all keys of a query counts as nothing
    """
    c, d, i, j = _cells(contents, length, causal)
    names = [(c, d), (c, j), (d, i), (i, j), *([(c, i)] if rows else [])]
    design = np.concatenate([_indicators(*pair) for pair in names], axis=1)
    same = _indicators(c, d, i - j)
    means = (same.T / same.sum(0)[:, None]) @ design  # of each parameter, over the cells of a (c, c', i - j)
    basis = orth(means @ null_space(design - same @ means, rcond=ROUNDING), rcond=ROUNDING)
    return basis.reshape(contents, contents, -1, basis.shape[1])


def _cells(contents: int, length: int, causal: bool) -> Int[np.ndarray, "4 cells"]:
    c, d, i, j = np.indices((contents, contents, length, length)).reshape(4, -1)
    return np.stack((c, d, i, j))[:, (j <= i) | (not causal)]


def _indicators(*columns: Int[np.ndarray, "cells"]) -> Float[np.ndarray, "cells values"]:
    """One column per combination of values."""
    values, which = np.unique(np.stack(columns), axis=1, return_inverse=True)
    return np.eye(values.shape[1])[which.ravel()]


def without_coupling(contents: int, offsets: int, *, slope: bool = False) -> Float[np.ndarray, "C C D f"]:
    """All m(c, c') + t(δ), with ``slope`` plus α(c)δ, as an orthonormal basis."""
    c, d, at = np.indices((contents, contents, offsets)).reshape(3, -1)
    columns = [_indicators(c, d), _indicators(at), *([_indicators(c) * at[:, None]] if slope else [])]
    basis = orth(np.concatenate(columns, axis=1), rcond=ROUNDING)
    return basis.reshape(contents, contents, offsets, -1)


def beyond(g: Float[np.ndarray, "C C D f"], known: Float[np.ndarray, "C C D h"]) -> float:
    """The largest share of the norm of a function g outside the span of another basis, 0 to 1."""
    columns, basis = g.reshape(-1, g.shape[-1]), known.reshape(-1, known.shape[-1])
    return float(np.linalg.norm(columns - basis @ (basis.T @ columns), 2))


def _additive() -> dict[str, Any]:
    found: dict[str, list[float]] = {"uncoupled": [], "softmax": [], "slope": [], "reached": []}
    for contents in CONTENTS:
        for length in LENGTHS:
            for causal in (True, False):
                exact, softened = (
                    functions_of_distance(contents, length, causal=causal, rows=rows) for rows in (False, True)
                )
                plain, sloped = (without_coupling(contents, exact.shape[2], slope=slope) for slope in (False, True))
                found["uncoupled"].append(beyond(exact, plain))
                found["softmax"].append(beyond(softened, plain))
                found["slope"].append(beyond(softened, sloped))
                found["reached"] += [plain.shape[-1] - exact.shape[-1], sloped.shape[-1] - softened.shape[-1]]
    return {name: tally(values) for name, values in found.items()}


def _rotary(rng: np.random.Generator, tries: int) -> dict[str, Any]:
    """RoPE's logits by contents and offset, for random queries and keys of each word at all positions."""
    unlike, shares = [], []
    width, contents, length = WIDTHS[1], CONTENTS[-1], LENGTHS[-1]
    c, d, i, j = _cells(contents, length, causal=True)
    same = _indicators(c, d, i - j)
    plain, rope = without_coupling(contents, length), _one_head("rope")
    for _ in range(tries):
        q, k = rng.normal(size=(2, contents, width))
        every = _logits(rope, np.repeat(q, length, 0), np.repeat(k, length, 0), length)
        logits = every[c * length + i, d * length + j]
        g = same.T @ logits / same.sum(0)
        unlike.append(float(np.linalg.norm(logits - same @ g) / np.linalg.norm(logits)))
        shares.append(-beyond((g / np.linalg.norm(g)).reshape(contents, contents, length, 1), plain))
    return {"rotary": tally(unlike), "rotary-coupled": tally(shares, beyond=-CLEAR)}


def distance(seed: int, *, tries: int = 200) -> dict[str, Any]:
    """Dependence on the distance of sinusoids, relative encodings, cross terms and RoPE.

    Arguments
        seed   of heads, vectors and parameters
        tries  heads of RoPE; a tenth of it heads of each sinusoid and width, and texts of each encoding; 20 or more

    Returns ``tallies`` by statement (`tally`).
    """
    rng = generator(seed, tries)
    parts = _sinusoids(rng, tries), _relative(rng, tries), _additive(), _rotary(rng, tries)
    return {"seed": seed, "tallies": {name: found for part in parts for name, found in part.items()}}


_claim = ClaimsOn("distance", TALLIES)
_BAR = f"A counterexample exceeds {ROUNDING:g} (rounding)."
_EXACT = "By linear algebra over all logits of the form, for any width, with 2 or 3 words at 3 to 7 positions."
CLAIMS: tuple[Claim[Records], ...] = (
    _claim(
        REMARK,
        "positions-toeplitz",
        "All forms of sine-cosine absolute encodings satisfy that attention between positions alone is Toeplitz, and "
        "the effect of relative encodings is Toeplitz, too.",
        f"Tested: our sinusoids, directly and as a head's queries and keys; the contribution of relative biases to the "
        f"logits; the logits of encodings that multiply content on a sequence of one repeated word. {_BAR} Supporting, "
        f"as the remark is about positions only: the contribution of the latter on a sequence of many words.",
        ("sinusoid", "sinusoid-heads", "bias", "product"),
        supporting=("product-words",),
    ),
    _claim(
        f"{REMARK}, corrected",
        "positions-toeplitz-corrected",
        "For a sinusoid p_i · W_qᵀ W_k p_j is Toeplitz if and only if W_qᵀ W_k commutes with the step from one "
        "position to the next: on each pair of dimensions a rotation times a factor, and 0 between pairs.",
        f"Proved in this module for frequencies that all differ and N >= d. {_BAR}",
        ("commuting", "not-commuting"),
    ),
    _claim(
        CROSS,
        "cross-terms-constrained",
        "For the cross terms of additive encodings to couple content with relative position they would have to depend "
        "on i - j alone and yet be modulated by content, which is difficult to realise.",
        f"{_EXACT} It holds if no such logits exist. Supporting, not in the statement: none exist up to terms that "
        f"softmax ignores, those shared by all keys of a query.",
        ("uncoupled",),
        supporting=("softmax",),
    ),
    _claim(
        f"{CROSS}, corrected",
        "cross-terms-constrained-corrected",
        "Additive logits that depend on i and j only through i - j are a term of the contents plus a term of the "
        "distance: coupling the two is not difficult but impossible. Up to terms that softmax ignores, the query's "
        "content can only set a slope α(c)(i - j). RoPE's logits couple the two.",
        f"{_EXACT} RoPE on random vectors: the coupling is above {CLEAR:g} of the logits' norm.",
        ("uncoupled", "slope", "reached", "rotary", "rotary-coupled"),
    ),
)
