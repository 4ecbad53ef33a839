"""The circuit of the costliest head: which head, what its silence costs, and where it looks, each by other means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.builders import tiny
from torch.nn import functional as F

from toeplens.backends import DecoderSource
from toeplens.engine.circuit import KEY_ROLES, QUERY_ROLES, Circuit, circuit
from toeplens.engine.measures import as_record, batches_of, examples_of, measure_run, trace_of
from toeplens.lens import ablate_bands, ablate_heads
from toeplens.training import Run, train

COUNT = 20
COUNTED = {"length": 8, "vocab_size": 12, "num_triggers": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny(epochs=4, model={"dropout": 0.0}), tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def circuit_record(run: Run) -> Circuit:
    batches = batches_of(run.spec, examples_of(run.spec, COUNT), torch.device("cpu"))
    return circuit(DecoderSource(run.model()), batches, run.spec.build_task(), run.spec.data_seed)


def test_the_circuit_starts_at_the_costliest_head(run: Run, circuit_record: Circuit) -> None:
    batches = batches_of(run.spec, examples_of(run.spec, COUNT), torch.device("cpu"))
    heads = ablate_heads(DecoderSource(run.model()), batches, metric="loss")
    assert circuit_record.head == [int(place) for place in np.unravel_index(heads.drops.argmax(), heads.drops.shape)]
    assert circuit_record.cost == pytest.approx(heads.drops.max(), abs=1e-5)
    assert circuit_record.examples == heads.examples
    bands = ablate_bands(DecoderSource(run.model()), batches).drops[tuple(circuit_record.head)]
    np.testing.assert_allclose(circuit_record.bands, bands, atol=1e-6)
    assert (
        (circuit_record.low <= circuit_record.paths + 1e-9) & (circuit_record.paths <= circuit_record.high + 1e-9)
    ).all()


def test_path_effects_match_cutting_the_path_by_hand(run: Run, circuit_record: Circuit) -> None:
    """The readout alone: the last layer's output without what the head has added to it."""
    model, chosen = run.model(), examples_of(run.spec, COUNT)
    tokens, labels = torch.from_numpy(chosen.tokens), torch.from_numpy(chosen.labels)
    lengths = torch.from_numpy(chosen.lengths)
    layer, head = circuit_record.head
    with torch.no_grad():
        x, context = model.start_pass(tokens, lengths)
        zeroed = torch.zeros_like(x)
        for index in range(model.config.num_layers):
            block = model.block(index)
            z = block.head_outputs(x, context, read_positions=None, fused=True)[1]
            if index == layer:
                only = torch.zeros_like(z)
                only[:, :, head] = z[:, :, head]
                zeroed = block.attention.merge(only) - block.attention.out.bias
            x = block.finish(x, z)
        last = torch.arange(len(x)), context.lengths - 1 if context.lengths is not None else -1
        logits = [model.compute_logits(stream[last].unsqueeze(1), context) for stream in (x, x - zeroed)]
        intact, cut = (F.cross_entropy(each, labels).item() for each in logits)
    assert circuit_record.readers[-1] == "readout"
    assert circuit_record.paths[-1] == pytest.approx(cut - intact, abs=1e-5)


def test_attention_is_split_by_trigger(run: Run, circuit_record: Circuit) -> None:
    chosen, (layer, head) = examples_of(run.spec, COUNT), circuit_record.head
    weights = trace_of(run.model(), chosen)[layer].weights()[:, head].double().numpy()
    words = set(run.spec.build_task().marked_words(run.spec.data_seed).tolist())
    rows = []
    for text, length, each in zip(chosen.tokens, chosen.lengths, weights, strict=True):
        marked = [place for place in range(length) if int(text[place]) in words]
        places = (marked[0], marked[-1], length - 1)
        row = []
        for query in places:
            groups, remaining = [], dict(enumerate(each[query]))
            for key in (*places, query):
                groups.append(remaining.pop(key, 0.0))
            row.append([*groups, sum(remaining.values())])
        rows.append(row)
    assert circuit_record.attention.shape == (len(QUERY_ROLES), len(KEY_ROLES))
    np.testing.assert_allclose(circuit_record.attention, np.mean(rows, axis=0), atol=1e-6)
    np.testing.assert_allclose(circuit_record.attention.sum(1), 1, atol=1e-6)


def test_the_circuit_is_a_measure_and_round_trips(run: Run, circuit_record: Circuit) -> None:
    content = measure_run(run, "circuit", examples=COUNT)
    restored = as_record("circuit", content, "here")
    assert isinstance(restored, Circuit)
    assert restored.head == circuit_record.head
    np.testing.assert_allclose(restored.paths, circuit_record.paths, atol=1e-6)


def test_sequences_without_triggers_have_no_attention_split(tmp_path: Path) -> None:
    other = train(tiny(task="trigger-count", task_options=COUNTED), tmp_path)
    content = measure_run(other, "circuit", examples=COUNT)
    restored = as_record("circuit", content, "here")
    assert isinstance(restored, Circuit)
    assert np.isnan(restored.attention).all()
