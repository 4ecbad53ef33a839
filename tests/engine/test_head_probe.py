"""What is seen of a model during training is what a plain program sees of a snapshot of it, and looking is free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import builders
from tests.builders import COUNTING, refusal_message
from torch import Tensor
from torch.nn import functional as F

from toeplens.backends import DecoderSource
from toeplens.engine import (
    ExampleRequest,
    ExecutionOptions,
    HeadProbe,
    HeadProbeRow,
    Job,
    examples_of,
    read_ablation,
    run_job,
)
from toeplens.engine import measures as looked_at
from toeplens.lens import AttentionTrace, behaviour
from toeplens.lens.kit.interventions import Metric
from toeplens.model import Decoder
from toeplens.training import RunSpec, TrainingProbe

pytestmark = pytest.mark.usefixtures("no_disk")
HEADS, LAYERS, LENGTH = 2, 2, 8
EXAMPLES, NUM_ABLATED = 40, 20
SHARES = ["positional", "symbolic", "interaction", "variance"]
FIELDS = ["accuracy", "drops", "loss", "signal", "exponent", *SHARES]


@pytest.fixture(autouse=True)
def _several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation in batches of 12 examples."""
    monkeypatch.setitem(looked_at._ABLATION_TOKENS, "cpu", 12 * LENGTH * (HEADS + 1))


def tiny(protocol: str = "paper", task: str = "trigger-distance", encoding: str = "rope", **changes: Any) -> RunSpec:
    fields = {"test_examples": 64} | (COUNTING if task == "trigger-count" else {})
    return builders.tiny(encoding, model={"protocol": protocol}, **fields | changes)


def head_probe(spec: RunSpec, **changes: Any) -> HeadProbe:
    given: dict[str, Any] = {"examples": EXAMPLES, "ablated": NUM_ABLATED}
    return HeadProbe(spec, **given | changes)


def decoder(spec: RunSpec, seed: int = 0) -> Decoder:
    """A model with large weights, so that every head does something."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Decoder(spec.model).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


@torch.no_grad()
def accuracy_without(model: Decoder, spec: RunSpec, silent: tuple[int, int] | None = None) -> float:
    """The share of right answers; a hook zeroes a head's slice of the INPUT of the output projection."""
    width, handles = model.config.head_dim, []
    if silent is not None:
        layer, head = silent

        def silence(_: Any, given: tuple[Tensor]) -> tuple[Tensor]:
            changed = given[0].clone()
            changed[..., head * width : (head + 1) * width] = 0
            return (changed,)

        handles.append(model.block(layer).attention.out.register_forward_pre_hook(silence))
    chosen = examples_of(spec, NUM_ABLATED)
    answers = model(torch.from_numpy(chosen.tokens), torch.from_numpy(chosen.lengths)).argmax(-1).numpy()
    for handle in handles:
        handle.remove()
    return float((answers == chosen.labels)[chosen.labels != spec.ignore_label].mean())


def diagonal_means(model: Decoder, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> tuple[float, np.ndarray]:
    """The mean loss, and each example's diagonal means of dloss/dL as [examples, layers, heads, offsets], by loops.

    L is what goes into torch's softmax on the explicit path, of a causal model whose sequences all have 8 tokens.
    """
    gradients: list[Tensor] = []
    original = torch.Tensor.softmax

    def softmax(logits: Tensor, dim: int) -> Tensor:
        logits.retain_grad()
        gradients.append(logits)
        return original(logits, dim)

    losses, result = [], []
    chosen = examples_of(spec, EXAMPLES)
    assert (chosen.lengths == LENGTH).all()
    for tokens, label in zip(torch.from_numpy(chosen.tokens), torch.from_numpy(chosen.labels), strict=True):
        gradients.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "softmax", softmax)
            loss = F.cross_entropy(model(tokens[None], fused=False), label[None])
        loss.backward()
        assert len(gradients) == LAYERS
        means = np.zeros((LAYERS, HEADS, LENGTH))
        for layer, logits in enumerate(gradients):
            gradient = logits.grad
            assert gradient is not None
            rows = [LENGTH - 1] if gradient.shape[2] == 1 else range(LENGTH)
            for head in range(HEADS):
                for offset in range(LENGTH):
                    seen = [float(gradient[0, head, n, i - offset]) for n, i in enumerate(rows) if i >= offset]
                    means[layer, head, offset] = np.mean(seen)
        losses.append(loss.item())
        result.append(means)
    model.zero_grad()
    return float(np.mean(losses)), np.array(result)


def assert_row_matches(row: dict[str, Any], model: Decoder, spec: RunSpec) -> None:
    """Accuracies are counts over the same number: equal but for a last rounding in float64."""
    intact = accuracy_without(model, spec)
    assert row["accuracy"] == pytest.approx(intact, abs=1e-12)
    drops = [
        [intact - accuracy_without(model, spec, (layer, head)) for head in range(HEADS)] for layer in range(LAYERS)
    ]
    np.testing.assert_allclose(row["drops"], drops, rtol=0, atol=1e-12)


@pytest.mark.parametrize("task", ["trigger-distance", "trigger-count"])
@pytest.mark.parametrize("protocol", ["paper", "released"])
def test_head_effects_match_a_reference(protocol: str, task: str):
    spec = tiny(protocol, task)
    model = decoder(spec)
    row = head_probe(spec).measure(model, 0)
    assert_row_matches(row, model, spec)
    assert list(row) == FIELDS
    assert np.any(row["drops"])


def test_head_types_are_of_the_readout_queries():
    """Shares on the ablated examples are those of a trace of them; an encoding without such a table has none."""
    spec = tiny()
    model = decoder(spec)
    row = head_probe(spec).measure(model, 0)
    examples = examples_of(spec, NUM_ABLATED)
    trace = AttentionTrace(DecoderSource(model), torch.from_numpy(examples.tokens), torch.from_numpy(examples.lengths))
    actual = behaviour(trace, counted="used").to_dict()
    for name in SHARES:  # of blocks of other sizes: the last digits of a layer's input differ
        np.testing.assert_allclose(np.array(row[name], float), np.array(actual[name], float), rtol=1e-6)
    assert row["positional"] != behaviour(trace).to_dict()["positional"]
    other = tiny(encoding="cope")
    assert [head_probe(other).measure(decoder(other), 0)[name] for name in SHARES] == [None] * 4


def test_gradients_match_a_reference(monkeypatch: pytest.MonkeyPatch):
    """In float64; the slope as the formula of the measure has it, from loops over examples."""
    spec = tiny()
    model = decoder(spec).double()
    row = head_probe(spec).measure(model, 0)
    loss, per_example = diagonal_means(model, spec, monkeypatch)
    assert row["loss"] == pytest.approx(loss, rel=1e-10)
    mean = per_example.mean(0)
    np.testing.assert_allclose(row["signal"], np.sqrt((mean**2).sum(-1)), rtol=1e-8)
    energy = (per_example**2).sum(-1)
    sizes = np.array([8, 16, 32])
    for layer in range(LAYERS):
        for head in range(HEADS):
            pairs = [
                per_example[a, layer, head] @ per_example[b, layer, head]
                for a in range(EXAMPLES)
                for b in range(EXAMPLES)
                if a != b
            ]
            share = np.mean(pairs) / energy[:, layer, head].mean()
            slope = np.polyfit(np.log(sizes), np.log(np.sqrt(1 / sizes + (1 - 1 / sizes) * share)), 1)[0]
            assert row["exponent"][layer][head] == pytest.approx(slope, rel=1e-6)


def test_a_model_of_nans_can_be_probed():
    spec = tiny()
    model = decoder(spec)
    with torch.no_grad():
        model.readout.weight.fill_(torch.nan)
    row = head_probe(spec).measure(model, 0)
    assert np.isnan(row["loss"])
    assert np.isnan(row["signal"]).all()
    assert np.isnan(row["exponent"]).all()


def test_the_probes_name_states_its_options():
    """That probing changes no run and that its rows are of so many steps holds for any probe: tests/training."""
    spec = tiny()
    assert isinstance(HeadProbe(spec), TrainingProbe)
    assert HeadProbe(spec).probe_steps(6) == [0, 1, 2, 3, 4, 6]
    name = "heads and what they follow on 64 and gradients on 64 test examples"
    assert HeadProbe(spec).name == name  # the test set has no more
    others = ({}, {"examples": 30}, {"ablated": 10}, {"split": "train+test"})
    assert len({head_probe(spec, **change).name for change in others}) == 4


def test_an_unprobeable_run_is_refused():
    assert refusal_message(lambda: head_probe(tiny(), ablated=-1)) == "ablated must be at least 1, got -1."
    first = int(examples_of(tiny(), 1).labels[0])
    message = refusal_message(lambda: head_probe(tiny(ignore_label=first), ablated=1))
    assert message == "ablated must be large enough to include a counted example (none of the first 1 counts), got 1."


def evaluation_row(*accuracies: float, loss: float = 1.0) -> list[dict[str, Any]]:
    return [{"step": 10 * n, "test_loss": loss, "test_accuracy": each} for n, each in enumerate(accuracies, 1)]


def test_each_probe_step_occurs_once_and_in_order() -> None:
    probe = HeadProbe(tiny(epochs=99, plateau={"patience": 1}), per_event=8)
    metrics = evaluation_row(0.5, 0.8, 0.95, 0.99, *[1.0] * 14)
    actual = {row["step"]: probe.events(metrics[:n]) for n, row in enumerate(metrics, 1)}
    assert {step: names for step, names in actual.items() if names} == {
        20: ["plateau"],
        30: ["able"],
        40: ["twice"],
        80: ["four times"],
        160: ["eight times"],
    }
    assert HeadProbe(tiny(epochs=99)).events(metrics[:2]) == [], "without examples for them there are none"


def test_ablation_at_an_event_matches_the_finished_model(tmp_path: Path) -> None:
    rule = {"gain": 10.0, "patience": 1, "skill": 0.0}
    spec = tiny(epochs=9, schedule="constant", plateau=rule | {"beyond": 2.0})
    run = run_job(Job(spec, "", examples=12, probe=True), tmp_path, ExecutionOptions())
    rows = {name: row for row in run.probe_rows for name in row.get("events", ())}
    assert [(name, row["step"]) for name, row in rows.items()] == [("plateau", 6), ("twice", 12)]
    HeadProbeRow.from_list(run.probe_rows)
    assert "ablation" not in rows["twice"], "the finished model's own ablation follows"
    again = run_job(Job(tiny(epochs=9, schedule="constant", plateau=rule), "", 12), tmp_path, ExecutionOptions())
    metrics: dict[str, Metric] = {"ablation": "accuracy", "by_loss": "loss"}
    for name, metric in metrics.items():
        then, alone = rows["plateau"][name], read_ablation(again.directory, ExampleRequest(12), metric)
        assert alone is not None
        for field in ("drops", "low", "high", "baseline"):
            np.testing.assert_allclose(np.array(then[field]), getattr(alone, field), atol=1e-6)
