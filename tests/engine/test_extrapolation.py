"""Accuracy on longer texts is what running the model on them by hand gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders import COUNTING, refusal_message, tiny

from toeplens.engine import HeadProbe, extrapolate
from toeplens.tasks import trivial_baselines
from toeplens.training import Run, train


def train_run(out: Path, encoding: str = "rope", **fields: Any) -> Run:
    task = {"length": 8, "vocab_size": 12, "max_distance": 4}
    sizes = {"task_options": task, "train_examples": 48, "test_examples": 30, "epochs": 1}
    return train(tiny(encoding, **sizes | fields), out)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("run"))


def test_accuracy_at_each_length_matches_the_model_run_by_hand(run: Run) -> None:
    actual = extrapolate(run, examples=40)
    assert [row.length for row in actual.rows] == [8, 10, 12, 16, 32]
    assert actual.trained_length == 8
    task, model = run.spec.build_task(), run.model().eval()
    for row in actual.rows:
        test = (task if row.length == 8 else task.at_length(row.length)).dataset("test", 40, run.spec.data_seed)
        assert test.tokens.shape == (40, row.length)
        with torch.no_grad():
            logits = model(torch.from_numpy(test.tokens))
        labels = torch.from_numpy(test.labels)
        right = (logits.argmax(-1) == labels).float()
        assert row.accuracy == pytest.approx(float(right.mean()))
        assert row.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
        assert row.low is not None
        assert row.high is not None
        assert row.low <= float(right.mean()) <= row.high
        assert row.examples == 40
        assert row.chance == 0.25
        assert row.factor == row.length / 8
        assert row.baselines == trivial_baselines(task.dataset("train", 48, run.spec.data_seed), test)
    assert actual.to_dict()["rows"][1]["length"] == 10


def test_a_position_table_gives_the_reason(tmp_path: Path) -> None:
    near, far = extrapolate(train_run(tmp_path, "learned"), [8, 9], examples=20).rows
    assert near.examples == 20
    assert far.accuracy is None
    assert "max_len must be at least the number of tokens, 9" in far.reason


def test_an_impossible_task_length_gives_the_reason(run: Run) -> None:
    (short,) = extrapolate(run, [4], examples=20).rows
    assert short.examples == 0
    assert "length: trigger-distance cannot be built with length 4" in short.reason
    assert refusal_message(lambda: extrapolate(run, [])).startswith("lengths must have at least one entry")


def test_ignored_labels_do_not_count(tmp_path: Path) -> None:
    run = train_run(tmp_path, **COUNTING)
    for row in extrapolate(run, [8, 12], examples=60).rows:
        task = run.spec.build_task().at_length(row.length)
        labels = task.dataset("test", 60, run.spec.data_seed).labels
        assert row.examples == (labels != 0).sum() < 60
        assert row.chance == row.length_chance == pytest.approx(1 / 8)


def test_length_only_chance_is_that_of_the_longer_sequences(tmp_path: Path) -> None:
    released = {"form": "released", "length": 14, "vocab_size": 12, "max_between": 4, "max_side": 3}
    run = train_run(tmp_path, task_options=released, model={"max_len": 14})
    task = run.spec.build_task()
    near, far = extrapolate(run, [14, 28], examples=20).rows
    assert near.length_chance == task.length_chance()
    assert far.length_chance == task.at_length(28).length_chance() != task.length_chance()


@pytest.mark.parametrize("name", ["number-hops", "letter-hops"])
def test_accuracy_by_number_of_hops_matches_the_model_run_by_hand(tmp_path: Path, name: str) -> None:
    options = {"length": 8, "links": 4, "hops": 3, "min_hops": 2, "distractors": 3}
    model = {"vocab_size": 40, "num_classes": 4}
    run = train(tiny(task=name, task_options=options, model=model, train_examples=48, test_examples=30), tmp_path)
    task, model_of_run = run.spec.build_task(), run.model().eval()
    probed = HeadProbe(run.spec, examples=30, ablated=8).measure(model_of_run, 0)["groups"]
    for row in extrapolate(run, [8, 12], examples=60).rows:
        test = task.at_length(row.length).unseen_dataset(task, 60, run.spec.data_seed)
        with torch.no_grad():
            right = model_of_run(torch.from_numpy(test.tokens)).argmax(-1).numpy() == test.labels
        stated = test.tokens[:, -2] - test.tokens[:, -2].min()
        assert {*stated} == {0, 1}
        expected = {f"{hops} hops": pytest.approx(right[stated == hops - 2].mean()) for hops in (2, 3)}
        assert row.groups == expected
        assert row.accuracy == pytest.approx(right.mean())
        assert probed.keys() == row.groups.keys()
