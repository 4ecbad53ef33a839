"""Statements on encodings from two related papers that are listed with arXiv 2511.11579, by their abstracts.

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

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.encodings import PositionalEncoding, build
from toeplens.encodings.rotary import Rotary
from toeplens.encodings.scoremap import URPE
from toeplens.model import Decoder, DecoderConfig
from toeplens.papers.mathematics.records import ROUNDING, ClaimsOn, Records, generator, relative_error, tally
from toeplens.studies.kit.claims import Claim

HEAD_DIMS = (3, 4, 7, 8, 16)
SPEEDS = (1, 2, 3)
POSITIONS = 16
BIASES = ("t5", "relative-table", "alibi", "kerple-log", "kerple-power", "sandwich", "dynamic-bias")
ROTATIONS = ("rope", "xpos", "rollpe")
DEPTHS = (1, 3)
STRETCH = 3.0  # of an encoding's random parameters: the published starts are near 0
_LISTED = "abstract, among the related papers listed with arXiv 2511.11579"
ROLLING = f"Do traveling waves make good positional encodings?, {_LISTED}"
POWERFUL = f"Your Transformer May Not be as Powerful as You Expect, {_LISTED}"

_ERROR = "largest relative error"
_APART = "largest difference of two positions' outputs, relative to the largest,"
TALLIES: dict[str, tuple[str, str]] = {
    "rolled": ("logits of rolled vectors are RoPE's in the Fourier basis, linear frequencies", _ERROR),
    "encoding": ("our RollPE is the roll", _ERROR),
    "own-width": (
        "a rotation of the head's own width is sufficient",
        "largest deviation of a shift from determinant 1 or an even width",
    ),
    "bias-equal": ("relative biases: equal tokens give equal outputs", _APART),
    "rotation-equal": ("rotations: equal tokens give equal outputs", _APART),
    "factors": ("URPE's factors give any outputs to equal tokens", _ERROR),
}


def rolled_logits(q: Float[np.ndarray, "N d"], k: Float[np.ndarray, "N d"], speed: int) -> Float[np.ndarray, "N N"]:
    """Products of queries and keys, each rolled by ``speed`` times its position."""
    a, b = (np.stack([np.roll(row, speed * i) for i, row in enumerate(x)]) for x in (q, k))
    return a @ b.T


def fourier_basis(width: int) -> Float[np.ndarray, "d wide"]:
    """The orthonormal real Fourier basis, a pair of columns a component: cosine and sine, or itself and zero."""
    places = np.arange(width)
    columns = []
    for component in range(width // 2 + 1):
        angles = 2 * np.pi * component * places / width
        single = 2 * component in (0, width)
        scale = np.sqrt((1 if single else 2) / width)
        columns += [scale * np.cos(angles), np.zeros(width) if single else scale * np.sin(angles)]
    return np.stack(columns, axis=1)


def rope_logits(q: Float[np.ndarray, "N d"], k: Float[np.ndarray, "N d"], speed: int) -> Float[np.ndarray, "N N"]:
    """The logits of our rotary encoding on the Fourier coefficients, frequencies 2π speed f/d, before their scale."""
    width = q.shape[1]
    basis = fourier_basis(width)
    frequencies = torch.arange(basis.shape[1] // 2, dtype=torch.float64) * (2 * np.pi * speed / width)
    sizes = {"d_model": basis.shape[1], "num_heads": 1, "head_dim": basis.shape[1], "max_len": len(q)}
    encoding = Rotary(frequencies.unsqueeze(0), pairing="interleaved", **sizes)
    return _logits(encoding, q @ basis, k @ basis)


def _package_logits(q: Float[np.ndarray, "N d"], k: Float[np.ndarray, "N d"], speed: int) -> Float[np.ndarray, "N N"]:
    width = q.shape[1]
    encoding = build("rollpe", d_model=width, num_heads=1, head_dim=width, max_len=len(q), speed=float(speed))
    return _logits(encoding, q, k)


def _logits(
    encoding: PositionalEncoding, q: Float[np.ndarray, "N d"], k: Float[np.ndarray, "N d"]
) -> Float[np.ndarray, "N N"]:
    vectors, places = torch.from_numpy(np.stack((q, k)))[:, None, None], torch.arange(len(q))
    a, b = encoding.rotate(vectors[0], vectors[1], places, places)
    return (a[0, 0] @ b[0, 0].T).numpy()


def no_rotation(width: int, speed: int) -> float:
    """0 if the shift can be a rotation of pairs (even width, determinant 1), otherwise the deviation."""
    shift = np.roll(np.eye(width), speed, axis=0)
    return max(float(width % 2), abs(float(np.linalg.det(shift)) - 1))


def _rolling(rng: np.random.Generator, tries: int) -> dict[str, Any]:
    rolled, encoding, own = [], [], []
    for width in HEAD_DIMS:
        for speed in SPEEDS:
            own.append(no_rotation(width, speed))
            for _ in range(tries // 4):
                q, k = rng.normal(size=(2, POSITIONS, width))
                wanted = rolled_logits(q, k, speed)
                rolled.append(relative_error(rope_logits(q, k, speed) - wanted, wanted))
                encoding.append(relative_error(_package_logits(q, k, speed) - wanted, wanted))
    return {"rolled": tally(rolled), "encoding": tally(encoding), "own-width": tally(own)}


def spread(outputs: Float[Tensor, "N d"]) -> float:
    """Largest difference of the outputs from the first one, relative to the largest entry."""
    return float((outputs - outputs[:1]).abs().max() / outputs.abs().max())


@torch.no_grad()
def stretch(encoding: PositionalEncoding) -> None:
    """Move an encoding's parameters far from their initial values, with torch's random generator."""
    for values in encoding.parameters():
        values.add_(STRETCH * torch.randn_like(values).abs())


def equal_tokens(encoding: str, depth: int, causal: bool, seed: int) -> Float[Tensor, "N d_model"]:
    """Outputs of a random decoder with large encoding parameters on one repeated token, by position."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        sizes = {"vocab_size": 4, "d_model": 16, "d_ff": 32, "num_layers": depth, "num_heads": 2, "max_len": POSITIONS}
        config = sizes | {"encoding": encoding, "causal": causal, "readout": "mean"}
        model = Decoder(DecoderConfig.model_validate(config)).double().eval()
        stretch(model.encoding)
        x, context = model.begin(torch.full((1, POSITIONS), seed % 4))
        for layer in range(depth):
            x = model.block(layer).finish(*model.layer_heads(layer, x, context, fused=False))
        return x[0]


def urpe_outputs(target: Float[np.ndarray, "N"], causal: bool) -> Float[np.ndarray, "N"]:
    """Output of our URPE attention on equal tokens with value 1, with factors fitted to ``target`` by least squares."""
    size = len(target)
    sizes = {"d_model": 4, "num_heads": 1, "head_dim": 4, "max_len": size}
    encoding = build("urpe", base="none", **sizes).double()
    assert isinstance(encoding, URPE)
    places = torch.arange(size)
    hidden = (
        torch.triu(torch.ones(size, size, dtype=torch.bool), 1) if causal else torch.zeros(size, size, dtype=torch.bool)
    )
    weights = torch.zeros(size, size, dtype=torch.float64).masked_fill(hidden, -torch.inf).softmax(-1)
    columns = np.subtract.outer(np.arange(size), np.arange(size)) + size - 1
    design = np.zeros((size, 2 * size - 1))
    np.add.at(design, (np.arange(size)[:, None], columns), weights.numpy())
    with torch.no_grad():
        encoding.factors.weight[:, 0] = torch.from_numpy(np.linalg.lstsq(design, target, rcond=None)[0])
        return encoding.transform_weights(weights[None, None], places, places)[0, 0].sum(-1).numpy()


def _equal(rng: np.random.Generator, tries: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"bias-equal": [], "rotation-equal": [], "factors": []}
    for name, encodings in (("bias-equal", BIASES), ("rotation-equal", ROTATIONS)):
        for encoding in encodings:
            for depth in DEPTHS:
                for causal in (True, False):
                    for _ in range(max(1, tries // 40)):
                        outputs = equal_tokens(encoding, depth, causal, int(rng.integers(2**31)))
                        found[name].append(spread(outputs))
    for causal in (True, False):
        for target in (np.arange(POSITIONS) / POSITIONS, *rng.normal(size=(tries, POSITIONS))):
            found["factors"].append(relative_error(urpe_outputs(target, causal) - target, target))
    return {name: tally(margins) for name, margins in found.items()}


def related(seed: int, *, tries: int = 200) -> dict[str, Any]:
    """RollPE compared with RoPE, and equal tokens under biases, rotations and factors.

    Arguments
        seed   of vectors, models and targets
        tries  targets; a quarter of it vectors of each width and speed, a fortieth models of each kind; 20 or more

    Returns ``tallies`` by statement (`tally`).
    """
    rng = generator(seed, tries)
    return {"seed": seed, "tallies": {**_rolling(rng, tries), **_equal(rng, tries)}}


_claim = ClaimsOn("related", TALLIES)
_BAR = f"A counterexample exceeds {ROUNDING:g} (rounding)."
CLAIMS: tuple[Claim[Records], ...] = (
    _claim(
        ROLLING,
        "rollpe-is-rope",
        "RollPE is mathematically equivalent to a particular configuration of RoPE.",
        f"All logits of np.roll compared with our rotary encoding with frequencies 2πsf/d on the real Fourier "
        f"coefficients, with a zero added to each unpaired one. {_BAR} Supporting, not in the statement: RoPE with the "
        f"head's own width is sufficient, so the shift is a rotation.",
        ("rolled", "encoding"),
        supporting=("own-width",),
    ),
    _claim(
        POWERFUL,
        "relative-bias-limits",
        "There are continuous sequence-to-sequence functions that Transformers with relative positional encodings "
        "cannot approximate at any depth and width: all that distinguish the positions of equal tokens.",
        f"Random decoders of one and three layers, causal and bidirectional, with large bias parameters, read one "
        f"repeated token. If the outputs are equal at all positions, the target i/N is missed by half its range. "
        f"{_BAR} Supporting, not in the abstract: the same for rotations.",
        ("bias-equal",),
        supporting=("rotation-equal",),
    ),
    _claim(
        POWERFUL,
        "urpe-can",
        "URPE's attention can: its factors on the weights give equal tokens any outputs.",
        f"This is the condition of the abstract that biases violate; universal approximation is not tested. Targets "
        f"i/N and random, factors by least squares. {_BAR}",
        ("factors",),
    ),
)
