"""What is Toeplitz in attention logits, and which encodings are which (arXiv 2505.13027 v1 and related papers).

Remark 3.1. Attention(p_i, p_j) = [a_{i-j}] is written with an equal sign "because the normalization operation does not
change the Toeplitz property". For softmax S_ij = e^{a_(i-j)} / Z_i with Z_i the sum over row i. For finite a_δ, S is
Toeplitz if and only if all Z_i are equal, for the rows i and i + 1 have the diagonals of their first entries in common.
Over all keys Z_(i+1) - Z_i = e^{a_(i+1)} - e^{a_(i+1-N)}: they are equal just for circulant matrices. Under a causal
mask it is e^{a_(i+1)} > 0, so that S never is one; with a window of M (a_δ = -∞ from δ = M on) all rows from M - 1 on
have one sum, and there S is Toeplitz.

Remark 3.2. Positions of a sinusoid are p_i = R^i p_0, R a rotation by the frequencies, pair by pair. A head multiplies
them by M = W_qᵀ W_k. Then p_i·M p_j is a function of i - j for all i and j just where p_i·(Rᵀ M R - M) p_j = 0 for all
of them, and where frequencies in (0, π) all differ, p_0 is nowhere 0 and N is at least d, the p_i span the space: M has
to commute with R, that is, to be a rotation times a factor on each pair and 0 between pairs.

Section 3.2. Additive logits are L_ij = m(c_i, c_j) + u(c_i, j) + v(c_j, i) + s(i, j), the cross terms u and v, and no
width limits what these functions are. Let L_ij = g(c_i, c_j, i - j). Then g(c, c', i - j) - g(c₀, c', i - j) is
u(c, j) - u(c₀, j) and what has no position: with j fixed, i running, it is one number for all distances. So g =
m'(c, c') + t(i - j): two terms, content and distance, that are independent of each other. Softmax does not see a term
r(c_i, i) of a row. With it g(c, c', δ) - g(c, c₀', δ) is one number for all distances, the same for all c, and what
remains is h(c, i - j) = u'(c, j) + s'(i, j) + r'(c, i) for all c: differences of h between contents are sums of a
function of i and one of j, which in i - j are straight lines. So g = m'(c, c') + t(i - j) + α(c)(i - j): the query may
set a slope, and the key nothing.

Equation 12 gives MLA's complex logits as G ∘ (αG_e + I), G the sum of the four Gram matrices of content and position. A
head of eq. 11 has a content branch q^C, k^C and a rotary branch q^R, k^R with parameters of their own. What holds
(theory, section 3): with (E_t)_ij = e^{i(i-j)θ_t} and B_t = Q_t K_t^H of the rotary branch, L = G_C + Re Σ_t B_t∘E_t.

- I is no identity of ∘: it keeps the content branch on the diagonal alone. J, all ones, is the identity.
- With J, one G and one Toeplitz factor, whatever its entries, L - Re G is Re of G times one number a diagonal: exact
  for one frequency, and not for more.
- With branches of their own and J, c_1 A + c_2 B in place of G (A and B the branches' complex Gram matrices) would need
  the numbers before A, A∘E, B, B∘E to be a 2 x 2 matrix (c_1, αc_1; c_2, αc_2) of rank 1, where L has the identity. The
  nearest matrix of rank 1 to the identity is 1 away, so the error is at least the least singular value of the design.

RollPE (van de Geijn et al. 2025) rolls queries and keys along their dimensions, by s i at position i: multiplication by
P^(si), P the cyclic shift of d. In the real Fourier basis P is a rotation by 2πf/d of each pair (cos, sin) of component
f, 1 on the mean, and, where d is even, -1 on the alternating sum. With a zero next to each of the two single components
that is RoPE with frequencies 0, 2πsf/d and πs, two dimensions wider at most. It is none of the head's own width if d is
odd (the mean has no partner) or s odd and d even: then det P^s = -1, and a rotation's determinant is 1.

URPE (Luo et al. 2022): softmax gives rows that sum to one, so that equal tokens give equal outputs in every layer,
whatever is added to the logits. A target such as y_i = i/N on equal tokens is then missed by half its range at least,
however deep and wide the model. Weights that are multiplied by c_(i-j) sum to Σ_j c_(i-j)/(row's length), and with all
2N - 1 factors free these sums can be any numbers.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from numpy.random import Generator
from scipy.linalg import block_diag, null_space, orth
from scipy.special import softmax
from torch import Tensor

from toeplens.encodings import PositionalEncoding, attention_logits, build
from toeplens.encodings.additive import Sinusoidal
from toeplens.encodings.kit import rotary_frequencies
from toeplens.encodings.logits import URPE
from toeplens.encodings.rotary import Rotary
from toeplens.model import Decoder, DecoderConfig
from toeplens.papers.mathematics.statements import ROUNDING, Margins, Sizes, counterexample_search, relative_error

BIASES = ("t5", "relative-table", "alibi", "kerple-log", "kerple-power", "sandwich", "dynamic-bias")
STRETCH_SCALE = 3.0  # of an encoding's random parameters: the published starts are near 0

Pairs = Complex[np.ndarray, "N n"]
Vectors = Float[np.ndarray, "N d"]
Logits = Float[np.ndarray, "N N"]
Functions = Float[np.ndarray, "C C D f"]  # of query content, key content and distance


def toeplitz_gap(matrix: Float[np.ndarray, "R N"]) -> float:
    """Relative distance from the nearest Toeplitz matrix; 0 if and only if every diagonal is constant."""
    means = np.zeros_like(matrix)
    rows, columns = np.indices(matrix.shape)
    for offset in range(1 - matrix.shape[1], matrix.shape[0]):
        diagonal = rows - columns == offset
        means[diagonal] = matrix[diagonal].mean()
    return relative_error(matrix - means, matrix)


def build_one_head(name: str, width: int, length: int = 32, **options: Any) -> PositionalEncoding:
    """One of our encodings for one head, float64."""
    return build(name, d_model=width, num_heads=1, head_dim=width, max_len=length, **options).double()


@torch.no_grad()
def stretch_parameters(encoding: PositionalEncoding) -> None:
    """Move an encoding's parameters far from their initial values, with torch's random generator."""
    for values in encoding.parameters():
        values.add_(STRETCH_SCALE * torch.randn_like(values).abs())


def sinusoid_table(width: int, length: int, name: str = "sinusoidal", **options: Any) -> Vectors:
    """p_0 to p_(N-1) of one of our sinusoids, float64."""
    encoding = build_one_head(name, width, length, **options)
    assert isinstance(encoding, Sinusoidal)
    with torch.no_grad():
        return encoding.table(torch.arange(length)).double().numpy()


def rotated_logits(encoding: PositionalEncoding, q: Vectors, k: Vectors) -> Logits:
    """Products of queries and keys that an encoding rotated, before their scale."""
    vectors, positions = torch.from_numpy(np.stack((q, k)))[:, None, None], torch.arange(len(q))
    a, b = encoding.rotate(vectors[0], vectors[1], positions, positions)
    return (a[0, 0] @ b[0, 0].T).numpy()


# ---- Remark 3.1: softmax --------------------------------------------------------------------------------------------

WINDOW, WIDTH = 4, 16  # WIDTH of the sinusoid
MIN_DIFFERENCE = 1e-3  # minimum relative difference of row sums that count as different


def mask_causal(logits: Logits, window: int | None = None) -> Logits:
    """-∞ for keys after the query, and for those ``window`` or more before it."""
    offsets = np.subtract.outer(np.arange(len(logits)), np.arange(len(logits)))
    return np.where((offsets >= 0) & (offsets < (window or len(logits))), logits, -np.inf)


@counterexample_search
def normalising(rng: Generator, margins: Margins, tries: int = 200) -> None:
    for size in (2, 3, 8, 32):
        offsets = np.subtract.outer(np.arange(size), np.arange(size))
        p = sinusoid_table(WIDTH, size)
        margins["sinusoid"].append(toeplitz_gap(softmax(p @ p.T / np.sqrt(WIDTH), axis=-1)))
        for _ in range(tries):
            kernel = rng.normal(size=2 * size - 1)
            logits = kernel[offsets + size - 1]
            for name, masked in (("softmax", logits), ("causal", mask_causal(logits))):
                gap, sums = toeplitz_gap(softmax(masked, axis=-1)), np.exp(masked).sum(-1)
                margins[name].append(gap)
                margins[f"{name}-lost"].append(-gap)
                if np.ptp(sums) / sums.max() >= MIN_DIFFERENCE:
                    margins["unequal"].append(-gap)
            margins["scaled"].append(toeplitz_gap(logits / np.sqrt(WIDTH)))
            margins["circulant"].append(toeplitz_gap(softmax(kernel[offsets % size], axis=-1)))
            if size > WINDOW:
                margins["window"].append(toeplitz_gap(softmax(mask_causal(logits, WINDOW), axis=-1)[WINDOW - 1 :]))


# ---- Remark 3.2 and section 3.2: functions of the distance ----------------------------------------------------------

WIDTHS, POSITIONS = (4, 8, 16), 32
SINUSOID_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"layout": "halves"},
    {"base": 100.0},
    {"name": "scaled-sinusoidal", "layout": "halves"},
)
MULTIPLICATIVE = ("rope", "xpos", "rollpe", "pope", "shaw", "transformer-xl", "deberta")
NUM_CONTENTS, LENGTHS = (2, 3), (3, 4, 5, 6, 7)


def commuting_matrix(rng: Generator, width: int) -> Float[np.ndarray, "d d"]:
    """A random matrix that commutes with every rotation of the pairs (0, 1), (2, 3), ..."""
    return np.asarray(block_diag(*([[a, -b], [b, a]] for a, b in rng.normal(size=(width // 2, 2)))))


def _logits(encoding: PositionalEncoding, q: Vectors, k: Vectors, length: int = POSITIONS) -> Logits:
    """Of texts of ``length`` positions, one after the other, each query with all keys."""
    a, b = torch.from_numpy(np.stack((q, k)))[:, None, None]
    positions = torch.arange(len(q)) % length
    with torch.no_grad():
        options: Any = {"q_positions": positions, "k_positions": positions, "scale": q.shape[1] ** -0.5}
        logits = attention_logits(a, b, encoding=encoding, causal=False, **options)
    return logits[0, 0].numpy()


def functions_of_distance(contents: int, length: int, *, causal: bool, rows: bool) -> Functions:
    """All functions g(c, c', δ) that additive logits can be, as an orthonormal basis, δ from its least on.

    They are all L(c, c', i, j) = m(c, c') + u(c, j) + v(c', i) + s(i, j), with ``rows`` plus r(c, i), that depend on i
    and j by i - j alone: of all parameters those by which no two cells of one (c, c', i - j) differ.

    Arguments
        contents  C, words
        length    N, positions
        causal    with keys up to the query alone
        rows      softmax is asked for: what is the same for all keys of a query counts as nothing
    """
    c, d, i, j = _index_cells(contents, length, causal)
    names = [(c, d), (c, j), (d, i), (i, j), *([(c, i)] if rows else [])]
    design = np.concatenate([_indicators(*pair) for pair in names], axis=1)
    groups = _indicators(c, d, i - j)
    means = (groups.T / groups.sum(0)[:, None]) @ design  # of each parameter, over the cells of a (c, c', i - j)
    basis = orth(means @ null_space(design - groups @ means, rcond=ROUNDING), rcond=ROUNDING)
    return basis.reshape(contents, contents, -1, basis.shape[1])


def _index_cells(contents: int, length: int, causal: bool) -> Int[np.ndarray, "4 cells"]:
    c, d, i, j = np.indices((contents, contents, length, length)).reshape(4, -1)
    return np.stack((c, d, i, j))[:, (j <= i) | (not causal)]


def _indicators(*columns: Int[np.ndarray, "cells"]) -> Float[np.ndarray, "cells values"]:
    """One column per combination of values."""
    values, which = np.unique(np.stack(columns), axis=1, return_inverse=True)
    return np.eye(values.shape[1])[which.ravel()]


def uncoupled_functions(contents: int, offsets: int, *, slope: bool = False) -> Functions:
    """All m(c, c') + t(δ), with ``slope`` plus α(c)δ, as an orthonormal basis."""
    c, d, offset = np.indices((contents, contents, offsets)).reshape(3, -1)
    columns = [_indicators(c, d), _indicators(offset), *([_indicators(c) * offset[:, None]] if slope else [])]
    basis = orth(np.concatenate(columns, axis=1), rcond=ROUNDING)
    return basis.reshape(contents, contents, offsets, -1)


def share_outside(g: Functions, known: Functions) -> float:
    """The largest share of the norm of a function g outside the span of another basis, 0 to 1."""
    columns, basis = g.reshape(-1, g.shape[-1]), known.reshape(-1, known.shape[-1])
    return float(np.linalg.norm(columns - basis @ (basis.T @ columns), 2))


@counterexample_search
def distance(rng: Generator, margins: Margins, tries: int = 200) -> None:
    """``tries`` heads of RoPE, a tenth of it heads of each sinusoid and width, and texts of each encoding."""
    for width in WIDTHS:
        for options in SINUSOID_OPTIONS:
            table = sinusoid_table(width, POSITIONS, **options)
            margins["sinusoid"].append(toeplitz_gap(table @ table.T))
            pairwise = table
            if options.get("layout") == "halves":
                pairwise = table[:, np.arange(width).reshape(2, -1).T.ravel()]
            for _ in range(tries // 10):
                head = np.einsum("ea,eb->ab", *rng.normal(size=(2, width, width)))
                gap = toeplitz_gap(table @ head @ table.T)
                margins["sinusoid-heads"].append(gap)
                margins["not-commuting"].append(-gap)
                margins["commuting"].append(toeplitz_gap(pairwise @ commuting_matrix(rng, width) @ pairwise.T))
    width = WIDTHS[1]
    for name in (*BIASES, *MULTIPLICATIVE):
        for _ in range(tries // 10):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(rng.integers(2**31)))
                encoding = build_one_head(name, width)
                stretch_parameters(encoding)
            word, (q, k) = rng.normal(size=(2, 1, width)), rng.normal(size=(2, POSITIONS, width))
            added = _logits(encoding, q, k) - _logits(build_one_head("nope", width), q, k)
            margins["bias" if name in BIASES else "product-words"].append(toeplitz_gap(added))
            if name in MULTIPLICATIVE:
                query_rows, key_rows = (np.repeat(row, POSITIONS, 0) for row in word)
                margins["product"].append(toeplitz_gap(_logits(encoding, query_rows, key_rows)))
    for contents in NUM_CONTENTS:
        for length in LENGTHS:
            for causal in (True, False):
                exact, softened = (
                    functions_of_distance(contents, length, causal=causal, rows=rows) for rows in (False, True)
                )
                plain, sloped = (uncoupled_functions(contents, exact.shape[2], slope=slope) for slope in (False, True))
                margins["uncoupled"].append(share_outside(exact, plain))
                margins["softmax"].append(share_outside(softened, plain))
                margins["slope"].append(share_outside(softened, sloped))
                margins["reached"] += [plain.shape[-1] - exact.shape[-1], sloped.shape[-1] - softened.shape[-1]]
    contents, length = NUM_CONTENTS[-1], LENGTHS[-1]
    c, d, i, j = _index_cells(contents, length, causal=True)
    groups, plain, rope = _indicators(c, d, i - j), uncoupled_functions(contents, length), build_one_head("rope", width)
    for _ in range(tries):  # RoPE's logits by contents and offset, for queries and keys of each word at all positions
        q, k = rng.normal(size=(2, contents, width))
        all_logits = _logits(rope, np.repeat(q, length, 0), np.repeat(k, length, 0), length)
        logits = all_logits[c * length + i, d * length + j]
        g = groups.T @ logits / groups.sum(0)
        margins["rotary"].append(relative_error(logits - groups @ g, logits))
        margins["rotary-coupled"].append(
            -share_outside((g / np.linalg.norm(g)).reshape(contents, contents, length, 1), plain)
        )


# ---- equation 12: MLA -----------------------------------------------------------------------------------------------

BRANCH_WIDTHS = (2, 4, 8, 16)  # dimensions of a rotary branch; 2 is one frequency
BASE = 10000.0


def complex_pairs(x: Float[np.ndarray, "*B d"]) -> Complex[np.ndarray, "*B n"]:
    """Neighbouring dimensions as one complex number."""
    return x[..., ::2] + 1j * x[..., 1::2]


def phase_matrices(frequencies: Float[np.ndarray, "n"], size: int) -> Complex[np.ndarray, "n N N"]:
    """(E_t)_ij = e^{i(i-j)θ_t}."""
    offsets = np.subtract.outer(np.arange(size), np.arange(size))
    return np.exp(1j * frequencies[:, None, None] * offsets)


def gram_matrices(q: Pairs, k: Pairs) -> Complex[np.ndarray, "n N N"]:
    """Q_t K_t^H for each pair of dimensions."""
    return np.einsum("it,jt->tij", q, k.conj())


def mla_logits(q: Vectors, k: Vectors, rotary_dim: int) -> Logits:
    """The logits of our MLA for one head [content; rotary], before their scale, float64."""
    sizes = {"d_model": 4, "num_heads": 1, "head_dim": q.shape[1] - rotary_dim, "max_len": len(q)}
    return rotated_logits(build("mla", rotary_dim=rotary_dim, base=BASE, **sizes), q, k)


def scalar_error(logits: Logits, fixed: Logits, rotated: Complex[np.ndarray, "N N"]) -> float:
    """Smallest relative error of ``fixed`` + Re(α ``rotated``) over complex α."""
    return relative_error(_residual(rotated.ravel(), (logits - fixed).ravel()), logits)


def toeplitz_error(logits: Logits, fixed: Logits, gram: Complex[np.ndarray, "N N"]) -> float:
    """Smallest relative error of ``fixed`` + Re(``gram``∘T) over all complex Toeplitz T."""
    diagonals = [[np.diagonal(x, offset) for x in (gram, logits - fixed)] for offset in range(1 - len(gram), len(gram))]
    return relative_error(np.concatenate([_residual(*pair) for pair in diagonals]), logits)


def _residual(factor: Complex[np.ndarray, "m"], target: Float[np.ndarray, "m"]) -> Float[np.ndarray, "m"]:
    """What the best complex multiple of ``factor`` leaves of ``target``, in its real part."""
    design = np.stack((np.real(factor), -np.imag(factor)), axis=1)
    return target - design @ np.linalg.lstsq(design, target, rcond=None)[0]


def mixture_bound(
    logits: Logits,
    first: Complex[np.ndarray, "N N"],
    second: Complex[np.ndarray, "N N"],
    wave: Complex[np.ndarray, "N N"],
) -> float:
    """A lower bound for the relative error of Re((c_1 A + c_2 B)∘(αE + J)), over all complex c_1, c_2 and α."""
    terms = (first, first * wave, second, second * wave)
    design = np.stack([component.ravel() for term in terms for component in (np.real(term), -np.imag(term))], axis=1)
    return float(np.linalg.svd(design, compute_uv=False)[-1] / np.linalg.norm(logits))


@counterexample_search
def latent(rng: Generator, margins: Margins, tries: int = 200) -> None:
    size = 12
    for width in BRANCH_WIDTHS:
        phase_factors = phase_matrices(rotary_frequencies(width, BASE).numpy(), size)
        for _ in range(tries):
            x = rng.normal(size=(2, size, 2 * width))  # content and position
            maps = rng.normal(size=(4, width, 2 * width)) / np.sqrt(2 * width)
            parts = np.einsum("vdm,pnm->vpnd", maps, x)  # q^C, k^C, q^R, k^R, each of content and position
            q_content, k_content, q, k = parts.sum(1)
            logits = mla_logits(np.concatenate((q_content, q), 1), np.concatenate((k_content, k), 1), width)
            pairs = complex_pairs(parts)
            content = sum(a @ b.T for a in parts[0] for b in parts[1])
            rotated = [gram_matrices(a, b) * phase_factors for a in pairs[2] for b in pairs[3]]
            margins["own"].append(relative_error(content + np.sum(rotated, (0, 1)).real - logits, logits))
            doubled = np.concatenate((q, q), 1), np.concatenate((k, k), 1)
            tied, pair_grams = mla_logits(*doubled, width), gram_matrices(complex_pairs(q), complex_pairs(k))
            total_gram = pair_grams.sum(0)
            margins["tied"].append(relative_error((pair_grams * (phase_factors + 1)).sum(0).real - tied, tied))
            if width == 2:
                margins["identity"].append(
                    scalar_error(tied, np.diag(np.diag(total_gram.real)), total_gram * phase_factors[0])
                )
                margins["ones-one"].append(relative_error((total_gram * (phase_factors[0] + 1)).real - tied, tied))
                content_gram = gram_matrices(complex_pairs(q_content), complex_pairs(k_content)).sum(0)
                margins["ones-own"].append(mixture_bound(logits, content_gram, total_gram, phase_factors[0]))
            else:
                margins["ones-many"].append(toeplitz_error(tied, total_gram.real, total_gram))


# ---- RollPE and URPE ------------------------------------------------------------------------------------------------

ROLLED_WIDTHS, SPEEDS, TOKENS = (3, 4, 7, 8, 16), (1, 2, 3), 16
ROTATIONS = ("rope", "xpos", "rollpe")
DEPTHS = (1, 3)


def rolled_logits(q: Vectors, k: Vectors, speed: int) -> Logits:
    """Products of queries and keys, each rolled by ``speed`` times its position."""
    a, b = (np.stack([np.roll(row, speed * i) for i, row in enumerate(x)]) for x in (q, k))
    return a @ b.T


def fourier_basis(width: int) -> Float[np.ndarray, "d wide"]:
    """The orthonormal real Fourier basis, a pair of columns a component: cosine and sine, or itself and zero."""
    positions = np.arange(width)
    columns = []
    for component in range(width // 2 + 1):
        angles = 2 * np.pi * component * positions / width
        single = 2 * component in (0, width)
        scale = np.sqrt((1 if single else 2) / width)
        columns += [scale * np.cos(angles), np.zeros(width) if single else scale * np.sin(angles)]
    return np.stack(columns, axis=1)


def rope_logits(q: Vectors, k: Vectors, speed: int) -> Logits:
    """The logits of our rotary encoding on the Fourier coefficients, frequencies 2π speed f/d, before their scale."""
    basis = fourier_basis(q.shape[1])
    width = basis.shape[1]
    frequencies = torch.arange(width // 2, dtype=torch.float64) * (2 * np.pi * speed / q.shape[1])
    sizes = {"d_model": width, "num_heads": 1, "head_dim": width, "max_len": len(q)}
    return rotated_logits(Rotary(frequencies[None], pairing="interleaved", **sizes), q @ basis, k @ basis)


def rotation_defect(width: int, speed: int) -> float:
    """0 if the shift can be a rotation of pairs (even width, determinant 1), otherwise the deviation."""
    shift = np.roll(np.eye(width), speed, axis=0)
    return max(float(width % 2), abs(float(np.linalg.det(shift)) - 1))


def relative_spread(outputs: Float[Tensor, "N d"]) -> float:
    """Largest difference of the outputs from the first one, relative to the largest entry."""
    return float((outputs - outputs[:1]).abs().max() / outputs.abs().max())


def equal_token_outputs(encoding: str, depth: int, causal: bool, seed: int) -> Float[Tensor, "N d_model"]:
    """Outputs of a random decoder with large encoding parameters on one repeated token, by position."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        sizes = {"vocab_size": 4, "d_model": 16, "d_ff": 32, "num_layers": depth, "num_heads": 2, "max_len": TOKENS}
        config = sizes | {"encoding": encoding, "causal": causal, "readout": "mean"}
        model = Decoder(DecoderConfig.model_validate(config)).double().eval()
        stretch_parameters(model.encoding)
        x, context = model.start_pass(torch.full((1, TOKENS), seed % 4))
        for layer in range(depth):
            x = model.block(layer).finish(*model.layer_heads(layer, x, context, fused=False))
        return x[0]


def urpe_outputs(target: Float[np.ndarray, "N"], causal: bool) -> Float[np.ndarray, "N"]:
    """Output of our URPE attention on equal tokens with value 1, with factors fitted to ``target`` by least squares."""
    size = len(target)
    encoding = build_one_head("urpe", 4, size, base="none")
    assert isinstance(encoding, URPE)
    positions = torch.arange(size)
    visible = torch.ones(size, size, dtype=torch.float64)
    weights = visible.tril() if causal else visible
    weights = weights / weights.sum(-1, keepdim=True)
    columns = np.subtract.outer(np.arange(size), np.arange(size)) + size - 1
    design = np.zeros((size, 2 * size - 1))
    np.add.at(design, (np.arange(size)[:, None], columns), weights.numpy())
    with torch.no_grad():
        encoding.factors.weight[:, 0] = torch.from_numpy(np.linalg.lstsq(design, target, rcond=None)[0])
        return encoding.transform_weights(weights[None, None], positions, positions)[0, 0].sum(-1).numpy()


@counterexample_search
def related(rng: Generator, margins: Margins, tries: int = 200, depths: Sizes = DEPTHS) -> None:
    """``tries`` targets, a quarter of it vectors of each width and speed, a fortieth models of each kind."""
    for width in ROLLED_WIDTHS:
        for speed in SPEEDS:
            margins["own-width"].append(rotation_defect(width, speed))
            rollpe = build_one_head("rollpe", width, TOKENS, speed=float(speed))
            for _ in range(tries // 4):
                q, k = rng.normal(size=(2, TOKENS, width))
                expected = rolled_logits(q, k, speed)
                margins["rolled"].append(relative_error(rope_logits(q, k, speed) - expected, expected))
                margins["encoding"].append(relative_error(rotated_logits(rollpe, q, k) - expected, expected))
    for name, encodings in (("bias-equal", BIASES), ("rotation-equal", ROTATIONS)):
        for encoding, depth, causal in product(encodings, depths, (True, False)):
            for _ in range(max(1, tries // 40)):
                outputs = equal_token_outputs(encoding, depth, causal, int(rng.integers(2**31)))
                margins[name].append(relative_spread(outputs))
    for causal in (True, False):
        for target in (np.arange(TOKENS) / TOKENS, *rng.normal(size=(tries, TOKENS))):
            margins["factors"].append(relative_error(urpe_outputs(target, causal) - target, target))
