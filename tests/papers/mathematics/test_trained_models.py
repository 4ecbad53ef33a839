"""What is measured of real heads; learned tables, the fields that they learn from, and their verdict."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.builders import tiny

from toeplens.backends import DecoderSource
from toeplens.engine import examples_of
from toeplens.lens import AttentionTrace
from toeplens.model import Decoder
from toeplens.papers.mathematics import CLAIMS
from toeplens.papers.mathematics.single_phase import single_phase
from toeplens.papers.mathematics.trained_models import (
    CORRELATION_LENGTH,
    LEVELS,
    MAX_LOSS,
    SIDES,
    coordinates,
    measure_heads,
    sample_fields,
    train_table,
    untrained_model,
)
from toeplens.studies import combine
from toeplens.studies.kit.claims import findings_of
from toeplens.training import RunSpec, train

FIRST = 4  # sequences whose phases are looked at


def trace_of(model: Decoder, spec: RunSpec, count: int = 64) -> AttentionTrace:
    result = examples_of(spec, count)
    return AttentionTrace(DecoderSource(model), torch.from_numpy(result.tokens), torch.from_numpy(result.lengths))


def test_phases_match_each_checkpoint_of_the_model(tmp_path: Path) -> None:
    """By complex numbers, pairs of neighbours turned by 10000^(-2t/d); to the six digits of a record."""
    run = train(tiny(lr=0.05, epochs=3), tmp_path)
    record = measure_heads({"rope": run})
    errors = []
    for state, model in (("trained", run.model()), ("untrained", untrained_model(run.spec))):
        layer = trace_of(model, run.spec)[0]
        width = layer.q.shape[-1]
        rates = 10000.0 ** (-2 * np.arange(width // 2) / width)
        rows = []
        for sequence in range(FIRST):
            size = int(layer.traced_lengths[sequence])
            q, k = (x[sequence, :, :size].double().unflatten(-1, (-1, 2)) for x in (layer.q, layer.k))
            actual = single_phase(torch.view_as_complex(q), torch.view_as_complex(k), rates)
            rows.append((actual.error, actual.coherence, actual.concentration, actual.modulus[:, 1]))
        names = ("phase_error", "coherence", "concentration", "modulus")
        for name, values in zip(names, np.mean(rows, axis=0), strict=True):
            np.testing.assert_allclose(record[f"rope {state}"][name][0], values, rtol=1e-4, err_msg=f"{name}, {state}")
        errors.append(record[f"rope {state}"]["phase_error"][0])
    assert errors[0] != pytest.approx(errors[1], rel=1e-2), "training changes them"


def test_input_positions_are_exact_in_layer_1_and_estimated_later(tmp_path: Path) -> None:
    """The Toeplitz share of their part of the logits, by loops over offsets of all sequences; to six digits."""
    run = train(tiny("sinusoidal", model={"num_layers": 2}), tmp_path)
    actual = measure_heads({"absolute": run})["absolute trained"]["position_toeplitz"]
    assert len(actual) == 2
    layer = trace_of(run.model(), run.spec)[0]
    vectors = layer.input_position_part.detach().expand_as(layer.inputs)
    q, k = layer.project_part(vectors, vectors)
    logits = (q @ k.mT).double()
    for head in range(q.shape[1]):
        offsets: dict[int, list[float]] = defaultdict(list)
        for table, size in zip(logits[:, head].tolist(), layer.traced_lengths.tolist(), strict=True):
            for i, j in itertools.product(range(size), repeat=2):
                offsets[i - j].append(table[i][j])
        along = sum(sum(values) ** 2 / len(values) for values in offsets.values())
        whole = sum(value**2 for values in offsets.values() for value in values)
        assert actual[0][head] == pytest.approx(along / whole, rel=1e-4)


def test_fields_are_smooth_even_and_hide_their_last_level() -> None:
    points = coordinates((3, 3))
    levels, order, hidden = (values.numpy() for values in next(sample_fields(np.random.default_rng(0), points, 20_000)))
    assert (levels[:, -1] == LEVELS).all()
    assert (np.sort(order, axis=1) == np.arange(9)).all()
    levels[:, -1] = hidden
    shares = np.bincount(levels.ravel(), minlength=LEVELS) / levels.size
    assert np.abs(shares - 1 / LEVELS).max() < 0.01
    text = np.empty_like(levels)
    np.put_along_axis(text, order, levels, 1)
    actual = np.corrcoef(text.T)
    for first, second in combinations(range(9), 2):
        expected = math.exp(-(math.dist(points[first], points[second]) ** 2) / (2 * CORRELATION_LENGTH**2))
        assert actual[first, second] == pytest.approx(expected, abs=0.06), "levels of equal shares keep most of it"


def test_training_is_deterministic_per_seed() -> None:
    points = coordinates((3, 2))
    first, second, other = (train_table(points, 0.1, seed, 5) for seed in (1, 1, 2))
    assert first == second != other


@pytest.mark.heavy
def test_short_training_moves_neighbours_together() -> None:
    points = coordinates((4, 4))
    before, after = (train_table(points, 0.1, 0, steps) for steps in (1, 1000))
    assert before["mirrored"] < 0.4 < 0.7 < after["mirrored"]
    assert after["loss"] < MAX_LOSS < before["loss"]


@pytest.mark.parametrize(
    ("small", "large", "loss", "seeds", "expected"),
    [
        (0.8, 0.1, 1.1, 5, "holds"),
        (0.8, 0.75, 1.1, 5, "fails"),
        (0.8, 0.1, 2.0, 5, "undecided"),
        (0.8, 0.1, 1.1, 0, "undecided"),
    ],
)
def test_the_verdict_follows_the_tables(small: float, large: float, loss: float, seeds: int, expected: str) -> None:
    runs: list[dict[str, Any]] = []
    for seed in range(seeds):
        actual = {"small": small + 0.01 * (seed - 2), "large": large + 0.01 * (seed - 2)}
        models = {start: {"mirrored": mirrored, "loss": loss} for start, mirrored in actual.items()}
        runs.append({"seed": seed, "models": dict.fromkeys(SIDES, models)})
    (claim,) = (claim for claim in CLAIMS if claim.id == "small-norm-interpretable")
    assert combine(findings_of(claim.check, {"small_norm": runs})) == expected
