"""Runs of language models: a label at every token, text that is part of what the run is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders import StopAfter, refusal_message, tiny
from torch.nn import functional as F

from toeplens.tasks.language import _verified_corpus
from toeplens.training import Run, RunSpec, run_spec, train, train_batched
from toeplens.utils import InputError

TASK: dict[str, Any] = {"words": 20, "documents": 60, "document": 64, "length": 16}


def make_spec(**changes: Any) -> RunSpec:
    model = {"vocab_size": 21, "max_len": 16, "readout": "each", "dropout": 0.0} | changes.pop("model", {})
    fields = {"task": "markov-language", "task_options": TASK, "train_examples": 60, "test_examples": 12}
    return tiny(**fields | changes, model=model)


def test_losses_are_means_over_all_tokens_of_the_validation_split(tmp_path: Path):
    spec = make_spec()
    run = train(spec, tmp_path)
    model = run.model()
    data = spec.build_task().dataset("validation", spec.test_examples, spec.data_seed)
    with torch.no_grad():
        logits = model(torch.from_numpy(data.tokens))
    labels = torch.from_numpy(data.labels)
    assert run.result["test_loss"] == pytest.approx(
        float(F.cross_entropy(logits.flatten(0, 1), labels.flatten())), rel=1e-5
    )
    assert run.result["test_accuracy"] == pytest.approx(float((logits.argmax(-1) == labels).double().mean()))
    assert run.metrics[-1]["train_loss"] < run.metrics[0]["train_loss"]


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path: Path):
    spec = make_spec(model={"dropout": 0.2})
    uninterrupted = train(spec, tmp_path / "whole")
    assert train(spec, tmp_path / "parts", should_stop=StopAfter(5)).status == "stopped"
    resumed = train(spec, tmp_path / "parts")
    for name, tensor in uninterrupted.model().state_dict().items():
        assert torch.equal(tensor, resumed.model().state_dict()[name])


def test_batched_training_matches_training_alone(tmp_path: Path):
    specs = [make_spec(seed=seed, data_seed=seed) for seed in (1, 2)]
    together = train_batched(specs, tmp_path / "one")
    for spec, run in zip(specs, together, strict=True):
        alone = train(spec, tmp_path / "alone")
        assert run.result["test_loss"] == pytest.approx(alone.result["test_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"readout": "last"}}, "model.readout must be 'each' for this task, got 'last'"),
        ({"model": {"causal": False}}, "model.causal must be true for next-token labels"),
        (
            {"task": "trigger-distance", "task_options": {"length": 8, "vocab_size": 12}},
            "model.readout must not be 'each' for this task, got 'each'",
        ),
        ({"model": {"max_len": 8}}, "model.max_len must be at least 16"),
    ],
)
def test_incompatible_fields_are_refused(changes: dict[str, Any], words: str):
    assert words in refusal_message(lambda: make_spec(**changes))


def _text(folder: Path, last: str = "end") -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(80):
        (folder / f"{number:02}.txt").write_text(
            f"{number} {'word ' * (20 + number % 7)}{last if number == 79 else ''}"
        )
    return folder


def text_spec(folder: Path) -> RunSpec:
    options = {"text": [str(folder)], "length": 16}
    sizes = {"vocab_size": 256}
    return make_spec(task="language", task_options=options, train_examples=40, test_examples=8, epochs=1, model=sizes)


def test_the_text_is_part_of_a_runs_identity(tmp_path: Path):
    spec = text_spec(_text(tmp_path / "text"))
    assert len(spec.task_options["sha256"]) == 64
    assert run_spec(**json.loads(json.dumps(spec.content))).name == spec.name
    assert train(spec, tmp_path / "runs", should_stop=StopAfter(1)).status == "stopped"
    _text(tmp_path / "text", last="another end")
    _verified_corpus.cache_clear()  # text is looked at once a process
    again = text_spec(tmp_path / "text")
    assert again.name != spec.name
    with pytest.raises(InputError, match=r"text: .* has changed: the recorded sha256 is [0-9a-f]{64}, it is now"):
        train(Run.open(tmp_path / "runs" / spec.name).spec, tmp_path / "runs")


def test_a_finished_run_can_be_read_without_its_text(tmp_path: Path):
    folder = _text(tmp_path / "text")
    spec = text_spec(folder)
    train(spec, tmp_path / "runs")
    for path in folder.iterdir():
        path.unlink()
    run = Run.open(tmp_path / "runs" / spec.name)
    assert run.status == "complete"
    assert run.result["guess"] == run.result["chance"] == pytest.approx(spec.chance, abs=1e-9)
    assert run.model().config.readout == "each"
