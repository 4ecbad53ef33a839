"""One epoch is what a hand computation says it is; the schedule is transformers'; and a small model learns."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import builders
from tests.builders import COUNTING, refusal_message
from torch.nn import functional as F
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

from toeplens.model import Decoder
from toeplens.tasks import Examples
from toeplens.training import (
    Batches,
    RunSpec,
    batches,
    cosine_with_warmup,
    environment,
    evaluate,
    plan_execution,
    train,
)
from toeplens.training.spec import constant_with_warmup
from toeplens.utils import EnvironmentFailure

CPU = torch.device("cpu")
DISTANCE_TASK: dict[str, Any] = {}
PADDED_TASK: dict[str, Any] = {
    "task_options": {"form": "released", "length": 14, "vocab_size": 12, "max_between": 4, "max_side": 3},
    "model": {"max_len": 14},
}
COUNTING_TASK = COUNTING | {"ignore_label": None}
each_task = pytest.mark.parametrize(
    "fields", [DISTANCE_TASK, PADDED_TASK, COUNTING_TASK], ids=["distance", "padded", "count"]
)


def tiny(fields: dict[str, Any] = DISTANCE_TASK, **changes: Any) -> RunSpec:
    fields_given = {"test_examples": 19, "lr": 1e-3} | fields | changes
    return builders.tiny(**fields_given | {"model": {"dropout": 0.0} | fields_given.get("model", {})})


def initial_model(spec: RunSpec) -> Decoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return Decoder(spec.model)


def examples(spec: RunSpec, split: Any) -> Examples:
    return spec.build_task().dataset(
        split, spec.train_examples if split == "train" else spec.test_examples, spec.data_seed
    )


def reference_metrics(model: Decoder, data: Examples, ignore_label: int | None = None) -> tuple[float, float]:
    """Mean loss and accuracy, example by example, in Python numbers."""
    losses, rights = [], []
    for tokens, label, length in zip(data.tokens, data.labels, data.lengths, strict=True):
        if label == ignore_label:
            continue
        with torch.no_grad():
            logits = model.eval()(torch.tensor(tokens[None]), torch.tensor([length]))[0].double().tolist()
        top = max(logits)
        losses.append(top + math.log(sum(math.exp(value - top) for value in logits)) - logits[label])
        rights.append(logits.index(top) == label)
    return sum(losses) / len(losses), sum(rights) / len(rights)


@each_task
def test_train_metrics_use_the_first_training_examples_without_dropout(fields: dict[str, Any], tmp_path: Path) -> None:
    spec = tiny(fields, model={**fields.get("model", {}), "dropout": 0.3})
    run = train(spec, tmp_path)
    data = examples(spec, "train")
    seen = Examples(*(each[:19] for each in (data.tokens, data.labels, data.lengths)))
    loss, accuracy = reference_metrics(run.model(), seen, spec.ignore_label)
    assert run.result["fit_loss"] == pytest.approx(loss, rel=1e-4)
    assert run.result["fit_accuracy"] == pytest.approx(accuracy)
    assert run.result["fit_loss"] != pytest.approx(run.result["test_loss"], rel=1e-3)


@given(total=st.integers(1, 300), share=st.floats(0, 0.99))
def test_the_schedule_matches_transformers(total: int, share: float):
    warmup = int(share * total)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    cosine = cosine_with_warmup(warmup, total), get_cosine_schedule_with_warmup(optimizer, warmup, total)
    constant = constant_with_warmup(warmup), get_constant_schedule_with_warmup(optimizer, warmup)
    for ours, theirs in (cosine, constant):
        for step in range(total + 1):
            assert ours(step) == pytest.approx(theirs.lr_lambdas[0](step), abs=1e-12)


@each_task
@pytest.mark.parametrize("size", [7, 64])
def test_evaluation_does_not_depend_on_batch_size(fields: dict[str, Any], size: int):
    spec = tiny(fields)
    model, data = initial_model(spec), examples(spec, "test")
    assert evaluate(model, Batches.of(data, CPU), size) == pytest.approx(reference_metrics(model, data), rel=1e-5)


def test_evaluation_of_no_counted_examples_is_zero():
    spec = tiny(COUNTING_TASK)
    data = examples(spec, "train")
    only = Batches.of(data[data.labels == 3], CPU, ignore_label=3)
    assert evaluate(initial_model(spec), only, 16) == (0, 0)


# ---- an epoch -----------------------------------------------------------------------------------------------------


def test_ignored_labels_do_not_count_in_training(tmp_path: Path):
    label = 0
    spec = tiny(COUNTING_TASK, lr=1e-20, weight_decay=0.0, ignore_label=label)
    row = train(spec, tmp_path).metrics[0]
    loss, accuracy = reference_metrics(initial_model(spec), examples(spec, "train"), label)
    test_loss, test_accuracy = reference_metrics(initial_model(spec), examples(spec, "test"), label)
    assert (row["train_loss"], row["test_loss"]) == pytest.approx((loss, test_loss), rel=1e-5)
    assert (row["train_accuracy"], row["test_accuracy"]) == pytest.approx((accuracy, test_accuracy))


def test_a_batch_of_only_ignored_examples_is_not_divergence(tmp_path: Path):
    """Its mean loss is 0/0."""
    spec = tiny(COUNTING_TASK, batch_size=1, ignore_label=0, epochs=1)
    assert (examples(spec, "train").labels == 0).any()
    run = train(spec, tmp_path)
    assert run.status == "complete"
    assert all(math.isfinite(run.metrics[0][key]) for key in ("train_loss", "test_loss"))


def reference_run(spec: RunSpec) -> tuple[Decoder, list[float]]:
    """The run without our loop: torch's plain AdamW, every batch's gradient from single examples."""
    model = initial_model(spec).train()
    data = examples(spec, "train")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, foreach=False
    )
    factor = cosine_with_warmup(int(spec.warmup * spec.total_steps), spec.total_steps)
    losses, step = [], 0
    for epoch in range(spec.epochs):
        order = np.random.Generator(np.random.Philox(np.random.SeedSequence((spec.seed, epoch)))).permutation(len(data))
        sums = []
        for start in range(0, len(data), spec.batch_size):
            rows = order[start : start + spec.batch_size]
            optimizer.param_groups[0]["lr"] = spec.lr * factor(step)
            optimizer.zero_grad()
            example_losses = [
                F.cross_entropy(
                    model(torch.tensor(data.tokens[[row]]), torch.tensor(data.lengths[[row]])),
                    torch.tensor(data.labels[[row]]),
                )
                for row in rows
            ]
            torch.stack(example_losses).mean().backward()
            optimizer.step()
            sums += [loss.item() for loss in example_losses]
            step += 1
        losses.append(sum(sums) / len(sums))
    return model, losses


@pytest.mark.parametrize("fields", [DISTANCE_TASK, PADDED_TASK], ids=["distance", "padded"])
def test_a_run_matches_plain_adamw_on_mean_batch_losses(fields: dict[str, Any], tmp_path: Path):
    spec = tiny(fields, lr=1e-2, weight_decay=0.1)
    assert spec.train_examples % spec.batch_size
    run = train(spec, tmp_path)
    model, losses = reference_run(spec)
    assert [row["train_loss"] for row in run.metrics] == pytest.approx(losses, rel=1e-4)
    for ours, theirs in zip(run.model().parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tokens_at_once", [1, 40])
def test_gradient_accumulation_gives_the_same_run(tokens_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = tiny(COUNTING, encoding="t5", train_examples=50, epochs=3)
    full = train(spec, tmp_path / "whole")
    monkeypatch.setitem(batches.TOKENS_PER_PASS, "cpu", tokens_at_once)
    parts = train(spec, tmp_path / "parts")
    for (name, ours), theirs in zip(parts.model().named_parameters(), full.model().parameters(), strict=True):
        if name.endswith("qkv.bias"):  # a bias of the keys moves all logits of a query alike: its gradient is rounding
            ours, theirs = ours[32:], theirs[32:]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # float32, twelve steps of AdamW
    for ours, theirs in zip(parts.metrics, full.metrics, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=1e-5)
        assert ours["train_accuracy"] == theirs["train_accuracy"]


def test_the_data_seed_changes_only_the_data(tmp_path: Path):
    specs = [tiny(data_seed=seed, lr=1e-20, weight_decay=0.0) for seed in (0, 1)]
    models = [train(spec, tmp_path).model() for spec in specs]
    assert all(torch.allclose(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
    assert not np.array_equal(examples(specs[0], "train").tokens, examples(specs[1], "train").tokens)


def test_the_saved_weights_are_the_last_evaluated(tmp_path: Path):
    spec = tiny(PADDED_TASK, lr=1e-2)
    run = train(spec, tmp_path)
    model = run.model()
    assert not model.training
    loss, accuracy = evaluate(model, Batches.of(examples(spec, "test"), CPU), 16)
    assert (loss, accuracy) == (run.result["test_loss"], run.result["test_accuracy"])
    assert (loss, accuracy) == (run.metrics[-1]["test_loss"], run.metrics[-1]["test_accuracy"])


def test_a_small_model_learns_a_small_task(tmp_path: Path):
    model = {"vocab_size": 8, "d_model": 32, "d_ff": 64, "num_heads": 4}
    many = {"train_examples": 2000, "test_examples": 500, "epochs": 12, "batch_size": 64, "lr": 5e-3, "seed": 1}
    spec = tiny(task_options={"length": 8, "vocab_size": 8}, model=model, **many)
    result = train(spec, tmp_path).result
    assert result["test_accuracy"] > 0.9 > 6 * spec.chance
    assert result["train_accuracy"] > 0.9


# ---- how a run is executed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "gpus", "compiler", "says"),
    [
        (("cpu", "auto", "auto"), 1, True, "cpu, float32, eager (compiling is slower on a CPU at these sizes)"),
        (("cpu", "on", "bf16"), 1, True, "cpu, bfloat16 products, torch.compile (requested)"),
        (("auto", "off", "auto"), 0, True, "cpu, float32, eager (requested)"),
        (("auto", "auto", "auto"), 1, True, "cuda, bfloat16 products, torch.compile (GPU with a compiler)"),
        (("cuda", "auto", "auto"), 1, False, "cuda, bfloat16 products, eager (no C++ compiler)"),
        (("cuda:1", "auto", "auto"), 1, True, "device: this machine has 1 GPU, got 'cuda:1'."),
        (("cuda", "auto", "auto"), 0, True, "device: this machine has no usable GPU, got 'cuda'."),
        (("cpu", "on", "auto"), 1, False, "compile: this machine has no C++ compiler, got 'on'."),
    ],
)
def test_execution_options_are_used_or_reported_missing(
    monkeypatch: pytest.MonkeyPatch, asked: tuple[Any, Any, Any], gpus: int, compiler: bool, says: str
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(shutil, "which", lambda name: name if compiler else None)
    if ", got" not in says:
        assert plan_execution(*asked).describe() == says
        return
    with pytest.raises(EnvironmentFailure) as caught:
        plan_execution(*asked)
    assert (str(caught.value), caught.value.exit_code) == (says, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("gpu", "auto", "auto"), "device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        (("meta", "auto", "auto"), "device must be auto, cpu, cuda or cuda:N, got 'meta'"),
        (("cpu:1", "auto", "auto"), "device must be auto, cpu, cuda or cuda:N, got 'cpu:1'"),
        (("cpu", "of", "auto"), "got 'of'; did you mean 'off'"),
    ],
)
def test_unknown_execution_options_are_refused(given: tuple[Any, Any, Any], message: str):
    assert message in refusal_message(lambda: plan_execution(*given))


def test_the_environment_names_the_gpu_in_use(monkeypatch: pytest.MonkeyPatch):
    """And not the one that is the current one, which is the first unless somebody set it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {getattr(device, 'index', 0) or 0}")
    named = {name: environment(plan_execution(name, "off", "auto"))["gpu"] for name in ("cuda", "cuda:1", "cpu")}
    assert named == {"cuda": "GPU 0", "cuda:1": "GPU 1", "cpu": None}
    assert environment()["gpu"] == "GPU 0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment()["gpu"] is None


def test_bfloat16_products_change_the_numbers_a_little(tmp_path: Path):
    exact, rough = (train(tiny(precision=p, lr=1e-20), tmp_path).result["test_loss"] for p in ("float32", "bf16"))
    assert exact != rough
    assert exact == pytest.approx(rough, rel=0.02)


COMPILED_SCRIPT = """
import json, sys
import torch
from toeplens.training import run_spec, train
given = json.loads(sys.argv[1])
torch.set_num_threads(1)
spec, out, on = run_spec(**given["spec"]), given["out"], {"device": "cpu", "compile": "on"}
runs = [train(spec, out + "/eager", device="cpu", compile="off"), train(spec, out + "/compiled", **on)]
train(spec, out + "/parts", deadline=0.0, **on)
runs.append(train(spec, out + "/parts", **on))
print(json.dumps([run.metrics for run in runs]))
"""


@pytest.mark.heavy
def test_compiled_losses_match_eager_losses(tmp_path: Path):
    """The last batch is partial, so the compiled run pads it with rows that count nowhere.

    In a process of its own: torch.compile cannot see through the shape checks that these tests run under.
    """
    spec = tiny(PADDED_TASK, epochs=3, lr=1e-2, ignore_label=3)
    given = json.dumps({"spec": spec.model_dump(mode="json"), "out": str(tmp_path)})
    done = subprocess.run([sys.executable, "-c", COMPILED_SCRIPT, given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    eager, compiled, parts = json.loads(done.stdout)
    for a, b, c in zip(eager, compiled, parts, strict=True):
        for key in ("train_loss", "test_loss", "train_accuracy", "test_accuracy"):
            assert b[key] == pytest.approx(a[key], rel=1e-3)
            assert c[key] == pytest.approx(b[key])
