"""A run's name is a hash of all that decides its result, and of nothing else; what cannot be run is refused at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import builders
from tests.builders import refusal_message

from toeplens.model import Decoder, DecoderConfig, decoder_config
from toeplens.training import RunSpec, run_spec
from toeplens.utils import write_json

MODEL: dict[str, Any] = builders.MODEL | {"num_classes": 12, "dropout": 0.1}
FIELDS: dict[str, Any] = {
    "task": "trigger-distance",
    "task_options": {"length": 8, "vocab_size": 12, "num_triggers": 2},
    "model": MODEL,
    "train_examples": 40,
    "test_examples": 16,
    "epochs": 3,
    "batch_size": 16,
}
OTHER_FIELDS: dict[str, Any] = {
    "task": "trigger-count",
    "task_options": {"length": 7, "vocab_size": 12, "num_triggers": 2},
    "model": MODEL | {"encoding": "alibi"},
    "train_examples": 41,
    "test_examples": 17,
    "epochs": 4,
    "batch_size": 17,
    "lr": 2e-4,
    "betas": (0.9, 0.98),
    "weight_decay": 2e-5,
    "warmup": 0.07,
    "ignore_label": 1,
    "seed": 43,
    "data_seed": 43,
    "precision": "float32",
    "schedule": "constant",
    "average": 0.9,
    "evaluations": 2,
    "plateau": {"gain": 0.02, "patience": 1},
}
OTHER_MODEL: dict[str, Any] = {
    "protocol": "released",
    "vocab_size": 13,
    "num_classes": 13,
    "d_model": 32,
    "d_ff": 17,
    "num_layers": 3,
    "num_heads": 4,
    "max_len": 9,
    "encoding": "alibi",
    "encoding_options": {"base": 500.0},
    "input_encoding": "sinusoidal",
    "input_encoding_options": {"base": 500.0},
    "causal": False,
    "pad_mask": False,
    "key_value_source": "embeddings",
    "readout": "mean",
    "final_norm": False,
    "parallel": True,
    "activation": "gelu",
    "dropout": 0.2,
    "dropout_on": ("ffn",),
    "attention_scale": 1.0,
}


def spec(**changes: Any) -> RunSpec:
    return run_spec(**FIELDS | changes)


def test_equivalent_specs_have_the_same_name():
    for same in (
        spec(),
        run_spec(**dict(reversed(FIELDS.items()))),
        spec(task_options={"vocab_size": 12, "num_triggers": 2, "length": 8}),
        spec(lr=1e-4, betas=[0.98, 0.9], precision="auto"),  # its defaults, written out
        spec(model=MODEL | {"causal": True, "protocol": "paper"}),
        spec(model=decoder_config(**MODEL)),
    ):
        assert (same, same.name) == (spec(), spec().name)


def test_every_field_has_an_alternative_value():
    assert set(OTHER_FIELDS) == set(RunSpec.model_fields)
    assert set(OTHER_MODEL) == set(DecoderConfig.model_fields)


def test_every_field_changes_the_name():
    specs = [spec(**{field: value}) for field, value in OTHER_FIELDS.items() if field != "model"]
    for field, value in OTHER_MODEL.items():
        base = MODEL | ({"input_encoding": "sinusoidal"} if field == "input_encoding_options" else {})
        specs.append(spec(model=base | {field: value}))
    names = [each.name for each in (spec(), *specs)]
    assert len(set(names)) == len(names)


@given(lr=st.floats(1e-12, 1e6), weight_decay=st.floats(0, 1e6), warmup=st.floats(0, 0.99), seed=st.integers(0, 2**63))
def test_a_spec_round_trips(
    tmp_path_factory: pytest.TempPathFactory, lr: float, weight_decay: float, warmup: float, seed: int
):
    original = spec(lr=lr, weight_decay=weight_decay, warmup=warmup, seed=seed)
    path = tmp_path_factory.mktemp("spec") / "spec.json"
    write_json(path, original.model_dump(mode="json"), record=False)
    assert run_spec(**json.loads(path.read_text())) == original


@pytest.mark.heavy
def test_a_name_is_the_same_in_another_process():
    code = f"from toeplens.training import run_spec; print(run_spec(**{FIELDS!r}).name)"
    environment = os.environ | {"PYTHONHASHSEED": "123"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert other.stdout.strip() == spec().name


RECORDED_NAMES = {  # the names that runs at 1/sqrt(d) had before encodings stated a scale
    "t5": "c0ec8d07cdebd2c8",
    "rope": "ea45d5d05de91370",
}


@pytest.mark.parametrize("encoding", RECORDED_NAMES)
def test_specs_from_before_published_scales_keep_their_names(encoding: str):
    recorded = spec(model=MODEL | {"encoding": encoding, "attention_scale": None})
    assert recorded.name == RECORDED_NAMES[encoding]
    assert Decoder(recorded.model).block(0).attention.scale == recorded.model.head_dim**-0.5
    new = spec(model=MODEL | {"encoding": encoding})
    assert (new.name == recorded.name) == (encoding == "rope")


def test_a_spec_draws_no_random_numbers():
    before = torch.get_rng_state()
    for encoding in ("relative-table", "learned", "random-fixed", "mla"):
        spec(model=MODEL | {"encoding": encoding}).build_task()
    assert torch.equal(before, torch.get_rng_state())


def test_the_defaults_are_table_3():
    paper = run_spec(model={})
    assert (paper.lr, paper.betas, paper.weight_decay, paper.warmup) == (1e-4, (0.98, 0.9), 1e-5, 0.06)
    assert (paper.epochs, paper.batch_size, paper.seed, paper.data_seed) == (100, 512, 42, 42)
    assert (paper.train_examples, paper.test_examples) == (70_000, 30_000)
    assert (paper.task, paper.ignore_label) == ("trigger-distance", None)
    model = paper.model
    assert (model.vocab_size, model.num_classes, model.max_len) == (574, 574, 128)
    assert (model.d_model, model.d_ff, model.num_heads, model.num_layers) == (256, 512, 16, 6)
    assert (model.protocol, model.encoding, model.dropout) == ("paper", "rope", 0.1)


def test_chance_excludes_the_ignored_label():
    assert spec().chance == 1 / 7
    assert spec(ignore_label=1).chance == 1 / 6


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        (
            {"model": MODEL | {"max_len": 7}},
            "model.max_len must be at least 8, the tokens of the task's sequences, got 7.",
        ),
        (
            {"model": MODEL | {"vocab_size": 11}},
            "model.vocab_size must be at least 12, the token ids of the task, got 11.",
        ),
        (
            {"model": MODEL | {"num_classes": 7}},
            "model.num_classes must be at least 8, as labels go up to 7, got 7.",
        ),
        ({"betas": (1.0, 0.9)}, "betas must be at least 0 and under 1, got (1.0, 0.9)"),
        ({"evaluations": 4}, "evaluations must be at most 3, the steps of an epoch, got 4."),
        ({"plateau": {"patience": 3}}, "plateau.patience must be less than 3, the evaluations of the run, got 3."),
        ({"epochs": 0}, "epochs must be at least 1, got 0."),
        ({"lr": float("inf")}, "lr must be a finite number, got inf."),
        ({"seed": -1}, "seed must be at least 0, got -1."),
        ({"epochs": 10**5000}, "epochs must be at most 1000000000, got a value of type int"),
        (
            {"model": MODEL | {"encoding_options": {"a": [{"b": float("-inf")}]}}},
            "model.encoding_options.a must be serializable as JSON",
        ),
        ({"learning_rate": 1e-3}, "learning_rate is not a field"),
        ({"model": MODEL | {"num_heads": 3}}, "model.d_model must be divisible by num_heads (3), got 16."),
        (
            {"task_options": {"length": 8, "vocab_size": 12, "max_distance": 1}, "ignore_label": 1},
            "ignore_label must not be 1, the task's only label",
        ),
    ],
)
def test_an_invalid_field_is_named(changes: dict[str, Any], start: str):
    assert refusal_message(lambda: spec(**changes)).startswith(start)
