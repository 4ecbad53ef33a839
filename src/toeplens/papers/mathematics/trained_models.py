"""Statements tested on trained models: on heads of decoders, untrained and trained, and on learned position tables.

Does the initialisation of a learned position table decide its learned geometry? (Ito et al. 2024, by its abstract) A
randomly initialised table has no order of positions: its geometry is learned. Here positions lie on a line or a grid
and hold a smooth random field (Gaussian, correlation exp(-δ²/2l²) at distance δ), quantised into equally likely levels.
A bidirectional one-layer decoder reads all levels but one, in random order and with their positions, and predicts the
missing one. This requires knowledge of the neighbours. The measure is Spearman's correlation, over all pairs of
positions, between the distances of their learned vectors and their true distances.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.random import Generator, Philox
from scipy.spatial.distance import pdist
from scipy.special import ndtri
from torch import Tensor

from toeplens.backends import DecoderSource
from toeplens.engine import examples_of
from toeplens.lens import AttentionTrace, LayerTrace, toeplitz_profile
from toeplens.lens.kit.intervals import spearman
from toeplens.lens.kit.position import position_parts
from toeplens.lens.kit.terms import pair_rotation
from toeplens.lens.stream import position_subspace
from toeplens.lens.toeplitz.spectrum import contraction
from toeplens.model import Decoder, DecoderConfig
from toeplens.papers.mathematics.position import MAX_OVERLAP, measure_curve
from toeplens.papers.mathematics.single_phase import single_phase
from toeplens.papers.mathematics.statements import Experiment, RecordCheck, Records, round_values, universal_finding
from toeplens.studies.kit.verdicts import Finding, above, below, difference, mean_contrast, unknown_finding
from toeplens.training import Run, RunSpec

# ---- real heads -----------------------------------------------------------------------------------------------------

LABELS = {"rope": "rope", "alibi": "alibi", "absolute": "sinusoidal", "learned": "learned"}  # label: encoding
INPUT_ENCODINGS = {"absolute": "the sinusoid", "learned": "a learned table"}  # encodings that add vectors at the input
STATES = ("untrained", "trained")
MAX_PHASE_ERROR = 0.05  # maximum relative error of one phase per diagonal
MIN_TOEPLITZ_SHARE = 0.99  # minimum share of energy of a Toeplitz matrix
NUM_SEQUENCES, NUM_PHASE_SEQUENCES = 64, 4  # sequences that are measured, and of these with one phase


def measure_heads(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Measure trained models and their untrained copies, one per label of `LABELS`, on their own test sets.

    Returns, for each label and state, tables [layers, heads] of the results of `contraction`, `single_phase` and
    `toeplitz_profile`. For added vectors: the overlap of their span with that of the word embeddings, and whether they
    are a curve (`measure_curve`).
    """
    return {
        f"{label} {state}": _measure_model(run.model() if state == "trained" else untrained_model(run.spec), run.spec)
        for label, run in runs.items()
        for state in STATES
    }


def untrained_model(spec: RunSpec) -> Decoder:
    """An untrained model with the run's configuration and seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return Decoder(spec.model).eval()


def _measure_model(model: Decoder, spec: RunSpec) -> dict[str, Any]:
    examples = examples_of(spec, NUM_SEQUENCES)
    tokens, lengths = torch.from_numpy(examples.tokens), torch.from_numpy(examples.lengths)
    trace = AttentionTrace(DecoderSource(model), tokens, lengths)
    tables: dict[str, Any] = defaultdict(list)
    for layer in trace:
        if layer.encoding.coupling == "input":
            # of the position-position part of the logits over all pairs; exact only at the input
            p, key_p = position_parts(trace, layer, "input" if layer.layer == 0 else "mean")
            options = {"causal": False, "lengths": layer.traced_lengths, "layout": "bhnd"}
            measures = {"position_toeplitz": toeplitz_profile(*layer.project_part(p, key_p), **options).pool(0).share}
        else:
            measures = {name: values for name, values in vars(contraction(layer)).items() if values.isfinite().all()}
            measures |= _phase_measures(layer)
        for name, values in measures.items():
            tables[name].append(round_values(values.detach() if isinstance(values, Tensor) else values))
    first = trace[0]
    if first.input_position_part is not None and bool(first.input_position_part.any()):
        spans = position_subspace(first.input_position_part.detach(), model.embedding.weight.detach())
        tables["spans"] = {
            "rank": spans.rank,
            "word_rank": spans.word_rank,
            "width": model.config.d_model,
            "least_angle": round(float(spans.angles.min()), 4),
            "overlap": round(spans.overlap, 6),
            "chance": round(spans.chance, 6),
            "separable": spans.separable,
        }
        tables["curve"] = measure_curve(first.input_position_part.detach().double().numpy())
    return dict(tables)


def _phase_measures(layer: LayerTrace) -> dict[str, np.ndarray]:
    rotation = pair_rotation(layer)
    if rotation is None:
        return {}
    rows = []
    for sequence in range(NUM_PHASE_SEQUENCES):
        present = layer.present[sequence]
        q, k = (rotation.complex_pairs(x[sequence].double())[:, present] for x in (layer.q, layer.k))
        phased = single_phase(q, k, rotation.frequencies[0], causal=layer.causal)
        rows.append((phased.error, phased.coherence, phased.concentration, phased.modulus[:, 1]))
    names = ("phase_error", "coherence", "concentration", "modulus")
    return dict(zip(names, np.mean(rows, axis=0), strict=True))


def _head_means(records: Records, model: str, name: str, layers: slice = slice(None)) -> list[float]:
    """The mean over heads of a table [layers, heads], for each seed that has it."""
    models = [record.get(model, {}) for record in records["heads"]]
    return [float(np.array(values[name])[layers].mean()) for values in models if name in values]


def _rope_below(text: str, name: str, threshold: float, records: Records) -> list[Finding]:
    """A number of RoPE's heads, mean over heads, untrained and trained."""
    return [
        below(f"{state}: {text}, mean over heads", _head_means(records, f"rope {state}", name), threshold)
        for state in STATES
    ]


def _against_bias(records: Records) -> list[Finding]:
    findings = []
    for state in STATES:
        rope, alibi = (_head_means(records, f"{label} {state}", "width") for label in ("rope", "alibi"))
        text = f"{state}: ratio of the ranges with and without position, RoPE − ALiBi"
        findings.append(below(text, difference(rope, alibi), 0.0))
    return findings


def _schur(records: Records) -> list[Finding]:
    models = [record.get(f"rope {state}", {}) for state in STATES for record in records["heads"]]
    values = [value for model in models for row in model.get("bound", ()) for value in row]
    statement = "the rotated keys' largest eigenvalue is at most the sum over frequencies of theirs"
    worst = f"largest {max(values):.3f}" if values else ""
    violations = sum(value > 1 + 1e-9 for value in values)
    return [universal_finding(statement, tried=len(values), violations=violations, worst=worst)]


def _toeplitz_share(where: str, layers: slice, records: Records) -> list[Finding]:
    text = f"Toeplitz share of the position-position logits under the sinusoid, {where}"
    values = {state: _head_means(records, f"absolute {state}", "position_toeplitz", layers) for state in STATES}
    return [above(f"{state}: {text}", values[state], MIN_TOEPLITZ_SHARE, grain=0) for state in STATES]


def _overlap(state: str, records: Records) -> list[Finding]:
    findings = []
    for label, name in INPUT_ENCODINGS.items():
        models = [record.get(f"{label} {state}", {}) for record in records["heads"]]
        ratios = [model["spans"]["overlap"] / model["spans"]["chance"] for model in models if "spans" in model]
        text = f"{name}, {state}: share of the words' variance in the positions' span / share by chance"
        findings.append(above(text, ratios, MAX_OVERLAP))
    return findings


_RANGE = "eigenvalue range of the logits, rotated / unrotated"
HEAD_CHECKS: dict[str, RecordCheck] = {
    "range": partial(_rope_below, _RANGE, "width", 1.0),
    "gram": partial(_rope_below, "largest eigenvalue of the keys' Gram matrix, rotated / unrotated", "gram", 1.0),
    "range-against-bias": _against_bias,
    "schur": _schur,
    "one-phase": partial(
        _rope_below, "smallest relative error with one phase per diagonal", "phase_error", MAX_PHASE_ERROR
    ),
    "toeplitz-first": partial(_toeplitz_share, "first layer", slice(0, 1)),
    "toeplitz-later": partial(_toeplitz_share, "later layers", slice(1, None)),
    **{f"overlap-{state}": partial(_overlap, state) for state in STATES},
}
heads = Experiment("heads", measure_heads, HEAD_CHECKS)

# ---- learned tables -------------------------------------------------------------------------------------------------

SIDES = {"line": (25,), "grid": (5, 5)}
INIT_STDS = {"small": 0.1, "large": 1.0}  # standard deviation of the table's first entries
LEVELS, CORRELATION_LENGTH = 8, 1.5
BATCH, LEARNING_RATE, TEST_EXAMPLES = 64, 3e-3, 2000
MAX_LOSS = 0.75 * math.log(LEVELS)  # nats; the uniform baseline is ln 8
MIN_CORRELATION, MIN_GAIN = 0.5, 0.2

Batch = tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, "B"]]


def coordinates(sides: tuple[int, ...]) -> Float[np.ndarray, "N d"]:
    """Coordinates of the positions of a line, a grid, ..."""
    return np.stack(np.meshgrid(*map(np.arange, sides), indexing="ij"), -1).reshape(-1, len(sides)).astype(float)


def sample_fields(rng: Generator, points: Float[np.ndarray, "N d"], count: int) -> Iterator[Batch]:
    """Endless batches: levels in random order with the last one masked; their positions; the masked level."""
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    factor = np.linalg.cholesky(np.exp(-(distances**2) / (2 * CORRELATION_LENGTH**2)) + 1e-9 * np.eye(len(points)))
    thresholds = ndtri(np.arange(1, LEVELS) / LEVELS)
    while True:
        levels = np.digitize(rng.normal(size=(count, len(points))) @ factor.T, thresholds)
        order = rng.permuted(np.tile(np.arange(len(points)), (count, 1)), axis=1)
        levels = np.take_along_axis(levels, order, 1)
        target = levels[:, -1].copy()
        levels[:, -1] = LEVELS
        yield torch.from_numpy(levels), torch.from_numpy(order), torch.from_numpy(target)


def train_table(points: Float[np.ndarray, "N d"], init_std: float, seed: int, steps: int) -> dict[str, float]:
    """Train one model; returns the correlation of its table with the positions, and its test loss in nats."""

    def loss_of(batch: Batch) -> Tensor:
        levels, positions, target = batch
        return torch.nn.functional.cross_entropy(model(levels, positions=positions), target)

    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 4, "max_len": len(points), "dropout": 0.0}
    classes = {"vocab_size": LEVELS + 1, "num_classes": LEVELS, "readout": "last", "causal": False}
    encoding = {"encoding": "learned", "encoding_options": {"init_std": init_std}}
    rng = Generator(Philox(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Decoder(DecoderConfig.model_validate(sizes | classes | encoding))
        optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        for _, batch in zip(range(steps), sample_fields(rng, points, BATCH), strict=False):
            optimiser.zero_grad()
            loss_of(batch).backward()
            optimiser.step()
    with torch.no_grad():
        loss = float(loss_of(next(sample_fields(rng, points, TEST_EXAMPLES))))
        table = model.encoding.get_parameter("weight").double().numpy()
    correlation = float(spearman(np.stack((pdist(table), pdist(points)))))
    return {"mirrored": round_values(correlation), "loss": round_values(loss)}


def _small_norm(seed: int, *, steps: int = 4000) -> dict[str, Any]:
    """``models``: the result of `train_table` by layout and initialisation."""
    return {
        "seed": seed,
        "models": {
            layout: {start: train_table(coordinates(sides), std, seed, steps) for start, std in INIT_STDS.items()}
            for layout, sides in SIDES.items()
        },
    }


def _mirror_asymmetry(records: Records) -> list[Finding]:
    findings, runs = [], records["small_norm"]
    for layout in SIDES:
        models = [{run["seed"]: run["models"][layout][start] for run in runs} for start in INIT_STDS]
        small, large = (
            {seed: out["mirrored"] for seed, out in group.items() if out["loss"] < MAX_LOSS} for group in models
        )
        num_excluded = 2 * len(runs) - len(small) - len(large)
        exclusions = f" ({num_excluded} of {2 * len(runs)} models excluded: not learned)" if num_excluded else ""
        if not small or not large:
            findings.append(unknown_finding(f"{layout}{exclusions}", "no model has learned"))
            continue
        words = f"{layout}: rank correlation of learned and true distances, small initialisation"
        findings.append(above(words + exclusions, mean_contrast(small, 0.02), MIN_CORRELATION))
        findings.append(above(f"{words} − large{exclusions}", difference(small, large, grain=0.02), MIN_GAIN))
    return findings


small_norm = Experiment("small_norm", _small_norm, {"mirrored": _mirror_asymmetry})
