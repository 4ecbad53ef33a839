"""The papers' statements about spectra and phases, held against real heads: fresh ones, and ones that have learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toeplens.engine import examples_of
from toeplens.lens import AttentionTrace, LayerTrace, toeplitz_profile
from toeplens.lens.kit.rotation import rotation_of
from toeplens.lens.kit.splits import position_parts
from toeplens.lens.stream.subspace import position_subspace
from toeplens.lens.toeplitz.contraction import contraction
from toeplens.lens.toeplitz.single_phase import single_phase
from toeplens.model import Decoder
from toeplens.papers.mathematics.records import UNIVERSAL, Record, Records, universal
from toeplens.sources import DecoderSource
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.verdicts import RULE, Finding, above, below, opposite
from toeplens.training import Run, RunSpec

NAME = "heads"
LABELS = {"rope": "rope", "alibi": "alibi", "absolute": "sinusoidal"}  # and the encoding behind each
STATES = ("untrained", "trained")
ONE_PHASE = 0.05  # relative error up to which one phase a diagonal describes a head's logits
TOEPLITZ = 0.99  # share of energy from which a matrix is called Toeplitz
_SEQUENCES, _PHASED = 64, 4
_SOURCE = "arXiv 2505.13027 v1"


def heads(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Measure trained models and their fresh twins, one a label of `LABELS`, on their own test sets.

    Returns, for each label and state, tables, layers by heads, of what `contraction`, `single_phase` and
    `toeplitz_profile` find, and the angles between the span of the added vectors and that of the word embeddings.
    """
    record: dict[str, Any] = {}
    for label, run in runs.items():
        for state in STATES:
            model = run.model() if state == "trained" else fresh(run.spec)
            record[f"{label} {state}"] = _model(model, run.spec)
    return record


def fresh(spec: RunSpec) -> Decoder:
    """A model with the run's configuration and seed that has learned nothing."""
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
    """Toeplitz share of the position-position part of the logits over all pairs; exact at the input, else by means."""
    p, key_p = position_parts(trace, layer, "input" if layer.layer == 0 else "mean")
    q, k = layer.part(p, key_p)
    return toeplitz_profile(q, k, causal=False, lengths=layer.kept_lengths).pooled(0).share


# ---- the claims ----------------------------------------------------------------------------------------------------


def _rows(records: Records, model: str, name: str) -> list[np.ndarray]:
    """A table [layers, heads] a seed."""
    return [np.array(record[model][name]) for record in records[NAME] if name in record.get(model, {})]


def _means(records: Records, model: str, name: str, layers: slice = slice(None)) -> list[float]:
    return [float(table[layers].mean()) for table in _rows(records, model, name)]


def _narrower(records: Records) -> list[Finding]:
    words = {
        "width": "eigenvalue range of the logits, rotated over unrotated",
        "gram": "largest eigenvalue of the keys' Gram matrix, rotated over unrotated",
    }
    return [
        below(f"{state}: {text}, mean over heads", _means(records, f"rope {state}", name), 1.0)
        for state in STATES
        for name, text in words.items()
    ]


def _against_bias(records: Records) -> list[Finding]:
    findings = []
    for state in STATES:
        models = [f"{label} {state}" for label in ("rope", "alibi")]
        both = [record for record in records[NAME] if all("width" in record.get(model, {}) for model in models)]
        pairs = zip(*(_means({NAME: both}, model, "width") for model in models), strict=True)
        differences = [rope - alibi for rope, alibi in pairs]
        findings.append(below(f"{state}: range with over without position, RoPE - ALiBi", differences, 0.0))
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
            f"{state}: least relative error of one phase a diagonal, mean over heads",
            _means(records, f"rope {state}", "phase_error"),
            ONE_PHASE,
        )
        for state in STATES
    ]


def _gram(records: Records) -> list[Finding]:
    return [
        above(
            f"{state}: Toeplitz share of the position-position logits under the sinusoid, {where}",
            _means(records, f"absolute {state}", "position_toeplitz", layers),
            TOEPLITZ,
        )
        for state in STATES
        for where, layers in (("first layer", slice(0, 1)), ("later layers", slice(1, None)))
    ]


def _not_orthogonal(records: Records) -> list[Finding]:
    return [
        opposite(above(f"{state}: least angle between positions and words (degrees)", _angles(records, state), 89.0))
        for state in STATES
    ]


def _angles(records: Records, state: str) -> Sequence[float]:
    found: list[Record] = [record[f"absolute {state}"] for record in records[NAME] if f"absolute {state}" in record]
    return [row["spans"]["least_angle"] for row in found if "spans" in row]


CLAIMS: tuple[Claim[Records], ...] = (
    Claim(
        "heads-contraction",
        f"{_SOURCE}, section 3.3 and Proposition B.3",
        "RoPE's rotation narrows the range of eigenvalues of a real head's matrices.",
        f"Ratios with over without the rotation, of the logits' symmetric part and of the keys' Gram matrix, mean over "
        f"all heads below 1, for fresh models and for trained ones. {RULE}",
        _narrower,
    ),
    Claim(
        "heads-contraction-additive",
        f"{_SOURCE}, section 3.3",
        "The rotation contracts the range of eigenvalues relative to an additive bias.",
        f"Range with over without position: RoPE's mean over heads less ALiBi's below 0. {RULE}",
        _against_bias,
    ),
    Claim(
        "heads-schur",
        "corrected form of Proposition B.3",
        "What Schur's bound gives a real head: the rotated keys' largest eigenvalue is at most the sum of those of the "
        "frequencies' own Gram matrices (each frequency's spectrum is unchanged by its rotation).",
        UNIVERSAL,
        _schur,
    ),
    Claim(
        "heads-single-phase",
        f"{_SOURCE}, eq. 9 and B.1",
        "A rotary head's logits are its Gram matrix times one unimodular Toeplitz matrix.",
        f"The least relative error of the logits over one free phase a diagonal, mean over heads, below {ONE_PHASE:g}. "
        f"{RULE}",
        _one_phase,
    ),
    Claim(
        "position-gram-toeplitz",
        f"{_SOURCE}, section 3.2",
        "With positions added at the input, the position-position part of the logits is Toeplitz.",
        f"Its Toeplitz share over all pairs above {TOEPLITZ:g}, mean over heads: in the first layer, where the split "
        f"is exact, and in later ones (mean split). {RULE}",
        _gram,
    ),
    Claim(
        "heads-not-orthogonal",
        f"{_SOURCE}, Appendix C.4",
        "The added position vectors are not orthogonal to the word embeddings of a model.",
        f"The least principal angle between the two spans below 89 degrees. {RULE}",
        _not_orthogonal,
    ),
)
