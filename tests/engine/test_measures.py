"""What a study's cell gets of a run is what the lens gives by hand; what cannot be measured leaves no record."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import builders
from tests.builders import COUNTING, refusal_message

from toeplens.backends import DecoderGradients, DecoderSource
from toeplens.engine import (
    MEASURES,
    ExampleRequest,
    ablate_run,
    examples_of,
    extrapolate,
    measure_run,
    read_ablation,
    read_measures,
)
from toeplens.lens import AttentionTrace, ablate_heads, behaviour, frequency_use, head_sets, seed_strength
from toeplens.lens.kit.terms import dense_profile
from toeplens.model import Decoder
from toeplens.training import Batches, Run, RunSpec, initial_model, train
from toeplens.utils import InputError, to_json_types
from toeplens.utils.files import nan_to_none

CPU = torch.device("cpu")
TEST, TRAIN = 30, 48


def tiny(encoding: str = "rope", **changes: Any) -> RunSpec:
    sizes = {"train_examples": TRAIN, "test_examples": TEST}
    return builders.tiny(encoding, model={"dropout": 0.0}, **COUNTING | sizes | changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny(), tmp_path_factory.mktemp("trained"))


@pytest.fixture
def own_run(run: Run, tmp_path: Path) -> Run:
    """A trained run of one's own."""
    shutil.copytree(run.directory, tmp_path / run.spec.name, ignore=shutil.ignore_patterns("*-*.json"))
    return Run.open(tmp_path / run.spec.name)


def run_measure(run: Run, name: str, examples: int = TEST, **choices: Any) -> Any:
    """The measure, from the record that it wrote."""
    measure_run(run, name, examples=examples, **choices)
    return measure_run(run, name, examples=examples, **choices)


def as_recorded(content: Any) -> Any:
    return to_json_types(nan_to_none(content))


def batches(run: Run, split: Any = "test", examples: int = TEST) -> list[Any]:
    return list(Batches.of(examples_of(run.spec, examples, split), CPU, run.spec.ignore_label).split(1000))


def trace(run: Run, split: Any = "test", examples: int = TEST, model: Decoder | None = None) -> AttentionTrace:
    data = Batches.of(examples_of(run.spec, examples, split), CPU)
    return AttentionTrace(DecoderSource(model or run.model()), data.tokens, data.lengths)


CALLS: dict[str, Callable[[Run], Any]] = {
    "position": lambda run: ablate_heads(
        DecoderSource(run.model()), batches(run), intervention="position", chance=run.spec.chance, cumulative=False
    ),
    "sets": lambda run: head_sets(DecoderSource(run.model()), batches(run), chance=run.spec.chance),
    "behaviour": lambda run: behaviour(trace(run), counted="used"),
    "frequency": lambda run: frequency_use(trace(run), counted="used"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_measure_matches_the_lens_called_by_hand(own_run: Run, name: str):
    """Of what heads follow, by the queries that the model uses."""
    assert run_measure(own_run, name) == as_recorded(CALLS[name](own_run).to_dict())


def test_toeplitz_has_the_share_and_the_variance_explained(own_run: Run):
    profiles = [dense_profile(layer) for layer in trace(own_run)]
    actual = run_measure(own_run, "toeplitz")
    for name in ("share", "variance_explained"):
        assert actual[name] == as_recorded([getattr(profile, name).tolist() for profile in profiles])


def test_ignored_labels_count_in_no_measure(own_run: Run):
    labels = examples_of(own_run.spec, TEST).labels
    counted = int((labels != 0).sum())
    assert 0 < counted < TEST
    assert [run_measure(own_run, name)["examples"] for name in ("position", "sets", "bands")] == [counted] * 3
    seen = own_run.spec.build_task().dataset("train", TRAIN, own_run.spec.data_seed)
    assert run_measure(own_run, "seed")["strength"]["examples"] == (seen.labels != 0).sum() < TRAIN
    assert run_measure(own_run, "extrapolation")["rows"][0]["examples"] == counted


def test_initial_gradients_are_of_the_initial_model_on_training_examples(own_run: Run):
    with torch.random.fork_rng(devices=[]):
        initial = initial_model(own_run.spec)
    pools = {
        split: Batches.of(
            own_run.spec.build_task().dataset(split, count, own_run.spec.data_seed), CPU, own_run.spec.ignore_label
        )
        for split, count in (("train", TRAIN), ("test", TEST))
    }
    by_hand = {
        (name, split): as_recorded(seed_strength(DecoderGradients(model), pool.split(1000), bootstrap=200).to_dict())
        for (name, model), (split, pool) in itertools.product(
            (("initial", initial), ("trained", own_run.model())), pools.items()
        )
    }
    actual = run_measure(own_run, "seed", examples=7)["strength"]
    assert actual == by_hand["initial", "train"]
    assert len({of["loss"] for of in by_hand.values()}) == 4
    assert actual["examples"] > 7  # whatever is asked


def test_initial_shares_are_of_the_initial_model_on_the_same_examples(own_run: Run):
    torch.manual_seed(7)
    expected = torch.rand(())
    torch.manual_seed(7)
    actual = run_measure(own_run, "beginning")
    assert torch.rand(()) == expected  # as if it had not been measured
    begun = trace(own_run, model=initial_model(own_run.spec))
    follows, use = behaviour(begun, counted="used"), frequency_use(begun, counted="used")
    parts = {"positional": follows.positional, "symbolic": follows.symbolic, "centre": use.centre().numpy()}
    parts = {name: part.tolist() for name, part in parts.items()}
    assert {name: actual[name] for name in parts} == as_recorded(parts)
    assert actual["positional"] != run_measure(own_run, "behaviour")["positional"]


@pytest.mark.parametrize("name", ["behaviour", "position"])
def test_a_measure_uses_the_requested_split(own_run: Run, name: str):
    both = run_measure(own_run, name, 20, split="train+test")
    assert json.loads((own_run.directory / f"{name}.json").read_text())["asked"] == {
        "examples": 20,
        "split": "train+test",
    }
    assert both != run_measure(own_run, name, 20)
    if name == "behaviour":
        assert both == as_recorded(behaviour(trace(own_run, "train+test", 20), counted="used").to_dict())


# ---- what cannot be measured --------------------------------------------------------------------------------------


def all_measures(run: Run, without: tuple[str, ...] = ()) -> list[Any]:
    """All that looks at a trained model, each as a call."""
    names = [name for name in MEASURES if name not in without]
    calls: list[Any] = [lambda name=name: measure_run(run, name, examples=TEST) for name in names]
    return [*calls, lambda: ablate_run(run, examples=TEST), lambda: extrapolate(run, [8], examples=TEST)]


@pytest.mark.parametrize(
    ("changes", "deadline", "words"),
    [
        ({}, 0.0, r"is not finished\. Run the same command to resume\."),
        ({"lr": 1e30}, None, "diverged, so it has no finite weights"),
    ],
)
def test_a_run_without_a_model_records_no_measure(
    tmp_path: Path, changes: dict[str, Any], deadline: float | None, words: str
):
    run = train(tiny(**changes), tmp_path, deadline=deadline)
    assert_refused_without_a_record(run, all_measures(run), words)


def assert_refused_without_a_record(run: Run, calls: list[Any], words: str) -> None:
    before = {path.name for path in run.directory.iterdir()}
    for call in calls:
        assert re.search(words, refusal_message(call))
    assert {path.name for path in run.directory.iterdir()} - {".lock"} <= before


@pytest.mark.parametrize("content", [None, b"half"])
def test_without_weights_no_measure_is_recorded(own_run: Run, content: bytes | None):
    weights = own_run.directory / "model.safetensors"
    weights.unlink()
    if content is not None:
        weights.write_bytes(content)
    trained = all_measures(own_run, without=("seed", "contraction", "beginning"))
    assert_refused_without_a_record(own_run, trained, r"model.safetensors is (missing|damaged).*; delete .* and train")


def test_an_inapplicable_measure_records_the_reason(tmp_path: Path):
    run = train(tiny("alibi"), tmp_path)
    for _ in range(2):
        why = measure_run(run, "bands", examples=TEST)["reason"]
        assert why.startswith("encoding: no layer of this model rotates pairs")


# ---- damaged records ----------------------------------------------------------------------------------------------


def record(run: Run, name: str) -> Path:
    """The record of a measure, made now."""
    ablate_run(run, examples=TEST) if name == "ablation" else measure_run(run, name, examples=TEST)
    return run.directory / f"{name}.json"


@pytest.mark.parametrize(
    ("name", "place", "wrong", "words"),
    [
        ("ablation", ("baseline",), 99.0, "baseline must be from 0 to 1 for accuracies, got 99.0"),
        ("ablation", ("drops", 0, 1), 1.5, "drops must be from -1 to 1 for accuracies"),
        (
            "ablation",
            ("cumulative",),
            [[0.1, 0.1], [0.1, 0.1]],
            r"cumulative must have the size \[L H\+1\] of the other fields, got \[2, 2\]",
        ),
        ("sets", ("order", 0), [1, 1], "order must contain each head of the model once"),
        ("extrapolation", ("rows", 0, "accuracy"), None, "rows.0.examples must match the results, got"),
        ("behaviour", ("positional", 0, 0), 99.0, "positional.0.0 must be .*, got 99.0"),
    ],
)
def test_impossible_values_are_refused(own_run: Run, name: str, place: tuple[Any, ...], wrong: Any, words: str):
    path = record(own_run, name)
    content = inner = json.loads(path.read_text())
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = wrong
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"^{path} is damaged: {words}"):
        read_measures(own_run.directory, [name], ExampleRequest(TEST))


@pytest.mark.parametrize("asked", [None, {"examples": "30", "split": "test"}, {"examples": 30, "split": "x"}])
def test_a_record_states_its_examples(own_run: Run, asked: Any):
    path = record(own_run, "ablation")
    path.write_text(json.dumps({**json.loads(path.read_text()), "asked": asked}))
    for use in (
        lambda: read_ablation(own_run.directory, ExampleRequest(TEST)),
        lambda: ablate_run(own_run, examples=TEST),
    ):
        assert refusal_message(use).startswith(f"{path} is damaged: asked")
