"""What is seen of a model during training is what a plain program sees of a snapshot of it, and looking is free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import builders
from tests.builders import COUNTING, refusal
from torch import Tensor
from torch.nn import functional as F

from toeplens.engine import Asked, ExecutionOptions, HeadWatch, Job, Watched, examples_of, read_ablation, run_job
from toeplens.engine import measures as looked_at
from toeplens.lens import AttentionTrace, behaviour
from toeplens.lens.kit.interventions import Metric
from toeplens.model import Decoder
from toeplens.sources import DecoderSource
from toeplens.training import RunSpec, Watcher

pytestmark = pytest.mark.usefixtures("no_disk")
HEADS, LAYERS, LENGTH = 2, 2, 8
EXAMPLES, ABLATED = 40, 20
SHARES = ["positional", "symbolic", "interaction", "variance"]
FIELDS = ["accuracy", "drops", "loss", "signal", "exponent", *SHARES]


@pytest.fixture(autouse=True)
def _several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation in batches of 12 examples."""
    monkeypatch.setitem(looked_at._REPLAYED_TOKENS, "cpu", 12 * LENGTH * (HEADS + 1))


def tiny(protocol: str = "paper", task: str = "trigger-distance", encoding: str = "rope", **changes: Any) -> RunSpec:
    fields = {"test_examples": 64} | (COUNTING if task == "trigger-count" else {})
    return builders.tiny(encoding, model={"protocol": protocol}, **fields | changes)


def watcher(spec: RunSpec, **changes: Any) -> HeadWatch:
    given: dict[str, Any] = {"examples": EXAMPLES, "ablated": ABLATED}
    return HeadWatch(spec, **given | changes)


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
def right(model: Decoder, spec: RunSpec, silent: tuple[int, int] | None = None) -> float:
    """The share of right answers; a hook zeroes a head's slice of the INPUT of the output projection."""
    width, handles = model.config.head_dim, []
    if silent is not None:
        layer, head = silent

        def silence(_: Any, given: tuple[Tensor]) -> tuple[Tensor]:
            changed = given[0].clone()
            changed[..., head * width : (head + 1) * width] = 0
            return (changed,)

        handles.append(model.block(layer).attention.out.register_forward_pre_hook(silence))
    chosen = examples_of(spec, ABLATED)
    answers = model(torch.from_numpy(chosen.tokens), torch.from_numpy(chosen.lengths)).argmax(-1).numpy()
    for handle in handles:
        handle.remove()
    return float((answers == chosen.labels)[chosen.labels != spec.ignore_label].mean())


def diagonal_means(model: Decoder, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> tuple[float, np.ndarray]:
    """The mean loss, and each example's diagonal means of dloss/dL as [examples, layers, heads, offsets], by loops.

    L is what goes into torch's softmax on the explicit path, of a causal model whose sequences all have 8 tokens.
    """
    kept: list[Tensor] = []
    original = torch.Tensor.softmax

    def softmax(logits: Tensor, dim: int) -> Tensor:
        logits.retain_grad()
        kept.append(logits)
        return original(logits, dim)

    losses, found = [], []
    chosen = examples_of(spec, EXAMPLES)
    assert (chosen.lengths == LENGTH).all()
    for tokens, label in zip(torch.from_numpy(chosen.tokens), torch.from_numpy(chosen.labels), strict=True):
        kept.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "softmax", softmax)
            loss = F.cross_entropy(model(tokens[None], fused=False), label[None])
        loss.backward()
        assert len(kept) == LAYERS
        means = np.zeros((LAYERS, HEADS, LENGTH))
        for layer, logits in enumerate(kept):
            gradient = logits.grad
            assert gradient is not None
            rows = [LENGTH - 1] if gradient.shape[2] == 1 else range(LENGTH)
            for head in range(HEADS):
                for offset in range(LENGTH):
                    seen = [float(gradient[0, head, n, i - offset]) for n, i in enumerate(rows) if i >= offset]
                    means[layer, head, offset] = np.mean(seen)
        losses.append(loss.item())
        found.append(means)
    model.zero_grad()
    return float(np.mean(losses)), np.array(found)


def matches(row: dict[str, Any], model: Decoder, spec: RunSpec) -> None:
    """Accuracies are counts over the same number: equal but for a last rounding in float64."""
    intact = right(model, spec)
    assert row["accuracy"] == pytest.approx(intact, abs=1e-12)
    drops = [[intact - right(model, spec, (layer, head)) for head in range(HEADS)] for layer in range(LAYERS)]
    np.testing.assert_allclose(row["drops"], drops, rtol=0, atol=1e-12)


@pytest.mark.parametrize("task", ["trigger-distance", "trigger-count"])
@pytest.mark.parametrize("protocol", ["paper", "released"])
def test_heads_are_worth_what_a_plain_program_finds(protocol: str, task: str):
    spec = tiny(protocol, task)
    model = decoder(spec)
    row = watcher(spec).look(model, 0)
    matches(row, model, spec)
    assert list(row) == FIELDS
    assert np.any(row["drops"])


def test_what_heads_follow_is_told_of_the_queries_that_the_model_uses():
    """Shares on the ablated examples are those of a trace of them; an encoding without such a table has none."""
    spec = tiny()
    model = decoder(spec)
    row = watcher(spec).look(model, 0)
    shown = examples_of(spec, ABLATED)
    trace = AttentionTrace(DecoderSource(model), torch.from_numpy(shown.tokens), torch.from_numpy(shown.lengths))
    found = behaviour(trace, counted="used").to_dict()
    for name in SHARES:  # of blocks of other sizes: the last digits of a layer's input differ
        np.testing.assert_allclose(np.array(row[name], float), np.array(found[name], float), rtol=1e-6)
    assert row["positional"] != behaviour(trace).to_dict()["positional"]
    other = tiny(encoding="cope")
    assert [watcher(other).look(decoder(other), 0)[name] for name in SHARES] == [None] * 4


def test_gradients_are_what_a_plain_program_finds(monkeypatch: pytest.MonkeyPatch):
    """In float64; the slope as the formula of the measure has it, from loops over examples."""
    spec = tiny()
    model = decoder(spec).double()
    row = watcher(spec).look(model, 0)
    loss, each = diagonal_means(model, spec, monkeypatch)
    assert row["loss"] == pytest.approx(loss, rel=1e-10)
    mean = each.mean(0)
    np.testing.assert_allclose(row["signal"], np.sqrt((mean**2).sum(-1)), rtol=1e-8)
    energy = (each**2).sum(-1)
    sizes = np.array([8, 16, 32])
    for layer in range(LAYERS):
        for head in range(HEADS):
            pairs = [
                each[a, layer, head] @ each[b, layer, head] for a in range(EXAMPLES) for b in range(EXAMPLES) if a != b
            ]
            share = np.mean(pairs) / energy[:, layer, head].mean()
            slope = np.polyfit(np.log(sizes), np.log(np.sqrt(1 / sizes + (1 - 1 / sizes) * share)), 1)[0]
            assert row["exponent"][layer][head] == pytest.approx(slope, rel=1e-6)


def test_a_model_of_nans_is_looked_at_too():
    spec = tiny()
    model = decoder(spec)
    with torch.no_grad():
        model.readout.weight.fill_(torch.nan)
    row = watcher(spec).look(model, 0)
    assert np.isnan(row["loss"])
    assert np.isnan(row["signal"]).all()
    assert np.isnan(row["exponent"]).all()


def test_it_is_a_watcher_whose_name_says_what_it_looks_at():
    """That looking changes no run and that its rows are of so many steps is any watcher's: tests/training."""
    spec = tiny()
    assert isinstance(HeadWatch(spec), Watcher)
    assert HeadWatch(spec).moments(6) == [0, 1, 2, 3, 4, 6]
    name = "heads and what they follow on 64 and gradients on 64 test examples"
    assert HeadWatch(spec).name == name  # the test set has no more
    others = ({}, {"examples": 30}, {"ablated": 10}, {"split": "train+test"})
    assert len({watcher(spec, **change).name for change in others}) == 4


def test_what_cannot_be_looked_at_is_refused():
    assert refusal(lambda: watcher(tiny(), ablated=-1)) == "ablated must be at least 1, got -1."
    first = int(examples_of(tiny(), 1).labels[0])
    message = refusal(lambda: watcher(tiny(ignore_label=first), ablated=1))
    assert message == "ablated must be large enough to include a counted example (none of the first 1 counts), got 1."


def evaluated(*accuracies: float, loss: float = 1.0) -> list[dict[str, Any]]:
    return [{"step": 10 * n, "test_loss": loss, "test_accuracy": each} for n, each in enumerate(accuracies, 1)]


def test_each_moment_comes_once_and_in_order() -> None:
    watch = HeadWatch(tiny(epochs=99, plateau={"patience": 1}), whole=8)
    metrics = evaluated(0.5, 0.8, 0.95, 0.99, *[1.0] * 14)
    found = {row["step"]: watch.events(metrics[:n]) for n, row in enumerate(metrics, 1)}
    assert {step: names for step, names in found.items() if names} == {
        20: ["plateau"],
        30: ["able"],
        40: ["twice"],
        80: ["four times"],
        160: ["eight times"],
    }
    assert HeadWatch(tiny(epochs=99)).events(metrics[:2]) == [], "without examples for such looks there are none"


def test_heads_are_silenced_at_such_a_moment_as_in_the_finished_model(tmp_path: Path) -> None:
    rule = {"gain": 10.0, "patience": 1, "skill": 0.0}
    spec = tiny(epochs=9, schedule="constant", plateau=rule | {"beyond": 2.0})
    run = run_job(Job(spec, "", examples=12, watch=True), tmp_path, ExecutionOptions())
    rows = {name: row for row in run.watched for name in row.get("events", ())}
    assert [(name, row["step"]) for name, row in rows.items()] == [("plateau", 6), ("twice", 12)]
    Watched.from_list(run.watched)
    assert "ablation" not in rows["twice"], "the finished model's own ablation follows"
    again = run_job(Job(tiny(epochs=9, schedule="constant", plateau=rule), "", 12), tmp_path, ExecutionOptions())
    metrics: dict[str, Metric] = {"ablation": "accuracy", "by_loss": "loss"}
    for name, metric in metrics.items():
        then, alone = rows["plateau"][name], read_ablation(again.directory, Asked(12), metric)
        assert alone is not None
        for field in ("drops", "low", "high", "baseline"):
            np.testing.assert_allclose(np.array(then[field]), getattr(alone, field), atol=1e-6)
