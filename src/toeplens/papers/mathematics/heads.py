"""The papers' statements about spectra and phases, tested on real heads: untrained and trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toeplens.backends import DecoderSource
from toeplens.engine import examples_of
from toeplens.lens import AttentionTrace, LayerTrace, toeplitz_profile
from toeplens.lens.kit.position import position_parts
from toeplens.lens.kit.terms import rotation_of
from toeplens.lens.stream.subspace import position_subspace
from toeplens.lens.toeplitz.contraction import contraction
from toeplens.lens.toeplitz.single_phase import single_phase
from toeplens.model import Decoder
from toeplens.papers.mathematics.c4.manifold import curve
from toeplens.papers.mathematics.records import UNIVERSAL, Records, universal
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.contrasts import difference
from toeplens.studies.kit.verdicts import RULE, Finding, above, below, supporting
from toeplens.training import Run, RunSpec

NAME = "heads"
LABELS = {"rope": "rope", "alibi": "alibi", "absolute": "sinusoidal", "learned": "learned"}  # label: encoding
ADDED = {"absolute": "the sinusoid", "learned": "a learned table"}  # encodings that add vectors at the input
STATES = ("untrained", "trained")
ONE_PHASE = 0.05  # maximum relative error of one phase per diagonal
TOEPLITZ = 0.99  # minimum share of energy of a Toeplitz matrix
TURNED = 0.5  # of chance: with less overlap, training has made the spans more orthogonal
_SEQUENCES, _PHASED = 64, 4
_SOURCE = "arXiv 2505.13027 v1"


def heads(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Measure trained models and their untrained copies, one per label of `LABELS`, on their own test sets.

    Returns, for each label and state, tables [layers, heads] of the results of `contraction`, `single_phase` and
    `toeplitz_profile`. For added vectors: the overlap of their span with that of the word embeddings, and whether they
    are a curve (`toeplens.papers.mathematics.c4.manifold`).
    """
    record: dict[str, Any] = {}
    for label, run in runs.items():
        for state in STATES:
            model = run.model() if state == "trained" else fresh(run.spec)
            record[f"{label} {state}"] = _model(model, run.spec)
    return record


def fresh(spec: RunSpec) -> Decoder:
    """An untrained model with the run's configuration and seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return Decoder(spec.model).eval()


def _model(model: Decoder, spec: RunSpec) -> dict[str, Any]:
    examples = examples_of(spec, _SEQUENCES)
    tokens, lengths = torch.from_numpy(examples.tokens), torch.from_numpy(examples.lengths)
    trace = AttentionTrace(DecoderSource(model), tokens, lengths)
    found: dict[str, list[list[float]]] = {}

    def add(name: str, values: Tensor | np.ndarray) -> None:
        found.setdefault(name, []).append([float(f"{float(value):.6g}") for value in values])

    for layer in trace:
        if layer.encoding.coupling != "input":
            for name, values in vars(contraction(layer)).items():
                if bool(values.isfinite().all()):
                    add(name, values)
            for name, values in _phases(layer).items():
                add(name, values)
        else:
            add("position_toeplitz", _position_gram(trace, layer))
    made: dict[str, Any] = dict(found)
    first = trace[0]
    if first.vectors is not None and bool(first.vectors.any()):
        spans = position_subspace(first.vectors.detach(), model.embedding.weight.detach())
        made["spans"] = {
            "rank": spans.rank,
            "word_rank": spans.word_rank,
            "width": model.config.d_model,
            "least_angle": round(float(spans.angles.min()), 4),
            "overlap": round(spans.overlap, 6),
            "chance": round(spans.chance, 6),
            "separable": spans.separable,
        }
        made["curve"] = curve(first.vectors.detach().double().numpy())
    return made


def _phases(layer: LayerTrace) -> dict[str, np.ndarray]:
    rotation = rotation_of(layer)
    if rotation is None:
        return {}
    rows = []
    for sequence in range(_PHASED):
        there = layer.present[sequence]
        q, k = (rotation.pairs(x[sequence].double())[:, there] for x in (layer.q, layer.k))
        phased = single_phase(q, k, rotation.frequencies[0], causal=layer.causal)
        rows.append((phased.error, phased.coherence, phased.concentration, phased.modulus[:, 1]))
    means = np.mean(rows, axis=0)
    return dict(zip(("phase_error", "coherence", "concentration", "modulus"), means, strict=True))


def _position_gram(trace: AttentionTrace, layer: LayerTrace) -> Tensor:
    """Toeplitz share of the position-position part of the logits over all pairs; exact only at the input."""
    p, key_p = position_parts(trace, layer, "input" if layer.layer == 0 else "mean")
    q, k = layer.part(p, key_p)
    return toeplitz_profile(q, k, causal=False, lengths=layer.kept_lengths, layout="bhnd").pooled(0).share


# ---- the claims ----------------------------------------------------------------------------------------------------


def _rows(records: Records, model: str, name: str) -> list[np.ndarray]:
    """One table [layers, heads] per seed."""
    return [np.array(record[model][name]) for record in records[NAME] if name in record.get(model, {})]


def _means(records: Records, model: str, name: str, layers: slice = slice(None)) -> list[float]:
    return [float(table[layers].mean()) for table in _rows(records, model, name)]


def _narrower(records: Records) -> list[Finding]:
    logits = _contracts(records, "width", "eigenvalue range of the logits, rotated / unrotated")
    gram = _contracts(records, "gram", "largest eigenvalue of the keys' Gram matrix, rotated / unrotated")
    return [*logits, *map(supporting, gram)]


def _contracts(records: Records, name: str, text: str) -> list[Finding]:
    return [below(f"{state}: {text}, mean over heads", _means(records, f"rope {state}", name), 1.0) for state in STATES]


def _against_bias(records: Records) -> list[Finding]:
    findings = _contracts(records, "width", "eigenvalue range of the logits, rotated / unrotated")
    for state in STATES:
        rope, alibi = (_means(records, f"{label} {state}", "width") for label in ("rope", "alibi"))
        text = f"{state}: ratio of the ranges with and without position, RoPE − ALiBi"
        findings.append(below(text, difference(rope, alibi), 0.0))
    return findings


def _schur(records: Records) -> list[Finding]:
    tables = [table for state in STATES for table in _rows(records, f"rope {state}", "bound")]
    values = np.concatenate([table.ravel() for table in tables]) if tables else np.empty(0)
    worst = f"largest {values.max():.3f}" if len(values) else ""
    return [
        universal(
            "the rotated keys' largest eigenvalue is at most the sum over frequencies of theirs",
            tried=len(values),
            violations=int((values > 1 + 1e-9).sum()),
            worst=worst,
        )
    ]


def _one_phase(records: Records) -> list[Finding]:
    return [
        below(
            f"{state}: smallest relative error with one phase per diagonal, mean over heads",
            _means(records, f"rope {state}", "phase_error"),
            ONE_PHASE,
        )
        for state in STATES
    ]


def _gram(records: Records) -> list[Finding]:
    def toeplitz(where: str, layers: slice) -> list[Finding]:
        text = f"Toeplitz share of the position-position logits under the sinusoid, {where}"
        return [
            above(
                f"{state}: {text}", _means(records, f"absolute {state}", "position_toeplitz", layers), TOEPLITZ, grain=0
            )
            for state in STATES
        ]

    return [*toeplitz("first layer", slice(0, 1)), *map(supporting, toeplitz("later layers", slice(1, None)))]


def _not_orthogonal(records: Records) -> list[Finding]:
    def shared(label: str, state: str) -> Finding:
        text = f"{ADDED[label]}, {state}: share of the words' variance in the positions' span / share by chance"
        models = [record.get(f"{label} {state}", {}) for record in records[NAME]]
        spans = [model["spans"] for model in models if "spans" in model]
        return above(text, [each["overlap"] / each["chance"] for each in spans], TURNED)

    return [
        *(shared(label, "trained") for label in ADDED),
        *(supporting(shared(label, "untrained")) for label in ADDED),
    ]


CLAIMS: tuple[Claim[Records], ...] = (
    Claim(
        "heads-contraction",
        f"{_SOURCE}, section 3.3 and Proposition B.3",
        "RoPE's rotation narrows the range of eigenvalues of a real head's matrices.",
        f"The ratio with / without the rotation, mean over all heads, is below 1 for untrained and for trained models: "
        f"for the logits' symmetric part (section 3.3). Supporting: for the keys' Gram matrix. {RULE}",
        _narrower,
    ),
    Claim(
        "heads-contraction-additive",
        f"{_SOURCE}, section 3.3",
        "The rotation contracts the range of eigenvalues relative to an additive bias.",
        f"Ratio of the ranges with and without position, mean over heads: RoPE's is below 1, and RoPE − ALiBi is below "
        f"0, for untrained and for trained models. {RULE}",
        _against_bias,
    ),
    Claim(
        "heads-schur",
        f"{_SOURCE}, Proposition B.3, corrected",
        "Schur's bound for a real head: the rotated keys' largest eigenvalue is at most the sum of those of the "
        "frequencies' own Gram matrices (each frequency's spectrum is unchanged by its rotation).",
        UNIVERSAL,
        _schur,
    ),
    Claim(
        "heads-single-phase",
        f"{_SOURCE}, eq. 9 and B.1",
        "A rotary head's logits are its Gram matrix times one unimodular Toeplitz matrix.",
        f"The smallest relative error of the logits with one free phase per diagonal, mean over heads, is below "
        f"{ONE_PHASE:g}. The form is exact in the paper, so larger errors are not rounding. {RULE}",
        _one_phase,
    ),
    Claim(
        "position-gram-toeplitz",
        f"{_SOURCE}, section 3.2",
        "With positions added at the input, the position-position part of the logits is Toeplitz.",
        f"Its Toeplitz share over all pairs, mean over heads, is above {TOEPLITZ:g} in the first layer, where the "
        f"decomposition is exact. Supporting: in later layers, where it uses means. {RULE}",
        _gram,
    ),
    Claim(
        "heads-not-orthogonal",
        f"{_SOURCE}, Appendix C.4",
        "The added position vectors are not orthogonal to the word embeddings of a model.",
        f"Independent random spans are never orthogonal, so the smallest angle is not informative. Instead: does "
        f"training make the spans more orthogonal? For both encodings that add vectors, the share of the words' "
        f"variance in the span of the positions, divided by the share by chance (rank / width), is above {TURNED:g}; "
        f"orthogonal spans have 0. Supporting: the same for untrained models. {RULE}",
        _not_orthogonal,
    ),
)
