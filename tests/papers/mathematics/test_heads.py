"""What is measured of real heads is of the model that it says, under the name that it says."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.builders import tiny

from toeplens.backends import DecoderSource
from toeplens.engine import examples_of
from toeplens.lens import AttentionTrace, single_phase
from toeplens.model import Decoder
from toeplens.papers.mathematics.heads import fresh, heads
from toeplens.training import RunSpec, train

FIRST = 4  # sequences whose phases are looked at


def trace_of(model: Decoder, spec: RunSpec, count: int = 64) -> AttentionTrace:
    found = examples_of(spec, count)
    return AttentionTrace(DecoderSource(model), torch.from_numpy(found.tokens), torch.from_numpy(found.lengths))


def test_phases_are_those_of_each_state_of_the_model(tmp_path: Path) -> None:
    """By complex numbers, pairs of neighbours turned by 10000^(-2t/d); to the six digits of a record."""
    run = train(tiny(lr=0.05, epochs=3), tmp_path)
    record = heads({"rope": run})
    errors = []
    for state, model in (("trained", run.model()), ("untrained", fresh(run.spec))):
        layer = trace_of(model, run.spec)[0]
        width = layer.q.shape[-1]
        rates = 10000.0 ** (-2 * np.arange(width // 2) / width)
        rows = []
        for sequence in range(FIRST):
            size = int(layer.kept_lengths[sequence])
            q, k = (x[sequence, :, :size].double().unflatten(-1, (-1, 2)) for x in (layer.q, layer.k))
            found = single_phase(torch.view_as_complex(q), torch.view_as_complex(k), rates)
            rows.append((found.error, found.coherence, found.concentration, found.modulus[:, 1]))
        for name, values in zip(
            ("phase_error", "coherence", "concentration", "modulus"), np.mean(rows, axis=0), strict=True
        ):
            np.testing.assert_allclose(record[f"rope {state}"][name][0], values, rtol=1e-4, err_msg=f"{name}, {state}")
        errors.append(record[f"rope {state}"]["phase_error"][0])
    assert errors[0] != pytest.approx(errors[1], rel=1e-2), "training changes them"


def test_positions_at_the_input_are_known_in_the_first_layer_and_estimated_later(tmp_path: Path) -> None:
    """The Toeplitz share of their part of the logits, by loops over offsets of all sequences; to six digits."""
    run = train(tiny("sinusoidal", model={"num_layers": 2}), tmp_path)
    found = heads({"absolute": run})["absolute trained"]["position_toeplitz"]
    assert len(found) == 2
    layer = trace_of(run.model(), run.spec)[0]
    vectors = layer.vectors.detach().expand_as(layer.inputs)
    q, k = layer.part(vectors, vectors)
    logits = (q @ k.mT).double()
    for head in range(q.shape[1]):
        offsets: dict[int, list[float]] = {}
        for table, size in zip(logits[:, head].tolist(), layer.kept_lengths.tolist(), strict=True):
            for i, j in itertools.product(range(size), repeat=2):
                offsets.setdefault(i - j, []).append(table[i][j])
        along = sum(sum(values) ** 2 / len(values) for values in offsets.values())
        whole = sum(value**2 for values in offsets.values() for value in values)
        assert found[0][head] == pytest.approx(along / whole, rel=1e-4)
