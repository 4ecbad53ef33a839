"""MLA's logits (arXiv 2505.13027, eq. 12): as printed, with J in place of I, and corrected.

Eq. 12 gives the complex logits as G ∘ (αG_e + I), G the sum of the four Gram matrices of content and position. A head
of eq. 11 has a content branch q^C, k^C and a rotary branch q^R, k^R with parameters of their own. What holds (theory,
section 3): with (E_t)_ij = e^{i(i-j)θ_t} and B_t = Q_t K_t^H of the rotary branch, L = G_C + Re Σ_t B_t∘E_t.

- I is no identity of ∘: it keeps the content branch on the diagonal alone. J, all ones, is the identity.
- With J, one G and one Toeplitz factor, whatever its entries, L - Re G is Re of G times one number a diagonal: exact
  for one frequency, and not for more.
- With branches of their own and J, c_1 A + c_2 B in place of G (A and B the branches' complex Gram matrices) would need
  the numbers before A, A∘E, B, B∘E to be a 2 x 2 matrix (c_1, αc_1; c_2, αc_2) of rank 1, where L has the identity. The
  nearest matrix of rank 1 to the identity is 1 away, so the error is at least the least singular value of the design.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Complex, Float

from toeplens.encodings import build
from toeplens.encodings.rotary import rotary_frequencies
from toeplens.papers.mathematics.records import ROUNDING, ClaimsOn, Records, generator, tally
from toeplens.studies.kit.claims import Claim

POSITIONS = 12
WIDTHS = (2, 4, 8, 16)  # dimensions of a rotary branch; 2 is one frequency
HEADS = 2
BASE = 10000.0
SOURCE = "arXiv 2505.13027 v1, eq. 12"

_ERROR = "largest relative error"
TALLIES: dict[str, tuple[str, str]] = {
    "identity": ("with I, one frequency, tied branches and the best α, the logits are as printed", _ERROR),
    "ones-one": ("with J, tied branches and one frequency", _ERROR),
    "ones-many": ("with J, tied branches and several frequencies with any one Toeplitz factor", _ERROR),
    "ones-own": ("with J, separate branches and one frequency, any mixture of the two and any α", _ERROR),
    "own": ("separate branches: L = G_C + Re Σ_t B_t∘E_t, each of four parts", _ERROR),
    "tied": ("tied branches: L = Re Σ_t W_t∘(αE_t + J) with α = 1", _ERROR),
}

Pairs = Complex[np.ndarray, "N n"]
Logits = Float[np.ndarray, "N N"]


def paired(x: Float[np.ndarray, "*B d"]) -> Complex[np.ndarray, "*B n"]:
    """Neighbouring dimensions as one complex number."""
    return x[..., ::2] + 1j * x[..., 1::2]


def waves(frequencies: Float[np.ndarray, "n"], size: int) -> Complex[np.ndarray, "n N N"]:
    """(E_t)_ij = e^{i(i-j)θ_t}."""
    offsets = np.subtract.outer(np.arange(size), np.arange(size))
    return np.exp(1j * frequencies[:, None, None] * offsets)


def grams(q: Pairs, k: Pairs) -> Complex[np.ndarray, "n N N"]:
    """Q_t K_t^H for each pair of dimensions."""
    return np.einsum("it,jt->tij", q, k.conj())


def ours(q: Float[np.ndarray, "N d"], k: Float[np.ndarray, "N d"], rotary_dim: int) -> Logits:
    """The logits of our MLA for one head [content; rotary], before their scale, float64."""
    sizes = {"d_model": HEADS * 4, "num_heads": HEADS, "head_dim": q.shape[1] - rotary_dim, "max_len": len(q)}
    places = torch.arange(len(q))
    vectors = torch.from_numpy(np.stack((q, k))).unsqueeze(1).unsqueeze(1).expand(-1, 1, HEADS, -1, -1)
    a, b = build("mla", rotary_dim=rotary_dim, base=BASE, **sizes).rotate(vectors[0], vectors[1], places, places)
    return (a[0, 0] @ b[0, 0].T).numpy()


def beyond_scalar(logits: Logits, fixed: Logits, turned: Complex[np.ndarray, "N N"]) -> float:
    """Smallest relative error of ``fixed`` + Re(α ``turned``) over complex α."""
    design = np.stack((np.real(turned).ravel(), -np.imag(turned).ravel()), axis=1)
    return _rest(design, (logits - fixed).ravel()) / _norm(logits)


def beyond_toeplitz(logits: Logits, fixed: Logits, gram: Complex[np.ndarray, "N N"]) -> float:
    """Smallest relative error of ``fixed`` + Re(``gram``∘T) over all complex Toeplitz T."""
    rest, size = logits - fixed, len(logits)
    squares = []
    for offset in range(1 - size, size):
        column = np.diagonal(gram, offset)
        squares.append(_rest(np.stack((np.real(column), -np.imag(column)), axis=1), np.diagonal(rest, offset)) ** 2)
    return float(np.sqrt(np.sum(squares))) / _norm(logits)


def beyond_mixture(
    logits: Logits,
    first: Complex[np.ndarray, "N N"],
    second: Complex[np.ndarray, "N N"],
    wave: Complex[np.ndarray, "N N"],
) -> float:
    """A lower bound for the relative error of Re((c_1 A + c_2 B)∘(αE + J)), over all complex c_1, c_2 and α."""
    terms = (first, first * wave, second, second * wave)
    design = np.stack([part.ravel() for term in terms for part in (np.real(term), -np.imag(term))], axis=1)
    return float(np.linalg.svd(design, compute_uv=False)[-1]) / _norm(logits)


def _rest(design: Float[np.ndarray, "m p"], wanted: Float[np.ndarray, "m"]) -> float:
    return _norm(wanted - design @ np.linalg.lstsq(design, wanted, rcond=None)[0])


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


def _head(rng: np.random.Generator, width: int) -> Float[np.ndarray, "vectors part N d"]:
    """q^C, k^C, q^R, k^R of a random head, each as content and position parts."""
    x = rng.normal(size=(2, POSITIONS, 2 * width))  # content and position
    maps = rng.normal(size=(4, width, 2 * width)) / np.sqrt(2 * width)
    return np.einsum("vdm,pnm->vpnd", maps, x)


def latent(seed: int, *, tries: int = 200) -> dict[str, Any]:
    """Compare every reading of eq. 12 with the logits of our MLA, on random heads.

    Arguments
        seed   of the heads
        tries  heads of each width, 20 or more

    Returns ``tallies`` by statement (`tally`).
    """
    rng = generator(seed, tries)
    margins: dict[str, list[float]] = {name: [] for name in TALLIES}
    for width in WIDTHS:
        turns = waves(rotary_frequencies(width, BASE).numpy(), POSITIONS)
        for _ in range(tries):
            parts = _head(rng, width)
            q_content, k_content, q, k = parts.sum(1)
            logits = ours(np.concatenate((q_content, q), 1), np.concatenate((k_content, k), 1), width)
            pairs = paired(parts)
            content = sum(a @ b.T for a in parts[0] for b in parts[1])
            turned = [grams(a, b) * turns for a in pairs[2] for b in pairs[3]]
            margins["own"].append(_norm(content + np.sum(turned, (0, 1)).real - logits) / _norm(logits))
            both = np.concatenate((q, q), 1), np.concatenate((k, k), 1)
            tied, each = ours(*both, width), grams(paired(q), paired(k))
            whole = each.sum(0)
            margins["tied"].append(_norm((each * (turns + 1)).sum(0).real - tied) / _norm(tied))
            if width == 2:
                margins["identity"].append(beyond_scalar(tied, np.diag(np.diag(whole.real)), whole * turns[0]))
                margins["ones-one"].append(_norm((whole * (turns[0] + 1)).real - tied) / _norm(tied))
                own = grams(paired(q_content), paired(k_content)).sum(0)
                margins["ones-own"].append(beyond_mixture(logits, own, whole, turns[0]))
            else:
                margins["ones-many"].append(beyond_toeplitz(tied, whole.real, whole))
    return {"seed": seed, "tallies": {name: tally(found) for name, found in margins.items()}}


_claim = ClaimsOn(
    "latent",
    TALLIES,
    f"Logits of our MLA for random heads at {POSITIONS} positions. A counterexample has a relative error of the whole "
    f"matrix above {ROUNDING:g} (rounding).",
)
CLAIMS: tuple[Claim[Records], ...] = (
    _claim(
        SOURCE,
        "mla-logits",
        "MLA's logits are the real part of (G_qk + G_qp + G_pk + G_p) ∘ (αG_e + I).",
        "In the most favourable case: both branches share their parameters, one frequency, the best complex α.",
        ("identity",),
    ),
    _claim(
        f"{SOURCE}, read with J",
        "mla-logits-ones",
        "MLA's logits are the real part of (G_qk + G_qp + G_pk + G_p) ∘ (αG_e + J), J all ones in place of I.",
        "Three parts: one frequency, several frequencies, and branches with separate parameters as in section 5.2.",
        ("ones-one", "ones-many", "ones-own"),
    ),
    _claim(
        f"{SOURCE}, corrected",
        "mla-logits-corrected",
        "MLA's logits are G_C + Re Σ_t B_t∘E_t, a plain branch and a rotary branch with separate Gram matrices; with "
        "tied branches they are Re Σ_t W_t∘(E_t + J).",
        "Proved: it is eq. 11 written out.",
        ("own", "tied"),
    ),
)
