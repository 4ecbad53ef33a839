"""The circuit of the costliest head: which head, what its silence costs, and where it looks, each by other means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.builders import tiny
from torch.nn import functional as F

from toeplens.engine.circuit import KEYS, PLACES, Circuit, circuit
from toeplens.engine.measures import as_record, batches_of, examples_of, measure_run, trace_of
from toeplens.lens import ablate_bands, ablate_heads
from toeplens.sources import DecoderSource
from toeplens.training import Run, train

COUNT = 20
COUNTED = {"length": 8, "vocab_size": 12, "num_triggers": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny(epochs=4, model={"dropout": 0.0}), tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def found(run: Run) -> Circuit:
    batches = batches_of(run.spec, examples_of(run.spec, COUNT), torch.device("cpu"))
    return circuit(DecoderSource(run.model()), batches, run.spec.build_task(), run.spec.data_seed)


def test_it_is_the_head_that_costs_most_and_its_cost(run: Run, found: Circuit) -> None:
    batches = batches_of(run.spec, examples_of(run.spec, COUNT), torch.device("cpu"))
    heads = ablate_heads(DecoderSource(run.model()), batches, metric="loss")
    assert found.head == [int(place) for place in np.unravel_index(heads.drops.argmax(), heads.drops.shape)]
    assert found.cost == pytest.approx(heads.drops.max(), abs=1e-5)
    assert found.examples == heads.examples
    bands = ablate_bands(DecoderSource(run.model()), batches).drops[tuple(found.head)]
    np.testing.assert_allclose(found.bands, bands, atol=1e-6)
    assert ((found.low <= found.paths + 1e-9) & (found.paths <= found.high + 1e-9)).all()


def test_who_reads_it_is_the_path_cut_by_hand(run: Run, found: Circuit) -> None:
    """The readout alone: the last layer's output without what the head has added to it."""
    model, chosen = run.model(), examples_of(run.spec, COUNT)
    tokens, labels = torch.from_numpy(chosen.tokens), torch.from_numpy(chosen.labels)
    lengths = torch.from_numpy(chosen.lengths)
    layer, head = found.head
    with torch.no_grad():
        x, context = model.begin(tokens, lengths)
        own = torch.zeros_like(x)
        for index in range(model.config.num_layers):
            block = model.block(index)
            z = block.heads(x, context, read=None, fused=True)[1]
            if index == layer:
                only = torch.zeros_like(z)
                only[:, :, head] = z[:, :, head]
                own = block.attention.merge(only) - block.attention.out.bias
            x = block.finish(x, z)
        last = torch.arange(len(x)), context.lengths - 1 if context.lengths is not None else -1
        logits = [model.end(stream[last].unsqueeze(1), context) for stream in (x, x - own)]
        intact, cut = (F.cross_entropy(each, labels).item() for each in logits)
    assert found.readers[-1] == "readout"
    assert found.paths[-1] == pytest.approx(cut - intact, abs=1e-5)


def test_attention_is_told_apart_by_the_triggers(run: Run, found: Circuit) -> None:
    chosen, (layer, head) = examples_of(run.spec, COUNT), found.head
    weights = trace_of(run.model(), chosen)[layer].weights()[:, head].double().numpy()
    words = set(run.spec.build_task().marked_words(run.spec.data_seed).tolist())
    rows = []
    for text, length, each in zip(chosen.tokens, chosen.lengths, weights, strict=True):
        marked = [place for place in range(length) if int(text[place]) in words]
        places = (marked[0], marked[-1], length - 1)
        row = []
        for query in places:
            told, left = [], dict(enumerate(each[query]))
            for key in (*places, query):
                told.append(left.pop(key, 0.0))
            row.append([*told, sum(left.values())])
        rows.append(row)
    assert found.attention.shape == (len(PLACES), len(KEYS))
    np.testing.assert_allclose(found.attention, np.mean(rows, axis=0), atol=1e-6)
    np.testing.assert_allclose(found.attention.sum(1), 1, atol=1e-6)


def test_it_is_a_measure_of_a_run_and_reads_back(run: Run, found: Circuit) -> None:
    content = measure_run(run, "circuit", examples=COUNT)
    again = as_record("circuit", content, "here")
    assert isinstance(again, Circuit)
    assert again.head == found.head
    np.testing.assert_allclose(again.paths, found.paths, atol=1e-6)


def test_texts_without_triggers_have_no_attention_to_tell_apart(tmp_path: Path) -> None:
    other = train(tiny(task="trigger-count", task_options=COUNTED), tmp_path)
    content = measure_run(other, "circuit", examples=COUNT)
    again = as_record("circuit", content, "here")
    assert isinstance(again, Circuit)
    assert np.isnan(again.attention).all()
