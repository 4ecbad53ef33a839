"""A study of language models made up for the page's tests: every figure comes from a rule, nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
from tests.studies import measures

from toeplens.engine.language import AtLength, Bits, Copied, Copying, Extended, Extension, HeadPatterns, Needle, Needles
from toeplens.engine.language.bits import Interval
from toeplens.lens import HeadAblation
from toeplens.studies import CellResult, Key, Results
from toeplens.studies.grid import Grid, GridSpec, cells, grid_spec

LENGTH, LAYERS, HEADS = 64, 3, 4
FACTORS = (1.0, 2.0, 4.0, 8.0)
GUESS = 1 / 26
TOO_LONG = "length must be reached by at least 2 documents of the test split, got 1024, reached by 1."
NO_WAY = "encoding must be 'rope' or 'nope' to extend the length after training, got {!r}."
NO_ROOM = "distance: two spans of 32 tokens do not stand 16 tokens apart."

# bits at the training length, and lost at 4 times it
BITS = {"rope": 2.05, "p-rope": 2.052, "alibi": 2.08, "nope": 2.16, "sinusoidal": 2.13, "t5": 2.07}
LOST = {"rope": 0.42, "p-rope": 0.3, "alibi": -0.02, "nope": 0.03, "sinusoidal": 0.9, "t5": 0.004}
FINDS = {"rope": 0.8, "p-rope": 0.7, "alibi": 0.5, "nope": 0.15, "sinusoidal": 0.1, "t5": 0.6}
KEEPS = {"alibi": 0.7, "t5": 0.8}  # share of what is found that is left at 4 times the length; 0.1 for the others
SECONDS = {"t5": 30.0, "alibi": 14.0}  # 10 for the others
METHODS = {"none": 0.0, "interpolation": -0.05, "ntk": -0.25, "yarn": -0.3, "longrope": -0.28, "rerope": 0.002}


def language_spec(labels: Sequence[str] = tuple(BITS), **changes: Any) -> GridSpec:
    """One task by these encodings, three seeds."""
    titles = dict(zip(BITS, ("RoPE", "p-RoPE", "ALiBi", "NoPE", "Sinusoid", "T5"), strict=True))
    content = {
        "title": "Language, made up",
        "seeds": 3,
        "first_seed": 300,
        "tasks": {"language": {"title": "Language", "options": {"length": LENGTH}}},
        "encodings": {label: {"title": titles[label]} for label in labels},
        "model": {"num_layers": LAYERS, "num_heads": HEADS, "d_model": 32, "d_ff": 64},
        "training": {"train_examples": 64, "test_examples": 32, "epochs": 1},
        "measures": ["bits", "needles", "copying", "patterns", "behaviour", "frequency", "position-loss"],
    }
    return grid_spec(content | changes)


def around(value: float, half: float = 0.01) -> Interval:
    """An interval about a value."""
    return Interval(value, value - half, value + half)


def _jitter(key: Key) -> float:
    """Of a seed's model, the same in all its figures: -0.004, 0 and 0.004 bits."""
    return 0.004 * (key.seed % 3 - 1)


def bits_of(key: Key) -> Bits:
    base, lost = BITS[key.label] + _jitter(key), LOST[key.label]
    rows = []
    for factor in FACTORS:
        gain = lost * log2(factor) / 2
        found = (base + 0.1 / factor + gain / 2, base + 0.08 / factor, base + gain, gain)
        rows.append(AtLength(round(factor * LENGTH), factor, 24, 12, *map(around, found)))
    rows.append(AtLength(16 * LENGTH, 16.0, why=TOO_LONG))
    edges = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    positions = [around(base + 3 / (1 + at) + max(0.0, lost * (at - 6) / 3)) for at in range(10)]
    counted = {"0": 4.6, "1": 3.9, "2": 3.1, "3": 2.6}
    return Bits(around(base), 0.55, 512, 60, edges, positions, tuple(rows), counted)


def needles_of(key: Key) -> Needles:
    rows = []
    for factor in (0.5, 1.0, 2.0, 4.0):
        for depth in (0.0, 0.5, 1.0):
            kept = 1.0 if factor <= 1 else KEEPS.get(key.label, 0.1) ** (log2(factor) / 2)
            found = min(1.0, max(0.0, FINDS[key.label] * kept + 0.1 * (depth - 0.5)))
            about = around(found, 0.0)
            rows.append(Needle(round(factor * LENGTH), factor, depth, 32, about, around(4.7 - 4 * found)))
    return Needles(GUESS, tuple(rows))


def copying_of(key: Key) -> Copying:
    rows = [Copied(16, 0.25, why=NO_ROOM)]
    for factor in (0.5, 0.9, 2.0, 4.0):
        found = FINDS[key.label] if factor < 1 else FINDS[key.label] * KEEPS.get(key.label, 0.1)
        shown = around(found, 0.0), around(4.7 - 4 * found), around(3 * found)
        rows.append(Copied(round(factor * LENGTH), factor, 32, *shown))
    return Copying(tuple(rows))


def extension_of(key: Key, *, tuned: bool) -> Extension:
    rows = []
    for method in ("none", "interpolation") if tuned else METHODS:
        for factor in (1.0, 2.0, 4.0):
            gained = (METHODS[method] - 0.02 * tuned) * log2(factor) / 2 + _jitter(key) * (method == "rerope")
            told = "factors 1.00, 1.80, 4.20" if method == "longrope" else ""
            found = around(BITS[key.label] + gained), around(gained, 0.0 if method == "none" and not tuned else 0.005)
            rows.append(Extended(method, tuned, round(factor * LENGTH), factor, 24, *found, told))
    return Extension(4, 7 if tuned else 0, tuple(rows))


def _drops(key: Key, scale: float, sharp: float) -> np.ndarray:
    """Heads in an order of the seed's, the n-th costing so many times less than the one before."""
    rng = np.random.default_rng(np.random.Philox(key.seed))
    each = scale * sharp ** -np.arange(LAYERS * HEADS, dtype=float).reshape(HEADS, LAYERS).T
    return np.stack([rng.permutation(row) for row in each])


def _ablation(drops: np.ndarray, **about: Any) -> HeadAblation:
    nothing = np.full((LAYERS, HEADS + 1), np.nan)
    return HeadAblation(drops, drops - 1e-4, drops + 1e-4, 1.4, nothing, 64, 0.2, metric="loss", **about)


def cell_of(key: Key) -> CellResult:
    """A finished model; of the labels of `BITS`."""
    rng = np.random.default_rng(np.random.Philox(sum(map(ord, f"{key.label}{key.seed}"))))
    share = rng.uniform(0, 1, (LAYERS, HEADS))
    weights = [np.round(share * scale, 4) for scale in (0.9, 0.1, 0.6)]
    made: dict[str, Any] = {
        "bits": bits_of(key).to_dict(),
        "needles": needles_of(key).to_dict(),
        "copying": copying_of(key).to_dict(),
        "patterns": HeadPatterns(weights[0], weights[1], weights[2], 32).to_dict(),
        "behaviour": measures.behaviour(share, 1 - share, 0 * share),
        "frequency": {"why": "encoding: it does not turn."},
        "position-loss": _ablation(
            _drops(key, 0.02, 2.0) * (key.label not in ("nope", "sinusoidal")), intervention="position"
        ).to_dict(),
    }
    for name, tuned in (("extension", False), ("extension-tuned", True)):
        known = key.label == "rope"
        made[name] = extension_of(key, tuned=tuned).to_dict() if known else {"why": NO_WAY.format(key.label)}
    seconds = SECONDS.get(key.label, 10.0) + 0.1 * (key.seed % 3)
    accuracy = np.full((LAYERS, HEADS), 0.01)
    return CellResult(
        key=key,
        run="0" * 16,
        status="complete",
        chance=0.2,
        length_chance=0.2,
        parameters=1000 + 40 * (key.label == "t5"),
        epochs=[{"train_accuracy": 0.5, "test_accuracy": 0.5, "seconds": seconds}],
        result={"test_accuracy": 0.55, "seconds": seconds},
        ablation=HeadAblation(accuracy, accuracy, accuracy, 0.55, np.full((LAYERS, HEADS + 1), 0.5), 64, 0.2),
        measures=made,
        by_loss=_ablation(_drops(key, 0.1, 1.5)),
    )


def language_grid(directory: Path, spec: GridSpec | None = None, finished: int | None = None) -> Grid:
    """Of its first ``finished`` models, all unless given, those of language."""
    spec = spec or language_spec()
    places = cells(spec)
    found = [cell_of(place.key) for place in places[:finished] if place.key.task == "language"]
    return Grid(
        directory=directory,
        spec=spec,
        results=Results(found),
        entries=[],
        relations=[],
        finished=len(found),
        total=len(places),
        share=len(found) / len(places),
        environment={"command": "made up", "seconds": 12.5, "torch": "2"},
    )
